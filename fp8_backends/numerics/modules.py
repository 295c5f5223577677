"""What every part of this package knows of a module: its plain name, the mark of a converted layer, and hooks that a
copy of a model does not take along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import FP8BackendError

CONVERSION = "_fp8_conversion"
"""Attribute of a converted layer: how it was converted (`Conversion`)."""

HEAD_CONVERSION = "_fp8_head_conversion"
"""The same of an output head that stays in high precision and defers its logits."""

CONTAINER = "fp8_weights"
"""Name of the child of an experts module that holds what runs its weights in FP8 (`compute.expert_functions`)."""

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", CONTAINER})


@dataclass
class Conversion:
    """How to restore a converted layer, and the recipe that it was converted with."""

    original: type[nn.Module]
    converted: type[nn.Module]
    attributes: tuple[str, ...]
    recipe: Any
    undo: list[Callable[[nn.Module], None]] = field(default_factory=list)
    """What others did to the layer since, to be undone first when it is restored."""


def is_traced() -> bool:
    """Whether a hook is read by a compiler or an exporter, and not run. While one thread compiles,
    `torch.compiler.is_compiling` says so in all of them."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def plain_name(name: str) -> str:
    """A dotted name without the segments that wrappers (compile, FSDP, checkpointing) put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def owner_of(layer: nn.Module) -> tuple[nn.Module, str]:
    """The module whose Parameter the weight of a converted layer is, and the Parameter's name in it: the layer itself,
    but for what stands for a weight of an experts module."""
    return getattr(layer, "fp8_owner", (layer, "weight"))


def weight_name(name: str, layer: nn.Module) -> str:
    """The Parameter's name, from that of its converted layer. The weights of experts bear the Parameter's already."""
    return name if owner_of(layer)[0] is not layer else f"{name}.weight".lstrip(".")


def check_is_module(model: object, hint: str = "") -> None:
    """Raise `FP8BackendError` for what is no module, such as the pair that `prepare` returns. `hint` ends the text."""
    if not isinstance(model, nn.Module):
        pair = ": prepare returns (model, optimizer)" if isinstance(model, tuple) else ""
        raise FP8BackendError(f"model must be a torch.nn.Module, not {type(model).__name__}{pair}{hint}")


def renumber(handle: RemovableHandle, number: int, *hooks: dict) -> None:
    """Register a hook under another number, in these dictionaries of its module. A compiler guards on hooks and their
    numbers: with one hook under one number in all of them, like modules go on sharing its code."""
    for each in hooks:
        each[number] = each.pop(handle.id)
    handle.id = number


class TemporaryHook:
    """A hook of one model: in a copied or unpickled model it becomes one that does nothing."""

    def __reduce__(self):
        return _inert_hook, ()


def _inert_hook():
    return _do_nothing


def _do_nothing(*_) -> None:
    pass
