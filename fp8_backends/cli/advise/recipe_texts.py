"""A recipe as it is pasted: into code, behind `fp8-backends launch`, into a configuration file of Accelerate."""

from __future__ import annotations

import shlex

import yaml

from ...accelerate_plugin.launch_flags import launch_parser
from ...recipes.fields import FIELDS
from ...recipes.handlers import Recipe
from ..config.training_config import given_fields, yaml_fields


def code(recipe: Recipe) -> str:
    """A handler for `Accelerator(mixed_precision="fp8", kwargs_handlers=[…])`."""
    fields = {"backend": recipe.name, **given_fields(recipe)}
    arguments = [f"{name}={list(value) if isinstance(value, tuple) else value!r}" for name, value in fields.items()]
    line = f"FP8RecipeKwargs({', '.join(arguments)})"
    if len(line) <= _WIDTH:
        return line
    return "\n".join(["FP8RecipeKwargs(", *(f"    {each}," for each in arguments), ")"])


_WIDTH = 80


def flags(recipe: Recipe) -> str:
    """The same for `fp8-backends launch SCRIPT`."""
    options = launch_parser()._option_string_actions
    words = ["--fp8_backend", recipe.name]
    for name, value in given_fields(recipe).items():
        flag = f"--fp8_{FIELDS[name].own_suffix.lower()}"
        text = _as_text(value)
        if options[flag].nargs == 0:
            words.append(flag)
        else:  # what begins with a hyphen would be read as a flag
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return shlex.join(["fp8-backends", "launch", *words, "SCRIPT"])


def yaml_block(recipe: Recipe) -> str:
    """The same in a file for `--config_file`."""
    written = {"mixed_precision": "fp8", "fp8_config": yaml_fields(recipe)}
    return yaml.safe_dump(written, sort_keys=False).rstrip("\n")


def _as_text(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    text = ",".join(map(str, value))
    is_plain = [part.strip() for part in text.split(",")] == [*map(str, value)]
    return text if is_plain else str([*value])  # such as a pattern with a comma
