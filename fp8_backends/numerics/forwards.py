"""Forwards that others replaced on a module: whether they call the class's own in the end.

Accelerate's hooks, transformers' tensor and expert parallelism, `functools.partial` and decorators put a function into
`module.__dict__["forward"]` that holds the forward it found there, bound to the module. Several may lie on top of one
another. When the module's class changes, the innermost still is the former class's, and has to follow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

_TRANSFORMERS = "transformers.distributed."
"""Functions of these modules hold the forward that they wrap under one of these names."""
_HELD_AS = ("original_forward", "implementation")


class _Held(NamedTuple):
    """A function, and what puts another into every place where its holder has it."""

    function: Any
    put: Callable[[Any], None]


def forward_obstacle(module: nn.Module) -> str | None:
    """Why the forward of the module's class does not run when the module is called, or None where it does, maybe
    inside of known wrappers. Names the function that runs in its place."""
    held = _innermost(module)
    if held is None or _is_own(held.function, module):
        return None
    return f"its forward was replaced on the instance by {_name(held.function)}"


@contextlib.contextmanager
def follows_class(module: nn.Module) -> Iterator[None]:
    """The class of the module changes here, and with it the forward that known wrappers call."""
    held = _innermost(module)
    follows = held is not None and _is_own(held.function, module)
    yield
    if follows and held.function is module.__dict__["forward"]:
        del module.forward
    elif follows:
        held.put(MethodType(type(module).forward, module))


def _innermost(module: nn.Module) -> _Held | None:
    """The forward on the instance without the known wrappers around it; None where the class's own runs."""
    if "forward" not in module.__dict__:
        return None
    held = _Held(module.__dict__["forward"], functools.partial(module.__dict__.__setitem__, "forward"))
    while not _is_own(held.function, module):
        inner = _wrapped(held.function, module)
        if inner is None:
            break
        held = inner
    return held


def _is_own(function: Any, module: nn.Module) -> bool:
    """Whether this is the forward of the module's class, or of one that it derives from, bound to the module."""
    if not isinstance(function, MethodType) or function.__self__ is not module:
        return False
    return any(function.__func__ is vars(cls).get("forward") for cls in type(module).__mro__)


def _wrapped(function: Any, module: nn.Module) -> _Held | None:
    """What a known wrapper calls; None for any other function."""
    if isinstance(function, functools.partial):
        if _name(function) == "accelerate.hooks.add_hook_to_module.<locals>.new_forward":
            holder = module.__dict__
            return _Held(holder["_old_forward"], functools.partial(holder.__setitem__, "_old_forward"))
        return _Held(function.func, functools.partial(_put_into_partial, function))
    if not isinstance(function, FunctionType):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if function.__globals__.get("__name__", "").startswith(_TRANSFORMERS):
        cell = next((cells[name] for name in _HELD_AS if name in cells), None)
        if cell is not None and hasattr(cell.cell_contents, "experts_forward"):
            holder = vars(cell.cell_contents)  # an EPImplementation
            return _Held(holder["experts_forward"], functools.partial(holder.__setitem__, "experts_forward"))
        return None if cell is None else _Held(cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
    inner = function.__dict__.get("__wrapped__")
    cell = next((each for each in cells.values() if inner is not None and each.cell_contents is inner), None)
    return None if cell is None else _Held(inner, functools.partial(_put_into_decorator, function, cell))


def _put_into_decorator(decorator: FunctionType, cell: CellType, function: Callable) -> None:
    decorator.__wrapped__ = cell.cell_contents = function


def _put_into_partial(partial: functools.partial, function: Callable) -> None:
    partial.__setstate__((function, partial.args, partial.keywords, vars(partial)))


def _name(function: Any) -> str:
    """Module and qualified name of what a function runs: of a wrapper its own, not those that it bears of another."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    code = getattr(function, "__code__", None)
    if code is None:
        cls = type(function)
        return f"{cls.__module__}.{cls.__qualname__}"
    qualified = getattr(code, "co_qualname", function.__qualname__)  # Python 3.10 has none
    return f"{function.__globals__.get('__name__', '?')}.{qualified}"
