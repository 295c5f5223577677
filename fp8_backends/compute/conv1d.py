"""transformers' `Conv1D`, of which GPT-2 is made: y = x @ weight + bias with weight [in, out].

Nothing here imports transformers. Where it was never imported, no model has such a layer.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def conv1d_class() -> Any:
    """transformers' class; an empty tuple, of which nothing is an instance, where transformers was never imported."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, plain or converted."""
    return isinstance(module, conv1d_class())


def linear_like(conv: nn.Module) -> nn.Linear:
    """A Linear of the sizes and the dtype of a `Conv1D`, on the meta device."""
    return nn.Linear(conv.nx, conv.nf, bias=False, device="meta", dtype=conv.weight.dtype)


class Conv1DForm:
    """What the FP8 forms of a `Conv1D` have in common: the names of a Linear for its sizes."""

    transposed_weight = True
    """Whether the Parameter holds the weight as [in, out]."""
    nx: int
    nf: int
    weight: torch.Tensor

    @property
    def in_features(self) -> int:
        return self.nx

    @property
    def out_features(self) -> int:
        return self.nf
