"""Triton kernels reading an E4M3 gradient once: accumulation and norm.

Eager PyTorch writes FP32 values of the codes first: 23 bytes an element for a bf16 sum and 9 for a norm, here 7 and 1.
Sums match PyTorch to the bit. The norm has its own order of summation, deterministic on one kind of GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import triton_gate
from .triton_common import OPTIONS, as_fp32, ceil_div, from_codes

ADDED, SQUARED = 4096, 8192
"""Elements a program processes at a time in the sum and in the norm: 32 for each thread."""
ADDING_WARPS, SQUARING_WARPS = 4, 8
NORM_PROGRAMS = 1024
"""Most programs of the norm. Each stores a partial sum of squares, and one more program adds these up."""
_NORM_PROGRAMS_AT_A_TIME = 4

_PARTIALS = tl.constexpr(NORM_PROGRAMS)


def accumulate(codes: torch.Tensor, scale_inv: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Run `backward.accumulate` on contiguous tensors."""
    total = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    with triton_gate.on_device_of(codes):
        _accumulate_kernel[(max(ceil_div(codes.numel(), ADDED), 1),)](
            codes.view(torch.uint8), scale_inv, addend, total, codes.numel(), BLOCK=ADDED,
            num_warps=ADDING_WARPS, **OPTIONS,
        )  # fmt: skip
    return total


def norm(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Run `backward.norm` on contiguous E4M3 codes."""
    blocks = ceil_div(codes.numel(), SQUARED)
    at_a_time = _NORM_PROGRAMS_AT_A_TIME * triton_gate.multiprocessors(codes)
    programs = max(min(blocks, at_a_time, NORM_PROGRAMS), 1)
    partials = torch.empty(programs, dtype=torch.float32, device=codes.device)
    result = torch.empty((), dtype=torch.float32, device=codes.device)
    with triton_gate.on_device_of(codes):
        _squares_kernel[(programs,)](
            codes.view(torch.uint8), partials, codes.numel(), blocks, BLOCK=SQUARED,
            HAS_FP8_CASTS=triton_gate.has_fp8_casts(codes), num_warps=SQUARING_WARPS, **OPTIONS,
        )  # fmt: skip
        _norm_kernel[(1,)](partials, programs, scale_inv, result, num_warps=4, **OPTIONS)
    return result


@triton.jit
def _accumulate_kernel(codes_ptr, scale_inv_ptr, addend_ptr, total_ptr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < numel
    values = from_codes(tl.load(codes_ptr + at, mask=there, other=0), "e4m3") * tl.load(scale_inv_ptr)
    addend = tl.load(addend_ptr + at, mask=there, other=0.0)
    tl.store(total_ptr + at, values + as_fp32(addend), mask=there)


@triton.jit
def _squares_kernel(codes_ptr, partial_ptr, numel, blocks, HAS_FP8_CASTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up squares of every n-th block of n programs. Bandwidth leaves time for few instructions: a hardware cast and
    one fused multiply-add."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    block = tl.program_id(0)
    while block < blocks:
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        codes = tl.load(codes_ptr + at, mask=at < numel, other=0)
        if HAS_FP8_CASTS:
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            values = from_codes(codes, "e4m3")
        total = tl.fma(values, values, total)
        block += tl.num_programs(0)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def _norm_kernel(partial_ptr, partials, scale_inv_ptr, norm_ptr):
    at = tl.arange(0, _PARTIALS)
    total = tl.sum(tl.load(partial_ptr + at, mask=at < partials, other=0.0))
    tl.store(norm_ptr, tl.sqrt_rn(total) * tl.abs(tl.load(scale_inv_ptr)))
