"""Frozen FP8 weights of `native`: E4M3 codes with one scale, 1 byte an element.

The products read the codes as they lie, so nothing is cast in a step. The scale is a power of two, so that FP32 and
bf16 hold every value exactly: a saved weight that is loaded again is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...numerics.parameter_swap import swap
from ...numerics.scaled_tensor import ScaledTensor, quantize
from .. import frozen_weights


def is_frozen(weight: torch.Tensor) -> bool:
    """Whether this is a frozen FP8 weight."""
    return isinstance(weight, ScaledTensor)


def freeze(root: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Store the weights of these layers of `root` in FP8. Repeating it does nothing; ties stay."""
    frozen_weights.freeze(root, layers, is_frozen, lambda weight, _: quantized(weight), make_plain)


def quantized(weight: torch.Tensor) -> ScaledTensor:
    """A weight as E4M3 codes with one scale, of the dtype that it had."""
    return quantize(weight.detach(), torch.float8_e4m3fn, weight.dtype)


def make_plain(layer: nn.Module) -> None:
    """Undo `freeze` on one layer."""
    if is_frozen(layer.weight):
        swap(layer.weight, layer.weight.exact(), "weight")
