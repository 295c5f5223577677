"""Weights that are stored in scaled precision (MS-AMP's levels), as TransformerEngine multiplies them.

E4M3 data (O3) is handed over as it lies, under its own scale, to the rules with one scale for a tensor. FP16 data (O1,
O2), and any data under a block rule, is cast by the layer's own weight quantizer, so that the recipe's scales and
amax histories are TransformerEngine's. A cast is made once for each value of the weight, not once a microbatch.

Imports TransformerEngine, so it is imported only where a `te` layer has such a weight.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from ...numerics.scaled_tensor import ScaledTensor

ONE_SCALE = ("delayed", "dynamic")
"""Scaling rules with one scale for a tensor."""


class CastWeight:
    """What TransformerEngine multiplies, and what it was made from.

    Attributes:
        made: one of TransformerEngine's quantized tensors, with the copies that the products of this device need.
        differentiable: whether it has what dgrad multiplies too.
    """

    def __init__(self, made: Any, weight: ScaledTensor, differentiable: bool) -> None:
        self.made, self.differentiable = made, differentiable
        self._data, self._scale_inv = weakref.ref(weight._data), weakref.ref(weight._scale_inv)
        self._versions = _versions(weight)

    def serves(self, weight: ScaledTensor, differentiable: bool) -> bool:
        """Whether `weight` still has the values that this was made of: neither swapped nor changed in place."""
        same = self._data() is weight._data and self._scale_inv() is weight._scale_inv
        return same and self._versions == _versions(weight) and self.differentiable >= differentiable


def _versions(weight: ScaledTensor) -> tuple[int, ...]:
    """An operator on the weight counts on the weight alone, a kernel that writes its parts counts on these."""
    return weight._version, weight._data._version, weight._scale_inv._version


def for_te(weight: ScaledTensor, quantizer: Any, scaling: str, cached: CastWeight | None) -> CastWeight:
    """`weight` as a quantized tensor of TransformerEngine: `cached`, if it was made of the same data.

    Args:
        weight: [out, in], FP16 or E4M3 data with one scale.
        quantizer: of the layer's weight, as TransformerEngine's autocast has made it for this forward.
    """
    differentiable = torch.is_grad_enabled()
    if cached is not None and cached.serves(weight, differentiable):
        return cached
    quantizer.set_usage(rowwise=True, columnwise=differentiable)
    internal, quantizer.internal = quantizer.internal, False  # else what it makes is no torch.Tensor
    with torch.no_grad():
        if weight._data.dtype == torch.float8_e4m3fn and scaling in ONE_SCALE:
            made = _of_codes(weight, quantizer)
            made.update_usage(rowwise_usage=True, columnwise_usage=differentiable)
        else:
            made = quantizer.quantize(weight.dequantize(torch.float32))
    quantizer.internal = internal
    return CastWeight(made, weight, differentiable)


def _of_codes(weight: ScaledTensor, quantizer: Any) -> Float8Tensor:
    """The same memory, as TransformerEngine's tensor. It calls the dtype of its data uint8."""
    return Float8Tensor(
        shape=weight.shape,
        dtype=weight.dtype,
        data=weight._data.view(torch.uint8),
        fp8_scale_inv=weight._scale_inv.reshape(1),
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
    )


def differentiable(weight: ScaledTensor, cast: CastWeight) -> torch.Tensor:
    """The cast weight, whose gradient goes on to `weight`."""
    made = Differentiable.apply(weight, cast)
    # TransformerEngine 2.16 asks its tensor, which has noted the answer before autograd made it an output
    made.__dict__.pop("_requires_grad", None)
    return made


class Differentiable(torch.autograd.Function):
    """`differentiable`, for autograd."""

    @staticmethod
    def forward(ctx, weight: ScaledTensor, cast: CastWeight) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return cast.made.make_like(cast.made)  # a view: TransformerEngine drops copies from the one that it is given

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None
