"""TransformerEngine's objects for a resolved recipe, under their names in versions 2.0 to 2.20, and
its device checks.

Imports TransformerEngine, so it is imported when `te` runs.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch  # before TransformerEngine, which needs its libraries
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.tensor import QuantizedTensor

from ...errors import BackendUnavailableError, FP8BackendError, RecipeError
from ...formats.scaling import RULES
from .. import chips
from ..interface import Recipe

try:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState
except ImportError:  # before 2.9
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, RecipeState

__all__ = ["FP8GlobalStateManager", "QuantizedTensor", "RecipeState", "te_recipe"]

FP8_WEIGHT_SLOT = 1
"""The weight's index in a layer's forward quantizers: input, weight, output."""

VERSION = importlib.metadata.version("transformer_engine")

_CLASSES = {
    "delayed": "DelayedScaling",
    "dynamic": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


class NamedDelayedScaling(te_recipe.DelayedScaling):
    """`DelayedScaling` with its algorithm in its text. TransformerEngine groups the amaxes of all
    models of a process by the recipe's text: a model with "max" and one with "most_recent" would
    share one rule."""

    def _make_repr(self) -> str:  # from 2.16 on, where texts are cached
        return f"{super()._make_repr()}, amax_compute_algo={self.amax_compute_algo}"

    if not hasattr(te_recipe.DelayedScaling, "_make_repr"):

        def __repr__(self) -> str:
            return f"{super().__repr__()}, amax_compute_algo={self.amax_compute_algo}"


def recipe_object(recipe: Recipe) -> te_recipe.Recipe:
    """Make TransformerEngine's recipe. Raises `RecipeError` if this version lacks the scaling
    rule."""
    recipe_class = getattr(te_recipe, _CLASSES[recipe.scaling], None)
    if recipe_class is None:
        raise RecipeError(
            f"{recipe.name}: TransformerEngine {VERSION} has no {_CLASSES[recipe.scaling]}; "
            "install a newer one (pip install -U 'transformer-engine[pytorch]'), or use te:delayed"
        )
    fp8_format = te_recipe.Format[recipe.fp8_format]
    if RULES[recipe.scaling].state_name is None:
        return recipe_class(fp8_format=fp8_format)
    return NamedDelayedScaling(
        margin=recipe.margin,
        fp8_format=fp8_format,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
    )


def autocast(te_object: te_recipe.Recipe) -> Any:
    """Return the context manager of TransformerEngine's FP8."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=te_object)
    return te.fp8_autocast(enabled=True, fp8_recipe=te_object)  # before 2.9


@contextlib.contextmanager
def fast_accumulation_off(te_object: te_recipe.Recipe) -> Iterator[None]:
    """Run forwards with TransformerEngine's split accumulator."""
    # `DelayedScaling` has none, and its layers ask for one
    before = vars(te_object).get("fp8_gemm_fprop")
    te_object.fp8_gemm_fprop = te_recipe.MMParams(use_split_accumulator=True)
    try:
        yield
    finally:
        if before is None:
            del te_object.fp8_gemm_fprop
        else:
            te_object.fp8_gemm_fprop = before


def check_version(
    what: str,
    instead: str,
    kind: type = te.Linear,
    method: str = "_get_weight_tensors",
    since: str = "2.9",
) -> None:
    """Raise `BackendUnavailableError` if this version's layer multiplies only its own weight: it
    lacks `method`, which it has `since` a later one. Levels, transposed weights and other modules'
    Parameters replace the weight."""
    if method not in vars(kind):
        raise BackendUnavailableError(
            f"{what} cannot run here: te.{kind.__name__} of TransformerEngine {VERSION} takes no "
            f"weight but its own. Fix: pip install -U 'transformer-engine[pytorch]' ({since} or "
            f"newer), or use {instead}"
        )


def check_device(recipe: Recipe) -> None:
    """Raise `BackendUnavailableError`, with TransformerEngine's reason, if its device lacks these
    products."""
    supported, reason = device_support(recipe.scaling)
    native = f"native:{recipe.scaling}, which follows the same rule"
    if not supported:
        raise BackendUnavailableError(
            f"{recipe.name} cannot run here: TransformerEngine {VERSION}: "
            f"{reason or 'not on this device'}. Fix: use "
            f"{'te:delayed' if device_support('delayed')[0] else native}"
        )


def refuse_cpu(x: torch.Tensor) -> None:
    """Raise `FP8BackendError` for a tensor on the CPU of a machine with a GPU."""
    if x.device.type == "cpu" and torch.cuda.is_available():
        raise FP8BackendError(
            "te: a layer got a tensor on the CPU, and TransformerEngine computes on CUDA devices "
            "only. Fix: move model and inputs to the GPU, without Accelerator(cpu=True), or "
            f"{chips.INSTEAD_OF_TE}"
        )


def device_support(scaling: str) -> tuple[bool, str]:
    """Ask TransformerEngine if its device multiplies by this rule, or why not. Raises without a
    driver."""
    names = {"blockwise": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available"}
    name = names.get(scaling, "is_fp8_available")
    try:
        if hasattr(te, name):
            return getattr(te, name)(return_reason=True)
        return getattr(FP8GlobalStateManager, name)()  # before 2.9
    except (RuntimeError, AssertionError) as error:
        return False, str(error)


def transposed_copies() -> bool:
    """Return True if this device's per-tensor FP8 products need a transposed copy of the codes
    (Hopper and Ada)."""
    from transformer_engine.pytorch import utils

    supported = getattr(utils, "is_non_tn_fp8_gemm_supported", None)
    return supported is None or not supported()
