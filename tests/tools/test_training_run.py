"""Test the training runs of a comparison, their reference and their measurements."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed as dist
from tools.comparing import checks_by_name, compared, planted, tiny_settings
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, wait_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from widths import nightly

import fp8_backends
from fp8_backends.errors import RecipeError
from fp8_backends.tools.compare import command as compare
from fp8_backends.tools.compare import training_run
from fp8_backends.tools.compare.measuring import autocast_copies, peak_memory, sent_bytes
from fp8_backends.tools.compare.training_run import Run
from fp8_backends.tools.compare.workload import load_text

MOVED = "every trainable parameter moved"
PRODUCTS = "every eligible layer ran its products in FP8"
GRADIENTS = "gradients at the initial weights point where bf16's do"
FINITE = "every loss is finite"
BACKENDS = ("native:dynamic", "native:delayed", "ao:tensorwise", "msamp:O2", "msamp:O3")
SAME_START = "same initial weights and data order as bf16"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("compare"), *BACKENDS, "fp32")


@pytest.mark.nightly
def test_every_backend_passes_every_check_except_gap(comparison):
    for backend in BACKENDS:
        passed = checks_by_name(comparison, backend)
        assert {name for name in passed if passed[name]} >= {
            MOVED,
            PRODUCTS,
            GRADIENTS,
            FINITE,
            SAME_START,
        }


@pytest.mark.nightly
def test_baselines_have_no_fp8_check(comparison):
    assert (
        PRODUCTS not in checks_by_name(comparison, "fp32")
        and checks_by_name(comparison, "fp32")[GRADIENTS]
    )
    assert set(checks_by_name(comparison, "bf16")) == {MOVED, FINITE}


def test_pairs_share_weights_and_data_and_seeds_do_not(comparison):
    starts = {
        b: [run["start_checksum"] for run in found["runs"]]
        for b, found in comparison.results["backends"].items()
    }
    assert len({tuple(checksums) for checksums in starts.values()}) == 1
    assert len(set(starts["bf16"])) == 2


@pytest.mark.nightly
def test_training_lowers_the_loss_in_every_backend(tmp_path):
    comparison = compared(tmp_path, "native:rowwise", steps=40, seeds=1, lr=5e-3)
    for found in comparison.results["backends"].values():
        losses = found["runs"][0]["losses"]
        assert len(losses) == 40 and sum(losses[-5:]) / 5 < losses[0] - 1.0


def test_bytes_per_parameter_include_copies(comparison):
    rows = {
        row["backend"]: row["bytes_per_parameter"] for row in comparison.results["summary"]["rows"]
    }
    assert rows["fp32"] == pytest.approx(16)
    # bf16 copies are 2 bytes a Linear element, E4M3 copies 1; rows differ by this much of the
    # converted share
    assert rows["msamp:O2"] < rows["msamp:O3"] < rows["ao:tensorwise"]
    assert 16 < rows["ao:tensorwise"] < rows["native:dynamic"] < rows["bf16"] < 18


@pytest.mark.parametrize("backend", ["native:dynamic", nightly("msamp:O2")])
def test_a_frozen_layer_fails(tmp_path, backend):
    # storing a weight in FP16 rounds it without moving it
    comparison = planted("frozen", tmp_path, backend, seeds=1)
    passed = checks_by_name(comparison, backend)
    assert not passed[MOVED] and passed[GRADIENTS] and comparison.failed
    assert checks_by_name(comparison, "bf16")[MOVED]
    assert comparison.results["backends"][backend]["runs"][0]["unmoved"] == [
        "model.layers.0.self_attn.q_proj.weight"
    ]


def test_fp16_scales_its_loss_on_a_cpu(tmp_path):
    settings = tiny_settings(tmp_path)
    run = training_run.Run(settings, load_text(settings.text), "fp16", seed=0)
    scale = run.accelerator.scaler.get_scale()
    run.backward(0)
    norm = torch.stack([p.grad.norm() for p in run.bare.parameters()]).norm()
    assert scale > 1 and norm > scale / 10  # gradients of a loss of about 5.5, scaled
    run.update()  # the first learning rate is zero
    run.optimizer.zero_grad()
    run.step(1)
    assert not run.unmoved()


def test_the_learning_rate_warms_up_and_ends_at_zero(tmp_path):
    settings = tiny_settings(tmp_path, steps=20)
    run = training_run.Run(settings, load_text(settings.text), "fp32", seed=0)
    (factor,) = run.scheduler.scheduler.lr_lambdas
    factors = [factor(step) for step in range(20)]
    assert factors[0] == 0.0 and factors[10] == 1.0 and factors[19] == pytest.approx(0.0, abs=1e-9)
    assert factors[:11] == sorted(factors[:11]) and factors[10:] == sorted(
        factors[10:], reverse=True
    )


def asked(*options):
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return compare.settings_from(parser.parse_args(options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's reference is bf16")
def test_the_default_reference_depends_on_bf16_products(monkeypatch):
    monkeypatch.setattr("fp8_backends.compute.hardware.cpu_bf16", lambda: True)
    assert asked().reference == "bf16" and asked("--reference", "fp32").reference == "fp32"
    monkeypatch.setattr("fp8_backends.compute.hardware.cpu_bf16", lambda: False)
    assert asked().reference == "fp32" and asked("--reference", "bf16").reference == "bf16"


def test_saved_activations_apply_to_every_run(tmp_path):
    settings = tiny_settings(
        tmp_path, features=asked("--saved-activations", "fp8").features, batch=8
    )
    run = Run(settings, load_text(settings.text), "native:dynamic", seed=0)
    run.backward(0)
    assert fp8_backends.audit(run.model).saved_activations["tensors"] > 0
    assert asked().features == {}
    with pytest.raises(
        RecipeError, match="saved_activations='fp9': .* must be one of off, fp8, fp8.attention"
    ):
        asked("--saved-activations", "fp9")


def test_the_reference_is_the_precision_around_fp8(tmp_path):
    for reference in ("bf16", "fp32"):
        settings = tiny_settings(tmp_path, reference=reference)
        run = Run(settings, load_text(settings.text), "native:dynamic", seed=0)
        assert run.accelerator.fp8_recipe.autocast_dtype == reference
        logits = {}
        run.bare.lm_head.register_forward_hook(
            lambda module, args, out, logits=logits: logits.update(dtype=out.dtype)
        )
        run.backward(0)
        assert logits["dtype"] == {"bf16": torch.bfloat16, "fp32": torch.float32}[reference]


def test_gradients_are_compared_with_the_reference(tmp_path):
    cosines = {}
    for reference in ("bf16", "fp32"):
        settings = tiny_settings(tmp_path, reference=reference)
        run = Run(settings, load_text(settings.text), "fp32", seed=0, with_reference=True)
        run.backward(0)
        cosines[reference] = min(run.gradient_cosines().values())
    assert cosines["fp32"] > 1 - 1e-12 > 1 - 1e-6 > cosines["bf16"]


def test_peak_memory_is_resting_memory_plus_the_highest_point():
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        first = torch.ones(1000)  # 4000 bytes
        second = torch.ones(2000)  # 8000 bytes more
        del first, second
        torch.ones(1500).sum()

    assert 16384 + 12000 <= peak_memory(step, model, optimizer) <= 16384 + 12000 + 256


def test_peak_memory_counts_optimizer_states():
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    before = peak_memory(lambda: None, model, optimizer)
    optimizer.step()
    # Adam's step counter
    assert peak_memory(lambda: None, model, optimizer) == before + 2 * 16384 + 4


def test_autocast_copies_exclude_activations_of_the_same_shape():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU(), nn.Linear(32, 48, bias=False))
    inputs = torch.randn(32, 32, requires_grad=True)  # the shape of the first weight
    with autocast_copies(model) as copies, torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs).float().square().mean()
    assert copies == {"0.weight": 32 * 32 * 2, "2.weight": 32 * 48 * 2}
    loss.backward()  # the hooks leave the graph usable
    assert model[0].weight.grad is not None
    with autocast_copies(model) as copies:
        model(inputs)
    assert copies == {}


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_rank_of_four_sends_its_share_of_each_collective(dtype):
    part, whole = torch.zeros(100, dtype=dtype), torch.zeros(400, dtype=dtype)
    shares = (
        (1.5, lambda: dist.all_reduce(part)),
        (3, lambda: dist.all_gather_into_tensor(whole, part)),
        (4 * 0.75, lambda: dist.reduce_scatter_tensor(part, whole)),
        (0.75, lambda: dist.all_to_all_single(torch.empty_like(part), part)),
        (0.75, lambda: dist.broadcast(part, 0)),
        (3, lambda: wait_tensor(all_gather_tensor(part, 0, dist.group.WORLD))),
        (0, dist.barrier),
    )
    assert [sent_bytes(call) for _, call in shares] == [part.nbytes * each for each, _ in shares]


@pytest.mark.usefixtures("four_ranks")
def test_an_unknown_collective_gives_none():
    part = torch.zeros(100)

    def step():
        dist.all_reduce(part)
        dist.send(part, 1)

    assert sent_bytes(step) is None
    assert sent_bytes(lambda: part + 1) == 0
