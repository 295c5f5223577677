"""Measure a cast into few bits: values clipped and flushed to zero, error, and their place in the
format's range.

All tensors stay on their device, in plain PyTorch; `read` copies all numbers to the host at once.
Large tensors are sampled, except for their amax.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..formats.formats import ROOT8, Format, saturating_cast
from ..formats.scaling import Blocks, tensor_amax
from ..kernels.rounding import decoded

SAMPLED = 2**16
"""Approximate number of counted elements: rows spread over a larger tensor."""
BINADES = 40
"""Bins of a histogram of exponents. E5M2 has 32 binades; the last bin takes the lowest ones of
FP16."""


class Cast(NamedTuple):
    """A matrix and its cast by a scaling rule."""

    values: torch.Tensor
    """Before the cast: [rows, columns], bf16, fp16 or FP32."""
    fmt: Format
    amax: torch.Tensor
    """max |x| of all values, FP32, 0-dimensional."""
    scale: torch.Tensor | None = None
    """FP32, 0-dimensional. None: each of `blocks` has its own."""
    blocks: Blocks | None = None
    codes: torch.Tensor | None = None
    """Codes that were not rounded to nearest: of the format's dtype, [rows, columns]."""


def in_blocks(values: torch.Tensor, fmt: Format, blocks: Blocks) -> Cast:
    """Return the cast of a matrix with a scale for each block."""
    return Cast(values, fmt, tensor_amax(values), blocks=blocks)


class Statistics(NamedTuple):
    """Counts of one tensor: 0-dimensional tensors on its device, Python numbers after `read`.
    Counts are int64."""

    fmt: Format
    elements: int
    """Of the whole tensor."""
    counted: int
    """Elements in the counts."""
    amax: torch.Tensor | float
    """Of the whole tensor, FP32."""
    lowest_scale: torch.Tensor | float
    highest_scale: torch.Tensor | float
    """FP32; blocks of zeros do not count."""
    nonzero: torch.Tensor | int
    """Nonzero values before the cast."""
    flushed: torch.Tensor | int
    """Values that the cast flushes to zero."""
    saturated: torch.Tensor | int
    """Values that the cast clips, beyond the rounding range of the format's largest number."""
    signal: torch.Tensor | float
    """Sum of squares of the values, FP64."""
    noise: torch.Tensor | float
    """Sum of squares of the cast's errors, FP64."""
    binades: torch.Tensor | list[int]
    """Scaled values per binade, [BINADES]: the first bin is all above the binade of the format's
    largest number, the last has all smaller ones."""

    def merged(self, other: Statistics) -> Statistics:
        """Add the statistics of another cast, such as of another microbatch."""
        added = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        return self._replace(
            amax=torch.maximum(self.amax, other.amax),
            lowest_scale=torch.minimum(self.lowest_scale, other.lowest_scale),
            highest_scale=torch.maximum(self.highest_scale, other.highest_scale),
            **added,
        )

    @property
    def is_finite(self) -> bool:
        """False if values or scales are not finite; the other numbers mean nothing then."""
        return math.isfinite(self.amax) and math.isfinite(self.noise)

    @property
    def flushed_share(self) -> float:
        """Share of the nonzero values, 0 to 1."""
        return self.flushed / max(self.nonzero, 1)

    @property
    def saturated_share(self) -> float:
        """Share of the nonzero values, 0 to 1."""
        return self.saturated / max(self.nonzero, 1)

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise in dB; None if one of them is zero or not finite."""
        if not (self.signal > 0 and self.noise > 0 and math.isfinite(self.signal + self.noise)):
            return None
        return 10 * math.log10(self.signal / self.noise)


_ADDED = ("elements", "counted", "nonzero", "flushed", "saturated", "signal", "noise", "binades")
_COUNTS = ("nonzero", "flushed", "saturated")
_READ = ("amax", "lowest_scale", "highest_scale", *_COUNTS, "signal", "noise")


@torch.no_grad()
def statistics_of(cast: Cast) -> Statistics:
    fmt, blocks = cast.fmt, cast.blocks
    height = 1 if blocks is None else blocks.rows  # blocks stay whole
    values = _sampled(cast.values, height)
    codes = None if cast.codes is None else _sampled(cast.codes, height)
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
        values.numel(),
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
def statistics_of_codes(
    codes: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor, fmt: Format
) -> Statistics:
    """Measure codes without their original values: `flushed` counts codes of zero, `saturated`
    codes of the format's largest number; errors are unknown. scale_inv: FP32, one or several; amax:
    of codes times scale_inv, or roots."""
    matrix = _sampled(codes.reshape(-1, codes.shape[-1] if codes.dim() else 1), 1)
    rounded = decoded(matrix, fmt) if fmt is ROOT8 else matrix.float()
    scales, zero = scale_inv.reciprocal(), amax.new_zeros((), dtype=torch.float64)
    zeros = rounded.numel() - torch.count_nonzero(rounded)
    at_max = torch.count_nonzero(rounded.abs() >= fmt.max)
    counts = torch.full_like(zeros, rounded.numel()), zeros, at_max
    binades = _binades(rounded, zeros, fmt)
    return Statistics(
        fmt,
        codes.numel(),
        rounded.numel(),
        amax,
        scales.amin(),
        scales.amax(),
        *counts,
        zero,
        zero,
        binades,
    )


def clipped_above(fmt: Format) -> float:
    """Return the scaled magnitude above which a cast clips: half a step beyond the format's largest
    number."""
    return fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)


def _sampled(matrix: torch.Tensor, height: int) -> torch.Tensor:
    """Return all of a matrix of up to SAMPLED elements, else that many bands of `height` rows: one
    from each of equal parts, at changing places, so that repeating rows, such as a sequence's first
    token, are neither missed nor overcounted."""
    rows, columns = matrix.shape
    bands = rows // height
    step = min(-(-rows * columns // SAMPLED), bands)
    if step <= 1:
        return matrix
    chosen = _spread(bands, step, matrix.device)
    return (
        matrix[: bands * height].unflatten(0, (bands, height)).index_select(0, chosen).flatten(0, 1)
    )


def _spread(parts: int, step: int, device: torch.device) -> torch.Tensor:
    """Return the index of one of every `step` parts."""
    chosen = torch.arange(parts // step, device=device)
    return chosen * step + chosen * 7919 % step


def _energy(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _binades(scaled: torch.Tensor, zeros: torch.Tensor, fmt: Format) -> torch.Tensor:
    exponents = scaled.view(torch.int32) >> 23 & 0xFF
    bins = (fmt.max_exponent + 1 + 127 - exponents).clamp_(0, BINADES - 1).flatten().long()
    counts = torch.zeros(BINADES, dtype=torch.int64, device=scaled.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    counts[-1] -= zeros
    return counts


def read(statistics: Sequence[Statistics]) -> list[Statistics]:
    """Copy all numbers to the host: one copy for each device."""
    numbers: list[Any] = [None] * len(statistics)
    by_device = defaultdict(list)
    for index, counts in enumerate(statistics):
        by_device[counts.binades.device].append(index)
    for indices in by_device.values():
        chosen = [statistics[index] for index in indices]
        scalars = [
            torch.stack([getattr(counts, name).double() for name in _READ]) for counts in chosen
        ]
        packed = torch.cat(
            [torch.stack(scalars), torch.stack([counts.binades.double() for counts in chosen])],
            dim=1,
        )
        for index, row in zip(indices, packed.tolist(), strict=True):
            named = dict(zip(_READ, row, strict=False))
            named |= {name: int(named[name]) for name in _COUNTS}
            numbers[index] = statistics[index]._replace(
                **named, binades=list(map(int, row[len(_READ) :]))
            )
    return numbers
