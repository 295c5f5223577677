"""Autograd's engine: the running backward pass, callbacks for its end, hooks of saved tensors."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
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


def is_checkpointed() -> bool:
    """Return True if backward may run this forward again; `use_reentrant` looks like a forward
    without gradients."""
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():
        return True
    return getattr(saved_tensor_hook(), "__module__", None) == torch.utils.checkpoint.__name__


def saved_tensor_hook() -> Any:
    """Return the function that packs tensors saved now, or None."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
