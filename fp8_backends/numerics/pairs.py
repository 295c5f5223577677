"""Pairs: numbers of `formats.E4M11`, in two planes of eight bits each.

`kernels.rounding` has the definition. On a CPU it runs on parts of a tensor that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .formats import E4M3, E4M11
from .kernels import rounding
from .kernels.triton_gate import is_eager

PART = 2**15
"""Elements of one part on a CPU."""


def encode(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`values * scale` rounded to nearest.

    Args:
        values: any floating-point dtype, contiguous; scale: FP32, 0-dimensional.

    Returns:
        Codes, E4M3, and residuals, int8, of the shape of `values`.
    """
    codes = torch.empty_like(values, dtype=torch.uint8)
    residual = torch.empty_like(values, dtype=torch.int8)
    for source, *targets in _parts(values, codes, residual):
        for target, made in zip(targets, rounding.codes_of(source.float() * scale, E4M11), strict=True):
            target.copy_(made)
    return codes.view(E4M3.dtype), residual


def decode(codes: torch.Tensor, residual: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The FP32 values of codes, E4M3, and residuals, int8, of one shape, times a scale, FP32. Contiguous."""
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for target, code, rest in _parts(values, codes.view(torch.uint8).contiguous(), residual.contiguous()):
        torch.mul(rounding.decoded(code, E4M11, rest), scale_inv, out=target)
    return values


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same places of contiguous tensors, as flat views, one part after the other."""
    flat = [tensor.view(-1) for tensor in tensors]
    in_parts = flat[0].device.type == "cpu" and is_eager(flat[0])
    return zip(*(each.split(PART if in_parts else max(len(each), 1)) for each in flat), strict=True)
