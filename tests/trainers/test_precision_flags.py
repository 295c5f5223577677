"""Combine `bf16=True` and `fp16=True` with FP8: they set the precision around it, and never disable
it silently."""

from __future__ import annotations

import logging

import pytest
import torch
from accelerate import Accelerator
from tiny_trainers import LAYERS, Counting, arguments, llama, losses_of, trainer_for
from transformers import Trainer

import fp8_backends
from fp8_backends import RecipeError
from fp8_backends.compute import hardware


def activations_of(model) -> list[torch.dtype]:
    seen = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(
        lambda module, args, output: seen.append(output.dtype)
    )
    return seen


@pytest.mark.parametrize("flags", [{}, {"bf16": True}, {"bf16": False}, {"fp16": True}], ids=str)
def test_trainer_trains_in_fp8_over_flagged_precision(launched, flags, tmp_path):
    trainer = trainer_for(tmp_path, max_steps=3, **flags)
    assert (
        trainer.accelerator.fp8_recipe.name == "native:dynamic"
        and trainer.accelerator.mixed_precision == "fp8"
    )
    seen = activations_of(trainer.model)
    trainer.train()
    products = fp8_backends.audit(trainer.model).products
    assert len(products) == LAYERS and all(
        min(c["fprop"], c["dgrad"], c["wgrad"]) == 3 for c in products.values()
    )
    named = (
        torch.float16
        if flags.get("fp16")
        else torch.bfloat16
        if flags.get("bf16")
        else hardware.fast_dtype("cpu")
    )
    assert set(seen) == {named}
    assert (trainer.accelerator.scaler is not None) == flags.get("fp16", False)
    assert losses_of(trainer)[-1] < losses_of(trainer)[0]


def test_precision_contradicting_recipe_is_refused(launched, tmp_path):
    launched(autocast_dtype="fp32")
    with pytest.raises(
        RecipeError, match=r"autocast_dtype='fp32' and bf16=True in TrainingArguments.*TRL"
    ):
        trainer_for(tmp_path, bf16=True)
    launched(autocast_dtype="fp16")
    with pytest.raises(RecipeError, match=r"autocast_dtype='fp16' and bf16=True"):
        trainer_for(tmp_path, bf16=True)
    assert trainer_for(tmp_path, fp16=True).accelerator.fp8_recipe.autocast_dtype == "fp16"


@pytest.mark.parametrize("engine", ["DeepSpeed", "FSDP"])
def test_fp16_is_refused_under_bf16_engines(engine, launched, monkeypatch):
    from fp8_backends.accelerate_plugin.callers import around_fp8

    monkeypatch.setenv(f"ACCELERATE_USE_{engine.upper()}", "true")
    recipe = fp8_backends.resolve("native")
    # no CPU replaces a given value
    assert around_fp8(recipe, "bf16", {}).given == recipe.given | {"autocast_dtype"}
    with pytest.raises(RecipeError, match=f"under {engine} bf16 runs around FP8; set bf16=True"):
        around_fp8(recipe, "fp16", {})


class OwnWay(Trainer):
    """Create the Accelerator in a subclass."""

    def create_accelerator_and_postprocess(self):
        self.make_accelerator()

    def make_accelerator(self):
        self.accelerator = Accelerator(mixed_precision=self.args.mixed_precision)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False


class WithHandler(Trainer):
    """Request FP8 only by a subclass, with nothing in the environment."""

    def _build_accelerator_args(self, **kwargs):
        args = super()._build_accelerator_args(**kwargs)
        return args | {
            "kwargs_handlers": [
                *args["kwargs_handlers"],
                fp8_backends.NativeRecipeKwargs(scaling="rowwise"),
            ]
        }


def test_trainer_subclasses_may_build_accelerators(launched, monkeypatch, tmp_path):
    assert (
        trainer_for(tmp_path, trainer_class=OwnWay, bf16=True).accelerator.fp8_recipe.name
        == "native:dynamic"
    )
    assert (
        type(trainer_for(tmp_path, trainer_class=OwnWay).accelerator).__name__ == "FP8Accelerator"
    )


@pytest.mark.parametrize("written", ["no", "bf16"])
def test_overwriting_launch_variable_keeps_fp8_on(written, monkeypatch, tmp_path):
    """Axolotl writes `bf16` or "no" into it, from its own configuration."""
    monkeypatch.setenv("FP8_BACKENDS_RECIPE", '{"backend": "native:rowwise"}')
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", written)
    assert trainer_for(tmp_path).accelerator.fp8_recipe.name == "native:rowwise"


def test_handler_of_trainer_subclass_applies_with_bf16(tmp_path):
    trainer = trainer_for(tmp_path, trainer_class=WithHandler, bf16=True)
    assert trainer.accelerator.fp8_recipe.name == "native:rowwise"
    assert trainer.accelerator.ddp_handler is not None


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no"])
def test_accelerator_built_by_script_decides_precision(precision, launched, caplog):
    with caplog.at_level(logging.WARNING, logger="fp8_backends"):
        accelerator = Accelerator(mixed_precision=precision)
    assert accelerator.mixed_precision == precision and not hasattr(accelerator, "fp8_recipe")
    (line,) = caplog.messages
    assert "FP8 is off: this run was launched with ACCELERATE_MIXED_PRECISION=fp8" in line
    assert (
        "ACCELERATE_FP8_BACKEND=native" in line
        and f'Accelerator(mixed_precision="{precision}")' in line
    )
    model = accelerator.prepare(torch.nn.Linear(32, 32))
    assert type(model) is torch.nn.Linear


def test_run_without_fp8_launch_is_unchanged(caplog, tmp_path):
    trainer = trainer_for(tmp_path, bf16=True)
    assert (
        type(trainer.accelerator) is Accelerator and trainer.accelerator.mixed_precision == "bf16"
    )
    assert not [record for record in caplog.records if record.name == "fp8_backends"]


@pytest.mark.parametrize("flags", [{"bf16": True}, {}], ids=str)
def test_fp8_may_be_enabled_after_training_arguments(flags, launched, monkeypatch, tmp_path):
    """Set the variables between TrainingArguments and Trainer, like LLaMA-Factory."""
    with monkeypatch.context() as before:
        before.delenv("ACCELERATE_MIXED_PRECISION")
        before.delenv("ACCELERATE_FP8_BACKEND")
        args = arguments(tmp_path, **flags)
        assert args.mixed_precision == ("bf16" if flags else "no")
    trainer = Trainer(model=llama(), args=args, train_dataset=Counting())
    assert trainer.accelerator.fp8_recipe.name == "native:dynamic"
    assert trainer.accelerator.fp8_recipe.autocast_dtype == "bf16"


def test_several_trainers_and_accelerators_share_a_process(launched, tmp_path):
    """The first Accelerator fixes the precision of the process; a Trainer's bf16 does not
    contradict it."""
    first = Accelerator()
    assert first.mixed_precision == "fp8"
    for flags in ({"bf16": True}, {}):
        assert trainer_for(tmp_path, **flags).accelerator.mixed_precision == "fp8"
