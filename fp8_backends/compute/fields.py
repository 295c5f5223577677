"""Declare a field of a recipe: its values, its default, and the rules and levels that read it.

Everything else follows from the declaration: flags of `fp8-backends launch`, variables `ACCELERATE_FP8_*`, keys of a
YAML file, NeMo's and Megatron's names, and the table in the documentation. This package's own fields are in
`recipes.fields`; a backend may declare more.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ..errors import RecipeError
from ..words import shortened, shown

LEVELS = ("O0", "O1", "O2", "O3", "O4")
"""MS-AMP's levels, and O4 beyond them; O0 leaves weights, gradients and optimizer states alone."""
DEFAULT_LEVEL = "O2"
RULE_FIELDS = (
    *("use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo"),
    *("override_linear_precision", "fp8_params"),
)
"""Names of the fields of TransformerEngine's rules, which `native` follows too."""


class Variable(NamedTuple):
    """A name of a field in `ACCELERATE_FP8_*` and in the `fp8_config` block of a YAML file, in upper case."""

    suffix: str
    launcher_default: Any = None
    """What Accelerate's launcher exports when the user gave nothing. In the environment it counts as not given."""
    question_default: Any = None
    """What `accelerate config` writes when the user just presses Enter, where that is another value."""
    reads: Callable[[Any], Any] | None = None
    """Turns the variable's value into the field's, where the two differ; None then stands for "not given"."""


def parsed(name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    """The value of a field, or of an argument of this name, as its parser reads it. Raises `RecipeError` naming it."""
    try:
        return parse(value)
    except (TypeError, ValueError, OverflowError) as error:
        reason = shortened(str(error), 1000)
        if not reason.startswith("must "):  # of a function that was not written for this, such as `int`
            reason = f"must be {getattr(parse, 'values', '') or 'another value'} ({reason})"
        raise RecipeError(f"{name}={shown(value)}: {name} {reason}") from None


def same(value: Any) -> Any:
    """Returns the value itself."""
    return value


@dataclass(frozen=True)
class Field:
    """Describe one field of a recipe. Only the first three are needed."""

    name: str
    default: Any
    parse: Callable[[Any], Any]
    """Returns the value in its one spelling, or raises ValueError("must be …"). Takes text as well, since a value may
    come from the environment or from YAML. Its attribute `values`, if it has one, names the values for people, and its
    annotations name their types for type checkers."""
    help: str = ""
    """One sentence, for the flag and the table. This package's own fields have docstrings instead."""
    scalings: tuple[str, ...] | None = None
    """The scaling rules that read the field; None: all of a backend that has the field."""
    levels: tuple[str, ...] = LEVELS
    """The levels that read the field."""
    idle: Any = None
    """The value that every backend honours by doing nothing, such as False for a feature that is off; None: none."""
    default_of_scaling: Mapping[str, Any] = field(default_factory=dict)
    """Where a scaling rule has another default."""
    names_scaling: Callable[[Any], str | None] | None = None
    """The scaling rule that a value of this field stands for, if it does."""
    launcher_default: Any = None
    """As in `Variable`."""
    further_variables: tuple[Variable, ...] = ()
    """Other names in the environment and in YAML files. They are no flags."""
    synonyms: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """NeMo's and Megatron's names of the field, each with what turns their value into ours."""
    is_object: bool = False
    """Whether the value is a Python object, which no text can give."""
    only_watches: bool = False
    """Whether the field says how a training is watched, and not how it computes: two recipes that differ in nothing
    else go together, in one model and in a checkpoint."""

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All names in the environment; the first one is a flag as well, as `--fp8_<suffix>`. None for an object."""
        if self.is_object:
            return ()
        return (Variable(self.own_suffix, self.launcher_default), *self.further_variables)

    @property
    def own_suffix(self) -> str:
        return self.name.removeprefix("fp8_").upper()

    @property
    def values(self) -> str:
        """The values that the field takes, in words; empty where they are plain from the help."""
        return getattr(self.parse, "values", "")

    @property
    def values_and_default(self) -> str:
        """Such as `a whole number from -64 to 64; default 0`; empty where the help says it all."""
        parts = [self.values] if self.values else []
        parts += [] if self.default is None else [f"default {self.default!r}"]
        for value in dict.fromkeys(self.default_of_scaling.values()):
            scalings = [scaling for scaling, other in self.default_of_scaling.items() if other == value]
            parts.append(f"{value!r} with {', '.join(scalings)}")
        return "; ".join(parts)

    def parsed(self, value: Any) -> Any:
        """The value in its one spelling. Raises `RecipeError` naming the field."""
        return parsed(self.name, self.parse, value)

    def default_for(self, scaling: str | None) -> Any:
        """The default under a scaling rule."""
        return self.default_of_scaling.get(scaling, self.default)


# Parsers


def _takes(values: str) -> Callable:
    """A parser's values, in words."""

    def name_values(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
        parse.values = values
        return parse

    return name_values


_TRUE, _FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")


@_takes("True, False")
def flag(value: Any) -> bool:
    """A bool, or a string that Accelerate's launcher may write for one."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in (*_TRUE, *_FALSE):
        return value.strip().lower() in _TRUE
    raise ValueError("must be True or False")


def whole_number(minimum: int | None = None, maximum: int | None = None) -> Callable[[Any], int]:
    """The parser of a whole number from `minimum` to `maximum`, each of them if it is given."""
    lowest, highest = -math.inf if minimum is None else minimum, math.inf if maximum is None else maximum
    if maximum is not None:
        wanted = f"a whole number from {lowest} to {maximum}"
    else:
        wanted = "a whole number" + ("" if minimum is None else f" of at least {minimum}")

    @_takes(wanted)
    def parse(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,100}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise ValueError(f"must be {wanted}")
        return value

    return parse


def word(value: Any) -> str:
    """A text without the spaces around it."""
    if not isinstance(value, str):
        raise ValueError("must be a word")
    return value.strip()


def one_of(*words: str) -> Callable[[Any], str]:
    """The parser of one of these words, in any case."""
    by_lower_case = {word.lower(): word for word in words}

    @_takes(", ".join(words))
    def parse(value: Any) -> str:
        word = by_lower_case.get(value.strip().lower()) if isinstance(value, str) else None
        if word is None:
            raise ValueError(f"must be one of {', '.join(words)}")
        return word

    return parse


@_takes("HYBRID, E4M3")
def fp8_format(value: str | Enum) -> str:
    """HYBRID or E4M3, as a string in any case or as a member of TransformerEngine's `Format`."""
    word = getattr(value, "name", value)
    if isinstance(word, str) and word.strip().upper() == "E5M2":
        raise ValueError(
            "must be HYBRID or E4M3: with E5M2 throughout, forward would multiply E5M2 by E5M2, a product that no GPU "
            "has (TransformerEngine refuses it, too)"
        )
    return one_of("HYBRID", "E4M3")(word)


@_takes("three bools")
def three_flags(value: Sequence[bool] | str) -> tuple[bool, bool, bool]:
    """Three bools for fprop, dgrad, wgrad; also the string "(false, false, false)" of Accelerate's documentation."""
    if isinstance(value, str):
        value = value.strip().strip("()[]").split(",")
    try:
        flags = tuple(map(flag, value)) if isinstance(value, Sequence) else ()
    except ValueError:
        flags = ()
    if len(flags) != 3:
        raise ValueError("must be three bools, for fprop, dgrad and wgrad in high precision")
    if all(flags):
        raise ValueError("must leave one product in FP8: with all three in high precision, train in bf16 instead")
    return flags


@_takes("most_recent, max")
def amax_algorithm(value: Any) -> str:
    """`most_recent` or `max`."""
    if callable(value):
        raise ValueError(
            "must be one of max, most_recent: with a function of your own TransformerEngine leaves its fused update, "
            "whose zeros, infs and NaNs go other ways"
        )
    return one_of("max", "most_recent")(value)


# Words in errors


def closest(word: str, words: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no word is close."""
    matches = difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def check_known(what: str, word: Any, words: Iterable[str]) -> None:
    """Raise `RecipeError`, with the nearest word, where a word is none of these. `what`: what it is a word for."""
    words = tuple(words)
    if not isinstance(word, str) or word not in words:
        near = closest(word, words) if isinstance(word, str) else ""
        raise RecipeError(f"{what} {shown(word)} is not known{near}; there are {', '.join(words)}")
