"""Define `FP8Linear`, a layer of `native`, and the autograd function of its products.

A plain weight on one rank, by a rule without state:

    forward     x8, w8 = quantized(x), quantized(w)     y  = x8.along_columns() @ w8.along_columns().T
    backward    dy8    = quantized(dy)                  dx = dy8.along_columns() @ w8.along_rows().T
                                                        dw = dy8.along_rows() @ x8.along_rows().T

All else serves others: a weight cut over ranks (`cut`, `split`), of another kind, or with a state.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from ...formats import scaling
from ...formats.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Quantized
from ...kernels.layouts import Layouts
from ...tensors import gathered_codes
from ...tensors.gathered_codes import WithoutTokens
from ...tensors.parameter_swap import belongings_kept
from ...tensors.sharded_tensor import arrived, is_distributed, local_part, with_local
from ...torch_tools.backward_end import saved_tensor_hook
from ..counts import result_dtype
from ..frozen_weights import check_running
from ..interface import COMPUTE_DTYPES
from ..products import plain_product, wgrad_dtype
from ..refusals import (
    note_whether_cut,
    refuse_cut_since,
    refuse_second_derivative,
    refuse_transforms,
    refuse_width,
)
from .layer_rule import (
    FROZEN,
    LayerRule,
    Operands,
    PlainWeight,
    Stored,
    fp8_product,
    quantized,
    quantized_gradient,
    split_of,
)
from .scaling_states import KeepsLedger, Ledger, SharedCodes
from .weights import kind_of, read


class FP8Products(KeepsLedger):
    """The FP8 products of a layer, mixed into its original class by conversion, which keeps the
    layer's Parameters.

    Input: [..., in_features] in bf16, fp16 or fp32. Output: [..., out_features] in the autocast
    dtype if autocast is on, else in the input's; products and gradients have it too (except as in
    `wgrad_dtype`). The gradient of a `ScaledTensor` is plain, with the dtype of the weight's
    values.
    """

    transposed_weight = False
    """True if the Parameter holds the weight as [in, out] (`TransposedLinear`)."""

    @property
    def rule_in_words(self) -> str:
        return repr(self.fp8_rule)

    def gathered_codes(self) -> Any:
        from .gathered_weights import WeightCodes  # only FSDP2 gathers codes

        return WeightCodes(self)

    def cast_of(self, tensor: int, values: torch.Tensor) -> Any:
        from .casts import cast_of  # only the monitor reads casts

        return cast_of(self, tensor, values)

    def set_rule(self, rule: LayerRule, shared: SharedCodes, history_len: int) -> None:
        self.fp8_cut: Any = None
        """The last known cut of the weight over ranks."""
        note_whether_cut(self)
        super().set_rule(rule, shared, history_len)

    def _reset_state(self, device: torch.device) -> None:
        self.fp8_ledger = Ledger(device)
        self.fp8_scaling = self.fp8_rule.scales.new_state(self.fp8_history_len, device)

    def _apply(self, fn, recurse=True):
        with belongings_kept(self, fn):
            return super()._apply(fn, recurse)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rule = self.fp8_rule
        weight = self.weight
        training = self.fp8_shared.is_training(self)
        out_dtype = result_dtype(input)
        in_fp8 = rule.runs_in_fp8(training)
        has_product = input.is_floating_point() and input.numel() > 0
        if not (in_fp8 and has_product and out_dtype in COMPUTE_DTYPES):
            return self._forward_without_fp8(input, out_dtype, in_fp8)
        self._check(input)
        self._follow(weight.device)
        # a module's `__setattr__` takes microseconds
        if not torch.compiler.is_compiling() and self.fp8_out_dtype != out_dtype:
            self.fp8_out_dtype = out_dtype
        if self.fp8_cut is not None or is_distributed(weight):
            from . import tensor_parallel  # only for layers cut over ranks

            operands = tensor_parallel.operands(self, input)
        else:
            operands = Operands(input, weight, self.bias, None, input, input)
        x, weight, bias, cut = operands[:4]
        kind = kind_of(weight)
        stored = kind.read(weight, gathered_codes.FPROP)
        matrix = self._matrix(stored)
        refuse_width(x, matrix.data.shape[1])
        differentiable = torch.is_grad_enabled()
        recorded = self.fp8_scaling if self._records(training) else None
        for_wgrad = differentiable and weight.requires_grad
        for_dgrad = differentiable and input.requires_grad
        x8 = self._quantized_input(operands, for_wgrad, recorded)
        w8 = kind.quantized(self, matrix, for_dgrad, recorded, split_of(cut, WEIGHT))
        amaxes = ()
        if recorded is not None:
            amaxes = x8.amax, w8.amax if rule.scales.records_weight else None
        # before the product: checkpointing's second forward stops at its last saved tensor
        self.fp8_ledger.forward(rule, not rule.high_precision.fprop, *amaxes)
        call = Call(
            rule, self.fp8_scaling, self.fp8_ledger, out_dtype, self.transposed_weight, kind, cut
        )
        y = LinearFunction.apply(x, weight, bias, call, x8, w8, stored)
        return cut.wrapped(y, input, self.out_features) if is_distributed(input) else y

    def _forward_without_fp8(
        self, input: torch.Tensor, out_dtype: torch.dtype, in_fp8: bool
    ) -> torch.Tensor:
        if in_fp8 and input.numel() == 0 and kind_of(self.weight).is_gathered:
            return WithoutTokens.apply(input, self.out_features, out_dtype, self.weight, self.bias)
        return super().forward(input)

    def _check(self, input: torch.Tensor) -> None:
        """Raise for a use of this layer that would give wrong numbers."""
        refuse_transforms(self.weight)
        if self.fp8_rule.frozen_weight:
            check_running(self, isinstance(self.weight, FROZEN))
        refuse_cut_since(self, input)

    def _matrix(self, stored: Stored) -> Stored:
        """Return the weight as [out, in]."""
        return stored.t() if self.transposed_weight else stored

    def _quantized_input(
        self, operands: Operands, for_wgrad: bool, recorded: torch.Tensor | None
    ) -> Layouts:
        """Quantize x as [tokens, in] for fprop and wgrad. `recorded`: the state that keeps its
        amax."""
        rule = self.fp8_rule
        x = operands.input
        split = operands.split
        for_wgrad = for_wgrad and not rule.high_precision.wgrad
        newest = self.fp8_ledger.newest(rule, recorded, INPUT)
        casts = []

        def cast() -> Layouts:
            matrix = arrived(operands.values).detach().reshape(-1, x.shape[-1])
            columns = for_wgrad and operands.gather is None
            fmt = rule.forward_format
            codes = quantized(
                matrix, fmt, rule, self.fp8_scaling, INPUT, True, columns, newest, split
            )
            casts.append(codes if operands.gather is None else operands.gather(codes))
            return casts[0]

        key = rule.scales, rule.forward_format, for_wgrad, split, operands.view
        x8 = self.fp8_shared.of_input(operands.origin, key, cast)
        if newest is not None and not casts:  # another layer's cast
            scaling.record_amax(recorded, INPUT, x8.amax, rule.scales.keeps_nan)
        return x8

    @torch.no_grad()
    def weight_codes(self) -> Quantized | None:
        """Return the codes [out, in] of the next forward; None for a weight in high precision or
        sharded."""
        rule, weight = self.fp8_rule, self.weight
        if rule.high_precision.fprop or is_distributed(weight):
            return None
        stored = self._matrix(read(weight))
        if stored.is_in(rule.forward_format):
            return Quantized(*stored)
        return stored.quantized(rule, self.fp8_scaling, columns=False).along_columns()

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        stored = local_part(self.weight)
        if self.fp8_rule.frozen_weight and isinstance(stored, FROZEN):
            values = with_local(self.weight, stored.exact())
            destination[f"{prefix}weight"] = values
            stored.state_dict_copies.add(values, f"{prefix}weight")

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        before = self.weight
        stored = local_part(before)
        if f"{prefix}weight" in state_dict and isinstance(stored, FROZEN):
            stored.state_dict_copies.accept()  # files are read into tensors of `state_dict()`
        super()._load_from_state_dict(state_dict, prefix, *args)
        kind_of(before).loaded(self, before)


class FP8Linear(FP8Products, nn.Linear):
    """`nn.Linear` with FP8 products."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.fp8_rule!r}"


class Call(NamedTuple):
    """What the products of a forward and its backward share, besides their operands."""

    rule: LayerRule
    state: torch.Tensor | None
    ledger: Ledger
    out_dtype: torch.dtype
    transposed: bool
    """True if the Parameter is w.T."""
    kind: PlainWeight
    cut: Any
    """x and w are one rank's parts, and y may be a partial sum; None: they are whole."""


class LinearFunction(torch.autograd.Function):
    """y = x @ w.T + b of the quantized operands `x8` and `w8`. x and w only carry the gradients,
    unless a product stays in high precision or the rule quantizes the weight again. `stored`: the
    Parameter in memory."""

    @staticmethod
    def forward(ctx, x, weight, bias, call, x8, w8, stored):
        rule, out_dtype = call.rule, call.out_dtype
        if rule.high_precision.fprop:
            matrix = stored.t() if call.transposed else stored
            y = plain_product(x.reshape(-1, x.shape[-1]).to(out_dtype), matrix.values(out_dtype))
        else:
            fast = rule.fast_accumulation
            operands = x8.along_columns(), w8.along_columns()
            y = fp8_product(rule.scales, *operands, out_dtype, fast_accumulation=fast)
        if bias is not None:
            # even if another rank adds it: all ranks sum its gradient alike
            bias = bias.to(out_dtype)
        if bias is not None and (call.cut is None or call.cut.adds_bias):
            # a padded product has gaps between rows, and selective checkpointing may have saved it
            y = y.add_(bias) if y.is_contiguous() and saved_tensor_hook() is None else y + bias

        saved_for_wgrad = saved_for_dgrad = ()
        if ctx.needs_input_grad[1]:
            saved_for_wgrad = (x, None) if rule.high_precision.wgrad else x8.along_rows()
        if ctx.needs_input_grad[0]:
            saved_for_dgrad = call.kind.saved(weight, stored, rule, w8)
        ctx.save_for_backward(*saved_for_wgrad, *saved_for_dgrad)
        ctx.call = call
        ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # no view, as with `F.linear`: FSDP2 warns of a view, since changing it in place loses its
        # hooks
        return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative(dy)
        call, saved = ctx.call, ctx.saved_tensors
        rule = call.rule
        needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
        dy = arrived(dy).detach().reshape(-1, dy.shape[-1])
        dx = dw = db = dy8 = None
        fp8_dgrad = needs_dgrad and not rule.high_precision.dgrad
        fp8_wgrad = needs_wgrad and not rule.high_precision.wgrad
        if fp8_dgrad or fp8_wgrad:
            newest = call.ledger.newest(rule, call.state, GRAD_OUTPUT)
            split = split_of(call.cut, GRAD_OUTPUT)
            dy8 = quantized_gradient(dy, rule, call.state, fp8_dgrad, fp8_wgrad, newest, split)
            amax = None if call.state is None else dy8.amax
            call.ledger.backward(rule, fp8_dgrad, fp8_wgrad, amax)
        if needs_dgrad:
            dx = _dgrad(call, dy, dy8, saved[-2:]).to(ctx.x_dtype).reshape(ctx.x_shape)
        if needs_wgrad:
            in_blocks = rule.scales.blocks is not None
            dw_dtype = wgrad_dtype(in_blocks, dy.device, ctx.weight_dtype, call.out_dtype)
            dw = _wgrad(rule, dy, dy8, *saved[:2], dw_dtype).to(ctx.weight_dtype)
            dw = dw.t() if call.transposed else dw
        if needs_bias:
            db = dy.sum(0, dtype=ctx.bias_dtype)  # of the unquantized gradient
        return dx, dw, db, None, None, None, None


def _dgrad(call: Call, dy, dy8, saved) -> torch.Tensor:
    """Return dx [tokens, in] from dy [tokens, out] and the saved weight."""
    rule = call.rule
    weight = call.kind.for_dgrad(saved, rule, call.state, call.transposed)
    if rule.high_precision.dgrad:
        return plain_product(dy.to(call.out_dtype), weight.values(call.out_dtype).t())
    w8 = Quantized(*weight)
    if rule.scales.blocks is not None:
        blocks, split = rule.scales.weight_blocks, split_of(call.cut, WEIGHT)
        w8 = weight.in_blocks(blocks, rule.forward_format, transposed=True, split=split)
    return fp8_product(rule.scales, dy8.along_columns(), w8, call.out_dtype)


def _wgrad(rule, dy, dy8, x, x_scale, out_dtype) -> torch.Tensor:
    """Return dw [out, in] from dy [tokens, out] and x, or codes of x.T."""
    if rule.high_precision.wgrad:
        return plain_product(dy.to(out_dtype).t(), x.reshape(-1, x.shape[-1]).to(out_dtype).t())
    operands = dy8.along_rows(), Quantized(x, x_scale)
    return fp8_product(rule.scales, *operands, out_dtype, by_weight=False)
