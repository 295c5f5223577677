"""What FSDP2 gathers of a native layer's weight: the codes that its products read, 1 byte an element.

A rank makes codes of its own rows, and they are those of the whole weight to the bit, since the ranks agree on the
amaxes first: one for the weight, one for each row or column, or one for each block, of which a shard may have a part.
No scale travels: every rank makes them of the amaxes. Of mxfp8's amaxes the ranks agree on the exponents alone, in
eight bits, since the larger amax never has the smaller one.

Where scales lie along the contraction, and not in squares (`rowwise`, `mxfp8`), dgrad reads other codes than fprop.

Of experts, in 3-D Parameters, a rank has some whole, and each has scales of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...numerics.gathered_codes import DGRAD, FPROP
from ...numerics.kernels import quantize as quantization
from ...numerics.scaled_tensor import ScaledTensor
from ...numerics.scaling import (
    MX,
    ROWS,
    SQUARES,
    WEIGHT,
    Blocks,
    delayed_scale,
    e8m0_values,
    power_of_two_scale,
    scale_from_amax,
    scale_inv_of,
    times,
)
from ..expert_functions import converted_weight
from . import linear
from .experts import FP8ExpertWeight
from .grouped_scaling import amaxes_of_experts, delayed_scales
from .layer_rule import Stored


class WeightCodes:
    """The codes of one layer's weight, of which each rank has some rows: a `comm.gathers.Travelling`."""

    def __init__(self, layer: linear.FP8Products | FP8ExpertWeight) -> None:
        self.layer = layer
        self.agreed: dict[str, torch.Tensor] = {}
        """For each of `products` what the ranks have agreed on, as the weight lies: FP32 amaxes, or exponents."""

    @property
    def wanted(self) -> bool:
        """Whether the layer's next forward reads codes, and nothing else of the weight."""
        if not self._is_converted:
            return False
        rule = self.layer.fp8_rule
        in_fp8 = self.layer.training or rule.fp8_in_eval
        return in_fp8 and not rule.high_precision[linear.FPROP] and not rule.high_precision[linear.DGRAD]

    @property
    def _is_converted(self) -> bool:
        """Whether the layer is not made plain again, nor run by another forward, such as the guard's."""
        return isinstance(self.layer, linear.FP8Products) and "forward" not in self.layer.__dict__

    @property
    def change_in_forward(self) -> bool:
        """Whether a weight that does not change may have other codes in the next forward."""
        return self.layer.fp8_rule.scaling == "delayed"

    @property
    def recomputed(self) -> bool:
        """Whether backward runs the layer's forward again."""
        return self.layer.fp8_recomputed

    @property
    def products(self) -> tuple[str, ...]:
        """The products that have codes of their own: FPROP, whose codes serve dgrad too, or FPROP and DGRAD."""
        along = self.layer.fp8_rule.along
        return (FPROP,) if along is None or along.weight_blocks is SQUARES else (FPROP, DGRAD)

    @property
    def amax(self) -> torch.Tensor | None:
        """max |x| of the whole weight, for a rule that records it; FP32, 0-dimensional."""
        return self.agreed[FPROP] if self.change_in_forward else None

    def can_make(self, shard: torch.Tensor) -> bool:
        """Whether there are codes to be made of this shard: a matrix that is not stored in FP8."""
        return shard.dim() == 2 and not Stored.of(shard).is_in(self.layer.fp8_rule.forward_format)

    def amaxes(self, shard: torch.Tensor, first: int, shape: torch.Size) -> list[torch.Tensor]:
        """What the ranks are to agree on by a maximum, for each of `products`: FP32 or uint8, of the same shapes on
        every rank, and 0 where this rank knows nothing.

        Args:
            shard: rows from `first` on of a weight of this shape; there may be none.
        """
        stored = Stored.of(shard)
        if self.layer.fp8_rule.along is not None:
            return [self._amaxes(stored, first, shape, product) for product in self.products]
        known = shard.known_amax() if isinstance(shard, ScaledTensor) else None
        if known is None:
            rows = stored.data if len(shard) else stored.data.new_zeros(1, 1)
            known = quantization.amax_of(rows, self.layer.fp8_rule.keeps_nan)
        return [times(known, stored.scale_inv)]

    def agree(self, maxima: list[torch.Tensor]) -> None:
        """Take over what `amaxes` became over all ranks."""
        self.agreed = dict(zip(self.products, maxima, strict=True))

    def codes(self, shard: torch.Tensor, first: int, shape: torch.Size, product: str) -> torch.Tensor:
        """The codes of the shard for a product, as the weight lies."""
        stored, rule = Stored.of(shard), self.layer.fp8_rule
        scale, _ = self._scales(self.agreed[product])
        if rule.along is None:
            return quantization.cast(stored.data, times(scale, stored.scale_inv), rule.forward_format)
        if not len(shard):
            return stored.data.to(rule.forward_format.dtype)
        blocks, first = self._blocks(product, len(shard), first)
        above = first % blocks.rows
        own = scale.narrow(0, first // blocks.rows, -(-(above + len(shard)) // blocks.rows))
        codes = blocks.cast(_below(stored.data, above), times(own, stored.scale_inv), rule.forward_format)
        return codes.narrow(0, above, len(shard))

    def scale_inv(self, agreed: torch.Tensor) -> torch.Tensor:
        """The scales of the whole weight, as it lies, of what the ranks agreed on for a product."""
        return self._scales(agreed)[1]

    def _scales(self, agreed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the weight is multiplied by, FP32, and what `Quantized` keeps of it."""
        rule = self.layer.fp8_rule
        if rule.along is None:
            scale = self._scale(agreed)
            return scale, scale_inv_of(scale, agreed)
        blocks = rule.along.weight_blocks
        if blocks is MX:
            return e8m0_values(254 - agreed), agreed
        scale = blocks.scale(agreed, rule.forward_format)
        return scale, blocks.inverse(scale, agreed)

    def _scale(self, amax: torch.Tensor) -> torch.Tensor:
        rule = self.layer.fp8_rule
        if rule.scaling == "delayed":
            return delayed_scale(self.layer.fp8_scaling, WEIGHT)
        return (power_of_two_scale if rule.scaling == "window" else scale_from_amax)(amax, rule.forward_format)

    def _amaxes(self, stored: Stored, first: int, shape: torch.Size, product: str) -> torch.Tensor:
        """One for each block of the whole weight, as it lies."""
        rows, columns = self._block_shape(product)
        down, across = -(-shape[0] // (rows or shape[0])), -(-shape[1] // (columns or shape[1]))
        amaxes = torch.zeros(down, across, dtype=torch.float32, device=stored.data.device)
        if len(stored.data):
            blocks, first = self._blocks(product, len(stored.data), first)
            own = times(blocks.amax(_below(stored.data, first % blocks.rows)), stored.scale_inv)
            amaxes.narrow(0, first // blocks.rows, len(own)).copy_(own)
        if self.layer.fp8_rule.along.weight_blocks is not MX:
            return amaxes
        return MX.inverse(MX.scale(amaxes, self.layer.fp8_rule.forward_format), amaxes)

    def _blocks(self, product: str, rows_here: int, first: int) -> tuple[Blocks, int]:
        """The blocks as the weight lies, and the row of theirs at which a shard begins. A block of all rows is as high
        as the shard: its amax is agreed on, and the rows of others need not be here, not even as zeros."""
        rows, columns = self._block_shape(product)
        blocks = self.layer.fp8_rule.along.weight_blocks
        if rows is None:
            return blocks._replace(rows=rows_here, columns=columns), 0
        return blocks._replace(rows=rows, columns=columns), first

    def _block_shape(self, product: str) -> tuple[int | None, int | None]:
        """Rows and columns of a block as the weight lies; None: all."""
        blocks = self.layer.fp8_rule.along.weight_blocks
        is_turned = self._is_transposed != (product == DGRAD)
        return (blocks.columns, blocks.rows) if is_turned else (blocks.rows, blocks.columns)

    @property
    def _is_transposed(self) -> bool:
        return self.layer.transposed_weight


class ExpertCodes(WeightCodes):
    """The codes of a 3-D weight, of which each rank has some experts whole. Amaxes and scales are [experts, rows of
    blocks, blocks in a row], and [experts, 1, 1] by a rule with one scale."""

    layer: FP8ExpertWeight

    @property
    def amax(self) -> torch.Tensor | None:
        """max |x| of each expert, for a rule that records it; FP32 [experts]."""
        return self.agreed[FPROP].flatten() if self.change_in_forward else None

    def can_make(self, shard: torch.Tensor) -> bool:
        return shard.dim() == 3 and not Stored.of(shard).is_in(self.layer.fp8_rule.forward_format)

    def amaxes(self, shard: torch.Tensor, first: int, shape: torch.Size) -> list[torch.Tensor]:
        stored = Stored.of(shard)
        return [self._amaxes(stored, first, shape, product) for product in self.products]

    def codes(self, shard: torch.Tensor, first: int, shape: torch.Size, product: str) -> torch.Tensor:
        stored, rule = Stored.of(shard), self.layer.fp8_rule
        if not len(shard):
            return stored.data.to(rule.forward_format.dtype)
        blocks, (scale, _) = self._blocks_of_expert(product, shape), self._scales(self.agreed[product])
        own = times(scale.narrow(0, first, len(shard)).flatten(0, 1), stored.scale_inv)
        codes = blocks.cast(_one_below_another(stored.data, blocks), own, rule.forward_format)
        return codes.view(len(shard), -1, shape[2]).narrow(1, 0, shape[1]).contiguous()

    def _amaxes(self, stored: Stored, first: int, shape: torch.Size, product: str) -> torch.Tensor:
        blocks, rule = self._blocks_of_expert(product, shape), self.layer.fp8_rule
        down, across = -(-shape[1] // blocks.rows), -(-shape[2] // (blocks.columns or shape[2]))
        amaxes = torch.zeros(shape[0], down, across, dtype=torch.float32, device=stored.data.device)
        if len(stored.data):
            if rule.keeps_nan:
                own = amaxes_of_experts(*stored)
            else:
                own = times(blocks.amax(_one_below_another(stored.data, blocks)), stored.scale_inv)
            amaxes.narrow(0, first, len(stored.data)).copy_(own.view(-1, down, across))
        return MX.inverse(MX.scale(amaxes, rule.forward_format), amaxes) if rule.weight_blocks is MX else amaxes

    def _blocks_of_expert(self, product: str, shape: torch.Size) -> Blocks:
        """The blocks of each expert's matrix as it lies; without any, all of it is one."""
        if self.layer.fp8_rule.along is None:
            return ROWS._replace(rows=shape[1])
        rows, columns = self._block_shape(product)
        return self.layer.fp8_rule.along.weight_blocks._replace(rows=rows or shape[1], columns=columns)

    def _scale(self, amax: torch.Tensor) -> torch.Tensor:
        if self.layer.fp8_rule.scaling == "delayed":
            return delayed_scales(self.layer.fp8_scaling, WEIGHT).view(amax.shape)
        return super()._scale(amax)

    @property
    def _is_converted(self) -> bool:
        return converted_weight(self.layer.fp8_experts[0], self.layer.fp8_part) is self.layer

    @property
    def _is_transposed(self) -> bool:
        return self.layer.fp8_transposed


def _one_below_another(experts: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Matrices [experts, rows, columns] as one, in which each begins with a block of its own."""
    missing = -experts.shape[1] % blocks.rows
    return (F.pad(experts, (0, 0, 0, missing)) if missing else experts).flatten(0, 1)


def _below(shard: torch.Tensor, rows: int) -> torch.Tensor:
    """The shard below so many rows of zeros, as it lies in the blocks of the whole weight."""
    return F.pad(shard, (0, 0, rows, 0)) if rows else shard
