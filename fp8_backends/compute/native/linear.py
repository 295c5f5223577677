"""Define `FP8Linear`, a layer of `native`, and the autograd function of its products."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn

from ...formats import scaling
from ...formats.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Quantized
from ...kernels.layouts import Layouts
from ...tensors import gathered_codes
from ...tensors.block_codes import BlockCodes, is_decoded
from ...tensors.gathered_codes import GatheredCodes, WithoutTokens
from ...tensors.parameter_swap import belongings_kept
from ...tensors.scaled_tensor import Kind, ScaledTensor, quantize
from ...tensors.sharded_tensor import arrived, is_distributed
from ...tensors.statistics import Cast, in_blocks
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
    DGRAD,
    FPROP,
    PARALLEL,
    READERS,
    WGRAD,
    LayerRule,
    Stored,
    quantized,
    quantized_gradient,
    split_of,
)
from .scaling_states import KeepsLedger, Ledger, SharedCodes

FROZEN = (ScaledTensor, BlockCodes)
"""Types of frozen FP8 weights (`fp8_params`); products read their codes directly. A ScaledTensor
has E4M3 codes with one scale, a power of two: FP32 and bf16 hold every value exactly, and a saved
weight is loaded to the bit. BlockCodes keep the codes of a checkpoint: FP8 with a scale for 128 x
128 values, or others that the rule's cast reads as values.
"""


def frozen(weight: torch.Tensor) -> ScaledTensor:
    """Quantize a weight to a frozen one of the same dtype."""
    stored = quantize(weight.detach(), torch.float8_e4m3fn, weight.dtype)
    stored.kind = Kind.UNTRAINED
    return stored


class Operands(NamedTuple):
    """The operands of a layer on this rank."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    cut: Any
    """The cut of the layer over ranks; None: each has all of it."""
    origin: Any
    """The common source of equal inputs of several layers."""
    values: torch.Tensor
    """The input's values to quantize, with their `split` over ranks."""
    split: Any = None
    view: tuple = ()
    """The geometry of this input in `origin`."""
    gather: Callable[[Layouts], Layouts] | None = None
    """Gather the codes of all tokens from the ranks; `input` then has no values."""


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
        training = self.fp8_shared.is_training(self)
        out_dtype, in_fp8 = result_dtype(input), self.fp8_rule.runs_in_fp8(training)
        if in_fp8 and input.numel() == 0 and isinstance(self.weight, GatheredCodes):
            return WithoutTokens.apply(input, self.out_features, out_dtype, self.weight, self.bias)
        if (
            not in_fp8
            or out_dtype not in COMPUTE_DTYPES
            or not input.is_floating_point()
            or input.numel() == 0
        ):
            return super().forward(input)
        refuse_transforms(self.weight)
        if self.fp8_rule.frozen_weight:
            check_running(self, isinstance(self.weight, FROZEN))
        refuse_cut_since(self, input)
        self._follow(self.weight.device)
        if not torch.compiler.is_compiling():
            self.fp8_out_dtype = out_dtype
        differentiable = torch.is_grad_enabled()
        operands = Operands(input, self.weight, self.bias, None, input, input)
        if self.fp8_cut is not None or is_distributed(self.weight):
            operands = PARALLEL["operands"](self, input)
        x, weight, bias, cut = operands[:4]
        stored = Stored.of(weight)
        matrix = self._matrix(stored)
        refuse_width(x, matrix.data.shape[1])
        state = self.fp8_scaling
        recorded = state if differentiable and training else None
        x8 = self._quantized_input(operands, differentiable and weight.requires_grad, recorded)
        for_dgrad = differentiable and input.requires_grad and not is_decoded(self.weight)
        w8 = self._quantized_weight(matrix, cut, for_dgrad, recorded)
        constants = self.fp8_ledger, state, self.fp8_rule, out_dtype, self.transposed_weight, cut
        noted = ()
        if recorded is not None:
            noted = x8.amax, w8.amax if self.fp8_rule.scales.records_weight else None
        # before the product: checkpointing's second forward stops at its last saved tensor
        self.fp8_ledger.forward(self.fp8_rule, not self.fp8_rule.high_precision[FPROP], *noted)
        y = LinearFunction.apply(x, weight, bias, *constants, x8, w8, stored)
        return cut.wrapped(y, input, self.out_features) if is_distributed(input) else y

    def _matrix(self, stored: Stored) -> Stored:
        """Return the weight as [out, in]."""
        return stored.t() if self.transposed_weight else stored

    def _quantized_input(
        self, operands: Operands, for_wgrad: bool, recorded: torch.Tensor | None
    ) -> Layouts:
        """Quantize x as [tokens, in] for fprop and wgrad. `recorded`: the state that keeps its
        amax."""
        rule, state = self.fp8_rule, self.fp8_scaling
        for_wgrad = for_wgrad and not rule.high_precision[WGRAD]
        newest, x, split = (
            self.fp8_ledger.newest(rule, recorded, INPUT),
            operands.input,
            operands.split,
        )
        casts = []

        def cast() -> Layouts:
            matrix = arrived(operands.values).detach().reshape(-1, x.shape[-1])
            columns = for_wgrad and operands.gather is None
            fmt = rule.forward_format
            codes = quantized(matrix, fmt, rule, state, INPUT, True, columns, newest, split)
            casts.append(codes if operands.gather is None else operands.gather(codes))
            return casts[0]

        key = rule.scales, rule.forward_format, for_wgrad, split, operands.view
        x8 = self.fp8_shared.of_input(operands.origin, key, cast)
        if newest is not None and not casts:  # another layer's cast
            scaling.record_amax(recorded, INPUT, x8.amax, rule.scales.keeps_nan)
        return x8

    def _quantized_weight(
        self, weight: Stored, cut: Any, for_dgrad: bool, recorded: torch.Tensor | None
    ) -> Layouts:
        """Quantize w [out, in] for fprop, and dgrad if the same codes serve; empty for a weight
        stored in FP8."""
        rule, fmt, state = self.fp8_rule, self.fp8_rule.forward_format, self.fp8_scaling
        # kept codes serve all later forwards
        for_dgrad = (for_dgrad or self.fp8_shared.keeps_weights) and not rule.high_precision[DGRAD]
        newest = self.fp8_ledger.newest(rule, recorded, WEIGHT)
        if weight.is_in(fmt):
            amax = None
            # record what a cast of the weight would have recorded
            if isinstance(self.weight, GatheredCodes):
                self.fp8_recomputed = self.fp8_shared.is_training(self) and is_checkpointed()
                amax = self.weight.parts.get(gathered_codes.AMAX)
                if newest is not None:
                    scaling.record_amax(recorded, WEIGHT, amax, rule.scales.keeps_nan)
            return Layouts(amax=amax)
        amax, split = None, split_of(cut, WEIGHT)
        if (
            not rule.scales.moves_in_forward
            and isinstance(self.weight, ScaledTensor)
            and not torch.compiler.is_compiling()
        ):
            amax = self.weight.known_amax()

        def cast() -> Layouts:
            return weight.quantized(fmt, rule, state, for_dgrad, newest, amax, split)

        if rule.scales.moves_in_forward:  # anew in every forward
            return cast()
        return self.fp8_shared.of_weight(self, (rule, fmt), cast)

    @torch.no_grad()
    def weight_codes(self) -> Quantized | None:
        """Return the codes [out, in] of the next forward; None for a weight in high precision or
        sharded."""
        rule, weight = self.fp8_rule, self.weight
        if rule.high_precision[FPROP] or is_distributed(weight):
            return None
        stored = self._matrix(Stored.of(weight))
        if stored.is_in(rule.forward_format):
            return Quantized(*stored)
        return stored.quantized(
            rule.forward_format, rule, self.fp8_scaling, columns=False
        ).along_columns()

    def cast_of(self, tensor: int, values: torch.Tensor) -> Cast | None:
        """Describe the cast for the tensor's first product; None for a sharded weight, or one
        stored only in FP8."""
        rule = self.fp8_rule
        readers = [product for product in READERS[tensor] if not rule.high_precision[product]]
        if not rule.runs_in_fp8(self.training) or not readers:
            return None
        fmt = rule.format_of(tensor, readers[0])
        if tensor != WEIGHT:
            matrix = values.detach().reshape(-1, values.shape[-1])
        elif is_distributed(values):
            return None
        else:
            stored = self._matrix(Stored.of(values))
            if stored.is_in(fmt):  # cast by the optimizer
                if not isinstance(values, ScaledTensor) or values.rest is None:
                    return None
                exact = self._matrix(Stored(values.exact(torch.float32), None)).data
                return Cast(
                    exact,
                    fmt,
                    scaling.tensor_amax(exact),
                    stored.scale_inv.reciprocal(),
                    codes=stored.data,
                )
            matrix = stored.data if stored.scale_inv is None else stored.values(torch.float32)
        if rule.scales.blocks is not None:
            return in_blocks(
                matrix, fmt, rule.scales.weight_blocks if tensor == WEIGHT else rule.scales.blocks
            )
        amax = scaling.tensor_amax(matrix)
        # a state changes later
        scale = rule.scales.scale(amax, fmt, tensor, self.fp8_scaling).clone()
        return Cast(matrix, fmt, amax, scale)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.fp8_rule.frozen_weight and isinstance(self.weight, FROZEN):
            destination[f"{prefix}weight"] = values = self.weight.exact()
            self.weight.state_dict_copies.add(values, f"{prefix}weight")

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        before = self.weight
        super()._load_from_state_dict(state_dict, prefix, *args)
        # `assign=True`
        if isinstance(before, BlockCodes) and not isinstance(self.weight, BlockCodes):
            values, self.weight = self.weight.detach(), before
            before.copy_(values)
        # `assign=True`: another Parameter
        elif self.fp8_rule.frozen_weight and not isinstance(self.weight, FROZEN):
            values, self.weight = (
                self.weight.detach(),
                nn.Parameter(frozen(self.weight), requires_grad=False),
            )
            self.weight.copy_(values)
        if isinstance(self.weight, ScaledTensor):
            self.weight.drop_exact_edits()


class FP8Linear(FP8Products, nn.Linear):
    """`nn.Linear` with FP8 products."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.fp8_rule!r}"


class LinearFunction(torch.autograd.Function):
    """y = x @ w.T + b of quantized operands `x8` and `w8`, which is empty for a weight stored in
    FP8. x and w only carry the gradients, unless a product stays in high precision or the rule
    quantizes the weight again. `stored`: the Parameter in memory, w.T if `transposed`. `cut`: x and
    w are one rank's parts, and y may be a partial sum."""

    @staticmethod
    def forward(
        ctx, x, weight, bias, ledger, state, rule, out_dtype, transposed, cut, x8, w8, stored
    ):
        matrix = stored.t() if transposed else stored
        if rule.high_precision[FPROP]:
            y = plain_product(x.reshape(-1, x.shape[-1]).to(out_dtype), matrix.values(out_dtype))
        else:
            y = _fprop(rule, x8.along_columns(), w8.along_columns(), matrix, out_dtype)
        if bias is not None:
            # even if another rank adds it: all ranks sum its gradient alike
            bias = bias.to(out_dtype)
        if bias is not None and (cut is None or cut.adds_bias):
            # a padded product has gaps between rows, and selective checkpointing may have saved it
            y = y.add_(bias) if y.is_contiguous() and _saved_tensor_hook() is None else y + bias

        saved_for_wgrad = saved_for_dgrad = ()
        if ctx.needs_input_grad[1]:
            saved_for_wgrad = (x, None) if rule.high_precision[WGRAD] else x8.along_rows()
        if ctx.needs_input_grad[0]:
            is_gathered = isinstance(weight, GatheredCodes)
            if is_gathered or rule.dgrad_reads_weight or is_decoded(weight):
                # a plain weight as the Parameter, not as its data: DeepSpeed's ZeRO-3 takes the
                # gathered data out of it after forward and puts new data in for backward, and frees
                # nothing that is still referenced
                saved_for_dgrad = (
                    Stored(weight, None) if is_gathered or stored.scale_inv is None else stored
                )
            else:
                saved_for_dgrad = (Layouts(*matrix) if w8.codes is None else w8).along_rows()
        ctx.save_for_backward(*saved_for_wgrad, *saved_for_dgrad)
        ctx.ledger, ctx.state, ctx.rule, ctx.out_dtype, ctx.transposed = (
            ledger,
            state,
            rule,
            out_dtype,
            transposed,
        )
        ctx.cut, ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = cut, x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # no view, as with `F.linear`: FSDP2 warns of a view, since changing it in place loses its
        # hooks
        return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative(dy)
        rule, saved = ctx.rule, ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
        dy = arrived(dy).detach().reshape(-1, dy.shape[-1])
        dx = dw = db = dy8 = None
        fp8_dgrad = needs_dgrad and not rule.high_precision[DGRAD]
        fp8_wgrad = needs_wgrad and not rule.high_precision[WGRAD]
        if fp8_dgrad or fp8_wgrad:
            newest = ctx.ledger.newest(rule, ctx.state, GRAD_OUTPUT)
            split = split_of(ctx.cut, GRAD_OUTPUT)
            dy8 = quantized_gradient(dy, rule, ctx.state, fp8_dgrad, fp8_wgrad, newest, split)
            ctx.ledger.backward(rule, fp8_dgrad, fp8_wgrad, None if ctx.state is None else dy8.amax)
        if needs_dgrad:
            weight = _weight_for_dgrad(rule, *saved[-2:], ctx.transposed, ctx.state)
            dx = _dgrad(rule, dy, dy8, weight, ctx.out_dtype, split_of(ctx.cut, WEIGHT))
            dx = dx.to(ctx.x_dtype).reshape(ctx.x_shape)
        if needs_wgrad:
            along = rule.scales.blocks is not None
            dw_dtype = wgrad_dtype(along, dy.device, ctx.weight_dtype, ctx.out_dtype)
            dw = _wgrad(rule, dy, dy8, *saved[:2], dw_dtype).to(ctx.weight_dtype)
            dw = dw.t() if ctx.transposed else dw
        if needs_bias:
            db = dy.sum(0, dtype=ctx.bias_dtype)  # of the unquantized gradient
        return dx, dw, db, *(None,) * 9


def _weight_for_dgrad(rule, weight, scale_inv, transposed, state) -> Stored:
    """Orient the saved weight for `_dgrad`."""
    if isinstance(weight, GatheredCodes):
        stored = Stored.of(weight, gathered_codes.DGRAD)
        return stored.t() if transposed == rule.dgrad_reads_weight else stored
    if is_decoded(weight):  # again: kept codes would take more memory than its own
        matrix = Stored.of(weight)
        if rule.dgrad_reads_weight:
            return matrix
        codes = quantized(matrix.data, rule.forward_format, rule, state, WEIGHT, rows=False)
        return Stored(*codes.along_rows())
    stored = Stored(weight, scale_inv)
    return stored.t() if transposed and rule.dgrad_reads_weight else stored


def is_checkpointed() -> bool:
    """Return True if backward may run this forward again; `use_reentrant` looks like a forward
    without gradients."""
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():
        return True
    code = getattr(_saved_tensor_hook(), "__code__", None)
    return code is not None and code.co_filename == torch.utils.checkpoint.__file__


def _saved_tensor_hook() -> Callable | None:
    """Return the function that packs tensors saved now, or None."""
    hooks = (
        None
        if torch.compiler.is_compiling()
        else torch._C._autograd._top_saved_tensors_default_hooks(True)
    )
    return None if hooks is None else hooks[0]


def _fprop(rule, x8, w8, stored, out_dtype) -> torch.Tensor:
    """Return y [tokens, out] from x [tokens, in] and w [out, in]; w8 is empty for a weight stored
    in FP8."""
    if w8.codes is None and rule.scales.blocks is None:
        w8 = Quantized(*stored)
    elif w8.codes is None:
        w8 = stored.in_blocks(rule.scales.weight_blocks, rule.forward_format)
    return rule.product(x8, w8, out_dtype, fprop=True)


def _dgrad(rule, dy, dy8, weight: Stored, out_dtype, split) -> torch.Tensor:
    """Return dx [tokens, in] from dy [tokens, out] and the stored w [out, in], or codes of w.T with
    one scale."""
    if rule.high_precision[DGRAD]:
        return plain_product(dy.to(out_dtype), weight.values(out_dtype).t())
    w8 = Quantized(*weight)
    if rule.scales.blocks is not None:
        w8 = weight.in_blocks(
            rule.scales.weight_blocks, rule.forward_format, transposed=True, split=split
        )
    return rule.product(dy8.along_columns(), w8, out_dtype)


def _wgrad(rule, dy, dy8, x, x_scale, out_dtype) -> torch.Tensor:
    """Return dw [out, in] from dy [tokens, out] and x, or codes of x.T."""
    if rule.high_precision[WGRAD]:
        return plain_product(dy.to(out_dtype).t(), x.reshape(-1, x.shape[-1]).to(out_dtype).t())
    return rule.product(dy8.along_rows(), Quantized(x, x_scale), out_dtype, by_weight=False)
