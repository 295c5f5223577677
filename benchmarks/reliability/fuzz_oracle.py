"""Check recipes from good or bad input without the package's own parsers: every given field is in
the recipe, and every way back preserves it."""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import pickle
from typing import Any

import yaml

from fp8_backends import FP8BackendError, FP8RecipeKwargs, resolve
from fp8_backends.accelerate_plugin import launch
from fp8_backends.recipes.fields import FIELDS, NAMING
from fp8_backends.recipes.handlers import Recipe, from_environment
from fp8_backends.recipes.merging import merged
from fp8_backends.recipes.sources import LAUNCHED, PREFIX, config_source
from fp8_backends.tools.config.training_config import given_fields, yaml_fields

_TRUE, _FALSE = {"true", "1", "yes", "y", "on", "t"}, {"false", "0", "no", "n", "off", "f"}
BACKENDS = {
    "msamp": "native",
    "ms-amp": "native",
    "torchao": "ao",
    "transformer_engine": "te",
    "transformer-engine": "te",
}
"""Meanings of backend names."""
_ONE_RULE = {"dynamic", "tensorwise", "current"}


class Ignored(AssertionError):
    """Signal accepted input without meaning, or with another meaning after a round trip."""


def meanings(value: Any) -> list:
    """Return possible meanings of a given value."""
    value = getattr(value, "name", value)
    if isinstance(value, str):
        word = value.strip().lower()
        parts = tuple(part.strip().strip("'\"") for part in word.strip("()[]").split(","))
        plain = tuple(part.strip() for part in word.split(","))
        found = [word, parts, plain, tuple(part in _TRUE for part in parts)]
        found += [word in _TRUE] if word in _TRUE | _FALSE else []
        found += ["off"] if word == "false" else []
        with contextlib.suppress(ValueError):
            found.append(float(word))
        return found
    if isinstance(value, (list, tuple)):
        return [
            tuple(value),
            tuple(_spelled(each) for each in value),
            *meanings(",".join(map(str, value))),
        ]
    if isinstance(value, collections.deque):
        return meanings(tuple(value))
    return ["off", value] if value is False else [value]  # as YAML reads it


def _spelled(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_spelled, value))
    return value.lower() if isinstance(value, str) else value


def is_seen(name: str, value: Any, recipe: Recipe) -> bool:
    """Tell if the recipe has the value given for a field."""
    if name == "backend":
        return _is_named(value, recipe)
    if name == "scaling":
        word = value.strip().lower()
        return word == recipe.scaling or {word, recipe.scaling} <= _ONE_RULE
    found = recipe.level if name == "opt_level" else getattr(recipe, name)
    if found is value:
        return True
    if name == "saved_activations" and found == "off":  # a word that YAML and handlers may convert
        return str(value).strip().lower() in ("off", "", "none", "false")
    found = _spelled(found)
    return {*found} == value if isinstance(value, set) else found in meanings(value)


def _is_named(text: str, recipe: Recipe) -> bool:
    head, plus, level = text.strip().lower().partition("+msamp")
    head, _, rest = head.partition(":")
    if head.startswith(("bf16", "fp16")):
        return True
    scaling, level = (
        ("window", rest or level) if head in ("msamp", "ms-amp") else (rest, level.strip(": "))
    )
    right = recipe.compute == BACKENDS.get(head, head) and (
        not level or recipe.level.lower() == level
    )
    same = not scaling or scaling == recipe.scaling or {scaling, recipe.scaling} <= _ONE_RULE
    return right and (same or head in ("msamp", "ms-amp"))


def check_seen(recipe: Recipe, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None and name in FIELDS and not is_seen(name, value, recipe):
            raise Ignored(f"{name}={short(value)} is not in {recipe!r}")


def check_round_trips(recipe: Recipe) -> None:
    """Check that the recipe survives every carrier."""
    again = {
        "to_kwargs": lambda: type(recipe)(**recipe.to_kwargs()),
        "copy": lambda: copy.deepcopy(recipe),
        "dictionary": lambda: resolve({"backend": recipe.name, **_settings(recipe)}),
    }
    if not any(FIELDS[name].is_object for name in recipe.to_kwargs() if name in FIELDS):
        fields = {"backend": recipe.name, **_settings(recipe)}
        variables = {
            PREFIX + _variable(name): str(value) for name, value in yaml_fields(recipe).items()
        }
        flags = [
            word for name, value in given_fields(recipe).items() for word in _flag(name, value)
        ]
        flags = ["--fp8_backend", recipe.name, *flags, __file__]
        again |= {
            "pickle": lambda: pickle.loads(pickle.dumps(recipe)),
            "worker": lambda: from_environment({LAUNCHED: json.dumps(fields)}),
            "environment": lambda: from_environment(variables),
            "file": lambda: FP8RecipeKwargs(
                **merged(
                    [config_source(yaml.safe_load(yaml.safe_dump(yaml_fields(recipe))), "c.yaml")]
                )
            ),
            "flags": lambda: FP8RecipeKwargs(**launch.recipe_flags(launch.parse(flags)).fields),
        }
    for name, make in again.items():
        try:
            made = make()
        except FP8BackendError as error:
            raise Ignored(f"{recipe!r} is refused by way of {name}: {error}") from None
        if means(made) != means(recipe):
            raise Ignored(f"{recipe!r} comes back by way of {name} as {made!r}")


def means(recipe: Recipe) -> tuple:
    """Return a recipe's identity; `pad_inner_dim` as a flag, since its default None pads like
    True."""
    return recipe.name, {**recipe.described, "pad_inner_dim": recipe.pad_inner_dim is not False}


def _settings(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in recipe.to_kwargs().items() if name not in NAMING}


def _variable(key: str) -> str:
    return FIELDS[key].own_suffix if key in FIELDS else key.upper()


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--fp8_{FIELDS[name].own_suffix.lower()}"
    if name == "use_autocast_during_eval":  # Accelerate's switch, without a value
        return [flag] * value
    if isinstance(value, tuple) and isinstance(value[0], str):
        names = tuple(name.strip() for name in ",".join(value).split(","))
        value = ",".join(value) if names == value else list(value)
    return [f"{flag}={value}"]  # in one word: the value may begin with a hyphen


def short(value: Any) -> str:
    try:
        return repr(value)[:80]
    except Exception:
        return f"a {type(value).__name__}"
