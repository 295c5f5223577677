"""Counts of the three products of a layer in FP8, the dtype of their results, and the layer's
mode."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..tensors.gathered_codes import DGRAD, FPROP
from ..torch_tools.backward_end import inside_backward

WGRAD = "wgrad"
KINDS = (FPROP, DGRAD, WGRAD)
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

    @property
    def kinds(self) -> set[str]:
        """Return the kinds with products in FP8, without recomputation."""
        return {kind for kind in KINDS if getattr(self, kind)}

    def add(self, kind: str, number: int = 1) -> None:
        """Count more products of a kind: one of KINDS, or RECOMPUTED."""
        setattr(self, kind, getattr(self, kind) + number)


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of products with x: the autocast dtype if autocast is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Modes:
    """The modes in which layers ran since the last optimizer step. Activation checkpointing runs
    them again in these, even after `model.eval()` between loss and backward."""

    def __init__(self) -> None:
        self._modes: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def is_training(self, layer: nn.Module) -> bool:
        """Return the layer's mode; in recomputation, the mode of its first forward."""
        if torch.compiler.is_compiling():
            return layer.training
        if inside_backward():
            return self._modes.get(layer, layer.training)
        # without gradients, a forward is an evaluation, or the first of `use_reentrant`
        if layer.training or torch.is_grad_enabled():
            self._modes[layer] = layer.training
        return layer.training

    def forget_modes(self) -> None:
        """Begin a new step."""
        self._modes.clear()

    def __reduce__(self):  # copies run anew
        return type(self), ()
