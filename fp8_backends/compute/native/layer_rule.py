"""The rule of one native layer: casts of its operands, their products, and its weight."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...formats.formats import Format
from ...formats.scaling import (
    GRAD_OUTPUT,
    JUST_IN_TIME,
    ROWS,
    SQUARES,
    WEIGHT,
    Blocks,
    Quantized,
    Rule,
)
from ...kernels import quantize as quantization
from ...kernels.layouts import Layouts
from ...tensors.block_codes import BlockCodes
from ...tensors.scaled_tensor import ScaledTensor
from ...tensors.sharded_tensor import agreed_over, is_distributed
from ..counts import KINDS, WGRAD
from ..products import block_scaled_product, scaled_product
from ..refusals import is_parallel


def parallel(function: str, layer: nn.Module, weight: torch.Tensor, *arguments: Any) -> Any:
    """Call a function of `tensor_parallel` for a weight cut by its styles. Return None for any
    other weight."""
    if not is_parallel(layer) or not is_distributed(weight):
        return None
    of_parts = importlib.import_module(f"{__package__}.tensor_parallel")
    return getattr(of_parts, function)(layer, weight, *arguments)


class Split(NamedTuple):
    """The cut of a matrix over the ranks of a group."""

    dim: int
    group: dist.ProcessGroup

    def agreed(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the ranks, FP32. Collective."""
        return agreed_over(amax, [self.group])


def split_of(cut: Any, tensor: int) -> Split | None:
    """Return the split of INPUT, WEIGHT or GRAD_OUTPUT; None if it is whole on each rank."""
    return None if cut is None else cut.split(tensor)


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


def fp8_product(
    scales: Rule,
    a: Quantized,
    b: Quantized,
    out_dtype: torch.dtype,
    by_weight: bool = True,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """Return a [m, k] @ b [n, k].T, [m, n] of out_dtype. b holds a weight's codes unless
    `by_weight` is False."""
    blocks = scales.blocks
    if blocks is None or blocks is ROWS:
        return scaled_product(a, b, out_dtype, fast_accumulation)
    b_blocks = scales.weight_blocks if by_weight else blocks
    return block_scaled_product(a, blocks, b, b_blocks, out_dtype)


class HighPrecision(NamedTuple):
    """The products kept in high precision (`override_linear_precision`)."""

    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False

    def of(self, product: str) -> bool:
        return self[KINDS.index(product)]


class LayerRule(NamedTuple):
    """The rule of all layers of a prepared model. Plain values, constants to `torch.compile`."""

    scales: Rule
    forward_format: Format
    gradient_format: Format
    high_precision: HighPrecision
    fp8_in_eval: bool
    frozen_weight: str = ""
    """Storage of a frozen weight: "stored" as FP8 (`fp8_params`), or "from" codes of a checkpoint,
    or raw ones."""
    fp8_activations: bool = False
    """True if activations travel between ranks in FP8 if possible (`activation_comm`)."""
    fast_accumulation: bool = True
    """Of fprop."""
    wgrad_format: Format | None = None
    """Of the gradient's codes for wgrad (`products`); None: `gradient_format`."""

    def runs_in_fp8(self, training: bool) -> bool:
        """Return True if a layer in this mode has FP8 products: all are paused in a bf16 phase
        (`schedule`)."""
        return (training or self.fp8_in_eval) and not all(self.high_precision)

    def format_of(self, tensor: int, product: str) -> Format:
        """Return the format of a tensor's codes for a product."""
        if tensor != GRAD_OUTPUT:
            return self.forward_format
        if product == WGRAD and self.wgrad_format is not None:
            return self.wgrad_format
        return self.gradient_format

    @property
    def scaling(self) -> str:
        return self.scales.name

    @property
    def grouped_scaling(self) -> str:
        """The scaling of operands of grouped products."""
        return self.scaling if self.scales.cuts_contraction else "rowwise"

    @property
    def gathers_codes(self) -> bool:
        """Return True if an input split by tokens is gathered as codes: one scale serves all
        products."""
        fprop, _, wgrad = self.high_precision
        return self.fp8_activations and self.scales.blocks is None and not (fprop or wgrad)

    @property
    def dgrad_reads_weight(self) -> bool:
        """Return True if dgrad reads the weight as it is stored, not codes of w.T made in
        forward."""
        return self.high_precision.dgrad or self.scales.blocks is not None

    def __repr__(self) -> str:
        i, go = self.forward_format.name, self.gradient_format.name
        stored = f" {self.frozen_weight}" if self.frozen_weight else ""
        high = "+".join(
            kind for kind, is_high in zip(KINDS, self.high_precision, strict=True) if is_high
        )
        slow = "" if self.fast_accumulation else ",fast accumulation off"
        wgrad = "" if self.wgrad_format is None else f",wgrad go:{self.wgrad_format.name}"
        high = f",high:{high}" if high else ""
        return f"native:{self.scaling} i:{i},w:{i}{stored},go:{go}{wgrad}{slow}{high}"


def quantized(
    matrix: torch.Tensor,
    fmt: Format,
    rule: LayerRule,
    state: torch.Tensor | None,
    tensor: int,
    rows: bool = True,
    columns: bool = True,
    record: torch.Tensor | None = None,
    split: Split | None = None,
    stored_scale_inv: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> Layouts:
    """Quantize a matrix [rows, columns] by the rule: `tensor` is INPUT, WEIGHT or GRAD_OUTPUT,
    `state` the layer's, read-only; `quantization.quantize` has the other arguments.

    `split`: the cut of the matrix over ranks. Scales are of the whole matrix, except for the
    delayed rule, whose states the ranks agree on after backward.
    """
    scales = rule.scales
    if scales.blocks is not None:
        blocks = scales.weight_blocks if tensor == WEIGHT else scales.blocks
        return in_blocks(matrix, blocks, fmt, rows, columns, split, stored_scale_inv)
    scale, how = scales.given_scale(state, tensor), scales.from_amax(tensor)
    if split is not None and scale is None:
        amax = split.agreed(quantization.amax_of(matrix, scales.keeps_nan))
    return quantization.quantize(
        matrix,
        fmt,
        scale,
        rows,
        columns,
        how=how,
        window_state=state.select(0, tensor) if how == JUST_IN_TIME else None,
        stored_scale_inv=stored_scale_inv,
        record=record,
        amax=amax,
    )


def quantized_gradient(
    dy: torch.Tensor,
    rule: LayerRule,
    state: torch.Tensor | None,
    for_dgrad: bool,
    for_wgrad: bool,
    record: torch.Tensor | None = None,
    split: Split | None = None,
) -> Layouts:
    """Quantize an output's gradient [tokens, out] for its products, twice for two formats."""

    def cast(fmt: Format, rows: bool, columns: bool) -> Layouts:
        return quantized(dy, fmt, rule, state, GRAD_OUTPUT, rows, columns, record, split)

    if rule.wgrad_format is None or not for_wgrad:
        return cast(rule.gradient_format, for_dgrad, for_wgrad)
    of_wgrad = cast(rule.wgrad_format, False, True)
    if not for_dgrad:
        return of_wgrad
    of_dgrad = cast(rule.gradient_format, True, False)
    return Layouts(*of_dgrad.along_columns(), *of_wgrad.along_rows())


def in_blocks(
    matrix: torch.Tensor,
    blocks: Blocks,
    fmt: Format,
    rows: bool,
    columns: bool,
    split: Split | None,
    stored_scale_inv: torch.Tensor | None = None,
) -> Layouts:
    """Quantize this rank's part of a matrix in blocks. Only blocks of whole rows cross ranks."""
    if blocks is not ROWS or split is None or not (columns, rows)[split.dim]:
        return quantization.quantize_blocks(
            matrix, blocks, fmt, rows, columns, stored_scale_inv=stored_scale_inv
        )
    is_cut_row, cut = bool(split.dim), matrix if split.dim else matrix.t()
    amax = split.agreed(ROWS.amax(cut))
    codes = quantization.quantize_rows(cut, fmt, amax, stored_scale_inv)
    whole = quantization.quantize_blocks(
        *(matrix, blocks, fmt, rows and not is_cut_row, columns and is_cut_row),
        stored_scale_inv=stored_scale_inv,
    )
    if is_cut_row:
        return Layouts(*codes, whole.transposed, whole.transposed_scale_inv)
    return Layouts(whole.codes, whole.scale_inv, *codes)


FROZEN = (ScaledTensor, BlockCodes)
"""Types of frozen FP8 weights (`fp8_params`); products read their codes directly. A ScaledTensor
has E4M3 codes with one scale, a power of two: FP32 and bf16 hold every value exactly, and a saved
weight is loaded to the bit. BlockCodes keep the codes of a checkpoint: FP8 with a scale for 128 x
128 values, raw E4M3, or others that the rule's cast reads as values.
"""


class Stored(NamedTuple):
    """A weight as stored in memory, `data * scale_inv`, without a graph and without a copy."""

    data: torch.Tensor
    """FP32, bf16 or fp16; FP16 or FP8 of a `ScaledTensor`."""
    scale_inv: torch.Tensor | None
    """FP32: one, one for each block of SQUARES, or of gathered codes; None: the data are the
    values."""

    def t(self) -> Stored:
        """Return a transposed view."""
        return Stored(self.data.t(), None if self.scale_inv is None else self.scale_inv.t())

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        if self.scale_inv is None:
            return self.data.to(dtype)
        if self.scale_inv.dim():
            return SQUARES.dequantize(Quantized(*self), dtype)
        return (self.data.float() * self.scale_inv).to(dtype)

    def is_in(self, fmt: Format) -> bool:
        """Return True if the data are FP8 codes, multiplied without a cast."""
        return self.data.dtype == fmt.dtype

    def quantized(
        self,
        rule: LayerRule,
        state: torch.Tensor | None,
        columns: bool = True,
        record: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        split: Split | None = None,
    ) -> Layouts:
        """Quantize by the rule; stored FP8 codes stay. `columns`: a product contracts the rows too
        (by other codes if the rule has blocks). `record`, `amax`: see `quantization.quantize`;
        `split`: see `layer_rule.quantized`."""
        fmt = rule.forward_format
        if rule.scales.blocks is not None:
            return Layouts(*self.in_blocks(rule.scales.weight_blocks, fmt, split=split))
        if self.is_in(fmt):
            return Layouts(*self)
        return quantized(
            self.data, fmt, rule, state, WEIGHT, True, columns, record, split, self.scale_inv, amax
        )

    def in_blocks(
        self, blocks: Blocks, fmt: Format, transposed: bool = False, split: Split | None = None
    ) -> Quantized:
        """Quantize `data`, or its transpose, in blocks. Stored FP8 codes have one scale in every
        block."""
        if self.is_in(fmt):
            codes = self.data.t() if transposed else self.data
            if self.scale_inv.dim():  # an FP8 checkpoint's, in SQUARES
                return Quantized(
                    codes, self.scale_inv.t().contiguous() if transposed else self.scale_inv
                )
            return Quantized(codes, blocks.repeated(self.scale_inv, codes.shape))
        layouts = in_blocks(
            self.data, blocks, fmt, not transposed, transposed, split, self.scale_inv
        )
        return layouts.along_rows() if transposed else layouts.along_columns()


class PlainWeight:
    """A weight in FP32, bf16 or fp16, cast in every forward, or once for all microbatches. Other
    kinds override what they do otherwise."""

    is_decoded = False
    """True for codes read as values, in less memory than codes kept for products."""
    is_gathered = False
    """True for FSDP2's codes of the products, without values."""

    def read(self, weight: torch.Tensor, product: str) -> Stored:
        """Return the values or codes for a product."""
        return Stored(weight.detach(), None)

    def quantized(
        self,
        layer: Any,
        matrix: Stored,
        for_dgrad: bool,
        recorded: torch.Tensor | None,
        split: Split | None,
        amax: torch.Tensor | None = None,
    ) -> Layouts:
        """Quantize w [out, in] for fprop, and dgrad if the same codes serve. `recorded`: the
        layer's state, if it keeps the amax; `amax`: FP32, if known without a pass."""
        rule: LayerRule = layer.fp8_rule
        # kept codes serve all later forwards
        columns = (for_dgrad or layer.fp8_shared.keeps_weights) and not rule.high_precision.dgrad
        newest = layer.fp8_ledger.newest(rule, recorded, WEIGHT)

        def cast() -> Layouts:
            return matrix.quantized(rule, layer.fp8_scaling, columns, newest, amax, split)

        if rule.scales.moves_in_forward:  # anew in every forward
            return cast()
        return layer.fp8_shared.of_weight(layer, cast)

    def quantized_matrices(
        self,
        layer: Any,
        weight: torch.Tensor,
        stored: Stored,
        quantize: Callable[[], Layouts],
    ) -> Layouts:
        """Quantize a weight of three dimensions by `quantize`, or take the codes of this step."""
        rule: LayerRule = layer.fp8_rule
        # delayed scales move with every forward; other tensors than the Parameter are new each
        # time; codes are ready
        is_new = rule.scales.moves_in_forward or weight is not layer.weight
        if is_new or stored.is_in(rule.forward_format):
            return quantize()
        return layer.fp8_shared.of_weight(layer, quantize)

    def saved(
        self, weight: torch.Tensor, stored: Stored, rule: LayerRule, w8: Layouts
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the two tensors from which backward makes dgrad's operand."""
        if not rule.dgrad_reads_weight:
            return w8.along_rows()
        # the Parameter, not its data: DeepSpeed's ZeRO-3 takes the gathered data out of it after
        # forward and puts new data in for backward, and frees nothing that is still referenced
        return (weight, None) if stored.scale_inv is None else stored

    def for_dgrad(
        self,
        saved: tuple[torch.Tensor | None, ...],
        rule: LayerRule,
        state: torch.Tensor | None,
        transposed: bool,
    ) -> Stored:
        """Return the stored weight [out, in] if the rule reads it in backward; else codes of
        w.T."""
        stored = Stored(*saved)
        return stored.t() if transposed and rule.dgrad_reads_weight else stored

    def loaded(self, layer: Any, before: torch.Tensor) -> None:
        """Restore the kind of a weight after `load_state_dict`, which replaces the Parameter with
        `assign=True`."""
