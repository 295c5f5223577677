"""The layers of `te`. Imports TransformerEngine, so it is imported with a layer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn

from ...tensors.scaled_tensor import ScaledTensor
from ..counts import result_dtype
from ..frozen_weights import check_running
from ..interface import COMPUTE_DTYPES
from ..refusals import refuse_width, saved_by_name
from . import weights
from .layer import ModelState, TELayer


class TEProducts(TELayer, te.Linear):
    """`te.Linear` on the Parameters of the original layer, for any number of rows, outside of FP8
    regions too.

    Input: [..., in_features] in bf16, fp16 or fp32. Output: [..., out_features] in the autocast
    dtype if autocast is on, else in the input's dtype. `torch.compile` leaves it out of its graphs:
    delayed scaling cannot be traced.
    """

    transposed_weight = False
    """True if the Parameter holds the weight as [in, out] (`TransposedLinear`)."""

    @classmethod
    def around(
        cls, plain: nn.Module, in_features: int, out_features: int, state: ModelState
    ) -> TEProducts:
        """Return a layer with the Parameter objects of `plain`."""
        layer = te.Linear(
            in_features,
            out_features,
            bias=plain.bias is not None,
            params_dtype=plain.weight.dtype,
            device="meta",
        )
        layer.__class__ = cls
        # te.Linear without a bias has an empty tensor there; others expect None
        layer.__dict__.pop("bias", None)
        layer._parameters.update(weight=plain.weight, bias=plain.bias)
        layer.__dict__.update(te_state=state, **layer._fresh())
        return layer

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        """Return TransformerEngine's operand: `matrix`, or one of its quantized tensors in place of
        a ScaledTensor."""
        weight = self.matrix
        if isinstance(weight, ScaledTensor):
            (quantizer,) = self._get_weight_quantizers()
            scaling, cached = self.te_state.recipe.scaling, self.te_cast_weight
            cast = weights.for_te(self.weight, self.transposed_weight, quantizer, scaling, cached)
            if not self.is_fsdp2:  # it gathers the next weight into the same memory
                self.te_cast_weight = cast
            (weight,) = weights.differentiable(weight, [cast.quantized])
        return [weight.detach() if self.te_state.plain_wgrad else weight]

    @property
    def matrix(self) -> torch.Tensor:
        """Return the weight as [out, in], on the memory of the Parameter. Raises `FP8BackendError`
        if a plain copy of a frozen one in a state dict was written to."""
        is_frozen = weights.is_frozen(self.weight)
        if is_frozen:
            self.te_copies.check()
        if not self.transposed_weight:
            return self.weight
        return weights.transposed(self.weight) if is_frozen else self.weight.t()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        in_fp8 = self.te_state.runs_in_fp8(self.te_state.is_training(self))
        dtype = result_dtype(input)
        if (
            not in_fp8
            or dtype not in COMPUTE_DTYPES
            or not input.is_floating_point()
            or input.numel() == 0
        ):
            return F.linear(input, weights.plain(self.matrix), self.bias)
        refuse_width(input, self.in_features)
        return self._forward_in_fp8(input)

    @torch.compiler.disable
    def _forward_in_fp8(self, x: torch.Tensor) -> torch.Tensor:
        matrix = x.reshape(-1, self.in_features)
        rows = matrix.shape[0]
        if padding := -rows % self.te_state.rows_multiple:
            matrix = F.pad(matrix, (0, 0, 0, padding))
        y = self._in_region(matrix)
        # no view, as with `F.linear`: autograd refuses to change a view of a function with two
        # outputs in place
        return torch.ops.aten._unsafe_view(
            y[:rows] if padding else y, (*x.shape[:-1], self.out_features)
        )

    def _products(self, x: torch.Tensor) -> torch.Tensor:
        if self.te_state.recipe.fp8_params:
            check_running(self, weights.is_frozen(self.weight) and not self.is_fsdp2)
        y = super()._products(x)
        return PlainWgrad.apply(y, x.detach(), self.matrix) if self.te_state.plain_wgrad else y

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        with saved_by_name(self.weight) if self.transposed_weight else contextlib.nullcontext():
            return te.Linear.forward(self, x)

    @property
    def is_fsdp2(self) -> bool:
        """Return TransformerEngine's answer, kept under a name that `restore` removes."""
        if self.te_fsdp2 is None:
            answer = getattr(te.Linear, "is_fsdp2", None)  # from 2.10 on
            self.te_fsdp2 = answer is not None and answer.fget(self)
            self.__dict__.pop("_is_fsdp2", None)
        return self.te_fsdp2

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if weights.is_frozen(self.weight):
            self.te_copies.check()
            destination[f"{prefix}weight"] = values = weights.plain(self.weight)
            self.te_copies.add(values, f"{prefix}weight")

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        # in checkpoints of plain TransformerEngine modules
        state_dict.pop(f"{prefix}_extra_state", None)
        frozen = weights.is_frozen(self.weight)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}weight" in state_dict:
            self.te_copies.accept()
        if frozen and not weights.is_frozen(self.weight):  # `assign=True`, with another Parameter
            self.weight = nn.Parameter(weights.quantized(self.weight, self), requires_grad=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        weights.revive(self)


class TELinear(TEProducts, nn.Linear):
    """`te.Linear` on the Parameters of the original `nn.Linear`."""

    reset_parameters = nn.Linear.reset_parameters

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {self.rule_in_words}"


class PlainWgrad(torch.autograd.Function):
    """The weight gradient in high precision: `override_linear_precision=(False, False, True)`, as
    TransformerEngine had it until 2.1. It gets the weight detached, and keeps no codes of the
    input. Returns y unchanged; backward computes the gradient of `weight` [out, in] from the
    unquantized x [tokens, in] and dy [tokens, out], in the dtype of y."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight_dtype, ctx.dtype = weight.dtype, y.dtype
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        (x,) = ctx.saved_tensors
        dw = (
            torch.mm(dy.to(ctx.dtype).t(), x.to(ctx.dtype)).to(ctx.weight_dtype)
            if ctx.needs_input_grad[2]
            else None
        )
        return dy, None, dw
