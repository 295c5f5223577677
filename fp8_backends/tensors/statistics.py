"""Measure a cast into few bits: values clipped and flushed to zero, error, and their place in the
format's range.

All tensors stay on their device, in plain PyTorch; `read` copies all numbers to the host at once.
Large tensors are sampled, except for their amax.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

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


class Counts(NamedTuple):
    """Counts of one tensor on its device. `read` copies them to the host."""

    fmt: Format
    elements: int
    counted: int
    extremes: torch.Tensor
    """FP32 [3]: amax, highest scale, and the negative of the lowest scale."""
    sums: torch.Tensor
    """FP64 [5 + BINADES]: the fields of `Statistics` from `nonzero` on, exact for counts."""

    def merged(self, other: Counts) -> Counts:
        """Add the counts of another cast, such as of another microbatch."""
        return Counts(
            self.fmt,
            self.elements + other.elements,
            self.counted + other.counted,
            torch.maximum(self.extremes, other.extremes),
            self.sums + other.sums,
        )


class Statistics(NamedTuple):
    """Numbers of one tensor."""

    fmt: Format
    elements: int
    """Of the whole tensor."""
    counted: int
    """Elements in the counts."""
    amax: float
    """Of the whole tensor."""
    highest_scale: float
    lowest_scale: float
    """Blocks of zeros do not count."""
    nonzero: int
    """Nonzero values before the cast."""
    flushed: int
    """Values that the cast flushes to zero."""
    saturated: int
    """Values that the cast clips, beyond the rounding range of the format's largest number."""
    signal: float
    """Sum of squares of the values."""
    noise: float
    """Sum of squares of the cast's errors."""
    binades: list[int]
    """Scaled values per binade, [BINADES]: the first bin is all above the binade of the format's
    largest number, the last has all smaller ones."""

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


@torch.no_grad()
def statistics_of(cast: Cast) -> Counts:
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
    sums = (
        nonzero,
        nonzero - torch.count_nonzero(rounded),
        torch.count_nonzero(scaled.abs() > clipped_above(fmt)),
        _energy(x),
        _energy(torch.addcmul(x, rounded, scale.reciprocal().expand_as(x), value=-1)),
    )
    return Counts(
        fmt,
        cast.values.numel(),
        values.numel(),
        torch.stack([cast.amax, highest, -lowest]),
        _with_binades(sums, scaled, x.numel() - nonzero, fmt),
    )


@torch.no_grad()
def statistics_of_codes(
    codes: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor, fmt: Format
) -> Counts:
    """Measure codes without their original values: `flushed` counts codes of zero, `saturated`
    codes of the format's largest number; errors are unknown. scale_inv: FP32, one or several; amax:
    of codes times scale_inv, or roots."""
    matrix = _sampled(codes.reshape(-1, codes.shape[-1] if codes.dim() else 1), 1)
    rounded = decoded(matrix, fmt) if fmt is ROOT8 else matrix.float()
    scales = scale_inv.reciprocal()
    zeros = rounded.numel() - torch.count_nonzero(rounded)
    at_max = torch.count_nonzero(rounded.abs() >= fmt.max)
    no_error = torch.zeros_like(zeros)
    sums = torch.full_like(zeros, rounded.numel()), zeros, at_max, no_error, no_error
    return Counts(
        fmt,
        codes.numel(),
        rounded.numel(),
        torch.stack([amax, scales.amax(), -scales.amin()]),
        _with_binades(sums, rounded, zeros, fmt),
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


def _with_binades(
    sums: Sequence[torch.Tensor], scaled: torch.Tensor, zeros: torch.Tensor, fmt: Format
) -> torch.Tensor:
    """Return sums and the scaled values' histogram of exponents, FP64 [sums + BINADES]."""
    exponents = scaled.view(torch.int32) >> 23 & 0xFF
    bins = (fmt.max_exponent + 1 + 127 - exponents).clamp_(0, BINADES - 1).flatten().long()
    counts = torch.zeros(BINADES, dtype=torch.int64, device=scaled.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    counts[-1] -= zeros
    return torch.cat([torch.stack([number.double() for number in sums]), counts.double()])


def read(counts: Sequence[Counts]) -> list[Statistics]:
    """Copy all numbers to the host: one copy for each device."""
    by_device = defaultdict(list)
    for tensor in counts:
        numbers = torch.cat([tensor.extremes.double(), tensor.sums])
        by_device[numbers.device].append(numbers)
    rows = {device: iter(torch.stack(numbers).tolist()) for device, numbers in by_device.items()}
    found = []
    for tensor in counts:
        amax, highest, lowest, *sums = next(rows[tensor.sums.device])
        numbers = *map(int, sums[:3]), *sums[3:5], list(map(int, sums[5:]))
        found.append(Statistics(*tensor[:3], amax, highest, -lowest, *numbers))
    return found
