"""Run the experts of a mixture in FP8: as `FP8Linear` does with one matrix, for a 3-D Parameter of
many.

Every expert has its own scales, so its numbers are those of a Linear with its weight and its
tokens. Grouped products take only E4M3: recipes with E5M2 gradients get E4M3 ones with a scale for
each row of a product. Rules with blocks multiply expert by expert, in the recipe's own formats. A
level's FP16 data get a scale for each expert; E4M3 data are multiplied with their one scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import FP8BackendError
from ...formats.formats import E4M3, E5M2
from ...formats.scaling import (
    DYNAMIC,
    GRAD_OUTPUT,
    INPUT,
    ROWS,
    RULES,
    WEIGHT,
    Blocks,
    Quantized,
    record_amax,
    times,
)
from ...kernels.layouts import Layouts
from ...tensors import gathered_codes
from ..interface import Recipe
from ..native.backend import layer_rule
from ..native.gathered_weights import WeightCodes, exponents
from ..native.layer_rule import (
    HighPrecision,
    LayerRule,
    Stored,
    parallel,
    split_of,
)
from ..native.linear import Call
from ..native.scaling_states import KeepsLedger, Ledger, SharedCodes
from ..native.weights import kind_of, read
from ..refusals import refuse_second_derivative
from . import (
    ExpertWeight,
    ExpertWeights,
    grouped_scaling,
    misfit,
    own_experts,
    own_part,
    sizes_of,
)
from .grouped_products import (
    Groups,
    grouped_engine_for,
    grouped_product,
    grouped_wgrad,
    plain_product,
    plain_wgrad,
)

_PLAIN = LayerRule(RULES["dynamic"], E4M3, E4M3, HighPrecision(True, True, True), True)
"""The rule of an unconverted weight beside a converted one."""


def unfit(experts: nn.Module, part: str, recipe: Recipe) -> str | None:
    """Do as `Compute.parts`."""
    if recipe.gradient_formats:
        return "expert weights in one 3-D Parameter: their gradients have one format"
    weight, blocks = experts._parameters[part], RULES[recipe.scaling].weight_blocks
    return misfit(experts, part, recipe) or parallel("cut_obstacle", experts, weight, blocks)


def note(recipe: Recipe) -> str | None:
    """Do as `Compute.parts`."""
    rule, remark = (
        layer_rule(recipe),
        "gradients in E4M3 with a scale a row: no GPU has grouped products with E5M2",
    )
    return None if rule.scales.cuts_contraction or rule.gradient_format == E4M3 else remark


def build(experts: nn.Module, parts: list[str], recipe: Recipe, shared: SharedCodes) -> FP8Experts:
    """Do as `Compute.parts`."""
    weights = FP8Experts({part: FP8ExpertWeight(experts, part) for part in parts})
    for weight in weights.values():
        weight.set_rule(layer_rule(recipe), shared, recipe.amax_history_len)
    return weights


class FP8Experts(ExpertWeights):
    """Grouped products of all experts of a module."""

    def has_fp8_products(self, experts: nn.Module) -> bool:
        return self._any.fp8_rule.runs_in_fp8(self._any.fp8_shared.is_training(experts))

    def groups(self, ids: torch.Tensor, experts: int) -> Groups:
        return Groups.of(ids, experts)

    def product(
        self,
        experts: nn.Module,
        part: str,
        x: torch.Tensor,
        groups: Groups,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        weight, transposed = own_part(experts, part), experts.is_transposed
        if part in self:
            y = self[part](x, weight, groups, out_dtype)
        else:
            call = Call(_PLAIN, None, None, out_dtype, transposed, kind_of(weight), None)
            y = grouped(x, weight, call, groups, Layouts(), read(weight))
        if experts.has_bias:
            y = y + own_part(experts, f"{part}_bias").index_select(0, groups.ids).to(out_dtype)
        return y

    @property
    def _any(self) -> FP8ExpertWeight:
        """One of the weights; they share rule and codes."""
        return next(iter(self.values()))


class ExpertCodes(WeightCodes):
    """The codes of a 3-D weight, sharded by experts, each whole on a rank. Amaxes and scales are
    [experts, rows of blocks, blocks in a row], and [experts, 1, 1] by a rule with one scale."""

    dimensions = 3

    @property
    def amax(self) -> torch.Tensor | None:
        return self.agreed[gathered_codes.FPROP].flatten() if self.change_in_forward else None

    def amaxes(self, shard: torch.Tensor, first: int, shape: torch.Size) -> list[torch.Tensor]:
        stored = read(shard)
        return [self._amaxes(stored, first, shape, product) for product in self.products]

    def codes(
        self, shard: torch.Tensor, first: int, shape: torch.Size, product: str
    ) -> torch.Tensor:
        stored, rule = read(shard), self.layer.fp8_rule
        if not len(shard):
            return stored.data.to(rule.forward_format.dtype)
        blocks, (scale, _) = (
            self._blocks_of_expert(product, shape),
            self._scales(self.agreed[product]),
        )
        scale = times(scale.narrow(0, first, len(shard)).flatten(0, 1), stored.scale_inv)
        codes = blocks.cast(_stacked(stored.data, blocks), scale, rule.forward_format)
        return codes.view(len(shard), -1, shape[2]).narrow(1, 0, shape[1]).contiguous()

    def _amaxes(self, stored: Stored, first: int, shape: torch.Size, product: str) -> torch.Tensor:
        blocks, rule = self._blocks_of_expert(product, shape), self.layer.fp8_rule
        down, across = -(-shape[1] // blocks.rows), -(-shape[2] // (blocks.columns or shape[2]))
        amaxes = torch.zeros(shape[0], down, across, dtype=torch.float32, device=stored.data.device)
        if len(stored.data):
            if rule.scales.keeps_nan:
                local = grouped_scaling.amaxes_of_experts(*stored, keep_nan=True)
            else:
                local = times(blocks.amax(_stacked(stored.data, blocks)), stored.scale_inv)
            amaxes.narrow(0, first, len(stored.data)).copy_(local.view(-1, down, across))
        return exponents(amaxes, rule)

    def _blocks_of_expert(self, product: str, shape: torch.Size) -> Blocks:
        """Return the blocks of each expert's matrix in its layout; all of it for a rule with one
        scale."""
        if self.layer.fp8_rule.scales.blocks is None:
            return ROWS._replace(rows=shape[1])
        rows, columns = self._block_shape(product)
        return self.layer.fp8_rule.scales.weight_blocks._replace(
            rows=rows or shape[1], columns=columns
        )


class FP8ExpertWeight(KeepsLedger, ExpertWeight):
    """One 3-D weight with products in FP8; the ledger counts a product of all experts as one. Under
    expert parallelism `fp8_scaling` holds the states of all ranks' experts; a rank records its own,
    and the ranks exchange them."""

    def gathered_codes(self) -> ExpertCodes:
        return ExpertCodes(self)

    @property
    def fp8_engine(self) -> str:
        if self.fp8_rule.scales.cuts_contraction:
            return super().fp8_engine
        return grouped_engine_for(self.weight.device)

    def set_rule(self, rule: LayerRule, shared: SharedCodes, history_len: int) -> None:
        self.fp8_own = own_experts(*self.fp8_owner)
        self.fp8_cut = parallel("cut_of", self.fp8_experts[0], self.weight, self.transposed_weight)
        super().set_rule(rule, shared, history_len)

    def _reset_state(self, device: torch.device) -> None:
        experts, state = (
            sizes_of(*self.fp8_owner)[0],
            self.fp8_rule.scales.new_state(self.fp8_history_len, device),
        )
        self.fp8_ledger = Ledger(device, experts, self.fp8_own.start)
        self.fp8_scaling = None if state is None else state.repeat(experts, 1, 1)

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        groups: Groups,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return [rows, out] from the grouped rows x [rows, in]. `weight`: the experts module's
        current tensor for its Parameter."""
        self._follow(weight.device)
        if not torch.compiler.is_compiling():
            self.fp8_out_dtype = out_dtype
        if len(weight) != self.fp8_own.stop - self.fp8_own.start:
            raise FP8BackendError(
                f"{self.fp8_part}: its experts were shared out to ranks after the model was "
                "prepared: apply the expert-parallel plan first, then fp8_backends.prepare(model, "
                "optimizer, spec)"
            )
        keep = torch.is_grad_enabled()
        state = None if self.fp8_scaling is None else self.fp8_scaling[self.fp8_own]
        rule, transposed, kind = self.fp8_rule, self.transposed_weight, kind_of(weight)
        # kept codes serve all later forwards
        for_dgrad = (keep and x.requires_grad) or self.fp8_shared.keeps_weights

        @torch.no_grad()
        def quantize() -> Layouts:
            return quantized_weight(rule, stored, state, transposed, for_dgrad, self.fp8_cut)

        with torch.no_grad():
            stored = kind.read(weight, gathered_codes.FPROP)
        # with gradients on: a kind asks whether the forward is checkpointed
        w8 = kind.quantized_matrices(self, weight, stored, quantize)
        records = self._records(self.fp8_shared.is_training(self))
        call = Call(rule, state, self.fp8_ledger, out_dtype, transposed, kind, self.fp8_cut)
        return grouped(x, weight, call, groups, w8, stored, records)

    def extra_repr(self) -> str:
        experts, outputs, inputs = sizes_of(*self.fp8_owner)
        rows = " by rows" if gradient_by_rows(self.fp8_rule) else ""
        rule = self.fp8_rule._replace(gradient_format=E4M3) if rows else self.fp8_rule
        return f"{experts} experts, {inputs} -> {outputs}, {rule!r}{rows}"


def grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    call: Call,
    groups: Groups,
    w8: Layouts,
    stored: Stored,
    records: bool = False,
) -> torch.Tensor:
    """Call `GroupedFunction`, which keeps nothing without gradients."""
    if not torch.is_grad_enabled():
        x = x.detach()
        weight = weight.detach()
    return GroupedFunction.apply(x, weight, call, groups, w8, stored, records)


class GroupedFunction(torch.autograd.Function):
    """y [rows, out] = x [rows, in] @ w[e].T for the rows of each expert e.

    `records`: amaxes go into the rule's states; `w8`: `quantized_weight`.
    """

    @staticmethod
    def forward(ctx, x, weight, call, groups, w8, stored, records):
        rule, state, out_dtype = call.rule, call.state, call.out_dtype
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        saved_for_wgrad = (x, None) if needs_wgrad else ()
        saved_for_dgrad = ()
        x8 = _quantized_input(call, x, groups, needs_wgrad)
        if rule.high_precision.fprop:
            matrices = _oriented(stored.values(out_dtype), call.transposed)
            y = plain_product(x.to(out_dtype), matrices, groups)
        else:
            operands = x8.along_columns(), w8.along_columns()
            how = rule.grouped_scaling, out_dtype, rule.fast_accumulation
            y = grouped_product(*operands, groups, *how)
            y = y.narrow(1, 0, weight.shape[2 if call.transposed else 1]).to(out_dtype)
        amaxes = (None, None)
        if state is not None and records:
            amaxes = x8.amax, w8.amax if rule.scales.records_weight else None
        if call.ledger is not None:
            _record(call, INPUT, amaxes[0])
            _record(call, WEIGHT, amaxes[1])
            call.ledger.forward(rule, not rule.high_precision.fprop, *amaxes)
        if needs_wgrad and not rule.high_precision.wgrad:
            saved_for_wgrad = x8.along_rows()
        if needs_dgrad:
            saved_for_dgrad = call.kind.saved(weight, stored, rule, w8)
        ctx.save_for_backward(*groups, *saved_for_wgrad, *saved_for_dgrad)
        ctx.call = call
        ctx.x_dtype, ctx.weight_dtype, ctx.weight_shape = x.dtype, weight.dtype, weight.shape
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative(dy)
        saved = ctx.saved_tensors  # once: checkpointing unpacks them once
        call, groups, saved = ctx.call, Groups(*saved[:6]), saved[6:]
        rule = call.rule
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        fp8_dgrad = needs_dgrad and not rule.high_precision.dgrad
        fp8_wgrad = needs_wgrad and not rule.high_precision.wgrad
        dx = dw = dy8 = None
        if fp8_dgrad or fp8_wgrad:
            dy8 = _quantized(call, dy, groups, GRAD_OUTPUT, fp8_dgrad, fp8_wgrad)
            amax = None if call.state is None else dy8.amax  # None for a gradient by rows
            _record(call, GRAD_OUTPUT, amax)
            call.ledger.backward(rule, fp8_dgrad, fp8_wgrad, amax)
        if needs_dgrad:
            dx = _dgrad(call, dy, dy8, Stored(*saved[-2:]), groups)
            dx = dx.narrow(1, 0, ctx.weight_shape[1 if call.transposed else 2]).to(ctx.x_dtype)
        if needs_wgrad:
            dw = _wgrad(call, dy, dy8, Quantized(*saved[:2]), groups)
            dw = (
                dw.narrow(1, 0, ctx.weight_shape[1])
                .narrow(2, 0, ctx.weight_shape[2])
                .to(ctx.weight_dtype)
            )
        return dx, dw, None, None, None, None, None


def gradient_by_rows(rule: LayerRule) -> bool:
    """Return True if the gradient has a scale for each row of each product."""
    return not rule.scales.cuts_contraction and (
        rule.scales.blocks is not None or rule.gradient_format == E5M2
    )


def quantized_weight(
    rule: LayerRule, stored: Stored, state, transposed: bool, for_dgrad: bool, cut=None
) -> Layouts:
    """Quantize a weight [experts, out, in], or [experts, in, out] if `transposed`, for fprop, and
    for dgrad if the same codes serve. Empty layouts if no product reads them. `state`: of the
    delayed rule, read-only."""
    rows, columns = not rule.high_precision.fprop, for_dgrad and not rule.dgrad_reads_weight
    return (
        oriented_layouts(rule, cut, stored, transposed, state, rows, columns)
        if rows or columns
        else Layouts()
    )


def oriented_layouts(
    rule, cut, stored: Stored, transposed, state, rows: bool, columns: bool
) -> Layouts:
    """Quantize a weight as [experts, out, in]."""
    fmt = rule.forward_format
    if rule.scales.cuts_contraction:
        blocks = rule.scales.weight_blocks
        along_columns = (
            grouped_scaling.experts_in_blocks(stored, blocks, fmt, transposed)
            if rows
            else (None, None)
        )
        along_rows = (
            grouped_scaling.experts_in_blocks(stored, blocks, fmt, not transposed)
            if columns
            else (None, None)
        )
        return Layouts(*along_columns, *along_rows)
    rows, columns = (columns, rows) if transposed else (rows, columns)
    split = split_of(cut, WEIGHT)
    if split is not None and transposed:
        split = split._replace(dim=1 - split.dim)
    if stored.is_in(fmt):
        w8 = grouped_scaling.codes_of_experts(*stored)
    else:
        scales = rule.scales.given_scale(state, WEIGHT)
        if rule.scales.from_amax(WEIGHT) != DYNAMIC:
            amax = grouped_scaling.amaxes_of_experts(*stored, keep_nan=rule.scales.keeps_nan)
            amax = amax if split is None else split.agreed(amax)
            scales = grouped_scaling.scales(rule.scales, amax, fmt, WEIGHT, state)
        lines = rule.scales.blocks is not None
        w8 = grouped_scaling.quantize_experts(
            stored.data, fmt, scales, rows, columns, stored.scale_inv, lines, split
        )
    return Layouts(*w8[2:4], *w8[:2], w8.amax) if transposed else w8


def _quantized_input(call: Call, x: torch.Tensor, groups: Groups, needs_wgrad: bool) -> Layouts:
    """Quantize x for fprop and wgrad. Empty layouts if no product reads them."""
    fprop, _, wgrad = call.rule.high_precision
    rows, columns = not fprop, needs_wgrad and not wgrad
    return _quantized(call, x, groups, INPUT, rows, columns) if rows or columns else Layouts()


def _quantized(call: Call, x, groups: Groups, tensor: int, rows: bool, columns: bool) -> Layouts:
    """Quantize the rows of an input or of an output's gradient by the rule."""
    rule, state = call.rule, call.state
    fmt, lines, split = (
        rule.forward_format,
        rule.scales.blocks is not None,
        split_of(call.cut, tensor),
    )
    if tensor == GRAD_OUTPUT:
        lines = gradient_by_rows(rule)
        fmt = E4M3 if lines else rule.gradient_format
    if rule.scales.cuts_contraction:
        return grouped_scaling.quantize_groups_in_blocks(x, groups, rule, fmt, rows, columns)
    if lines:
        return grouped_scaling.quantize_groups(x, groups, fmt, None, rows, columns, lines, split)
    if rule.scales.from_amax(tensor) != DYNAMIC:
        amax = grouped_scaling.amaxes_of_groups(x, groups, keep_nan=rule.scales.keeps_nan)
        amax = amax if split is None else split.agreed(amax)
        scales = grouped_scaling.scales(rule.scales, amax, fmt, tensor, state)
        return grouped_scaling.quantize_groups(x, groups, fmt, scales, rows, columns)._replace(
            amax=amax
        )
    scales = rule.scales.given_scale(state, tensor)
    return grouped_scaling.quantize_groups(x, groups, fmt, scales, rows, columns, split=split)


def _record(call: Call, tensor: int, amax: torch.Tensor | None) -> None:
    """Record an amax in the states. Compiled code notes it in the ledger instead."""
    if amax is not None and not torch.compiler.is_compiling():
        record_amax(call.state, tensor, amax, call.rule.scales.keeps_nan)


def _dgrad(call: Call, dy, dy8: Layouts, weight: Stored, groups) -> torch.Tensor:
    """Return dx [rows, in] from dy [rows, out] and the stored weight, or codes of w.T [experts, in,
    out]."""
    rule, transposed = call.rule, call.transposed
    if rule.high_precision.dgrad:
        return plain_product(dy, _oriented(weight.values(dy.dtype), not transposed), groups)
    w8 = Quantized(*weight)
    if call.kind.is_gathered:
        weight = call.kind.read(weight.data, gathered_codes.DGRAD)
    if call.kind.is_gathered or rule.scales.blocks is not None:
        w8 = oriented_layouts(rule, call.cut, weight, transposed, None, False, True).along_rows()
    return grouped_product(dy8.along_columns(), w8, groups, rule.grouped_scaling, dy.dtype)


def _wgrad(call: Call, dy, dy8: Layouts, x: Quantized, groups) -> torch.Tensor:
    """Return dw in the weight's layout from dy [rows, out] and x [rows, in], or codes of x.T."""
    rule = call.rule
    if rule.high_precision.wgrad:
        operands = dy, x.codes.to(dy.dtype)
        return plain_wgrad(*(reversed(operands) if call.transposed else operands), groups)
    operands = (x, dy8.along_rows()) if call.transposed else (dy8.along_rows(), x)
    return grouped_wgrad(*operands, groups, rule.grouped_scaling, dy.dtype)


def _oriented(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return weight.transpose(1, 2) if transposed else weight


def _stacked(experts: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Stack matrices [experts, rows, columns] vertically, each starting at a block of its own."""
    missing = -experts.shape[1] % blocks.rows
    return (F.pad(experts, (0, 0, 0, missing)) if missing else experts).flatten(0, 1)
