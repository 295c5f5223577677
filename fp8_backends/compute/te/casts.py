"""How a layer of TransformerEngine casts what passes it, by the equal rules of `numerics.scaling` and, where scales are
delayed, by TransformerEngine's own scales: for `training.watching.monitor`."""

from __future__ import annotations

import torch

from ...numerics.formats import RECIPE_FORMATS
from ...numerics.scaled_tensor import ScaledTensor
from ...numerics.scaling import GRAD_OUTPUT, MX, SQUARES, VECTORS, WEIGHT, scale_from_amax, tensor_amax
from ...numerics.sharded_tensor import is_distributed
from ...numerics.statistics import Cast, in_blocks
from .linear import TEProducts

_BLOCKS = {"blockwise": (VECTORS, SQUARES), "mxfp8": (MX, MX)}
"""Of activations and gradients, and of weights."""


def cast_of(layer: TEProducts, tensor: int, values: torch.Tensor) -> Cast | None:
    """`Compute.cast_of`. None for a weight that is sharded, or stored in a form that TransformerEngine multiplies
    without a cast."""
    recipe = layer.te_state.recipe
    if not (layer.training or recipe.use_autocast_during_eval):
        return None
    if tensor == WEIGHT:
        values = layer.matrix
        if is_distributed(values) or type(values.data) is not torch.Tensor or isinstance(values, ScaledTensor):
            return None
    forward, gradient = RECIPE_FORMATS[recipe.fp8_format]
    fmt = gradient if tensor == GRAD_OUTPUT else forward
    matrix = values.detach().reshape(-1, values.shape[-1])
    if recipe.scaling in _BLOCKS:
        return in_blocks(matrix, fmt, _BLOCKS[recipe.scaling][tensor == WEIGHT])
    amax = tensor_amax(matrix)
    if recipe.scaling != "delayed":
        return Cast(matrix, fmt, amax, scale_from_amax(amax, fmt))
    state = layer.delayed_state("backward" if tensor == GRAD_OUTPUT else "forward")
    return (
        None if state is None else Cast(matrix, fmt, amax, state.scale[0 if tensor == GRAD_OUTPUT else tensor].clone())
    )
