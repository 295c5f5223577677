"""Sum FP8 products on a CPU as the tensor cores of a chip do: in groups of 16 or 32, in fewer bits
than FP32.

Each group adds its products, and the sum so far, as fixed-point numbers: aligned to the largest
exponent of the terms and truncated below. The exponent of a product is the sum of its operands'
exponents. Source of the rule: F. A. Khattak and M. Mikaitis, "Accurate Models of NVIDIA Tensor
Cores", ACM TACO 23(3), 2026, arXiv:2512.07004, and their models in
github.com/north-numerical-computing/MATLAB-tensor-core.

What is checked, to the bit: recordings of single instructions, with K = 32, of H100 and H200
(`wgmma`), L40S and Ada (`mma.sync`) and B200 (`mma.sync`, not the `tcgen05` of its cuBLAS); 276,480
results of `torch._scaled_mm` on an H200, up to K = 14,336, with one scale or rowwise scales; and
the PyPI package mmaemu, validated on an H100 PCIe and an RTX
4060. Not modelled: cuBLAS may split the contraction of a product with few rows and columns over
several sums.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from fp8_backends.formats.formats import E4M3, E5M2, Format
from fp8_backends.formats.scaling import Quantized
from fp8_backends.kernels.adam_cpu import flags, library

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
    """True if the sum so far is no term of the next group: the group's sum is added to it in FP32,
    rounded to nearest. Fast accumulation makes no difference then."""


CHIPS = {
    "h100": Sums(group=32, bits=13, result_bits=13, least_exponent=-132),
    "ada": Sums(group=16, bits=13, result_bits=13, least_exponent=-132),
    "b200": Sums(group=32, bits=25, result_bits=23, least_exponent=-133, adds_in_fp32=True),
}
"""Chips with recorded sums."""
ALIASES = {"h200": "h100", "l40s": "ada"}
_FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    chip: str,
    fast_accumulation: bool = True,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a [M, K] @ b [N, K].T + c in FP32, with the sums of a chip.

    Args:
        a: E4M3 or E5M2 codes.
        b: likewise.
        chip: a key of CHIPS or ALIASES; "exact": sums in FP64, rounded once.
        fast_accumulation: False adds parts of 128 elements in FP32 (`use_fast_accum=False`).
        c: FP32 [M, N], the first term.

    Raises:
        KeyError: for a chip without recordings.
    """
    name = ALIASES.get(chip.lower(), chip.lower())
    if name == EXACT:
        return (a.double() @ b.double().t() + (0 if c is None else c)).float()
    if c is None:
        return _product(a, b, name, fast_accumulation)
    return by_reference(a, b, CHIPS[name], fast_accumulation, c)


def scaled_product(
    a: Quantized, b: Quantized, out_dtype: torch.dtype, chip: str, fast_accumulation: bool
) -> torch.Tensor:
    """Compute `fp8_backends.compute.products.scaled_product` with the sums of a chip."""
    values = product(a.codes, b.codes, chip, fast_accumulation)
    if a.scale_inv.dim() == 2:
        return (values * a.scale_inv * b.scale_inv.t()).to(torch.bfloat16).to(out_dtype)
    # cuBLAS multiplies the scales first
    return (values * (a.scale_inv * b.scale_inv)).to(out_dtype)


def _product(a: torch.Tensor, b: torch.Tensor, chip: str, fast_accumulation: bool) -> torch.Tensor:
    """Compute `product` without c by C++ on a CPU, else by the reference."""
    sums, result = CHIPS[chip], torch.zeros(a.shape[0], b.shape[0], device=a.device)
    compiled = _compiled() if a.device.type == "cpu" else None
    if compiled is None:  # rows by rows, for the memory of all products
        parts = zip(
            *(x.split(max(1, 2**18 // max(1, b.shape[0]))) for x in (a, result)), strict=True
        )
        return torch.cat([by_reference(rows, b, sums, fast_accumulation, c) for rows, c in parts])
    (a, a_values), (b, b_values) = ((x.contiguous(), _decoded(x.dtype)) for x in (a, b))
    pointers = (x.data_ptr() for x in (a, b, a_values, b_values, result))
    promotes = not fast_accumulation and not sums.adds_in_fp32
    numbers = (
        *result.shape,
        a.shape[1],
        sums.group,
        sums.bits,
        sums.result_bits,
        promotes,
        sums.adds_in_fp32,
    )
    compiled.add_products(ctypes.byref(_Table(*pointers, *numbers, torch.get_num_threads())))
    if all(_is_finite(x) for x in (a, b)):
        return result
    exact = a.double() @ b.double().t()
    return result.where(exact.isfinite(), exact.float())


class _Table(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("a", "b", "a_values", "b_values", "result")
    ] + [
        (name, ctypes.c_int64)
        for name in "rows columns contraction group bits result_bits promotes adds_in_fp32 "
        "threads".split()
    ]


def _compiled() -> ctypes.CDLL | None:
    source = Path(__file__).with_name("emulation.cpp")
    return library(source, tuple(flags()), "the emulation of tensor cores")


@functools.cache
def _decoded(dtype: torch.dtype) -> torch.Tensor:
    """Return the FP32 values of 256 codes, then the powers of two of their exponents; 0 for both if
    not finite."""
    values = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).double()
    values = values.where(values.isfinite(), 0)
    powers = _power_of_two(_exponent(values, _FORMATS[dtype])).where(values != 0, 0)
    return torch.cat([values, powers]).float()


def _is_finite(codes: torch.Tensor) -> bool:
    magnitudes = codes.view(torch.uint8) & 0x7F
    return not magnitudes.numel() or int(magnitudes.max()) < (
        0x7F if codes.dtype == E4M3.dtype else 0x7C
    )


def by_reference(
    a: torch.Tensor, b: torch.Tensor, sums: Sums, fast_accumulation: bool, c: torch.Tensor
) -> torch.Tensor:
    if fast_accumulation or sums.adds_in_fp32:
        return reference(a, b, sums, c)
    for a_part, b_part in zip(a.split(PROMOTION, 1), b.split(PROMOTION, 1), strict=True):
        c = c + reference(a_part, b_part, sums, torch.zeros_like(c))
    return c


def reference(a: torch.Tensor, b: torch.Tensor, sums: Sums, c: torch.Tensor) -> torch.Tensor:
    """Return c [M, N] plus all products of a [M, K] and b [N, K], group after group. FP64 holds
    every step exactly."""
    (a, a_exponent), (b, b_exponent) = (
        (x.double(), _exponent(x.double(), _FORMATS[x.dtype])) for x in (a, b)
    )
    total = c.double()
    for start in range(0, a.shape[1], sums.group):
        k = slice(start, start + sums.group)
        terms = a[:, None, k] * b[None, :, k]
        exponents = (a_exponent[:, None, k] + b_exponent[None, :, k]).where(
            terms != 0, sums.least_exponent
        )
        largest = exponents.amax(-1).clamp(min=sums.least_exponent)
        first = torch.zeros_like(total) if sums.adds_in_fp32 else total
        unit = _power_of_two(largest.maximum(_exponent(first)) - sums.bits)
        result = ((terms / unit[..., None]).trunc().sum(-1) + (first / unit).trunc()) * unit
        unit = _power_of_two(_exponent(result).clamp(min=-126) - sums.result_bits)
        result = (result / unit).trunc() * unit + 0.0  # a zero sum is positive
        total = (total.float() + result.float()).double() if sums.adds_in_fp32 else result
    return total.float()


def _exponent(x: torch.Tensor, fmt: Format | None = None) -> torch.Tensor:
    """Return the exponents of FP64 numbers; subnormal ones of a format have its smallest normal
    exponent."""
    exponent = torch.frexp(x).exponent - 1
    exponent = exponent if fmt is None else exponent.clamp(min=fmt.min_exponent)
    return exponent.where(x != 0, -1000)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent.long() + 1023 << 52).view(torch.float64)
