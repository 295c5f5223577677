"""Masters and Adam states that are shared out between the ranks, whole again for as long as a checkpoint is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..numerics.scaled_tensor import ScaledTensor, quantize
from .adamw import MASTER, MOMENTS, Owners, ScaledStates, counter


@contextlib.contextmanager
def whole_states(optimizer: ScaledStates, receives: bool, moments: bool) -> Iterator[None]:
    """`preparation.whole_states`, of an optimizer whose states are shared out."""
    with _outermost(optimizer) as outermost:
        if outermost:
            for group in optimizer.param_groups:
                for p in _shared_out(optimizer, group):
                    _gather(optimizer, group, p, receives, moments)
        yield


@contextlib.contextmanager
def unread_states(optimizer: ScaledStates) -> Iterator[None]:
    """Around loading, which asks for a state dict whose values it does not read: there are placeholders inside."""
    with _outermost(optimizer) as outermost:
        if outermost:
            for p in optimizer.fp8_owners.weights:
                _leave_unread(optimizer.fp8_owners, p)
        yield


@contextlib.contextmanager
def _outermost(optimizer: ScaledStates) -> Iterator[bool]:
    """Inside, the optimizer gives a state dict; at the end its states are shared out again. False inside of another
    one, where nothing is to be done."""
    if optimizer.fp8_whole:
        yield False
        return
    optimizer.fp8_whole = True
    try:
        yield True
    finally:
        optimizer.fp8_whole = False
        optimizer.forget_others()
        for p in optimizer.fp8_owners.weights:
            optimizer.fp8_owners.drop(p)


def _leave_unread(owners: Owners, p: torch.Tensor) -> None:
    if not owners.owns(p):
        p.elsewhere = p.elsewhere._replace(unread=True)


def _shared_out(optimizer: ScaledStates, group: dict) -> list[torch.Tensor]:
    known = set(map(id, optimizer.fp8_owners.weights))
    return [p for p in group["params"] if id(p) in known]


@torch.no_grad()
def _gather(optimizer: ScaledStates, group: dict, p: torch.Tensor, receives: bool, moments: bool) -> None:
    """Of one weight, from its owner. A rank that does not receive has room for one weight's at a time."""
    owners, state = optimizer.fp8_owners, optimizer.state.get(p, {})
    owners.drop(p)
    if owners.owns(p):
        master, step = p.master, state["step"].clone().cpu() if "step" in state else torch.tensor(-1.0)
    else:
        data = torch.empty(p.shape, dtype=p.elsewhere.storage)
        master, step = ScaledTensor(data, torch.empty(()), p.dtype), torch.empty(())
    kept = {name: state[name] if name in state else _room(optimizer, p, name) for name in MOMENTS if moments}
    owners.send_to_all(p, [step, master, *kept.values()])
    if owners.owns(p):
        return
    if not receives:
        _leave_unread(owners, p)
        return
    p.master, p.elsewhere = master, None
    if moments and step >= 0:
        optimizer.state[p] = {"step": counter(group, p).copy_(step), **kept, MASTER: master}


def _room(optimizer: ScaledStates, p: torch.Tensor, name: str) -> torch.Tensor:
    """For a moment, on the CPU: a GPU that owns a part has no room for all."""
    dtype, block = optimizer._format(p, name)
    return quantize(torch.zeros(p.shape), dtype, torch.float32, block)
