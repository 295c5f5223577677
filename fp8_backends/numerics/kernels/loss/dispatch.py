"""The cross-entropy of logits and its gradient in one go: plain PyTorch operations, or one Triton kernel on a GPU."""

from __future__ import annotations

import torch

from ..triton_gate import usable


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row loses, and the gradient of their sum.

    Args:
        logits: [rows, words], bf16, fp16 or FP32, row-major. Their memory may be the gradient's afterwards.
        labels: int64 [rows], words or `ignore_index`, whose rows lose nothing.
        label_smoothing: the part of a label that is shared out among all words.

    Returns:
        (FP32 [rows], [rows, words] of the logits' dtype)
    """
    if usable(logits):
        from . import triton_loss  # Triton takes a second to load

        return triton_loss.cross_entropy(logits, labels, ignore_index, label_smoothing)
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
