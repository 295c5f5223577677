"""Each rule fires where it should, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8_backends import validate
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
    assert rules("native:mxfp8")["unavailable"].severity == "error"
    assert "not in this version yet" in rules("native:mxfp8")["unavailable"].reason
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
