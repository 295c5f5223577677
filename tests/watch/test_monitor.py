"""The monitor reports the casts of a training, and changes nothing."""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8_backends
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.errors import RecipeError
from fp8_backends.formats.scaling import GRAD_OUTPUT, INPUT, delayed_scale
from fp8_backends.tools import monitor as samples
from fp8_backends.watch import monitor

BACKENDS = ("native:dynamic", "native:delayed", "native:blockwise", "msamp:O3", "ao:rowwise")


class Net(nn.Module):
    """Stack two layers; the first may be recomputed in backward."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(64, 128), nn.Linear(128, 64), reentrant

    def forward(self, x):
        run = lambda x: self.up(x).relu()  # noqa: E731
        hidden = (
            run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)
        )
        return self.down(hidden)


def prepared(backend, file, every=1, reentrant=None, **fields):
    torch.manual_seed(0)
    model = Net(reentrant)
    spec = {"backend": backend, "monitor_every": every, "monitor_file": str(file), **fields}
    return fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), spec)


def step(model, optimizer, seed=0, microbatches=1, tokens=32):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(microbatches):
        x = torch.randn(tokens, 64, generator=generator, requires_grad=True)
        loss = (model(x) - x).square().mean()
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def hooks_of(model):
    return [
        len(hooks) for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_monitoring_changes_no_bit_of_training(backend, tmp_path):
    watched, alone = (prepared(backend, tmp_path / "watched", every) for every in (2, 0))
    for seed in range(5):
        assert step(*watched, seed, microbatches=2) == step(*alone, seed, microbatches=2)
    for ours, theirs in zip(
        watched[0].state_dict().values(), alone[0].state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert [record["step"] for record in records(tmp_path / "watched")] == [2, 4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_layer_has_its_input_weight_and_gradient(backend, tmp_path):
    model, optimizer = prepared(backend, tmp_path / "file")
    for seed in range(3):
        step(model, optimizer, seed, microbatches=3)
    record = records(tmp_path / "file")[-1]
    stored = {"gradient", "exp_avg", "exp_avg_sq"} if "msamp" in backend else set()
    for name, sizes in (("up", (64, 128)), ("down", (128, 64))):
        found = record["tensors"][name]
        assert found.keys() == {"input", "weight", "grad_output"} | stored
        elements = [found[each]["elements"] for each in ("input", "weight", "grad_output")]
        assert elements == [3 * 32 * sizes[0], 64 * 128, 3 * 32 * sizes[1]]
        for entry in found.values():
            low, high = entry["exponents"]
            assert len(entry["binades"]) == high - low + 1 and entry["amax"] > 0
        assert found["input"]["format"] == "e4m3" and 28 < found["input"]["sqnr_db"] < 34
    assert (
        record["recipe"] == model.down.__dict__["_fp8_conversion"].recipe.name
        and record["not_seen"] == []
    )


def test_recorded_scales_match_the_step(tmp_path):
    """Delayed scaling uses scales of earlier steps, which clip a grown tensor."""
    model, optimizer = prepared(
        "native:delayed", tmp_path / "file", every=4, amax_compute_algo="most_recent"
    )
    for seed in range(3):
        step(model, optimizer, seed)
    seen = {}
    model.down.register_forward_hook(
        lambda layer, args, _: seen.update(
            input=args[0].abs().max(), states=layer.fp8_scaling.clone()
        )
    )
    model.up.weight.data.mul_(4.0)  # the input of `down` grows
    step(model, optimizer, 3)
    found = records(tmp_path / "file")[0]["tensors"]["down"]
    assert found["input"]["scale"] == pytest.approx(
        delayed_scale(seen["states"], INPUT).item(), rel=1e-8
    )
    assert found["grad_output"]["scale"] == pytest.approx(
        delayed_scale(seen["states"], GRAD_OUTPUT).item(), rel=1e-8
    )
    assert found["input"]["amax"] == pytest.approx(seen["input"].item(), rel=1e-8)
    assert found["input"]["saturated"] > 0.01 and found["input"]["sqnr_db"] < 25


def test_weight_statistics_describe_codes_of_forward(tmp_path):
    model, optimizer = prepared("msamp:O3", tmp_path / "file", every=2)
    step(model, optimizer)
    ((_, root, of_root),) = prepared_roots(model)
    codes, scale_inv = of_root.compute.weight_codes(root.up)
    master, weight = root.up.weight.master.dequantize(torch.float32), codes.float() * scale_inv
    noise = (weight.double() - master.double()).square().sum()
    step(model, optimizer)
    found = records(tmp_path / "file")[0]["tensors"]["up"]["weight"]
    expected = 10 * torch.log10(master.double().square().sum() / noise).item()
    assert found["scale"] == 1 / scale_inv.item() and found["sqnr_db"] == pytest.approx(
        expected, abs=0.006
    )


def test_steps_between_samples_have_no_hooks(tmp_path):
    model, optimizer = prepared("native:dynamic", tmp_path / "file", every=3)
    step(model, optimizer)
    between = hooks_of(model)
    counts = []
    for _ in range(5):
        counts.append(hooks_of(model) != between)
        step(model, optimizer)
    assert counts == [False, True, False, False, True]  # steps 2 to 6
    off, its_optimizer = prepared("native:dynamic", tmp_path / "file", every=0)
    step(off, its_optimizer)
    assert hooks_of(off) == between and monitor.monitor_of(its_optimizer) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forward_counts_once(reentrant, tmp_path):
    plain, again = tmp_path / "plain", tmp_path / "again"
    for file, kind in ((plain, None), (again, reentrant)):
        model, optimizer = prepared("native:dynamic", file, reentrant=kind)
        for seed in range(2):
            step(model, optimizer, seed)
    assert records(plain)[0]["tensors"] == records(again)[0]["tensors"]


def test_evaluation_forwards_and_copies_do_not_count(tmp_path):
    model, optimizer = prepared("native:dynamic", tmp_path / "file")
    step(model, optimizer)
    with torch.no_grad():
        model(torch.randn(8, 64))
        model.eval()(torch.randn(8, 64))
    model.train()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(torch.randn(8, 64)).sum().backward()
    step(model, optimizer)
    assert records(tmp_path / "file")[0]["tensors"]["up"]["input"]["elements"] == 32 * 64


def test_uncalled_layer_is_reported_as_not_seen(tmp_path):
    model, optimizer = prepared("native:dynamic", tmp_path / "file")
    step(model, optimizer)
    model.forward = lambda x: model.down(nn.functional.linear(x, model.up.weight))
    step(model, optimizer)
    (record,) = records(tmp_path / "file")
    assert list(record["tensors"]) == ["down"] and record["not_seen"] == ["up"]


def test_log_names_high_error_casts_once(tmp_path, caplog):
    """A scale 2**6 too large clips, and one 2**20 too small flushes."""
    for margin, what in ((-6, "over 1 % clipped:"), (20, "over 5 % flushed to zero:")):
        model, optimizer = prepared("native:delayed", tmp_path / "file", margin=margin)
        with caplog.at_level(logging.WARNING, "fp8_backends"):
            caplog.clear()
            for seed in range(4):
                step(model, optimizer, seed)
        lines = [record.getMessage() for record in caplog.records if what in record.getMessage()]
        assert "step 2" in lines[0] and sum("up input" in line for line in lines) == 1, caplog.text


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_values_give_no_healthy_figure(backend, tmp_path, caplog):
    """Check trackers, file and log of a training with NaN weights, or only a NaN scale."""
    model, optimizer = prepared(backend, tmp_path / "file")
    sampled = []
    monitor.monitor_of(optimizer).report = lambda values, step: sampled.append((step, values))
    for seed in range(3):
        step(model, optimizer, seed)
    model.up.bias.data[3] = torch.nan
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        for seed in range(2):
            step(model, optimizer, seed)
    assert [values["fp8/not_finite"] for at, values in sampled if at < 4] == [0, 0]
    spoiled = dict(sampled)[4]
    assert spoiled["fp8/not_finite"] >= 3
    assert all(
        math.isnan(spoiled[f"fp8/{name}"]) for name in ("worst_sqnr", "saturated", "flushed")
    )
    read = samples.read_samples(tmp_path / "file")
    assert next(iter(read.not_finite)) == 4 and read.not_finite[4][0] == "down input"
    entry = read.records[2]["tensors"]["down"]["grad_output"]
    assert [entry[key] for key in ("amax", "saturated", "flushed", "sqnr_db", "binades")] == [
        None
    ] * 4 + [[]]
    assert "step 4: inf or NaN: " in caplog.text and ", first down input" in caplog.text


def test_monitor_file_errors_never_stop_training(tmp_path, caplog):
    file = tmp_path / "runs" / "file"
    model, optimizer = prepared("native:dynamic", file)
    for seed in range(3):
        step(model, optimizer, seed)
    file.write_text(file.read_text() + '{"step": 4, "rec')  # as after a kill
    step(model, optimizer)
    assert len(samples.read_samples(file).records) == 3
    file.unlink()
    file.mkdir()
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        for seed in range(3):
            step(model, optimizer, seed)
    assert caplog.text.count("statistics cannot be written") == 1


@pytest.mark.parametrize("backend", ["ao:tensorwise", "native:delayed"])
def test_model_restored_within_sampled_step_is_not_sampled(backend, tmp_path):
    model, optimizer = prepared(backend, tmp_path / "file")
    for seed in range(2):
        step(model, optimizer, seed)
    fp8_backends.restore(model)
    for seed in range(3):
        step(model, optimizer, seed)
    assert len(records(tmp_path / "file")) == 1 and not any(hooks_of(model))


def test_latest_recipe_sets_the_sampling(tmp_path):
    model, optimizer = prepared("native:dynamic", tmp_path / "first", every=100)
    fields = {"monitor_file": str(tmp_path / "second"), "monitor_every": 2}
    fp8_backends.prepare(model, optimizer, {"backend": "native:dynamic", **fields})
    for seed in range(4):
        step(model, optimizer, seed)
    assert [list(record["tensors"]) for record in records(tmp_path / "second")] == [
        ["up", "down"]
    ] * 2
    fp8_backends.prepare(model, optimizer, "native:dynamic")
    for seed in range(4):
        step(model, optimizer, seed)
    assert len(records(tmp_path / "second")) == 2 and not (tmp_path / "first").exists()
    with pytest.raises(RecipeError, match="they differ in exclude"):
        fp8_backends.prepare(model, optimizer, {"backend": "native:dynamic", "exclude": "down"})


def test_a_tensor_of_zeros_has_no_scale(tmp_path):
    model, optimizer = prepared("native:blockwise", tmp_path / "file")
    for _ in range(2):
        model(torch.zeros(32, 64)).sum().backward()
        optimizer.step()
    entry = records(tmp_path / "file")[0]["tensors"]["up"]["input"]
    assert (str(entry["amax"]), entry["scale"]) == ("0.0", None)


def stance():
    return torch._dynamo.eval_frame._stance.stance


@pytest.mark.nightly
def test_sampled_step_runs_eagerly_without_recompilation(tmp_path):
    model, optimizer = prepared("native:dynamic", tmp_path / "file", every=3)
    compiled = torch.compile(model, backend="eager")
    torch._dynamo.reset()
    stances, frames = [], []
    for seed in range(5):
        stances.append(stance())
        step(compiled, optimizer, seed)
        frames.append(torch._dynamo.utils.counters["frames"]["ok"])
    assert stances == ["default", "default", "force_eager", "default", "default"]
    assert frames[0] == frames[-1]
    assert records(tmp_path / "file")[0]["tensors"]["up"]["input"]["elements"] == 32 * 64
    assert stance() == "force_eager"  # before step 6, which never comes
    del model, compiled, optimizer
    gc.collect()
    assert stance() == "default"


class Tracker(GeneralTracker):
    name, requires_logging_directory, tracker = "list", False, None

    def __init__(self):
        self.logged = []

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **_):
        self.logged.append((values, step))


def test_trackers_get_a_summary(tmp_path):
    recipe = fp8_backends.FP8RecipeKwargs(
        backend="native:dynamic",
        monitor_every=2,
        monitor_file=tmp_path / "file",
        autocast_dtype="fp32",
    )
    tracker = Tracker()
    accelerator = Accelerator(
        mixed_precision="fp8", kwargs_handlers=[recipe], log_with=tracker, cpu=True
    )
    accelerator.init_trackers("run")
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for seed in range(2):
        step(model, optimizer, seed)
    ((values, at),) = tracker.logged
    names = (
        "share",
        "worst_sqnr",
        "saturated",
        "flushed",
        "not_finite",
        "sqnr/up",
        "sqnr/down",
    )
    assert at == 2 and values.keys() == {f"fp8/{name}" for name in names}
    (record,) = records(tmp_path / "file")
    sqnr = [entry["sqnr_db"] for found in record["tensors"].values() for entry in found.values()]
    assert values["fp8/worst_sqnr"] == min(sqnr)
