"""One small run of Triton on a device, before training depends on it: its launcher wants a C compiler, its code
generator may not know a new GPU, and casts to FP8 are the hardware's.

Import this module only where Triton is installed.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from ..formats import E4M3, E5M2, saturating_cast
from .triton_common import OPTIONS, to_codes

_BLOCK = 2048


@torch.no_grad()
def obstacle(device: torch.device, has_fp8_casts: bool) -> str | None:
    """Why kernels must not be used on this device, or None: both formats' codes of all bf16 numbers are compared with
    PyTorch's. Waits for the device. Raises what Triton raises.

    has_fp8_casts: whether the device converts FP32 to FP8 in hardware.
    """
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float().to(device)
    for fmt in (E4M3, E5M2):
        codes = torch.empty(x.shape, dtype=torch.uint8, device=device)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            _cast_kernel[(x.numel() // _BLOCK,)](x, codes, fmt.name, has_fp8_casts, _BLOCK, **OPTIONS)
        right = codes == saturating_cast(x, fmt).view(torch.uint8)
        right |= x.isnan() & codes.view(fmt.dtype).float().isnan()  # of a NaN the sign does not matter
        if wrong := int((~right).sum()):
            return f"{wrong} of {x.numel()} casts to {fmt.name} differ from PyTorch's"
    return None


@triton.jit
def _cast_kernel(x_ptr, codes_ptr, FORMAT: tl.constexpr, HAS_FP8_CASTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes_ptr + at, to_codes(tl.load(x_ptr + at), FORMAT, HAS_FP8_CASTS))
