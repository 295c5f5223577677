"""Who runs the matrix products, and with which scaling rule.

A compute provides one small class, `Compute`. It converts a single `nn.Linear`, or the experts of one block where it
has products for them; walking a model, filtering layers and keeping Parameters, hooks and ties alive is
`fp8_backends.training.conversion`'s work, once for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from ..errors import FP8BackendError
from ..numerics.sharded_tensor import full_shape
from .counts import ProductCounts
from .profiling import Layer, ProductProfile

if TYPE_CHECKING:
    from .expert_functions import ExpertWeights
    from .hardware import Availability

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of weights, activations and results around FP8."""

TE_FIELDS = frozenset(
    {
        "fp8_format",
        "margin",
        "interval",
        "amax_history_len",
        "amax_compute_algo",
        "override_linear_precision",
        "use_autocast_during_eval",
    }
)
"""Recipe fields of TransformerEngine's rules, which `native` follows without it: the two computes read the same."""


class Recipe(Protocol):
    """What a compute reads of a resolved recipe (`recipes.handlers.Recipe`): its name, and the fields it declares."""

    name: str
    """The canonical backend string."""
    compute: str
    scaling: str
    level: str
    given: frozenset[str]
    """Names of what the user said."""

    def __getattr__(self, name: str) -> Any:
        """The value of a field."""


class Norm(NamedTuple):
    """A normalisation layer, and what a compute has in its place."""

    module: nn.Module
    carrier: nn.Module | None
    """As of `Compute.build`: a module whose class and added attributes `module` takes on. It keeps its Parameters."""
    reason: str | None
    """Why there is none."""


class Fusion(NamedTuple):
    """What became of a norm where the recipe says `fuse_norms`."""

    norm: nn.Module
    linear: nn.Module | None
    """The layer whose kernel norms its own input."""
    reason: str | None
    """Why there is none."""


class Compute(ABC):
    """One way to run the three products of a Linear layer. Holds no state: one instance serves many models."""

    name: str
    """The name in a backend string: `native`, `te`, `ao`."""
    scalings: tuple[str, ...]
    """Scaling rules that a backend string may name after the compute."""
    default_scaling: str
    levels: tuple[str, ...] = ("O0",)
    """MS-AMP levels that this compute can be combined with."""
    fields: frozenset[str] = frozenset()
    """Recipe fields, beyond those that every recipe has, that this compute honours."""

    @abstractmethod
    def availability(self) -> Availability:
        """Whether this compute can run on this machine, and the fix where it cannot. Cheap; imports nothing heavy."""

    def scaling_for(self, level: str, values: Mapping[str, Any]) -> str:
        """The scaling rule where the user names none. `values`: the fields that the user gave."""
        return self.default_scaling

    def check(self, recipe: Recipe) -> None:
        """Raise `RecipeError` for a resolved recipe that cannot be honoured on any machine. Asks no hardware."""

    def unfit(self, linear: nn.Linear, recipe: Recipe) -> str | None:
        """The reason why this layer cannot run in FP8 and stays in high precision, or None when it can."""
        if linear.weight.dtype not in COMPUTE_DTYPES:
            return f"weight dtype {linear.weight.dtype} is not one of fp32, bf16, fp16"
        if 0 in full_shape(linear.weight):
            return "a layer of size zero has no product"
        return None

    @abstractmethod
    def build(self, linear: nn.Linear, recipe: Recipe, shared: Any) -> nn.Module:
        """A module that computes `linear` in FP8 and holds the same Parameter objects.

        It is a carrier: conversion moves its class and its added attributes and buffers onto `linear`, so that the
        module object, its Parameters, hooks, flags and every other reference to it survive. `shared` is what
        `new_shared` returned for this model.
        """

    def unfit_experts(self, experts: nn.Module, part: str, recipe: Recipe) -> str | None:
        """As `unfit`, for the 3-D Parameter `part` of an experts module (`expert_functions`)."""
        return f"expert weights in one 3-D Parameter: {self.name} has no products for them (native has)"

    def note_on_experts(self, recipe: Recipe) -> str | None:
        """What a report says of experts in FP8 that the recipe's name does not tell, or None."""
        return None

    def build_experts(self, experts: nn.Module, parts: list[str], recipe: Recipe, shared: Any) -> ExpertWeights:
        """What stands for these 3-D Parameters of an experts module, and runs the module with them in FP8. Called for
        those that are not `unfit_experts`."""
        raise NotImplementedError

    def norms(self, root: nn.Module, recipe: Recipe) -> list[Norm]:
        """Normalisation layers that this compute has its own form of, none of them swapped yet. Reported apart from
        the layers with products; a user's `exclude` names them too."""
        return []

    def fuse(self, root: nn.Module, recipe: Recipe, new: dict[nn.Module, nn.Module]) -> list[Fusion]:
        """Let norms and layers that are about to be swapped work in pairs, where the recipe asks for it.

        Args:
            new: carriers of layers and norms, keyed by the modules that will take them on. Those of a pair change.
        """
        return []

    def new_shared(self, root: nn.Module, recipe: Recipe) -> Any:
        """State that all converted layers of one prepared model share (None when there is none)."""
        return None

    def attach(self, root: nn.Module, recipe: Recipe, shared: Any) -> None:
        """Install what the compute needs on the prepared root (hooks), after its layers were converted."""

    def store_weights(self, root: nn.Module, recipe: Recipe) -> None:
        """Called after layers of the prepared root were converted: for a compute that keeps their weights in a form of
        its own, where the recipe asks for it. A level's forms are no concern of a compute."""

    def keep_weight_casts(self, root: nn.Module, keep: bool) -> None:
        """Whether the FP8 codes of a weight that its layer makes in a forward serve the forwards after it too, until
        the weight changes: for microbatches that one optimizer step accumulates. For a compute that makes them anew."""

    def after_optimizer_step(self, root: nn.Module) -> None:
        """Called after each step of an optimizer that trains the prepared root: for rules whose scales follow it."""

    @abstractmethod
    def is_converted(self, module: nn.Module) -> bool:
        """Whether this module is one of this compute's FP8 layers."""

    @abstractmethod
    def engine(self, module: nn.Module) -> str:
        """What makes the products of this layer where its weight lies now: `scaled_mm`, `bf16-exact`, …"""

    def products(self, module: nn.Module) -> ProductCounts | None:
        """Counts of a converted layer. None: only a profiled step can tell (`auditing.profile_products`)."""
        return None

    def profile(self, layers: list[Layer], keep: bool = False) -> ProductProfile:
        """What counts the products of these layers in a profiled step, for a compute that does not count by itself: an
        object with the methods and attributes of `ProductProfile`."""
        return ProductProfile(layers, keep)

    def high_precision_products(self, recipe: Recipe) -> tuple[str, ...]:
        """Those of fprop, dgrad, wgrad that the recipe keeps in high precision on purpose."""
        return ()

    def transient_bytes_per_element(self, module: nn.Module) -> float:
        """Bytes per weight element of copies that live from forward to backward, such as the weight's FP8 codes."""
        return 0.0

    def scaling_state(self, root: nn.Module) -> dict[str, torch.Tensor]:
        """Plain tensors, keyed by layer name, that make a resumed run equal to the bit. Empty when stateless."""
        return {}

    def scaling_buffers(self, root: nn.Module) -> list[torch.Tensor]:
        """The live states of stateful rules, int32 [3, 2 + history length] each as in `scaling`, which ranks that train
        together agree on. Empty when stateless, or where the compute agrees on them by itself."""
        return []

    def load_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Restore what `scaling_state` returned. Raises `FP8BackendError` naming layers that do not match."""


def check_same_states(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise `FP8BackendError` where a saved scaling state has other names than the model's own."""
    if differing := sorted(own.keys() ^ saved.keys()):
        raise FP8BackendError(
            f"the saved scaling state does not fit this model: {len(differing)} states differ, among them "
            f"{', '.join(differing[:3])}; prepare the model with the recipe that it was saved with"
        )
