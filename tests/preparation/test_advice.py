"""`advise` finds the layer or the scaling at fault, by measuring, and leaves the model
unchanged."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path

import numpy
import pytest
import torch
import warm_process
from torch import nn
from transformers import BatchEncoding

import fp8_backends
from fp8_backends.advice import GradientGap, together, with_layers, with_scaling
from fp8_backends.compute.torchao.backend import cpu_multiplies_rowwise
from fp8_backends.convert.conversion import prepared_roots

SPIKE, UNEVEN = 2.0**24, 2.0**19


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks(count=11, spiked=(), uneven=()):
    """Build a residual model with the same function in FP32: `up` reads one very large channel in
    spiked blocks, and writes one in uneven blocks, which one scale for a row represents."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(count)))
    with torch.no_grad():
        for index in spiked:
            model[index].norm.weight[0] *= SPIKE
            model[index].up.weight[:, 0] /= SPIKE
        for index in uneven:
            model[index].up.weight[0] *= UNEVEN
            model[index].up.bias[0] *= UNEVEN
            model[index].down.weight[:, 0] /= UNEVEN
    return model


def squares(model, x):
    return (model(x) - x.roll(1, -1)).square().mean()


def batches(count=2, magnitude=1.0):
    return [
        torch.randn(32, 32, generator=torch.Generator().manual_seed(n)) * magnitude**n
        for n in range(count)
    ]


@pytest.mark.nightly
def test_faulty_layer_beyond_every_scaling_stays_in_high_precision():
    tried = []
    model = blocks(spiked=[3])
    advice = fp8_backends.advise(
        model, batches(1), "native:dynamic", loss=squares, progress=tried.append
    )
    assert advice.recipe.layers == {"3.up": "bf16"} and advice.verdict.startswith(
        f"3.up in {advice.around}"
    )
    assert advice.chosen.gap <= 0.5 * advice.given.gap and advice.chosen.kept >= 0.95
    assert advice.recipe.name == "native:dynamic" and len(tried) - 1 <= 40
    worst = max((each for each in advice.alone if len(each.names) == 1), key=lambda each: each.gap)
    assert worst.names == ("3.up",) and f"3.up in {advice.around}" in str(advice)
    # again on other batches, by another measure
    check = GradientGap(model, batches(4)[2:], "bf16", squares)
    gaps = [check.of(*check.prepared(each)).gap for each in (advice.given.recipe, advice.recipe)]
    assert gaps[1] <= 0.5 * gaps[0]
    assert json.loads(json.dumps(advice.to_dict(), allow_nan=False))["advised"] is True
    assert "<table" in advice._repr_html_()


@pytest.mark.nightly
def test_another_scaling_of_layers_comes_before_high_precision(tmp_path):
    model = blocks(21, uneven=[6])
    advice = fp8_backends.advise(model, batches(2), "native:dynamic", loss=squares)
    assert advice.recipe.layers == {"6.up": "native:rowwise", "6.down": "native:rowwise"}
    assert advice.verdict.startswith("6.(up, down) in rowwise: 0.4") and advice.chosen.kept == 1
    assert advice.recipe.name == "native:dynamic"
    # again on other batches, by another measure
    check = GradientGap(model, batches(4)[2:], "bf16", squares)
    gaps = [check.of(*check.prepared(each)).gap for each in (advice.given.recipe, advice.recipe)]
    assert gaps[1] <= 0.5 * gaps[0]
    advice.save(tmp_path / "recipe.yaml")
    again = fp8_backends.advise(
        model, batches(2), tmp_path / "recipe.yaml", loss=squares, max_trials=1
    )
    assert again.given.recipe == advice.recipe and again.given.gap == advice.chosen.gap
    comments = [
        line for line in (tmp_path / "recipe.yaml").read_text().splitlines() if line.startswith("#")
    ]
    assert (
        advice.verdict in comments[0]
        and f"gap {again.given.gap:.4f}" in comments[1]
        and "6.up" in comments[2]
    )


@pytest.mark.nightly
def test_few_layers_stay_in_high_precision():
    """In high precision three layers halve the gap, and two of them go back to another scaling."""
    model = blocks(40, spiked=[3], uneven=[6])
    advice = fp8_backends.advise(model, batches(1), "native:dynamic", loss=squares, max_trials=80)
    words = dict(advice.recipe.layers)
    assert dict.fromkeys(words, "bf16") in [trial.recipe.layers for trial in advice.trials]
    assert (
        words.pop("3.up") == "bf16"
        and words.keys() == {"6.up", "6.down"}
        and "bf16" not in words.values()
    )
    assert (
        advice.chosen.gap <= 0.5 * advice.given.gap and f"3.up in {advice.around}" in advice.verdict
    )


def unlike(magnitude):
    """Build a model without norms for batches of different magnitude: an amax of the last batch
    does not predict the next."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(part for _ in range(3) for part in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 32)
    )
    data = [x * magnitude ** (n % 2) for n, x in enumerate(batches(6))]

    def loss(model, x):
        return (model(x) / x.abs().mean()).square().mean()

    return model, data, loss


def test_helpful_scaling_is_found():
    model, data, loss = unlike(1024.0)
    advice = fp8_backends.advise(model, data[:2], "native:delayed", loss=loss)
    assert (
        advice.recipe.name == "native:dynamic"
        and advice.chosen.kept == 1
        and not advice.recipe.exclude
    )
    assert [each.recipe.name for each in advice.trials] == ["native:delayed", "native:dynamic"]
    # again on other batches, by another measure
    check = GradientGap(model, data[2:4], advice.around, loss)
    gaps = [check.of(*check.prepared(each)).gap for each in (advice.given.recipe, advice.recipe)]
    assert gaps[1] <= 0.5 * gaps[0]
    assert "native:dynamic" in str(advice) and "scaling dynamic" in advice.verdict


def test_layers_in_high_precision_leave_the_patterns_of_fast_accumulation():
    recipe = fp8_backends.resolve({"backend": "native", "fast_accumulation": ["a", "b"]})
    assert with_layers(recipe, {"a": "native:rowwise", "b": "bf16"}).fast_accumulation == ("a",)
    assert with_layers(recipe, {"a": "bf16", "b": "bf16"}).fast_accumulation is True


@pytest.mark.skipif(not cpu_multiplies_rowwise(), reason="torch refuses the trial left out")
def test_a_healthy_model_keeps_its_recipe():
    model, data, loss = unlike(1.0)
    advice = fp8_backends.advise(model, data[:1], "ao", loss=loss)
    assert (
        advice.chosen is None
        and advice.recipe == fp8_backends.resolve("ao")
        and "keep the recipe" in advice.verdict
    )
    assert (advice.floor.gap > 0) == (advice.around != "fp32")  # as on a CPU without bf16 products
    assert advice.floor.gap < advice.given.gap < 0.5
    # TorchAO's rule with weight gradients in high precision keeps two of three products in FP8
    (left_out,) = [each for each in advice.trials if each.why_not]
    assert (
        left_out.recipe.scaling == "rowwise_with_gw_hp"
        and 0.6 < left_out.kept < 0.7
        and left_out.gap == math.inf
    )
    assert advice.best.kept >= 0.95 and "too little" in str(advice)


class Everything(nn.Module):
    """Include every state a pass could change: dropout, running statistics, a hook, a part in
    evaluation."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.frozen = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.still, self.down = nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        noise = torch.randn_like(x) * random.random() * numpy.random.rand()
        hidden = nn.functional.dropout(self.norm(self.up(x)), 0.3, self.training) + 0.1 * noise
        return self.down(self.still(self.frozen(hidden))).square().mean()


def state_of(model, optimizer):
    """Return every state that a pass or a preparation could change, as comparable values."""
    tensors = {**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}}
    tensors |= {
        f"{i}.{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()
    }
    modules = [
        (type(m), m.training, sorted(m.__dict__), len(m._forward_hooks)) for m in model.modules()
    ]
    draws = (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()))
    return (
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()},
        modules,
        draws,
    )


@pytest.mark.parametrize("prepared_with", [None, "msamp:O2"])
def test_advise_leaves_model_optimizer_and_rng_unchanged(prepared_with):
    torch.manual_seed(0)
    model = Everything()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if prepared_with:
        fp8_backends.prepare(model, optimizer, prepared_with)
    model(torch.randn(16, 32)).backward()
    optimizer.step()
    model.still.eval()
    model.up.register_forward_hook(lambda *_: None)
    parameters, before = list(model.parameters()), state_of(model, optimizer)
    data = batches(1)
    spec = None if prepared_with else "msamp:O1"
    advice = fp8_backends.advise(model, data, spec, max_trials=3)
    assert advice.given.recipe.name == (prepared_with or "msamp:O1") and 0 < advice.given.gap < 1
    after = state_of(model, optimizer)
    assert all(mine is yours for mine, yours in zip(parameters, model.parameters(), strict=True))
    assert before[1:] == after[1:] and before[0].keys() == after[0].keys()
    for name, tensor in before[0].items():
        assert (
            torch.equal(tensor, after[0][name])
            if isinstance(tensor, torch.Tensor)
            else tensor == after[0][name]
        )


def test_gap_matches_its_definition():
    model, (x,) = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)), batches(1)
    found = GradientGap(model, [x], "bf16", squares)
    twin, total, size = copy.deepcopy(model), 0.0, 0
    squares(model, x).backward()
    with torch.autocast("cpu", torch.bfloat16):
        squares(twin, x).backward()
    for mine, exact in zip(twin.parameters(), model.parameters(), strict=True):
        total += exact.numel() * ((mine.grad - exact.grad).norm() / exact.grad.norm()).item() ** 2
        size += exact.numel()
    assert (
        found.floor.gap == pytest.approx(math.sqrt(total / size), rel=1e-4)
        and not found.not_counted
    )
    fp8_backends.prepare(twin, None, "native:dynamic")
    assert (
        found.of(*found.prepared(fp8_backends.resolve("native:dynamic"))).gap > 3 * found.floor.gap
    )


class Keyed(nn.Module):
    """Attend with a key bias of no effect."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        attended = nn.functional.scaled_dot_product_attention(
            self.query(x), self.key(x), self.value(x)
        )
        return attended.square().mean()


def test_rounding_noise_gradient_is_excluded():
    torch.manual_seed(0)
    found = GradientGap(Keyed(), [batches(1)[0][None]], "bf16")
    assert found.not_counted == ["key.bias"] and found.floor.gap < 0.1


def test_non_finite_gradient_is_an_infinite_gap():
    """Plant it in the loss: no recipe here makes one from finite numbers."""

    def loss(model, x):
        is_fp8 = type(model[0].up) is not nn.Linear
        return squares(model, x) * (math.nan if is_fp8 else 1.0)

    advice = fp8_backends.advise(blocks(1), batches(1), "native", loss=loss, max_trials=2)
    assert advice.given.gap == math.inf and advice.chosen is None and "train in" in advice.verdict
    assert advice.to_dict()["trials"][0]["gap"] is None and "inf" in str(advice)


def test_search_continues_after_failed_trial():
    def loss(model, x):
        if any(prepared.recipe.scaling == "rowwise" for _, _, prepared in prepared_roots(model)):
            raise RuntimeError("out of memory")
        return squares(model, x)

    advice = fp8_backends.advise(blocks(1), batches(1), "native", loss=loss)
    (failed,) = [each for each in advice.trials if each.why_not == "out of memory"]
    assert failed.change == "scaling rowwise" and advice.trials[-1] is not failed


def test_batches_consumed_by_the_loss_are_measured():
    def measured(loss):
        return fp8_backends.advise(blocks(1), [batch], "native", loss=loss, max_trials=1).given.gap

    (x,) = batches(1)
    batch = BatchEncoding({"x": x.clone(), "y": x.clone()})
    with torch.no_grad():
        used_up = measured(
            lambda model, batch: (model(batch.pop("x").mul_(2.0)) - batch["y"]).square().mean()
        )
        plain = measured(
            lambda model, batch: (model(batch["x"] * 2.0) - batch["y"]).square().mean()
        )
    assert used_up == plain and torch.equal(batch["x"], x)


def test_no_more_trials_than_allowed_are_measured():
    tried = []
    advice = fp8_backends.advise(
        blocks(spiked=[3]), batches(1), "native", loss=squares, max_trials=5, progress=tried.append
    )
    assert len(tried) == 6 and advice.chosen is None and len(advice.alone) <= 4  # FP32 is no trial


def test_each_trial_changes_one_setting():
    given = {
        "backend": "native:delayed+msamp:O2",
        "margin": 1,
        "exclude": "a",
        "rounding": "nearest",
    }
    recipe = fp8_backends.resolve({**given, "layers": {"b.c": "native:mxfp8", "b.*": "bf16"}})
    layers = {"b.c": "native:rowwise", "d": "bf16", "b.*": "bf16"}  # the first match wins
    changed = with_layers(recipe, {"b.c": "native:rowwise", "d": "bf16"})
    assert changed.to_kwargs() == {**recipe.to_kwargs(), "backend": recipe.name, "layers": layers}
    assert list(changed.layers) == list(layers)
    rowwise = with_scaling(recipe, "rowwise")
    assert (rowwise.name, rowwise.exclude, rowwise.rounding) == (
        "native:rowwise+msamp:O2",
        ("a",),
        "nearest",
    )
    assert "margin" not in rowwise.given  # unread by rowwise
    assert together(["a.0.q", "a.0.k"]) == "a.0.(q, k)" and together(["a.x", "b.x"]) == "a.x, b.x"


FIELDS = {
    "backend": "native:delayed+msamp:O2",
    "layers": {"*.up": "native:mxfp8", "first": 1},
    "exclude": ["3.*"],
    "override_linear_precision": (False, False, True),
    "monitor_every": 5,
    "amax_compute_algo": "max",
}


def test_advice_is_saved_as_a_recipe_file(tmp_path, monkeypatch):
    advice = fp8_backends.advise(blocks(4), batches(1), FIELDS, loss=squares, max_trials=1)
    monkeypatch.chdir(tmp_path)
    advice.save("recipe.yml")
    assert fp8_backends.resolve("recipe.yml") == advice.recipe == fp8_backends.resolve(FIELDS)
    text = (tmp_path / "recipe.yml").read_text()
    assert text.startswith(f"# fp8-backends advise: {advice.verdict}\n# gap {advice.given.gap:.4f}")
    for path, said in (
        ("recipe.json", "ends in .yaml"),
        ("no/where.yaml", "cannot be written: No such file"),
    ):
        with pytest.raises(fp8_backends.FP8BackendError, match=said):
            advice.save(path)
    spec = {"backend": "native", "module_filter_func": lambda module, name: True}
    with pytest.raises(fp8_backends.FP8BackendError, match="Python object of module_filter_func"):
        fp8_backends.advise(blocks(1), batches(1), spec, loss=squares, max_trials=1).save(
            "recipe.yaml"
        )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batches": []}, "no batch"),
        ({"loss": None}, "returns no loss"),
        ({"loss": lambda model, x: squares(model, x).item()}, "requires a gradient"),
        ({"loss": lambda model, x: squares(model, x) * math.nan}, "not finite in FP32"),
        ({"min_flops_share": 1.5}, "min_flops_share"),
        ({"max_trials": 0}, "max_trials"),
        ({"model": blocks(1).requires_grad_(False)}, "trains"),
        ({"model": (blocks(1), None)}, "must be a torch.nn.Module"),
        ({"spec": {"backend": "native", "autocast_dtype": "fp16"}}, "fp16"),
        ({"spec": "natve"}, "did you mean"),
        ({"model": nn.Sequential(nn.Conv1d(1, 1, 1))}, "no layer of this model"),
    ],
)
def test_unmeasurable_model_is_an_error_with_reason(arguments, match):
    defaults = {"model": blocks(1), "batches": batches(1), "spec": "native", "loss": squares}
    given = defaults | arguments
    if "Conv" in str(given["model"]):
        given |= {
            "batches": [torch.randn(2, 1, 4)],
            "loss": lambda model, x: model(x).square().mean(),
        }
    with pytest.raises(fp8_backends.FP8BackendError, match=match):
        fp8_backends.advise(given.pop("model"), given.pop("batches"), given.pop("spec"), **given)


@pytest.mark.nightly
def test_benchmark_meets_its_claims_on_quick_models(tmp_path):
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "advise.py"
    ended = warm_process.run(
        str(script), "--quick", "--json", str(tmp_path / "record.json"), timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (record,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    assert record["machine"]["date"] and [each["expected"] for each in record["results"]] == [
        "layers",
        "scaling",
    ]
    assert all(each["advised"] and each["ratio_on_others"] <= 0.5 for each in record["results"])
