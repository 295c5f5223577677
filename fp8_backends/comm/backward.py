"""Detect begin and end of backward passes with a reduction, and agree on scaling states at their
end.

DDP and FSDP2 decide about a reduction in forward: `no_sync` or `set_requires_gradient_sync` hold
for its backward. `BackwardPass` is a forward hook of the wrapped model. It hooks the outputs, to
notice the first gradient, and queues a callback of autograd's engine for the end of the pass: on
every rank, even if no relevant weight got a gradient.

Ranks with scales from their own amaxes would cast the same weight to different codes. One
all-reduce makes the states of a stateful rule equal: the maximum of amaxes (NaN counts as inf) and
counters, the minimum of scales. The whole state travels, as microbatches without a reduction may
have rolled it differently.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..formats.scaling import ROLLS, SCALE
from ..tensors.sharded_tensor import agreed_over, is_distributed
from ..torch_tools.backward_end import call_when_backward_ends, inside_backward
from ..torch_tools.modules import TemporaryHook

States = Callable[[], list[torch.Tensor]]
"""Return the live scaling states, int32 [3, 2 + history length] each, in the same order on every
rank."""


class BackwardPass(TemporaryHook):
    """Finish collectives after each backward pass that reduces gradients: a forward hook of a
    wrapped model. DDP has a flag for it; other wrappers reduce in every pass."""

    def __init__(self) -> None:
        self.collectives: list[Any] = []
        """Joint work of the ranks, with `finish(contributes)`, False on a rank without inputs, and
        `reset()`."""
        self._forget_pass()
        # not a decorator: importing the compiler takes a second
        self._after_forward = torch.compiler.disable(_after_forward)

    @classmethod
    def find(cls, module: nn.Module) -> BackwardPass | None:
        """Return the hook of a module, if any."""
        return next(
            (hook for hook in module._forward_hooks.values() if isinstance(hook, cls)), None
        )

    @staticmethod
    def of(modules: Sequence[nn.Module]) -> BackwardPass:
        """Return the hook that these modules share, registered by the first call."""
        backward = next(filter(None, map(BackwardPass.find, modules)), None) or BackwardPass()
        for module in modules:
            if BackwardPass.find(module) is None:
                module.register_forward_hook(backward)
        return backward

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._after_forward(self, module, output)

    def begin(self, gradient: torch.Tensor | None = None) -> None:
        """Note the beginning of a pass, from inside it. Idempotent."""
        if not self.running:
            call_when_backward_ends(self._end)
            self.running = True

    def begin_if_triggered(self, gradient: torch.Tensor | None = None) -> None:
        if self.triggered:
            self.begin()

    @property
    def triggered(self) -> bool:
        """True if DDP itself reduces after a forward under `no_sync`: Accelerate's
        `trigger_sync_in_backward` sets both flags; a forward under `no_sync` clears the second."""
        ddp = self.stayed()
        return ddp is not None and ddp.require_backward_grad_sync and ddp.require_forward_param_sync

    def _end(self) -> None:
        try:
            for collective in self.collectives:
                collective.finish()
        except BaseException:
            self.reset()
            raise
        self._forget_pass()

    def _forget_pass(self) -> None:
        self.running = False
        self.expected = False
        """The gradients of the latest forward are reduced."""
        self.stayed: Callable[[], nn.Module | None] = _nowhere
        """The module, if the gradients of its latest forward are not reduced."""

    def reset(self) -> None:
        """Forget a failed backward pass."""
        self._forget_pass()
        for collective in self.collectives:
            collective.reset()


def _after_forward(backward: BackwardPass, module: nn.Module, output: Any) -> None:
    """Hook the outputs of a forward. Not a method: the object keeps the wrapped function, but not
    vice versa."""
    if not torch.is_grad_enabled():
        return
    if backward.running and not inside_backward():
        backward.reset()  # outside any backward, so the last one failed
    backward.expected = getattr(module, "require_backward_grad_sync", True)
    backward.stayed = _nowhere if backward.expected else weakref.ref(module)
    for tensor in _tensors(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(
                backward.begin if backward.expected else backward.begin_if_triggered
            )


def _nowhere() -> None:
    """A reference to no module."""


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a forward's output, in the containers known to DDP."""
    members = ()
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        members = output.values()
    elif isinstance(output, (list, tuple)):
        members = output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        members = (getattr(output, field.name) for field in dataclasses.fields(output))
    for member in members:
        yield from _tensors(member)


# Scaling states


class Agreement:
    """Agree on scaling states in one group of ranks after the other: one of the `collectives`."""

    def __init__(self, states: States, groups: Sequence[dist.ProcessGroup]) -> None:
        self.states, self.groups = states, groups

    def finish(self, contributes: bool = True) -> None:
        for group in self.groups:
            agree_on_scaling(self.states(), group, contributes)

    def reset(self) -> None:
        pass


def agree_after_backward(
    modules: Sequence[nn.Module], states: States, groups: Sequence[dist.ProcessGroup]
) -> None:
    """Agree on `states` after each backward pass of one of `modules` that reduces gradients.
    Idempotent.

    Ranks that call it have parts of one model; `groups` are unused at that time. The groups of a
    mesh together reach all ranks of the model; None is all processes.
    """
    collectives = BackwardPass.of(modules).collectives
    agreement = next((one for one in collectives if isinstance(one, Agreement)), None)
    if agreement is None:
        collectives.append(Agreement(states, groups))
    else:
        agreement.groups = groups  # FSDP2 may have sharded a tensor-parallel model since


def mesh_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups that, in turn, connect all ranks of the model's DTensors; none without
    DTensors."""
    meshes = (p.device_mesh for p in model.parameters() if is_distributed(p))
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if mesh is None:
        return []
    if mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]
    return [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]


@torch.no_grad()
def agree_on_scaling(
    states: list[torch.Tensor], group: dist.ProcessGroup | None = None, contributes: bool = True
) -> None:
    """Make scaling states equal on all ranks, in place, with one all-reduce: MAX of histories and
    counters, MIN of scales.

    Args:
        states: int32 [3, 2 + history length] each, as in `formats.scaling`; the same shapes on
            every rank.
        group: the ranks (default: all).
        contributes: False: this rank copies the agreement of the others.
    """
    if not states:
        return
    alike: dict[int, list[torch.Tensor]] = {}
    for state in states:
        alike.setdefault(state.shape[-1], []).append(state)
    tables = [
        torch.cat([state.view(-1, length) for state in members])
        for length, members in alike.items()
    ]
    message = torch.cat([_message(table).flatten() for table in tables])
    if not contributes:
        message.fill_(float("-inf"))
    message = agreed_over(message, [group])
    for members, table, part in zip(
        alike.values(), tables, message.split(list(map(torch.numel, tables))), strict=True
    ):
        rows = _state(part.view(table.shape)).flatten().split([state.numel() for state in members])
        torch._foreach_copy_(
            members, [row.view(state.shape) for row, state in zip(rows, members, strict=True)]
        )


def _message(state: torch.Tensor) -> torch.Tensor:
    """Convert a state to FP32 numbers of its shape for an agreement by maximum."""
    message = state.view(torch.float32).clone()
    message.select(-1, SCALE).neg_()
    message.select(-1, ROLLS).copy_(state.select(-1, ROLLS))  # as a number: exact up to 2**24
    return message


def _state(message: torch.Tensor) -> torch.Tensor:
    state = message.clone()
    state.select(-1, SCALE).neg_()
    state = state.view(torch.int32)
    state.select(-1, ROLLS).copy_(message.select(-1, ROLLS))
    return state
