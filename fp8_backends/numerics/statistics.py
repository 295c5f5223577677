"""What a cast into few bits does to a tensor, in numbers: what it clips and flushes to zero, how much error it adds,
and how the values lie in the format's range.

Everything stays on the tensor's device, in plain PyTorch: nothing waits until `read` copies all numbers to the host at
once. A large tensor is sampled, except for its amax.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .formats import ROOT8, Format, saturating_cast
from .kernels.rounding import decoded
from .scaling import Blocks, tensor_amax

SAMPLED = 2**16
"""Elements of a tensor that are counted, about: of a larger one some rows, spread over all of it."""
BINADES = 40
"""Bins of a histogram of exponents. E5M2 has 32 binades; FP16 has the lowest of its own in the last bin."""


class Cast(NamedTuple):
    """A matrix, and how a scaling rule casts it."""

    values: torch.Tensor
    """Before the cast: [rows, columns], bf16, fp16 or FP32."""
    fmt: Format
    amax: torch.Tensor
    """max |x| of all values, FP32, 0-dimensional."""
    scale: torch.Tensor | None = None
    """What values are multiplied by: FP32, 0-dimensional. None: each of `blocks` has its own."""
    blocks: Blocks | None = None
    codes: torch.Tensor | None = None
    """What the values became, where that was not rounding to nearest: of the format's dtype, [rows, columns]."""


def in_blocks(values: torch.Tensor, fmt: Format, blocks: Blocks) -> Cast:
    """The cast of a matrix whose blocks have a scale each."""
    return Cast(values, fmt, tensor_amax(values), blocks=blocks)


class Statistics(NamedTuple):
    """What was counted. Tensors are 0-dimensional unless said; counts are int64."""

    fmt: Format
    elements: int
    """Of the whole tensor."""
    counted: int
    """Elements that the counts are of."""
    amax: torch.Tensor
    """Of the whole tensor, FP32."""
    lowest_scale: torch.Tensor
    highest_scale: torch.Tensor
    """FP32; of blocks that hold nothing but zeros there is none."""
    nonzero: torch.Tensor
    """Values that are not zero before the cast."""
    flushed: torch.Tensor
    """Those of them that are zero after it."""
    saturated: torch.Tensor
    """Values that the cast clips: beyond what rounds to the format's largest number."""
    signal: torch.Tensor
    """Sum of squares of the values, FP64."""
    noise: torch.Tensor
    """Sum of squares of what the cast changed, FP64."""
    binades: torch.Tensor
    """How many scaled values lie in each binade, [BINADES]: the first is all above the binade of the format's largest
    number, the last has all that are smaller."""

    def merged(self, other: Statistics) -> Statistics:
        """The statistics of both, such as of two microbatches."""
        added = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        return self._replace(
            amax=torch.maximum(self.amax, other.amax),
            lowest_scale=torch.minimum(self.lowest_scale, other.lowest_scale),
            highest_scale=torch.maximum(self.highest_scale, other.highest_scale),
            **added,
        )


_ADDED = ("elements", "counted", "nonzero", "flushed", "saturated", "signal", "noise", "binades")
_READ = ("amax", "lowest_scale", "highest_scale", "nonzero", "flushed", "saturated", "signal", "noise")


@torch.no_grad()
def statistics_of(cast: Cast) -> Statistics:
    """Count what a cast does to its values."""
    fmt, blocks = cast.fmt, cast.blocks
    values, codes = _sampled(cast)
    counted = values.numel()
    x = values.float()
    if blocks is None:
        scale = lowest = highest = cast.scale
    else:
        amax = blocks.amax(x)
        x, scales = blocks.tiles(x), blocks.scale(amax, fmt)
        lowest = torch.where(amax > 0, scales, math.inf).amin()
        highest = torch.where(amax > 0, scales, 0.0).amax()
        scale = scales.unsqueeze(1).unsqueeze(3)
    scaled = x * scale
    rounded = (saturating_cast(scaled, fmt) if codes is None else codes).float()
    nonzero = torch.count_nonzero(x)
    return Statistics(
        fmt,
        cast.values.numel(),
        counted,
        cast.amax,
        lowest,
        highest,
        nonzero,
        nonzero - torch.count_nonzero(rounded),
        torch.count_nonzero(scaled.abs() > clipped_above(fmt)),
        _energy(x),
        _energy(torch.addcmul(x, rounded, scale.reciprocal().expand_as(x), value=-1)),
        _binades(scaled, x.numel() - nonzero, fmt),
    )


@torch.no_grad()
def statistics_of_codes(codes: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor, fmt: Format) -> Statistics:
    """Count what codes tell without the values that they were made of: `flushed` are the codes that are zero,
    `saturated` those of the format's largest number, and nothing is known of an error.

    Args:
        codes: of the format's dtype, any shape; scale_inv: FP32, one or several; amax: of codes times scale_inv,
            which of ROOT8 are the roots.
    """
    matrix = _bands(codes.reshape(-1, codes.shape[-1] if codes.dim() else 1), 1)
    rounded = decoded(matrix, fmt) if fmt is ROOT8 else matrix.float()
    scales, zero = scale_inv.reciprocal(), amax.new_zeros((), dtype=torch.float64)
    zeros = rounded.numel() - torch.count_nonzero(rounded)
    at_max = torch.count_nonzero(rounded.abs() >= fmt.max)
    counts = torch.full_like(zeros, rounded.numel()), zeros, at_max
    binades = _binades(rounded, zeros, fmt)
    return Statistics(
        fmt, codes.numel(), rounded.numel(), amax, scales.amin(), scales.amax(), *counts, zero, zero, binades
    )


def clipped_above(fmt: Format) -> float:
    """The scaled magnitude above which a cast clips: half a step beyond the format's largest number, which rounds to
    it."""
    return fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)


def _sampled(cast: Cast) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows that are counted, of the values and of the codes. Blocks stay whole."""
    height = 1 if cast.blocks is None else cast.blocks.rows
    return _bands(cast.values, height), None if cast.codes is None else _bands(cast.codes, height)


def _bands(matrix: torch.Tensor, height: int) -> torch.Tensor:
    """All of a matrix of up to SAMPLED elements, else as many bands of `height` rows: one from each of equal parts, at
    changing places, since what repeats in a batch, such as a sequence's first token, would come too often or never."""
    rows, columns = matrix.shape
    bands = rows // height
    step = min(-(-rows * columns // SAMPLED), bands)
    if step <= 1:
        return matrix
    chosen = torch.arange(bands // step, device=matrix.device)
    chosen = chosen * step + chosen * 7919 % step
    return matrix[: bands * height].unflatten(0, (bands, height)).index_select(0, chosen).flatten(0, 1)


def _energy(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _binades(scaled: torch.Tensor, zeros: torch.Tensor, fmt: Format) -> torch.Tensor:
    exponents = scaled.view(torch.int32) >> 23 & 0xFF
    bins = (fmt.max_exponent + 1 + 127 - exponents).clamp_(0, BINADES - 1).flatten().long()
    counts = torch.zeros(BINADES, dtype=torch.int64, device=scaled.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    counts[-1] -= zeros
    return counts


# On the host


class Numbers(NamedTuple):
    """`Statistics` as Python numbers."""

    fmt: Format
    elements: int
    counted: int
    amax: float
    lowest_scale: float
    highest_scale: float
    nonzero: int
    flushed: int
    saturated: int
    signal: float
    noise: float
    binades: list[int]

    @property
    def is_finite(self) -> bool:
        """Whether the values and their scales are: else all other numbers say nothing."""
        return math.isfinite(self.amax) and math.isfinite(self.noise)

    @property
    def flushed_share(self) -> float:
        """Of the values that are not zero, 0 to 1."""
        return self.flushed / max(self.nonzero, 1)

    @property
    def saturated_share(self) -> float:
        """Of the values that are not zero, 0 to 1."""
        return self.saturated / max(self.nonzero, 1)

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise in dB; None where there is none of either, or where it is not finite."""
        if not (self.signal > 0 and self.noise > 0 and math.isfinite(self.signal + self.noise)):
            return None
        return 10 * math.log10(self.signal / self.noise)


def read(statistics: Sequence[Statistics]) -> list[Numbers]:
    """The numbers of all of these, by one copy to the host for each device."""
    found: list[Any] = [None] * len(statistics)
    by_device = defaultdict(list)
    for index, each in enumerate(statistics):
        by_device[each.binades.device].append(index)
    for indices in by_device.values():
        packed = [_packed(statistics[index]) for index in indices]
        for index, numbers in zip(indices, torch.stack(packed).tolist(), strict=True):
            each = statistics[index]
            amax, lowest, highest, nonzero, flushed, saturated, signal, noise = numbers[: len(_READ)]
            counts = (int(nonzero), int(flushed), int(saturated))
            binades = list(map(int, numbers[len(_READ) :]))
            of_host = (each.fmt, each.elements, each.counted)
            found[index] = Numbers(*of_host, amax, lowest, highest, *counts, signal, noise, binades)
    return found


def _packed(each: Statistics) -> torch.Tensor:
    """FP64, [len(_READ) + BINADES]."""
    return torch.cat([torch.stack([getattr(each, name).double() for name in _READ]), each.binades.double()])
