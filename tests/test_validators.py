"""Each rule fires where it should, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8_backends import hardware_table, validate
from fp8_backends.validators import RULES


def rules(*args, **kwargs):
    return {finding.rule: finding for finding in validate(*args, **kwargs)}


@pytest.fixture
def fp8_gpu(monkeypatch):
    monkeypatch.setattr("fp8_backends.hardware.has_gpu", lambda: True)
    monkeypatch.setattr("fp8_backends.hardware.fp8_products", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("fp8_backends.hardware.has_gpu", lambda: False)
    monkeypatch.setattr("fp8_backends.hardware.fp8_products", lambda: False)


def test_no_fp8_hardware_says_that_bf16_is_faster(no_gpu):
    finding = rules("native")["no_fp8_hardware"]
    assert finding.severity == "warning" and "bf16" in finding.fix


def test_clean_setup_has_no_findings(fp8_gpu):
    model = nn.Linear(8192, 8192, device="meta")
    assert validate("native:delayed", model) == []


def test_ao_on_a_gpu_wants_torch_compile(fp8_gpu):
    assert "ao_without_compile" in rules("ao")
    assert "ao_without_compile" not in rules("ao", compiled="regional")
    assert "ao_without_compile" not in rules("native")
    assert "ao_without_compile" not in rules("ao", torch.compile(nn.Linear(8, 8)))


def test_fp8_all_gather_needs_fsdp2(fp8_gpu):
    spec = {"backend": "ao", "enable_fsdp_float8_all_gather": True}
    assert rules(spec, parallel="ddp")["all_gather_without_fsdp2"].severity == "error"
    assert "all_gather_without_fsdp2" not in rules(spec, parallel="fsdp2")
    assert "all_gather_without_fsdp2" not in rules("ao")


def test_ao_under_ddp_wants_regional_compilation(fp8_gpu):
    assert "ao_ddp_full_compile" in rules("ao", parallel="ddp", compiled="full")
    assert "ao_ddp_full_compile" not in rules("ao", parallel="ddp", compiled="regional")
    assert "ao_ddp_full_compile" not in rules("native", parallel="ddp", compiled="full")


def test_history_of_one_step_is_pointed_out(fp8_gpu):
    spec = {"backend": "native:delayed", "amax_history_len": 1, "amax_compute_algo": "max"}
    assert "short_amax_history" in rules(spec)
    assert "short_amax_history" not in rules("native:delayed")


def test_fp16_around_fp8_mentions_the_loss_scaler(fp8_gpu):
    assert "fp16_autocast" in rules({"backend": "native", "autocast_dtype": "fp16"})
    assert "fp16_autocast" not in rules("native")


def test_small_layers_are_pointed_out(fp8_gpu):
    assert "small_layers" in rules("native", nn.Linear(256, 256))
    assert "small_layers" not in rules("native", nn.Sequential(nn.Linear(8, 8), nn.Linear(256, 2048)))


def test_unavailable_backend_and_wrong_string_are_findings_not_exceptions(fp8_gpu):
    assert rules("te")["unavailable"].severity == "error"
    assert "TransformerEngine is not installed" in rules("te")["unavailable"].reason
    assert "did you mean 'native'" in rules("nativ")["recipe"].reason


def test_wrapper_is_seen_through_the_model(fp8_gpu):
    class FSDPModule(nn.Linear):
        """The name of the class that `fully_shard` mixes in."""

    spec = {"backend": "ao", "enable_fsdp_float8_all_gather": True}
    assert "all_gather_without_fsdp2" not in rules(spec, FSDPModule(8, 8))
    block = nn.Sequential(nn.Linear(8, 8))
    block[0].compile()
    assert "ao_without_compile" not in rules("ao", block)


def test_worst_findings_come_first_and_each_has_a_fix(no_gpu):
    spec = {"backend": "ao", "enable_fsdp_float8_all_gather": True, "autocast_dtype": "fp16"}
    severities = [finding.severity for finding in validate(spec)]
    assert severities == ["error", "warning", "info"]
    for rule in RULES:
        assert rule.fix and rule.reason and rule.severity in ("error", "warning", "info")
    assert str(validate(spec)[0]).startswith("error: ") and "Fix:" in str(validate(spec)[0])


# TransformerEngine


@pytest.fixture
def nvidia(monkeypatch, fp8_gpu):
    """An NVIDIA GPU of that capability, and a PyTorch for that CUDA."""

    def pretend(capability=None, cuda=(13, 0)):
        monkeypatch.setattr("fp8_backends.hardware.lowest_capability", lambda: capability)
        monkeypatch.setattr("fp8_backends.hardware.cuda_release", lambda: cuda)

    return pretend


def te_rules(spec, **setup):
    return {name for name in rules(spec, **setup) if name.startswith(("te_", "fp8_params"))}


def test_te_without_an_nvidia_gpu_names_the_native_twin(nvidia):
    nvidia(None)
    for spec in ("te", "te:blockwise", "te:mxfp8", "te+msamp:O2"):
        assert te_rules(spec) == {"te_without_nvidia_gpu"}
        assert "native:delayed for te:delayed" in rules(spec)["te_without_nvidia_gpu"].fix
    assert not te_rules("native:delayed") and not te_rules("ao")


@pytest.mark.parametrize(
    ("spec", "capability", "cuda", "expected"),
    [
        ("te:delayed", (8, 0), (13, 0), {"te_before_fp8"}),
        ("te:delayed", (8, 9), (13, 0), set()),
        ("te:delayed", (8, 9), (12, 0), {"te_ada_libraries"}),
        ("te:delayed", (9, 0), (12, 0), set()),
        ("te:blockwise", (8, 9), (13, 0), {"te_block_chip"}),
        ("te:blockwise", (9, 0), (12, 8), {"te_block_cuda"}),
        ("te:blockwise", (9, 0), (12, 9), set()),
        ("te:blockwise", (12, 0), (12, 9), set()),
        ("te:mxfp8", (9, 0), (13, 0), {"te_mxfp8_chip"}),
        ("te:mxfp8", (10, 0), (13, 0), set()),
        ("te:mxfp8", (11, 0), (13, 0), set()),
        ("te:mxfp8", (12, 0), (13, 0), {"te_mxfp8_chip"}),
        ("te:dynamic", (12, 0), (13, 0), set()),
        ("native:mxfp8", (9, 0), (12, 0), set()),
    ],
)
def test_te_recipe_that_the_chip_or_its_cuda_lacks(nvidia, spec, capability, cuda, expected):
    nvidia(capability, cuda)
    assert te_rules(spec) == expected
    scaling = spec.partition(":")[2]
    if spec.startswith("te"):  # the same as the table that doctor prints
        here = hardware_table.support_of("te", scaling, hardware_table.chip_of(capability), cuda)
        assert (here.state == "refused") == bool(expected)


def test_a_backward_that_the_environment_takes_out_of_fp8_is_pointed_out(nvidia, monkeypatch):
    nvidia((9, 0))
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    assert rules("te:dynamic")["te_backward_in_high_precision"].severity == "error"
    assert not te_rules("native:dynamic")


def test_weights_in_fp8_are_whole_and_do_not_train(nvidia):
    nvidia((9, 0))
    spec = {"backend": "te", "fp8_params": True}
    for parallel in ("fsdp1", "fsdp2", "deepspeed"):
        found = rules(spec, parallel=parallel)["fp8_params_sharded"]
        assert found.severity == "error" and "DDP" in found.fix and "te+msamp:O3" in found.fix
        assert not te_rules("te", parallel=parallel)
    assert not te_rules(spec) and not te_rules(spec, parallel="ddp")
    model = nn.Sequential(nn.Linear(8192, 8192, device="meta"), nn.Linear(8192, 8192, device="meta"))
    assert te_rules(spec, model=model) == {"fp8_params_trains"} and not te_rules("te", model=model)
    assert not te_rules({**spec, "exclude": "1"}, model=model)
    assert not te_rules(spec, model=model.requires_grad_(False))
