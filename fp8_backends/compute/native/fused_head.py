"""`FP8Head`, an output head of `native` that defers its logits, and its products in FP8 by chunks of tokens."""

from __future__ import annotations

import torch

from ...numerics.formats import Format
from ...numerics.kernels.layouts import Layouts
from ...numerics.scaling import GRAD_OUTPUT, INPUT, Quantized
from ..counts import DGRAD, FPROP, KINDS, RECOMPUTED, WGRAD
from ..deferred_logits import DefersLogits
from ..head_loss import HeadProducts
from ..products import plain_product, scaled_product
from .layer_rule import Stored, quantized
from .linear import FROZEN, FP8Linear


class FP8Head(DefersLogits, FP8Linear):
    weight_types = FROZEN

    def head_products(self, out_dtype: torch.dtype) -> FP8HeadProducts:
        self._follow(self.weight.device)
        self.fp8_out_dtype = out_dtype
        stored = Stored.of(self.weight)
        w8 = self._quantized_weight(stored, None, for_dgrad=True, recorded=self.fp8_scaling)
        return FP8HeadProducts(self, self.fp8_scaling, stored, w8, out_dtype)

    def count_products(self, *kinds: str) -> None:
        high = [kind for kind, is_high in zip(KINDS, self.fp8_rule.high_precision, strict=True) if is_high]
        high += [RECOMPUTED] * (FPROP in high)
        for kind in kinds:
            if kind not in high:
                self.fp8_ledger.counts.add(kind)


class FP8HeadProducts(HeadProducts):
    """The products of a head by its scaling rule. The codes of the weight serve all chunks; hidden states and gradients
    of logits get scales of their own in each, where the rule takes them from the tensor."""

    def __init__(
        self, head: FP8Head, state: torch.Tensor | None, stored: Stored, w8: Layouts, out_dtype: torch.dtype
    ) -> None:
        self.rule, self.ledger, self.state, self.out_dtype = head.fp8_rule, head.fp8_ledger, state, out_dtype
        self.bias = None if head.bias is None else head.bias.detach().to(out_dtype)
        self.high = dict(zip(KINDS, self.rule.high_precision, strict=True))
        self.matrix = stored.values(out_dtype) if self.high[FPROP] or self.high[DGRAD] else None
        along, fmt = self.rule.along, self.rule.forward_format
        if w8.codes is None:  # the weight is stored in FP8
            w8 = Layouts(*(stored if along is None else stored.in_blocks(along.weight_blocks, fmt)))
        self.codes, self.transposed = w8.along_columns(), None
        if not self.high[DGRAD]:
            self.transposed = (
                w8.along_rows() if along is None else stored.in_blocks(along.weight_blocks, fmt, transposed=True)
            )
        self.fp8_wgrad = head.weight.requires_grad and not self.high[WGRAD]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        self.x, fp8_fprop = x, not self.high[FPROP]
        if fp8_fprop or self.fp8_wgrad:
            self.x8 = self._quantized(x, self.rule.forward_format, INPUT, fp8_fprop, self.fp8_wgrad)
        if not fp8_fprop:
            return self.biased(plain_product(x.to(self.out_dtype), self.matrix))
        return self.biased(self._product(self.x8.along_columns(), self.codes, of_weight=True, is_fprop=True))

    def gradients(
        self, dlogits: torch.Tensor, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        dx = dw = None
        fp8_dgrad, fp8_wgrad = of_input and not self.high[DGRAD], of_weight and self.fp8_wgrad
        if fp8_dgrad or fp8_wgrad:
            dy8 = self._quantized(dlogits, self.rule.gradient_format, GRAD_OUTPUT, fp8_dgrad, fp8_wgrad)
        if fp8_dgrad:
            dx = self._product(dy8.along_columns(), self.transposed, of_weight=True)
        elif of_input:
            dx = plain_product(dlogits, self.matrix.t())
        if fp8_wgrad:
            dw = self._product(dy8.along_rows(), self.x8.along_rows(), of_weight=False)
        elif of_weight:
            dw = plain_product(dlogits.t(), self.x.to(self.out_dtype).t())
        return dx, dw

    def _quantized(self, matrix: torch.Tensor, fmt: Format, tensor: int, rows: bool, columns: bool) -> Layouts:
        newest = self.ledger.newest(self.rule, self.state, tensor)
        return quantized(matrix, fmt, self.rule, self.state, tensor, rows, columns, newest)

    def _product(self, a: Quantized, b: Quantized, of_weight: bool, is_fprop: bool = False) -> torch.Tensor:
        """a @ b.T, of the products' dtype. `of_weight`: whether b are codes of the weight."""
        along = self.rule.along
        if along is None:
            return scaled_product(a, b, self.out_dtype, is_fprop)
        blocks = along.weight_blocks if of_weight else along.blocks
        return along.product(a, b, blocks, self.out_dtype, is_fprop)
