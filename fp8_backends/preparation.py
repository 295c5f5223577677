"""From a model and a recipe to a model that trains in FP8, with the proof on its first optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import conversion, proof, recipes, registry
from .auditing import unwrapped
from .errors import FP8BackendError

if TYPE_CHECKING:
    from .recipes import Recipe


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer | None, spec: Any = None) -> tuple:
    """Make `model` train in FP8, without Accelerate.

    Both objects come back as they are: layers are exchanged in place and keep their Parameter objects, so the
    optimizer, schedulers, ties and frozen weights need nothing. May be called before or after the optimizer took
    steps, and on a model on the meta device.

    Args:
        model: any `nn.Module`.
        optimizer: trains the model's parameters; its first step states the proof. None prepares the model alone.
        spec: what `resolve` takes: a backend string such as `"native:delayed"`, a recipe, a dict; None picks for
            this machine.

    Returns:
        (model, optimizer)

    Raises:
        RecipeError: the string or a field cannot be honoured.
        BackendUnavailableError: the backend cannot run on this machine.
        FP8BackendError: the model cannot be converted, or it is prepared with another recipe already.
    """
    recipe = recipes.resolve(spec)
    if optimizer is not None:
        _check_optimizer(model, optimizer)
    prepare_model(model, recipe)
    if optimizer is not None:
        watch_optimizer(model, optimizer, recipe)
    return model, optimizer


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, opt_level: str = "O1", use_te: bool = False
) -> tuple:
    """`prepare` with the signature of `msamp.initialize`, for scripts that move from MS-AMP.

    `use_te` takes TransformerEngine's products in place of native ones.
    """
    backend = f"te+msamp:{opt_level}" if use_te else f"msamp:{opt_level}"
    return prepare(model, optimizer, backend)


def prepare_model(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Convert a model's layers in place for a resolved recipe. Returns the same module; repeating it does nothing."""
    if not isinstance(model, nn.Module):
        raise FP8BackendError(
            f"model must be a torch.nn.Module, not {type(model).__name__}; the order is prepare(model, optimizer, spec)"
        )
    registry.check_available(recipe)
    conversion.convert(model, recipe, registry.get_compute(recipe.compute))
    return model


def watch_optimizer(models: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """State the proof at the optimizer's first step, for those of the prepared models whose parameters it holds.

    `optimizer` may be wrapped (Accelerate's `AcceleratedOptimizer`). Repeating it does nothing. `recipe` is what the
    models were prepared with; each prepared model carries its own.
    """
    proof.watch([models] if isinstance(models, nn.Module) else list(models), optimizer)


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    inner = unwrapped(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise FP8BackendError(
            f"optimizer must be a torch.optim.Optimizer or None, not {type(optimizer).__name__}; "
            f"the order is prepare(model, optimizer, spec)"
        )
    if not isinstance(model, nn.Module):
        return  # refused by prepare_model, in its own words
    held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        warnings.warn(
            "none of the model's parameters is in the optimizer: the model will not train; make the optimizer "
            "from this model's parameters()",
            stacklevel=3,
        )
