"""What training does with a gradient that is stored in E4M3, besides making it: microbatches are added to it, and its
norm is taken. On a GPU each is one pass over its bytes (`triton_gradients.py`), elsewhere operations of PyTorch."""

from __future__ import annotations

import torch

from ...formats import E4M3
from ..triton_gate import usable


def accumulate(codes: torch.Tensor, scale_inv: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """`codes * scale_inv + addend`: FP32, contiguous, of the same shape. A product is rounded once, and so is the sum.

    Args:
        codes: E4M3, of any shape.
        scale_inv: FP32, 0-dimensional.
        addend: of the shape of `codes`; bf16, fp16 or fp32.
    """
    if usable(codes) and codes.is_contiguous() and _is_like(addend, codes):
        from . import triton_gradients  # Triton takes a second to load

        return triton_gradients.accumulate(codes, scale_inv, addend)
    return (codes.float() * scale_inv).add_(addend)


def norm(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The 2-norm of `codes * scale_inv`: FP32, 0-dimensional. The order of the sum is the device's.

    Args:
        codes: E4M3, of any shape; or FP32, of a gradient that still accumulates.
        scale_inv: FP32, 0-dimensional.
    """
    if codes.dtype == E4M3.dtype and usable(codes) and codes.is_contiguous():
        from . import triton_gradients  # as above

        return triton_gradients.norm(codes, scale_inv)
    return torch.linalg.vector_norm(codes.float()) * scale_inv.abs()


def _is_like(addend: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether a kernel reads the addend beside the codes."""
    known = addend.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and addend.device == codes.device and addend.is_contiguous()
