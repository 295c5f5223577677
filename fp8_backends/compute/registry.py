"""From a backend's name to the `Compute` that runs it, and whether that can run here.

A backend is imported when it is first used. Third parties add one with `register_backend`, or with an entry point in
the group `fp8_backends.backends`, whose value is a `Compute` subclass or a function that returns an instance:

    [options.entry_points]
    fp8_backends.backends =
        mine = my_package.fp8:MyCompute
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable

from ..errors import BackendUnavailableError, FP8BackendError, RecipeError
from ..words import shown
from . import chips, hardware
from .chips import Choice
from .fields import LEVELS, closest
from .hardware import Availability
from .interface import Compute, Recipe

ENTRY_POINT_GROUP = "fp8_backends.backends"

BUILT_IN = {
    "native": "fp8_backends.compute.native.backend:NativeCompute",
    "te": "fp8_backends.compute.te.backend:TransformerEngineCompute",
    "ao": "fp8_backends.compute.torchao.backend:TorchAOCompute",
}
ALIASES = {"transformer_engine": "te", "transformer-engine": "te", "torchao": "ao"}
RESERVED = ("auto", "msamp", "ms-amp")
"""Names with a meaning of their own in a backend string."""

_factories: dict[str, Callable[[], Compute]] = {}
_instances: dict[str, Compute] = {}


def register_backend(name: str, factory: Callable[[], Compute], replace: bool = False) -> None:
    """Make `name` valid wherever a backend is named.

    `factory` is called once, without arguments, when the backend is first used: a `Compute` subclass, or a function
    that returns an instance of one. Raises `RecipeError` for a name that a backend string cannot hold or that is
    taken; `replace=True` replaces a backend, also a built-in one.
    """
    key = name.lower() if isinstance(name, str) else ""
    if not re.fullmatch(r"[a-z][a-z0-9_.-]{,99}", key):
        raise RecipeError(
            f"backend name {shown(name)}: up to 100 letters, digits, '_', '-' and '.' are allowed, a letter first"
        )
    if key in RESERVED or key in ALIASES:
        raise RecipeError(f"backend name {name!r} has a meaning of its own in a backend string; choose another")
    if not callable(factory):
        raise RecipeError(f"backend {name!r}: the factory must be callable, not {type(factory).__name__}")
    if key in valid_names() and not replace:
        raise RecipeError(f"backend {name!r} exists; pass replace=True to replace it, or choose another name")
    _factories[key] = factory
    _instances.pop(key, None)


def valid_names() -> list[str]:
    """Every backend that a string may name: built in, registered, or found as an entry point."""
    return list(dict.fromkeys([*BUILT_IN, *_factories, *_entry_points()]))


def is_known(name: str) -> bool:
    """Whether a string may name this backend. Entry points, which lie on disk, are read only for a name that is not
    built in or registered."""
    return name in BUILT_IN or name in _factories or name in _entry_points()


def get_compute(name: str) -> Compute:
    """The backend of that name, any case, aliases included. One instance a process: a backend holds no state.

    Raises `RecipeError` for an unknown name and `FP8BackendError` where a third party's backend fails to load.
    """
    key = ALIASES.get(name.lower(), name.lower())
    if key not in _instances:
        _instances.setdefault(key, _load(key))  # another thread may have been first
    return _instances[key]


def available_backends() -> dict[str, Availability]:
    """What can run on this machine, by backend. Imports no backend's library."""
    return {name: _availability(name) for name in valid_names()}


def auto_choice(fits: Callable[[str], bool] = lambda backend: True) -> Choice:
    """What `auto` means here, and why: `te` on a GPU with FP8 products where it can run, else what is proven there.

    fits: whether a backend can honour the fields that were given, asked of `ao`; where it cannot, `native` has them.
    """
    chip = hardware.chip()
    if not chip.fp8:
        return chips.auto_on(chip)
    te_runs = importlib.util.find_spec("transformer_engine") is not None and bool(_availability("te"))
    return chips.auto_on(chip, te_runs, bool(_availability("ao")) and fits("ao"))


def check_available(recipe: Recipe) -> None:
    """Raise `BackendUnavailableError`, with the fix, where this valid recipe cannot run on this machine."""
    availability = get_compute(recipe.compute).availability()
    if not availability:
        raise BackendUnavailableError(f"{recipe.name} cannot run here: {availability.reason}. Fix: {availability.fix}")


def scalings_of(name: str) -> tuple[str, ...]:
    """The scaling rules that a string may name after this backend."""
    return get_compute(name).scalings


def levels_of(name: str) -> tuple[str, ...]:
    """The levels that go with this backend."""
    return get_compute(name).levels


def unknown_backend(word: str) -> RecipeError:
    """The error for a name that no backend has."""
    if word.strip().lower() in ("off", "no", "none", "false", "bf16", "fp16", "fp32"):
        without = 'Accelerator(mixed_precision="bf16"), or "fp16" or "no", and no FP8 recipe'
        return RecipeError(f"backend {shown(word)} names no FP8: to train without it, write {without}")
    choices = [*valid_names(), *ALIASES, *RESERVED]
    supported = "; ".join(f"{name}[:{'|'.join(_known_scalings(name))}]" for name in valid_names())
    return RecipeError(
        f"unknown backend {shown(word)}{closest(word, choices)}. Valid, in any case: auto; {supported}; "
        "msamp[:O0|O1|O2|O3|O4]; COMPUTE[:SCALING]+msamp[:LEVEL]"
    )


def _known_scalings(name: str) -> tuple[str, ...]:
    """`scalings_of` for an error message, which a third party's backend that does not load must not hide."""
    try:
        return scalings_of(name)
    except FP8BackendError:
        return ("?",)


def _load(key: str) -> Compute:
    if key in _factories:
        return _checked(key, _factories[key])
    if key in BUILT_IN:
        module, _, attribute = BUILT_IN[key].partition(":")
        return getattr(importlib.import_module(module), attribute)()
    entry_point = _entry_points().get(key)
    if entry_point is None:
        raise unknown_backend(key)
    try:
        factory = entry_point.load()
    except Exception as error:
        raise FP8BackendError(
            f"backend {key!r} of {entry_point.dist.name if entry_point.dist else entry_point.value} does not load: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _checked(key, factory)


def _checked(key: str, factory: Callable[[], Compute]) -> Compute:
    """What a third party's factory makes. Raises `FP8BackendError` where that is no backend that can be named."""
    try:
        compute = factory()
    except FP8BackendError:
        raise
    except Exception as error:
        raise FP8BackendError(f"backend {key!r}: its factory raised {type(error).__name__}: {error}") from error
    if not isinstance(compute, Compute):
        raise FP8BackendError(
            f"backend {key!r}: the factory returned {type(compute).__name__}, not a fp8_backends.compute.Compute"
        )
    scalings, levels = (getattr(compute, name, None) for name in ("scalings", "levels"))
    if not _are_words(scalings) or getattr(compute, "default_scaling", None) not in scalings:
        raise FP8BackendError(f"backend {key!r}: scalings must name its rules, and default_scaling one of them")
    if not _are_words(levels) or not set(levels) <= set(LEVELS):
        raise FP8BackendError(f"backend {key!r}: levels={shown(levels)} must name some of {', '.join(LEVELS)}")
    return compute


def _are_words(found: object) -> bool:
    return isinstance(found, (tuple, list)) and bool(found) and all(isinstance(each, str) for each in found)


def _availability(name: str) -> Availability:
    try:
        return get_compute(name).availability()
    except FP8BackendError as error:
        return Availability(False, str(error), "repair or uninstall the package that provides it")


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points by name in lower case. Built-in and registered names come before them (`_load`)."""
    return {point.name.lower(): point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
