"""Show transformers' `Conv1D`, the layer of GPT-2 with weight [in, out], to backends as a Linear.

Nothing is imported from transformers here before a model with such a layer is converted or
unpickled.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import nn

from ..compute.interface import TransposedLinear


def as_linear(conv: nn.Module) -> TransposedLinear:
    """Return a Linear on the Parameters and attributes of a `Conv1D`."""
    linear = TransposedLinear.__new__(TransposedLinear)
    linear.__dict__.update(conv.__dict__, in_features=conv.nx, out_features=conv.nf)
    return linear


def adapted(carrier: nn.Linear) -> nn.Module:
    """Turn a backend's FP8 layer for `as_linear` into a `Conv1D`, which PEFT and others tell the
    layout by."""
    carrier.__class__ = fp8_form(type(carrier))
    return carrier


class _Shown:
    """Mixed into the FP8 forms of a `Conv1D`: the attributes of a Linear of its sizes."""

    transposed_weight = True
    nx: int
    nf: int
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
def fp8_form(linear: type[nn.Linear]) -> type[nn.Module]:
    """Return the `Conv1D` with the products of an FP8 Linear: its first base."""
    from transformers.pytorch_utils import Conv1D

    name = linear.__name__.replace("Linear", "Conv1D")
    in_pickles = {
        "__module__": __name__,
        "__qualname__": f"{linear.__module__}.{linear.__name__}".replace(".", "/"),
    }
    return type(name, (_Shown, linear.__bases__[0], Conv1D), in_pickles)


def __getattr__(name: str) -> Any:
    """Return the form of a pickle: its name there is the path of the Linear."""
    module, _, linear = name.rpartition("/")
    if module.partition("/")[0] != __name__.partition(".")[0]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return fp8_form(getattr(importlib.import_module(module.replace("/", ".")), linear))
