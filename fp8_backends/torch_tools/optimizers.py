"""Look into PyTorch optimizers and wrappers around them."""

import contextlib
import sys
import traceback
from typing import Any

import torch

from ..errors import FP8BackendError


def unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the PyTorch optimizer inside Accelerate's and similar wrappers."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def check_is_optimizer(optimizer: object, hint: str = "") -> None:
    """Raise `FP8BackendError` for an object without a PyTorch optimizer inside. `hint` ends the
    text."""
    if not isinstance(unwrapped(optimizer), torch.optim.Optimizer):
        raise FP8BackendError(
            "optimizer must be a torch.optim.Optimizer or None, not "
            f"{type(optimizer).__name__}{hint}"
        )


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the identities of an optimizer's parameters."""
    return set(map(id, parameters_of(optimizer)))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameters_by_key(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[Any, torch.Tensor]:
    """Map the keys of states in a state dict to the optimizer's parameters."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return dict(zip(keys, parameters_of(optimizer), strict=True))


def has_closure(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if the arguments of a step hook have a closure. They begin with the optimizer."""
    return any(argument is not None for argument in (*args[1:2], kwargs.get("closure")))


def steps_of(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the number of steps in an optimizer's states, loaded ones included; None if they do
    not count."""
    for state in optimizer.state.values():
        # of other code
        with contextlib.suppress(TypeError, LookupError, ValueError, ArithmeticError, RuntimeError):
            return int(state["step"])
    return None


def running_trainer() -> Any:
    """Return the nearest Trainer in the stack, if any."""
    trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer_class is None:
        return None
    frames = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_argcount)
    firsts = (frame.f_locals.get(frame.f_code.co_varnames[0]) for frame in frames)
    return next((first for first in firsts if isinstance(first, trainer_class)), None)
