"""`fp8_params` of the native compute: a weight that does not train is kept as E4M3 codes with one scale.

The products read the codes as they lie, so nothing is cast in a step, and the layer holds no copy: 1 byte an element.
The scale is a power of two, so that FP32 and bf16 hold every value exactly: a saved weight that is loaded again is the
same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...errors import RecipeError
from ...numerics.parameter_swap import swap
from ...numerics.scaled_tensor import ScaledTensor, quantize
from .. import frozen_weights

LEVEL_O3 = "msamp:O3"


def check(linear: nn.Linear) -> None:
    """Raise `RecipeError` for a layer whose weight cannot be kept in FP8."""
    frozen_weights.check(linear, LEVEL_O3)


def check_kept(layer: nn.Linear) -> None:
    """Raise where a layer that runs has its weight in FP8 no more, or trains it since."""
    check(layer)
    if not is_kept(layer.weight):
        raise RecipeError(frozen_weights.SHARDED)


def is_kept(weight: torch.Tensor) -> bool:
    """Whether this weight is kept in FP8."""
    return isinstance(weight, ScaledTensor)


def keep(root: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Keep the weights of these layers of `root` in FP8. Repeating it does nothing; ties stay."""
    frozen_weights.keep(root, layers, is_kept, lambda weight, _: quantized(weight), make_plain)


def quantized(weight: torch.Tensor) -> ScaledTensor:
    """A weight as E4M3 codes with one scale, of the dtype that it had."""
    values = weight.detach()
    return quantize(values, torch.float8_e4m3fn, values.dtype)


def make_plain(layer: nn.Module) -> None:
    """Undo `keep` on one layer."""
    if is_kept(layer.weight):
        swap(layer.weight, layer.weight.dequantize(), "weight")
