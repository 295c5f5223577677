"""The kinds of a layer's weight: the codes that fprop and dgrad read, and what backward saves.

A weight may change its kind under a prepared layer: FSDP2 puts gathered codes in its place, a level
or `fp8_params` swaps it. Every forward therefore looks the kind up, and only there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn

from ...formats import scaling
from ...formats.formats import Format
from ...formats.scaling import SQUARES, WEIGHT, Blocks, Quantized
from ...kernels.layouts import Layouts
from ...tensors import gathered_codes
from ...tensors.block_codes import SQUARE_CODES, BlockCodes
from ...tensors.gathered_codes import GatheredCodes
from ...tensors.scaled_tensor import Kind, ScaledTensor, quantize
from .layer_rule import DGRAD, LayerRule, Split, in_blocks, quantized

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


class Stored(NamedTuple):
    """A weight as stored in memory, `data * scale_inv`, without a graph and without a copy."""

    data: torch.Tensor
    """FP32, bf16 or fp16; FP16 or FP8 of a `ScaledTensor`."""
    scale_inv: torch.Tensor | None
    """FP32: one, one for each block of SQUARES, or of gathered codes; None: the data are the
    values."""

    @classmethod
    def of(cls, weight: torch.Tensor, product: str = gathered_codes.FPROP) -> Stored:
        """Unwrap a weight; of FSDP2's gathered codes, the ones for this product."""
        return kind_of(weight).read(weight, product)

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

    def read(self, weight: torch.Tensor, product: str) -> Stored:
        """Return the values or codes for a product."""
        return Stored(weight.detach(), None)

    def known_amax(self, weight: torch.Tensor, rule: LayerRule) -> torch.Tensor | None:
        """Return the amax, FP32, 0-dimensional, if it saves the cast a pass."""
        return None

    def quantized(
        self,
        layer: Any,
        matrix: Stored,
        for_dgrad: bool,
        recorded: torch.Tensor | None,
        split: Split | None,
    ) -> Layouts:
        """Quantize w [out, in] for fprop, and dgrad if the same codes serve. `recorded`: the
        layer's state, if it keeps the amax."""
        rule: LayerRule = layer.fp8_rule
        # kept codes serve all later forwards
        columns = (for_dgrad or layer.fp8_shared.keeps_weights) and not rule.high_precision[DGRAD]
        newest = layer.fp8_ledger.newest(rule, recorded, WEIGHT)
        amax = self.known_amax(layer.weight, rule)

        def cast() -> Layouts:
            return matrix.quantized(rule, layer.fp8_scaling, columns, newest, amax, split)

        if rule.scales.moves_in_forward:  # anew in every forward
            return cast()
        return layer.fp8_shared.of_weight(layer, (rule,), cast)

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


class ScaledWeight(PlainWeight):
    """A `ScaledTensor`: FP16 of a level, cast like a plain weight, or E4M3, multiplied as it is."""

    def read(self, weight, product):
        _check_copies(weight)
        assert not weight.block_size, "a weight has one scale"
        return Stored(weight.codes, weight.scale_inv)

    def known_amax(self, weight, rule):
        if rule.scales.moves_in_forward or torch.compiler.is_compiling():
            return None
        # a DTensor's ranks know the amaxes of their parts
        return weight.known_amax() if isinstance(weight, ScaledTensor) else None

    def quantized(self, layer, matrix, for_dgrad, recorded, split):
        if matrix.is_in(layer.fp8_rule.forward_format):
            return matrix.quantized(layer.fp8_rule, None)
        return super().quantized(layer, matrix, for_dgrad, recorded, split)

    def loaded(self, layer, before):
        if layer.fp8_rule.frozen_weight and not isinstance(layer.weight, FROZEN):
            values = layer.weight.detach()
            layer.weight = nn.Parameter(frozen(layer.weight), requires_grad=False)
            layer.weight.copy_(values)
        if isinstance(layer.weight, ScaledTensor):
            layer.weight.drop_exact_edits()


class BlockWeight(ScaledWeight):
    """E4M3 codes of a checkpoint, with a scale for 128 x 128 values: `BlockCodes` in squares."""

    def read(self, weight, product):
        _check_copies(weight)
        return Stored(*weight.parts)

    def loaded(self, layer, before):
        if not isinstance(layer.weight, BlockCodes):
            values = layer.weight.detach()
            layer.weight = before
            before.copy_(values)


class DecodedWeight(BlockWeight):
    """Other codes of a checkpoint, read as values, which the rule casts for each product: kept codes
    would take more memory than the weight's own."""

    def read(self, weight, product):
        _check_copies(weight)
        return Stored(weight.code_layout.values(weight.parts, weight.dtype), None)

    def quantized(self, layer, matrix, for_dgrad, recorded, split):
        return super().quantized(layer, matrix, False, recorded, split)

    def saved(self, weight, stored, rule, w8):
        return weight, None

    def for_dgrad(self, saved, rule, state, transposed):
        stored = Stored.of(saved[0])
        if rule.dgrad_reads_weight:
            return stored
        codes = quantized(stored.data, rule.forward_format, rule, state, WEIGHT, rows=False)
        return Stored(*codes.along_rows())


class GatheredWeight(PlainWeight):
    """Codes that FSDP2 gathers for each product: fprop's in forward, dgrad's in backward."""

    def read(self, weight, product):
        return Stored(*weight.read_by(product))

    def quantized(self, layer, matrix, for_dgrad, recorded, split):
        rule = layer.fp8_rule
        layer.fp8_recomputed = layer.fp8_shared.is_training(layer) and is_checkpointed()
        amax = layer.weight.parts.get(gathered_codes.AMAX)
        # as a cast of the weight records it
        if layer.fp8_ledger.newest(rule, recorded, WEIGHT) is not None:
            scaling.record_amax(recorded, WEIGHT, amax, rule.scales.keeps_nan)
        return matrix.quantized(rule, None)._replace(amax=amax)

    def saved(self, weight, stored, rule, w8):
        return weight, None

    def for_dgrad(self, saved, rule, state, transposed):
        stored = self.read(saved[0], gathered_codes.DGRAD)
        return stored.t() if transposed == rule.dgrad_reads_weight else stored


PLAIN, SCALED, BLOCKS = PlainWeight(), ScaledWeight(), BlockWeight()
DECODED, GATHERED = DecodedWeight(), GatheredWeight()


def kind_of(weight: torch.Tensor) -> PlainWeight:
    """Return the kind of a weight, whole or one rank's part."""
    if isinstance(weight, ScaledTensor):
        return SCALED
    if isinstance(weight, GatheredCodes):
        return GATHERED
    if isinstance(weight, BlockCodes):
        return BLOCKS if weight.code_layout is SQUARE_CODES else DECODED
    return PLAIN


def _check_copies(weight: ScaledTensor | BlockCodes) -> None:
    if not torch.compiler.is_compiling():
        weight.state_dict_copies.check()


def is_checkpointed() -> bool:
    """Return True if backward may run this forward again; `use_reentrant` looks like a forward
    without gradients."""
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():
        return True
    code = getattr(saved_tensor_hook(), "__code__", None)
    return code is not None and code.co_filename == torch.utils.checkpoint.__file__


def saved_tensor_hook() -> Any:
    """Return the function that packs tensors saved now, or None."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
