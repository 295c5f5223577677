"""Weights that are no plain tensors, as TransformerEngine multiplies them.

**Weights in scaled precision** (MS-AMP's levels). E4M3 data (from O3 on) is handed over as it lies, under its own
scale, to the rules with one scale for a tensor. FP16 data (O1, O2), and any data under a block rule, is cast by the
layer's own weight quantizer, so that the recipe's scales and amax histories are TransformerEngine's. A cast is made
once for each value of the weight, not once a microbatch.

**Frozen FP8 weights** (`fp8_params`). TransformerEngine's own tensor lies in the Parameter that the model already has.
Of 4 bytes an element in FP32 remain 2 on Hopper (codes, and the transposed copy that dgrad multiplies) or 1.

Imports TransformerEngine, so it is imported only with a layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from ...numerics.parameter_swap import swap
from ...numerics.scaled_tensor import ScaledTensor
from .. import frozen_weights
from .recipes import FP8_WEIGHT_SLOT, QuantizedTensor, RecipeState, te_recipe

ONE_SCALE = ("delayed", "dynamic")
"""Scaling rules with one scale for a tensor."""


class CastWeight:
    """What TransformerEngine multiplies in place of a weight, and the state of the weight that it was cast from.

    Attributes:
        quantized: one of TransformerEngine's quantized tensors, with the copies that the products of this device need.
        differentiable: whether it has what dgrad multiplies too.
    """

    def __init__(self, quantized: Any, weight: ScaledTensor, differentiable: bool) -> None:
        self.quantized, self.differentiable = quantized, differentiable
        self._data, self._scale_inv = weakref.ref(weight._data), weakref.ref(weight._scale_inv)
        self._versions = _versions(weight)

    def serves(self, weight: ScaledTensor, differentiable: bool) -> bool:
        """Whether `weight` still has the values that were cast: neither swapped nor changed in place."""
        same = self._data() is weight._data and self._scale_inv() is weight._scale_inv
        return same and self._versions == _versions(weight) and self.differentiable >= differentiable


def _versions(weight: ScaledTensor) -> tuple[int, ...]:
    """An operator on the weight counts on the weight alone, a kernel that writes its parts counts on these."""
    return weight._version, weight._data._version, weight._scale_inv._version


def for_te(
    weight: ScaledTensor, is_transposed: bool, quantizer: Any, scaling: str, cached: CastWeight | None
) -> CastWeight:
    """`weight` as a quantized tensor [out, in] of TransformerEngine: `cached`, if it was cast from the same data.

    Args:
        weight: [out, in], or [in, out] where it `is_transposed`; FP16 or E4M3 data with one scale.
        quantizer: the one of the layer's weight, as TransformerEngine's autocast has prepared it for this forward.
    """
    differentiable = torch.is_grad_enabled()
    if cached is not None and cached.serves(weight, differentiable):
        return cached
    return CastWeight(_cast(weight, weight._data, is_transposed, quantizer, scaling), weight, differentiable)


def experts_for_te(weight: ScaledTensor, is_transposed: bool, quantizers: list, scaling: str) -> list:
    """`for_te` of each expert's part of `weight`, [experts, out, in] or, where it `is_transposed`, [experts, in, out].
    They are made anew for each forward."""
    parts = zip(weight._data.unbind(), quantizers, strict=True)
    return [_cast(weight, data, is_transposed, quantizer, scaling) for data, quantizer in parts]


def _cast(weight: ScaledTensor, data: torch.Tensor, is_transposed: bool, quantizer: Any, scaling: str) -> Any:
    """A matrix, whose `data` are those of `weight` or a part of them, as a quantized tensor [out, in]."""
    differentiable = torch.is_grad_enabled()
    quantizer.set_usage(rowwise=True, columnwise=differentiable)
    internal, quantizer.internal = quantizer.internal, False  # else its result is no torch.Tensor
    with torch.no_grad():
        matrix = data.t() if is_transposed else data
        if data.dtype == torch.float8_e4m3fn and scaling in ONE_SCALE:
            codes = data.view(torch.uint8)  # so TransformerEngine calls FP8
            result = Float8Tensor(  # on the same memory
                shape=matrix.shape,
                dtype=weight.dtype,
                data=codes.t().contiguous() if is_transposed else codes,
                data_transpose=codes if is_transposed else None,
                fp8_scale_inv=weight._scale_inv.reshape(1),
                fp8_dtype=quantizer.dtype,
                quantizer=quantizer,
            )
            result.update_usage(rowwise_usage=True, columnwise_usage=differentiable)
        else:
            result = quantizer.quantize(matrix.float() * weight._scale_inv)
    quantizer.internal = internal
    return result


def differentiable(weight: ScaledTensor, quantized: list, is_transposed: bool = False) -> list[torch.Tensor]:
    """The cast matrices of a weight, whose gradients go on to it.

    Args:
        quantized: one [out, in], or one for each of the experts that `weight` has.
        is_transposed: whether `weight` has [in, out] in the place of [out, in].
    """
    results = Differentiable.apply(weight, is_transposed, *quantized)
    for result in results:
        # TransformerEngine 2.16 asks its tensor, which has noted the answer before autograd made it an output
        result.__dict__.pop("_requires_grad", None)
    return list(results)


class Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: ScaledTensor, is_transposed: bool, *quantized: Any) -> tuple[torch.Tensor, ...]:
        ctx.dtype, ctx.is_transposed, ctx.is_of_experts = weight.dtype, is_transposed, weight.dim() == 3
        # views: TransformerEngine drops copies from those that it is given
        return tuple(each.make_like(each) for each in quantized)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = torch.stack(gradients) if ctx.is_of_experts else gradients[0]
        gradient = gradient.mT if ctx.is_transposed else gradient
        return gradient.to(ctx.dtype), None, *[None] * len(gradients)


# Frozen FP8 weights


def is_frozen(weight: torch.Tensor) -> bool:
    """Whether this is a frozen FP8 weight, one of TransformerEngine's tensors."""
    return isinstance(weight, QuantizedTensor)


def freeze(root: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Store the weights of these layers of `root` in FP8. Repeating it does nothing; ties stay."""
    frozen_weights.freeze(root, layers, is_frozen, quantized, make_plain)


@torch.no_grad()
def quantized(weight: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """A weight as TransformerEngine's tensor with the copies that fprop and dgrad multiply."""
    return _quantizer(layer)(weight.detach().contiguous())


_SWAPPED = (
    ("_data", "_transpose"),
    ("_rowwise_data", "_columnwise_data"),
    ("_rowwise_scale_inv", "_columnwise_scale_inv"),
)
"""Attributes of TransformerEngine's tensors: a copy of the codes for fprop, and its transpose for dgrad."""


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """A view of a frozen FP8 weight, transposed: each of its two copies is the other's transpose. Where a device needs
    one copy of per-tensor codes, the codes are copied. MXFP8's two copies are no transposes of each other."""
    result = weight.make_like(weight, shape=weight.shape[::-1])
    for one, other in _SWAPPED:
        if hasattr(weight, one):
            setattr(result, one, getattr(weight, other))
            setattr(result, other, getattr(weight, one))
    if hasattr(weight, "_transpose_invalid"):
        if weight._transpose_invalid or weight._transpose is None:
            result._data = weight._data.t().contiguous()
        result._transpose_invalid = False
    return result


def _quantizer(layer: nn.Linear) -> Any:
    recipe = layer.te_state.te_recipe
    if recipe.delayed():  # by the amax of the values themselves, which do not change
        recipe = te_recipe.Float8CurrentScaling(fp8_format=recipe.fp8_format)
    state = RecipeState.create(recipe, mode="forward", num_quantizers=3, device=layer.weight.device)
    quantizer = state.make_quantizers()[FP8_WEIGHT_SLOT]
    quantizer.internal = False
    quantizer.set_usage(rowwise=True, columnwise=True)
    return quantizer


def revive(layer: nn.Linear) -> None:
    """Complete an unpickled layer: TransformerEngine's pickles of a tensor hold its data alone."""
    if is_frozen(layer.weight):
        layer.weight._is_param = True
        layer.weight._quantizer = _quantizer(layer)


def make_plain(layer: nn.Linear) -> None:
    """Undo `freeze` on one layer."""
    if is_frozen(layer.weight):
        swap(layer.weight, plain(layer.weight), "weight")


@torch.no_grad()
def plain(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight, as an ordinary tensor of the dtype that it stands for."""
    return weight.dequantize(dtype=weight.dtype).detach() if is_frozen(weight) else weight
