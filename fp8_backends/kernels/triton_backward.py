"""Triton kernels of a backward pass: cross-entropy with its gradient, and accumulation and norm of
E4M3 gradients.

The loss kernel reads a row of logits twice, the second time backwards for cache hits, and writes
the gradient over them: 6 bytes a bf16 logit, where PyTorch's operations take about 40. Losses and
gradients differ from PyTorch's in the last bits of FP32: hardware exponentials, another order of
summation. A gradient is read once: 7 bytes an element for a bf16 sum, equal to PyTorch's to the
bit, and 1 for a norm, with its own order of summation, deterministic on one kind of GPU. Nothing
waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import devices
from .triton_common import OPTIONS, as_fp32, ceil_div, decoded, format_max, from_codes

LOGITS_BLOCK, SMOOTH_BLOCK, LOGITS_WARPS = 8192, 4096, 16
"""Words read at a time, without and with label smoothing (more registers): two programs fit a
multiprocessor."""
ADDED_AT_ONCE, SQUARED = 4096, 8192
"""Elements a program processes at a time in the sum and in the norm: 32 for each thread."""
ADDING_WARPS, SQUARING_WARPS = 4, 8
NORM_PROGRAMS = 1024
"""Most programs of the norm. Each stores a partial sum of squares, and one more program adds these
up."""
_NORM_PROGRAMS_AT_A_TIME = 4

_PARTIALS = tl.constexpr(NORM_PROGRAMS)


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    *,
    block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `backward.cross_entropy`. A label out of range gives a loss of NaN; PyTorch would end the
    process."""
    rows, words = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if logits.stride(1) != 1 and words > 1:  # this copy becomes the gradient
        logits = logits.contiguous()
    gradient = (
        logits
        if logits.is_contiguous()
        else torch.empty_like(logits, memory_format=torch.contiguous_format)
    )
    with devices.on_device_of(logits):
        arguments = (
            logits,
            gradient,
            labels.contiguous(),
            losses,
            words,
            logits.stride(0),
            ignore_index,
        )
        constants = {
            "IS_SMOOTH": label_smoothing != 0,
            "BLOCK": block or (SMOOTH_BLOCK if label_smoothing else LOGITS_BLOCK),
        }
        smoothing = 1.0 - label_smoothing, label_smoothing / words
        cross_entropy_kernel[(rows,)](
            *arguments, *smoothing, **constants, num_warps=LOGITS_WARPS, **OPTIONS
        )
    return losses, gradient


@triton.jit
def cross_entropy_kernel(
    x_ptr,
    gradient_ptr,  # contiguous [rows, words]; may be x_ptr
    label_ptr,  # int64 [rows]
    loss_ptr,  # FP32 [rows]
    words,
    row_stride,
    ignore_index,
    on_label,
    on_all,
    IS_SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process one row: logarithm of the sum of exponentials, loss, gradient."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(label_ptr + row)
    counts = label != ignore_index
    is_word = (label >= 0) & (label < words)
    x_ptr += row * row_stride
    gradient_ptr += row * words
    lanes = tl.arange(0, BLOCK)
    # online softmax in each lane: its maximum and sum of exponentials
    largest = tl.full((BLOCK,), -format_max("fp32"), tl.float32)
    total, sum_of_x = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    begin = 0
    while begin < words:
        at = begin + lanes
        x = as_fp32(tl.load(x_ptr + at, mask=at < words, other=-float("inf")))
        above = x - largest
        smaller = tl.exp(-tl.abs(above))
        total = tl.where(above > 0, total * smaller + 1.0, total + smaller)
        largest = tl.where(above > 0, x, largest)
        if IS_SMOOTH:
            sum_of_x += tl.where(at < words, x, 0.0)
        begin += BLOCK
    of_row = tl.max(largest)
    log_sum = of_row + tl.log(tl.sum(total * tl.exp(largest - of_row)))
    x_of_label = as_fp32(tl.load(x_ptr + label, mask=counts & is_word, other=0.0))
    log_sum = tl.where(counts & (is_word == 0), float("nan"), log_sum)
    loss = log_sum - x_of_label
    if IS_SMOOTH:
        loss = on_label * loss + on_all * (words * log_sum - tl.sum(sum_of_x))
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
    while begin > 0:
        begin -= BLOCK
        at = begin + lanes
        x = as_fp32(tl.load(x_ptr + at, mask=at < words, other=0.0))
        gradient = tl.exp(x - log_sum) - on_all
        gradient -= tl.where(at == label, on_label, 0.0)
        gradient = tl.where(counts, gradient, 0.0)
        tl.store(gradient_ptr + at, gradient.to(gradient_ptr.dtype.element_ty), mask=at < words)


def accumulate(codes: torch.Tensor, scale_inv: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Run `backward.accumulate` on contiguous tensors."""
    total = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    with devices.on_device_of(codes):
        accumulate_kernel[(max(ceil_div(codes.numel(), ADDED_AT_ONCE), 1),)](
            codes.view(torch.uint8), scale_inv, addend, total, codes.numel(), BLOCK=ADDED_AT_ONCE,
            num_warps=ADDING_WARPS, **OPTIONS,
        )  # fmt: skip
    return total


def norm(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Run `backward.norm` on contiguous E4M3 codes."""
    blocks = ceil_div(codes.numel(), SQUARED)
    at_a_time = _NORM_PROGRAMS_AT_A_TIME * devices.multiprocessors(codes)
    programs = max(min(blocks, at_a_time, NORM_PROGRAMS), 1)
    partials = torch.empty(programs, dtype=torch.float32, device=codes.device)
    result = torch.empty((), dtype=torch.float32, device=codes.device)
    with devices.on_device_of(codes):
        squares_kernel[(programs,)](
            codes.view(torch.uint8), partials, codes.numel(), blocks, BLOCK=SQUARED,
            HAS_FP8_CASTS=devices.has_fp8_casts(codes), num_warps=SQUARING_WARPS, **OPTIONS,
        )  # fmt: skip
        norm_kernel[(1,)](partials, programs, scale_inv, result, num_warps=4, **OPTIONS)
    return result


@triton.jit
def accumulate_kernel(codes_ptr, scale_inv_ptr, addend_ptr, total_ptr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < numel
    values = from_codes(tl.load(codes_ptr + at, mask=there, other=0), "e4m3") * tl.load(
        scale_inv_ptr
    )
    addend = tl.load(addend_ptr + at, mask=there, other=0.0)
    tl.store(total_ptr + at, values + as_fp32(addend), mask=there)


@triton.jit
def squares_kernel(
    codes_ptr, partial_ptr, numel, blocks, HAS_FP8_CASTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up squares of every n-th block of n programs. Bandwidth leaves time for few instructions:
    a hardware cast and one fused multiply-add."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    block = tl.program_id(0)
    while block < blocks:
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        codes = tl.load(codes_ptr + at, mask=at < numel, other=0)
        values = decoded(codes, "e4m3", HAS_FP8_CASTS)
        total = tl.fma(values, values, total)
        block += tl.num_programs(0)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def norm_kernel(partial_ptr, partials, scale_inv_ptr, norm_ptr):
    at = tl.arange(0, _PARTIALS)
    total = tl.sum(tl.load(partial_ptr + at, mask=at < partials, other=0.0))
    tl.store(norm_ptr, tl.sqrt_rn(total) * tl.abs(tl.load(scale_inv_ptr)))
