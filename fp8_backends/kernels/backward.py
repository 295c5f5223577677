"""Compute in backward: cross-entropy with its gradient, accumulation into E4M3 gradients, and their
norm.

Each is one Triton kernel on a GPU, one pass over its bytes.
"""

import torch

from ..formats.formats import E4M3
from .triton_gate import usable

_ADDENDS = (torch.float32, torch.bfloat16, torch.float16)


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row, FP32 [rows], and the gradient of their sum, [rows, words] in the
    logits' dtype.

    Args:
        logits: [rows, words], bf16, fp16 or FP32, row-major. The gradient may reuse their memory.
        labels: int64 [rows], words or `ignore_index`, for a loss of 0.
        label_smoothing: share of a label spread over all words.
    """
    if usable(logits):
        from . import triton_backward  # Triton takes a second to load

        return triton_backward.cross_entropy(logits, labels, ignore_index, label_smoothing)
    counts = labels != ignore_index
    index = torch.where(counts, labels, torch.zeros_like(labels)).unsqueeze(1)
    on_label, on_all = 1.0 - label_smoothing, label_smoothing / logits.shape[1]
    gradient = torch.log_softmax(logits, dim=1, dtype=torch.float32)
    losses = -gradient.gather(1, index).squeeze(1)
    if label_smoothing:
        losses = on_label * losses - on_all * gradient.sum(1)
    gradient.exp_()
    if label_smoothing:
        gradient.sub_(on_all)
    gradient.scatter_add_(1, index, gradient.new_full((), -on_label).expand_as(index))
    gradient.masked_fill_(~counts.unsqueeze(1), 0.0)
    if gradient.dtype != logits.dtype:
        gradient = logits.copy_(gradient)
    return losses.masked_fill_(~counts, 0.0), gradient


def accumulate(codes: torch.Tensor, scale_inv: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Return `codes * scale_inv + addend` in FP32, contiguous. Product and sum are each rounded
    once.

    Args:
        codes: E4M3, any shape.
        scale_inv: FP32, 0-dim.
        addend: bf16, fp16 or FP32, shaped as `codes`.
    """
    readable = addend.dtype in _ADDENDS and addend.device == codes.device and addend.is_contiguous()
    if usable(codes) and codes.is_contiguous() and readable:
        from . import triton_backward  # Triton takes a second to load

        return triton_backward.accumulate(codes, scale_inv, addend)
    return (codes.float() * scale_inv).add_(addend)


def norm(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of `codes * scale_inv`: FP32, 0-dim. The device decides the order of the
    sum.

    Args:
        codes: E4M3, any shape; FP32 for a gradient under accumulation.
        scale_inv: FP32, 0-dim.
    """
    if codes.dtype == E4M3.dtype and usable(codes) and codes.is_contiguous():
        from . import triton_backward  # as above

        return triton_backward.norm(codes, scale_inv)
    return torch.linalg.vector_norm(codes.float()) * scale_inv.abs()
