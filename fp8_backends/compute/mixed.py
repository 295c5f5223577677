"""`Mixed`: the backends of a recipe with `layers` as one `Compute`, for everything after
conversion."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..tensors.block_codes import CodeLayout
from . import registry
from .hardware import Availability
from .interface import Compute, Norm, Recipe, check_saved_states


def _of_layer(name: str) -> Any:
    def ask(self: "Mixed", module: nn.Module, *arguments: Any) -> Any:
        backend = next(compute for compute in self.computes if compute.is_converted(module))
        return getattr(backend, name)(module, *arguments)

    return ask


def _of_each(name: str) -> Any:
    def tell(self: "Mixed", *arguments: Any) -> None:
        for compute in self.computes:
            getattr(compute, name)(*arguments)

    return tell


class Mixed(Compute):
    """Each method asks the backend of the layer, or those of all layers in a model."""

    engine, products, weight_codes = map(_of_layer, ("engine", "products", "weight_codes"))
    transient_bytes_per_element = _of_layer("transient_bytes_per_element")
    cast_of = _of_layer("cast_of")
    store_weights, keep_weight_casts = map(_of_each, ("store_weights", "keep_weight_casts"))
    after_optimizer_step = _of_each("after_optimizer_step")

    def __init__(self, recipe: Recipe) -> None:
        self.recipes = recipe.recipes
        self.computes = list(
            dict.fromkeys(registry.get_compute(each.compute) for each in self.recipes)
        )
        self.name = recipe.compute
        self.casts_by = ", ".join(compute.casts_by for compute in self.computes)

    def _by_recipe(self) -> Iterator[tuple[Compute, Recipe]]:
        return ((registry.get_compute(recipe.compute), recipe) for recipe in self.recipes)

    def availability(self) -> Availability:
        answers = [compute.availability() for compute in self.computes]
        return next((answer for answer in answers if not answer), answers[0])

    def build(self, linear: nn.Linear, recipe: Recipe, shared: Any) -> nn.Module:
        return registry.get_compute(recipe.compute).build(linear, recipe, shared)

    def norms(self, root: nn.Module, recipe: Recipe) -> list[Norm]:
        return [norm for compute, each in self._by_recipe() for norm in compute.norms(root, each)]

    def is_converted(self, module: nn.Module) -> bool:
        return any(compute.is_converted(module) for compute in self.computes)

    def high_precision_products(self, recipe: Recipe) -> tuple[str, ...]:
        return self.computes[0].high_precision_products(recipe)  # the same for all

    def takes_block_codes(self, recipe: Recipe, layout: CodeLayout) -> bool:
        return all(compute.takes_block_codes(each, layout) for compute, each in self._by_recipe())

    def gathers_codes(self, recipe: Recipe) -> bool:
        return all(compute.gathers_codes(each) for compute, each in self._by_recipe())

    def travelling(self, root: nn.Module, recipe: Recipe) -> dict[tuple[nn.Module, str], Any]:
        by_recipe = (compute.travelling(root, each) for compute, each in self._by_recipe())
        return {place: codes for travelling in by_recipe for place, codes in travelling.items()}

    def scaling_state(self, root: nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: state
            for compute in self.computes
            for name, state in compute.scaling_state(root).items()
        }

    def scaling_buffers(self, root: nn.Module) -> list[torch.Tensor]:
        return [buffer for compute in self.computes for buffer in compute.scaling_buffers(root)]

    def check_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        check_saved_states(self.scaling_state(root), state, lambda *_: None)
        for compute in self.computes:
            compute.check_scaling_state(
                root, {name: state[name] for name in compute.scaling_state(root)}
            )

    def load_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        for compute in self.computes:
            compute.load_scaling_state(
                root, {name: state[name] for name in compute.scaling_state(root)}
            )
