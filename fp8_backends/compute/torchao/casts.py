"""How a layer of TorchAO casts what passes it, by TorchAO's formulas: for `training.watching.monitor`."""

from __future__ import annotations

import functools

import torch
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_utils import amax_to_scale

from ...numerics.formats import FORMATS, Format
from ...numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Blocks, scale_inv_of, tensor_amax
from ...numerics.sharded_tensor import is_distributed
from ...numerics.statistics import Cast
from .linear import AOProducts

_CONFIGURED = {INPUT: "cast_config_input", WEIGHT: "cast_config_weight", GRAD_OUTPUT: "cast_config_grad_output"}


def cast_of(layer: AOProducts, tensor: int, values: torch.Tensor) -> Cast | None:
    """`Compute.cast_of`: the cast for fprop, and of the gradient that for dgrad. None for a sharded weight, and for
    one that FSDP2 has gathered in FP8."""
    config = getattr(layer.config, _CONFIGURED[tensor])
    is_weight = tensor == WEIGHT
    if config.scaling_type is ScalingType.DISABLED or is_distributed(values) or type(values.data) is not torch.Tensor:
        return None
    values = values.detach()
    values = values.t() if is_weight and layer.transposed_weight else values
    if tensor == INPUT and torch.is_autocast_enabled():
        values = values.to(torch.get_autocast_dtype("cuda"))  # as TorchAO's forward does
    matrix, fmt = values.reshape(-1, values.shape[-1]), FORMATS[config.target_dtype]
    scale = functools.partial(_scale, layer.config.round_scales_to_power_of_2)
    amax = tensor_amax(matrix)
    if config.scaling_granularity is ScalingGranularity.AXISWISE:
        return Cast(matrix, fmt, amax, blocks=Blocks(1, None, scale, scale_inv_of))
    return Cast(matrix, fmt, amax, scale(amax, fmt))


def _scale(power_of_two: bool, amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    return amax_to_scale(amax, fmt.dtype, round_scales_to_power_of_2=power_of_two)
