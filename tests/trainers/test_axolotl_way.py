"""Follow Axolotl's way to FP8: compile Trainer's function again from a text with more arguments for
Accelerator."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch
import transformers.trainer
from accelerate.utils import AORecipeKwargs
from tiny_trainers import LAYERS, kept_frozen, losses_of, trainer_for, values_of
from torchao.float8 import Float8LinearConfig
from transformers import Trainer

import fp8_backends
from fp8_backends import FP8BackendError

BUILDS = "self.accelerator = Accelerator(**args)"


@pytest.fixture
def compiled_anew(monkeypatch):
    """Insert `args.update(self.more_arguments(args))` before Trainer's line with the Accelerator.
    As in Axolotl, the function lives in a module of another name."""
    text = textwrap.dedent(inspect.getsource(Trainer.create_accelerator_and_postprocess))
    assert text.count(BUILDS) == 1
    text = text.replace(BUILDS, f"args.update(self.more_arguments(args)); {BUILDS}")
    names = {**vars(transformers.trainer), "__name__": "somebody.elses.module"}
    exec(compile(text, "<patched>", "exec"), names)
    monkeypatch.setattr(
        Trainer, "create_accelerator_and_postprocess", names["create_accelerator_and_postprocess"]
    )


class Asks(Trainer):
    config = Float8LinearConfig()
    replaces = False

    def more_arguments(self, args: dict) -> dict:
        """Older versions replace the handlers of Trainer, newer ones add to them."""
        handlers = [] if self.replaces else args["kwargs_handlers"]
        handler = AORecipeKwargs(config=self.config)
        return {"mixed_precision": "fp8", "kwargs_handlers": [*handlers, handler]}


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "replaces"), [("tensorwise", True), ("rowwise", False)])
def test_every_weight_trains_in_fp8_over_bf16(
    recipe, replaces, compiled_anew, monkeypatch, tmp_path
):
    monkeypatch.setattr(Asks, "config", Float8LinearConfig.from_recipe_name(recipe))
    monkeypatch.setattr(Asks, "replaces", replaces)
    trainer = trainer_for(tmp_path, trainer_class=Asks, bf16=True, ddp_find_unused_parameters=False)
    assert trainer.accelerator.fp8_recipe.name == f"ao:{recipe}"
    handler = trainer.accelerator.ddp_handler
    assert handler is None if replaces else handler.find_unused_parameters is False
    before = values_of(trainer.model)
    trainer.train()
    assert losses_of(trainer)[-1] < 0.9 * losses_of(trainer)[0]
    assert kept_frozen(trainer.model, before)
    products = fp8_backends.audit(trainer.model).products
    assert len(products) == LAYERS and all(
        min(c["fprop"], c["dgrad"], c["wgrad"]) > 0 for c in products.values()
    )


def test_unread_config_field_changes_nothing(compiled_anew, monkeypatch, tmp_path):
    """Axolotl sets `force_recompute_fp8_weight_in_bwd`, unread by recent torchao."""
    losses = []
    for value in (False, True):
        monkeypatch.setattr(
            Asks, "config", Float8LinearConfig(force_recompute_fp8_weight_in_bwd=value)
        )
        trainer = trainer_for(tmp_path, trainer_class=Asks, bf16=True, max_steps=2)
        trainer.train()
        losses.append(losses_of(trainer))
    assert losses[0] == losses[1]


def test_fp8_all_gather_without_fsdp2_is_refused(compiled_anew, monkeypatch, tmp_path):
    """Stock Accelerate replaces the weights then, and no optimizer knows the new ones."""
    monkeypatch.setattr(Asks, "config", Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    trainer = trainer_for(tmp_path, trainer_class=Asks, bf16=True)
    with pytest.raises(FP8BackendError, match="enable_fsdp_float8_all_gather=True .*FSDP2"):
        trainer.train()


def test_routers_stay_in_high_precision_without_a_patch():
    """Axolotl wraps the conversion for this purpose."""
    model = torch.nn.ModuleDict(
        {"gate": torch.nn.Linear(32, 32), "gate_proj": torch.nn.Linear(32, 32)}
    )
    fp8_backends.prepare(model, None, "ao")
    assert list(fp8_backends.audit(model).products) == ["gate_proj"]
