"""When a backward pass whose gradients travel between ranks begins and ends.

DDP and FSDP2 settle it in forward: what `no_sync` or `set_requires_gradient_sync` say there holds for its backward.
`BackwardPass` is a forward hook of the wrapped model. It hooks the outputs, so that the pass is noticed as soon as
their first gradient is there, and lets autograd's engine call back when the pass is over: on every rank, also where no
weight of interest got a gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import FP8BackendError
from ..numerics.modules import inert_hook


class Part(Protocol):
    """What happens over ranks in such a backward pass. The collectives are the same, in the same order, on all."""

    def finish(self, contributes: bool = True) -> None:
        """At the end of the pass. `contributes=False`: on a rank that has run out of inputs."""

    def abandon(self) -> None:
        """The pass failed before its end: forget what was in flight."""


class BackwardPass:
    """Forward hook of a wrapped model: lets its parts act when a backward pass whose gradients travel ends.

    Args:
        travels: of the module, whether the gradients of the forward that has just run will travel.
    """

    def __init__(self, travels: Callable[[nn.Module], bool]) -> None:
        self.travels = travels
        self.parts: list[Part] = []
        """In the order in which they finish."""
        self.expected = False
        """Whether the gradients of the last forward travel."""
        self.running = False
        self._watch = torch.compiler.disable(_watch)  # here, and no decorator: importing the compiler takes a second

    @classmethod
    def of(cls, module: nn.Module) -> BackwardPass | None:
        """The one that is installed on a module."""
        return next((hook for hook in module._forward_hooks.values() if isinstance(hook, cls)), None)

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._watch(self, module, output)

    def begin(self, gradient: torch.Tensor | None = None) -> None:
        """Called inside a backward pass; repeating it does nothing."""
        if not self.running:
            _call_when_backward_ends(self._end)
            self.running = True

    def _end(self) -> None:
        try:
            for part in self.parts:
                part.finish()
        except BaseException:
            self.abandon()
            raise
        self.running = self.expected = False

    def abandon(self) -> None:
        """A backward pass raised before its end."""
        self.running = self.expected = False
        for part in self.parts:
            part.abandon()

    def __reduce__(self):
        return inert_hook, ()  # copies and unpickled models are not connected


def _watch(backward: BackwardPass, module: nn.Module, output: Any) -> None:
    """After a forward. No method: the wrapped function is kept by the object, which must not be kept by it."""
    if not torch.is_grad_enabled():
        return
    if backward.running and torch._C._current_graph_task_id() == -1:
        backward.abandon()  # a forward outside of any backward: the last one did not end
    backward.expected = backward.travels(module)
    if backward.expected:
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(backward.begin)


def _call_when_backward_ends(function: Callable[[], None]) -> None:
    queue = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)
    if queue is None:
        raise FP8BackendError(
            f"torch {torch.__version__} has no torch.autograd.Variable._execution_engine.queue_callback, by which "
            f"gradients are awaited at the end of backward (FSDP2's own way): use a version of torch that this "
            f'package is tested with, or native:dynamic with gradient_comm="plain"'
        )
    queue(function)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a forward's output, in the containers that DDP looks into."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name))
