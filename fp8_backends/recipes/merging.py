"""Merge one recipe from several places: code, flags, a YAML file, the environment.

The stronger place wins, field by field. A field from a weaker place that the chosen backend does
not read is an error, unless it is a default that the place fills in.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RecipeError
from ..words import shown
from .fields import NAMING
from .handlers import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    Recipe,
    TERecipeKwargs,
    refusal_of,
)
from .sources import Source, file_source, foreign_fields
from .strings import AUTO, BackendName, names_file, parse_backend, scaling_name


def merged(sources: Sequence[Source]) -> dict[str, Any]:
    """Merge the fields of these places, the strongest first. A recipe file in a place is weaker
    than the place's other fields. Raises `RecipeError` with the field's place."""
    sources = [part for source in sources for part in _without_file(source)]
    naming = _merged_naming(sources)
    fields = dict(naming)
    for source in sources:
        for name, value in source.fields.items():
            if name in NAMING or name in fields:
                continue
            refusal = _refusal({**naming, name: value})
            if refusal is None:
                fields[name] = value
            elif name not in source.idle:
                raise RecipeError(f"{source.places[name]}: {refusal}")
    return fields


def _without_file(source: Source) -> list[Source]:
    """Return the place's own fields, followed by those of the recipe file in its backend."""
    backend = source.fields.get("backend")
    if not names_file(backend):
        return [source]
    return [source._replace(fields={**source.fields, "backend": None}), file_source(backend)]


def _merged_naming(sources: Sequence[Source]) -> dict[str, Any]:
    """Merge the naming fields: stronger places override parts of the backend string, which
    overrides the others."""
    naming: dict[str, Any] = {}
    at = _strongest(sources, "backend")
    name = BackendName(AUTO)
    if at is not None:
        naming["backend"] = sources[at].fields["backend"]
        _check_naming(naming, sources[at], "backend")
        name = parse_backend(naming["backend"])
    for part, field in (("scaling", "scaling"), ("level", "opt_level")):
        by = _strongest(sources, field)
        if by is None:
            continue
        source, is_idle = sources[by], field in sources[by].idle
        if field == "opt_level" and not source.selects_levels and name.level is None:
            if is_idle:
                continue
            level = source.fields[field]
            raise RecipeError(
                f"{source.places[field]}: {level} selects no level by itself: say the backend as "
                f"msamp:{level} or COMPUTE+msamp:{level}, or leave it out"
            )
        if by == at and is_idle and getattr(name, part):
            continue  # its default, and the string has another value
        if at is not None and by < at and getattr(name, part):
            name = name._replace(**{part: None if part == "scaling" else ""})
            scaling = f":{name.scaling}" if name.scaling else ""
            level = "" if name.level is None else f"+msamp:{name.level}".rstrip(":")
            naming["backend"] = f"{name.compute}{scaling}{level}"
        if at is None or by <= at or not getattr(name, part):
            naming[field] = source.fields[field]
            _check_naming(naming, source, field)
    return naming


def _strongest(sources: Sequence[Source], field: str) -> int | None:
    """Return the index of the strongest place with this field."""
    return next(
        (i for i, source in enumerate(sources) if source.fields.get(field) is not None), None
    )


def _check_naming(naming: Mapping[str, Any], source: Source, field: str) -> None:
    if error := _refusal(naming):
        raise RecipeError(f"{source.places[field]}: {error}")


def _refusal(fields: Mapping[str, Any]) -> RecipeError | None:
    """Return the error if the backend, or for `auto` every backend it may choose, cannot honour
    these fields."""
    backends = [fields.get("backend", AUTO)]
    if backends[0].strip().lower() == AUTO:
        backends = (
            ["te", "native"] if importlib.util.find_spec("transformer_engine") else ["native"]
        )
    refusals = [refusal_of(backend, fields) for backend in backends]
    return None if None in refusals else refusals[0]


LAUNCH = "fp8-backends launch"


def code_over_launch(
    handler: Any, launched: Mapping[str, Any], origin: str = LAUNCH
) -> tuple[Recipe, str | None]:
    """Merge a handler with the fields of a launch or of the environment (`origin`, for messages); a
    handler with another backend ignores them. Return the recipe, and a warning in one line if the
    script overrides the launch. In Accelerate's handlers, which fill in every field, a value equal
    to the default counts as not given."""
    name, recipe = type(handler).__name__, handler
    if not isinstance(handler, Recipe):  # Accelerate's: ours of the same name
        fields = {key: value for key, value in foreign_fields(handler).items() if value is not None}
        ours = {"te": TERecipeKwargs, "msamp": MSAMPRecipeKwargs, "ao": AORecipeKwargs}[
            fields.pop("backend").lower()
        ]
        if ours is MSAMPRecipeKwargs and fields.get("opt_level") == "O2":
            del fields["opt_level"]
        recipe = ours(**fields)
    launch_recipe = FP8RecipeKwargs(**launched)
    if not _agree_on_backend(
        recipe, FP8RecipeKwargs(**{key: launched[key] for key in NAMING if key in launched})
    ):
        warning = f"{name} in the script means {recipe.name}, {origin} said {_written(launched)}: "
        return recipe, warning + "the script's recipe is used, and alone"
    fields = {
        key: value for key, value in recipe.to_kwargs().items() if (key, value) != ("backend", AUTO)
    }
    if launch_recipe.compute == AUTO != recipe.compute:
        fields.setdefault("backend", type(recipe).backend_name)
    code = Source(fields, {key: f"{key} of {name} in the script" for key in fields})
    places = {key: f"{key} of {origin}" for key in launched}
    launch = Source(launched, places, selects_levels=origin == LAUNCH)
    in_file = launch_recipe.to_kwargs().keys() - {*NAMING}
    both = fields.keys() & {*launched, *in_file} - {"backend"}
    values = dict(launch_recipe.__dict__)
    if "scaling" in both:
        values["scaling"] = scaling_name(recipe.compute, values["scaling"], f"scaling of {origin}")
    overridden = {
        key: launched.get(key, values[key]) for key in sorted(both) if values[key] != fields[key]
    }
    warning = None
    if overridden:
        warning = (
            f"{name} in the script says {_written({key: fields[key] for key in overridden})}, "
            f"{origin} said {_written(overridden)}: the script's value is used"
        )
    return FP8RecipeKwargs(**merged([code, launch])), warning


def _agree_on_backend(recipe: Recipe, launched: Recipe) -> bool:
    """Return True if a script's recipe keeps the launch's backend. A recipe without a backend
    completes any."""
    if AUTO in (recipe.compute, launched.compute):
        return True
    given = recipe.to_kwargs()
    if "backend" in given:
        return recipe.name == launched.name
    implied = parse_backend(type(recipe).backend_name)
    same_scaling = "scaling" not in given or recipe.scaling == launched.scaling
    same_level = "opt_level" not in given or recipe.level == launched.level
    has_level = implied.level is None or launched.level != "O0"
    return implied.compute == launched.compute and has_level and same_scaling and same_level


def _written(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in fields.items())
