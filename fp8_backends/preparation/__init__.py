"""Turn a model and a recipe into a model that trains in FP8, with the proof on its first optimizer
step.

`prepare` and Accelerate's methods run the same phases: resolve the recipe, check, convert the
layers, store their weights, connect the ranks, watch the optimizer.
"""

from typing import TypeVar

import torch
from torch import nn

from .. import rules
from ..comm import deepspeed, fsdp2
from ..compute.fields import flag, parsed
from ..compute.registry import compute_of
from ..convert import conversion, features, quantized_layers, stored_weights
from ..convert.weight_products import may_hold_codes
from ..recipes.handlers import Recipe, Spec, resolve
from ..recipes.strings import level_name
from ..rules import preconditions
from ..states import original
from ..tensors.block_codes import SQUARE_CODES
from ..tensors.scaled_tensor import WithoutMemory
from ..tensors.sharded_tensor import local_part
from ..torch_tools.inductor import guard_byte_stores
from ..torch_tools.modules import check_is_module, has_ranks, is_engine
from ..torch_tools.optimizers import check_is_optimizer
from ..words import shown
from . import optimizer_steps, ranks

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer | None)


def prepare(model: Model, optimizer: Optimizer, spec: Spec = None) -> tuple[Model, Optimizer]:
    """Make `model` train in FP8, without Accelerate.

    Return the same two objects: layers are swapped in place and keep their Parameter objects, so
    the optimizer, schedulers, ties and frozen weights stay valid. Call it before or after the
    optimizer took steps, or on a model on the meta device.

    Args:
        model: any `nn.Module`.
        optimizer: trains the model's parameters; its first step prints the proof. None prepares
            only the model.
        spec: argument of `resolve`: a backend string such as `"native:delayed"`, a recipe, a dict;
            None picks for this machine.

    Returns:
        (model, optimizer)

    Raises:
        RecipeError: the string or a field cannot be honoured.
        BackendUnavailableError: the backend cannot run on this machine.
        FP8BackendError: the model cannot be converted, or is already prepared with another recipe.
    """
    recipe = resolve(spec)
    if recipe.implementation == "original":
        return original.initialize(model, optimizer, recipe)
    order = "; the order is prepare(model, optimizer, spec)"
    if optimizer is not None:
        check_is_optimizer(optimizer, hint=order)
    check_is_module(model, hint=order)
    if recipe.gradient_release:
        rules.refuse(rules.Setup(recipe, rules.Machine.this()), rules.RELEASE_RULES)
    if recipe.level != "O0" and is_engine(model):
        deepspeed.check(model)
    if optimizer is not None:  # before the model changes
        preconditions.check_trains([model], [optimizer], recipe)
        preconditions.check_optimizer(optimizer, recipe)
    prepare_model(model, recipe)
    if optimizer is not None:
        optimizer_steps.watch_optimizer([model], optimizer, recipe)
    return model, optimizer


def initialize(
    model: Model, optimizer: Optimizer, opt_level: str = "O1", use_te: bool = False
) -> tuple[Model, Optimizer]:
    """Call `prepare` with the signature of `msamp.initialize`, for scripts that move from MS-AMP.

    `use_te` selects TransformerEngine's products instead of native ones.
    """
    level = level_name(opt_level, f"opt_level={shown(opt_level)}")
    return prepare(
        model,
        optimizer,
        f"te+msamp:{level}" if parsed("use_te", flag, use_te) else f"msamp:{level}",
    )


def prepare_model(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Convert a model's layers in place for a resolved recipe, and return the model. Repeating it
    does nothing."""
    if torch.cuda.is_available():
        guard_byte_stores()
    if has_ranks():
        fsdp2.reshard(model)  # gathered weights are no Parameters
    has_codes = may_hold_codes(model)
    preconditions.check_model(model, recipe, has_codes)
    if has_codes and compute_of(recipe).takes_block_codes(recipe, SQUARE_CODES):
        quantized_layers.freeze_layers(model, quantized_layers.keeps_unasked)
    prepared = conversion.convert(model, recipe)
    if has_codes:
        quantized_layers.save_plain(model)
    root = conversion.unwrapped(model)
    prepared.compute.store_weights(root, recipe)
    # `undo`: its weights may have been stored in another form, and be plain again
    if recipe.level != "O0" or prepared.undo or has_stored_weights(root):
        stored_weights.store_weights(root, prepared)
    if saved_activations := features.wanted("saved_activations", recipe):
        saved_activations.install(root, prepared)
    if schedule := features.wanted("schedule", recipe):
        schedule.follow(root, prepared, has_new_layers=True)
    if has_ranks():
        ranks.connect_ranks(model, recipe)
    return model


def has_stored_weights(root: nn.Module) -> bool:
    """Return True for a model with weights stored in FP8 or FP4, also sharded."""
    return any(isinstance(local_part(p), WithoutMemory) for p in root.parameters())
