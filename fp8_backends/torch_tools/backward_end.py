"""Autograd's engine: the running backward pass, and callbacks for its end."""

from collections.abc import Callable

import torch
from torch.autograd import Variable

from ..errors import FP8BackendError


def inside_backward() -> bool:
    """Return True while this thread runs a backward pass. A forward inside one is recomputed by
    activation checkpointing.

    Always False under compilation: compiled code counts each forward once, even if its partitioner
    recomputes.
    """
    return not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() != -1


def call_when_backward_ends(function: Callable[[], None]) -> None:
    """Queue a callback for the end of the running backward pass: after earlier callbacks, on every
    rank, and not if the pass raises. Callbacks may add others. Raises `FP8BackendError` if this
    torch has no such callbacks."""
    try:
        queue = Variable._execution_engine.queue_callback
    except AttributeError:
        raise FP8BackendError(
            f"torch {torch.__version__} has no "
            "torch.autograd.Variable._execution_engine.queue_callback, by which the end of "
            "backward is awaited (FSDP2's own way): use a version of torch that this package is "
            "tested with, "
            'or leave out what needs it: use native:dynamic with gradient_comm="plain" and '
            "without gradient_release"
        ) from None
    queue(function)
