"""`CodeShard`: a rank's rows, or experts, of frozen codes under FSDP2, which gathers them as bytes.

FSDP2 cuts a matrix by rows, wherever its number of ranks says. Codes, and scales of blocks within
a row, are cut along. Scales of 128 x 128 values, and the one of a tensor, stay whole on every
rank, so no border cuts a block: they take 1/4096 of the codes' bytes, and never travel. Experts
are cut with their scales, each whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import FP8BackendError
from ..formats.scaling import SQUARES, Quantized
from .block_codes import CODE_PARTS, SQUARE_CODES, BlockCodes, FrozenView

aten = torch.ops.aten


class CodeShard(BlockCodes):
    """Some rows of a matrix.

    Attributes:
        place: the index of the first row, and the number of rows of the whole matrix. Views from
            the first row on share the list: FSDP2 copies a shard into a view of new memory.
    """

    def decoded(self) -> torch.Tensor:
        if self.code_layout is not SQUARE_CODES or self.dim() == 3:
            return super().decoded()
        rows = self.place[0] + torch.arange(len(self), device=self.device)
        by_row = Quantized(self.codes, self.scale_inv[rows // SQUARES.rows])
        return SQUARES._replace(rows=1).dequantize(by_row, self.dtype)

    @property
    def cut(self) -> tuple[torch.Tensor, ...]:
        """The parts with a row for each row of the matrix."""
        has_scales = self.code_layout.is_packed or self.dim() == 3
        return self.parts[: 1 + has_scales]

    def with_rows(self, change, place: list[int]) -> CodeShard:
        """Return a shard with `change` of each part that is cut, and the same whole parts."""
        parts = *map(change, self.cut), *self.parts[len(self.cut) :]
        return CodeShard(parts, self.dtype, self.code_layout, place)

    def fsdp_pre_all_gather(self, mesh):
        """Return the bytes that FSDP2 sends for a shard, padded to as many rows on each rank.

        Of the two signatures that FSDP2 knows, only this one lets an uneven shard send rows of
        another length than the weight's.
        """
        self.state_dict_copies.check()
        missing = -(-self.place[1] // mesh.size()) - len(self)
        padding = (0, 0) * (self.dim() - 1) + (0, missing)
        return [F.pad(part.view(torch.uint8), padding) for part in self.cut], self.parts

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Return FSDP2's gathered bytes as the whole matrix, presenting `param_dtype`."""
        # of one rank's parts FSDP2 copies only the first; offloaded ones are on the device here
        gathered = [
            rows[: self.place[1]].view(part.dtype)
            for rows, part in zip(all_gather_outputs, metadata, strict=False)
        ]
        parts = *gathered, *metadata[len(gathered) :]
        if out is None:
            return BlockCodes(parts, param_dtype, self.code_layout), ()
        out.__dict__.update(zip(CODE_PARTS, parts, strict=False))
        return None


class FlatShard(FrozenView):
    """A shard as FSDP2 flattens it, without a copy of values."""

    @staticmethod
    def __new__(cls, shard: CodeShard):
        return torch.Tensor._make_wrapper_subclass(
            cls, (shard.numel(),), dtype=shard.dtype, device=shard.device
        )

    def exact(self) -> torch.Tensor:
        return self._values.exact().flatten()


def _split(func, shard, rows, dim=0):
    if dim:
        raise FP8BackendError(
            "frozen codes of a checkpoint are sharded by rows, and this shard_placement_fn of "
            "fully_shard cuts columns: let it return None for such weights"
        )
    firsts = range(0, len(shard), rows)
    return [_slice(func, shard, 0, first, first + rows) for first in firsts]


def _slice(func, shard, dim=0, start=None, end=None, step=1):
    if dim or step != 1:
        return NotImplemented
    first, end, _ = slice(start, end).indices(len(shard))
    place = shard.place
    if first:
        place = [place[0] + first, place[1]]
    return shard.with_rows(lambda part: part[first:end], place)


def _new_zeros(func, shard, size, **kwargs):
    """Allocate memory for rows at a place that `copy_` will tell."""
    return shard.with_rows(lambda part: part.new_zeros(size[0], *part.shape[1:]), [*shard.place])


def _copy_(func, target, source, non_blocking=False):
    if type(source) is type(target):
        target.place[:] = source.place
    return BlockCodes.operations[func](func, target, source, non_blocking)


def _view(func, shard, size):
    size = tuple(size)
    if size == shard.shape:
        return shard.like(shard.parts)
    if size == (-1,):
        return FlatShard(shard)
    return NotImplemented


def _is_pinned(func, shard, *args, **kwargs):
    return shard.codes.is_pinned()


CodeShard.operations = BlockCodes.operations | {
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.new_zeros.default: _new_zeros,
    aten.copy_.default: _copy_,
    aten.view.default: _view,
    aten._pin_memory.default: BlockCodes.operations[aten.clone.default],  # part by part
    aten.is_pinned.default: _is_pinned,
}
