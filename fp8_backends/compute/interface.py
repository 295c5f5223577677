"""What a backend is: one small class, `Compute`, and protocols for what only some backends do.

A backend converts a single `nn.Linear`. Walking a model, choosing layers, and keeping Parameters, hooks and ties alive
is done once for all backends (`training.conversion`). A backend that does more than that has the methods of one or
several of the protocols below; nothing is to be registered for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from ..errors import FP8BackendError
from ..numerics.formats import COMPUTE_DTYPES
from ..numerics.scaling import Quantized
from ..numerics.sharded_tensor import full_shape
from ..numerics.statistics import Cast
from .counts import ProductCounts
from .expert_functions import ExpertWeights
from .fields import Field
from .hardware import Availability
from .profiling import Layer, ProductProfile


class Recipe(Protocol):
    """What a backend reads of a resolved recipe (`recipes.handlers.Recipe`): its name, and the fields it declares."""

    name: str
    """The canonical backend string."""
    compute: str
    scaling: str
    level: str
    given: frozenset[str]
    """The fields that the user gave."""

    def __getattr__(self, name: str) -> Any:
        """The value of a field."""


class Norm(NamedTuple):
    """A normalisation layer, and what a backend has in its place."""

    module: nn.Module
    carrier: nn.Module | None
    """The module whose class and added attributes `module` takes on, as in `Compute.build`."""
    reason: str | None
    """Why there is none."""


class Compute(ABC):
    """One way to run the three products of a Linear layer. Holds no state: one instance serves many models."""

    name: str
    """The name in a backend string: `native`, `te`, `ao`."""
    scalings: tuple[str, ...]
    """Scaling rules that a backend string may name after the backend."""
    default_scaling: str
    level_scaling: str = ""
    """The default at a level above O0, where it is another one."""
    unnamed_scalings: tuple[str, ...] = ()
    """Scaling rules that no string names and a field may stand for (`Field.names_scaling`)."""
    levels: tuple[str, ...] = ("O0",)
    """MS-AMP levels that this backend can be combined with."""
    fields: tuple[Field | str, ...] = ()
    """Recipe fields that this backend reads beside those of every recipe: its own, or names of this package's."""

    @abstractmethod
    def availability(self) -> Availability:
        """Whether this backend can run on this machine, and the fix where it cannot. Cheap; imports nothing heavy."""

    def check(self, recipe: Recipe) -> None:
        """Raise `RecipeError` for a resolved recipe that cannot be honoured on any machine. Asks no hardware."""

    def unfit(self, linear: nn.Linear, recipe: Recipe) -> str | None:
        """The reason why this layer cannot run in FP8 and stays in high precision, or None when it can."""
        if linear.weight.dtype not in COMPUTE_DTYPES:
            return f"weight dtype {linear.weight.dtype} is not one of fp32, bf16, fp16"
        if 0 in full_shape(linear.weight):
            return "a layer of size zero has no product"
        return None

    def norms(self, root: nn.Module, recipe: Recipe) -> list[Norm]:
        """Return the norms to swap for this backend's own form. A user's `exclude` names them too."""
        return []

    def new_shared(self, root: nn.Module, recipe: Recipe) -> Any:
        """State that all converted layers of one prepared model share (None when there is none)."""
        return None

    @abstractmethod
    def build(self, linear: nn.Linear, recipe: Recipe, shared: Any) -> nn.Module:
        """A module that computes `linear` in FP8 and holds the same Parameter objects.

        It is a carrier: conversion moves its class and its added attributes and buffers onto `linear`, so that the
        module object, its Parameters, hooks, flags and every other reference to it survive. `shared` is what
        `new_shared` returned for this model.
        """

    def attach(self, root: nn.Module, recipe: Recipe, shared: Any) -> None:
        """Install what the backend needs on the prepared root (hooks), after its layers were converted."""

    @abstractmethod
    def is_converted(self, module: nn.Module) -> bool:
        """Whether this module is one of this backend's FP8 layers."""

    @abstractmethod
    def engine(self, module: nn.Module) -> str:
        """What makes the products of this layer where its weight lies now: `scaled_mm`, `bf16-exact`, …"""

    def high_precision_products(self, recipe: Recipe) -> tuple[str, ...]:
        """Which of fprop, dgrad and wgrad the recipe keeps in high precision on purpose."""
        return ()


# How products are proven: a backend counts its own, or one profiled step tells (`compute.profiling`)


@runtime_checkable
class CountsProducts(Protocol):
    """A backend whose layers count their FP8 products."""

    def products(self, module: nn.Module) -> ProductCounts:
        """Counts of a converted layer since it was prepared."""


@runtime_checkable
class HasProfile(Protocol):
    """A backend whose products `ProductProfile` does not recognize."""

    def profile(self, layers: list[Layer], keep: bool = False) -> ProductProfile:
        """What counts the products of these layers in a profiled step: an object like `ProductProfile`."""


# Conv1D and experts


@runtime_checkable
class ConvertsConv1D(Protocol):
    """A backend that multiplies by the weight [in, out] of transformers' `Conv1D` as by that of a Linear."""

    def build_conv1d(self, conv: nn.Module, recipe: Recipe, shared: Any) -> nn.Module:
        """`Compute.build` for a `Conv1D`. The class of the carrier is a `Conv1D` and no `nn.Linear`, by which others
        such as PEFT tell how the weight lies, and has `in_features` and `out_features`. Called for those that fit:
        `Compute.unfit` is asked of a Linear of the same sizes and dtype."""


@runtime_checkable
class ConvertsExperts(Protocol):
    """A backend that multiplies by the 3-D Parameters of an experts module (`compute.expert_functions`)."""

    def unfit_experts(self, experts: nn.Module, part: str, recipe: Recipe) -> str | None:
        """`Compute.unfit` for the Parameter `part`."""

    def note_on_experts(self, recipe: Recipe) -> str | None:
        """What a report says of experts in FP8 that the recipe's name does not tell, or None."""

    def build_experts(self, experts: nn.Module, parts: list[str], recipe: Recipe, shared: Any) -> ExpertWeights:
        """What stands for these Parameters, and runs the module with them in FP8. Called for those that fit."""


# The output head


@runtime_checkable
class DefersHead(Protocol):
    """A backend whose output head can multiply in chunks of tokens, without whole logits (`deferred_logits`)."""

    def build_head(self, linear: nn.Linear, recipe: Recipe, shared: Any) -> nn.Module:
        """`Compute.build` for the output head. The carrier is a `DefersLogits`."""


# Weights and their FP8 codes


@runtime_checkable
class StoresWeights(Protocol):
    """A backend that stores weights, or copies of them, in a form of its own (a level's forms are not its concern)."""

    def store_weights(self, root: nn.Module, recipe: Recipe) -> None:
        """Called after layers of the prepared root were converted: swap their weights where the recipe asks for it."""

    def transient_bytes_per_element(self, module: nn.Module) -> float:
        """Bytes per weight element of copies that live from forward to backward, such as the weight's FP8 codes."""


@runtime_checkable
class TakesBlockCodes(Protocol):
    """A backend that multiplies frozen weights with the codes and scales of an FP8 checkpoint (`BlockCodes`)."""

    def takes_block_codes(self, recipe: Recipe) -> bool:
        """Whether it does with this recipe."""


@runtime_checkable
class KeepsWeightCasts(Protocol):
    """A backend whose layers can use the FP8 codes of a weight again in the forwards of further microbatches."""

    def keep_weight_casts(self, root: nn.Module, keep: bool) -> None:
        """Set whether the codes of a forward serve the forwards after it too, until the weight changes."""


@runtime_checkable
class GivesWeightCodes(Protocol):
    """A backend that can tell the FP8 codes of a weight, for checkpoints that hold them."""

    def weight_codes(self, module: nn.Module) -> Quantized | None:
        """The codes that the forward of this converted layer multiplies by now, as they lie in memory, and their
        scale_inv: one, one a row, or one a block. None where there are none for the whole weight."""


@runtime_checkable
class GathersCodes(Protocol):
    """A backend whose weights FSDP2 can gather as the codes that products read (`comm.gathers`)."""

    def travelling(self, root: nn.Module, recipe: Recipe) -> dict[tuple[nn.Module, str], Any]:
        """For each Parameter of the prepared root that is to travel so, by its module and its name there, its codes: an
        object as `comm.gathers.Travelling` describes it."""


# Casts


@runtime_checkable
class ShowsCasts(Protocol):
    """A backend that can tell how its layers cast what passes them (`training.watching.monitor`)."""

    casts_by: str
    """What tells it, in words: the layer's own rule, or formulas that follow another library's."""

    def cast_of(self, module: nn.Module, tensor: int, values: torch.Tensor) -> Cast | None:
        """How this converted layer casts a tensor in the forward and backward that run now. None where it does not, or
        where it is not known.

        Args:
            tensor: INPUT, WEIGHT or GRAD_OUTPUT of `numerics.scaling`.
            values: the layer's input [..., in_features], the Parameter of its weight, or the gradient of its output
                [..., out_features].
        """


# Scaling rules with state


@runtime_checkable
class FollowsOptimizer(Protocol):
    """A backend that must know when the weights have changed."""

    def after_optimizer_step(self, root: nn.Module) -> None:
        """Called after each step of an optimizer that trains the prepared root."""


@runtime_checkable
class HasScalingState(Protocol):
    """A backend with scaling rules that remember earlier steps."""

    def scaling_state(self, root: nn.Module) -> dict[str, torch.Tensor]:
        """Plain tensors by layer name that make a resumed run equal to the bit. Empty for a rule without state."""

    def scaling_buffers(self, root: nn.Module) -> list[torch.Tensor]:
        """The live states that ranks agree on, int32 [3, 2 + history length] each as in `numerics.scaling`. Empty for a
        rule without state, or where the backend agrees on them by itself."""

    def check_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Raise `FP8BackendError` for a state that `scaling_state` of this root did not return: of other layers or
        another history, or with numbers that the rule does not make. Names the layer, and changes nothing."""

    def load_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Restore what `scaling_state` returned. Raises what `check_scaling_state` raises, and changes nothing then."""


def scaling_state(compute: Compute, root: nn.Module) -> dict[str, torch.Tensor]:
    """`HasScalingState.scaling_state`; empty for a backend without state."""
    return compute.scaling_state(root) if isinstance(compute, HasScalingState) else {}


def scaling_buffers(compute: Compute, root: nn.Module) -> list[torch.Tensor]:
    """`HasScalingState.scaling_buffers`; empty for a backend without state."""
    return compute.scaling_buffers(root) if isinstance(compute, HasScalingState) else []


_DAMAGED = "The file is damaged: load an earlier checkpoint"


def check_saved_states(
    own: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    check: Callable[[torch.Tensor, str, str], None],
) -> None:
    """Raise `FP8BackendError` where a saved scaling state differs from the model's own in names, dtypes or shapes, or
    holds what it must not.

    Args:
        check: raises for wrong numbers of one saved state, given its name and an advice.
    """
    if own.keys() != saved.keys():
        old, new = ({name.rpartition(".")[0] or "(root)" for name in states} for states in (saved, own))
        only = {"only the checkpoint has": old - new, "only this model has": new - old}
        parts = [f"{where} {', '.join(sorted(layers)[:6])}" for where, layers in only.items() if layers]
        raise FP8BackendError(
            f"the saved scaling state belongs to other FP8 layers ({'; '.join(parts) or 'of another rule'}): "
            f"prepare the saved model with its recipe"
        )
    try:
        for name, state in own.items():
            if unlike := _unlike(state, saved[name]):
                raise FP8BackendError(f"{name} {unlike}")
            check(saved[name], name, _DAMAGED)
    except FP8BackendError as fault:
        raise FP8BackendError(f"the saved scaling state cannot be loaded, and nothing was changed: {fault}") from None


def _unlike(own: torch.Tensor, saved: torch.Tensor) -> str | None:
    """How a saved scaling state differs in kind from the model's own."""
    if not isinstance(saved, torch.Tensor) or saved.dtype != own.dtype or saved.is_meta or saved.layout != own.layout:
        return f"is no tensor of {own.dtype} with values. {_DAMAGED}"
    if saved.shape != own.shape:
        shapes = f"shape {tuple(saved.shape)}, here {tuple(own.shape)}"
        return f"has an amax history of another length ({shapes}): use the saved run's amax_history_len"
    return None
