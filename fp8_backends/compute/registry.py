"""Find the `Compute` for a backend's name, and ask it if it can run here.

A backend is imported at its first use. Third parties add one with `register_backend`, or with an
entry point in the group `fp8_backends.backends`: a `Compute` subclass, or a function that returns
an instance:

    [options.entry_points]
    fp8_backends.backends =
        mine = my_package.fp8:MyCompute
"""

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
"""Words with another meaning in a backend string."""

factories: dict[str, Callable[[], Compute]] = {}
instances: dict[str, Compute] = {}


def register_backend(name: str, factory: Callable[[], Compute], replace: bool = False) -> None:
    """Make `name` a valid backend. `factory`, a `Compute` subclass or a function that returns an
    instance, is called once, without arguments, at its first use. `replace`: replace an existing
    backend, also a built-in one. Raises `RecipeError` for a name that is taken or does not fit into
    a backend string."""
    key = name.lower() if isinstance(name, str) else ""
    if not re.fullmatch(r"[a-z][a-z0-9_.-]{,99}", key):
        raise RecipeError(
            f"backend name {shown(name)}: up to 100 letters, digits, '_', '-' and '.' are allowed, "
            "a letter first"
        )
    if key in RESERVED or key in ALIASES:
        raise RecipeError(
            f"backend name {name!r} has a meaning of its own in a backend string; choose another"
        )
    if not callable(factory):
        raise RecipeError(
            f"backend {name!r}: the factory must be callable, not {type(factory).__name__}"
        )
    if key in valid_names() and not replace:
        raise RecipeError(
            f"backend {name!r} exists; pass replace=True to replace it, or choose another name"
        )
    factories[key] = factory
    instances.pop(key, None)


def valid_names() -> list[str]:
    """Return the names of all backends: built in, registered, or found as entry points."""
    return list(dict.fromkeys([*BUILT_IN, *factories, *_entry_points()]))


def is_known(name: str) -> bool:
    """Return True for a backend's name. Reads entry points from disk only for a name not known
    otherwise."""
    return name in BUILT_IN or name in factories or name in _entry_points()


def get_compute(name: str) -> Compute:
    """Return the backend with a name, in any case, aliases included: one instance a process. Raises
    `RecipeError` for an unknown name, `FP8BackendError` if a third party's backend fails to
    load."""
    key = ALIASES.get(name.lower(), name.lower())
    if key not in instances:
        instances.setdefault(key, _load(key))  # another thread may have been first
    return instances[key]


def compute_of(recipe: Recipe) -> Compute:
    """Return the backend of a prepared model's layers: the recipe's own, or `mixed.Mixed` for its
    `layers`."""
    if len(recipe.recipes) == 1:
        return get_compute(recipe.compute)
    return importlib.import_module(f"{__package__}.mixed").Mixed(recipe)


def available_backends() -> dict[str, Availability]:
    """Return by backend if it can run on this machine. Imports no backend's library."""
    return {name: _availability(name) for name in valid_names()}


def auto_choice(fits: Callable[[str], bool] = lambda backend: True) -> Choice:
    """Return the meaning of `auto` here: the backend recommended for this chip. `fits` returns True
    if a backend honours the given fields."""
    chip = hardware.chip()
    if not chip.fp8:
        return chips.auto_on(chip)
    te_runs = importlib.util.find_spec("transformer_engine") is not None and bool(
        _availability("te")
    )
    return chips.auto_on(chip, te_runs, lambda name: fits(name) and bool(_availability(name)))


def check_available(recipe: Recipe) -> None:
    """Raise `BackendUnavailableError`, with the fix, if this valid recipe cannot run on this
    machine."""
    for each in recipe.recipes:
        answer = get_compute(each.compute).availability()
        if not answer:
            raise BackendUnavailableError(
                f"{each.name} cannot run here: {answer.reason}. Fix: {answer.fix}"
            )


def unknown_backend(word: str) -> RecipeError:
    """Return the error for an unknown name."""
    if word.strip().lower() in ("off", "no", "none", "false", "bf16", "fp16", "fp32"):
        without = 'Accelerator(mixed_precision="bf16"), or "fp16" or "no", and no FP8 recipe'
        return RecipeError(
            f"backend {shown(word)} names no FP8: to train without it, write {without}"
        )
    choices = [*valid_names(), *ALIASES, *RESERVED]
    supported = "; ".join(f"{name}[:{'|'.join(_known_scalings(name))}]" for name in valid_names())
    return RecipeError(
        f"unknown backend {shown(word)}{closest(word, choices)}. Valid, in any case: auto; "
        f"{supported}; msamp[:O0|O1|O2|O3|O4]; COMPUTE[:SCALING]+msamp[:LEVEL]"
    )


def _known_scalings(name: str) -> tuple[str, ...]:
    try:
        return get_compute(name).scalings
    except FP8BackendError:  # a third party's: the message at hand matters more
        return ("?",)


def _load(key: str) -> Compute:
    if key in factories:
        return _checked(key, factories[key])
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
            f"backend {key!r} of "
            f"{entry_point.dist.name if entry_point.dist else entry_point.value} does not load: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _checked(key, factory)


def _checked(key: str, factory: Callable[[], Compute]) -> Compute:
    """Call a third party's factory. Raises `FP8BackendError` unless it returns a valid backend."""
    try:
        compute = factory()
    except FP8BackendError:
        raise
    except Exception as error:
        raise FP8BackendError(
            f"backend {key!r}: its factory raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(compute, Compute):
        raise FP8BackendError(
            f"backend {key!r}: the factory returned {type(compute).__name__}, not a "
            "fp8_backends.compute.Compute"
        )
    scalings, levels = (getattr(compute, name, None) for name in ("scalings", "levels"))
    if not _are_words(scalings) or getattr(compute, "default_scaling", None) not in scalings:
        raise FP8BackendError(
            f"backend {key!r}: scalings must name its rules, and default_scaling one of them"
        )
    if not _are_words(levels) or not set(levels) <= set(LEVELS):
        raise FP8BackendError(
            f"backend {key!r}: levels={shown(levels)} must name some of {', '.join(LEVELS)}"
        )
    return compute


def _are_words(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))
        and bool(value)
        and all(isinstance(word, str) for word in value)
    )


def _availability(name: str) -> Availability:
    try:
        return get_compute(name).availability()
    except FP8BackendError as error:
        return Availability(False, str(error), "repair or uninstall the package that provides it")


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Return entry points by name in lower case. Built-in and registered names precede them
    (`_load`)."""
    return {
        point.name.lower(): point
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    }
