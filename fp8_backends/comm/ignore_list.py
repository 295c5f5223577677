"""The list of parameters that DDP must leave alone: weights in scaled precision travel another way.

DDP reads a list of names on the module that it wraps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import FP8BackendError
from ..numerics.block_codes import BlockCodes
from ..numerics.scaled_tensor import ScaledTensor

IGNORE_LIST = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module in which DDP finds the names."""


class IgnoreList(dict):
    """Names for DDP, as keys, since it looks each tensor up."""

    theirs: tuple[str, ...] = ()
    """The names that somebody else put there."""


def ignore(module: nn.Module) -> None:
    """Put what DDP must leave alone on the ignore list of `module`, and keep what others put there.

    Repeating it renews the list: a weight that is plain again leaves it.
    """
    setter = getattr(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model", None)
    if setter is None:
        raise FP8BackendError(
            f"torch {torch.__version__} has no DistributedDataParallel._set_params_and_buffers_to_ignore_for_model, "
            f"by which DDP leaves FP8 weights alone: use a version of torch that is tested"
        )
    theirs = _clear(module)
    names = IgnoreList.fromkeys([*theirs, *scaled_names(module)])
    names.theirs = theirs
    if names:
        setter(module, names)


def forget(module: nn.Module) -> None:
    """Undo `ignore`."""
    if theirs := _clear(module):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(theirs))


def _clear(module: nn.Module) -> tuple[str, ...]:
    """Take the list and its marks away. Returns the names that somebody else put there."""
    for parameter in module.parameters():
        parameter.__dict__.pop("_ddp_ignored", None)
    names = module.__dict__.pop(IGNORE_LIST, ())
    return names.theirs if isinstance(names, IgnoreList) else tuple(names)


def leaves_nothing(module: nn.Module) -> bool:
    """Whether DDP would refuse a module, since all that trains in it is on the ignore list."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return bool(trained) and all(isinstance(parameter, ScaledTensor) for parameter in trained)


def scaled_names(module: nn.Module) -> Iterator[str]:
    """All names under which DDP meets weights in scaled precision, and codes of a checkpoint: as `named_parameters` has
    them, as they are where `torch.compile` stands between DDP and the module, and as DDP's reducer joins them from a
    module's name and a parameter's."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, (ScaledTensor, BlockCodes)):
            yield from (name, f"_orig_mod.{name}")
            if "." not in name:
                yield f".{name}"
