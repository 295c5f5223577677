"""The autograd function behind `FP8Linear`: three products of quantized operands, and what is kept between them."""

from __future__ import annotations

import torch

from ...numerics.kernels.quantize.layouts import Layouts
from ...numerics.scaling import GRAD_OUTPUT, Quantized
from ..products import plain_product, scaled_product
from .layer_rule import LayerRule, Stored, quantized, record

FPROP, DGRAD, WGRAD, RECOMPUTED = range(4)
"""Elements of the counter `fp8_products`."""


class LinearFunction(torch.autograd.Function):
    """y = x @ w.T + b. The operands come quantized; x and w themselves only carry the gradients, unless the recipe
    keeps a product in high precision, or the rule quantizes the weight again.

    `operands` are the tensors of two `Layouts` and a `Stored`: of x, of w, and w as it lies in memory. A weight that is
    stored in FP8 comes without other codes (`torch.compile` takes no tensor twice).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, counts, state, rule, out_dtype, *operands):
        x8, w8, stored = Layouts(*operands[:4]), Layouts(*operands[4:8]), Stored(*operands[8:])
        if rule.high_precision[FPROP]:
            y = plain_product(x.reshape(-1, x.shape[-1]).to(out_dtype), stored.values(out_dtype))
        else:
            y = _fprop(rule, x8.along_columns(), w8.along_columns(), stored, out_dtype)
            counts.select(0, RECOMPUTED if inside_backward() else FPROP).add_(1)
        if bias is not None:
            bias = bias.to(out_dtype)
            y = y.add_(bias) if y.is_contiguous() else y + bias  # of a padded product, whose rows have gaps

        saved_for_wgrad = saved_for_dgrad = ()
        if ctx.needs_input_grad[1]:
            saved_for_wgrad = (x, None) if rule.high_precision[WGRAD] else x8.along_rows()
        if ctx.needs_input_grad[0]:
            saved_for_dgrad = _saved_for_dgrad(rule, weight, w8, stored)
        ctx.save_for_backward(*saved_for_wgrad, *saved_for_dgrad)
        ctx.counts, ctx.state, ctx.rule, ctx.out_dtype = counts, state, rule, out_dtype
        ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # no view, as with `F.linear`: FSDP2 warns of an output that is one, since changing it in place loses its hooks
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        rule, saved = ctx.rule, ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = dy8 = None
        fp8_dgrad = needs_dgrad and not rule.high_precision[DGRAD]
        fp8_wgrad = needs_wgrad and not rule.high_precision[WGRAD]
        if fp8_dgrad or fp8_wgrad:
            dy8 = quantized(dy, rule.gradient_format, rule, ctx.state, GRAD_OUTPUT, fp8_dgrad, fp8_wgrad)
            if ctx.state is not None:
                record(rule, ctx.state, GRAD_OUTPUT, dy8.amax)
        if needs_dgrad:
            dx = _dgrad(rule, dy, dy8, *saved[-2:], ctx.out_dtype).to(ctx.x_dtype).reshape(ctx.x_shape)
        if needs_wgrad:
            dw = _wgrad(rule, dy, dy8, *saved[:2], ctx.out_dtype).to(ctx.weight_dtype)
        if needs_bias:
            db = dy.sum(0, dtype=ctx.bias_dtype)  # of the unquantized gradient
        if fp8_dgrad:
            ctx.counts.select(0, DGRAD).add_(1)
        if fp8_wgrad:
            ctx.counts.select(0, WGRAD).add_(1)
        return dx, dw, db, *(None,) * 15


def _saved_for_dgrad(rule: LayerRule, weight: torch.Tensor, w8: Layouts, stored: Stored) -> tuple:
    """The weight as dgrad shall find it: codes of w.T, or w as it is stored where they are made in backward."""
    if rule.high_precision[DGRAD] or rule.along is not None:
        return _kept(weight, stored)
    return (Layouts(*stored) if w8.codes is None else w8).along_rows()


def _kept(weight: torch.Tensor, stored: Stored) -> Stored:
    """A weight as backward shall find it. A plain one is kept as the Parameter, not as its data: DeepSpeed's ZeRO-3
    takes the gathered data out of it after forward and puts new data in for backward, which frees nothing while
    someone holds the old."""
    return Stored(weight, None) if stored.scale_inv is None else stored


def _fprop(rule, x8, w8, stored, out_dtype) -> torch.Tensor:
    """y [tokens, out] from x [tokens, in] and w [out, in]; w8 is empty for a weight that is stored in FP8."""
    if rule.along is None:
        w8 = Quantized(*stored) if w8.codes is None else w8
        return scaled_product(x8, w8, out_dtype, fast_accumulation=True)
    if w8.codes is None:
        w8 = stored.in_blocks(rule.along.weight_blocks, rule.forward_format)
    return rule.along.product(x8, w8, rule.along.weight_blocks, out_dtype, fast_accumulation=True)


def _dgrad(rule, dy, dy8, weight, weight_scale, out_dtype) -> torch.Tensor:
    """dx [tokens, in] from dy [tokens, out]; `weight` is w [out, in] as stored, or codes of w.T with one scale."""
    if rule.high_precision[DGRAD]:
        return plain_product(dy.to(out_dtype), Stored(weight, weight_scale).values(out_dtype).t())
    if rule.along is None:
        return scaled_product(dy8.along_columns(), Quantized(weight, weight_scale), out_dtype)
    blocks, weight_blocks = rule.along
    w8 = Stored(weight, weight_scale).in_blocks(weight_blocks, rule.forward_format, transposed=True)
    return rule.along.product(dy8.along_columns(), w8, weight_blocks, out_dtype)


def _wgrad(rule, dy, dy8, x, x_scale, out_dtype) -> torch.Tensor:
    """dw [out, in] from dy [tokens, out] and x; `x` is x itself, or codes of x.T."""
    if rule.high_precision[WGRAD]:
        return plain_product(dy.to(out_dtype).t(), x.reshape(-1, x.shape[-1]).to(out_dtype).t())
    if rule.along is None:
        return scaled_product(dy8.along_rows(), Quantized(x, x_scale), out_dtype)
    return rule.along.product(dy8.along_rows(), Quantized(x, x_scale), rule.along.blocks, out_dtype)


def inside_backward() -> bool:
    """Whether this forward is a recomputation: activation checkpointing runs it inside a backward pass.

    Compiled code counts each forward once, also where its partitioner recomputes.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
