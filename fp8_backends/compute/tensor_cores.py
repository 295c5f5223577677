"""Sum FP8 products as the tensor cores of a chip do: in groups of 16 or 32, in fewer bits than FP32.

Each group adds its products, and the sum so far, as fixed-point numbers: aligned to the largest exponent of the terms
and truncated below. The exponent of a product is the sum of its operands' exponents. Source of the rule: F. A. Khattak
and M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores", ACM TACO 23(3), 2026, arXiv:2512.07004, and their models in
github.com/north-numerical-computing/MATLAB-tensor-core.

What is checked, to the bit: recordings of single instructions, with K = 32, of H100 and H200 (`wgmma`), L40S and Ada
(`mma.sync`) and B200 (`mma.sync`, not the `tcgen05` of its cuBLAS); products by cuBLAS up to K = 4,096 against the PyPI
package mmaemu, validated on an H100 PCIe and an RTX 4060. Not modelled: cuBLAS may split the contraction of a product
with few rows and columns (fewer than 1,024 on H100) over several sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import RecipeError
from ..formats.formats import E4M3, E5M2, Format

EXACT = "exact"
PROMOTION = 128
"""Elements of the contraction between additions to an FP32 sum, without fast accumulation."""


class Sums(NamedTuple):
    """The sums of a chip's tensor cores."""

    group: int
    """Products added at once."""
    bits: int
    """Bits kept below the largest exponent of a group's terms."""
    result_bits: int
    """Mantissa bits kept of a group's sum."""
    least_exponent: int
    """Smallest exponent that terms are aligned to."""
    adds_in_fp32: bool = False
    """True if the sum so far is no term of the next group: the group's sum is added to it in FP32, rounded to nearest.
    Fast accumulation makes no difference then."""


CHIPS = {
    "h100": Sums(group=32, bits=13, result_bits=13, least_exponent=-132),
    "ada": Sums(group=16, bits=13, result_bits=13, least_exponent=-132),
    "b200": Sums(group=32, bits=25, result_bits=23, least_exponent=-133, adds_in_fp32=True),
}
"""Chips with recorded sums."""
ALIASES = {"h200": "h100", "h20": "h100", "h800": "h100", "gh200": "h100", "hopper": "h100"} | dict.fromkeys(
    ("l4", "l40", "l40s", "rtx40", "rtx4060", "rtx4070", "rtx4080", "rtx4090", "rtx6000ada"), "ada"
)
_FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}


def product(
    a: torch.Tensor, b: torch.Tensor, chip: str, fast_accumulation: bool = True, c: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a [M, K] @ b [N, K].T + c in FP32, with the sums of a chip.

    Args:
        a: E4M3 or E5M2 codes.
        b: likewise.
        chip: a key of CHIPS or ALIASES; "exact": sums in FP64, rounded once.
        fast_accumulation: False adds parts of 128 elements in FP32 (`use_fast_accum=False`).
        c: FP32 [M, N], the first term.

    Raises:
        RecipeError: for a chip without recordings.
    """
    if c is None:
        c = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    name = name_of(chip)
    if name == EXACT:
        return (a.double() @ b.double().t() + c).float()
    sums = CHIPS[name]
    part = max(a.shape[1], 1) if fast_accumulation or sums.adds_in_fp32 else PROMOTION
    if part >= a.shape[1]:
        return reference(a, b, sums, c)
    for start in range(0, a.shape[1], part):
        columns = slice(start, start + part)
        c = c + reference(a[:, columns], b[:, columns], sums, torch.zeros_like(c))
    return c


def name_of(chip: str) -> str:
    """Return the key of CHIPS of a chip, or "exact"."""
    name = chip.lower().replace(" ", "").replace("-", "").replace("_", "")
    name = ALIASES.get(name, name)
    if name != EXACT and name not in CHIPS:
        raise RecipeError(f"no recorded sums of {chip!r}: there are recordings of {', '.join((*CHIPS, *ALIASES))}")
    return name


def reference(a: torch.Tensor, b: torch.Tensor, sums: Sums, c: torch.Tensor) -> torch.Tensor:
    """Return c [M, N] plus all products of a [M, K] and b [N, K], group after group. FP64 holds every step exactly."""
    (a, a_exponent), (b, b_exponent) = ((x.double(), _exponent(x.double(), _FORMATS[x.dtype])) for x in (a, b))
    total = c.double()
    for start in range(0, a.shape[1], sums.group):
        k = slice(start, start + sums.group)
        terms = a[:, None, k] * b[None, :, k]
        exponents = (a_exponent[:, None, k] + b_exponent[None, :, k]).where(terms != 0, sums.least_exponent)
        largest = exponents.amax(-1).clamp(min=sums.least_exponent)
        first = torch.zeros_like(total) if sums.adds_in_fp32 else total
        unit = _power_of_two(largest.maximum(_exponent(first)) - sums.bits)
        result = ((terms / unit[..., None]).trunc().sum(-1) + (first / unit).trunc()) * unit
        unit = _power_of_two(_exponent(result).clamp(min=-126) - sums.result_bits)
        result = (result / unit).trunc() * unit + 0.0  # a zero sum is positive
        total = (total.float() + result.float()).double() if sums.adds_in_fp32 else result
    return total.float()


def _exponent(x: torch.Tensor, fmt: Format | None = None) -> torch.Tensor:
    """Return the exponents of FP64 numbers; subnormal ones of a format have its smallest normal exponent."""
    exponent = torch.frexp(x).exponent - 1
    exponent = exponent if fmt is None else exponent.clamp(min=fmt.min_exponent)
    return exponent.where(x != 0, -1000)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent.long() + 1023 << 52).view(torch.float64)
