"""The `te` backend: NVIDIA's TransformerEngine on the model's own Parameters.

It enters TransformerEngine's global `autocast` around the forward of the prepared root, pads rows,
recomputes with the scales of the original forward, and keeps checkpoints plain (docs/choosing.rst).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import BackendUnavailableError, RecipeError
from ...formats.formats import AMAX, POSITIVE, RECIPE_FORMATS, check_values
from ...formats.scaling import (
    GRAD_OUTPUT,
    MX,
    RULES,
    WEIGHT,
    Quantized,
    tensor_amax,
)
from ...tensors.scaled_tensor import ScaledTensor
from ...tensors.sharded_tensor import is_distributed, local_part
from ...tensors.statistics import Cast, in_blocks
from .. import chips, hardware
from ..counts import ProductCounts
from ..fields import LEVELS, RULE_FIELDS, Field
from ..frozen_weights import check, freeze
from ..hardware import Availability
from ..interface import Compute, Norm, Recipe, TransposedLinear, check_saved_states

if TYPE_CHECKING:
    from .layer import ModelState, TELayer
    from .linear import TEProducts

REINSTALL = (
    "reinstall TransformerEngine for this PyTorch and CUDA, as "
    "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/installation.html describes"
)


class TransformerEngineCompute(Compute):
    """The products of `te.Linear`."""

    name = "te"
    scalings: tuple[str, ...] = ("delayed", "dynamic", "blockwise", "mxfp8")
    default_scaling = "delayed"
    levels: tuple[str, ...] = LEVELS
    fields: tuple[Field | str, ...] = (*RULE_FIELDS, "fast_accumulation")
    casts_by = "the native equivalent of TransformerEngine's rule"
    takes_transposed = True
    parts_module = "fp8_backends.compute.experts.te_parts"

    def availability(self) -> Availability:
        if importlib.util.find_spec("transformer_engine") is None:
            return Availability(
                False,
                "TransformerEngine is not installed",
                f"{chips.INSTALL_TE}, after PyTorch for CUDA, on an NVIDIA GPU of compute "
                f"capability 8.9 or higher; or {chips.INSTEAD_OF_TE}",
            )
        if not _has_compiled_part():
            return Availability(
                False,
                "TransformerEngine's package is installed without its compiled part for PyTorch",
                f"{chips.INSTALL_TE}, or {chips.INSTEAD_OF_TE}",
            )
        # it checks the versions of driver and libraries
        if "transformer_engine.pytorch" in sys.modules:
            from .recipes import device_support

            supported, reason = device_support("delayed")
        else:
            chip = hardware.chip()
            cell = chips.cell_of("te:delayed", chip)
            supported = cell.state_with(hardware.cuda_release()) != chips.REFUSED
            reason = f"{chips.NOTES[cell.note].reason} (here: {chip.title})" if cell.note else ""
        if not supported:
            return Availability(False, reason, chips.INSTEAD_OF_TE)
        return Availability(
            True, f"TransformerEngine {hardware.version('transformer-engine')} on cuda"
        )

    def check(self, recipe: Recipe) -> None:
        """Refuse fields that TransformerEngine ignores, except wgrad in high precision
        (`linear.PlainWgrad`)."""
        if recipe.interval != 1:
            raise RecipeError(
                f"interval={recipe.interval}: TransformerEngine ignores it since version 2.4; "
                "leave it out, or use native:delayed, which honours it"
            )
        if any(recipe.override_linear_precision[:2]) or recipe.gradient_formats:
            name = "products" if "products" in recipe.given else "override_linear_precision"
            raise RecipeError(
                f"{name}={getattr(recipe, name)}: with te only wgrad can be in high precision, "
                "products="
                f'{{"wgrad": "bf16"}}: TransformerEngine itself ignores the field since version '
                "2.1. "
                f"Use that, or native:{recipe.scaling}, which honours every combination"
            )

    def switches(self, recipe: Recipe) -> tuple[str, ...]:
        return ("bf16",) if recipe.level == "O0" else ()

    def switch(self, layer: TELayer, recipe: Recipe | None) -> None:
        layer.te_state.paused = recipe is None

    def unfit(self, linear: nn.Linear, recipe: Recipe) -> str | None:
        return super().unfit(linear, recipe) or unaligned(
            linear.in_features, linear.out_features, recipe
        )

    def norms(self, root: nn.Module, recipe: Recipe) -> list[Norm]:
        load()
        from .norms import norms

        return norms(root, bool(recipe.use_autocast_during_eval))

    def new_shared(self, root: nn.Module, recipe: Recipe) -> ModelState:
        load()
        from .layer import ModelState
        from .recipes import check_device, check_version

        if recipe.level != "O0":
            check_version(recipe.name, instead=f"te:{recipe.scaling}")
        check_device(recipe)
        return ModelState(recipe)

    def build(self, linear: nn.Linear, recipe: Recipe, shared: ModelState) -> TEProducts:
        from .linear import TELinear
        from .recipes import check_version

        if isinstance(linear, TransposedLinear):
            check_version(f"{recipe.name} of Conv1D layers", instead=f"native:{recipe.scaling}")
            if recipe.fp8_params and RULES[recipe.scaling].weight_blocks is MX:
                raise RecipeError(
                    "fp8_params=True does not go with te:mxfp8 and a Conv1D: TransformerEngine's "
                    "MXFP8 weights cannot be read transposed. Use te:blockwise, te:dynamic or "
                    "native:mxfp8, or leave out fp8_params"
                )
        carrier = TELinear.around(linear, linear.in_features, linear.out_features, shared)
        if recipe.fp8_params:
            check(carrier)
        return carrier

    def turn_off_fast_accumulation(self, layer: TEProducts) -> None:
        layer.te_fast_accumulation = False

    def attach(self, root: nn.Module, recipe: Recipe, shared: ModelState) -> None:
        from .layer import AroundRoot

        root.forward = AroundRoot(root, shared)

    def after_optimizer_step(self, root: nn.Module) -> None:
        for layer in filter(self.is_converted, root.modules()):
            layer.te_cast_weight = None
            layer.te_state.forget_modes()

    def store_weights(self, root: nn.Module, recipe: Recipe) -> None:
        if recipe.fp8_params:
            from .weights import is_frozen, make_plain, quantized

            freeze(root, self.converted_layers(root), is_frozen, quantized, make_plain)

    def is_converted(self, module: nn.Module) -> bool:
        layer = sys.modules.get(f"{__package__}.layer")
        return layer is not None and isinstance(module, layer.TELayer)

    def engine(self, module: nn.Module) -> str:
        return "te"

    def products(self, module: TELayer) -> ProductCounts:
        return module.te_counts

    def transient_bytes_per_element(self, module: TELayer) -> float:
        # the weight's codes, kept from forward to backward, and their transposed copy for dgrad
        from .recipes import transposed_copies

        recipe, weight = module.te_state.recipe, local_part(module.weight)
        scaled = isinstance(weight, ScaledTensor)
        one_scale = RULES[recipe.scaling].blocks is None
        is_its_codes = _is_its_codes(weight, recipe)
        # products read the weight itself, or a copy if it lies the other way round
        if recipe.fp8_params:
            return float(module.transposed_weight and one_scale and not transposed_copies())
        if module.te_fsdp2 and not scaled:
            return 0.0  # recreated in backward
        if is_its_codes and module.transposed_weight:
            return 1.0  # the codes for fprop; dgrad multiplies the weight itself
        return float(not is_its_codes) + float(not one_scale or transposed_copies())

    def weight_codes(self, module: TELayer) -> Quantized | None:
        if not hasattr(type(module), "matrix"):  # a 3-D weight
            return None
        weight = module.matrix
        has_codes = _is_its_codes(weight, module.te_state.recipe)
        return Quantized(weight.codes, weight.scale_inv) if has_codes else None

    def cast_of(self, module: TELayer, tensor: int, values: torch.Tensor) -> Cast | None:
        """Return the cast by the equal rules of `formats.scaling`, or by TransformerEngine's own
        delayed scales. None for a weight that is sharded, or multiplied without a cast."""
        recipe = module.te_state.recipe
        if not hasattr(type(module), "matrix") or not module.te_state.runs_in_fp8(module.training):
            return None
        if tensor == WEIGHT:
            values = module.matrix
            if is_distributed(values) or type(values.data) is not torch.Tensor:
                return None
        forward, gradient = RECIPE_FORMATS[recipe.fp8_format]
        fmt = gradient if tensor == GRAD_OUTPUT else forward
        matrix = values.detach().reshape(-1, values.shape[-1])
        rule = RULES[recipe.scaling]
        if rule.blocks is not None:
            return in_blocks(matrix, fmt, rule.weight_blocks if tensor == WEIGHT else rule.blocks)
        amax = tensor_amax(matrix)
        if rule.state_name is None:
            return Cast(matrix, fmt, amax, rule.scale(amax, fmt, tensor, None))
        state = module.delayed_state("backward" if tensor == GRAD_OUTPUT else "forward")
        if state is None:
            return None
        return Cast(matrix, fmt, amax, state.scale[0 if tensor == GRAD_OUTPUT else tensor].clone())

    # no `scaling_buffers`: TransformerEngine reduces amaxes over the ranks itself

    def scaling_state(self, root: nn.Module) -> dict[str, torch.Tensor]:
        return {
            f"{name}.te_{part}": tensor
            for name, layer in self.converted_layers(root).items()
            for part, tensor in layer.scaling_state().items()
        }

    def check_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        def check_numbers(saved: torch.Tensor, name: str, advice: str) -> None:
            check_values(saved, POSITIVE if name.endswith("_scale") else AMAX, name, advice)

        check_saved_states(self.scaling_state(root), state, check_numbers)

    def load_scaling_state(self, root: nn.Module, state: dict[str, torch.Tensor]) -> None:
        for name, layer in self.converted_layers(root).items():
            prefix = f"{name}.te_"
            layer.load_scaling_state(
                {part: state[f"{prefix}{part}"] for part in layer.scaling_state()}
            )


def unaligned(in_features: int, out_features: int, recipe: Recipe) -> str | None:
    """Return the reason against matrices of these sizes, or None."""
    alignment = RULES[recipe.scaling].multiple
    if in_features % alignment or out_features % alignment:
        sizes = f"{in_features} -> {out_features}"
        return f"{sizes} are not multiples of {alignment}, and TransformerEngine cannot pad them"
    return None


def load() -> Any:
    """Import TransformerEngine's PyTorch module. Raises `BackendUnavailableError` if it does not
    load."""
    try:
        import transformer_engine.pytorch as te
    # a missing library is an OSError, another mismatch a RuntimeError or AssertionError
    except Exception as error:
        reason = f"importing TransformerEngine fails with {type(error).__name__}: {error}"
        fix = f"{REINSTALL}, or {chips.INSTEAD_OF_TE}"
        raise BackendUnavailableError(f"te cannot run here: {reason}. Fix: {fix}") from error
    return te


def _is_its_codes(weight: torch.Tensor, recipe: Recipe) -> bool:
    """Return True if TransformerEngine multiplies the stored data without a cast
    (`weights.for_te`)."""
    if not isinstance(weight, ScaledTensor) or RULES[recipe.scaling].blocks is not None:
        return False
    return weight.codes.dtype == torch.float8_e4m3fn


def _has_compiled_part() -> bool:
    """Look for TransformerEngine's extension for PyTorch, without loading it."""
    name = "transformer_engine_torch"
    if (
        name in sys.modules
        or hardware.version("transformer-engine-torch")
        or importlib.util.find_spec(name)
    ):
        return True
    package = Path(importlib.util.find_spec("transformer_engine").origin).parent
    return any(any(folder.glob(f"*{name}*")) for folder in (package, package / "wheel_lib"))
