"""transformers' `Conv1D`, the layer of GPT-2: y = x @ weight + bias with weight [in, out].

Nothing is imported from transformers here before a model with such a layer is converted or unpickled.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn


def conv1d_class() -> Any:
    """Return transformers' class, or an empty tuple for `isinstance` if transformers was never imported."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())


def is_conv1d(module: nn.Module) -> bool:
    """Return True for a `Conv1D`, plain or converted."""
    return isinstance(module, conv1d_class())


def linear_like(conv: nn.Module) -> nn.Linear:
    """Return a Linear of the sizes and the dtype of a `Conv1D`, on the meta device."""
    return nn.Linear(conv.nx, conv.nf, bias=False, device="meta", dtype=conv.weight.dtype)


class Conv1DForm:
    """Mixed into the FP8 forms of a `Conv1D`: the attributes of a Linear of its sizes."""

    transposed_weight = True
    """The Parameter holds the weight as [in, out]."""
    nx: int
    nf: int
    weight: torch.Tensor
    rule_in_words: str

    @property
    def in_features(self) -> int:
        return self.nx

    @property
    def out_features(self) -> int:
        return self.nf

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}, {self.rule_in_words})"


@functools.cache
def conv1d_form(products: type[nn.Module], name: str) -> type[nn.Module]:
    """Return the `Conv1D` with a backend's FP8 products; pickles find it by a module-level `__getattr__`."""
    from transformers.pytorch_utils import Conv1D

    return type(name, (Conv1DForm, products, Conv1D), {"__module__": products.__module__})
