"""`FP8Head`, an output head of `native` with deferred logits, and its FP8 products in chunks of
tokens."""

from __future__ import annotations

import torch

from ...compute.counts import KINDS, RECOMPUTED
from ...compute.native.layer_rule import DGRAD, FPROP, WGRAD, Stored, quantized, quantized_gradient
from ...compute.native.linear import FROZEN, FP8Linear
from ...compute.products import plain_product
from ...formats.scaling import GRAD_OUTPUT, INPUT
from ...kernels.layouts import Layouts
from .deferred_logits import HEADS, DefersLogits, HeadProducts


class FP8Head(DefersLogits, FP8Linear):
    weight_types = FROZEN

    def cast_of(self, tensor: int, values: torch.Tensor) -> None:
        """Return None: scales differ from chunk to chunk."""

    def head_products(self, out_dtype: torch.dtype) -> FP8HeadProducts:
        self._follow(self.weight.device)
        self.fp8_out_dtype = out_dtype
        return FP8HeadProducts(self, Stored.of(self.weight), out_dtype)

    def count_products(self, *kinds: str) -> None:
        high = self.fp8_rule.high_precision
        for kind in kinds:
            if not high[FPROP if kind == RECOMPUTED else KINDS.index(kind)]:
                self.fp8_ledger.counts.add(kind)


class FP8HeadProducts(HeadProducts):
    """The products of a head by its scaling rule. The weight's codes serve all chunks; hidden
    states and gradients of logits get new scales in each chunk, if the rule derives them from the
    tensor."""

    def __init__(self, head: FP8Head, stored: Stored, out_dtype: torch.dtype) -> None:
        self.rule, self.ledger, self.state, self.out_dtype = (
            head.fp8_rule,
            head.fp8_ledger,
            head.fp8_scaling,
            out_dtype,
        )
        self.bias = None if head.bias is None else head.bias.detach().to(out_dtype)
        self.high, fmt, blocks = (
            self.rule.high_precision,
            self.rule.forward_format,
            self.rule.scales.weight_blocks,
        )
        self.matrix = stored.values(out_dtype) if self.high[FPROP] or self.high[DGRAD] else None
        w8 = head._quantized_weight(stored, None, for_dgrad=True, recorded=self.state)
        if w8.codes is None:  # a weight stored in FP8
            w8 = Layouts(*(stored if blocks is None else stored.in_blocks(blocks, fmt)))
        self.codes, self.transposed = w8.along_columns(), None
        if not self.high[DGRAD]:
            self.transposed = (
                w8.along_rows()
                if blocks is None
                else stored.in_blocks(blocks, fmt, transposed=True)
            )
        self.fp8_wgrad = head.weight.requires_grad and not self.high[WGRAD]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        self.x, fp8_fprop = x, not self.high[FPROP]
        if fp8_fprop or self.fp8_wgrad:
            fmt, newest = self.rule.forward_format, self.ledger.newest(self.rule, self.state, INPUT)
            self.x8 = quantized(
                x, fmt, self.rule, self.state, INPUT, fp8_fprop, self.fp8_wgrad, newest
            )
        if not fp8_fprop:
            return self.biased(plain_product(x.to(self.out_dtype), self.matrix))
        x8 = self.x8.along_columns()
        return self.biased(self.rule.product(x8, self.codes, self.out_dtype, fprop=True))

    def gradients(
        self, dlogits: torch.Tensor, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        dx = dw = None
        fp8_dgrad, fp8_wgrad = of_input and not self.high[DGRAD], of_weight and self.fp8_wgrad
        if fp8_dgrad or fp8_wgrad:
            newest = self.ledger.newest(self.rule, self.state, GRAD_OUTPUT)
            dy8 = quantized_gradient(dlogits, self.rule, self.state, fp8_dgrad, fp8_wgrad, newest)
        if fp8_dgrad:
            dx = self.rule.product(dy8.along_columns(), self.transposed, self.out_dtype)
        elif of_input:
            dx = plain_product(dlogits, self.matrix.t())
        if fp8_wgrad:
            dw = self.rule.product(
                dy8.along_rows(), self.x8.along_rows(), self.out_dtype, by_weight=False
            )
        elif of_weight:
            dw = plain_product(dlogits.t(), self.x.to(self.out_dtype).t())
        return dx, dw


HEADS[FP8Linear] = FP8Head
