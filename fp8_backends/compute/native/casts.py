"""How a layer casts what passes it, told by its own rule: for `training.watching.monitor`."""

from __future__ import annotations

import torch

from ...numerics.scaled_tensor import ScaledTensor
from ...numerics.scaling import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    delayed_scale,
    power_of_two_scale,
    scale_from_amax,
    tensor_amax,
    window_scale,
)
from ...numerics.sharded_tensor import is_distributed
from ...numerics.statistics import Cast, in_blocks
from ..deferred_logits import DefersLogits
from .layer_rule import Stored
from .linear import DGRAD, FPROP, WGRAD, FP8Products

_PRODUCTS = {INPUT: (FPROP, WGRAD), WEIGHT: (FPROP, DGRAD), GRAD_OUTPUT: (DGRAD, WGRAD)}
"""The products that read a tensor."""


def cast_of(layer: FP8Products, tensor: int, values: torch.Tensor) -> Cast | None:
    """`Compute.cast_of`. Of a rule along the contraction it is the cast for the first of a tensor's two products: of
    input and weight that for fprop, of the gradient that for dgrad. None for a head that runs in chunks of tokens, for
    a weight that is sharded, and for one that is stored in FP8 alone, of which nothing else is known here."""
    rule = layer.fp8_rule
    in_fp8 = layer.training or rule.fp8_in_eval
    if not in_fp8 or isinstance(layer, DefersLogits) or all(rule.high_precision[each] for each in _PRODUCTS[tensor]):
        return None
    if tensor == WEIGHT:
        return _cast_of_weight(layer, values)
    fmt = rule.gradient_format if tensor == GRAD_OUTPUT else rule.forward_format
    matrix = values.detach().reshape(-1, values.shape[-1])
    if rule.along is not None:
        return in_blocks(matrix, fmt, rule.along.blocks)
    amax = tensor_amax(matrix)
    if rule.scaling == "window":
        return Cast(matrix, fmt, amax, window_scale(layer.fp8_scaling, tensor, amax, fmt))
    return Cast(matrix, fmt, amax, _one_scale(layer, tensor, amax))


def _cast_of_weight(layer: FP8Products, weight: torch.Tensor) -> Cast | None:
    rule, fmt = layer.fp8_rule, layer.fp8_rule.forward_format
    if is_distributed(weight):
        return None
    stored = layer._matrix(Stored.of(weight))
    if stored.is_in(fmt):
        return _cast_into_storage(layer, weight, stored)
    values = stored.data if stored.scale_inv is None else stored.values(torch.float32)
    if rule.along is not None:
        return in_blocks(values, fmt, rule.along.weight_blocks)
    amax = tensor_amax(values)
    scale = power_of_two_scale(amax, fmt) if rule.scaling == "window" else _one_scale(layer, WEIGHT, amax)
    return Cast(values, fmt, amax, scale)


def _cast_into_storage(layer: FP8Products, weight: torch.Tensor, stored: Stored) -> Cast | None:
    """The cast by which the optimizer made a weight of its exact values."""
    if not isinstance(weight, ScaledTensor) or weight.rest is None:
        return None
    exact = layer._matrix(Stored(weight.exact(torch.float32), None)).data
    scale = stored.scale_inv.reciprocal()
    return Cast(exact, layer.fp8_rule.forward_format, tensor_amax(exact), scale, codes=stored.data)


def _one_scale(layer: FP8Products, tensor: int, amax: torch.Tensor) -> torch.Tensor:
    rule = layer.fp8_rule
    if rule.scaling == "delayed":
        return delayed_scale(layer.fp8_scaling, tensor).clone()  # the state goes on
    return scale_from_amax(amax, rule.gradient_format if tensor == GRAD_OUTPUT else rule.forward_format)
