"""What one native layer does: its rule, how operands get their scales by it, and the weight as it lies in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...numerics.formats import Format
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
    record_amax,
    record_window_amax,
)
from ..products import scaled_product
from .block_products import block_scaled_product

STATEFUL = ("delayed", "window")
"""Scaling rules with state from step to step."""


class AlongContraction(NamedTuple):
    """A rule whose scales lie along the contraction, so that each product needs codes of its own."""

    blocks: Blocks
    """Of activations and gradients."""
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
    keeps_weight: bool = False
    """The weight does not train, and lies in FP8 (`fp8_params`)."""

    @property
    def along(self) -> AlongContraction | None:
        """How the operands are cut into blocks; None: one scale for a tensor."""
        return ALONG_CONTRACTION.get(self.scaling)

    def __repr__(self) -> str:
        i, go = self.forward_format.name, self.gradient_format.name
        kept = [kind for kind, high in zip(("fprop", "dgrad", "wgrad"), self.high_precision, strict=True) if high]
        stored = " stored" if self.keeps_weight else ""
        return f"native:{self.scaling} i:{i},w:{i}{stored},go:{go}" + (f",high:{'+'.join(kept)}" if kept else "")


def quantized(
    matrix: torch.Tensor,
    fmt: Format,
    rule: LayerRule,
    state: torch.Tensor | None,
    tensor: int,
    rows: bool = True,
    columns: bool = True,
) -> Layouts:
    """Input or output gradient [rows, columns], by the rule.

    Args:
        state: of the layer, for a rule that has one; only read.
        tensor: INPUT or GRAD_OUTPUT.
        rows, columns: layouts that are needed, as in `quantization.quantize`.
    """
    if rule.along is not None:
        return quantization.quantize_blocks(matrix, rule.along.blocks, fmt, rows, columns)
    if rule.scaling == "delayed":
        return quantization.quantize(matrix, fmt, delayed_scale(state, tensor), rows, columns)
    if rule.scaling == "window":
        row = state.select(0, tensor)
        return quantization.quantize(matrix, fmt, None, rows, columns, rule=WINDOW, window_state=row)
    return quantization.quantize(matrix, fmt, None, rows, columns, rule=DYNAMIC)


def record(rule: LayerRule, state: torch.Tensor, tensor: int, amax: torch.Tensor) -> None:
    """Keep the amax of this step in the state of the rule, where it has a use for it."""
    if rule.scaling == "delayed":
        record_amax(state, tensor, amax)
    elif tensor != WEIGHT:
        record_window_amax(state, tensor, amax)


class Stored(NamedTuple):
    """A weight [out, in] as it lies in memory: `data * scale_inv`, without a graph. What backward keeps of it is no
    copy."""

    data: torch.Tensor
    """FP32, bf16 or fp16; of a `ScaledTensor` FP16 or FP8."""
    scale_inv: torch.Tensor | None
    """FP32, 0-dimensional; None: the data are the values."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> Stored:
        if not isinstance(weight, ScaledTensor):
            return cls(weight.detach(), None)
        assert not weight.block_size, "a weight has one scale"
        return cls(weight._data, weight._scale_inv)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return self.data.to(dtype) if self.scale_inv is None else (self.data.float() * self.scale_inv).to(dtype)

    def is_in(self, fmt: Format) -> bool:
        """Whether these are FP8 codes already, which are multiplied as they are."""
        return self.data.dtype == fmt.dtype

    def quantized(self, fmt: Format, rule: LayerRule, state: torch.Tensor | None, columns: bool = True) -> Layouts:
        """By the rule. `columns`: whether a product contracts the rows too, with the same codes: never with blocks."""
        if rule.along is not None:
            return Layouts(*self.in_blocks(rule.along.weight_blocks, fmt))
        scale = delayed_scale(state, WEIGHT) if rule.scaling == "delayed" else None
        # MS-AMP takes a weight's amax at the optimizer step: the same number
        of_amax = POWER_OF_TWO if rule.scaling == "window" else DYNAMIC
        return quantization.quantize(
            self.data, fmt, scale, True, columns, rule=of_amax, stored_scale_inv=self.scale_inv
        )

    def in_blocks(self, blocks: Blocks, fmt: Format, transposed: bool = False) -> Quantized:
        """With a scale for each block of `data`, or of its transpose. FP8 codes keep the scale that they are stored
        with, in every block."""
        if self.is_in(fmt):
            codes = self.data.t() if transposed else self.data
            return Quantized(codes, blocks.repeated(self.scale_inv, codes.shape))
        made = quantization.quantize_blocks(
            self.data, blocks, fmt, not transposed, transposed, stored_scale_inv=self.scale_inv
        )
        return made.along_rows() if transposed else made.along_columns()
