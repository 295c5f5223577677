"""Floating-point formats, the cast into scaled ones, and ranges of numbers in a checkpoint.

E4M3 (four exponent, three mantissa bits) carries weights and activations; E5M2 trades a mantissa
bit for range and carries gradients. Micikevicius et al., "FP8 Formats for Deep Learning",
arXiv:2209.05433.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch

from ..errors import FP8BackendError

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of weights, activations and results around FP8 products."""


@dataclass(frozen=True)
class Format:
    """One floating-point format. Python and Triton kernels read its numbers from the constants
    below."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    """Stored mantissa bits."""
    min_exponent: int
    """Exponent of the smallest normal number."""
    exponents: int = 15
    """Exponents of normal numbers; only of formats in integers."""

    @property
    def max(self) -> float:
        """Largest finite magnitude."""
        # from PyTorch: `torch.compile(dynamic=True)` would make a variable of a float attribute
        if self.dtype.is_floating_point:
            return torch.finfo(self.dtype).max
        return (2 - 2.0**-self.mantissa_bits) * 2.0 ** (self.min_exponent + self.exponents - 1)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest number."""
        return math.frexp(self.max)[1] - 1

    @property
    def bias(self) -> int:
        """Offset of stored exponents."""
        return 1 - self.min_exponent

    @property
    def dropped_bits(self) -> int:
        """Mantissa bits of FP32 beyond this format's."""
        return 23 - self.mantissa_bits

    @property
    def max_bits(self) -> int:
        """`max` as FP32 bits."""
        fraction, exponent = math.frexp(self.max)  # the fraction is from 0.5 to 1
        return (exponent + 126 << 23) + int((2 * fraction - 1) * 2**23)

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest(self) -> float:
        """Smallest positive number, subnormal."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


E4M3 = Format("e4m3", torch.float8_e4m3fn, 3, -6)
E5M2 = Format("e5m2", torch.float8_e5m2, 2, -14)
FP16 = Format("fp16", torch.float16, 10, -14)
"""MS-AMP stores weights and second moments in FP16 with a scale."""
BF16 = Format("bf16", torch.bfloat16, 7, -126)
FP32 = Format("fp32", torch.float32, 23, -126)
E4M11 = Format("e4m11", torch.float8_e4m3fn, 11, -6)
"""E4M3 with eight more mantissa bits and the same maximum, stored as the nearest E4M3 code and an
int8 residual. Its 15 magnitude bits are `(code << 8) + residual`."""
ROOT8 = Format("root8", torch.uint8, 4, -6)
"""Four exponent and four mantissa bits without a sign; every code is a number. Stores roots of
second moments: a root has half the exponents, so eight bits cover nearly the range of a scaled
FP16."""
E2M1 = Format("e2m1", torch.uint8, 1, 0, 3)
"""The four bits of NVFP4, without inf and NaN: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M2, FP16, BF16, FP32, ROOT8)}
"""dtype of stored data -> format; E4M3 data with a residual are E4M11."""
FORMAT_OF = {fmt.dtype: fmt for fmt in (E4M3, E5M2, FP16, ROOT8)}
"""Formats with a scale."""

RECIPE_FORMATS = {"HYBRID": (E4M3, E5M2), "E4M3": (E4M3, E4M3)}
"""`fp8_format` of a recipe -> (format of input and weight, format of the output's gradient)."""


def saturating_cast(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Cast FP32 values, already scaled: round to nearest even, ±inf and overflow to ±max, NaN stays
    NaN.

    The clamp is explicit because an eager cast overflows E4M3 to NaN before torch 2.12, and E5M2 to
    inf in every version. Returns a contiguous tensor of `fmt.dtype` and the shape of `values`.
    """
    limit = fmt.max
    return values.clamp(-limit, limit).to(fmt.dtype, memory_format=torch.contiguous_format)


# Ranges: numbers of a checkpoint that would break training are rejected


class Range(NamedTuple):
    """Allowed values of a stored number. No range includes NaN."""

    words: str
    least: float = -FP32.max
    most: float = FP32.max
    whole: bool = False


FINITE = Range("finite in FP32")
FINITE_IN_FP64 = Range("finite", -torch.finfo(torch.float64).max, torch.finfo(torch.float64).max)
NOT_NEGATIVE = Range("finite and not negative", least=0.0)
NOT_NEGATIVE_IN_FP64 = FINITE_IN_FP64._replace(words=NOT_NEGATIVE.words, least=0.0)
POSITIVE = Range("finite and positive", least=2.0**-149)
AMAX = Range("not negative", least=0.0, most=math.inf)
"""An overflow leaves an amax of inf; every rule skips it."""
COUNT = Range("whole and not negative", least=0.0, whole=True)


def check_values(values: torch.Tensor | Real, allowed: Range, name: str, advice: str) -> None:
    """Raise `FP8BackendError` for values out of range. Reads a tensor once.

    Args:
        values: a number, or a plain tensor of integers or of floating-point numbers of two bytes or
            more.
        name: name of the values in the error.
        advice: the way out, at the error's end.
    """
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=torch.float64, device="cpu")
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.numel():
        for number in torch.stack(torch.aminmax(values.detach())).tolist():
            if not allowed.least <= number <= allowed.most or (allowed.whole and number % 1):
                raise FP8BackendError(
                    f"{name} holds {number:.4g}, and must be {allowed.words}. {advice}"
                )
