"""Weights that are no plain tensors, in TransformerEngine's products.

Weights of a level: E4M3 data go without a cast to the rules with one scale for a tensor; the
layer's own weight quantizer casts all else, once for each value of the weight. Frozen FP8 weights
(`fp8_params`) are TransformerEngine's own tensors: 2 bytes an element on Hopper (codes, and the
transposed copy for dgrad), else 1.

Imports TransformerEngine, so it is imported with a layer.
"""

import weakref
from typing import Any

import torch
from torch import nn
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from ...formats.scaling import RULES
from ...tensors.parameter_swap import swap
from ...tensors.scaled_tensor import ScaledTensor
from .recipes import FP8_WEIGHT_SLOT, QuantizedTensor, RecipeState, te_recipe


class CastWeight:
    """A weight cast for TransformerEngine, and the state of the weight at the cast. `quantized` has
    the copies for this device's products, for dgrad too if `differentiable`."""

    def __init__(self, quantized: Any, weight: ScaledTensor, differentiable: bool) -> None:
        self.quantized, self.differentiable = quantized, differentiable
        self._codes, self._scale_inv = weakref.ref(weight.codes), weakref.ref(weight.scale_inv)
        self._versions = _versions(weight)

    def serves(self, weight: ScaledTensor, differentiable: bool) -> bool:
        """Return True if `weight` still has the values of the cast: neither swapped nor changed in
        place."""
        same = self._codes() is weight.codes and self._scale_inv() is weight.scale_inv
        return (
            same and self._versions == _versions(weight) and self.differentiable >= differentiable
        )


def _versions(weight: ScaledTensor) -> tuple[int, ...]:
    """Return all version counters: operators on the weight raise its own, kernels the counters of
    its parts."""
    return weight._version, weight.codes._version, weight.scale_inv._version


def for_te(
    weight: ScaledTensor,
    is_transposed: bool,
    quantizer: Any,
    scaling: str,
    cached: CastWeight | None,
) -> CastWeight:
    """Cast `weight`, [in, out] if `is_transposed`, to a quantized tensor [out, in] of
    TransformerEngine, or return `cached` if it serves. `quantizer`: the layer's own, prepared for
    this forward by TransformerEngine's autocast."""
    differentiable = torch.is_grad_enabled()
    if cached is not None and cached.serves(weight, differentiable):
        return cached
    return CastWeight(
        cast(weight, weight.codes, is_transposed, quantizer, scaling), weight, differentiable
    )


def cast(
    weight: ScaledTensor, data: torch.Tensor, is_transposed: bool, quantizer: Any, scaling: str
) -> Any:
    """Cast `data`, the data of `weight` or one of its matrices, to a quantized tensor [out, in]."""
    differentiable = torch.is_grad_enabled()
    quantizer.set_usage(rowwise=True, columnwise=differentiable)
    internal, quantizer.internal = quantizer.internal, False  # else its result is no torch.Tensor
    with torch.no_grad():
        matrix = data.t() if is_transposed else data
        if data.dtype == torch.float8_e4m3fn and RULES[scaling].blocks is None:
            codes = data.view(torch.uint8)  # TransformerEngine's dtype for FP8
            result = Float8Tensor(  # on the same memory
                shape=matrix.shape,
                dtype=weight.dtype,
                data=codes.t().contiguous() if is_transposed else codes,
                data_transpose=codes if is_transposed else None,
                fp8_scale_inv=weight.scale_inv.reshape(1),
                fp8_dtype=quantizer.dtype,
                quantizer=quantizer,
            )
            result.update_usage(rowwise_usage=True, columnwise_usage=differentiable)
        else:
            result = quantizer.quantize(matrix.float() * weight.scale_inv)
    quantizer.internal = internal
    return result


def differentiable(
    weight: ScaledTensor, quantized: list, is_transposed: bool = False
) -> list[torch.Tensor]:
    """Connect cast matrices [out, in] to their weight in autograd: one, or all of a 3-D weight."""
    results = Differentiable.apply(weight, is_transposed, *quantized)
    for result in results:
        # TransformerEngine 2.16 caches the answer, from before autograd made the tensor an output
        result.__dict__.pop("_requires_grad", None)
    return list(results)


class Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, weight: ScaledTensor, is_transposed: bool, *quantized: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.dtype, ctx.is_transposed, ctx.dimensions = weight.dtype, is_transposed, weight.dim()
        # views: TransformerEngine drops copies from its operands
        return tuple(matrix.make_like(matrix) for matrix in quantized)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = torch.stack(gradients) if ctx.dimensions == 3 else gradients[0]
        gradient = gradient.mT if ctx.is_transposed else gradient
        return gradient.to(ctx.dtype), None, *[None] * len(gradients)


def is_frozen(weight: torch.Tensor) -> bool:
    """Return True for a frozen FP8 weight, one of TransformerEngine's tensors."""
    return isinstance(weight, QuantizedTensor)


@torch.no_grad()
def quantized(weight: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """Quantize a weight to TransformerEngine's tensor with the copies for fprop and dgrad."""
    return _quantizer(layer)(weight.detach().contiguous())


_SWAPPED = (
    ("_data", "_transpose"),
    ("_rowwise_data", "_columnwise_data"),
    ("_rowwise_scale_inv", "_columnwise_scale_inv"),
)
"""Attributes of TransformerEngine's tensors: a copy of the codes for fprop, and its transpose for
dgrad."""


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """Return a transposed view of a frozen FP8 weight: each of its two copies is the other's
    transpose. On devices with one copy of per-tensor codes, the codes are copied. MXFP8's two
    copies are no transposes of each other."""
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
    """Complete an unpickled layer: TransformerEngine pickles only the data of a tensor."""
    if is_frozen(layer.weight):
        layer.weight._is_param = True
        layer.weight._quantizer = _quantizer(layer)


def make_plain(layer: nn.Linear) -> None:
    """Undo the swap of one layer's weight. Raises `FP8BackendError` if a copy in a state dict was
    written to."""
    if is_frozen(layer.weight):
        layer.te_copies.check()
        swap(layer.weight, plain(layer.weight), "weight")


@torch.no_grad()
def plain(weight: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight as a plain tensor of its dtype."""
    return weight.dequantize(dtype=weight.dtype).detach() if is_frozen(weight) else weight
