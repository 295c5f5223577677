from __future__ import annotations

import pytest
import torch
from cli.comparing import checks_by_name, compared, planted, tiny_settings

from fp8_backends.cli.compare import training_run
from fp8_backends.cli.compare.workload import load_text

MOVED = "every trainable parameter moved"
PRODUCTS = "every eligible layer ran its products in FP8"
GRADIENTS = "gradients at the initial weights point where bf16's do"
FINITE = "every loss is finite"
BACKENDS = ("native:dynamic", "native:delayed", "ao:tensorwise", "msamp:O2", "msamp:O3")
SAME_START = "same initial weights and data order as bf16"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("compare"), *BACKENDS, "fp32")


def test_every_backend_passes_every_check_but_the_gap_that_six_steps_cannot_tell(comparison):
    for backend in BACKENDS:
        passed = checks_by_name(comparison, backend)
        assert {name for name in passed if passed[name]} >= {MOVED, PRODUCTS, GRADIENTS, FINITE, SAME_START}


def test_baselines_have_no_fp8_check(comparison):
    assert PRODUCTS not in checks_by_name(comparison, "fp32") and checks_by_name(comparison, "fp32")[GRADIENTS]
    assert set(checks_by_name(comparison, "bf16")) == {MOVED, FINITE}


def test_pairs_share_weights_and_data_and_seeds_do_not(comparison):
    starts = {
        b: [run["start_checksum"] for run in found["runs"]] for b, found in comparison.results["backends"].items()
    }
    assert len({tuple(checksums) for checksums in starts.values()}) == 1
    assert len(set(starts["bf16"])) == 2


def test_training_lowers_the_loss_in_every_backend(tmp_path):
    comparison = compared(tmp_path, "native:rowwise", steps=40, seeds=1, lr=5e-3)
    for found in comparison.results["backends"].values():
        losses = found["runs"][0]["losses"]
        assert len(losses) == 40 and sum(losses[-5:]) / 5 < losses[0] - 1.0


def test_peak_memory_falls_where_inputs_are_saved_in_fp8(tmp_path):
    # 16 x 64 tokens: activations outweigh the tiny model's weights
    comparison = compared(tmp_path, "native:dynamic", seeds=1, steps=1, batch=16, sequence=64)
    peaks = {b: found["inspection"]["peak_memory_bytes"] for b, found in comparison.results["backends"].items()}
    resting = comparison.results["backends"]["bf16"]["inspection"]["parameters"] * 12
    assert resting < peaks["native:dynamic"] < peaks["bf16"]


def test_bytes_per_parameter_count_the_copies_of_autocast_and_of_fp8(comparison):
    rows = {row["backend"]: row["bytes_per_parameter"] for row in comparison.results["summary"]["rows"]}
    assert rows["fp32"] == pytest.approx(16)
    # bf16 copies are 2 bytes a Linear element, E4M3 copies 1; rows differ by that much of the converted share
    assert rows["msamp:O2"] < rows["msamp:O3"] < rows["ao:tensorwise"]
    assert 16 < rows["ao:tensorwise"] < rows["native:dynamic"] < rows["bf16"] < 18


@pytest.mark.parametrize("backend", ["native:dynamic", "msamp:O2"])
def test_a_frozen_layer_fails_the_check_that_parameters_move(tmp_path, backend):
    # storing a weight in FP16 rounds it: that is no movement
    comparison = planted("frozen", tmp_path, backend, seeds=1)
    passed = checks_by_name(comparison, backend)
    assert not passed[MOVED] and passed[GRADIENTS] and comparison.failed
    assert checks_by_name(comparison, "bf16")[MOVED]
    assert comparison.results["backends"][backend]["runs"][0]["unmoved"] == ["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize("backend", ["native:dynamic", "ao:tensorwise"])
def test_a_flipped_weight_gradient_fails_the_check_of_directions(tmp_path, backend):
    comparison = planted("flipped-wgrad", tmp_path, backend, seeds=1, steps=2)
    passed = checks_by_name(comparison, backend)
    assert not passed[GRADIENTS] and passed[MOVED] and comparison.failed
    cosines = comparison.results["backends"][backend]["inspection"]["first_gradient_cosines"]
    assert [name for name, cosine in cosines.items() if cosine < 0] == ["model.layers.0.self_attn.q_proj.weight"]


def test_fp16_scales_its_loss_on_a_cpu_too(tmp_path):
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
    factors = [training_run._schedule(settings)(step) for step in range(20)]
    assert factors[0] == 0.0 and factors[10] == 1.0 and factors[19] == pytest.approx(0.0, abs=1e-9)
    assert factors[:11] == sorted(factors[:11]) and factors[10:] == sorted(factors[10:], reverse=True)
