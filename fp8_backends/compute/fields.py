"""Declare a field of a recipe: its values, its default, and the rules and levels that read it. This
package's own fields are in `recipes.fields`; a backend may declare more."""

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
"""MS-AMP's levels, and O4 beyond them; O0 leaves weights, gradients and optimizer states
unchanged."""
DEFAULT_LEVEL = "O2"
RULE_FIELDS = (
    "use_autocast_during_eval",
    "margin",
    "interval",
    "fp8_format",
    "amax_history_len",
    "amax_compute_algo",
    "override_linear_precision",
    "products",
    "fp8_params",
)
"""Fields of TransformerEngine's rules, also in `native`."""


class Variable(NamedTuple):
    """A name of a field in `ACCELERATE_FP8_*` and in the `fp8_config` block of a YAML file, in
    upper case."""

    suffix: str
    launcher_default: Any = None
    """The value exported by Accelerate's launcher by default. In the environment it counts as not
    given."""
    question_default: Any = None
    """The value written by `accelerate config` for an empty answer, if it is another one."""
    reads: Callable[[Any], Any] | None = None
    """Turns the variable's value into the field's, if the two differ; a result of None is "not
    given"."""


def parsed(name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    """Parse the value of a field or an argument. Raises `RecipeError` with its name."""
    try:
        return parse(value)
    except (TypeError, ValueError, OverflowError) as error:
        reason = shortened(str(error), 1000)
        if not reason.startswith("must "):  # the error of a general function, such as `int`
            reason = f"must be {getattr(parse, 'values', '') or 'another value'} ({reason})"
        raise RecipeError(f"{name}={shown(value)}: {name} {reason}") from None


def same(value: Any) -> Any:
    """Return the value itself."""
    return value


@dataclass(frozen=True)
class Field:
    """Describe one field of a recipe. Only the first three are needed."""

    name: str
    default: Any
    parse: Callable[[Any], Any]
    """Returns the value in its one spelling, or raises ValueError("must be …"). Takes text as well,
    for the environment and YAML. An attribute `values` names the values for people, and annotations
    name types for type checkers."""
    help: str = ""
    """One sentence, for the flag and the table. This package's own fields have docstrings
    instead."""
    scalings: tuple[str, ...] | None = None
    """The scaling rules that read the field; None: all rules of the backend."""
    levels: tuple[str, ...] = LEVELS
    """The levels that read the field."""
    idle: Any = None
    """The value that needs no support by a backend, such as False for a feature that is off; None:
    none."""
    default_of_scaling: Mapping[str, Any] = field(default_factory=dict)
    """Other defaults, by scaling rule."""
    names_scaling: Callable[[Any], str | None] | None = None
    """Returns the scaling rule implied by a value, or None."""
    launcher_default: Any = None
    """See `Variable`."""
    further_variables: tuple[Variable, ...] = ()
    """Other names in the environment and in YAML files, without flags."""
    synonyms: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """NeMo's and Megatron's names of the field, with functions from their values to ours."""
    is_object: bool = False
    """True for a Python object, without a form as text."""
    is_feature: bool = False
    """True if the field turns on a feature of one's own, which `convert.features` runs."""
    only_watches: bool = False
    """True if the field changes only the watching of a training, and no number: recipes that differ
    only in such fields go together, in one model and in a checkpoint."""

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Return all names in the environment; the first one is also a flag, `--fp8_<suffix>`.
        Empty for an object."""
        if self.is_object:
            return ()
        return (Variable(self.own_suffix, self.launcher_default), *self.further_variables)

    @property
    def own_suffix(self) -> str:
        return self.name.removeprefix("fp8_").upper()

    @property
    def values(self) -> str:
        """Return the valid values in words; empty if the help names them."""
        return getattr(self.parse, "values", "")

    @property
    def values_and_default(self) -> str:
        """Describe values and default, such as `a whole number from -64 to 64; default 0`."""
        parts = [self.values] if self.values else []
        parts += [] if self.default is None else [f"default {self.default!r}"]
        for value in dict.fromkeys(self.default_of_scaling.values()):
            scalings = [
                scaling for scaling, other in self.default_of_scaling.items() if other == value
            ]
            parts.append(f"{value!r} with {', '.join(scalings)}")
        return "; ".join(parts)

    def parsed(self, value: Any) -> Any:
        """Return the value in its one spelling. Raises `RecipeError` with the field's name."""
        return parsed(self.name, self.parse, value)


def _takes(values: str) -> Callable:
    """Name a parser's values."""

    def name_values(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
        parse.values = values
        return parse

    return name_values


TRUE = ("true", "1", "yes", "y", "on", "t")
FALSE = ("false", "0", "no", "n", "off", "f")


@_takes("True, False")
def flag(value: Any) -> bool:
    """Parse a bool, or a string for one by Accelerate's launcher."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in (*TRUE, *FALSE):
        return value.strip().lower() in TRUE
    raise ValueError("must be True or False")


def whole_number(minimum: float = -math.inf, maximum: float = math.inf) -> Callable[[Any], int]:
    """Return the parser of a whole number from `minimum` to `maximum`."""
    bounds = f" of at least {minimum}" if minimum > -math.inf else ""
    wanted = f"a whole number{f' from {minimum} to {maximum}' if maximum < math.inf else bounds}"

    @_takes(wanted)
    def parse(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,100}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise ValueError(f"must be {wanted}")
        return value

    return parse


def word(value: Any) -> str:
    """Parse a text, without the spaces around it."""
    if not isinstance(value, str):
        raise ValueError("must be a word")
    return value.strip()


def one_of(*words: str) -> Callable[[Any], str]:
    """Return the parser of one of these words, in any case."""
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
    """Parse HYBRID or E4M3: a string in any case or a member of TransformerEngine's `Format`."""
    word = getattr(value, "name", value)
    if isinstance(word, str) and word.strip().upper() == "E5M2":
        raise ValueError(
            "must be HYBRID or E4M3: with E5M2 throughout, forward would multiply E5M2 by E5M2, "
            "and no GPU has this product (TransformerEngine refuses it, too)"
        )
    return one_of("HYBRID", "E4M3")(word)


@_takes("three bools")
def three_flags(value: Sequence[bool] | str) -> tuple[bool, bool, bool]:
    """Parse three bools for fprop, dgrad, wgrad, also as Accelerate's documentation has it:
    "(false, false, false)"."""
    if isinstance(value, str):
        value = value.strip().strip("()[]").split(",")
    try:
        flags = tuple(map(flag, value)) if isinstance(value, Sequence) else ()
    except ValueError:
        flags = ()
    if len(flags) != 3:
        raise ValueError("must be three bools, for fprop, dgrad and wgrad in high precision")
    if all(flags):
        raise ValueError(
            "must leave one product in FP8: with all three in high precision, train in bf16 instead"
        )
    return flags


@_takes("most_recent, max")
def amax_algorithm(value: Any) -> str:
    """Parse `most_recent` or `max`."""
    if callable(value):
        raise ValueError(
            "must be one of max, most_recent: with a function of your own TransformerEngine leaves "
            "its fused update, whose zeros, infs and NaNs go other ways"
        )
    return one_of("max", "most_recent")(value)


def closest(word: str, words: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)`, or an empty text if no word is close."""
    matches = difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def check_known(what: str, word: Any, words: Iterable[str]) -> None:
    """Raise `RecipeError`, with the nearest word, for an unknown word. `what` names its meaning."""
    words = tuple(words)
    if not isinstance(word, str) or word not in words:
        near = closest(word, words) if isinstance(word, str) else ""
        raise RecipeError(f"{what} {shown(word)} is not known{near}; there are {', '.join(words)}")
