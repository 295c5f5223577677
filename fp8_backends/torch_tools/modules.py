"""Modules: plain names, marks of converted layers, hooks that copies of a model drop, and replaced
forwards.

Accelerate's hooks, transformers' tensor and expert parallelism, `functools.partial` and decorators
put a function into `module.__dict__["forward"]` that holds the previous forward, bound to the
module, possibly several levels deep; kohya's and LyCORIS's adapters put their own, and hold the
previous one as an attribute. When the module's class changes, the innermost one is still the former
class's and has to follow.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import FP8BackendError

CONVERSION = "_fp8_conversion"
"""Attribute of a converted layer: its `Conversion`."""

PREPARED = "_fp8_prepared"
"""Attribute of a prepared root: its `convert.conversion.Prepared`."""

PLAIN_CONVERSION = "_fp8_plain_conversion"
"""The `Conversion` of a layer in high precision with another class, such as a norm."""

CONTAINER = "fp8_weights"
"""Name of the child of a module with the FP8 layers of its Parameters
(`compute.interface.PartLayers`)."""

_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", CONTAINER}
)


@dataclass
class Conversion:
    """Data to restore a converted layer, and its recipe."""

    original: type[nn.Module]
    converted: type[nn.Module]
    attributes: tuple[str, ...]
    recipe: Any
    undo: list[Callable[[nn.Module], None]] = field(default_factory=list)
    """Later changes to the layer, undone first when it is restored."""


def is_traced() -> bool:
    """Return True if a compiler or exporter reads a hook. `torch.compiler.is_compiling` is True in
    all threads."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def plain_name(name: str) -> str:
    """Remove the segments of wrappers (compile, FSDP, checkpointing) from a dotted name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def owner_of(layer: nn.Module) -> tuple[nn.Module, str]:
    """Return the module and the name of a layer's weight: the layer itself, unless another module
    has the Parameter."""
    return getattr(layer, "fp8_owner", (layer, "weight"))


def weight_name(name: str, layer: nn.Module) -> str:
    """Return the Parameter's name for a converted layer's name: the same for another module's
    Parameter."""
    return name if owner_of(layer)[0] is not layer else f"{name}.weight".lstrip(".")


def part_layer(module: nn.Module, part: str) -> nn.Module | None:
    """Return the FP8 layer of a Parameter that the module multiplies by itself, if it was
    converted."""
    layers = module._modules.get(CONTAINER)
    return None if layers is None else layers._modules.get(part)


def has_ranks() -> bool:
    """Return True if this process may hold parts or wrappers of a model of several ranks."""
    return dist.is_available() and dist.is_initialized()


def is_engine(module: nn.Module) -> bool:
    """Return True for DeepSpeed's engine, which is never imported here."""
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", ())
    return isinstance(module, engine)


def check_is_module(model: object, hint: str = "") -> None:
    """Raise `FP8BackendError` for other objects, such as the pair that `prepare` returns. `hint`
    ends the text."""
    if not isinstance(model, nn.Module):
        pair = ": prepare returns (model, optimizer)" if isinstance(model, tuple) else ""
        raise FP8BackendError(
            f"model must be a torch.nn.Module, not {type(model).__name__}{pair}{hint}"
        )


def renumber(handle: RemovableHandle, number: int, *hooks: dict) -> None:
    """Register a hook under another number in its module's dictionaries: similar modules then share
    compiled code."""
    for registered in hooks:
        registered[number] = registered.pop(handle.id)
    handle.id = number


class TemporaryHook:
    """A hook of one model. In a copied or unpickled model it does nothing."""

    def __reduce__(self):
        return functools.partial, (_do_nothing,)


def _do_nothing(*_) -> None:
    pass


class EagerHook(TemporaryHook):
    """Call a function, except in compiled code and in copies of the model."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args) -> None:
        if not is_traced():
            self.function(*args)


# Replaced forwards

_TRANSFORMERS = "transformers.distributed."
"""Functions of these modules hold the wrapped forward under one of these names."""
_HELD_AS = ("original_forward", "implementation")
ADAPTERS_HOLD = frozenset({"org_forward", "orig_forward"})
"""Attributes of an adapter outside the model with the forward that its own has replaced and
calls."""


class _Held(NamedTuple):
    """A function, and a setter that replaces it in its holder."""

    function: Any
    put: Callable[[Any], None]

    @classmethod
    def item(cls, holder: dict[str, Any], name: str) -> _Held:
        return cls(holder[name], functools.partial(holder.__setitem__, name))


def forward_obstacle(module: nn.Module) -> str | None:
    """Return None if calling the module runs its class's forward, maybe in known wrappers; else
    what it runs."""
    if "forward" not in module.__dict__:
        return None
    *_, held = _levels(module)
    if _is_own(held.function, module):
        return None
    return f"its forward was replaced on the instance by {_name(held.function)}"


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module, and its forward inside known wrappers."""
    held = None
    if "forward" in module.__dict__:
        *_, innermost = _levels(module)
        held = innermost if _is_own(innermost.function, module) else None
    module.__class__ = cls
    if held is None:
        return
    if held.function is module.__dict__["forward"]:
        del module.forward
    else:
        held.put(MethodType(cls.forward, module))


def adapters_over(module: nn.Module) -> list[nn.Module]:
    """Return the adapters whose forward runs in place of the one on the module's instance, such as
    kohya's LoRA."""
    functions = [held.function for held in _levels(module)]
    owners = [each.__self__ for each in functions if type(each) is MethodType]
    return [each for each in owners if each is not module and isinstance(each, nn.Module)]


def is_adapter(module: Any) -> bool:
    """Return True if the module has taken over another one's forward."""
    held = [vars(module)[name] for name in ADAPTERS_HOLD if name in vars(module)]
    return any(getattr(forward, "__self__", None) is not module for forward in held)


def is_trained(model: nn.Module, held: Collection[int]) -> bool:
    """Return True if a Parameter of the model, or of adapters over its modules, is among these
    identities."""
    if any(id(parameter) in held for parameter in model.parameters()):
        return True
    replaced = (module for module in model.modules() if "forward" in module.__dict__)
    adapters = (adapter for module in replaced for adapter in adapters_over(module))
    return any(id(parameter) in held for each in adapters for parameter in each.parameters())


def _levels(module: nn.Module) -> Iterator[_Held]:
    """Yield the instance's forward, and the one inside each known wrapper."""
    held = _Held.item(module.__dict__, "forward")
    yield held
    while not _is_own(held.function, module):
        held = _wrapped(held.function, module)
        if held is None:
            return
        yield held


def _is_own(function: Any, module: nn.Module) -> bool:
    """Return True for the forward of the module's class or a base class, bound to the module."""
    if not isinstance(function, MethodType) or function.__self__ is not module:
        return False
    return any(function.__func__ is vars(cls).get("forward") for cls in type(module).__mro__)


def _wrapped(function: Any, module: nn.Module) -> _Held | None:
    """Return the function inside a known wrapper; None for any other function."""
    if isinstance(function, functools.partial):
        if _name(function) == "accelerate.hooks.add_hook_to_module.<locals>.new_forward":
            return _Held.item(module.__dict__, "_old_forward")
        state = (function.args, function.keywords, vars(function))
        return _Held(function.func, lambda inner: function.__setstate__((inner, *state)))
    if type(function) is MethodType and is_adapter(function.__self__):
        adapter = vars(function.__self__)
        return _Held.item(adapter, next(name for name in ADAPTERS_HOLD if name in adapter))
    if not isinstance(function, FunctionType):  # te's `AroundRoot`
        if not hasattr(function, "__wrapped__"):
            return None
        return _Held.item(vars(function), "__wrapped__")
    cell = None
    inner = vars(function).get("__wrapped__")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if function.__globals__.get("__name__", "").startswith(_TRANSFORMERS):
        cell = next((cells[name] for name in _HELD_AS if name in cells), None)
        if cell is not None and hasattr(cell.cell_contents, "experts_forward"):
            return _Held.item(vars(cell.cell_contents), "experts_forward")  # an EPImplementation
    elif inner is not None:
        cell = next((cell for cell in cells.values() if cell.cell_contents is inner), None)
    if cell is None:
        return None
    return _Held(cell.cell_contents, functools.partial(_put, function, cell))


def _put(wrapper: FunctionType, cell: CellType, function: Callable) -> None:
    cell.cell_contents = function
    if "__wrapped__" in vars(wrapper):
        wrapper.__wrapped__ = function


def _name(function: Any) -> str:
    """Return module and qualified name of the code that runs: a wrapper's own, not its
    `__wrapped__` function's."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    code = getattr(function, "__code__", None)
    if code is None:
        cls = type(function)
        return f"{cls.__module__}.{cls.__qualname__}"
    qualified = getattr(code, "co_qualname", function.__qualname__)  # Python 3.10 has none
    return f"{function.__globals__.get('__name__', '?')}.{qualified}"
