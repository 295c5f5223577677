"""`FP8Head`, an output head of `native` with deferred logits, and its FP8 products in chunks of
tokens."""

from __future__ import annotations

import torch

from ...compute.counts import FPROP, RECOMPUTED
from ...compute.native.layer_rule import (
    FROZEN,
    Stored,
    fp8_product,
    quantized,
    quantized_gradient,
)
from ...compute.native.linear import FP8Linear
from ...compute.native.weights import kind_of, read
from ...compute.products import plain_product
from ...formats.scaling import GRAD_OUTPUT, INPUT
from .deferred_logits import HEADS, DefersLogits, HeadProducts


class FP8Head(DefersLogits, FP8Linear):
    weight_types = FROZEN

    def cast_of(self, tensor: int, values: torch.Tensor) -> None:
        """Return None: scales differ from chunk to chunk."""

    def head_products(self, out_dtype: torch.dtype) -> FP8HeadProducts:
        self._follow(self.weight.device)
        self.fp8_out_dtype = out_dtype
        return FP8HeadProducts(self, read(self.weight), out_dtype)

    def count_products(self, *kinds: str) -> None:
        high = self.fp8_rule.high_precision
        for kind in kinds:
            if not high.of(FPROP if kind == RECOMPUTED else kind):
                self.fp8_ledger.counts.add(kind)


class FP8HeadProducts(HeadProducts):
    """The products of a head by its scaling rule. The weight's codes serve all chunks; hidden
    states and gradients of logits get new scales in each chunk, if the rule derives them from the
    tensor."""

    def __init__(self, head: FP8Head, stored: Stored, out_dtype: torch.dtype) -> None:
        self.rule, self.ledger, self.state = head.fp8_rule, head.fp8_ledger, head.fp8_scaling
        self.out_dtype = out_dtype
        self.bias = None if head.bias is None else head.bias.detach().to(out_dtype)
        self.high, blocks = self.rule.high_precision, self.rule.scales.weight_blocks
        self.matrix = stored.values(out_dtype) if self.high.fprop or self.high.dgrad else None
        w8 = kind_of(head.weight).quantized(head, stored, True, self.state, None)
        self.codes, self.transposed = w8.along_columns(), None
        if not self.high.dgrad and blocks is None:
            self.transposed = w8.along_rows()
        elif not self.high.dgrad:
            fmt = self.rule.forward_format
            self.transposed = stored.in_blocks(blocks, fmt, transposed=True)
        self.fp8_wgrad = head.weight.requires_grad and not self.high.wgrad

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        self.x, fp8_fprop = x, not self.high.fprop
        if fp8_fprop or self.fp8_wgrad:
            fmt, newest = self.rule.forward_format, self.ledger.newest(self.rule, self.state, INPUT)
            self.x8 = quantized(
                x, fmt, self.rule, self.state, INPUT, fp8_fprop, self.fp8_wgrad, newest
            )
        if not fp8_fprop:
            return self.biased(plain_product(x.to(self.out_dtype), self.matrix))
        operands, fast = (self.x8.along_columns(), self.codes), self.rule.fast_accumulation
        y = fp8_product(self.rule.scales, *operands, self.out_dtype, fast_accumulation=fast)
        return self.biased(y)

    def gradients(
        self, dlogits: torch.Tensor, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        dx = dw = None
        fp8_dgrad, fp8_wgrad = of_input and not self.high.dgrad, of_weight and self.fp8_wgrad
        if fp8_dgrad or fp8_wgrad:
            newest = self.ledger.newest(self.rule, self.state, GRAD_OUTPUT)
            dy8 = quantized_gradient(dlogits, self.rule, self.state, fp8_dgrad, fp8_wgrad, newest)
        if fp8_dgrad:
            dx = fp8_product(self.rule.scales, dy8.along_columns(), self.transposed, self.out_dtype)
        elif of_input:
            dx = plain_product(dlogits, self.matrix.t())
        if fp8_wgrad:
            operands = dy8.along_rows(), self.x8.along_rows()
            dw = fp8_product(self.rule.scales, *operands, self.out_dtype, by_weight=False)
        elif of_weight:
            dw = plain_product(dlogits.t(), self.x.to(self.out_dtype).t())
        return dx, dw


HEADS[FP8Linear] = FP8Head
