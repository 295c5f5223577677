"""The autograd function behind experts in FP8: three grouped products, and what is kept between them."""

from __future__ import annotations

import torch

from ...numerics import gathered_codes
from ...numerics.formats import E4M3, E5M2
from ...numerics.gathered_codes import GatheredCodes
from ...numerics.kernels.layouts import Layouts
from ...numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Quantized
from ..derivatives import refuse_second_derivative
from .grouped_blocks import (
    experts_in_blocks,
    grouped_block_product,
    grouped_block_wgrad,
    quantize_groups_in_blocks,
)
from .grouped_products import Groups, grouped_product, grouped_wgrad, plain_product, plain_wgrad
from .grouped_scaling import (
    agreed_expert_scales,
    agreed_group_scales,
    amaxes_of_experts,
    amaxes_of_groups,
    codes_of_experts,
    delayed_scales,
    power_of_two_scales,
    quantize_experts,
    quantize_groups,
    quantize_lines,
    quantize_lines_of_expert_parts,
    quantize_lines_of_experts,
    quantize_lines_of_parts,
    record_amaxes,
    rows_as_operand,
    window_scales,
)
from .layer_rule import LayerRule, Stored
from .linear import DGRAD, FPROP, WGRAD
from .tensor_parallel import Cut, Split, split_of


class GroupedFunction(torch.autograd.Function):
    """y [rows, out] = x [rows, in] @ w[e].T for the rows of each expert e.

    The weight is [experts, out, in], or [experts, in, out] where it is `transposed`. `cut` says how ranks share each
    expert, `keeps` whether backward may follow, `records` whether the amaxes go into the rule's states. `operands` are
    the tensors of the `Groups`, of `quantized_weight`, of the weight as it is `Stored`, and the codes of x for fprop
    with their scales, where they are there already.
    """

    @staticmethod
    def forward(ctx, x, weight, ledger, state, rule, cut, transposed, out_dtype, keeps, records, *operands):
        groups, w8, stored = Groups(*operands[:6]), Layouts(*operands[6:11]), Stored(*operands[11:13])
        needs_dgrad, needs_wgrad = (keeps and needed for needed in ctx.needs_input_grad[:2])
        saved_for_wgrad = (x, None) if needs_wgrad else ()
        saved_for_dgrad = ()
        x8 = _quantized_input(rule, cut, x, groups, state, needs_wgrad, Quantized(*operands[13:]))
        if rule.high_precision[FPROP]:
            y = plain_product(x.to(out_dtype), _oriented(stored.values(out_dtype), transposed), groups)
        elif rule.has_blocks:
            y = grouped_block_product(x8.along_columns(), w8.along_columns(), groups, rule, out_dtype)
        else:
            y = grouped_product(x8.along_columns(), w8.along_columns(), groups, fast_accumulation=True)
            y = y.narrow(1, 0, weight.shape[2 if transposed else 1]).to(out_dtype)
        amaxes = (None, None)
        if state is not None and records:
            amaxes = x8.amax, None if rule.scaling == "window" else w8.amax
        if ledger is not None:
            _record(rule, state, INPUT, amaxes[0])
            _record(rule, state, WEIGHT, amaxes[1])
            ledger.forward(rule, not rule.high_precision[FPROP], *amaxes)
        if needs_wgrad and not rule.high_precision[WGRAD]:
            saved_for_wgrad = x8.along_rows()
        gathered = isinstance(weight, GatheredCodes)
        if needs_dgrad and not (gathered or rule.dgrad_reads_weight):
            saved_for_dgrad = w8.along_rows()
        elif needs_dgrad:  # what is gathered anew for backward as the Parameter, as in `LinearFunction`
            saved_for_dgrad = (weight, None) if gathered or stored.scale_inv is None else stored
        ctx.save_for_backward(*groups, *saved_for_wgrad, *saved_for_dgrad)
        ctx.ledger, ctx.state, ctx.rule, ctx.cut, ctx.transposed = ledger, state, rule, cut, transposed
        ctx.x_dtype, ctx.weight_dtype, ctx.weight_shape = x.dtype, weight.dtype, weight.shape
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative()
        saved = ctx.saved_tensors  # once: checkpointing unpacks them once
        rule, groups, saved = ctx.rule, Groups(*saved[:6]), saved[6:]
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        fp8_dgrad = needs_dgrad and not rule.high_precision[DGRAD]
        fp8_wgrad = needs_wgrad and not rule.high_precision[WGRAD]
        dx = dw = dy8 = None
        if fp8_dgrad or fp8_wgrad:
            dy8 = _quantized_gradient(rule, ctx.cut, dy, groups, ctx.state, fp8_dgrad, fp8_wgrad)
            amax = None if ctx.state is None else dy8.amax  # none has a gradient by rows
            _record(rule, ctx.state, GRAD_OUTPUT, amax)
            ctx.ledger.backward(rule, fp8_dgrad, fp8_wgrad, amax)
        if needs_dgrad:
            dx = _dgrad(rule, ctx.cut, dy, dy8, Stored(*saved[-2:]), ctx.transposed, groups)
            dx = dx.narrow(1, 0, ctx.weight_shape[1 if ctx.transposed else 2]).to(ctx.x_dtype)
        if needs_wgrad:
            dw = _wgrad(rule, dy, dy8, Quantized(*saved[:2]), ctx.transposed, groups)
            dw = dw.narrow(1, 0, ctx.weight_shape[1]).narrow(2, 0, ctx.weight_shape[2]).to(ctx.weight_dtype)
        return dx, dw, *(None,) * 23


def gradient_by_rows(rule: LayerRule) -> bool:
    """Whether the output's gradient has a scale for each row of each product."""
    return not rule.has_blocks and (rule.along is not None or rule.gradient_format == E5M2)


def quantized_weight(
    rule: LayerRule, stored: Stored, state, transposed: bool, for_dgrad: bool, cut: Cut | None = None
) -> Layouts:
    """A weight as [experts, out, in] for fprop, and for dgrad where the same numbers serve. Empty where no product
    takes it so.

    Args:
        stored: data [experts, out, in], or [experts, in, out] where it is `transposed`.
        state: of the delayed rule, or None; only read.
        cut: how ranks share each expert, where they do.
    """
    rows, columns = not rule.high_precision[FPROP], for_dgrad and not rule.dgrad_reads_weight
    return _oriented_layouts(rule, cut, stored, transposed, state, rows, columns) if rows or columns else Layouts()


def _oriented_layouts(rule, cut, stored: Stored, transposed, state, rows: bool, columns: bool) -> Layouts:
    """The layouts of a weight as [experts, out, in]."""
    fmt = rule.forward_format
    if rule.has_blocks:
        blocks = rule.along.weight_blocks
        along_columns = experts_in_blocks(stored, blocks, fmt, transposed) if rows else (None, None)
        along_rows = experts_in_blocks(stored, blocks, fmt, not transposed) if columns else (None, None)
        return Layouts(*along_columns, *along_rows)
    rows, columns = (columns, rows) if transposed else (rows, columns)
    split = split_of(cut, WEIGHT)
    if split is not None and transposed:
        split = split._replace(dim=1 - split.dim)
    if stored.is_in(fmt):
        w8 = codes_of_experts(*stored)
    elif rule.along is None:
        scales = _weight_scales(rule, stored, state, split)
        w8 = quantize_experts(stored.data, fmt, scales, rows, columns, stored.scale_inv)
    elif split is None:
        w8 = quantize_lines_of_experts(stored.data, fmt, rows, columns, stored.scale_inv)
    else:
        w8 = quantize_lines_of_expert_parts(stored.data, fmt, rows, columns, stored.scale_inv, split)
    return Layouts(*w8[2:4], *w8[:2], w8.amax) if transposed else w8


def _weight_scales(rule: LayerRule, stored: Stored, state, split: Split | None) -> torch.Tensor | None:
    """The scale of each expert's matrix, where it does not follow from what this rank has of it by the dynamic rule.
    FP32 [experts]."""
    fmt = rule.forward_format
    if rule.scaling == "window":  # MS-AMP takes a weight's amax at the optimizer step: the same number
        amax = amaxes_of_experts(stored.data, stored.scale_inv)
        return power_of_two_scales(amax if split is None else split.agreed(amax), fmt)
    if state is not None:
        return delayed_scales(state, WEIGHT)
    return None if split is None else agreed_expert_scales(stored.data, stored.scale_inv, fmt, split)


def _quantized_input(
    rule: LayerRule, cut, x: torch.Tensor, groups: Groups, state, needs_wgrad: bool, arrived: Quantized
) -> Layouts:
    """x for fprop, and for wgrad; empty where no product takes it. `arrived`: its codes for fprop, or None twice."""
    rows, columns = not rule.high_precision[FPROP], needs_wgrad and not rule.high_precision[WGRAD]
    if not (rows or columns):
        return Layouts()
    if rows and arrived.codes is not None:
        by_rows = arrived if rule.has_blocks else rows_as_operand(arrived, groups)
        x8 = _quantized(rule, cut, x, groups, rule.forward_format, state, INPUT, False, True) if columns else Layouts()
        return x8._replace(codes=by_rows.codes, scale_inv=by_rows.scale_inv)
    return _quantized(rule, cut, x, groups, rule.forward_format, state, INPUT, rows, columns)


def _quantized_gradient(rule: LayerRule, cut, dy, groups: Groups, state, for_dgrad: bool, for_wgrad: bool) -> Layouts:
    """dy for the products that run in FP8."""
    if gradient_by_rows(rule):
        return _quantized_lines(dy, groups, E4M3, for_dgrad, for_wgrad, split_of(cut, GRAD_OUTPUT))
    return _quantized(rule, cut, dy, groups, rule.gradient_format, state, GRAD_OUTPUT, for_dgrad, for_wgrad)


def _quantized(rule, cut, x, groups: Groups, fmt, state, tensor: int, rows: bool, columns: bool) -> Layouts:
    """The rows of an input or of an output's gradient by the rule."""
    split = split_of(cut, tensor)
    if rule.has_blocks:
        return quantize_groups_in_blocks(x, groups, rule, fmt, rows, columns)
    if rule.along is not None:
        return _quantized_lines(x, groups, fmt, rows, columns, split)
    if rule.scaling == "window":
        amax = amaxes_of_groups(x, groups)
        amax = amax if split is None else split.agreed(amax)
        scales = window_scales(state, tensor, amax, fmt)
        return quantize_groups(x, groups, fmt, scales, rows, columns)._replace(amax=amax)
    if state is not None:
        scales = delayed_scales(state, tensor)
    else:
        scales = None if split is None else agreed_group_scales(x, groups, fmt, split)
    return quantize_groups(x, groups, fmt, scales, rows, columns)


def _quantized_lines(x, groups: Groups, fmt, rows: bool, columns: bool, split: Split | None) -> Layouts:
    """The rows of x with a scale each; `split` where other ranks have more columns of them."""
    if split is None:
        return quantize_lines(x, groups, fmt, rows, columns)
    return quantize_lines_of_parts(x, groups, fmt, rows, columns, split)


def _record(rule: LayerRule, state: torch.Tensor | None, tensor: int, amax: torch.Tensor | None) -> None:
    """Keep an amax that no cast has recorded in the states. Compiled code notes it in the ledger instead."""
    if amax is not None and not torch.compiler.is_compiling():
        record_amaxes(state, tensor, amax, rule.keeps_nan)


def _dgrad(rule, cut, dy, dy8: Layouts, weight: Stored, transposed, groups) -> torch.Tensor:
    """dx [rows, in] from dy [rows, out]; `weight` is the weight as it is stored, or codes of w.T [experts, in, out]."""
    if rule.high_precision[DGRAD]:
        return plain_product(dy, _oriented(weight.values(dy.dtype), not transposed), groups)
    w8, gathered = Quantized(*weight), isinstance(weight.data, GatheredCodes)
    if gathered:
        weight = Stored.of(weight.data, gathered_codes.DGRAD)
    if gathered or rule.along is not None:
        w8 = _oriented_layouts(rule, cut, weight, transposed, None, False, True).along_rows()
    if rule.has_blocks:
        return grouped_block_product(dy8.along_columns(), w8, groups, rule, dy.dtype)
    return grouped_product(dy8.along_columns(), w8, groups)


def _wgrad(rule, dy, dy8: Layouts, x: Quantized, transposed, groups) -> torch.Tensor:
    """dw of the weight's layout, from dy [rows, out]; `x` holds x [rows, in] itself, or codes of x.T."""
    if rule.high_precision[WGRAD]:
        dy, x = dy, x.codes.to(dy.dtype)
        return plain_wgrad(x, dy, groups) if transposed else plain_wgrad(dy, x, groups)
    operands = (x, dy8.along_rows()) if transposed else (dy8.along_rows(), x)
    if rule.has_blocks:
        return grouped_block_wgrad(*operands, groups, rule, dy.dtype)
    return grouped_wgrad(*operands, groups)


def _oriented(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return weight.transpose(1, 2) if transposed else weight
