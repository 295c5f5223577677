"""The autograd function behind experts in FP8: three grouped products, and what is kept between them."""

from __future__ import annotations

import torch

from ...numerics.formats import E4M3, E5M2
from ...numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Quantized
from ..derivatives import refuse_second_derivative
from .grouped_products import Groups, grouped_product, grouped_wgrad, plain_product, plain_wgrad
from .grouped_scaling import (
    GroupQuantized,
    delayed_scales,
    quantize_columns,
    quantize_experts,
    quantize_groups,
    quantize_rows,
    quantize_rows_of_experts,
    record_amaxes,
)
from .layer_rule import LayerRule
from .linear import DGRAD, FPROP, WGRAD


class GroupedFunction(torch.autograd.Function):
    """y [rows, out] = x [rows, in] @ w[e].T for the rows of each expert e.

    The weight is [experts, out, in], or [experts, in, out] where it is `transposed`. `keeps` says whether backward may
    follow, `records` whether the amaxes go into the delayed rule's states. `w8` are the tensors of `quantized_weight`.
    """

    @staticmethod
    def forward(ctx, x, weight, ids, ends, ledger, state, rule, transposed, out_dtype, keeps, records, *w8):
        groups, w8 = Groups(ids, ends), GroupQuantized(*w8)
        needs_dgrad, needs_wgrad = (keeps and needed for needed in ctx.needs_input_grad[:2])
        saved_for_wgrad = (x, None) if needs_wgrad else ()
        saved_for_dgrad = (weight, None) if needs_dgrad else ()
        x8 = _input_by_group(rule, x, groups, state)
        if state is not None and records:
            record_amaxes(state, INPUT, x8.amax)
            record_amaxes(state, WEIGHT, w8.amax)
        if rule.high_precision[FPROP]:
            y = plain_product(x.to(out_dtype), _oriented(weight, transposed).to(out_dtype), groups)
        else:
            y = _fprop(rule, x, x8, w8, groups).to(out_dtype)
            ledger.fprop()
        if needs_wgrad and not rule.high_precision[WGRAD]:
            saved_for_wgrad = quantize_columns(x, groups, rule.forward_format) if x8 is None else x8.for_columns()
        if needs_dgrad and not rule.high_precision[DGRAD] and rule.along is None:
            saved_for_dgrad = w8.t().for_columns()
        ctx.save_for_backward(*groups, *saved_for_wgrad, *saved_for_dgrad)
        ctx.ledger, ctx.state, ctx.rule, ctx.transposed, ctx.out_dtype = ledger, state, rule, transposed, out_dtype
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative()
        ids, ends, *saved = ctx.saved_tensors  # once: checkpointing unpacks them once
        rule, groups = ctx.rule, Groups(ids, ends)
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        fp8_dgrad = needs_dgrad and not rule.high_precision[DGRAD]
        fp8_wgrad = needs_wgrad and not rule.high_precision[WGRAD]
        dx = dw = dy8 = None
        if (fp8_dgrad or fp8_wgrad) and not gradient_by_rows(rule):
            dy8 = quantize_groups(dy, groups, rule.gradient_format, _scales(ctx.state, GRAD_OUTPUT))
            if ctx.state is not None:
                record_amaxes(ctx.state, GRAD_OUTPUT, dy8.amax)
        if needs_dgrad:
            dx = _dgrad(rule, dy, dy8, Quantized(*saved[-2:]), ctx.transposed, groups).to(ctx.x_dtype)
        if needs_wgrad:
            dw = _wgrad(rule, dy, dy8, Quantized(*saved[:2]), ctx.transposed, groups).to(ctx.weight_dtype)
        if fp8_dgrad or fp8_wgrad:
            ctx.ledger.backward(rule, None, fp8_dgrad, fp8_wgrad, None)
        return dx, dw, *(None,) * 12


def gradient_by_rows(rule: LayerRule) -> bool:
    """Whether the output's gradient has a scale for each row of each product."""
    return rule.along is not None or rule.gradient_format == E5M2


def quantized_weight(rule: LayerRule, weight: torch.Tensor, state, transposed: bool) -> GroupQuantized:
    """A weight as [experts, out, in] with a scale for each expert, for fprop and dgrad; or by rows [experts, out], for
    fprop, and without amaxes. Empty where no product takes it so.

    Args:
        state: of the delayed rule, or None; only read.
    """
    high_fprop, high_dgrad, _ = rule.high_precision
    if high_fprop and (high_dgrad or rule.along is not None):
        return NOTHING
    weight = weight.detach()
    if rule.along is not None:
        return GroupQuantized(*quantize_rows_of_experts(_oriented(weight, transposed), rule.forward_format), None)
    w8 = quantize_experts(weight, rule.forward_format, _scales(state, WEIGHT))
    return w8.t() if transposed else w8


NOTHING = GroupQuantized(None, None, None)


def _input_by_group(rule: LayerRule, x: torch.Tensor, groups: Groups, state) -> GroupQuantized | None:
    """x with a scale for each expert; None where the rule has others, or no product takes it so."""
    high_fprop, _, high_wgrad = rule.high_precision
    if rule.along is not None or (high_fprop and high_wgrad):
        return None
    return quantize_groups(x, groups, rule.forward_format, _scales(state, INPUT))


def _scales(state: torch.Tensor | None, tensor: int) -> torch.Tensor | None:
    return None if state is None else delayed_scales(state, tensor)


def _fprop(rule, x, x8, w8, groups) -> torch.Tensor:
    if rule.along is None:
        return grouped_product(x8.for_rows(groups), w8.for_columns(), groups, fast_accumulation=True)
    by_rows = Quantized(w8.codes, w8.scale_inv)
    return grouped_product(quantize_rows(x, rule.forward_format), by_rows, groups, fast_accumulation=True)


def _dgrad(rule, dy, dy8, w: Quantized, transposed, groups) -> torch.Tensor:
    """dx [rows, in] from dy [rows, out]; `w` holds the weight itself, or codes of w.T [experts, in, out]."""
    if rule.high_precision[DGRAD]:
        return plain_product(dy, _oriented(w.codes, not transposed).to(dy.dtype), groups)
    if w.scale_inv is None:
        w = quantize_rows_of_experts(_oriented(w.codes, not transposed), rule.forward_format)
    dy8 = quantize_rows(dy, E4M3) if dy8 is None else dy8.for_rows(groups)
    return grouped_product(dy8, w, groups)


def _wgrad(rule, dy, dy8, x: Quantized, transposed, groups) -> torch.Tensor:
    """dw of the weight's layout, from dy [rows, out] and x [rows, in]; `x` holds x itself, or its codes."""
    if rule.high_precision[WGRAD]:
        dy, x = dy, x.codes.to(dy.dtype)
        return plain_wgrad(x, dy, groups) if transposed else plain_wgrad(dy, x, groups)
    dy8 = quantize_columns(dy, groups, E4M3) if dy8 is None else dy8.for_columns()
    return grouped_wgrad(x, dy8, groups) if transposed else grouped_wgrad(dy8, x, groups)


def _oriented(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return weight.transpose(1, 2) if transposed else weight
