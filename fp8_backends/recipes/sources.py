"""Recipes that were written for something else, as fields of `FP8RecipeKwargs`.

Accelerate's own handlers and configuration files, the environment that Accelerate's launcher or ours makes,
TransformerEngine's recipe objects, and the arguments of NeMo and Megatron. Objects are known by their class names:
none of the libraries is imported.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..compute.fields import closest, three_flags
from ..errors import RecipeError
from ..words import shortened, shown
from .fields import FIELDS, VARIABLES, RuleFields, find_variable, removed_field, variable_value
from .reading import from_json

PREFIX = "ACCELERATE_FP8_"


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


def _from_te(handler: Any) -> dict[str, Any]:
    values = {each.name: getattr(handler, each.name, None) for each in dataclasses.fields(RuleFields)}
    fields = {
        name: value
        for name, value in values.items()
        if value is not None and FIELDS[name].parsed(value) != FIELDS[name].default
    }
    mxfp8 = {"scaling": "mxfp8"} if getattr(handler, "use_mxfp8_block_scaling", None) else {}
    return {"backend": "te", **mxfp8, **fields}


def _from_msamp(handler: Any) -> dict[str, Any]:
    return {"backend": "msamp", "opt_level": getattr(handler, "opt_level", None)}


def _from_fp8(handler: Any) -> dict[str, Any]:
    """The deprecated handler, which has the fields of both. Its `opt_level` stays None unless the user gave one."""
    fields = {**_from_msamp(handler), **_from_te(handler)}
    return {**fields, "backend": getattr(handler, "backend", None) or "te"}


def _from_ao(handler: Any) -> dict[str, Any]:
    pad, gather = handler.pad_inner_dim, handler.enable_fsdp_float8_all_gather
    config = handler.config
    # without a config of the user's, Accelerate makes one of the two options, both of which default to True
    has_both = pad is not None and gather is not None
    if has_both and config == type(config)(pad_inner_dim=pad, enable_fsdp_float8_all_gather=gather):
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


_TE_RECIPES = {
    "DelayedScaling": ("delayed", ("fp8_format", "margin", "amax_history_len", "amax_compute_algo")),
    "Float8CurrentScaling": ("dynamic", ("fp8_format",)),
    "Float8BlockScaling": ("blockwise", ("fp8_format",)),
    "MXFP8BlockScaling": ("mxfp8", ("fp8_format",)),
}
"""The scaling rule of each class, and its attributes that are recipe fields of ours."""

_VARIABLE_INSTEAD = "TransformerEngine takes it for all recipes of a process from {} in the environment: set that to 1"
_ATTENTION = (
    "this package converts Linear layers, and attention stays the model's own, in high precision; for attention in FP8 "
    "build it of TransformerEngine's DotProductAttention and enter its autocast yourself"
)
_WHY_NOT = {
    "fp8_dpa": _ATTENTION,
    "fp8_mha": _ATTENTION,
    "scaling_factor_compute_algo": "with a function of your own TransformerEngine leaves its fused update; leave it "
    "out, or give margin",
    "reduce_amax": "each rank would keep scales of its own, and a checkpoint holds those of one; leave it True, which "
    "on one rank is the same",
    "backward_override": "TransformerEngine would run the backward products in high precision; for that use "
    "native:delayed or native:dynamic with override_linear_precision=(False, True, True)",
    "use_power_2_scales": _VARIABLE_INSTEAD.format("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"),
    "use_f32_scales": _VARIABLE_INSTEAD.format("NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
}


def _te_recipe_fields(spec: Any, class_name: str) -> dict[str, Any]:
    """Read the fields, and refuse by name whatever else was set to another value than its class has: the `te` backend
    makes a recipe of that class by itself, with everything else as the class has it."""
    scaling, read = _TE_RECIPES[class_name]
    for name, value in vars(spec).items():
        default = _class_value(type(spec), name)
        if name.startswith("_") or name in read or _holds(lambda value=value, default=default: value == default):
            continue
        has = (
            "has no such field"
            if default is dataclasses.MISSING
            else f"has {shown(default)}, and only that is known here"
        )
        why = _WHY_NOT.get(name, f"its class {has}")
        raise RecipeError(f"{class_name}.{name}={shown(value)} cannot be honoured: {why}")
    values = {name: getattr(spec, name) for name in read if hasattr(spec, name)}
    return {"backend": f"te:{scaling}", **values}


def _holds(comparison: Callable[[], Any], otherwise: bool = False) -> bool:
    """What a comparison says of values of any class; `otherwise` where it cannot be told, as with arrays."""
    try:
        return bool(comparison())
    except Exception:
        return otherwise


def _class_value(cls: type, name: str) -> Any:
    """The value that an instance has where nobody set the attribute."""
    if name == "backward_override":
        return None  # its class may have another from the environment, and then backward runs in high precision
    defaults = {f.name: f.default for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    return defaults.get(name, getattr(cls, name, dataclasses.MISSING))


# The environment

LAUNCHED = "FP8_BACKENDS_RECIPE"
"""In it `fp8-backends launch` gives its workers the recipe: JSON of the fields of `FP8RecipeKwargs` that were given,
percent-encoded where a remote shell would read it. It is read in place of `ACCELERATE_FP8_*`."""

_OVERRIDES = ("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD")
"""What Accelerate's launcher makes of `override_linear_precision`."""


def unknown_variable(
    written: str, suffix: str, spelling: Callable[[str], str], known: Iterable[str] = tuple(VARIABLES)
) -> RecipeError:
    """The error for a name that is no field, `written` by the user, in a place that has its own `spelling`."""
    objects = {each.own_suffix: each.name for each in FIELDS.values() if each.is_object}
    if field := objects.get(suffix):
        return RecipeError(
            f"{written}: {field} takes a Python object, which no text can give: pass it in the script, "
            f"Accelerator(kwargs_handlers=[fp8_backends.FP8RecipeKwargs({field}=…)])"
        )
    if error := removed_field(suffix.lower()) or removed_field(f"fp8_{suffix.lower()}"):
        return RecipeError(f"{shortened(written, 400)}: {error}")
    matches = difflib.get_close_matches(suffix, list(known), n=1, cutoff=0.5)
    hint = f" (did you mean {spelling(matches[0])!r}?)" if matches else ""
    return RecipeError(f"{shortened(written, 400)} is not known{hint}")


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `fp8-backends launch` says what the recipe is."""
    return LAUNCHED in (os.environ if environ is None else environ)


def environment_name(environ: Mapping[str, str] | None = None) -> str:
    """What `environment_fields` reads, for messages."""
    return LAUNCHED if is_launched(environ) else f"{PREFIX}*"


def environment_fields(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The recipe fields that the environment gives: those of `FP8_BACKENDS_RECIPE`, else of `ACCELERATE_FP8_*`, in any
    case, without the launcher's defaults."""
    environ = os.environ if environ is None else environ
    if is_launched(environ):
        return _launched_fields(environ[LAUNCHED])
    found = variables(environ)
    overrides = [found.pop(suffix, "False") for suffix in _OVERRIDES]
    asked: dict[str, Any] = {}
    for suffix, text in found.items():
        known = find_variable(suffix)
        if known is None:
            raise unknown_variable(PREFIX + suffix, suffix, lambda name: PREFIX + name)
        field, variable = known
        value = variable_value(field, variable, text)
        if value is None or value == variable.launcher_default:
            continue
        if asked.setdefault(field.name, value) != value:
            raise RecipeError(
                f"{PREFIX}{suffix}={shown(text)} disagrees with another variable that says {shown(asked[field.name])}"
            )
    if any(flags := _override_flags(overrides)):
        asked["override_linear_precision"] = flags
    if asked.get("backend", "").lower() == "no":
        del asked["backend"]
    return asked


def _launched_fields(text: str) -> dict[str, Any]:
    """The fields in that variable, with tuples for lists, as a recipe has them."""
    try:
        given = from_json(urllib.parse.unquote(text) if text.startswith("%7B") else text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise RecipeError(f'not a JSON object of recipe fields, such as {{"backend": "native:rowwise"}}: {shown(text)}')
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The values of `ACCELERATE_FP8_*` by suffix in upper case, without empty ones."""
    found: dict[str, str] = {}
    for key, text in environ.items():
        suffix = key.upper().removeprefix(PREFIX)
        if not key.upper().startswith(PREFIX) or not text.strip():
            continue
        if found.setdefault(suffix, text) != text:
            raise RecipeError(f"{PREFIX}{suffix} is set twice, to {shown(found[suffix])} and {shown(text)}")
    return found


def _override_flags(texts: list[str]) -> tuple[bool, ...]:
    try:
        return three_flags(texts)
    except ValueError:
        named = ", ".join(f"{suffix}={shortened(text)}" for suffix, text in zip(_OVERRIDES, texts, strict=True))
        raise RecipeError(
            f"{named}: three bools are wanted, one of them False. Accelerate's launcher cuts a YAML string such as "
            '"(false, false, false)" into letters: write a list, [false, false, false], or use fp8-backends launch'
        ) from None


# One place of several (`merging`)


class Source(NamedTuple):
    """What one place says about the recipe."""

    fields: Mapping[str, Any]
    """Fields of `FP8RecipeKwargs`, each in its one spelling."""
    places: Mapping[str, str]
    """How the place says each field, for messages."""
    idle: frozenset[str] = frozenset()
    """Fields whose value is what the place fills in by itself: not given, where the backend does not read them."""
    selects_levels: bool = True
    """Whether an `opt_level` without a backend that says msamp chooses a level."""


def config_source(fp8_config: Mapping[str, Any] | None, source: str) -> Source:
    """What the `fp8_config` block says, for `merging.merged`. Arguments and errors as `accelerate_fields`."""
    if not isinstance(fp8_config or {}, Mapping):
        raise RecipeError(f"{source}: fp8_config must be a block of keys, not {shown(fp8_config)}")
    fields, places, idle = {}, {}, set()
    for key, value in (fp8_config or {}).items():
        suffix = str(key).strip().lower().removeprefix("fp8_").upper()
        if (known := find_variable(suffix)) is None:
            raise unknown_variable(f"{source}: fp8_config.{key}", suffix, _key)
        field, variable = known
        name = field.name
        if value is None or (name == "backend" and str(value).strip().upper() in ("", "NO")):
            continue
        place = f"{source}: fp8_config.{shortened(str(key))}={shown(value)}"
        try:
            parsed = variable_value(field, variable, value)
        except RecipeError as error:
            raise RecipeError(f"{place}: {error}") from None
        if parsed is None:
            continue
        if fields.setdefault(name, parsed) != parsed:
            raise RecipeError(f"{place} disagrees with {places[name]}: leave one of the two out")
        places.setdefault(name, place)
        if parsed in (variable.launcher_default, variable.question_default):
            idle.add(name)
    return Source(fields, places, frozenset(idle), selects_levels=False)


def _key(suffix: str) -> str:
    """The name of a key in the file: the field's own, or the one that `accelerate config` writes."""
    field, _ = VARIABLES[suffix]
    return field.name if suffix in field.name.upper() else suffix.lower()


# NeMo, Megatron and Megatron-Bridge. Megatron's arguments may be written as on its command line (`--fp8-margin`), and
# the precision plug-ins of NeMo and Bridge (`bf16_with_fp8_mixed`, with hyphens too) as a backend string, or under
# `precision` or `mixed_precision`. An argument that this package does not have is refused by name, unless its value
# asks for nothing, such as False.

NAMES = {synonym: (field, reads) for field in FIELDS.values() for synonym, reads in field.synonyms.items()}
"""Their names for fields of ours, each with what turns their value into ours."""

_LAYERS_BF16 = "which layers are first and last is for the model to say: name them in exclude, such as "
_LAYERS_BF16 += '["*.layers.0.*", "*.layers.31.*"]'
_GATHERED = "it belongs to Megatron's own gathering of FP8 weights: leave it out"

_WITHOUT_EFFECT = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""Megatron reads them only with first_last_layers_bf16, and their default is 1."""

REFUSED = {
    **dict.fromkeys(("first_last_layers_bf16", *_WITHOUT_EFFECT), _LAYERS_BF16),
    **dict.fromkeys(("fp8_dpa", "fp8_dot_product_attention", "fp8_mha", "fp8_multi_head_attention"), _ATTENTION),
    "tp_only_amax_red": "all ranks share their amaxes; te:dynamic needs none of other ranks",
    "fp8_quantizer_factory": "quantizers of your own are no recipe of this package: register a backend instead",
    "keep_fp8_weight_transpose_cache": _GATHERED,
    "keep_fp8_transpose_cache": _GATHERED,
    "keep_fp8_transpose_cache_when_using_custom_fsdp": _GATHERED,
    "reuse_grad_buf_for_mxfp8_param_ag": _GATHERED,
    **dict.fromkeys(("fp4", "fp4_param", "fp4_param_gather"), "this package has no FP4"),
}
"""Arguments about FP8 that cannot be honoured, and what to do."""

_DELAYED = {"scaling": "delayed", "fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "max"}
PLUGINS = {
    "with_fp8_mixed": _DELAYED,
    "with_fp8_delayed_scaling_mixed": _DELAYED,
    "with_fp8_subchannel_scaling_mixed": {"scaling": "blockwise", "fp8_format": "HYBRID"},
    "with_mxfp8_mixed": {"scaling": "mxfp8", "fp8_format": "E4M3"},
}
"""What precision plug-ins compute, by their names without bf16_ or fp16_. They also gather weights in FP8, from masters
in high precision, which changes what travels and not the products; this package leaves weights as they are stored."""
_CURRENT_SCALING = "with_fp8_current_scaling_mixed"
_KEYS_OF_PLUGINS = ("precision", "mixed_precision")


def own_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The fields under our names, and whether any had another.

    Raises:
        RecipeError: both names disagree, or something is asked for that cannot be honoured.
    """
    plain = {_plain(name): value for name, value in values.items()}
    if len(plain) < len(values):
        spelled = collections.Counter(map(_plain, values))
        raise RecipeError(f"{shortened(spelled.most_common(1)[0][0])} is given twice, in two spellings: leave one out")
    plugin = _plugin_fields(plain)
    theirs = {name: value for name, value in plain.items() if name in NAMES or name in REFUSED}
    own = {name: value for name, value in plain.items() if name not in theirs}
    if "fp8" in theirs and not _holds(lambda: theirs["fp8"], otherwise=True):
        raise RecipeError(f"fp8={shown(theirs['fp8'])} turns FP8 off in NeMo: train in bf16, or say 'hybrid' or 'e4m3'")
    for name, value in theirs.items():
        idle = name in _WITHOUT_EFFECT and "first_last_layers_bf16" in theirs  # refused itself, where it is True
        if name in REFUSED and not idle and _holds(lambda value=value: value, otherwise=True):
            raise RecipeError(f"{name}={shown(value)} cannot be honoured: {REFUSED[name]}")
    for name, value in theirs.items():
        if name in NAMES and value is not None:
            _add_renamed(own, name, value)
    given = {name: value for name, value in own.items() if value is not None}
    own = {**own, **plugin, **given}  # an argument comes before its plug-in
    spelled = any(name.startswith("--") and name != "--backend" for name in values)
    return own, bool(theirs or plugin or spelled)


def _plain(name: str) -> str:
    """A name such as `--fp8-margin` as Python spells it."""
    return name.removeprefix("--").replace("-", "_")


def _lower(word: Any) -> str:
    """A name of a plug-in in one spelling; empty for what is no text."""
    return _plain(word).lower() if isinstance(word, str) else ""


def _plugin_fields(plain: dict[str, Any]) -> dict[str, Any]:
    """The fields that a precision plug-in stands for, which is taken out of `plain`."""
    named = [key for key in _KEYS_OF_PLUGINS if key in plain]
    if _lower(plain.get("backend")).startswith(("bf16_with_", "fp16_with_")):
        named.append("backend")
    if len(named) > 1:
        raise RecipeError(f"{' and '.join(named)} name a precision both: leave one out")
    if not named:
        return {}
    key, word = named[0], plain.pop(named[0])
    dtype, _, rest = _lower(word).partition("_")
    if dtype in ("bf16", "fp16") and rest in PLUGINS:
        return {**PLUGINS[rest], "autocast_dtype": dtype}
    if rest.endswith(_CURRENT_SCALING):
        raise RecipeError(
            f"{key}={shown(word)} keeps the first and last layers in high precision: use te:dynamic, and {_LAYERS_BF16}"
        )
    known = [f"{dtype}_{rest}" for dtype in ("bf16", "fp16") for rest in PLUGINS]
    raise RecipeError(
        f"{key}={shown(word)} is no FP8 precision of NeMo's or Megatron-Bridge's{closest(f'{dtype}_{rest}', known)}; "
        f"known are {', '.join(known)}"
    )


def _add_renamed(own: dict[str, Any], name: str, value: Any) -> None:
    field, reads = NAMES[name]
    try:
        meant = reads(value) if field.name == "scaling" else field.parsed(reads(value))
    except ValueError as error:
        raise RecipeError(f"{name}: {error}") from None
    if own.get(field.name) is not None and not _holds(lambda: own[field.name] in (value, meant)):
        raise RecipeError(
            f"{name}={shown(value)} and {field.name}={shown(own[field.name])} are two names of one field: leave one out"
        )
    own[field.name] = meant
