"""What a loaded state dict of an optimizer must be, so that training can go on from it. It is looked at before anything
changes: a state dict that is refused leaves the optimizer as it was."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from ..errors import FP8BackendError
from ..numerics.faults import COUNT, FINITE, FINITE_IN_FP64, NOT_NEGATIVE, NOT_NEGATIVE_IN_FP64, POSITIVE, Faults, Range
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
"""Role of a state -> what it may hold in FP32, and where its parameter is in FP64."""
_CHOICES = ("foreach", "fused")
"""True, False, or None for PyTorch's own choice."""
_OF_ANOTHER = "The checkpoint is of another model or optimizer"
_LOST = (
    "Training had diverged when this was saved, or the file is damaged. Load an earlier checkpoint; or load the "
    "model's weights alone, and go on with a fresh optimizer"
)


def check_states(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], names: Mapping[int, str] | None = None
) -> None:
    """Refuse a state dict that this optimizer cannot go on from. All ranks call it where parameters are
    DTensors, and all refuse what one does.

    Args:
        names: names of parameters by their id, for parameters that the groups have no `param_names` for.

    Raises:
        FP8BackendError: names the parameter and its state, and says what is wrong and what to do. Nothing has changed.
    """
    fault = _fault(optimizer, state_dict, names or {})
    shards = [p for group in optimizer.param_groups for p in group["params"] if is_distributed(p)]
    refused = agree([torch.tensor(float(fault is not None))] * len(shards), shards)
    if fault is None and any(map(bool, refused)):
        fault = "another rank refuses its part of it, and says why"
    if fault is not None:
        raise FP8BackendError(f"the optimizer's state cannot be loaded, and nothing was changed: {fault}")


def check_options(group: Mapping[str, Any], refused: Sequence[str]) -> None:
    """Raise `FP8BackendError` for options that scaled weights and states do not take."""
    if fault := _refused_option(group, refused):
        raise FP8BackendError(fault)


def _refused_option(group: Mapping[str, Any], refused: Sequence[str]) -> str | None:
    asked = [option for option in refused if group.get(option)]
    return f"{asked[0]}=True is not supported with scaled weights and states: leave it out" if asked else None


def _fault(optimizer: torch.optim.Optimizer, state_dict: Any, names: Mapping[int, str]) -> str | None:
    """The first thing that is wrong."""
    if fault := _fault_of_structure(optimizer.param_groups, state_dict):
        return fault
    faults = Faults(_LOST)
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
        if fault := _refused_option(saved, optimizer.fp8_declared.refused):
            return fault
        _look_at_options(faults, optimizer, saved, f"parameter group {number}")
        known = saved.get("param_names") or own.get("param_names") or [names.get(id(p)) for p in own["params"]]
        for key, p, name in zip(saved["params"], own["params"], known, strict=True):
            named = f"{name}, of shape" if name else "of shape"
            state, declared = state_dict["state"].get(key), _declared_states(optimizer, saved, p)
            _look_at_state(faults, p, state, declared, f"parameter {key} ({named} {tuple(p.shape)})")
    return faults.first()


def _fault_of_structure(own: list[dict[str, Any]], state_dict: Any) -> str | None:
    """What is wrong before any state is looked at: groups, their parameters, and what has a state."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        return "it is no state dict of an optimizer, which has state and param_groups"
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return "its param_groups are no list of dicts. The file is damaged"
    if len(groups) != len(own):
        return f"it has {counted(len(groups), 'parameter group')}, and the optimizer {len(own)}. {_OF_ANOTHER}"
    keys = []
    for number, (group, of_own) in enumerate(zip(groups, own, strict=True)):
        saved = group.get("params")
        if not isinstance(saved, list) or not all(isinstance(key, Hashable) for key in saved):
            return f"parameter group {number} has no list of parameters. The file is damaged"
        if len(saved) != len(of_own["params"]):
            counts = f"{counted(len(saved), 'parameter')}, and the optimizer's {len(of_own['params'])}"
            return f"parameter group {number} has {counts}. {_OF_ANOTHER}"
        named = group.get("param_names", saved)
        if not isinstance(named, list) or len(named) != len(saved):
            return f"param_names of parameter group {number} are not a name for each parameter. The file is damaged"
        keys += saved
    known = set(keys)
    if len(known) != len(keys):
        return "its groups name a parameter twice. The file is damaged"
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        return "its state is no dict of dicts. The file is damaged"
    if unknown := [key for key in states if key not in known]:
        return f"it has a state of parameter {unknown[0]!r}, which is in none of its groups. The file is damaged"
    return None


def _look_at_options(faults: Faults, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], where: str) -> None:
    """Look at what is saved of a group's options: each must be of the kind that the optimizer's own default is."""
    ranges = optimizer.fp8_declared.ranges
    for name, default in optimizer.defaults.items():
        value, allowed = group.get(name), ranges.get(name, FINITE)
        if name in _CHOICES or isinstance(default, bool):
            value = group.get(name, False)
            if not isinstance(value, bool) and not (name in _CHOICES and value is None):
                faults.add(f"{name} of {where} is {value!r}, and must be True or False")
        elif isinstance(default, (tuple, list)):
            if isinstance(value, (tuple, list)) and len(value) == len(default):
                for number, own in zip(value, default, strict=True):
                    if number is not None or own is not None:
                        _look_at_number(faults, number, allowed, f"{name} of {where}")
            else:
                faults.add(f"{name} of {where} are not {counted(len(default), 'number')}. {_OF_ANOTHER}")
        elif isinstance(default, (Real, torch.Tensor)):
            _look_at_number(faults, value, allowed, f"{name} of {where}")


def _look_at_number(faults: Faults, number: Any, allowed: Range, name: str) -> None:
    is_tensor = isinstance(number, torch.Tensor)
    number = local_part(number) if is_tensor else number
    if is_tensor and not number.dim() and not (number.is_complex() or number.dtype == torch.bool or number.is_meta):
        faults.look_at(number, allowed, name)
    elif not is_tensor and isinstance(number, Real) and not isinstance(number, bool):
        faults.look_at(float(number), allowed, name)
    else:
        described = f"a tensor of {number.dtype} {tuple(number.shape)}" if is_tensor else repr(number)
        faults.add(f"{name} is {described}, and must be one number. {_OF_ANOTHER}")


class _Declared(NamedTuple):
    """A state that a parameter of a saved group has."""

    shape: Sequence[int]
    allowed: Range


def _declared_states(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: torch.Tensor) -> dict[str, Any]:
    """The states that a parameter of a saved group must have, once it has any."""
    declared, is_wide = optimizer.fp8_declared, p.is_complex() or p.dtype == torch.float64
    found = {STEP: None} if declared.counts else {}
    found |= {name: _Declared(p.shape, _MOMENTS[role][is_wide]) for name, role in optimizer.roles_of(group).items()}
    exact = declared.exact_states(p.shape)
    return found | {name: _Declared(shape, _MOMENTS["second_moment"][is_wide]) for name, shape in exact.items()}


def _look_at_state(
    faults: Faults, p: torch.Tensor, state: Mapping[str, Any] | None, declared: dict[str, Any], where: str
) -> None:
    """Look at all that is saved of one parameter. One that has not been stepped has no state."""
    if not state:
        return
    if missing := [name for name in declared if name not in state]:
        faults.add(f"{where} has no {' and no '.join(missing)}. {_OF_ANOTHER}")
        return
    if STEP in state:
        _look_at_number(faults, state[STEP], COUNT, f"{STEP} of {where}")
    tensors = {name: each for name, each in declared.items() if each is not None}
    if MASTER in state and isinstance(local_part(p), ScaledTensor):
        tensors[MASTER] = _Declared(p.shape, FINITE)
    for name, (shape, allowed) in tensors.items():
        _look_at_tensor(faults, p, state[name], shape, allowed, f"{name} of {where}")


def _look_at_tensor(
    faults: Faults, p: torch.Tensor, value: Any, shape: Sequence[int], allowed: Range, name: str
) -> None:
    """Look at a state that is a tensor, plain or scaled, whole or a DTensor."""
    if not isinstance(value, torch.Tensor):
        faults.add(f"{name} is {type(value).__name__} and no tensor. The file is damaged")
        return
    local = local_part(value)
    scaled = isinstance(local, ScaledTensor)
    dtypes = (p.dtype,) if p.is_complex() else _PLAIN
    if value.shape != torch.Size(shape):
        faults.add(f"{name} was saved with shape {tuple(value.shape)}. {_OF_ANOTHER}")
    elif local.layout != torch.strided or local.is_quantized or (not scaled and local.dtype not in dtypes):
        faults.add(f"{name} is a tensor of {local.dtype} ({local.layout}), and must hold floating-point numbers")
    elif local.is_meta:
        faults.add(f"{name} holds no values: it is on the meta device, as on a rank that does not save")
    elif not scaled:
        faults.look_at(local, allowed, name)
    elif local.accumulates or local.elsewhere is not None or local.rest is not None or local._data.dtype not in _STORED:
        faults.add(f"{name} is a scaled tensor of another kind than optimizer states are. The file is damaged")
    else:
        faults.look_at(local._scale_inv, POSITIVE, f"the scale of {name}")
        faults.look_at(local.exact(torch.float32), allowed, name)
