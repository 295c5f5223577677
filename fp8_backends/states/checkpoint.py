"""Save and load optimizers with scaled states.

A state dict holds the values of scaled states as plain BF16 or FP32 tensors, so that any program can read what is
saved. They become the same scaled values again: the grid of their own amax holds all of them. A state of a DTensor is
saved as a DTensor, which `torch.distributed.checkpoint` can shard anew. States that are shared out between the ranks
(levels O3 and O4 under DDP) are whole again for as long as a checkpoint is written (`whole_states`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..numerics.formats import FORMAT_OF
from ..numerics.scaled_tensor import ScaledTensor, quantize, tensor_amax_of
from ..numerics.sharded_tensor import dequantize_shards, is_distributed, local_part, with_local
from .levels import write_weight_shards
from .sharding import agree

MASTER = "master_weight"


# State dicts


def export_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Turn PyTorch's state dict of an optimizer into plain tensors. A weight beyond its own dtype (scaled FP16 that
    stands for BF16) is added as `master_weight`, so a resumed run is equal to the bit."""
    for key, p in _parameters_of(optimizer.param_groups, state_dict).items():
        if key not in state_dict["state"]:
            continue
        state, local = dict(state_dict["state"][key]), local_part(p)
        if isinstance(local, ScaledTensor) and local.master is None and p.dtype != torch.float32:
            state[MASTER] = p.detach()
        state_dict["state"][key] = {name: _exported(value, optimizer.fp8_unread) for name, value in state.items()}
    return state_dict


def _exported(value: torch.Tensor, unread: bool) -> torch.Tensor:
    """Return one state as it is saved. Scaled ones go to the CPU: as plain values they may find no room on a GPU. FP8
    values with a power of two as their scale are BF16 values, too."""
    if is_distributed(value):
        return dequantize_shards(value, torch.float32)
    if not isinstance(value, ScaledTensor):
        return value
    if unread:
        return torch.empty(value.shape, dtype=torch.float32, device="meta")
    values = value.exact(torch.float32).cpu()
    narrow = values.bfloat16()
    return narrow if torch.equal(narrow.float(), values) else values


def load_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], load: Callable[[dict], None]) -> None:
    """`ScaledStates.load_state_dict` of what `checks.check_states` let pass.

    Args:
        load: PyTorch's own `load_state_dict`. It gets everything but declared states and masters.
    """
    groups = list(optimizer.param_groups)
    heavy, light = {}, {}
    parameters = _parameters_of(groups, state_dict)
    for key, state in state_dict["state"].items():
        names = (*optimizer.fp8_declared.roles, *optimizer.fp8_declared.exact_states(parameters[key].shape), MASTER)
        heavy[key] = {name: state[name] for name in names if name in state}
        # copied: PyTorch would take over the step counter itself, and two optimizers would count in it
        light[key] = copy.deepcopy({name: value for name, value in state.items() if name not in heavy[key]})
    load({**state_dict, "state": light})
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    optimizer.param_groups[:] = groups
    for key, p in parameters.items():
        _load_heavy(optimizer, p, heavy.get(key, {}))


def _parameters_of(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> dict[Any, torch.Tensor]:
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return dict(zip(keys, [p for group in groups for p in group["params"]], strict=True))


@torch.no_grad()
def _load_heavy(optimizer: torch.optim.Optimizer, p: torch.Tensor, saved: dict[str, torch.Tensor]) -> None:
    for name in optimizer.fp8_declared.roles:
        if name in saved and optimizer.owns(p):
            optimizer.state[p][name] = stored_moment(p, saved[name], *optimizer.moment_format(p, name))
    for name in optimizer.fp8_declared.exact_states(p.shape):
        if name in saved and optimizer.owns(p):
            optimizer.state[p][name] = exact_state(p, saved[name])
    if MASTER in saved and isinstance(local_part(p), ScaledTensor):
        if is_distributed(p):
            write_weight_shards(p, _placed_as(p, saved[MASTER], torch.float32))
        else:
            p.copy_(_whole(saved[MASTER]))
    if not optimizer.owns(p):
        optimizer.state.pop(p, None)
    elif p in optimizer.state:
        optimizer.show_master(p)


def stored_moment(p: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, block_size: int) -> torch.Tensor:
    """A new moment of `p` from its values, which may be plain or scaled, whole or a DTensor. All ranks call it where
    `p` or `value` is a DTensor.

    Args:
        dtype, block_size: how the moment is stored, as `ScaledStates.moment_format` has it.
    """
    if not is_distributed(p):
        value = _whole(value)
    moment = local_part(value)
    stored_alike = isinstance(moment, ScaledTensor) and (moment._data.dtype, moment.block_size) == (dtype, block_size)
    if stored_alike and moment._data.is_contiguous() and _lies_as(value, p):
        moment = copy.deepcopy(moment.to(local_part(p).device))
    elif dtype not in FORMAT_OF:
        moment = local_part(_placed_as(p, value, dtype)).clone()
    else:
        local, amax = local_part(_placed_as(p, value, torch.float32)), None
        if is_distributed(p) and not block_size:
            (amax,) = agree([tensor_amax_of(local)], [p])
        moment = quantize(local, dtype, torch.float32, block_size, amax)
    if isinstance(moment, ScaledTensor):
        moment.partial, moment.is_state = is_distributed(p), True
    return with_local(p, moment)


def exact_state(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A new state of `p` that is FP32, and whole on each rank, from its values."""
    return _whole(value).to(local_part(p).device, torch.float32, copy=True)


def _placed_as(p: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return plain values of that dtype placed as `p` is, on its device: for a DTensor a DTensor."""
    if is_distributed(value):
        value = dequantize_shards(value, dtype)
        value = value if _lies_as(value, p) else value.redistribute(p.device_mesh, p.placements)
    elif isinstance(value, ScaledTensor):
        value = value.dequantize(dtype)
    if is_distributed(p) and not is_distributed(value):
        from torch.distributed.tensor import distribute_tensor  # half a second, for those who shard

        value = value.to(p.device_mesh.device_type, dtype)
        value = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
    return with_local(p, local_part(value).to(local_part(p).device, dtype).contiguous())


def _lies_as(value: torch.Tensor, p: torch.Tensor) -> bool:
    if not is_distributed(p) or not is_distributed(value):
        return is_distributed(p) == is_distributed(value)
    return (value.device_mesh, tuple(value.placements)) == (p.device_mesh, tuple(p.placements))


def _whole(value: torch.Tensor) -> torch.Tensor:
    return dequantize_shards(value, torch.float32).full_tensor() if is_distributed(value) else value


# States that are shared out between the ranks


@contextlib.contextmanager
def whole_states(optimizer: torch.optim.Optimizer, receives: bool, moments: bool) -> Iterator[None]:
    """Make the states of an optimizer whole inside, as `preparation.whole_states` says."""
    with _outermost(optimizer, receives) as weights:
        shared_out = set(map(id, weights))
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in shared_out:
                    _gather(optimizer, group, p, receives, moments)
        yield


@contextlib.contextmanager
def unread_states(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let `state_dict()` work inside, with placeholders: a loader asks for one whose values it does not read. State
    dicts that were looked at before they are loaded inside are not looked at again."""
    with _outermost(optimizer, receives=False) as weights:
        for p in weights:
            _put_placeholder(p)
        yield


@contextlib.contextmanager
def _outermost(optimizer: torch.optim.Optimizer, receives: bool) -> Iterator[list[torch.Tensor]]:
    """Let the optimizer give a state dict inside, and share its states out again at the end. Yield the weights with
    shared-out states; none inside another such context."""
    if optimizer.fp8_whole:
        yield []
        return
    shards = any(is_distributed(p) for group in optimizer.param_groups for p in group["params"])
    optimizer.fp8_whole, optimizer.fp8_unread = True, not (receives or shards)  # each rank saves its own shards
    weights = [] if optimizer.fp8_owners is None else optimizer.fp8_owners.weights
    try:
        yield weights
    finally:
        optimizer.fp8_whole = optimizer.fp8_unread = optimizer.fp8_checked = False
        optimizer.forget_others()
        for p in weights:
            optimizer.fp8_owners.drop(p)
            p.stored.gathered = False


def _put_placeholder(p: torch.Tensor) -> None:
    if p.elsewhere is not None:
        p.elsewhere = p.elsewhere._replace(unread=True)


@torch.no_grad()
def _gather(optimizer: torch.optim.Optimizer, group: dict, p: torch.Tensor, receives: bool, moments: bool) -> None:
    """Send one weight's moments, and its master or residual, from its owner to all ranks. A rank that does not receive
    has room for one weight's at a time."""
    owners, state = optimizer.fp8_owners, optimizer.state.get(p, {})
    owners.drop(p)
    if owners.owns(p):
        rest, step = p.rest, state["step"].clone().cpu() if "step" in state else torch.tensor(-1.0, dtype=torch.float32)
    else:
        rest, step = torch.empty(p.shape, dtype=p.elsewhere.storage), torch.empty((), dtype=torch.float32)
        if rest.dtype != torch.int8:  # a master, and no residual
            rest = ScaledTensor(rest, torch.empty((), dtype=torch.float32), p.dtype)
    rooms = _rooms(optimizer, group, p) if moments else {}
    gathered = {name: state.get(name, room) for name, room in rooms.items()}
    owners.send_to_all(p, [step, rest, *gathered.values()])
    p.stored.gathered = True
    if owners.owns(p):
        return
    if not receives:
        _put_placeholder(p)
        return
    p.rest, p.elsewhere = rest, None
    if moments and step >= 0:
        optimizer.state[p] = {"step": optimizer.new_counter(group, p).copy_(step), **gathered}
        optimizer.show_master(p)


def _rooms(optimizer: torch.optim.Optimizer, group: dict, p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Room for each state, on the CPU: a GPU that owns some of the weights has no room for the states of all."""
    rooms = {}
    for name in optimizer.roles_of(group):
        dtype, block_size = optimizer.moment_format(p, name)
        rooms[name] = quantize(torch.zeros(p.shape, dtype=torch.float32), dtype, torch.float32, block_size)
    exact = optimizer.fp8_declared.exact_states(p.shape)
    return rooms | {name: torch.zeros(shape, dtype=torch.float32) for name, shape in exact.items()}
