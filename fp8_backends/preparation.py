"""From a model and a recipe to a model that trains in FP8, with the proof on its first optimizer step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import conversion, proof, recipes, registry
from .auditing import converted_layers, unwrapped
from .errors import FP8BackendError
from .weight_products import ADOPTED

if TYPE_CHECKING:
    from .conversion import Prepared
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
    if recipe.implementation == "original":
        return original_msamp(model, optimizer, recipe)
    if optimizer is not None:
        _check_optimizer(model, optimizer)
        check_optimizer(optimizer, recipe)  # first: where it is refused, the model is as it was
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
    if recipe.level != "O0":
        from .states import levels

        levels.refuse_several_ranks(recipe.level)
    prepared = conversion.convert(model, recipe, registry.get_compute(recipe.compute))
    if recipe.level != "O0":
        store_weights(conversion.unwrapped(model), prepared)
    return model


def store_weights(root: nn.Module, prepared: Prepared) -> None:
    """Store the weights of the converted layers as the recipe's level says. Turns with the layers in `restore`."""
    from .states import levels

    layers = converted_layers(root, prepared)
    levels.store_weights(layers, prepared.recipe.level)
    for layer in layers.values():
        undo = layer.__dict__[ADOPTED].undo
        if levels.make_plain not in undo:
            undo.append(levels.make_plain)


def original_msamp(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> tuple:
    """(model, optimizer), new objects, as the original package makes them."""
    from .states import original

    return original.initialize(model, optimizer, recipe)


def check_optimizer(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Raise where the recipe cannot run here, or `adopt_optimizer` would refuse this optimizer. Changes nothing."""
    registry.check_available(recipe)
    if recipe.level != "O0":
        from .states import adamw, levels

        levels.refuse_several_ranks(recipe.level)
        adamw.check(unwrapped(optimizer), levels.state_rule(recipe))


def adopt_optimizer(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Let an optimizer train the weights that a level stores; nothing to do at O0. Repeating it does nothing.

    Raises:
        FP8BackendError: it is no `torch.optim.Adam` or `AdamW`, or has an option that scaled states do not take.
    """
    if recipe.level != "O0":
        from .states import adamw, levels

        adamw.adopt(unwrapped(optimizer), levels.state_rule(recipe))


def finish_accumulation(model: nn.Module) -> None:
    """Cast the weight gradients that microbatches accumulated in high precision, now that they are complete."""
    from .states import levels

    levels.finish_accumulation(model.parameters())


def watch_optimizer(models: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """State the proof at the optimizer's first step, for those of the prepared models whose parameters it holds.

    `optimizer` may be wrapped (Accelerate's `AcceleratedOptimizer`). Repeating it does nothing. `recipe` is what the
    models were prepared with; each prepared model carries its own.
    """
    models = [models] if isinstance(models, nn.Module) else list(models)
    adopt_optimizer(optimizer, recipe)
    proof.watch(models, optimizer)
    AfterStep.of(unwrapped(optimizer)).add(models)


class AfterStep:
    """Step post-hook of an optimizer: tells the compute of each model that it trains that a step was taken."""

    def __init__(self) -> None:
        self.roots: list[weakref.ref] = []

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> AfterStep:
        """The optimizer's; installed when first asked for."""
        hooks = optimizer._optimizer_step_post_hooks.values()
        hook = next((hook for hook in hooks if isinstance(hook, cls)), None)
        if hook is None:
            hook = cls()
            optimizer.register_step_post_hook(hook)
        return hook

    def add(self, models: list[nn.Module]) -> None:
        known = [reference() for reference in self.roots]
        for _, root, _ in (each for model in models for each in conversion.prepared_roots(model)):
            if not any(root is each for each in known):
                self.roots.append(weakref.ref(root))

    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        for reference in self.roots:
            root = reference()
            prepared = root is not None and root.__dict__.get(conversion.PREPARED)
            if prepared:
                prepared.compute.after_optimizer_step(root)


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
