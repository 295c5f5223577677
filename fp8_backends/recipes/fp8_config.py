"""FP8 in configuration files of Accelerate, as fields of `FP8RecipeKwargs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compute.fields import Field, Variable
from ..errors import RecipeError
from .fields import VARIABLES, field_value, find_variable
from .merging import Source, merged
from .sources import unknown_variable


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
    """What the `fp8_config` block says, for `merging.merged`. Arguments and errors as `accelerate_fields`."""
    if not isinstance(fp8_config or {}, Mapping):
        raise RecipeError(f"{source}: fp8_config must be a block of keys, not {fp8_config!r}")
    fields: dict[str, Any] = {}
    places: dict[str, str] = {}
    idle: set[str] = set()
    for key, value in (fp8_config or {}).items():
        field, variable = _variable(str(key), source)
        name = field.name
        if value is None or (name == "backend" and str(value).strip().upper() in ("", "NO")):
            continue
        place = f"{source}: fp8_config.{key}={value!r}"
        try:
            parsed = field_value(field, value)
        except RecipeError as error:
            raise RecipeError(f"{place}: {error}") from None
        if fields.setdefault(name, parsed) != parsed:
            raise RecipeError(f"{place} disagrees with {places[name]}: leave one of the two out")
        places.setdefault(name, place)
        if parsed in (variable.launcher_default, variable.question_default):
            idle.add(name)
    return Source(fields, places, frozenset(idle), selects_levels=False)


def _variable(key: str, source: str) -> tuple[Field, Variable]:
    suffix = key.strip().lower().removeprefix("fp8_").upper()
    found = find_variable(suffix)
    if found is None:
        raise unknown_variable(f"{source}: fp8_config.{key}", suffix, _key)
    return found


def _key(suffix: str) -> str:
    """The name of a key: the field's own, or one of the questions'."""
    field, _ = VARIABLES[suffix]
    return field.name if suffix in field.name.upper() else suffix.lower()
