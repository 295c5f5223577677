"""The optimizers that levels take, and how a stock one becomes one of them.

`convert` swaps the class of an optimizer that exists already: the same object, with its groups, options, hooks,
schedulers and state, now stores its states as a level says (the table in `levels.py`). A further optimizer is a class
of `scaled_states.ScaledStates` in a file of its own, and its place in `CONVERTED`.
"""

from __future__ import annotations

import functools
import inspect
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
    return _declared(stock) if "fp8_roles" in vars(stock) else CONVERTED.get(stock) or _inherited(stock)


class _Generated:
    """A class that `_converted` generates. Its objects are pickled by their stock class."""

    fp8_stock: type[torch.optim.Optimizer]

    def __reduce_ex__(self, protocol):
        return _made_again, (self.fp8_stock,), self.__getstate__()


@functools.cache
def _inherited(stock: type[torch.optim.Optimizer]) -> type[ScaledStates] | None:
    """The class for objects of a subclass that inherits its update: `super().step()` in it calls the converted step."""
    base = next((each for each in stock.__mro__ if each in CONVERTED), None)
    for each in stock.__mro__[: stock.__mro__.index(base)] if base else ():
        names = inspect.unwrap(vars(each)["step"]).__code__.co_names if "step" in vars(each) else ("super", "step")
        if "_init_group" in vars(each) or not {"super", "step"} <= set(names):
            return None
    if base is None:
        return None
    # PyTorch puts its hooks around the outermost step: the inner one is without them
    inner = type(CONVERTED[base].__name__, (CONVERTED[base],), {"step": ScaledStates.step})
    return type(f"Scaled{stock.__name__}", (_Generated, stock, inner), {"fp8_stock": stock})


@functools.cache
def _declared(stock: type[torch.optim.Optimizer]) -> type[StockSteps]:
    """The class for objects of a class that has `fp8_roles`.

    Raises:
        FP8BackendError: a role that there is not.
    """
    if unknown := set(stock.fp8_roles.values()) - set(ROLES):
        raise FP8BackendError(
            f"{stock.__name__}.fp8_roles gives a state the role {sorted(unknown)[0]!r}: there are {', '.join(ROLES)}"
        )
    declared = Declaration(stock, roles=dict(stock.fp8_roles), ranges={}, refused=("differentiable",), counts=False)
    own = {"fp8_declared": declared, "fp8_stock": stock}
    return type(f"Scaled{stock.__name__}", (_Generated, StockSteps, stock), own)


def _made_again(stock: type[torch.optim.Optimizer]) -> ScaledStates:
    """An empty object, for what was copied or pickled."""
    return object.__new__(_converted(stock))


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
            f"{type(optimizer).__module__}.{type(optimizer).__name__}: use one of these, or a subclass whose step "
            f"calls super().step() (with transformers' Trainer: optimizers=(optimizer, None)); or level O0 (such as "
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
