"""Describe a layer's casts for the monitor."""

from __future__ import annotations

import torch

from ...formats import scaling
from ...formats.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from ...tensors.scaled_tensor import ScaledTensor
from ...tensors.sharded_tensor import is_distributed
from ...tensors.statistics import Cast, in_blocks
from ..counts import DGRAD, FPROP, WGRAD
from .layer_rule import Stored
from .scaling_states import KeepsLedger
from .weights import read

READERS = {INPUT: (FPROP, WGRAD), WEIGHT: (FPROP, DGRAD), GRAD_OUTPUT: (DGRAD, WGRAD)}
"""The products of each operand: the first contracts its columns, the second its rows."""


def cast_of(layer: KeepsLedger, tensor: int, values: torch.Tensor) -> Cast | None:
    """Describe the cast for the tensor's first product; None for a sharded weight, or one stored
    only in FP8."""
    rule = layer.fp8_rule
    readers = [product for product in READERS[tensor] if not rule.high_precision.of(product)]
    if not rule.runs_in_fp8(layer.training) or not readers:
        return None
    fmt = rule.format_of(tensor, readers[0])
    if tensor != WEIGHT:
        matrix = values.detach().reshape(-1, values.shape[-1])
    elif is_distributed(values):
        return None
    else:
        stored = layer._matrix(read(values))
        if stored.is_in(fmt):  # cast by the optimizer
            if not isinstance(values, ScaledTensor) or values.rest is None:
                return None
            exact = layer._matrix(Stored(values.exact(torch.float32), None)).data
            amax, scale = scaling.tensor_amax(exact), stored.scale_inv.reciprocal()
            return Cast(exact, fmt, amax, scale, codes=stored.data)
        matrix = stored.data if stored.scale_inv is None else stored.values(torch.float32)
    if rule.scales.blocks is not None:
        blocks = rule.scales.weight_blocks if tensor == WEIGHT else rule.scales.blocks
        return in_blocks(matrix, fmt, blocks)
    amax = scaling.tensor_amax(matrix)
    # a state changes later
    scale = rule.scales.scale(amax, fmt, tensor, layer.fp8_scaling).clone()
    return Cast(matrix, fmt, amax, scale)
