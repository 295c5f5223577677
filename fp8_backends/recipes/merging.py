"""One recipe from several places that each say a part of it: code, flags, a YAML file, the environment.

Field by field the stronger place wins. What only a weaker one says stays, as long as the backend that was chosen reads
it: where it does not, a value that its place fills in by default counts as not given, and any other is an error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import RecipeError
from ..words import shown
from .fields import NAMING
from .handlers import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    Recipe,
    TERecipeKwargs,
    asked_backend,
    refusal_of,
)
from .sources import Source, config_source, foreign_fields
from .strings import AUTO, BackendName, parse_backend


def merged(sources: Sequence[Source]) -> dict[str, Any]:
    """The fields of `FP8RecipeKwargs` that these places say together, the strongest place first.

    Raises `RecipeError` that begins with how the place says what cannot be honoured.
    """
    naming = _merged_naming(sources)
    fields = dict(naming)
    for source in sources:
        for name, value in source.fields.items():
            if name in NAMING or name in fields:
                continue
            refusal = _refusal(naming, {name: value})
            if refusal is None:
                fields[name] = value
            elif name not in source.idle:
                raise RecipeError(f"{source.places[name]}: {refusal}")
    return fields


def _merged_naming(sources: Sequence[Source]) -> dict[str, Any]:
    """The fields that make the backend's name. A part that a stronger place says takes the place of that part of the
    backend string; a part that the string says itself comes before what a weaker place says."""
    naming: dict[str, Any] = {}
    at = _first(sources, "backend")
    name = BackendName(AUTO)
    if at is not None:
        naming["backend"] = sources[at].fields["backend"]
        try:
            name = parse_backend(naming["backend"])
        except RecipeError as error:
            raise RecipeError(f"{sources[at].places['backend']}: {error}") from None
        _check_naming(sources[at], "backend", naming)
    for part, field in (("scaling", "scaling"), ("level", "opt_level")):
        by = _first(sources, field)
        if by is None or _is_idle_level(sources[by], field, name):
            continue
        if by == at and field in sources[by].idle and getattr(name, part):
            continue  # its default, beside a string that says another
        if at is not None and by < at and getattr(name, part):
            name = name._replace(**{part: None if part == "scaling" else ""})
            naming["backend"] = _text(name)
        if at is None or by <= at or not getattr(name, part):
            naming[field] = sources[by].fields[field]
            _check_naming(sources[by], field, naming)
    return naming


def _first(sources: Sequence[Source], field: str) -> int | None:
    """The strongest place that says the field."""
    return next((i for i, source in enumerate(sources) if source.fields.get(field) is not None), None)


def _is_idle_level(source: Source, field: str, name: BackendName) -> bool:
    """Whether this is a level that its place does not choose. Raises where it is no default either."""
    if field != "opt_level" or source.selects_levels or name.level is not None:
        return False
    if field in source.idle:
        return True
    level = source.fields[field]
    raise RecipeError(
        f"{source.places[field]}: {level} selects no level by itself: say the backend as msamp:{level} or "
        f"COMPUTE+msamp:{level}, or leave it out"
    )


def _text(name: BackendName) -> str:
    """The backend string of these parts."""
    scaling = f":{name.scaling}" if name.scaling else ""
    level = "" if name.level is None else f"+msamp:{name.level}".rstrip(":")
    return f"{name.compute}{scaling}{level}"


def _check_naming(source: Source, field: str, naming: Mapping[str, Any]) -> None:
    try:
        asked_backend(naming)
    except RecipeError as error:
        raise RecipeError(f"{source.places[field]}: {error}") from None
    if error := _refusal(naming, {}):
        raise RecipeError(f"{source.places[field]}: {error}")


def _refusal(naming: Mapping[str, Any], fields: Mapping[str, Any]) -> RecipeError | None:
    """Why the backend of this name cannot honour these fields, or None. `auto` honours what one of those backends does
    that it may choose on the machine that trains."""
    backends = [naming.get("backend", AUTO)]
    if backends[0].strip().lower() == AUTO:
        backends = ["te", "native"] if importlib.util.find_spec("transformer_engine") else ["native"]
    refusals = [refusal_of(backend, {**naming, **fields}) for backend in backends]
    return None if None in refusals else refusals[0]


def accelerate_fields(fp8_config: Mapping[str, Any] | None, source: str) -> dict[str, Any]:
    """The fields of `FP8RecipeKwargs` that the `fp8_config` block of an Accelerate YAML file means.

    Keys are Accelerate's, those that `accelerate config` writes (`amax_history_length`, `optimization_level`, …), and
    every field of a recipe, each with or without `fp8_` in front. A value that Accelerate or its questions fill in by
    default counts as not given where the backend does not read it.

    `source` is the file's name. Raises `RecipeError` for an unknown key, with the nearest known one, a value that
    cannot be read, and a value that this backend does not read; each names key and file.
    """
    return merged([config_source(fp8_config, source)])


# Code over launch


class CodeOverLaunch(NamedTuple):
    """What a handler in a script and a launch mean together."""

    recipe: Recipe
    warning: str | None
    """One line where the script overrides the launch."""


def code_over_launch(handler: Any, launched: Mapping[str, Any]) -> CodeOverLaunch:
    """A handler's fields over those of `fp8-backends launch`; a handler that names another backend counts alone.

    Args:
        handler: a recipe, of this package or Accelerate's. The latter fill every field in, so what equals Accelerate's
            default counts as not given.
        launched: fields of `FP8RecipeKwargs`.
    """
    name, recipe = type(handler).__name__, handler if isinstance(handler, Recipe) else _own_handler(handler)
    launch_recipe = FP8RecipeKwargs(**launched)
    if not _agree_on_backend(recipe, FP8RecipeKwargs(**{key: launched[key] for key in NAMING if key in launched})):
        warning = f"{name} in the script means {recipe.name}, fp8-backends launch said {_written(launched)}: "
        return CodeOverLaunch(recipe, warning + "the script's recipe is used, and alone")
    own = {key: value for key, value in recipe.to_kwargs().items() if (key, value) != ("backend", AUTO)}
    if launch_recipe.compute == AUTO != recipe.compute:
        own.setdefault("backend", type(recipe).backend_name)
    code = Source(own, {key: f"{key} of {name} in the script" for key in own})
    launch = Source(launched, {key: f"{key} of fp8-backends launch" for key in launched})
    both = (own.keys() & launched.keys()) - {"backend"}
    overridden = {key: launched[key] for key in sorted(both) if launch_recipe.__dict__[key] != own[key]}
    warning = None
    if overridden:
        warning = (
            f"{name} in the script says {_written({key: own[key] for key in overridden})}, fp8-backends launch said "
            f"{_written(overridden)}: the script's value is used"
        )
    return CodeOverLaunch(FP8RecipeKwargs(**merged([code, launch])), warning)


def _own_handler(handler: Any) -> Recipe:
    """Accelerate's handler as ours of the same name."""
    fields = {name: value for name, value in foreign_fields(handler).items() if value is not None}
    own = {"te": TERecipeKwargs, "msamp": MSAMPRecipeKwargs, "ao": AORecipeKwargs}[fields.pop("backend").lower()]
    if own is MSAMPRecipeKwargs and fields.get("opt_level") == "O2":
        del fields["opt_level"]
    return own(**fields)


def _agree_on_backend(recipe: Recipe, launched: Recipe) -> bool:
    """Whether a script's recipe leaves the launch's backend as it is. Without a backend it completes any."""
    if AUTO in (recipe.compute, launched.compute):
        return True
    own = recipe.to_kwargs()
    if "backend" in own:
        return recipe.name == launched.name
    implied = parse_backend(type(recipe).backend_name)
    same_scaling = "scaling" not in own or recipe.scaling == launched.scaling
    same_level = "opt_level" not in own or recipe.level == launched.level
    has_level = implied.level is None or launched.level != "O0"
    return implied.compute == launched.compute and has_level and same_scaling and same_level


def _written(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in fields.items())
