"""Represent the precision, sharding and compilation of a configuration file, and read its keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...compute.fields import closest
from ...errors import RecipeError
from ...recipes.fields import NAMING, settings_of
from ...recipes.handlers import AUTO, FP8RecipeKwargs, Recipe
from ...recipes.merging import refusal_of
from ...recipes.sources import read_file
from ...rules import Compiled, Parallel
from ...rules.validate import Finding, validate
from ...words import shortened, shown

DEEPSPEED_PRECISION = (
    "mixed_precision is left out: Accelerate refuses it beside deepspeed_config_file. fp8-backends "
    "launch needs none; with accelerate launch say --mixed_precision fp8"
)
UNCOMPILED = ("NO", "EAGER", "AOT_EAGER")
"""Backends of torch.compile that generate no kernels."""
_MOST_NAMED = 5


@dataclass
class TrainingConfig:
    source: str
    system: str
    mixed_precision: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of `FP8RecipeKwargs`, for mixed precision "fp8"."""
    parallel: Parallel = "none"
    processes: int | None = None
    """Training processes over all machines, if known."""
    compiled: Compiled = "none"
    surroundings: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `validate`."""
    accelerate: dict[str, Any] = field(default_factory=dict)
    """An equivalent Accelerate configuration without its precision."""
    notes: list[str] = field(default_factory=list)
    """Settings without an equivalent or without effect."""
    passed_over: list[str] = field(default_factory=list)
    """Keys unrelated to precision, sharding and compilation."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe as given (`auto` stays `auto`); None without FP8. Raises `RecipeError`."""
        if self.mixed_precision != "fp8":
            return None
        try:
            return FP8RecipeKwargs(**self.fields)
        except RecipeError as error:
            raise RecipeError(f"{self.source}: {error}") from None

    def use(self, backend: str) -> None:
        """Use another backend, and drop fields that it does not read, each with a note. Raises
        `RecipeError`."""
        recipe = FP8RecipeKwargs(backend=backend)
        is_auto = recipe.compute == AUTO  # `auto` picks a backend that reads every field
        kept: dict[str, Any] = recipe.to_kwargs()  # also those of a recipe file
        for name, value in self.fields.items():
            if name in NAMING or name in kept:
                continue
            if not is_auto and (error := refusal_of(recipe.name, {name: value})):
                self.notes.append(
                    f"{name}={shown(value)} of the file is left out with backend {backend}: {error}"
                )
            else:
                kept[name] = value
        self.mixed_precision = "fp8"
        self.fields = kept

    def findings(self, chip: str | None = None) -> list[Finding]:
        """Return the known problems on this machine, or on one with that chip; [] without FP8."""
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
        """Return a configuration for `accelerate launch` and `fp8-backends launch`, as plain values
        for YAML."""
        written = {**self.accelerate}
        if self.recipe is not None:
            written["fp8_config"] = yaml_fields(self.recipe)
        if self.parallel != "deepspeed" or "deepspeed_config_file" not in written.get(
            "deepspeed_config", {}
        ):
            written["mixed_precision"] = self.mixed_precision
        return written


def given_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the fields, except its name, in which a recipe differs from its backend's defaults."""
    defaults = {
        name: field.default_of_scaling.get(recipe.scaling, field.default)
        for name, field in settings_of(recipe.compute).items()
    }
    defaults["pad_inner_dim"] = True  # the default of TorchAO's handler
    given = recipe.given_settings.items()
    return {name: value for name, value in given if value != defaults[name]}


def yaml_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the `fp8_config` block of this recipe, for both launchers."""
    fields = {_KEYS.get(name, name): value for name, value in given_fields(recipe).items()}
    plain = {
        key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()
    }
    # else in the name
    naming = {"scaling": recipe.scaling} if recipe.name == AUTO and recipe.scaling else {}
    return {"backend": recipe.name, **naming, **plain}


_KEYS = {"enable_fsdp_float8_all_gather": "all_gather", "fp8_format": "number_format"}
"""This package's keys for fields whose defaults Accelerate's launcher exports: its own keys count
as not given."""


class ConfigFile:
    """Read the keys of a configuration file, or of a block in it. Errors name the file and the
    key."""

    def __init__(self, values: Mapping[str, Any], source: str, block: str = "") -> None:
        self.values = values
        self.source = source
        self.name = f"{source}: {block}" if block else source
        self._prefix = f"{self.name}." if block else f"{source}: "

    def get(self, key: str, parse: Callable[[Any], Any], default: Any = None) -> Any:
        """Return the parsed value of a key, or the default. Raises `RecipeError`."""
        value = self.values.get(key)
        return default if value is None else self.parsed(key, parse, value)

    def parsed(self, key: str, parse: Callable[[Any], Any], value: Any) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise RecipeError(f"{self._prefix}{key}={shown(value)} {error}") from None

    def block(self, key: str) -> ConfigFile:
        values = self.values.get(key) or {}
        if not isinstance(values, Mapping):
            raise RecipeError(f"{self._prefix}{key} must be a block of keys, not {shown(values)}")
        return ConfigFile({str(name): value for name, value in values.items()}, self.source, key)

    def refuse_unknown(self, known: Iterable[str], prefix: str = "") -> None:
        """Raise `RecipeError` with the first unknown keys of this prefix, each with the nearest
        known key."""
        known = list(known)
        unknown = [
            key for key in self.values if key.lower().startswith(prefix) and key not in known
        ]
        if unknown:
            named = ", ".join(
                f"{shortened(key)}{closest(key, known)}" for key in unknown[:_MOST_NAMED]
            )
            more = len(unknown) - _MOST_NAMED
            raise RecipeError(
                f"{self.name}: not known: {named}" + (f" and {more} more" if more > 0 else "")
            )

    def zero(self, path: str) -> dict[str, Any]:
        """Return stage and offload of a DeepSpeed file, found from here or beside this file; {}
        without it."""
        places = (path, os.path.join(os.path.dirname(self.source), path))
        path = next((place for place in places if os.path.isfile(place)), None)
        if path is None:
            return {}
        block = ConfigFile(read_file(path), path).block("zero_optimization")
        stage = block.values.get("stage", 0)
        devices = [
            block.block(f"offload_{part}").values.get("device") for part in ("optimizer", "param")
        ]
        return {
            "zero_stage": stage if isinstance(stage, int) else None,
            "zero_offload": offloads(devices),
        }


def offloads(devices: Iterable[Any]) -> bool:
    """Return True if DeepSpeed moves states or weights to one of these devices."""
    return any(str(device).lower() in ("cpu", "nvme") for device in devices)
