"""Autograd's engine: whether a backward pass runs, and callbacks for its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable

from ..errors import FP8BackendError


def inside_backward() -> bool:
    """Whether this thread runs a backward pass; a forward inside one is a recomputation by activation checkpointing.

    False in code that is being compiled: it counts each forward once, also where its partitioner recomputes.
    """
    return not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() != -1


def call_when_backward_ends(function: Callable[[], None]) -> None:
    """Let the engine call a function when the backward pass ends that is running now: after those that it was given
    before, on every rank, and not where the pass raises. A function that is called so may add others.

    Raises:
        FP8BackendError: this version of torch has no such callbacks.
    """
    try:
        queue = Variable._execution_engine.queue_callback
    except AttributeError:
        raise FP8BackendError(
            f"torch {torch.__version__} has no torch.autograd.Variable._execution_engine.queue_callback, by which the "
            f"end of backward is awaited (FSDP2's own way): use a version of torch that this package is tested with, "
            f'or leave out what needs it: use native:dynamic with gradient_comm="plain" and without gradient_release'
        ) from None
    queue(function)
