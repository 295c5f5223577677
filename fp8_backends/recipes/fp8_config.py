"""FP8 in configuration files of Accelerate, as fields of `FP8RecipeKwargs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RecipeError
from .merging import Source, merged
from .sources import VARIABLES, Variable, field_value, unknown_variable


def accelerate_fields(fp8_config: Mapping[str, Any] | None, source: str) -> dict[str, Any]:
    """The fields of `FP8RecipeKwargs` that the `fp8_config` block of an Accelerate YAML file means.

    Keys are Accelerate's, those that `accelerate config` writes (`amax_history_length`, `optimization_level`, …), and
    every field of a recipe, each with or without `fp8_` in front. A value that Accelerate or its questions fill in by
    default counts as not given where the backend does not read it.

    Args:
        fp8_config: the block, as parsed.
        source: the file's name, for messages.

    Raises:
        RecipeError: an unknown key, with the nearest known one, a value that cannot be read, and a value that this
            backend does not read; each names key and file.
    """
    return merged([config_source(fp8_config, source)])


def config_source(fp8_config: Mapping[str, Any] | None, source: str) -> Source:
    """What the `fp8_config` block says, for `recipe_merging.merged`. Arguments and errors as `accelerate_fields`."""
    if not isinstance(fp8_config or {}, Mapping):
        raise RecipeError(f"{source}: fp8_config must be a block of keys, not {fp8_config!r}")
    fields: dict[str, Any] = {}
    said: dict[str, str] = {}
    idle: set[str] = set()
    for key, value in (fp8_config or {}).items():
        variable = _variable(str(key), source)
        if value is None or (variable.field == "backend" and str(value).strip().upper() in ("", "NO")):
            continue
        place = f"{source}: fp8_config.{key}={value!r}"
        parsed = _parsed(variable.field, value, place)
        if fields.setdefault(variable.field, parsed) != parsed:
            raise RecipeError(f"{place} disagrees with {said[variable.field]}: leave one of the two out")
        said.setdefault(variable.field, place)
        if parsed in (variable.launcher_default, variable.question_default):
            idle.add(variable.field)
    return Source(fields, said, frozenset(idle), selects_levels=False)


def _variable(key: str, source: str) -> Variable:
    suffix = key.strip().lower().removeprefix("fp8_").upper()
    if suffix not in VARIABLES:
        raise unknown_variable(f"{source}: fp8_config.{key}", suffix, _key)
    return VARIABLES[suffix]


def _key(suffix: str) -> str:
    """The name of a key: the field's own, or one of the questions'."""
    field = VARIABLES[suffix].field
    return field if suffix in field.upper() else suffix.lower()


def _parsed(field: str, value: Any, place: str) -> Any:
    try:
        return field_value(field, value)
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from None
