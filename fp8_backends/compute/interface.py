"""The base class of all backends, `Compute` (docs/extending.rst).

A backend converts a single `nn.Linear`; `convert.conversion` walks a model, and keeps Parameters,
hooks and ties alive.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..errors import FP8BackendError
from ..formats.formats import COMPUTE_DTYPES, Format
from ..formats.scaling import Quantized
from ..tensors.block_codes import CodeLayout
from ..tensors.sharded_tensor import full_shape
from ..tensors.statistics import Cast
from ..torch_tools.modules import plain_name
from .counts import KINDS, ProductCounts
from .fields import Field
from .hardware import Availability

ALIGNMENT = 16
"""FP8 products take multiples of this in the contraction and in the columns of the result. TorchAO
pads the contraction, and no other size."""


class Recipe(Protocol):
    """A resolved recipe (`recipes.handlers.Recipe`), as far as backends read it: its name and the
    declared fields."""

    name: str
    """The canonical backend string."""
    compute: str
    scaling: str
    level: str
    given: frozenset[str]
    """The fields that the user gave."""
    recipes: tuple[Recipe, ...]
    """This recipe and others in its `layers`."""
    gradient_formats: Mapping[str, Format]
    """Formats of the gradient's codes for dgrad and wgrad that differ from `fp8_format`'s."""

    def __getattr__(self, name: str) -> Any:
        """Return the value of a field."""


class TransposedLinear(nn.Linear):
    """A Linear on the Parameters of another layer, with the weight as [in, out]. Its products have
    the same flag."""

    transposed_weight = True


class Norm(NamedTuple):
    """A normalisation layer, and what a backend has in its place."""

    module: nn.Module
    carrier: nn.Module | None
    """The module whose class and added attributes `module` takes on, as in `Compute.build`."""
    reason: str | None
    """Why there is none."""


class Compute(ABC):
    """One way to run the three products of a Linear layer. Stateless: one instance serves many
    models."""

    name: str
    """The name in a backend string: `native`, `te`, `ao`."""
    scalings: tuple[str, ...]
    """Scaling rules for backend strings, named after the backend."""
    default_scaling: str
    level_scaling: str = ""
    """The default at levels above O0, if it differs."""
    unnamed_scalings: tuple[str, ...] = ()
    """Scaling rules chosen by a field instead of a string (`Field.names_scaling`)."""
    levels: tuple[str, ...] = ("O0",)
    """Supported MS-AMP levels."""
    fields: tuple[Field | str, ...] = ()
    """Recipe fields read besides the common ones: declarations, or names of this package's
    fields."""
    casts_by: str = ""
    """The source of `cast_of` in words; empty if the backend has no `cast_of`."""
    parts_module: str = ""
    """The module imported for `parts`; empty without them."""
    takes_transposed: bool = False
    """True if `build` takes a `TransposedLinear`. Its carrier's class then derives from its
    products, and after them from a Linear."""

    def __deepcopy__(self, memo: dict) -> Compute:
        return self  # a copied model has the registered backend

    @abstractmethod
    def availability(self) -> Availability:
        """Return if this backend can run on this machine, with the fix if not. Cheap; imports
        nothing heavy."""

    def check(self, recipe: Recipe) -> None:
        """Raise `RecipeError` for a resolved recipe that no machine can honour. Reads no
        hardware."""

    def unfit(self, linear: nn.Linear, recipe: Recipe) -> str | None:
        """Return the reason to keep this layer in high precision, or None if it can run in FP8."""
        if linear.weight.dtype not in COMPUTE_DTYPES:
            return f"weight dtype {linear.weight.dtype} is not one of fp32, bf16, fp16"
        if 0 in full_shape(linear.weight):
            return "a layer of size zero has no product"
        return None

    def norms(self, root: nn.Module, recipe: Recipe) -> list[Norm]:
        """Return the norms to swap for this backend's own form. A user's `exclude` names them
        too."""
        return []

    def new_shared(self, root: nn.Module, recipe: Recipe) -> Any:
        """Return state for all converted layers of one prepared model to share, or None."""
        return None

    @abstractmethod
    def build(self, linear: nn.Linear, recipe: Recipe, shared: Any) -> nn.Module:
        """Return a carrier: a module that computes `linear` in FP8 and holds the same Parameter
        objects. Conversion moves its class and its added attributes onto `linear`, so that the
        module object, its Parameters, hooks, flags and every other reference to it survive.
        `shared`: the result of `new_shared`."""

    @property
    def parts(self) -> Any:
        """The products with 3-D Parameters that modules multiply by themselves (mixtures of
        experts), or None: `unfit(module, part, recipe)`; `note(recipe)`, a remark for the report or
        None; `build(module, parts, recipe, shared)`, FP8 layers by Parameter, with `attach(module,
        recipe)`, and `detach()` of each layer."""
        return importlib.import_module(self.parts_module) if self.parts_module else None

    def attach(self, root: nn.Module, recipe: Recipe, shared: Any) -> None:
        """Install hooks on the prepared root, after its layers were converted."""

    @abstractmethod
    def is_converted(self, module: nn.Module) -> bool:
        """Return True for an FP8 layer of this backend."""

    def converted_layers(self, root: nn.Module) -> dict[str, nn.Module]:
        """Return this backend's FP8 layers in `root` by their plain names."""
        return {
            plain_name(name): module
            for name, module in root.named_modules()
            if self.is_converted(module)
        }

    @abstractmethod
    def engine(self, module: nn.Module) -> str:
        """Name the engine for this layer's products on the weight's device: `scaled_mm`,
        `bf16-exact`, …"""

    def high_precision_products(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the kinds (fprop, dgrad, wgrad) kept in high precision by this recipe."""
        return tuple(
            kind for kind, high in zip(KINDS, recipe.override_linear_precision, strict=True) if high
        )

    def products(self, module: nn.Module) -> ProductCounts | None:
        """Count a layer's FP8 products since it was prepared. None: one profiled step proves
        them."""
        return None

    def turn_off_fast_accumulation(self, layer: nn.Module) -> None:
        """Let the forward products of a built layer add parts in FP32. For backends that read
        `fast_accumulation`."""
        raise NotImplementedError

    def switches(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the supported changes of built layers: "bf16", to high precision and back; "rule",
        to other rules."""
        return ()

    def switch(self, layer: nn.Module, recipe: Recipe | None) -> None:
        """Multiply by another of the recipes in `switches` from now on; None: in high precision."""
        raise NotImplementedError

    def store_weights(self, root: nn.Module, recipe: Recipe) -> None:
        """Swap weights for a form of the backend's own, if the recipe asks for it; levels store
        theirs afterwards."""

    def transient_bytes_per_element(self, module: nn.Module) -> float:
        """Return bytes per weight element of copies kept from forward to backward, such as the
        weight's FP8 codes."""
        return 0.0

    def takes_block_codes(self, recipe: Recipe, layout: CodeLayout) -> bool:
        """Return True if frozen weights stay codes and scales of a checkpoint (`BlockCodes`) of
        this layout."""
        return False

    def keep_weight_casts(self, root: nn.Module, keep: bool) -> None:
        """Keep the FP8 codes of a forward for later forwards until the weight changes, or stop
        doing so."""

    def weight_codes(self, module: nn.Module) -> Quantized | None:
        """Return the present codes of this converted layer's forward, in the layout of the weight,
        and their scale_inv: one, one a row, or one a block. None if there are none for the whole
        weight."""
        return None

    def gathers_codes(self, recipe: Recipe) -> bool:
        """Return True if FSDP2 gathers converted weights as codes, one byte an element."""
        return False

    def travelling(self, root: nn.Module, recipe: Recipe) -> dict[tuple[nn.Module, str], Any]:
        """Map (module, parameter name) to the codes for FSDP2 to gather, objects as
        `comm.fsdp2.Travelling` describes them. Weights without an entry travel as they are
        stored."""
        return {}

    def cast_of(self, module: nn.Module, tensor: int, values: torch.Tensor) -> Cast | None:
        """Return the cast of a tensor (INPUT, WEIGHT or GRAD_OUTPUT of `formats.scaling`) by this
        converted layer in the running forward or backward; None without a cast, or if it is not
        known. `values`: the layer's input [..., in_features], the Parameter of its weight, or the
        gradient of its output [..., out_features]."""
        return None

    def after_optimizer_step(self, root: nn.Module) -> None:
        """Take note that an optimizer step has changed the weights of the prepared root."""

    def scaling_state(self, root: nn.Module) -> dict[str, torch.Tensor]:
        """Return plain tensors by layer name, for a resumed run equal to the bit. Empty for a rule
        without state."""
        return {}

    def scaling_buffers(self, root: nn.Module) -> list[torch.Tensor]:
        """Return the live states for ranks to agree on, int32 [3, 2 + history length] each as in
        `formats.scaling`. Empty for a rule without state, or if the backend agrees on them
        itself."""
        return []

    def check_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Raise `FP8BackendError` for a state of other layers, of another history or with
        impossible numbers."""

    def load_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Restore the result of `scaling_state`, after `check_scaling_state`."""


_DAMAGED = "The file is damaged: load an earlier checkpoint"


def check_saved_states(
    current: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    check: Callable[[torch.Tensor, str, str], None],
) -> None:
    """Raise `FP8BackendError` for a saved scaling state with other names, dtypes or shapes, or if
    `check` does."""
    if current.keys() != saved.keys():
        old, new = (
            {name.rpartition(".")[0] or "(root)" for name in states} for states in (saved, current)
        )
        only = {"only the checkpoint has": old - new, "only this model has": new - old}
        parts = [
            f"{where} {', '.join(sorted(layers)[:6])}" for where, layers in only.items() if layers
        ]
        raise FP8BackendError(
            "the saved scaling state belongs to other FP8 layers "
            f"({'; '.join(parts) or 'of another rule'}): prepare the saved model with its recipe"
        )
    try:
        for name, state in current.items():
            tensor = saved[name]
            is_alike = isinstance(tensor, torch.Tensor) and (tensor.dtype, tensor.layout) == (
                state.dtype,
                state.layout,
            )
            if not is_alike or tensor.is_meta:
                raise FP8BackendError(
                    f"{name} is no tensor of {state.dtype} with values. {_DAMAGED}"
                )
            if tensor.shape != state.shape:
                shapes = f"shape {tuple(tensor.shape)}, here {tuple(state.shape)}"
                raise FP8BackendError(
                    f"{name} has an amax history of another length ({shapes}): use the saved run's "
                    "amax_history_len"
                )
            check(tensor, name, _DAMAGED)
    except FP8BackendError as fault:
        raise FP8BackendError(
            f"the saved scaling state cannot be loaded, and nothing was changed: {fault}"
        ) from None
