"""What one native layer does: its rule, how operands get their scales by it, and the weight as it lies in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...numerics.block_codes import BlockCodes
from ...numerics.formats import Format
from ...numerics.gathered_codes import FPROP, GatheredCodes
from ...numerics.kernels.quantize import dispatch as quantization
from ...numerics.kernels.quantize.layouts import DYNAMIC, POWER_OF_TWO, WINDOW, Layouts
from ...numerics.scaled_tensor import ScaledTensor
from ...numerics.scaling import (
    MX,
    ROWS,
    SQUARES,
    VECTORS,
    WEIGHT,
    Blocks,
    Quantized,
    delayed_scale,
    new_delayed_state,
    new_window_state,
    record_amax,
    record_window_amax,
)
from ..counts import DGRAD, KINDS
from ..products import block_scaled_product, scaled_product
from .tensor_parallel import Split

STATEFUL = ("delayed", "window")
"""Scaling rules with state from step to step."""


class AlongContraction(NamedTuple):
    """A rule whose scales lie along the contraction, so that each product needs codes of its own."""

    blocks: Blocks
    """For activations and gradients."""
    weight_blocks: Blocks

    def product(
        self, a: Quantized, b: Quantized, b_blocks: Blocks, out_dtype: torch.dtype, fast_accumulation: bool = False
    ) -> torch.Tensor:
        """a [m, k] @ b [n, k].T of codes that were made in `blocks` and in `b_blocks`. [m, n] of out_dtype."""
        if self.blocks is ROWS:
            return scaled_product(a, b, out_dtype, fast_accumulation)
        return block_scaled_product(a, self.blocks, b, b_blocks, out_dtype)  # never faster at the cost of bits


ALONG_CONTRACTION = {
    "rowwise": AlongContraction(ROWS, ROWS),
    "blockwise": AlongContraction(VECTORS, SQUARES),
    "mxfp8": AlongContraction(MX, MX),
}
"""All other rules have one scale for a tensor, and one cast of it serves both its products."""


class LayerRule(NamedTuple):
    """How the layers of one prepared model run. Plain values, so that `torch.compile` takes them as constants."""

    scaling: str
    forward_format: Format
    gradient_format: Format
    high_precision: tuple[bool, bool, bool]
    """fprop, dgrad, wgrad kept in high precision (`override_linear_precision`)."""
    fp8_in_eval: bool
    frozen_weight: bool = False
    """Whether the weight is a frozen FP8 weight (`fp8_params`)."""
    fp8_activations: bool = False
    """Whether activations travel between ranks in FP8 where they can (`activation_comm`)."""

    @property
    def along(self) -> AlongContraction | None:
        """How the operands are cut into blocks; None: one scale for a tensor."""
        return ALONG_CONTRACTION.get(self.scaling)

    @property
    def weight_blocks(self) -> Blocks | None:
        """How a weight is cut into blocks; None: one scale for all of it."""
        return None if self.along is None else self.along.weight_blocks

    @property
    def has_blocks(self) -> bool:
        """Whether a scale is that of a part of the contraction, and not of all of it."""
        return self.along is not None and self.along.blocks is not ROWS

    @property
    def gathers_codes(self) -> bool:
        """Whether an input whose tokens lie on several ranks is gathered as codes: where they serve all its products,
        as those with one scale do."""
        fprop, _, wgrad = self.high_precision
        return self.fp8_activations and self.along is None and not (fprop or wgrad)

    @property
    def dgrad_reads_weight(self) -> bool:
        """Return True if dgrad reads the weight as it is stored, not codes of w.T made in forward."""
        return self.high_precision[KINDS.index(DGRAD)] or self.along is not None

    @property
    def keeps_nan(self) -> bool:
        """Whether a NaN counts in an amax and stays in the history, as `record_window_amax` has it."""
        return self.scaling == "window"

    def __repr__(self) -> str:
        i, go = self.forward_format.name, self.gradient_format.name
        stored = " stored" if self.frozen_weight else ""
        high = "+".join(kind for kind, is_high in zip(KINDS, self.high_precision, strict=True) if is_high)
        return f"native:{self.scaling} i:{i},w:{i}{stored},go:{go}" + (f",high:{high}" if high else "")


def new_state(rule: LayerRule, history_len: int, device: torch.device) -> torch.Tensor | None:
    """The state of one weight matrix that has seen nothing; None for a rule that is not STATEFUL."""
    if rule.scaling == "delayed":
        return new_delayed_state(history_len, device)
    return new_window_state(device) if rule.scaling in STATEFUL else None


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
) -> Layouts:
    """Quantize an input or an output gradient [rows, columns] by the rule.

    Args:
        state: of the layer, for a rule that has one; only read.
        tensor: INPUT or GRAD_OUTPUT.
        rows, columns, record: layouts that are needed, and what keeps the amax, as in `quantization.quantize`.
        split: how the matrix is cut over ranks. The scales are those of all of it, but for the delayed rule, on whose
            states ranks agree after backward.
    """
    if rule.along is not None:
        return _in_blocks(matrix, rule.along.blocks, fmt, rows, columns, split)
    if rule.scaling == "delayed":
        return quantization.quantize(matrix, fmt, delayed_scale(state, tensor), rows, columns, record=record)
    amax = None if split is None else split.agreed(quantization.amax_of(matrix, rule.keeps_nan))
    if rule.scaling == "window":
        row = state.select(0, tensor)
        return quantization.quantize(
            *(matrix, fmt, None, rows, columns), rule=WINDOW, window_state=row, record=record, amax=amax
        )
    return quantization.quantize(matrix, fmt, None, rows, columns, rule=DYNAMIC, amax=amax)


def _in_blocks(
    matrix: torch.Tensor,
    blocks: Blocks,
    fmt: Format,
    rows: bool,
    columns: bool,
    split: Split | None,
    stored_scale_inv: torch.Tensor | None = None,
) -> Layouts:
    """`quantization.quantize_blocks` for a matrix of which ranks have parts. Blocks lie inside of them, but for whole
    rows, which go on from rank to rank where the matrix is cut along them."""
    if blocks is not ROWS or split is None or not (columns, rows)[split.dim]:
        return quantization.quantize_blocks(matrix, blocks, fmt, rows, columns, stored_scale_inv=stored_scale_inv)
    is_cut_row, cut = bool(split.dim), matrix if split.dim else matrix.t()
    amax = split.agreed(ROWS.amax(cut))
    codes = quantization.quantize_rows(cut, fmt, amax, stored_scale_inv)
    whole = quantization.quantize_blocks(
        *(matrix, blocks, fmt, rows and not is_cut_row, columns and is_cut_row), stored_scale_inv=stored_scale_inv
    )
    if is_cut_row:
        return Layouts(*codes, whole.transposed, whole.transposed_scale_inv)
    return Layouts(whole.codes, whole.scale_inv, *codes)


def record(rule: LayerRule, state: torch.Tensor, tensor: int, amax: torch.Tensor) -> None:
    """Keep an amax that no cast has recorded in the state of a rule that has one."""
    if rule.scaling == "delayed":
        record_amax(state, tensor, amax)
    else:
        record_window_amax(state, tensor, amax)


def known_amax(weight: torch.Tensor) -> torch.Tensor | None:
    """max |x| of a weight's stored data, where the optimizer's step has left it; FP32, 0-dimensional."""
    if torch.compiler.is_compiling() or not isinstance(weight, ScaledTensor):
        return None
    return weight.known_amax()


class Stored(NamedTuple):
    """A weight as it lies in memory, `data * scale_inv`, without a graph and without a copy."""

    data: torch.Tensor
    """FP32, bf16 or fp16; of a `ScaledTensor` FP16 or FP8."""
    scale_inv: torch.Tensor | None
    """FP32, 0-dimensional, or one for each block of SQUARES, or of the rule for the product that reads gathered codes;
    None: the data are the values."""

    @classmethod
    def of(cls, weight: torch.Tensor, product: str = FPROP) -> Stored:
        """`product`: the one that is going to read it, for a weight that FSDP2 has gathered as codes."""
        if isinstance(weight, GatheredCodes):
            return cls(*weight.read_by(product))
        if isinstance(weight, (BlockCodes, ScaledTensor)) and not torch.compiler.is_compiling():
            weight.state_dict_copies.check()
        if isinstance(weight, BlockCodes):
            return cls(*weight.parts)
        if not isinstance(weight, ScaledTensor):
            return cls(weight.detach(), None)
        assert not weight.block_size, "a weight has one scale"
        return cls(weight._data, weight._scale_inv)

    def t(self) -> Stored:
        """A view of it transposed."""
        return Stored(self.data.t(), None if self.scale_inv is None else self.scale_inv.t())

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        if self.scale_inv is None:
            return self.data.to(dtype)
        if self.scale_inv.dim():
            return SQUARES.dequantize(Quantized(*self), dtype)
        return (self.data.float() * self.scale_inv).to(dtype)

    def is_in(self, fmt: Format) -> bool:
        """Whether these are FP8 codes already, which are multiplied as they are."""
        return self.data.dtype == fmt.dtype

    def quantized(
        self,
        fmt: Format,
        rule: LayerRule,
        state: torch.Tensor | None,
        columns: bool = True,
        record: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        split: Split | None = None,
    ) -> Layouts:
        """The codes by the rule. `columns`: whether a product contracts the rows too, which takes other codes where
        the rule has blocks. `record`, `amax`: as in `quantization.quantize`; `split`: as in `quantized`."""
        if rule.along is not None:
            return Layouts(*self.in_blocks(rule.along.weight_blocks, fmt, split=split))
        scale = delayed_scale(state, WEIGHT) if rule.scaling == "delayed" else None
        if split is not None and scale is None:
            amax = split.agreed(quantization.amax_of(self.data, rule.keeps_nan))
        # MS-AMP takes a weight's amax at the optimizer step: the same number
        of_amax = POWER_OF_TWO if rule.scaling == "window" else DYNAMIC
        return quantization.quantize(
            self.data,
            fmt,
            scale,
            True,
            columns,
            rule=of_amax,
            stored_scale_inv=self.scale_inv,
            record=record,
            amax=amax,
        )

    def in_blocks(self, blocks: Blocks, fmt: Format, transposed: bool = False, split: Split | None = None) -> Quantized:
        """Codes with a scale for each block of `data`, or of its transpose. Stored FP8 codes have their own scale in
        every block."""
        if self.is_in(fmt):
            codes = self.data.t() if transposed else self.data
            if self.scale_inv.dim():  # those of a checkpoint, which lie in SQUARES
                return Quantized(codes, self.scale_inv.t().contiguous() if transposed else self.scale_inv)
            return Quantized(codes, blocks.repeated(self.scale_inv, codes.shape))
        layouts = _in_blocks(self.data, blocks, fmt, not transposed, transposed, split, self.scale_inv)
        return layouts.along_rows() if transposed else layouts.along_columns()
