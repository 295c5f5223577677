"""RMSNorm by one kernel forward and one backward (`fuse_activations`), which notes the amax of what it writes for the
layers that quantize it (`known_amax`).

A norm is recognised by what it computes: its forward is tried, in FP32 and in bf16, against the two formulas that most
models write. The kernels run in eager training on a GPU, as those of `fused_gates`, and for the same reasons.
"""

from __future__ import annotations

import copy
import itertools
from typing import NamedTuple

import torch
from torch import nn

from ...numerics.forwards import forward_obstacle
from ...numerics.kernels.fused import LONGEST_ROW
from ...numerics.kernels.quantize.known_amax import note
from ...numerics.kernels.triton_gate import usable
from ...numerics.saved_values import ValuesFunction
from ..derivatives import refuse_second_derivative
from ..interface import COMPUTE_DTYPES
from .fused_class import carrier_for


def carriers(root: nn.Module, keeps_nan: bool) -> list[tuple[nn.Module, nn.Module]]:
    """The norms of `root` that are recognised and not swapped yet, each with its carrier (`Compute.build`).

    keeps_nan: of the rule of the layers that read them (`LayerRule`).
    """
    found = []
    for norm in root.modules():
        formula = None if isinstance(norm, FusedNorm) else _formula_of(norm)
        if formula is not None:
            found.append((norm, carrier_for(FusedNorm, norm, fp8_formula=formula, fp8_keeps_nan=keeps_nan)))
    return found


class Formula(NamedTuple):
    """What a norm computes with its weight."""

    eps: float
    centered: bool
    """As Gemma's: multiplied by 1 + weight and rounded once, to the dtype of x. Else as Llama's: rounded to it before
    the weight, and the result has the dtype to which x and weight are promoted."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + weight.float())).to(x.dtype) if self.centered else weight * normed.to(x.dtype)


# recognising


def _formula_of(norm: nn.Module) -> Formula | None:
    """What a module computes with its weight in training, if that is one of the formulas with an eps that it holds."""
    held = [key for key, value in {**norm._parameters, **norm._buffers}.items() if value is not None]
    if held != ["weight"] or norm._modules or forward_obstacle(norm) or type(type(norm)) is not type:
        return None
    weight = norm.weight
    if not isinstance(weight, nn.Parameter) or weight.dtype not in COMPUTE_DTYPES or weight.dim() != 1:
        return None
    numbers = {value for value in norm.__dict__.values() if isinstance(value, float) and 0 < value < 0.1}
    for formula in itertools.starmap(Formula, itertools.product(numbers, (False, True))):
        try:
            if all(_follows(norm, formula, dtype) for dtype in (torch.float32, torch.bfloat16)):
                return formula
        except Exception:  # of any kind: a forward of other arguments
            return None
    return None


@torch.no_grad()
def _follows(norm: nn.Module, formula: Formula, dtype: torch.dtype) -> bool:
    """Whether a copy with another weight computes the formula for x of this dtype, on the CPU, to the bit."""
    generator = torch.Generator().manual_seed(0)
    sizes = formula.eps**0.5 * torch.tensor(
        [[0.3], [1.0], [3.0], [1e3]]
    )  # from far below to far above, so that eps counts
    x = (torch.randn(4, 64, generator=generator) * sizes).to(dtype)
    weight = torch.randn(64, generator=generator).to(norm.weight.dtype)
    tried = copy.copy(norm)
    tried.__dict__ = {**norm.__dict__, "training": True, "_parameters": {"weight": nn.Parameter(weight)}}
    with torch.autocast("cpu", enabled=False):
        result = type(norm).forward(tried, x)
    expected = formula(x, weight)
    return result.dtype == expected.dtype and torch.equal(result, expected)


# running


class FusedNorm(nn.Module):
    """What a norm becomes, mixed into the class that it was."""

    fp8_formula: Formula
    fp8_keeps_nan: bool
    """Whether NaN counts in an amax by the layers' rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training and usable(x)):
            return super().forward(x)
        return fused_norm(x, self.weight, self.fp8_formula, self.fp8_keeps_nan)


def fused_norm(x: torch.Tensor, weight: torch.Tensor, formula: Formula, keep_nan: bool) -> torch.Tensor:
    """The formula's value, with its amax noted where the kernel makes it."""
    if not (usable(x) and _fit(x, weight)):
        return formula(x, weight)
    y, partials = _Norm.apply(x, weight, formula, keep_nan)
    note(y, partials, keep_nan)
    return y


def _fit(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels can read x and the weight."""
    if not usable(weight) or weight.device != x.device or x.shape[-1:] != weight.shape or x.numel() == 0:
        return False
    known = x.dtype in COMPUTE_DTYPES and weight.dtype in COMPUTE_DTYPES and weight.numel() <= LONGEST_ROW
    return known and x.is_contiguous() and weight.is_contiguous()


class _Norm(ValuesFunction):
    """The value of a `Formula` and the maxima of its parts."""

    @staticmethod
    def forward(ctx, x, weight, formula, keep_nan):
        from ...numerics.kernels.fused import triton_norm  # Triton takes a second to load

        made = triton_norm.forward(x, weight, *formula, keep_nan)
        ctx.save_for_backward(x, weight)
        ctx.formula = formula
        ctx.mark_non_differentiable(made.partials)
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx, grad, _):
        from ...numerics.kernels.fused import triton_norm

        refuse_second_derivative()
        x, weight = ctx.saved_tensors
        x_grad, weight_grad = triton_norm.backward(grad.contiguous(), x, weight, *ctx.formula)
        return x_grad, weight_grad.to(weight.dtype), None, None
