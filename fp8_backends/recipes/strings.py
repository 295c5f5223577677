"""A backend string taken apart.

COMPUTE[:SCALING][+msamp[:LEVEL]]        msamp[:LEVEL]        auto
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compute import registry
from ..compute.fields import DEFAULT_LEVEL, LEVELS, closest
from ..errors import RecipeError
from ..words import shown

AUTO = "auto"
MSAMP = ("msamp", "ms-amp")
_MSAMP_MEANS = ("native", "window")
"""The compute and the scaling rule of a string that names MS-AMP alone."""
_PER_TENSOR = ("dynamic", "tensorwise", "current")
"""Three names of one rule: each backend has the one that its own library uses."""


class BackendName(NamedTuple):
    """The parts of a backend string; None for a part that it leaves out."""

    compute: str
    scaling: str | None = None
    level: str | None = None


def parse_backend(text: str) -> BackendName:
    """Take a backend string apart, aliases and case removed. Raises `RecipeError` with what is valid and close."""
    word = text.strip().lower()
    if word == AUTO:
        return BackendName(AUTO)
    head, plus, tail = word.partition("+")
    level = None
    if plus:
        mode, colon, level_word = tail.partition(":")
        if mode not in MSAMP:
            raise RecipeError(f"{shown(text)}: only '+msamp[:LEVEL]' may follow a compute, not {shown('+' + tail)}")
        level = level_name(level_word, shown(text)) if colon else ""
    name, colon, rest = head.partition(":")
    if name in MSAMP:
        if plus:
            raise RecipeError(f"{shown(text)}: msamp stands for native:window+msamp, so it takes no second '+msamp'")
        return BackendName(*_MSAMP_MEANS, level_name(rest, shown(text)) if colon else "")
    name = registry.ALIASES.get(name, name)
    if name == AUTO:
        raise RecipeError(f"{shown(text)}: auto stands alone; name a compute: {', '.join(registry.valid_names())}")
    if not registry.is_known(name):
        raise registry.unknown_backend(text)
    return BackendName(name, scaling_name(name, rest, shown(text)) if colon else None, level)


def names_backend(precision: Any) -> bool:
    """Whether what stands for mixed precision is a backend string. Raises `RecipeError` for one that nobody knows."""
    word = precision.strip().lower() if isinstance(precision, str) else ""
    if ":" in word or "+" in word:
        return bool(parse_backend(word))
    return word in (*registry.ALIASES, *registry.RESERVED) or registry.is_known(word)


def canonical_name(compute: str, scaling: str, level: str | None) -> str:
    """The one string that this package writes for a backend, such as `te:delayed+msamp:O2`: the short `msamp:O2` where
    that says it all. `level` None: the string names none."""
    if level is not None and (compute, scaling) == _MSAMP_MEANS:
        return f"msamp:{level}"
    return f"{compute}:{scaling}" + (f"+msamp:{level}" if level is not None else "")


def level_name(word: str, place: str) -> str:
    """The level, O0 to O4. Raises `RecipeError` that begins with `place`, which the word is from."""
    if not isinstance(word, str) or word.strip().upper() not in LEVELS:
        raise RecipeError(
            f"{place}: unknown level {shown(word)}; msamp has {', '.join(LEVELS)} (default {DEFAULT_LEVEL})"
        )
    return word.strip().upper()


def scaling_name(compute: str, word: Any, place: str) -> str:
    """The name that this backend has for a scaling rule. Raises `RecipeError` that begins with `place`."""
    if not isinstance(word, str):
        raise RecipeError(f"{place}: the name of a scaling rule is wanted, such as 'delayed'")
    name = known_scaling(compute, word)
    if name is None:
        raise unknown_scaling(compute, word, place)
    return name


def unknown_scaling(compute: str, word: str, place: str) -> RecipeError:
    """The error for a scaling rule that this backend does not have."""
    backend, word = registry.get_compute(compute), word.strip().lower()
    known = ", ".join(f"{name} (default)" if name == backend.default_scaling else name for name in backend.scalings)
    return RecipeError(
        f"{place}: {compute} has no scaling {shown(word)}{closest(word, backend.scalings)}; it has {known}"
    )


def known_scaling(compute: str, word: str) -> str | None:
    """The name that this backend has for a scaling rule, or None."""
    word = word.strip().lower()
    if compute == AUTO:
        return word  # checked once a backend is chosen
    backend = registry.get_compute(compute)
    if word in _PER_TENSOR:
        word = next((name for name in _PER_TENSOR if name in backend.scalings), word)
    return word if word in backend.scalings or word in backend.unnamed_scalings else None
