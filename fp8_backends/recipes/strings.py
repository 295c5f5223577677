"""Parse and write backend strings.

COMPUTE[:SCALING][+msamp[:LEVEL]]        msamp[:LEVEL]        auto        recipe.yaml
"""

from typing import Any, NamedTuple

from ..compute import registry
from ..compute.fields import DEFAULT_LEVEL, LEVELS, closest
from ..compute.interface import Compute
from ..errors import RecipeError
from ..words import shown

AUTO = "auto"
MSAMP_SPELLINGS = ("msamp", "ms-amp")
_MSAMP_MEANS = ("native", "window")
"""Compute and scaling rule of a string that only names MS-AMP."""
_PER_TENSOR = ("dynamic", "tensorwise", "current")
"""Three names of one rule: each backend has the name from its library."""


class BackendName(NamedTuple):
    """The parts of a backend string; None for an absent part."""

    compute: str
    scaling: str | None = None
    level: str | None = None


def parse_backend(text: Any) -> BackendName:
    """Split a backend string; a level without a number is "". Raises `RecipeError` with the nearest
    names."""
    if not isinstance(text, str):
        raise RecipeError(
            f"backend={shown(text)}: a backend string is wanted, such as 'native:delayed'"
        )
    word = text.strip().lower()
    if word == AUTO:
        return BackendName(AUTO)
    head, plus, tail = word.partition("+")
    level = None
    if plus:
        mode, colon, level_word = tail.partition(":")
        if mode not in MSAMP_SPELLINGS:
            raise RecipeError(
                f"{shown(text)}: only '+msamp[:LEVEL]' may follow a compute, not "
                f"{shown('+' + tail)}"
            )
        level = level_name(level_word, shown(text)) if colon else ""
    name, colon, rest = head.partition(":")
    if name in MSAMP_SPELLINGS:
        if plus:
            raise RecipeError(
                f"{shown(text)}: msamp stands for native:window+msamp, so it takes no second "
                "'+msamp'"
            )
        return BackendName(*_MSAMP_MEANS, level_name(rest, shown(text)) if colon else "")
    name = registry.ALIASES.get(name, name)
    if name == AUTO:
        raise RecipeError(
            f"{shown(text)}: auto stands alone; name a compute: {', '.join(registry.valid_names())}"
        )
    if not registry.is_known(name):
        raise registry.unknown_backend(text)
    return BackendName(name, scaling_name(name, rest, shown(text)) if colon else None, level)


def names_file(backend: Any) -> bool:
    """Return True if a backend is the path of a recipe file."""
    return isinstance(backend, str) and backend.strip().lower().endswith((".yaml", ".yml", ".json"))


def names_backend(precision: Any) -> bool:
    """Return True if a mixed precision is a backend string or file. Raises `RecipeError` for an
    unknown string."""
    if names_file(precision):
        return True
    word = precision.strip().lower() if isinstance(precision, str) else ""
    if ":" in word or "+" in word:
        return bool(parse_backend(word))
    return word in (*registry.ALIASES, *registry.RESERVED) or registry.is_known(word)


def canonical_name(compute: str, scaling: str | None, level: str | None) -> str:
    """Write a backend in its one spelling, such as `te:delayed+msamp:O2`. None: the string names no
    scaling rule, or no level."""
    if level is not None and (compute, scaling) == _MSAMP_MEANS:
        return f"msamp:{level}"
    rule = "" if scaling is None else f":{scaling}"
    return compute + rule + ("" if level is None else f"+msamp:{level}")


def level_name(word: str, place: str) -> str:
    """Return the level, O0 to O4. Raises `RecipeError` that begins with `place`, the source of the
    word."""
    if not isinstance(word, str) or word.strip().upper() not in LEVELS:
        raise RecipeError(
            f"{place}: unknown level {shown(word)}; msamp has {', '.join(LEVELS)} (default "
            f"{DEFAULT_LEVEL})"
        )
    return word.strip().upper()


def has_scaling(compute: str, word: str | None) -> bool:
    """Return True if a backend has this scaling rule, or if none is named."""
    return word is None or _own_name(registry.get_compute(compute), word) is not None


def _own_name(backend: Compute, word: str) -> str | None:
    """Return a backend's own name of a scaling rule; None without the rule."""
    names = _PER_TENSOR if word in _PER_TENSOR else (word,)
    known = (*backend.scalings, *backend.unnamed_scalings)
    return next((name for name in names if name in known), None)


def scaling_name(compute: str, word: Any, place: str) -> str:
    """Return this backend's name of a scaling rule; any word for `auto`. `place`: the source of the
    word."""
    if not isinstance(word, str):
        raise RecipeError(f"{place}: the name of a scaling rule is wanted, such as 'delayed'")
    word = word.strip().lower()
    if compute == AUTO:
        return word  # checked once a backend is chosen
    backend = registry.get_compute(compute)
    if (name := _own_name(backend, word)) is not None:
        return name
    valid = ", ".join(
        f"{rule} (default)" if rule == backend.default_scaling else rule
        for rule in backend.scalings
    )
    raise RecipeError(
        f"{place}: {compute} has no scaling {shown(word)}{closest(word, backend.scalings)}; it has "
        f"{valid}"
    )
