"""Triton kernel for the cross-entropy of logits and its gradient.

PyTorch's operations pass over the logits a dozen times, mostly in FP32. The kernel reads a row twice, the second time
backwards for cache hits, and writes the gradient over the logits: 6 bytes a bf16 logit instead of about 40.

Losses and gradients differ from PyTorch's in the last bits of FP32: hardware exponentials, another order of summation.
Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import triton_gate
from .triton_common import OPTIONS, as_fp32, format_max

BLOCK, SMOOTH_BLOCK, WARPS = 8192, 4096, 16
"""Words read at a time, without and with label smoothing (more registers): two programs fit a multiprocessor."""


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, label_smoothing: float, *, block: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `backward.cross_entropy`. A label out of range gives a loss of NaN; PyTorch would end the process."""
    rows, words = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if logits.stride(1) != 1 and words > 1:  # this copy becomes the gradient
        logits = logits.contiguous()
    gradient = logits if logits.is_contiguous() else torch.empty_like(logits, memory_format=torch.contiguous_format)
    with triton_gate.on_device_of(logits):
        arguments = logits, gradient, labels.contiguous(), losses, words, logits.stride(0), ignore_index
        constants = {"IS_SMOOTH": label_smoothing != 0, "BLOCK": block or (SMOOTH_BLOCK if label_smoothing else BLOCK)}
        smoothing = 1.0 - label_smoothing, label_smoothing / words
        _cross_entropy_kernel[(rows,)](*arguments, *smoothing, **constants, num_warps=WARPS, **OPTIONS)
    return losses, gradient


@triton.jit
def _cross_entropy_kernel(
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
