"""Recipes that were written for something else, as fields of `FP8RecipeKwargs`.

Accelerate's own handlers, the environment that Accelerate's launcher makes, and TransformerEngine's recipe objects.
Objects are known by their class names: none of the libraries is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import RecipeError
from .recipe_fields import DEFAULT_LEVEL, FIELDS, closest, parse_field, three_flags

PREFIX = "ACCELERATE_FP8_"

TE_FIELDS = (
    "use_autocast_during_eval",
    "margin",
    "interval",
    "fp8_format",
    "amax_history_len",
    "amax_compute_algo",
    "override_linear_precision",
    "use_mxfp8_block_scaling",
)
"""Fields of Accelerate's `TERecipeKwargs`."""


def foreign_fields(spec: Any) -> dict[str, Any] | None:
    """Fields of `FP8RecipeKwargs` that mean what `spec` means; None for an object that is no recipe."""
    for cls in type(spec).__mro__:
        if cls.__module__.split(".")[0] == "accelerate" and cls.__name__ in _ACCELERATE_HANDLERS:
            return _ACCELERATE_HANDLERS[cls.__name__](spec)
        if cls.__name__ in _TE_RECIPES:
            return _te_recipe_fields(spec, cls.__name__)
        if cls.__name__ in ("NVFP4BlockScaling", "CustomRecipe"):
            raise RecipeError(
                f"TransformerEngine's {cls.__name__} is no FP8 recipe of this package: it has DelayedScaling, "
                "Float8CurrentScaling, Float8BlockScaling and MXFP8BlockScaling"
            )
    return None


# Accelerate's handlers. They fill every field in, so a value that equals Accelerate's default counts as not given.


def _te_fields(handler: Any) -> dict[str, Any]:
    values = {name: getattr(handler, name, None) for name in TE_FIELDS}
    return {
        name: value
        for name, value in values.items()
        if value is not None and parse_field(name, value) != FIELDS[name].default
    }


def _from_te(handler: Any) -> dict[str, Any]:
    return {"backend": "te", **_te_fields(handler)}


def _from_msamp(handler: Any) -> dict[str, Any]:
    return {"backend": "msamp", "opt_level": getattr(handler, "opt_level", None)}


def _from_fp8(handler: Any) -> dict[str, Any]:
    """The deprecated handler. Its `opt_level` stays None unless the user gave one."""
    backend = getattr(handler, "backend", None) or "te"
    return {"backend": backend, "opt_level": getattr(handler, "opt_level", None), **_te_fields(handler)}


def _from_ao(handler: Any) -> dict[str, Any]:
    pad, gather = handler.pad_inner_dim, handler.enable_fsdp_float8_all_gather
    config = handler.config
    # without a config of the user's, Accelerate makes one of the two options, both of which default to True
    made = pad is not None and gather is not None
    if made and config == type(config)(pad_inner_dim=pad, enable_fsdp_float8_all_gather=gather):
        config, pad, gather = None, (None if pad else False), (None if gather else False)
    return {
        "backend": "ao",
        "config": config,
        "module_filter_func": handler.module_filter_func,
        "pad_inner_dim": pad,
        "enable_fsdp_float8_all_gather": gather,
    }


_ACCELERATE_HANDLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "FP8RecipeKwargs": _from_fp8,
    "TERecipeKwargs": _from_te,
    "MSAMPRecipeKwargs": _from_msamp,
    "AORecipeKwargs": _from_ao,
}


# TransformerEngine's recipe objects


class _TERecipe(NamedTuple):
    scaling: str
    read: tuple[str, ...]
    """Attributes that are recipe fields of ours."""
    only: dict[str, Any]
    """Attributes that we know with one value, TransformerEngine's default."""


_EVERY_TE_RECIPE = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
_TE_RECIPES = {
    "DelayedScaling": _TERecipe(
        "delayed",
        ("fp8_format", "margin", "amax_history_len", "amax_compute_algo"),
        {"scaling_factor_compute_algo": None, "reduce_amax": True, **_EVERY_TE_RECIPE},
    ),
    "Float8CurrentScaling": _TERecipe("dynamic", ("fp8_format",), {"use_power_2_scales": False, **_EVERY_TE_RECIPE}),
    "Float8BlockScaling": _TERecipe("blockwise", ("fp8_format",), {"use_f32_scales": False, **_EVERY_TE_RECIPE}),
    "MXFP8BlockScaling": _TERecipe(
        "mxfp8", ("fp8_format",), {"margin": 0, "enable_2d_quantization": False, **_EVERY_TE_RECIPE}
    ),
}


def _te_recipe_fields(spec: Any, class_name: str) -> dict[str, Any]:
    known = _TE_RECIPES[class_name]
    for name, value in known.only.items():
        if getattr(spec, name, value) != value:
            raise RecipeError(
                f"{class_name}.{name}={getattr(spec, name)!r} cannot be honoured: only {value!r} is known here"
            )
    values = {name: getattr(spec, name) for name in known.read if hasattr(spec, name)}
    return {"backend": f"te:{known.scaling}", **values}


# The environment


class _Variable(NamedTuple):
    field: str
    launcher_default: Any = None
    """What Accelerate's launcher exports when the user said nothing. Such a value counts as not given."""


def _own(name: str) -> _Variable:
    return _Variable(name, FIELDS[name].default)


_VARIABLES = {
    "BACKEND": _Variable("backend"),
    "USE_AUTOCAST_DURING_EVAL": _own("use_autocast_during_eval"),
    "MARGIN": _own("margin"),
    "INTERVAL": _own("interval"),
    "FORMAT": _own("fp8_format"),
    "AMAX_HISTORY_LEN": _own("amax_history_len"),
    "AMAX_COMPUTE_ALGO": _own("amax_compute_algo"),
    "OVERRIDE_LINEAR_PRECISION": _own("override_linear_precision"),
    "USE_MXFP8_BLOCK_SCALING": _own("use_mxfp8_block_scaling"),
    "OPT_LEVEL": _Variable("opt_level", DEFAULT_LEVEL),
    "ENABLE_FSDP_FLOAT8_ALL_GATHER": _Variable("enable_fsdp_float8_all_gather", True),
    "PAD_INNER_DIM": _Variable("pad_inner_dim", True),
    # what the questions of `accelerate config` write, and stock Accelerate never reads
    "AMAX_HISTORY_LENGTH": _own("amax_history_len"),
    "AMAX_COMPUTE_ALGORITHM": _own("amax_compute_algo"),
    "OPTIMIZATION_LEVEL": _Variable("opt_level", DEFAULT_LEVEL),
    # ours, through extra keys of the YAML file's fp8_config
    "SCALING": _Variable("scaling"),
    "AUTO_FILTER": _own("auto_filter"),
    "INCLUDE": _Variable("include"),
    "EXCLUDE": _Variable("exclude"),
    "AUTOCAST_DTYPE": _Variable("autocast_dtype"),
    "GRADIENT_COMM": _Variable("gradient_comm"),
    "ON_UNPROVEN": _Variable("on_unproven"),
}
_OVERRIDES = ("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD")


def environment_fields(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The recipe fields that `ACCELERATE_FP8_*` gives, in any case, without the launcher's defaults."""
    found = _variables(os.environ if environ is None else environ)
    overrides = [found.pop(suffix, "False") for suffix in _OVERRIDES]
    asked: dict[str, Any] = {}
    for suffix, text in found.items():
        if suffix not in _VARIABLES:
            raise RecipeError(f"{PREFIX}{suffix} is not known{closest(suffix, _VARIABLES)}")
        _add(asked, suffix, _VARIABLES[suffix], text)
    if any(_override_flags(overrides)):
        asked["override_linear_precision"] = _override_flags(overrides)
    if asked.get("backend", "").lower() == "no":
        del asked["backend"]
    return asked


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """By suffix in upper case; empty values left out."""
    found: dict[str, str] = {}
    for key, text in environ.items():
        suffix = key.upper().removeprefix(PREFIX)
        if not key.upper().startswith(PREFIX) or not text.strip():
            continue
        if found.setdefault(suffix, text) != text:
            raise RecipeError(f"{PREFIX}{suffix} is set twice, to {found[suffix]!r} and {text!r}")
    return found


def _add(asked: dict[str, Any], suffix: str, variable: _Variable, text: str) -> None:
    value: Any = text.strip()
    if variable.field in FIELDS:
        value = parse_field(variable.field, value)
    elif variable.field == "opt_level":
        value = value.upper()
    if value == variable.launcher_default:
        return
    if asked.setdefault(variable.field, value) != value:
        raise RecipeError(f"{PREFIX}{suffix}={text} disagrees with another variable that says {asked[variable.field]}")


def _override_flags(texts: list[str]) -> tuple[bool, ...]:
    try:
        return three_flags(texts)
    except ValueError:
        named = ", ".join(f"{suffix}={text}" for suffix, text in zip(_OVERRIDES, texts, strict=True))
        raise RecipeError(
            f"{named}: three bools are wanted, one of them False. Accelerate's launcher cuts a YAML string such as "
            '"(false, false, false)" into letters: write a list, [false, false, false]'
        ) from None
