"""The codes of a native layer's weight for FSDP2 to gather, 1 byte an element.

A rank casts its own rows to the codes of the whole weight, to the bit, since the ranks agree on the
amaxes first: one for the weight, each row or column, or each block. No scale travels: every rank
computes them. For mxfp8, the ranks agree only on the exponents, in eight bits: they never fall as
the amax rises.
"""

import torch
import torch.nn.functional as F

from ...formats import scaling
from ...formats.scaling import MX, WEIGHT, Blocks, times
from ...kernels import quantize as quantization
from ...tensors.gathered_codes import DGRAD, FPROP
from ...tensors.scaled_tensor import ScaledTensor
from ...torch_tools.modules import CONVERSION
from .layer_rule import LayerRule, Stored
from .scaling_states import KeepsLedger
from .weights import read


class WeightCodes:
    """The codes of one layer's weight, sharded by rows, in the weight's layout: a
    `comm.fsdp2.Travelling`."""

    dimensions = 2
    """The dimensions of the weight."""

    def __init__(self, layer: KeepsLedger) -> None:
        self.layer = layer
        self.agreed: dict[str, torch.Tensor] = {}
        """The maxima over ranks for each of `products`: FP32 amaxes, or exponents."""

    @property
    def wanted(self) -> bool:
        layer = self.layer.__dict__
        if CONVERSION not in layer or "forward" in layer:  # restored, or with a replaced forward
            return False
        rule = self.layer.fp8_rule
        fprop, dgrad, _ = rule.high_precision
        return (
            (self.layer.fp8_shared.is_training(self.layer) or rule.fp8_in_eval)
            and not fprop
            and not dgrad
        )

    @property
    def change_in_forward(self) -> bool:
        return self.layer.fp8_rule.scales.moves_in_forward

    @property
    def recomputed(self) -> bool:
        return self.layer.fp8_recomputed

    @property
    def products(self) -> tuple[str, ...]:
        return (FPROP,) if self.layer.fp8_rule.scales.serves_both_products else (FPROP, DGRAD)

    @property
    def amax(self) -> torch.Tensor | None:
        return self.agreed[FPROP] if self.change_in_forward else None

    def can_make(self, shard: torch.Tensor) -> bool:
        return shard.dim() == self.dimensions and not read(shard).is_in(
            self.layer.fp8_rule.forward_format
        )

    def amaxes(self, shard: torch.Tensor, first: int, shape: torch.Size) -> list[torch.Tensor]:
        """Return tensors with 0 for blocks without local values. The shard may be empty."""
        stored = read(shard)
        if self.layer.fp8_rule.scales.blocks is not None:
            return [self._amaxes(stored, first, shape, product) for product in self.products]
        amax = shard.known_amax() if isinstance(shard, ScaledTensor) else None
        if amax is None:
            rows = stored.data if len(shard) else stored.data.new_zeros(1, 1)
            amax = quantization.amax_of(rows, self.layer.fp8_rule.scales.keeps_nan)
        return [times(amax, stored.scale_inv)]

    def agree(self, maxima: list[torch.Tensor]) -> None:
        self.agreed = dict(zip(self.products, maxima, strict=True))

    def codes(
        self, shard: torch.Tensor, first: int, shape: torch.Size, product: str
    ) -> torch.Tensor:
        stored, rule = read(shard), self.layer.fp8_rule
        scale, _ = self._scales(self.agreed[product])
        if rule.scales.blocks is None:
            return quantization.cast(
                stored.data, times(scale, stored.scale_inv), rule.forward_format
            )
        if not len(shard):
            return stored.data.to(rule.forward_format.dtype)
        blocks, first = self._blocks(product, len(shard), first)
        above = first % blocks.rows
        scale = scale.narrow(0, first // blocks.rows, -(-(above + len(shard)) // blocks.rows))
        codes = blocks.cast(
            _below(stored.data, above), times(scale, stored.scale_inv), rule.forward_format
        )
        return codes.narrow(0, above, len(shard))

    def scale_inv(self, agreed: torch.Tensor) -> torch.Tensor:
        return self._scales(agreed)[1]

    def _scales(self, agreed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight's factor, FP32, and the scale_inv for `Quantized`."""
        rule = self.layer.fp8_rule
        if rule.scales.blocks is None:
            state = self.layer.fp8_scaling
            scale = rule.scales.scale(agreed, rule.forward_format, WEIGHT, state).view_as(agreed)
            return scale, scaling.scale_inv_of(scale, agreed)
        blocks = rule.scales.weight_blocks
        if blocks is MX:
            return scaling.e8m0_values(254 - agreed), agreed
        scale = blocks.scale(agreed, rule.forward_format)
        return scale, blocks.inverse(scale, agreed)

    def _amaxes(self, stored: Stored, first: int, shape: torch.Size, product: str) -> torch.Tensor:
        """Return one amax for each block of the whole weight, in its layout."""
        rows, columns = self._block_shape(product)
        down, across = -(-shape[0] // (rows or shape[0])), -(-shape[1] // (columns or shape[1]))
        amaxes = torch.zeros(down, across, dtype=torch.float32, device=stored.data.device)
        if len(stored.data):
            blocks, first = self._blocks(product, len(stored.data), first)
            local = times(blocks.amax(_below(stored.data, first % blocks.rows)), stored.scale_inv)
            amaxes.narrow(0, first // blocks.rows, len(local)).copy_(local)
        return exponents(amaxes, self.layer.fp8_rule)

    def _blocks(self, product: str, local_rows: int, first: int) -> tuple[Blocks, int]:
        """Return the blocks in the weight's layout, and the shard's first row in them. A block of
        all rows is as high as the shard: with an agreed amax, the other rows need not be present,
        not even as zeros."""
        rows, columns = self._block_shape(product)
        blocks = self.layer.fp8_rule.scales.weight_blocks
        if rows is None:
            return blocks._replace(rows=local_rows, columns=columns), 0
        return blocks._replace(rows=rows, columns=columns), first

    def _block_shape(self, product: str) -> tuple[int | None, int | None]:
        """Return rows and columns of a block in the weight's layout; None: all."""
        blocks = self.layer.fp8_rule.scales.weight_blocks
        is_turned = self.layer.transposed_weight != (product == DGRAD)
        return (blocks.columns, blocks.rows) if is_turned else (blocks.rows, blocks.columns)


def exponents(amaxes: torch.Tensor, rule: LayerRule) -> torch.Tensor:
    """Return the scale_inv of amaxes for mxfp8, and the amaxes for other rules."""
    return (
        MX.inverse(MX.scale(amaxes, rule.forward_format), amaxes)
        if rule.scales.weight_blocks is MX
        else amaxes
    )


def _below(shard: torch.Tensor, rows: int) -> torch.Tensor:
    """Put rows of zeros above the shard, up to the begin of its block."""
    return F.pad(shard, (0, 0, rows, 0)) if rows else shard
