"""Convert stock optimizers to `ScaledStates`.

`convert` swaps the class of an existing optimizer: the object keeps its groups, options, hooks,
schedulers and state, and now stores its states at a level (the table in `levels.py`). To add an
optimizer, write a subclass of `scaled_states.ScaledStates` and list it in `CONVERTED`.
"""

import functools
import inspect
import weakref

import torch

from ..errors import FP8BackendError
from . import checkpoint
from .adamw import ScaledAdam, ScaledAdamW
from .levels import ROLES, StateRule
from .scaled_states import Declaration, ScaledStates
from .stock_steps import ScaledAdafactor, ScaledMuon, ScaledSGD, StockSteps

CONVERTED: dict[type[torch.optim.Optimizer], type[ScaledStates]] = {
    scaled.fp8_declared.stock: scaled
    for scaled in (ScaledAdamW, ScaledAdam, ScaledSGD, ScaledMuon, ScaledAdafactor)
}
"""Stock class -> converted class."""


def _converted(stock: type[torch.optim.Optimizer]) -> type[ScaledStates] | None:
    """Return the converted class for a stock class; None if there is none."""
    return (
        _declared(stock)
        if "fp8_roles" in vars(stock)
        else CONVERTED.get(stock) or _inherited(stock)
    )


class _Generated:
    """A generated class. Its objects are pickled by their stock class."""

    fp8_stock: type[torch.optim.Optimizer]

    def __reduce_ex__(self, protocol):
        return _recreated, (self.fp8_stock,), self.__getstate__()


@functools.cache
def _inherited(stock: type[torch.optim.Optimizer]) -> type[ScaledStates] | None:
    """Return the class for a subclass with an inherited update: its `super().step()` calls the
    converted step."""
    base = next((cls for cls in stock.__mro__ if cls in CONVERTED), None)
    if base is None:
        return None
    for cls in stock.__mro__[: stock.__mro__.index(base)]:
        names = (
            inspect.unwrap(vars(cls)["step"]).__code__.co_names
            if "step" in vars(cls)
            else ("super", "step")
        )
        if "_init_group" in vars(cls) or not {"super", "step"} <= set(names):
            return None
    # PyTorch wraps its hooks around the outermost step only
    inner = type(CONVERTED[base].__name__, (CONVERTED[base],), {"step": ScaledStates.step})
    return type(f"Scaled{stock.__name__}", (_Generated, stock, inner), {"fp8_stock": stock})


@functools.cache
def _declared(stock: type[torch.optim.Optimizer]) -> type[StockSteps]:
    """Return the class for a class with `fp8_roles`. Raises `FP8BackendError` for an unknown role,
    or an argument of the constructor without a default."""
    if unknown := set(stock.fp8_roles.values()) - set(ROLES):
        raise FP8BackendError(
            f"{stock.__name__}.fp8_roles gives a state the role {sorted(unknown)[0]!r}: there are "
            f"{', '.join(ROLES)}"
        )
    try:
        inspect.signature(stock).bind([])
    except TypeError as error:
        raise FP8BackendError(
            f"{stock.__name__}: {error}, and a level makes the optimizer again around FP32 copies, "
            "from parameter groups with its options. Give the argument a default in __init__, or "
            "train at level O0"
        ) from None
    declared = Declaration(
        stock, roles=dict(stock.fp8_roles), ranges={}, refused=("differentiable",), counts=False
    )
    attributes = {"fp8_declared": declared, "fp8_stock": stock}
    return type(f"Scaled{stock.__name__}", (_Generated, StockSteps, stock), attributes)


def _recreated(stock: type[torch.optim.Optimizer]) -> ScaledStates:
    return object.__new__(_converted(stock))


def convert(optimizer: torch.optim.Optimizer, rule: StateRule) -> None:
    """Swap the class of a stock optimizer, in place, and store its states by `rule`. Idempotent.
    Raises as `check`."""
    check(optimizer, rule)
    if isinstance(optimizer, ScaledStates):
        return
    converted = _converted(type(optimizer))
    if "step" in optimizer.__dict__:
        optimizer.step = _TrackedStep(optimizer, converted)
    optimizer.__class__ = converted
    optimizer._patch_step_function()  # gives the class's step PyTorch's hooks
    optimizer.fp8_states = rule
    # a fused stock step divides by the loss scale itself
    optimizer._step_supports_amp_scaling = False
    for p, state in optimizer.state.items():
        checkpoint.store_states(optimizer, p, state)


def check(optimizer: torch.optim.Optimizer, rule: StateRule) -> None:
    """Raise `FP8BackendError` if `convert` does not support this optimizer, an option, or its
    replaced `step`."""
    if isinstance(optimizer, ScaledStates):
        if optimizer.fp8_states != rule:
            raise FP8BackendError(
                f"this optimizer keeps its states at level {optimizer.fp8_states.level}, rounding "
                f"{optimizer.fp8_states.rounding}, and {rule.level}, {rule.rounding}, is asked for: "
                "make a new optimizer"
            )
        return
    converted = _converted(type(optimizer))
    if converted is None and hasattr(optimizer, "fp8_roles"):
        raise FP8BackendError(
            f"{type(optimizer).__name__} does not inherit fp8_roles of its base class, since its "
            "own step may have other states: name them in fp8_roles of the class itself, or train "
            "at level O0"
        )
    if converted is None:
        raise FP8BackendError(
            f"level {rule.level} trains with torch.optim.AdamW, Adam, SGD, Muon or Adafactor, not "
            f"with {type(optimizer).__module__}.{type(optimizer).__name__}: use one of these, or a "
            "subclass whose step calls super().step() (with transformers' Trainer: "
            "optimizers=(optimizer, None)); or level O0 (such as native:dynamic or te), which "
            "leaves weights and optimizer alone; or, where its step is elementwise, a subclass "
            "that names its states in fp8_roles"
        )
    for group in optimizer.param_groups:
        converted.fp8_declared.check_options(group)
    # a learning-rate scheduler puts a `step` on the instance, calling the old class; `convert`
    # replaces it
    if not getattr(
        optimizer.__dict__.get("step"), "_wrapped_by_lr_sched", "step" not in optimizer.__dict__
    ):
        raise FP8BackendError(
            f"optimizer.step was replaced on this {type(optimizer).__name__} object: prepare it "
            "before it is wrapped"
        )


class _TrackedStep:
    """The `step` of PyTorch's schedulers, which records calls, for a converted class."""

    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: torch.optim.Optimizer, converted: type) -> None:
        self.optimizer, self.converted = weakref.ref(optimizer), converted

    def __call__(self, *args, **kwargs):
        optimizer = self.optimizer()
        optimizer._opt_called = True
        return self.converted.step(optimizer, *args, **kwargs)
