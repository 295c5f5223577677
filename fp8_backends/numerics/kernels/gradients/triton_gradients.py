"""Triton kernels that read a gradient in E4M3 once: to add a microbatch to it, or to take its norm.

Eager PyTorch writes the FP32 values of the codes before it computes with them. A sum of a bf16 gradient then moves 23
bytes an element and a norm 9; here they move 7 and 1. Sums of two are those of PyTorch, to the bit. A norm adds up in
an order of its own, which is the same in every run on the same kind of GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import triton_gate
from ..triton_common import OPTIONS, as_fp32, ceil_div, from_codes

ADDED = 4096
"""Elements that a program of the sum works on: a thread has 32 of them."""
SQUARED = 8192
"""Elements of which a program of the norm reads the codes at a time: a thread has 32 of them."""
ADDING_WARPS, SQUARING_WARPS = 4, 8
NORM_PROGRAMS = 1024
"""The norm has so many programs at most, each of which leaves the sum of its squares; one more adds these up."""
_NORM_PROGRAMS_AT_A_TIME = 4

_PARTIALS = tl.constexpr(NORM_PROGRAMS)


def accumulate(codes: torch.Tensor, scale_inv: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """`dispatch.accumulate`, of contiguous tensors."""
    total = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    with triton_gate.on_device_of(codes):
        _accumulate_kernel[(max(ceil_div(codes.numel(), ADDED), 1),)](
            codes.view(torch.uint8), scale_inv, addend, total, codes.numel(), BLOCK=ADDED,
            num_warps=ADDING_WARPS, **OPTIONS,
        )  # fmt: skip
    return total


def norm(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """`dispatch.norm` of contiguous E4M3."""
    blocks = ceil_div(codes.numel(), SQUARED)
    at_a_time = _NORM_PROGRAMS_AT_A_TIME * triton_gate.multiprocessors(codes)
    programs = max(min(blocks, at_a_time, NORM_PROGRAMS), 1)
    partials = torch.empty(programs, dtype=torch.float32, device=codes.device)
    found = torch.empty((), dtype=torch.float32, device=codes.device)
    with triton_gate.on_device_of(codes):
        _squares_kernel[(programs,)](
            codes.view(torch.uint8), partials, codes.numel(), blocks, BLOCK=SQUARED,
            HAS_FP8_CASTS=triton_gate.has_fp8_casts(codes), num_warps=SQUARING_WARPS, **OPTIONS,
        )  # fmt: skip
        _norm_kernel[(1,)](partials, programs, scale_inv, found, num_warps=4, **OPTIONS)
    return found


@triton.jit
def _accumulate_kernel(codes_ptr, scale_inv_ptr, addend_ptr, total_ptr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < numel
    values = from_codes(tl.load(codes_ptr + at, mask=there, other=0), "e4m3") * tl.load(scale_inv_ptr)
    addend = tl.load(addend_ptr + at, mask=there, other=0.0)
    tl.store(total_ptr + at, values + as_fp32(addend), mask=there)


@triton.jit
def _squares_kernel(codes_ptr, partial_ptr, numel, blocks, HAS_FP8_CASTS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program takes every n-th block, n being the number of programs, and leaves the sum of their squares. There
    is time for few instructions between one byte and the next: the hardware's own cast, and one for square and sum."""
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
