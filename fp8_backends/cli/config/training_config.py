"""What a configuration file of Accelerate or of another trainer says about precision, sharding and compilation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...compute.fields import closest
from ...errors import RecipeError
from ...recipes.fields import NAMING
from ...recipes.handlers import AUTO, FP8RecipeKwargs, Recipe, resolve, settings_of
from ...recipes.sources import read_file
from ...training.rules import Compiled, Parallel
from ...training.validators import Finding, validate
from ...words import shortened, shown

DEEPSPEED_PRECISION = (
    "mixed_precision is left out: Accelerate refuses it beside deepspeed_config_file. fp8-backends launch needs none; "
    "with accelerate launch say --mixed_precision fp8"
)
UNCOMPILED = ("NO", "EAGER", "AOT_EAGER")
"""Backends of torch.compile that make no kernels."""
_MOST_NAMED = 5
"""Unknown keys in one error."""


@dataclass
class TrainingConfig:
    """The parts of a configuration that FP8 depends on, whoever wrote it."""

    source: str
    """The file's name."""
    system: str
    """"accelerate" or "axolotl"."""
    mixed_precision: str
    """"no", "fp16", "bf16" or "fp8"."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of `FP8RecipeKwargs`; read only where FP8 is on."""
    parallel: Parallel = "none"
    processes: int | None = None
    """Processes that train, over all machines; None where the file does not say."""
    compiled: Compiled = "none"
    surroundings: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `validate` that the file gives."""
    accelerate: dict[str, Any] = field(default_factory=dict)
    """An Accelerate configuration that means the same, its precision left out."""
    notes: list[str] = field(default_factory=list)
    """What cannot be said in the other file's words, or has no effect."""
    passed_over: list[str] = field(default_factory=list)
    """Keys that say nothing about precision, sharding or compilation."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe as it was asked for (`auto` stays `auto`), or None where FP8 is off. Raises `RecipeError`."""
        if self.mixed_precision != "fp8":
            return None
        try:
            return FP8RecipeKwargs(**self.fields)
        except RecipeError as error:
            raise RecipeError(f"{self.source}: {error}") from None

    def use(self, backend: str) -> None:
        """Take another backend. Fields that it does not read are left out, each with a note. Raises `RecipeError`."""
        kept: dict[str, Any] = {"backend": backend}
        resolve(kept)
        for name, value in self.fields.items():
            if name in NAMING:
                continue
            try:
                resolve({**kept, name: value})
                kept[name] = value
            except RecipeError as error:
                self.notes.append(f"{name}={shown(value)} of the file is left out with backend {backend}: {error}")
        self.mixed_precision, self.fields = "fp8", kept

    def findings(self, chip: str | None = None) -> list[Finding]:
        """List what is known to go wrong on this machine, or on one with that chip. Nothing where FP8 is off."""
        if self.recipe is None:
            return []
        return validate(
            self.fields,
            parallel=self.parallel,
            compiled=self.compiled,
            world_size=self.processes,
            chip=chip,
            **self.surroundings,
        )

    def for_accelerate(self) -> dict[str, Any]:
        """Return a configuration for `accelerate launch` and `fp8-backends launch`, as plain values for YAML."""
        written = {**self.accelerate}
        if self.recipe is not None:
            written["fp8_config"] = yaml_fields(self.recipe)
        if self.parallel != "deepspeed" or "deepspeed_config_file" not in written.get("deepspeed_config", {}):
            written["mixed_precision"] = self.mixed_precision
        return written


def given_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the fields beside its name in which a recipe differs from its backend's defaults."""

    def is_default(name: str, value: Any) -> bool:
        if name == "pad_inner_dim":
            return value is True  # what TorchAO's handler has, too
        return value == settings_of(recipe.compute)[name].default_for(recipe.scaling)

    given = recipe.to_kwargs().items()
    return {name: value for name, value in given if name not in NAMING and not is_default(name, value)}


def yaml_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the `fp8_config` block that means this recipe, by whichever launcher reads it."""
    fields = {_KEYS.get(name, name): value for name, value in given_fields(recipe).items()}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    naming = {"scaling": recipe.scaling} if recipe.name == AUTO and recipe.scaling else {}  # else in the name
    return {"backend": recipe.name, **naming, **plain}


_KEYS = {"enable_fsdp_float8_all_gather": "all_gather", "fp8_format": "number_format"}
"""Our own keys where Accelerate's launcher exports a default under its own: that one counts as not given."""


# For the readers of each system


class ConfigFile:
    """The keys of a configuration file, or of a block in it, read one by one. Errors name the file and the key."""

    def __init__(self, values: Mapping[str, Any], source: str, block: str = "") -> None:
        self.values, self.source = values, source
        self.name = f"{source}: {block}" if block else source
        self._prefix = f"{self.name}." if block else f"{source}: "

    def get(self, key: str, parse: Callable[[Any], Any], default: Any = None) -> Any:
        """Return the parsed value, or the default where the key is not set. Raises `RecipeError`."""
        value = self.values.get(key)
        return default if value is None else self.parsed(key, parse, value)

    def parsed(self, key: str, parse: Callable[[Any], Any], value: Any) -> Any:
        """Return this value of a key as `parse` reads it. Raises `RecipeError`."""
        try:
            return parse(value)
        except ValueError as error:
            raise RecipeError(f"{self._prefix}{key}={shown(value)} {error}") from None

    def block(self, key: str) -> ConfigFile:
        """Return a block of keys, empty where there is none. Raises `RecipeError` for anything else."""
        values = self.values.get(key) or {}
        if not isinstance(values, Mapping):
            raise RecipeError(f"{self._prefix}{key} must be a block of keys, not {shown(values)}")
        return ConfigFile({str(name): value for name, value in values.items()}, self.source, key)

    def refuse_unknown(self, known: Iterable[str], prefix: str = "") -> None:
        """Raise `RecipeError` that names the first keys, of those with this prefix, that are not known, each with the
        nearest that is."""
        known = list(known)
        keys = [key for key in self.values if key.lower().startswith(prefix)]
        if unknown := [key for key in keys if key not in known]:
            named = ", ".join(f"{shortened(key)}{closest(key, known)}" for key in unknown[:_MOST_NAMED])
            more = len(unknown) - _MOST_NAMED
            raise RecipeError(f"{self.name}: not known: {named}" + (f" and {more} more" if more > 0 else ""))

    def zero_stage(self, path: str) -> int | None:
        """Return the ZeRO stage in a DeepSpeed configuration, which is looked for from here and beside this file; None
        where it does not tell."""
        places = (path, os.path.join(os.path.dirname(self.source), path))
        path = next((place for place in places if os.path.isfile(place)), None)
        stage = path and ConfigFile(read_file(path), path).block("zero_optimization").values.get("stage")
        return stage if isinstance(stage, int) else None
