"""When a backward pass whose gradients travel between ranks begins and ends, and the scaling states that ranks agree on
at its end.

DDP and FSDP2 decide in forward what travels: what `no_sync` or `set_requires_gradient_sync` say there holds for its
backward. `BackwardPass` is a forward hook of the wrapped model. It hooks the outputs, so that it notices the pass as
soon as their first gradient is there, and lets autograd's engine call back when the pass is over: on every rank, also
where no weight of interest got a gradient.

Scaling states of a stateful rule (delayed, window) are made equal on all ranks then. Each rank records the amax values
of its own data. If its scales followed from these alone, the same weight would be multiplied in different codes on
different ranks. So one all-reduce takes the largest of every amax in the history and of the counters, and the smallest
of every scale, which belongs to the largest amax. A NaN counts as inf: MAX does not see it. The whole state travels and
not the newest amax alone: microbatches that did not travel may have rolled it differently.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..numerics.engine import call_when_backward_ends, inside_backward
from ..numerics.modules import TemporaryHook
from ..numerics.scaling import ROLLS, SCALE
from ..numerics.sharded_tensor import agreed_over, is_distributed

States = Callable[[], list[torch.Tensor]]
"""Returns the live scaling states, int32 [3, 2 + history length] each, in the same order on every rank."""


class Collective(Protocol):
    """What the ranks do together in such a backward pass: the same collectives, in the same order, on all ranks."""

    def finish(self, contributes: bool = True) -> None:
        """End it, at the end of the pass. `contributes=False`: on a rank that has run out of inputs."""

    def reset(self) -> None:
        """Forget what is in flight: the pass failed before its end."""


class BackwardPass(TemporaryHook):
    """Forward hook of a wrapped model. When a backward pass whose gradients travel ends, its collectives finish.

    Args:
        travels: says of the module whether the gradients of the forward that has just run will travel.
    """

    def __init__(self, travels: Callable[[nn.Module], bool]) -> None:
        self.travels = travels
        self.collectives: list[Collective] = []
        """In the order in which they finish."""
        self.expected = False
        """Whether the gradients of the last forward travel."""
        self.stayed: Callable[[], nn.Module | None] = _nowhere
        """The module whose last forward said that its gradients stay at home."""
        self.running = False
        # not a decorator, since importing the compiler takes a second
        self._after_forward = torch.compiler.disable(_after_forward)

    @classmethod
    def find(cls, module: nn.Module) -> BackwardPass | None:
        """The one that is installed on a module."""
        return next((hook for hook in module._forward_hooks.values() if isinstance(hook, cls)), None)

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._after_forward(self, module, output)

    def begin(self, gradient: torch.Tensor | None = None) -> None:
        """Note, from inside it, that the pass has begun. Repeating it does nothing."""
        if not self.running:
            call_when_backward_ends(self._end)
            self.running = True

    def begin_if_triggered(self, gradient: torch.Tensor | None = None) -> None:
        if self.triggered:
            self.begin()

    @property
    def triggered(self) -> bool:
        """Whether gradients travel although the last forward said that they would not."""
        return False

    def _end(self) -> None:
        try:
            for collective in self.collectives:
                collective.finish()
        except BaseException:
            self.reset()
            raise
        self.running, self.expected, self.stayed = False, False, _nowhere

    def reset(self) -> None:
        """Forget a backward pass that raised before its end."""
        self.running, self.expected, self.stayed = False, False, _nowhere
        for collective in self.collectives:
            collective.reset()


def _after_forward(backward: BackwardPass, module: nn.Module, output: Any) -> None:
    """Hook the outputs of a forward whose gradients will travel. This is no method: the object keeps the wrapped
    function, and the function must not keep the object."""
    if not torch.is_grad_enabled():
        return
    if backward.running and not inside_backward():
        backward.reset()  # this forward runs outside any backward, so the last backward did not reach its end
    backward.expected = backward.travels(module)
    backward.stayed = _nowhere if backward.expected else weakref.ref(module)
    for tensor in _tensors(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(backward.begin if backward.expected else backward.begin_if_triggered)


def _nowhere() -> None:
    """A reference to no module."""


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a forward's output, in the containers that DDP looks into."""
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
    """The `Collective` that agrees on scaling states, in one group of ranks after the other."""

    def __init__(self, states: States, groups: Sequence[dist.ProcessGroup]) -> None:
        self.states, self.groups = states, groups

    def finish(self, contributes: bool = True) -> None:
        for group in self.groups:
            agree_on_scaling(self.states(), group, contributes)

    def reset(self) -> None:
        pass


def agree_after_backward(
    module: nn.Module,
    states: States,
    groups: Sequence[dist.ProcessGroup],
    travels: Callable[[nn.Module], bool] = lambda module: True,
) -> None:
    """Agree on `states` after each backward pass of `module` for which `travels(module)` held in forward.

    Idempotent. Ranks that call it have parts of one model; `groups` are used by nothing else at that time. Several, as
    a mesh has them, reach together all ranks of the model; None is all processes.
    """
    backward = BackwardPass.find(module)
    if backward is None:
        backward = BackwardPass(travels)
        module.register_forward_hook(backward)
    agreement = next((each for each in backward.collectives if isinstance(each, Agreement)), None)
    if agreement is None:
        backward.collectives.append(Agreement(states, groups))
    else:
        agreement.groups = groups  # FSDP2 has sharded what ranks shared by tensor parallelism before


def mesh_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups in which, one after another, a collective reaches all ranks that share this model's parameters, by
    FSDP2, tensor parallelism or both; none where no parameter is shared."""
    mesh = max(
        (p.device_mesh for p in model.parameters() if is_distributed(p)), key=lambda each: each.size(), default=None
    )
    if mesh is None:
        return []
    if mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]
    return [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]


@torch.no_grad()
def agree_on_scaling(
    states: list[torch.Tensor], group: dist.ProcessGroup | None = None, contributes: bool = True
) -> None:
    """Make scaling states equal on all ranks, in place, with one all-reduce: MAX of histories and counters, MIN of
    scales.

    Args:
        states: int32 [3, 2 + history length] each, as in `numerics.scaling`; the same shapes on every rank. Those with
            histories of one length take a few launches together.
        group: the ranks (default: all).
        contributes: False: this rank takes over what the others agree on.
    """
    if not states:
        return
    alike: dict[int, list[torch.Tensor]] = {}
    for state in states:
        alike.setdefault(state.shape[-1], []).append(state)
    tables = [torch.cat([state.view(-1, length) for state in members]) for length, members in alike.items()]
    message = torch.cat([_message(table).flatten() for table in tables])
    if not contributes:
        message.fill_(float("-inf"))
    message = agreed_over(message, [group])
    for members, table, part in zip(
        alike.values(), tables, message.split([table.numel() for table in tables]), strict=True
    ):
        rows = _state(part.view(table.shape)).flatten().split([state.numel() for state in members])
        torch._foreach_copy_(members, [row.view(state.shape) for row, state in zip(rows, members, strict=True)])


def _message(state: torch.Tensor) -> torch.Tensor:
    """FP32 numbers in the state's shape, whose maximum over the ranks is what they agree on."""
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
