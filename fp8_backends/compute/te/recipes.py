"""TransformerEngine's own objects for a resolved recipe: its recipe, the context that enters FP8, what its device can.

Imports TransformerEngine, so it is imported only where `te` runs. Names that moved between its versions 2.0
and 2.20 are found here, once.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401, before TransformerEngine, whose libraries need those that torch loads
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.tensor import QuantizedTensor

from ...errors import BackendUnavailableError, RecipeError

try:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState
except ImportError:  # before 2.9
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, RecipeState

if TYPE_CHECKING:
    from ..interface import Recipe

__all__ = ["FP8GlobalStateManager", "QuantizedTensor", "RecipeState", "te_recipe"]

FP8_WEIGHT_SLOT = 1
"""The weight's place among TransformerEngine's forward quantizers of a layer: input, weight, output."""

VERSION = importlib.metadata.version("transformer_engine")

_CLASSES = {
    "delayed": "DelayedScaling",
    "dynamic": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


class NamedDelayedScaling(te_recipe.DelayedScaling):
    """`DelayedScaling` whose text names its algorithm.

    TransformerEngine keeps the amaxes of all models of a process together, in groups of one recipe's text, and updates
    a group by the recipe that was entered last. Its own text leaves the algorithm out, so that of two models, one with
    "max" and one with "most_recent", one would train by the other's rule.
    """

    def _make_repr(self) -> str:  # from 2.16 on, where texts are cached
        return f"{super()._make_repr()}, amax_compute_algo={self.amax_compute_algo}"

    if not hasattr(te_recipe.DelayedScaling, "_make_repr"):

        def __repr__(self) -> str:
            return f"{super().__repr__()}, amax_compute_algo={self.amax_compute_algo}"


def recipe_object(recipe: Recipe) -> te_recipe.Recipe:
    """TransformerEngine's recipe of a resolved one.

    Raises:
        RecipeError: this version of TransformerEngine does not have the scaling rule.
    """
    known = getattr(te_recipe, _CLASSES[recipe.scaling], None)
    if known is None:
        raise RecipeError(
            f"{recipe.name}: TransformerEngine {VERSION} has no {_CLASSES[recipe.scaling]}; "
            f"install a newer one (pip install -U 'transformer-engine[pytorch]'), or use te:delayed"
        )
    fp8_format = te_recipe.Format[recipe.fp8_format]
    if recipe.scaling != "delayed":
        return known(fp8_format=fp8_format)
    return NamedDelayedScaling(
        margin=recipe.margin,
        fp8_format=fp8_format,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
    )


def autocast(te_object: te_recipe.Recipe) -> Any:
    """The context manager in which TransformerEngine's modules run in FP8."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=te_object)
    return te.fp8_autocast(enabled=True, fp8_recipe=te_object)  # before 2.9


def check_version(what: str, instead: str, of_experts: bool = False) -> None:
    """Raise `BackendUnavailableError` if `te.Linear`, or `te.GroupedLinear` for experts, takes no weight but its own in
    this version. Levels, Conv1D and experts give it others."""
    kind, method, since = te.Linear, "_get_weight_tensors", "2.9"
    if of_experts:
        kind, method, since = te.GroupedLinear, "_get_bias_tensors", "2.14"
    if method not in vars(kind):
        raise BackendUnavailableError(
            f"{what} cannot run here: te.{kind.__name__} of TransformerEngine {VERSION} takes no weight but its own. "
            f"Fix: pip install -U 'transformer-engine[pytorch]' ({since} or newer), or use {instead}"
        )


def check_device(recipe: Recipe) -> None:
    """Raise `BackendUnavailableError`, with TransformerEngine's reason, where its device has no such products."""
    supported, reason = device_support(recipe.scaling)
    native = f"native:{recipe.scaling}, which follows the same rule"
    if not supported:
        raise BackendUnavailableError(
            f"{recipe.name} cannot run here: TransformerEngine {VERSION}: {reason or 'not on this device'}. "
            f"Fix: use {'te:delayed' if device_support('delayed')[0] else native}"
        )


def device_support(scaling: str) -> tuple[bool, str]:
    """Whether the device of TransformerEngine multiplies by this rule, and why not. TransformerEngine is asked itself,
    which knows of driver and library versions, and raises where there is no driver at all."""
    name = {"blockwise": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available"}.get(
        scaling, "is_fp8_available"
    )
    try:
        if hasattr(te, name):
            return getattr(te, name)(return_reason=True)
        return getattr(FP8GlobalStateManager, name)()  # before 2.9
    except (RuntimeError, AssertionError) as error:
        return False, str(error)


def rows_multiple(scaling: str) -> int:
    """Rows of an input are padded to a multiple of this: they are the contraction of the weight gradient's product."""
    return 32 if scaling == "mxfp8" else 16


def transposed_copies() -> bool:
    """Whether this device's per-tensor FP8 products need a transposed copy of the codes (Hopper and Ada)."""
    from transformer_engine.pytorch import utils

    supported = getattr(utils, "is_non_tn_fp8_gemm_supported", None)
    return supported is None or not supported()
