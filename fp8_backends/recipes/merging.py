"""Merge the recipe fields of several places by one precedence: code, flags, a YAML file, the
environment.

The stronger place wins, field by field. A field that the chosen backend does not read is an error
with its place, unless it is a default that the place fills in.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..compute import registry
from ..compute.fields import DEFAULT_LEVEL, Field
from ..compute.interface import Compute
from ..errors import RecipeError
from ..words import shown
from .fields import (
    COMMON,
    FIELDS,
    NAMING,
    OF_LEVELS,
    fields_of,
    readers,
    settings_of,
    unknown_field,
)
from .sources import Source, file_source, placed
from .strings import (
    AUTO,
    BackendName,
    canonical_name,
    has_scaling,
    level_name,
    names_file,
    parse_backend,
    scaling_name,
)


class Merged(NamedTuple):
    asked: BackendName
    """The backend as the places name it."""
    backend: BackendName
    """The same with default scaling and level filled in; `auto` keeps the named scaling."""
    values: dict[str, Any]
    """The other fields, parsed."""

    @property
    def fields(self) -> dict[str, Any]:
        """The arguments of `FP8RecipeKwargs`."""
        naming = {"backend": canonical_name(*self.asked)}
        if self.asked.compute == AUTO:
            naming = {"scaling": self.asked.scaling, "opt_level": self.asked.level}
        return {name: word for name, word in naming.items() if word is not None} | self.values


def merge(sources: Sequence[Source], choices: Sequence[str] = ()) -> Merged:
    """Merge the fields of these places, the strongest first. A recipe file in a place is weaker
    than the place's other fields. `choices`: if `auto` is to pick the backend, one of these
    backends must read the fields. Raises `RecipeError` with the field's place."""
    parts = []
    for source in sources:
        if names_file(file := source.fields.get("backend")):
            own = dataclasses.replace(source, fields={**source.fields, "backend": None})
            parts += [own, file_source(file)]
        else:
            parts.append(source)
    sources = parts
    asked, places = _asked_backend(sources)
    candidates: Sequence[str] = [asked.compute]
    if asked.compute == AUTO:
        fitting = [compute for compute in choices if has_scaling(compute, asked.scaling)]
        candidates = fitting or choices[:1]
    backends = [_completed(compute, asked, sources, places) for compute in candidates]
    settings = settings_of(asked.compute)
    values: dict[str, Any] = {}
    for source in sources:
        for name, value in source.fields.items():
            if name in NAMING or name in values:
                continue
            with placed(source.places.get(name)):
                if name not in settings:
                    raise unknown_field(name, "FP8RecipeKwargs", FIELDS, {})
                if value is None:
                    continue
                parsed = settings[name].parsed(value)
                refusals = [_refusal(settings[name], parsed, asked, each) for each in backends]
                if None in refusals or not refusals:
                    values[name] = parsed
                elif name not in source.idle:
                    raise refusals[0]
    if asked.compute == AUTO:
        return Merged(asked, BackendName(AUTO, asked.scaling, asked.level or "O0"), values)
    return Merged(asked, backends[0], values)


def merged(sources: Sequence[Source]) -> dict[str, Any]:
    """Merge places into arguments of `FP8RecipeKwargs`, for a backend that `auto` may pick."""
    has_te = importlib.util.find_spec("transformer_engine") is not None
    return merge(sources, ["te", "native"] if has_te else ["native"]).fields


def refusal_of(backend: str, given: Mapping[str, Any]) -> RecipeError | None:
    """Return the error if the backend of this string cannot honour these fields."""
    try:
        merge([Source({**given, "backend": backend})])
    except RecipeError as error:
        return error
    return None


def _asked_backend(sources: Sequence[Source]) -> tuple[BackendName, dict[str, str | None]]:
    """Merge the naming fields, and return the places of scaling and level. The strongest backend
    string counts alone. Its part (scaling or level) and the strongest field of this part:

        place of the field     the string has the part    the part of the result
        stronger               yes, or no                 the field's
        the string's own       yes                        both: another value is an error
        weaker                 yes                        the string's
        the same, or weaker    no                         the field's

    A level from a place that only fills in selects nothing without `msamp` in the string: an error.
    A default (`idle`) gives way without one.
    """
    at = _strongest(sources, "backend")
    name = BackendName(AUTO)
    places: dict[str, str | None] = {}
    if at < len(sources):
        text = sources[at].fields["backend"]
        place = sources[at].places.get("backend")
        with placed(place):
            name = parse_backend(text)
        places = {"scaling": place, "level": place}
    for part, field in (("scaling", "scaling"), ("level", "opt_level")):
        by = _strongest(sources, field)
        if by == len(sources):
            continue
        source = sources[by]
        in_string = getattr(name, part)
        word = source.fields[field]
        place = source.places.get(field)
        selects_none = part == "level" and source.fills_in and name.level is None
        if field in source.idle and (selects_none or by == at and in_string):
            continue
        with placed(place):
            if selects_none:
                raise RecipeError(
                    f"{word} selects no level by itself: say the backend as msamp:{word} or "
                    f"COMPUTE+msamp:{word}, or leave it out"
                )
            if in_string and by > at:
                continue
            said = f"{field}={shown(word)}"
            if part == "level":
                value = level_name(word, said)
            else:
                value = scaling_name(name.compute, word, said)
            if in_string and by == at and value != in_string:
                raise RecipeError(
                    f"{shown(text)} says {in_string} and {field} says {value}: leave one of the "
                    "two out"
                )
        name = name._replace(**{part: value})
        places[part] = place
    return name._replace(level=DEFAULT_LEVEL if name.level == "" else name.level), places


def _strongest(sources: Sequence[Source], field: str) -> int:
    """Return the index of the strongest place with this field; behind the last one without."""
    given = (i for i, source in enumerate(sources) if source.fields.get(field) is not None)
    return next(given, len(sources))


def _completed(
    compute: str, asked: BackendName, sources: Sequence[Source], places: Mapping[str, str | None]
) -> BackendName:
    """Fill in the level, and the scaling rule that a field, the level or the backend implies. Raise
    `RecipeError` for a level that the backend does not take."""
    backend = registry.get_compute(compute)
    level = asked.level or "O0"
    scaling = asked.scaling
    with placed(places.get("scaling")):
        if scaling is None:
            scaling = _implied_scaling(backend, level, sources)
        else:
            scaling = scaling_name(compute, scaling, f"scaling={shown(scaling)}")
    completed = BackendName(compute, scaling, level)
    if level not in backend.levels:
        others = ", ".join(
            other for other in registry.BUILT_IN if len(registry.get_compute(other).levels) > 1
        )
        with placed(places.get("level")):
            raise RecipeError(
                f"{_name(completed, asked)}: {compute} goes with {', '.join(backend.levels)} only, "
                f"its weights stay as they are; backends that go with msamp: {others}"
            )
    return completed


def _implied_scaling(backend: Compute, level: str, sources: Sequence[Source]) -> str:
    for field in fields_of(backend).values():
        at = _strongest(sources, field.name) if field.names_scaling else len(sources)
        if at < len(sources):
            value = field.parsed(sources[at].fields[field.name])
            if scaling := field.names_scaling(value):
                return scaling
    by_level = backend.level_scaling if level != "O0" else None
    return by_level or backend.default_scaling


_LEVELS_IN_WORDS = {
    ("O1", "O2", "O3", "O4"): "a level O1 to O4",
    ("O3", "O4"): "a level O3 or O4, whose weights travel in FP8",
    ("O0",): "weights that no level stores",
}


def _name(backend: BackendName, asked: BackendName) -> str:
    return canonical_name(backend.compute, backend.scaling, asked.level)


def _refusal(
    field: Field, value: Any, asked: BackendName, backend: BackendName
) -> RecipeError | None:
    """Return the error for a field that this backend reads on no machine."""
    if field.name in COMMON or (field.idle is not None and value == field.idle):
        return None
    compute, scaling, level = backend
    unread = f"{field.name} is not read by {_name(backend, asked)}"
    if level not in field.levels:
        wanted = DEFAULT_LEVEL if DEFAULT_LEVEL in field.levels else field.levels[0]
        return RecipeError(
            f"{unread}, only with {_LEVELS_IN_WORDS[field.levels]}: leave it out, or use "
            f"{compute if wanted == 'O0' else f'{compute}+msamp:{wanted}'}"
        )
    declared = registry.get_compute(compute)
    if field.name not in fields_of(declared) and field.name not in OF_LEVELS:
        return RecipeError(f"{unread}, only by {readers(field.name)}: leave it out, or use these")
    rules = [rule for rule in field.scalings or () if rule in declared.scalings]
    if rules and scaling not in rules:
        readable = ", ".join(f"{compute}:{rule}" for rule in rules)
        return RecipeError(f"{unread}, only by {readable}: leave it out, or use that")
    return None
