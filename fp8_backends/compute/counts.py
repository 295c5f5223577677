"""Counts of the three products of a layer in FP8, and the dtype of their results."""

from dataclasses import dataclass

import torch

FPROP, DGRAD, WGRAD = KINDS = ("fprop", "dgrad", "wgrad")
RECOMPUTED = "recomputed"


@dataclass
class ProductCounts:
    """FP8 products of one layer since it was prepared."""

    fprop: int = 0
    """Forward products, recomputation left out."""
    dgrad: int = 0
    """Input-gradient products."""
    wgrad: int = 0
    """Weight-gradient products."""
    recomputed: int = 0
    """Forward products run again by activation checkpointing."""

    def add(self, kind: str, number: int = 1) -> None:
        """Count more products of a kind: one of KINDS, or RECOMPUTED."""
        setattr(self, kind, getattr(self, kind) + number)


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of products with x: the autocast dtype if autocast is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
