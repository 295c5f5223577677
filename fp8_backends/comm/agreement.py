"""Scaling states that are equal on all ranks: what a stateful rule (delayed, window) has recorded is agreed on.

Each rank records the amax values of its own data. Were its scales to follow from these alone, the same weight would be
multiplied in different codes on different ranks. So after each backward pass whose gradients travel, one all-reduce
takes the largest of every amax in the history and of the counters, and the smallest of every scale, which belongs to
the largest amax. A NaN counts as inf: MAX does not see it.

The whole state travels and not the newest amax alone: microbatches that did not travel may have rolled it differently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ..numerics.scaling import HISTORY, ROLLS, SCALE
from .backward import BackwardPass

States = Callable[[], list[torch.Tensor]]
"""Returns the live states, int32 [3, 2 + history length] each, in the same order on every rank."""


class Agreement:
    """The part of a backward pass that agrees on scaling states at its end."""

    def __init__(self, states: States, group: dist.ProcessGroup | None) -> None:
        self.states, self.group = states, group

    def finish(self, contributes: bool = True) -> None:
        agree(self.states(), self.group, contributes)

    def abandon(self) -> None:
        pass


def connect(
    module: nn.Module, states: States, group: dist.ProcessGroup | None, travels: Callable[[nn.Module], bool]
) -> None:
    """Let `states` be agreed on after each backward pass of `module` for which `travels(module)` held in forward.

    Idempotent. Ranks that call it have equal parts of one model; `group` is used by nothing else at that time.
    """
    backward = BackwardPass.of(module)
    if backward is None:
        backward = BackwardPass(travels)
        module.register_forward_hook(backward)
    if not any(isinstance(part, Agreement) for part in backward.parts):
        backward.parts.append(Agreement(states, group))


@torch.no_grad()
def agree(states: list[torch.Tensor], group: dist.ProcessGroup | None = None, contributes: bool = True) -> None:
    """Make the states equal on all ranks, in place: MAX of histories and counters, MIN of scales. One all-reduce.

    Args:
        states: int32 [3, 2 + history length] each, as in `numerics.scaling`; of the same shapes on every rank.
        group: the ranks (default: all).
        contributes: False: this rank takes over what the others agree on.
    """
    if not states:
        return
    message = torch.cat([_message(state).flatten() for state in states])
    if not contributes:
        message.fill_(float("-inf"))
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    parts = message.split([state.numel() for state in states])
    torch._foreach_copy_(states, [_state(part.view(s.shape)) for part, s in zip(parts, states, strict=True)])


def _message(state: torch.Tensor) -> torch.Tensor:
    """FP32 of the state's shape, whose maximum over ranks means agreement."""
    message = state.view(torch.float32).clone()
    message.select(-1, SCALE).neg_()
    message.select(-1, ROLLS).copy_(state.select(-1, ROLLS))  # as a number: exact up to 2**24
    history = message[..., HISTORY:]
    history.masked_fill_(history.isnan(), float("inf"))
    return message


def _state(message: torch.Tensor) -> torch.Tensor:
    state = message.clone()
    state.select(-1, SCALE).neg_()
    state = state.view(torch.int32)
    state.select(-1, ROLLS).copy_(message.select(-1, ROLLS))
    return state
