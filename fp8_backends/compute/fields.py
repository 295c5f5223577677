"""The fields of a recipe, as a table: default, what values they take, and which scaling rules read them.

Names and defaults are those of Accelerate's own FP8 handlers, so a script changes only its import.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import RecipeError
from .te.amax_group import process_group

LEVELS = ("O0", "O1", "O2", "O3")
"""MS-AMP's levels; O0 leaves weights, gradients and optimizer states alone."""
DEFAULT_LEVEL = "O2"


class FieldRule(NamedTuple):
    """What one recipe field takes. `parse` returns the value in its one spelling, or raises ValueError("must be …")."""

    default: Any
    parse: Callable[[Any], Any]
    scalings: tuple[str, ...] | None = None
    """The scaling rules that read the field; None: all of a compute that has the field."""
    levels: tuple[str, ...] = LEVELS
    """The levels that read the field."""
    idle: Any = None
    """The value that every backend honours by doing nothing, such as False for a feature that is off; None: none."""


# Parsers. Strings are understood everywhere, since a value may come from the environment or from YAML.

_TRUE, _FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")


def flag(value: Any) -> bool:
    """A bool, or a string that Accelerate's launcher may write for one."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in (*_TRUE, *_FALSE):
        return value.strip().lower() in _TRUE
    raise ValueError("must be True or False")


def whole_number(minimum: int | None = None) -> Callable[[Any], int]:
    wanted = "must be a whole number" + ("" if minimum is None else f" of at least {minimum}")

    def parse(value: Any) -> int:
        if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or (minimum is not None and value < minimum):
            raise ValueError(wanted)
        return value

    return parse


def one_of(*words: str) -> Callable[[Any], str]:
    by_lower_case = {word.lower(): word for word in words}

    def parse(value: Any) -> str:
        word = by_lower_case.get(value.strip().lower()) if isinstance(value, str) else None
        if word is None:
            raise ValueError(f"must be one of {', '.join(words)}")
        return word

    return parse


def fp8_format(value: Any) -> str:
    """HYBRID or E4M3, as a string in any case or as a member of TransformerEngine's `Format`."""
    word = getattr(value, "name", value)
    if isinstance(word, str) and word.strip().upper() == "E5M2":
        raise ValueError(
            "must be HYBRID or E4M3: with E5M2 throughout, forward would multiply E5M2 by E5M2, a product that no GPU "
            "has (TransformerEngine refuses it, too)"
        )
    return one_of("HYBRID", "E4M3")(word)


def three_flags(value: Any) -> tuple[bool, bool, bool]:
    """Three bools for fprop, dgrad, wgrad; also the string "(false, false, false)" of Accelerate's documentation."""
    if isinstance(value, str):
        value = value.strip().strip("()[]").split(",")
    try:
        flags = tuple(map(flag, value))
    except (TypeError, ValueError):
        flags = ()
    if len(flags) != 3:
        raise ValueError("must be three bools, for fprop, dgrad and wgrad in high precision")
    if all(flags):
        raise ValueError("must leave one product in FP8: with all three in high precision, train in bf16 instead")
    return flags


def patterns(value: Any) -> tuple[str, ...]:
    """Name patterns: one string (commas separate several) or a sequence of strings."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    names = tuple(value) if isinstance(value, Iterable) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError('must be name patterns, such as "model.layers.*.mlp.*" or ["q_proj", "k_proj"]')
    return names


def function(value: Any) -> Callable:
    if not callable(value):
        raise ValueError("must be a function of (module, name) that returns whether to convert the module")
    return value


def amax_algorithm(value: Any) -> str:
    if callable(value):
        raise ValueError(
            "must be one of max, most_recent: with a function of your own TransformerEngine leaves its fused update, "
            "whose zeros, infs and NaNs go other ways"
        )
    return one_of("max", "most_recent")(value)


def only_off(reason: str) -> Callable[[Any], bool]:
    """A flag that is known and never on."""

    def parse(value: Any) -> bool:
        if flag(value):
            raise ValueError(f"must be False: {reason}")
        return False

    return parse


def torchao_config(value: Any) -> Any:
    if type(value).__name__ != "Float8LinearConfig":
        raise ValueError("must be a torchao.float8.Float8LinearConfig")
    return value


_DELAYED = ("delayed",)
_ABOVE_O0 = ("O1", "O2", "O3")
_attention = only_off(
    "this package converts Linear layers, and attention stays the model's own, in high precision (PyTorch's "
    "scaled_dot_product_attention, or what attn_implementation names); for attention in FP8 build it of "
    "TransformerEngine's DotProductAttention and enter its autocast yourself"
)

FIELDS: dict[str, FieldRule] = {
    # which products, in which numbers: fields of TransformerEngine's handler
    "fp8_format": FieldRule("HYBRID", fp8_format),
    "margin": FieldRule(0, whole_number(), _DELAYED),
    "interval": FieldRule(1, whole_number(1), _DELAYED),
    "amax_history_len": FieldRule(1024, whole_number(1), _DELAYED),
    "amax_compute_algo": FieldRule("most_recent", amax_algorithm, _DELAYED),
    "override_linear_precision": FieldRule((False, False, False), three_flags),
    "use_autocast_during_eval": FieldRule(False, flag),
    "use_mxfp8_block_scaling": FieldRule(False, flag),
    # what TransformerEngine has beyond them; the first is native's, too
    "fp8_params": FieldRule(False, flag, levels=("O0",), idle=False),
    "fp8_group": FieldRule(None, process_group, _DELAYED),
    "fuse_norms": FieldRule(False, flag, idle=False),
    "fp8_dpa": FieldRule(False, _attention, idle=False),
    "fp8_mha": FieldRule(False, _attention, idle=False),
    # fields of TorchAO's handler
    "config": FieldRule(None, torchao_config),
    "pad_inner_dim": FieldRule(None, flag),
    "enable_fsdp_float8_all_gather": FieldRule(None, flag),
    "auto_filter": FieldRule(False, flag),
    # how a level stores weights and states
    "rounding": FieldRule("stochastic", one_of("stochastic", "nearest"), levels=_ABOVE_O0),
    "exp_avg_scaling": FieldRule("tensor", one_of("tensor", "block"), levels=_ABOVE_O0),
    "implementation": FieldRule("native", one_of("native", "original"), levels=_ABOVE_O0),
    "shard_states": FieldRule(True, flag, levels=("O3",)),
    # which layers, and what surrounds them: fields of every recipe
    "include": FieldRule(None, patterns),
    "exclude": FieldRule(None, patterns),
    "module_filter_func": FieldRule(None, function),
    "autocast_dtype": FieldRule("bf16", one_of("bf16", "fp16", "fp32")),
    "gradient_comm": FieldRule(None, one_of("fp8", "plain")),
    "on_unproven": FieldRule("raise", one_of("raise", "warn")),
}

COMMON_FIELDS = ("include", "exclude", "module_filter_func", "autocast_dtype", "gradient_comm", "on_unproven")
"""Fields that every backend has."""

LEVEL_FIELDS = ("rounding", "exp_avg_scaling", "implementation", "shard_states")
"""Fields that levels read, whatever the compute."""

NAMING_FIELDS = ("backend", "scaling", "opt_level", "use_mxfp8_block_scaling")
"""Fields that take part in the name of the backend."""

FORMAT_OF_SCALING = {"rowwise": "E4M3", "blockwise": "E4M3", "mxfp8": "E4M3"}
"""Where the default of `fp8_format` is not HYBRID: scales this fine leave a gradient little need of E5M2's range.
TransformerEngine's block recipes and TorchAO's rowwise one have the same default."""


def parse_field(name: str, value: Any) -> Any:
    """The value in its one spelling. Raises `RecipeError` naming the field."""
    try:
        return FIELDS[name].parse(value)
    except ValueError as error:
        raise RecipeError(f"{name}={value!r}: {name} {error}") from None


def closest(word: str, words: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no word is close."""
    matches = difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def unknown_field(name: str, owner: str, own: Iterable[str], elsewhere: Mapping[str, Iterable[str]]) -> RecipeError:
    """The error for a field that `owner` does not have. `elsewhere`: which fields the other handlers have."""
    holders = [holder for holder, names in elsewhere.items() if name in names]
    if holders:
        return RecipeError(
            f"{name} is not a field of {owner} but of {' and '.join(holders)}; use that, or "
            "FP8RecipeKwargs(backend=…), which takes the fields of every backend"
        )
    known = sorted(own)
    return RecipeError(f"{name} is not a field of {owner}{closest(name, known)}; it has {', '.join(known)}")
