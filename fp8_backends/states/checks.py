"""Refuse a saved state dict of an optimizer from which training could not go on, before anything changes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from ..errors import FP8BackendError
from ..numerics.faults import (
    COUNT,
    FINITE,
    FINITE_IN_FP64,
    NOT_NEGATIVE,
    NOT_NEGATIVE_IN_FP64,
    POSITIVE,
    Range,
    check_values,
)
from ..numerics.formats import FORMAT_OF
from ..numerics.scaled_tensor import ScaledTensor
from ..numerics.sharded_tensor import is_distributed, local_part
from ..words import counted
from .checkpoint import MASTER
from .sharding import agree

STEP = "step"
_STORED = (*FORMAT_OF, torch.float32)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOMENTS = {
    "first_moment": (FINITE, FINITE_IN_FP64),
    "direction": (FINITE, FINITE_IN_FP64),
    "second_moment": (NOT_NEGATIVE, NOT_NEGATIVE_IN_FP64),
}
"""Role of a state -> its range in FP32, and where its parameter is in FP64."""
_CHOICES = ("foreach", "fused")
"""Options that are True, False, or None for PyTorch's own choice."""
_OF_ANOTHER = "The checkpoint is of another model or optimizer"
_DAMAGED = "The file is damaged"
_LOST = (
    "Training had diverged when this was saved, or the file is damaged. Load an earlier checkpoint; or load the "
    "model's weights alone, and go on with a fresh optimizer"
)


def check_states(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], names: Mapping[int, str] | None = None
) -> None:
    """Refuse a state dict from which this optimizer cannot go on. All ranks call it where parameters are DTensors, and
    all refuse if one does.

    Args:
        names: names of parameters by their id, for groups without `param_names`.

    Raises:
        FP8BackendError: names the parameter and its state, and says what is wrong and what to do. Nothing has changed.
    """
    fault = None
    try:
        _check(optimizer, state_dict, names or {})
    except FP8BackendError as error:
        fault = str(error)
    shards = [p for group in optimizer.param_groups for p in group["params"] if is_distributed(p)]
    refused = agree([torch.tensor(float(fault is not None))] * len(shards), shards)
    if fault is None and any(map(bool, refused)):
        fault = "another rank refuses its part of it, and says why"
    if fault is not None:
        raise FP8BackendError(f"the optimizer's state cannot be loaded, and nothing was changed: {fault}")


def check_options(group: Mapping[str, Any], refused: Sequence[str]) -> None:
    """Raise `FP8BackendError` for options that scaled weights and states do not take."""
    if asked := [option for option in refused if group.get(option)]:
        raise FP8BackendError(f"{asked[0]}=True is not supported with scaled weights and states: leave it out")


def _check(optimizer: torch.optim.Optimizer, state_dict: Any, names: Mapping[int, str]) -> None:
    _check_structure(optimizer.param_groups, state_dict)
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
        check_options(saved, optimizer.fp8_declared.refused)
        _check_numbers(optimizer, saved, f"parameter group {number}")
        known = saved.get("param_names") or own.get("param_names") or [names.get(id(p)) for p in own["params"]]
        for key, p, name in zip(saved["params"], own["params"], known, strict=True):
            if state := state_dict["state"].get(key):  # a parameter without a step has none
                named = f"{name}, of shape" if name else "of shape"
                _check_state(optimizer, saved, p, state, f"parameter {key} ({named} {tuple(p.shape)})")


def _check_structure(own: list[dict[str, Any]], state_dict: Any) -> None:
    """Check groups, their parameters, and which of them have a state."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise FP8BackendError("it is no state dict of an optimizer, which has state and param_groups")
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise FP8BackendError(f"its param_groups are no list of dicts. {_DAMAGED}")
    if len(groups) != len(own):
        counts = f"{counted(len(groups), 'parameter group')}, and the optimizer {len(own)}"
        raise FP8BackendError(f"it has {counts}. {_OF_ANOTHER}")
    keys = []
    for number, (group, of_own) in enumerate(zip(groups, own, strict=True)):
        saved = group.get("params")
        if not isinstance(saved, list) or not all(isinstance(key, Hashable) for key in saved):
            raise FP8BackendError(f"parameter group {number} has no list of parameters. {_DAMAGED}")
        if len(saved) != len(of_own["params"]):
            counts = f"{counted(len(saved), 'parameter')}, and the optimizer's {len(of_own['params'])}"
            raise FP8BackendError(f"parameter group {number} has {counts}. {_OF_ANOTHER}")
        named = group.get("param_names", saved)
        if not isinstance(named, list) or len(named) != len(saved):
            raise FP8BackendError(
                f"param_names of parameter group {number} are not a name for each parameter. {_DAMAGED}"
            )
        keys += saved
    known = set(keys)
    if len(known) != len(keys):
        raise FP8BackendError(f"its groups name a parameter twice. {_DAMAGED}")
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise FP8BackendError(f"its state is no dict of dicts. {_DAMAGED}")
    if unknown := [key for key in states if key not in known]:
        raise FP8BackendError(f"it has a state of parameter {unknown[0]!r}, which is in none of its groups. {_DAMAGED}")


def _check_numbers(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], where: str) -> None:
    """Check a group's saved options: each must be of the kind of the optimizer's own default."""
    for name, default in optimizer.defaults.items():
        value, allowed = group.get(name), optimizer.fp8_declared.ranges.get(name, FINITE)
        if name in _CHOICES or isinstance(default, bool):
            value = group.get(name, False)
            if not isinstance(value, bool) and not (name in _CHOICES and value is None):
                raise FP8BackendError(f"{name} of {where} is {value!r}, and must be True or False")
        elif isinstance(default, (tuple, list)):
            if not isinstance(value, (tuple, list)) or len(value) != len(default):
                raise FP8BackendError(f"{name} of {where} are not {counted(len(default), 'number')}. {_OF_ANOTHER}")
            for number, own in zip(value, default, strict=True):
                if number is not None or own is not None:
                    _check_number(number, allowed, f"{name} of {where}")
        elif isinstance(default, (Real, torch.Tensor)):
            _check_number(value, allowed, f"{name} of {where}")


def _check_number(number: Any, allowed: Range, name: str) -> None:
    is_tensor = isinstance(number, torch.Tensor)
    number = local_part(number) if is_tensor else number
    if is_tensor and not number.dim() and not (number.is_complex() or number.dtype == torch.bool or number.is_meta):
        check_values(number, allowed, name, _LOST)
    elif not is_tensor and isinstance(number, Real) and not isinstance(number, bool):
        check_values(float(number), allowed, name, _LOST)
    else:
        described = f"a tensor of {number.dtype} {tuple(number.shape)}" if is_tensor else repr(number)
        raise FP8BackendError(f"{name} is {described}, and must be one number. {_OF_ANOTHER}")


def _check_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: torch.Tensor, state: Mapping[str, Any], where: str
) -> None:
    """Check all that is saved of one parameter against the declaration of its optimizer."""
    declared, is_wide = optimizer.fp8_declared, p.is_complex() or p.dtype == torch.float64
    exact = declared.exact_states(p.shape)
    tensors = {name: (p.shape, _MOMENTS[role][is_wide]) for name, role in optimizer.roles_of(group).items()}
    tensors |= {name: (shape, _MOMENTS["second_moment"][is_wide]) for name, shape in exact.items()}
    if missing := [name for name in (*[STEP] * declared.counts, *tensors) if name not in state]:
        raise FP8BackendError(f"{where} has no {' and no '.join(missing)}. {_OF_ANOTHER}")
    if STEP in state:
        _check_number(state[STEP], COUNT, f"{STEP} of {where}")
    if MASTER in state and isinstance(local_part(p), ScaledTensor):
        tensors[MASTER] = (p.shape, FINITE)
    for name, (shape, allowed) in tensors.items():
        _check_tensor(p, state[name], shape, allowed, f"{name} of {where}")


def _check_tensor(p: torch.Tensor, value: Any, shape: Sequence[int], allowed: Range, name: str) -> None:
    """Check a state that is a tensor, plain or scaled, whole or a DTensor."""
    if not isinstance(value, torch.Tensor):
        raise FP8BackendError(f"{name} is {type(value).__name__} and no tensor. {_DAMAGED}")
    local = local_part(value)
    scaled = isinstance(local, ScaledTensor)
    dtypes = (p.dtype,) if p.is_complex() else _PLAIN
    if value.shape != torch.Size(shape):
        raise FP8BackendError(f"{name} was saved with shape {tuple(value.shape)}. {_OF_ANOTHER}")
    if local.layout != torch.strided or local.is_quantized or (not scaled and local.dtype not in dtypes):
        described = f"a tensor of {local.dtype} ({local.layout})"
        raise FP8BackendError(f"{name} is {described}, and must hold floating-point numbers")
    if local.is_meta:
        raise FP8BackendError(f"{name} holds no values: it is on the meta device, as on a rank that does not save")
    if scaled:
        if (
            local.accumulates
            or local.elsewhere is not None
            or local.rest is not None
            or local._data.dtype not in _STORED
        ):
            raise FP8BackendError(f"{name} is a scaled tensor of another kind than optimizer states are. {_DAMAGED}")
        check_values(local._scale_inv, POSITIVE, f"the scale of {name}", _LOST)
    check_values(local.exact(torch.float32) if scaled else local, allowed, name, _LOST)
