"""The optimizers that levels take, and how a stock one becomes one of them.

`convert` swaps the class of an optimizer that exists already: the same object, with its groups, options, hooks,
schedulers and state, now stores its states as a level says (the table in `levels.py`). A further optimizer is a class
of `scaled_states.ScaledStates` in a file of its own, and its place in `CONVERTED`.
"""

from __future__ import annotations

import functools
import weakref

import torch

from ..errors import FP8BackendError
from . import checkpoint, checks
from .adamw import ScaledAdam, ScaledAdamW
from .levels import ROLES, StateRule
from .scaled_states import Declaration, ScaledStates
from .stock_optimizers import ScaledAdafactor, ScaledMuon, ScaledSGD
from .stock_steps import StockSteps

CONVERTED: dict[type[torch.optim.Optimizer], type[ScaledStates]] = {
    each.fp8_declared.stock: each for each in (ScaledAdamW, ScaledAdam, ScaledSGD, ScaledMuon, ScaledAdafactor)
}
"""Stock class -> the class of what `convert` makes of its objects."""


def _converted(stock: type[torch.optim.Optimizer]) -> type[ScaledStates] | None:
    """The class of what `convert` makes of a stock class's objects; None where that is unknown."""
    return _declared(stock) if "fp8_roles" in vars(stock) else CONVERTED.get(stock)


class DeclaredSteps(StockSteps):
    """A converted optimizer of a class that names its states itself, in `fp8_roles`."""

    def __reduce_ex__(self, protocol):
        return _made_again, (self.fp8_declared.stock,), self.__getstate__()


@functools.cache
def _declared(stock: type[torch.optim.Optimizer]) -> type[DeclaredSteps]:
    """The class for objects of a class that has `fp8_roles`.

    Raises:
        FP8BackendError: a role that there is not.
    """
    if unknown := set(stock.fp8_roles.values()) - set(ROLES):
        raise FP8BackendError(
            f"{stock.__name__}.fp8_roles gives a state the role {sorted(unknown)[0]!r}: there are {', '.join(ROLES)}"
        )
    declared = Declaration(stock, roles=dict(stock.fp8_roles), ranges={}, refused=("differentiable",), counts=False)
    return type(f"Scaled{stock.__name__}", (DeclaredSteps, stock), {"fp8_declared": declared})


def _made_again(stock: type[torch.optim.Optimizer]) -> DeclaredSteps:
    """An empty object, for what was copied or pickled."""
    return DeclaredSteps.__new__(_declared(stock))


def convert(optimizer: torch.optim.Optimizer, rule: StateRule) -> None:
    """Swap the class of a stock optimizer, in place. Existing states are stored as `rule` says.

    Repeating it with the same rule changes nothing. Raises what `check` raises.
    """
    check(optimizer, rule)
    if isinstance(optimizer, ScaledStates):
        return
    converted = _converted(type(optimizer))
    if "step" in optimizer.__dict__:
        optimizer.step = _TrackedStep(optimizer, converted)
    optimizer.__class__ = converted
    optimizer._patch_step_function()  # PyTorch's own way to give a class's step its hooks
    optimizer.fp8_states = rule
    optimizer._step_supports_amp_scaling = False  # a fused stock step divides by the loss scale itself
    for p, state in optimizer.state.items():
        for name in converted.fp8_declared.roles:
            if name in state:
                state[name] = checkpoint.stored_moment(p, state[name], *optimizer.moment_format(p, name))
        for name in converted.fp8_declared.exact_states(p.shape):
            if name in state:
                state[name] = checkpoint.exact_state(p, state[name])


def check(optimizer: torch.optim.Optimizer, rule: StateRule) -> None:
    """Raise where `convert` would not take this optimizer. Changes nothing.

    Raises:
        FP8BackendError: another optimizer, an option that it declares as refused, or a `step` that somebody replaced.
    """
    if isinstance(optimizer, ScaledStates):
        if optimizer.fp8_states != rule:
            raise FP8BackendError(
                f"this optimizer keeps its states at {optimizer.fp8_states} already, and {rule} is asked for: "
                f"make a new optimizer"
            )
        return
    converted = _converted(type(optimizer))
    if converted is None:
        raise FP8BackendError(
            f"level {rule.level} trains with torch.optim.AdamW, Adam, SGD, Muon or Adafactor, not with "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}: use one of these; or level O0 (such as "
            f"native:dynamic or te), which leaves weights and optimizer alone; or, where its step is elementwise, a "
            f"subclass that names its states in fp8_roles"
        )
    for group in optimizer.param_groups:
        checks.check_options(group, converted.fp8_declared.refused)
    # a learning-rate scheduler puts a `step` on the instance that calls the old class; it is given the new one
    if not getattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched", "step" not in optimizer.__dict__):
        raise FP8BackendError(
            f"optimizer.step was replaced on this {type(optimizer).__name__} object: prepare it before it is wrapped"
        )


class _TrackedStep:
    """A `step` that notes that it was called, as PyTorch's schedulers put it on an optimizer; for a converted class."""

    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: torch.optim.Optimizer, converted: type) -> None:
        self.optimizer, self.converted = weakref.ref(optimizer), converted

    def __call__(self, *args, **kwargs):
        optimizer = self.optimizer()
        optimizer._opt_called = True
        return self.converted.step(optimizer, *args, **kwargs)
