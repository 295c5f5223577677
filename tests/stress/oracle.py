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

TRUE, FALSE = {"true", "1", "yes", "y", "on", "t"}, {"false", "0", "no", "n", "off", "f"}
BACKENDS = {
    "msamp": "native",
    "ms-amp": "native",
    "torchao": "ao",
    "transformer_engine": "te",
    "transformer-engine": "te",
}
"""Meanings of backend names."""
ONE_RULE = {"dynamic", "tensorwise", "current"}


def meanings(value: Any) -> list:
    """Return possible meanings of a given value."""
    value = getattr(value, "name", value)
    if isinstance(value, str):
        word = value.strip().lower()
        parts = tuple(part.strip().strip("'\"") for part in word.strip("()[]").split(","))
        plain = tuple(part.strip() for part in word.split(","))
        found = [word, parts, plain, tuple(part in TRUE for part in parts)]
        found += [word in TRUE] if word in TRUE | FALSE else []
        found += ["off"] if word == "false" else []
        with contextlib.suppress(ValueError):
            found.append(float(word))
        return found
    if value is False:
        return ["off", value]  # as YAML reads it
    if not isinstance(value, (list, tuple, collections.deque)):
        return [value]
    items = tuple(value)
    return [items, spelled(items), *meanings(",".join(map(str, items)))]


def spelled(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(spelled, value))
    return value.lower() if isinstance(value, str) else value


def is_seen(name: str, value: Any, recipe: Recipe) -> bool:
    """Tell if the recipe has the value given for a field."""
    if name == "backend":
        return is_named(value, recipe)
    if name == "scaling":
        return is_rule(value.strip().lower(), recipe)
    found = recipe.level if name == "opt_level" else getattr(recipe, name)
    if found is value:
        return True
    if found == "off":  # a word that YAML and handlers may convert
        return str(value).strip().lower() in {"", "none"} | FALSE
    found = spelled(found)
    return {*found} == value if isinstance(value, set) else found in meanings(value)


def is_rule(word: str, recipe: Recipe) -> bool:
    return word == recipe.scaling or {word, recipe.scaling} <= ONE_RULE


def is_named(text: str, recipe: Recipe) -> bool:
    head, _, level = text.strip().lower().partition("+msamp")
    head, _, scaling = head.partition(":")
    if head.startswith(("bf16", "fp16")):
        return True
    level = level.strip(": ")
    if head in ("msamp", "ms-amp"):
        scaling, level = "", scaling or level
    return (
        recipe.compute == BACKENDS.get(head, head)
        and level in ("", recipe.level.lower())
        and (not scaling or is_rule(scaling, recipe))
    )


def check_seen(recipe: Recipe, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None and name in FIELDS:
            assert is_seen(name, value, recipe), f"{name} is not in {recipe!r}"


def check_round_trips(recipe: Recipe) -> None:
    """Check that the recipe survives every carrier."""
    fields = {name: value for name, value in recipe.to_kwargs().items() if name not in NAMING}
    fields["backend"] = recipe.name
    again = {
        "to_kwargs": lambda: type(recipe)(**recipe.to_kwargs()),
        "copy": lambda: copy.deepcopy(recipe),
        "dictionary": lambda: resolve(fields),
    }
    if not any(FIELDS[name].is_object for name in recipe.to_kwargs() if name in FIELDS):
        in_file = yaml_fields(recipe)
        variables = {PREFIX + variable(name): str(value) for name, value in in_file.items()}
        file = yaml.safe_load(yaml.safe_dump(in_file))
        flags = [word for item in given_fields(recipe).items() for word in flag(*item)]
        flags = ["--fp8_backend", recipe.name, *flags, __file__]
        again |= {
            "pickle": lambda: pickle.loads(pickle.dumps(recipe)),
            "worker": lambda: from_environment({LAUNCHED: json.dumps(fields)}),
            "file": lambda: FP8RecipeKwargs(**merged([config_source(file, "c.yaml")])),
            "flags": lambda: FP8RecipeKwargs(**launch.recipe_flags(launch.parse(flags)).fields),
        }
        if recipe.amax_compute_algo != "most_recent":  # Accelerate sets it unasked (launching.rst)
            again["environment"] = lambda: from_environment(variables)
    for name, make in again.items():
        try:
            made = make()
        except FP8BackendError as error:
            raise AssertionError(f"{recipe!r} is refused by way of {name}") from error
        assert means(made) == means(recipe), f"{name} returns another recipe"


def means(recipe: Recipe) -> tuple:
    """Return a recipe's identity; `pad_inner_dim` as a flag, since its default None pads like
    True."""
    return recipe.name, {**recipe.described, "pad_inner_dim": recipe.pad_inner_dim is not False}


def variable(key: str) -> str:
    return FIELDS[key].own_suffix if key in FIELDS else key.upper()


def flag(name: str, value: Any) -> list[str]:
    word = f"--fp8_{FIELDS[name].own_suffix.lower()}"
    if name == "use_autocast_during_eval":  # Accelerate's switch, without a value
        return [word] * value
    if isinstance(value, tuple) and isinstance(value[0], str):
        names = tuple(each.strip() for each in ",".join(value).split(","))
        value = ",".join(value) if names == value else list(value)
    return [f"{word}={value}"]  # in one word: the value may begin with a hyphen
