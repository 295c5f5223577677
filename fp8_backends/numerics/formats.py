"""The two FP8 formats, and scaled FP16: their ranges and the cast into them.

E4M3 (four exponent, three mantissa bits) carries weights and activations; E5M2 trades a mantissa bit for range and
carries gradients. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """One floating-point format that stores scaled values."""

    name: str
    dtype: torch.dtype
    max: float
    """Largest finite magnitude."""


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)
FP16 = Format("fp16", torch.float16, 65504.0)
"""With a scale, MS-AMP's format of weights and second moments."""

FORMAT_OF = {fmt.dtype: fmt for fmt in (E4M3, E5M2, FP16)}

RECIPE_FORMATS = {"HYBRID": (E4M3, E5M2), "E4M3": (E4M3, E4M3)}
"""`fp8_format` of a recipe -> (format of input and weight, format of the output's gradient)."""


def saturating_cast(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """FP32 values, already scaled, to the format: round to nearest even, ±inf and overflow to ±max, NaN stays NaN.

    The clamp is explicit because an eager cast overflows E4M3 to NaN before torch 2.12, and E5M2 to inf in every
    version. Returns a contiguous tensor of `fmt.dtype` and the shape of `values`.
    """
    return values.clamp(-fmt.max, fmt.max).to(fmt.dtype, memory_format=torch.contiguous_format)
