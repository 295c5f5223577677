"""Report the findings of `validate` once, before training begins."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from plugin_training import mlp

import fp8_backends


def warned_of(caplog, model=None, prepared_for_evaluation=False, **options) -> list[str]:
    """Return the rules logged by `prepare`."""
    recipe = fp8_backends.NativeRecipeKwargs(include=options.pop("include", None))
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], **options)
    model = mlp() if model is None else model
    if prepared_for_evaluation:
        model.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        accelerator.prepare(
            *[model]
            if prepared_for_evaluation
            else (model, torch.optim.SGD(model.parameters(), 0.1))
        )
    findings = [
        record.getMessage() for record in caplog.records if ". Fix: " in record.getMessage()
    ]
    return [finding.rpartition("[")[2].partition("]")[0] for finding in findings]


def test_sound_training_prepares_silently(caplog):
    assert warned_of(caplog) == [] == caplog.records


def test_known_problem_warns_with_reason_and_fix(caplog):
    model = mlp()
    assert warned_of(caplog, model, include=["0"]) == ["minority_in_fp8"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        "less than half of the products" in line
        and "Fix: name more layers in include, such as +lm_head" in line
    )
    assert fp8_backends.audit(model).products.keys() == {"0"}


@pytest.mark.parametrize("backend, rules", [("eager", ["flash_attention_2_compile"]), ("no", [])])
def test_accelerator_settings_are_checked(caplog, backend, rules):
    model = mlp()
    model.config = SimpleNamespace(_attn_implementation="flash_attention_2")
    assert warned_of(caplog, model, dynamo_backend=backend) == rules


@pytest.mark.parametrize(
    "engine, plugin", [("DeepSpeed", DeepSpeedPlugin), ("FSDP", FullyShardedDataParallelPlugin)]
)
def test_engine_left_out_by_accelerate_is_named(engine, plugin, caplog, monkeypatch):
    if engine == "DeepSpeed":
        pytest.importorskip("deepspeed")
    # Accelerator sets it for its plug-in
    monkeypatch.setenv(f"ACCELERATE_USE_{engine.upper()}", "false")
    assert warned_of(caplog, **{f"{engine.lower()}_plugin": plugin()}) == ["engine_unused"]
    assert f"here: {engine} is asked for, one process trains" in caplog.text


def test_frozen_model_has_no_known_problems(caplog):
    assert warned_of(caplog, include=["0"], prepared_for_evaluation=True) == []
