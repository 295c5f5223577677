"""Read recipes of Accelerate, TransformerEngine, NeMo and Megatron, files and environments as
fields of `FP8RecipeKwargs`. Objects are recognized by class name; no library is imported."""

import collections
import dataclasses
import difflib
import json
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..compute.fields import Field, Variable, closest, flag, parsed, three_flags
from ..errors import RecipeError
from ..words import shortened, shown
from .fields import FIELDS, VARIABLES, RuleFields, find_variable, variable_value
from .strings import names_file

PREFIX = "ACCELERATE_FP8_"


def read_file(path: str) -> dict[str, Any]:
    """Return the keys of a YAML file, or of a JSON file by its ending. Raises `RecipeError`, with
    the file and PyYAML's line, if it cannot be read, is no YAML or JSON in UTF-8, repeats a key in
    a block, or holds no keys."""
    kind = "JSON" if path.endswith(".json") else "YAML"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        values = from_json(text) if kind == "JSON" else yaml.load(text, _Loader)
    except OSError as error:
        where = f" in {Path.cwd()}" if isinstance(error, FileNotFoundError) else ""
        raise RecipeError(f"{shortened(path)}: {error.strerror or error}{where}") from None
    # PyYAML raises any error for a value that contradicts its tag, such as `!!bool x`
    except Exception as error:
        reason = shortened(
            " ".join(str(error).split()).replace(' in "<unicode string>",', ","), 600
        )
        raise RecipeError(f"{shortened(path)} is no {kind} that can be read: {reason}") from None
    if not isinstance(values, Mapping):
        wanted = "a recipe, or a configuration file of Accelerate or Axolotl, is wanted"
        raise RecipeError(f"{shortened(path)} holds no keys: {wanted}")
    return {str(key): value for key, value in values.items()}


def from_json(text: str) -> Any:
    """Parse a JSON text. Raises ValueError for invalid JSON and for a repeated key in a block."""
    return json.loads(text, object_pairs_hook=_block)


def _block(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in collections.Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"the key {key!r} stands in a block twice")
    return dict(pairs)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with an error for a repeated key in a block."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.value in seen or seen.add(key.value)):
                problem = shortened(f"the key {key.value!r} stands in a block twice")
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node


def foreign_fields(spec: Any) -> dict[str, Any] | None:
    """Translate a recipe of Accelerate or TransformerEngine; return None for any other object."""
    for cls in type(spec).__mro__:
        if cls.__module__.split(".")[0] == "accelerate" and cls.__name__ in _ACCELERATE_HANDLERS:
            return _accelerate_fields(spec, _ACCELERATE_HANDLERS[cls.__name__])
        if cls.__name__ in _TE_RECIPES:
            return _te_recipe_fields(spec, cls.__name__)
        if cls.__name__ in ("NVFP4BlockScaling", "CustomRecipe"):
            raise RecipeError(
                f"TransformerEngine's {cls.__name__} is no FP8 recipe of this package: it has "
                "DelayedScaling, Float8CurrentScaling, Float8BlockScaling and MXFP8BlockScaling. "
                "Pass one of them, or name a scaling rule, such as native:mxfp8"
            )
    return None


# Accelerate's handlers fill in every field, so a value equal to Accelerate's default counts as not
# given.


def _accelerate_fields(handler: Any, backend: str | None) -> dict[str, Any]:
    """Translate a handler; `backend` None: the deprecated one, which has the fields of both TE and
    MS-AMP."""
    if backend == "ao":
        return _ao_fields(handler)
    names = [*(field.name for field in dataclasses.fields(RuleFields)), "opt_level"]
    given = {name: value for name in names if (value := getattr(handler, name, None)) is not None}
    fields = {
        name: value
        for name, value in given.items()
        if FIELDS[name].parsed(value) != FIELDS[name].launcher_default
    }
    mxfp8 = {"scaling": "mxfp8"} if getattr(handler, "use_mxfp8_block_scaling", None) else {}
    return {"backend": backend or getattr(handler, "backend", None) or "te", **mxfp8, **fields}


def _ao_fields(handler: Any) -> dict[str, Any]:
    pad, gather = handler.pad_inner_dim, handler.enable_fsdp_float8_all_gather
    config = handler.config
    # without the user's config, Accelerate builds one from the two options, and both default to
    # True
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


_ACCELERATE_HANDLERS = {
    "FP8RecipeKwargs": None,
    "TERecipeKwargs": "te",
    "MSAMPRecipeKwargs": "msamp",
    "AORecipeKwargs": "ao",
}
"""Backend of each class."""


_TE_RECIPES = {
    "DelayedScaling": (
        "delayed",
        ("fp8_format", "margin", "amax_history_len", "amax_compute_algo"),
    ),
    "Float8CurrentScaling": ("dynamic", ("fp8_format",)),
    "Float8BlockScaling": ("blockwise", ("fp8_format",)),
    "MXFP8BlockScaling": ("mxfp8", ("fp8_format",)),
}
"""Scaling rule of each class, and its attributes with a recipe field."""

_VARIABLE_INSTEAD = "TransformerEngine takes it for all recipes of a process from {} in the environment: set that to 1"
_ATTENTION = (
    "this package converts Linear layers, and attention stays the model's own, in high precision; "
    "for attention in FP8 build it of TransformerEngine's DotProductAttention and enter its "
    "autocast yourself"
)
_WHY_NOT = {
    "fp8_dpa": _ATTENTION,
    "fp8_mha": _ATTENTION,
    "scaling_factor_compute_algo": "with a function of your own TransformerEngine leaves its fused "
    "update; leave it out, or give margin",
    "reduce_amax": "each rank would keep scales of its own, and a checkpoint holds those of one; "
    "leave it True, which on one rank is the same",
    "backward_override": "TransformerEngine would run the backward products in high precision; for "
    "that use native:delayed or native:dynamic with override_linear_precision=(False, True, True)",
    "use_power_2_scales": _VARIABLE_INSTEAD.format("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"),
    "use_f32_scales": _VARIABLE_INSTEAD.format("NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
}


def _te_recipe_fields(spec: Any, class_name: str) -> dict[str, Any]:
    """Read the fields; refuse other attributes that differ from their class: `te` creates its own
    recipe of it."""
    scaling, read = _TE_RECIPES[class_name]
    cls = type(spec)
    defaults = (
        {field.name: field.default for field in dataclasses.fields(cls)}
        if dataclasses.is_dataclass(cls)
        else {}
    )
    defaults["backward_override"] = None  # the class may read another value from the environment
    for name, value in vars(spec).items():
        default = defaults.get(name, getattr(cls, name, dataclasses.MISSING))
        if (
            name.startswith("_")
            or name in read
            or _holds(lambda value=value, default=default: value == default)
        ):
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
    """Return the result of a comparison of arbitrary objects; `otherwise` if it has no truth value,
    as with arrays."""
    try:
        return bool(comparison())
    except Exception:
        return otherwise


LAUNCHED = "FP8_BACKENDS_RECIPE"
"""Variable with the launched recipe for workers: JSON of given fields, percent-encoded for a remote
shell."""

_OVERRIDES = ("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD")
"""Accelerate's launcher exports `override_linear_precision` as these three."""


def unknown_variable(
    written: str,
    suffix: str,
    spelling: Callable[[str], str],
    names: Iterable[str] = tuple(VARIABLES),
) -> RecipeError:
    """Return the error for a name without a field, as `written`; `spelling` spells a variable's
    name there."""
    objects = {field.own_suffix: field.name for field in FIELDS.values() if field.is_object}
    if field := objects.get(suffix):
        return RecipeError(
            f"{written}: {field} takes a Python object, which no text can give: pass it in the "
            f"script, Accelerator(kwargs_handlers=[fp8_backends.FP8RecipeKwargs({field}=...)])"
        )
    matches = difflib.get_close_matches(suffix, list(names), n=1, cutoff=0.5)
    hint = f" (did you mean {spelling(matches[0])!r}?)" if matches else ""
    return RecipeError(f"{shortened(written, 400)} is not known{hint}")


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if `fp8-backends launch` passed the recipe."""
    return LAUNCHED in (os.environ if environ is None else environ)


def environment_name(environ: Mapping[str, str] | None = None) -> str:
    """Name the variables that `environment_fields` reads, for messages."""
    return LAUNCHED if is_launched(environ) else f"{PREFIX}*"


def environment_fields(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the fields in `FP8_BACKENDS_RECIPE`, else in `ACCELERATE_FP8_*`, without the
    launcher's defaults."""
    environ = os.environ if environ is None else environ
    if is_launched(environ):
        text = environ[LAUNCHED]
        try:
            given = from_json(urllib.parse.unquote(text) if text.startswith("%7B") else text)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            wanted = 'not a JSON object of recipe fields, such as {"backend": "native:rowwise"}'
            raise RecipeError(f"{wanted}: {shown(text)}")
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
    texts = variables(environ)
    overrides = [texts.pop(suffix, "False") for suffix in _OVERRIDES]
    fields: dict[str, Any] = {}
    for suffix, text in texts.items():
        if (match := find_variable(suffix)) is None:
            raise unknown_variable(PREFIX + suffix, suffix, lambda name: PREFIX + name)
        field, variable = match
        value = variable_value(field, variable, text)
        if value is None or value == variable.launcher_default:
            continue
        if fields.setdefault(field.name, value) != value:
            raise RecipeError(
                f"{PREFIX}{suffix}={shown(text)} disagrees with another variable that says "
                f"{shown(fields[field.name])}"
            )
    try:
        if any(flags := three_flags(overrides)):
            fields["override_linear_precision"] = flags
    except ValueError:
        named = ", ".join(
            f"{suffix}={shortened(text)}"
            for suffix, text in zip(_OVERRIDES, overrides, strict=True)
        )
        raise RecipeError(
            f"{named}: three bools are wanted, one of them False. Accelerate's launcher cuts a "
            "YAML string such as "
            '"(false, false, false)" into letters: write a list, [false, false, false], or use '
            "fp8-backends launch"
        ) from None
    if fields.get("backend", "").lower() == "no":
        del fields["backend"]
    return fields


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the non-empty values of `ACCELERATE_FP8_*` by suffix in upper case."""
    texts: dict[str, str] = {}
    for key, text in environ.items():
        suffix = key.upper().removeprefix(PREFIX)
        if not key.upper().startswith(PREFIX) or not text.strip():
            continue
        if texts.setdefault(suffix, text) != text:
            raise RecipeError(
                f"{PREFIX}{suffix} is set twice, to {shown(texts[suffix])} and {shown(text)}"
            )
    return texts


class Source(NamedTuple):
    """The recipe fields from one place."""

    fields: Mapping[str, Any]
    """Parsed values by name."""
    places: Mapping[str, str]
    """Each field as the place writes it, for messages."""
    idle: frozenset[str] = frozenset()
    """Fields at a default that the place fills in: not given, unless the backend reads them."""
    selects_levels: bool = True
    """True if an `opt_level` selects a level without a backend string that names msamp."""


def add_field(
    fields: dict[str, Any],
    places: dict[str, str],
    match: tuple[Field, Variable],
    value: Any,
    place: str,
) -> Any:
    """Parse a value from `place` and add it; return it, None if not given. Raises `RecipeError`
    with the place."""
    field, variable = match
    try:
        parsed = variable_value(field, variable, value)
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from None
    if parsed is not None and fields.setdefault(field.name, parsed) != parsed:
        raise RecipeError(f"{place} disagrees with {places[field.name]}: leave one of the two out")
    if parsed is not None:
        places.setdefault(field.name, place)
    return parsed


def file_source(path: str) -> Source:
    """Read a recipe file, a mapping of fields (docs/launching.rst). Raises `RecipeError` with file
    and key."""
    path = path.strip()
    source = config_source(read_file(path), path, block="")
    if names_file(source.fields.get("backend")):
        raise RecipeError(
            f"{source.places['backend']}: a recipe file names a backend, not another file"
        )
    return source._replace(idle=frozenset(), selects_levels=True)


def config_source(
    fp8_config: Mapping[str, Any] | None, source: str, block: str = "fp8_config."
) -> Source:
    """Read the `fp8_config` block of the Accelerate YAML file `source`, for `merging.merged`:
    Accelerate's keys, those of `accelerate config`, and every field of a recipe, each with or
    without `fp8_` in front. Raises `RecipeError`, with key and file, for an unknown key or an
    invalid value."""
    if not isinstance(fp8_config or {}, Mapping):
        raise RecipeError(f"{source}: fp8_config must be a block of keys, not {shown(fp8_config)}")
    fields, places, idle = {}, {}, set()
    for key, value in (fp8_config or {}).items():
        suffix = str(key).strip().lower().removeprefix("fp8_").upper()
        if (match := find_variable(suffix)) is None:
            raise unknown_variable(f"{source}: {block}{key}", suffix, _key)
        field, variable = match
        if value is None or (field.name == "backend" and str(value).strip().upper() in ("", "NO")):
            continue
        parsed = add_field(
            fields, places, match, value, f"{source}: {block}{shortened(str(key))}={shown(value)}"
        )
        if parsed is not None and parsed in (variable.launcher_default, variable.question_default):
            idle.add(field.name)
    return Source(fields, places, frozenset(idle), selects_levels=False)


def _key(suffix: str) -> str:
    """Return the key of a variable in a file: the field's name, or the name that `accelerate
    config` writes."""
    field, _ = VARIABLES[suffix]
    return field.name if suffix in field.name.upper() else suffix.lower()


# NeMo, Megatron and Megatron-Bridge. Megatron's arguments may be written as on its command line
# (`--fp8-margin`). Precision plug-ins of NeMo and Bridge (`bf16_with_fp8_mixed`, with hyphens too)
# may be a backend string, or the value of `precision` or `mixed_precision`. An unsupported argument
# is refused by name, unless its value is falsy.

NAMES = {
    synonym: (field, reads)
    for field in FIELDS.values()
    for synonym, reads in field.synonyms.items()
}
"""Their names of our fields, each with the translation of values."""

_GATHERED = "it belongs to Megatron's own gathering of FP8 weights: leave it out"

_BLOCKS_IN_BF16 = "first_last_layers_bf16"
_NUMBERS = {"first": "num_layers_at_start_in_bf16", "last": "num_layers_at_end_in_bf16"}
"""Megatron reads them only with first_last_layers_bf16, and their default is 1."""

REFUSED = {
    **dict.fromkeys(
        ("fp8_dpa", "fp8_dot_product_attention", "fp8_mha", "fp8_multi_head_attention"), _ATTENTION
    ),
    "tp_only_amax_red": "all ranks share their amaxes; te:dynamic needs none of other ranks",
    "fp8_quantizer_factory": "quantizers of your own are no recipe of this package: register a "
    "backend instead",
    "keep_fp8_weight_transpose_cache": _GATHERED,
    "keep_fp8_transpose_cache": _GATHERED,
    "keep_fp8_transpose_cache_when_using_custom_fsdp": _GATHERED,
    "reuse_grad_buf_for_mxfp8_param_ag": _GATHERED,
    "fp4": "this package trains in 8 bits: leave it out, or use native:mxfp8",
    **dict.fromkeys(("fp4_param", "fp4_param_gather"), "this package stores no weights in FP4"),
}
"""Unsupported FP8 arguments, each with the alternative."""

_DELAYED = {
    "scaling": "delayed",
    "fp8_format": "HYBRID",
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
}
PLUGINS = {
    "with_fp8_mixed": _DELAYED,
    "with_fp8_delayed_scaling_mixed": _DELAYED,
    "with_fp8_current_scaling_mixed": {
        "scaling": "dynamic",
        "fp8_format": "HYBRID",
        "layers": {"first": 1, "last": 1},
    },
    "with_fp8_subchannel_scaling_mixed": {"scaling": "blockwise", "fp8_format": "HYBRID"},
    "with_mxfp8_mixed": {"scaling": "mxfp8", "fp8_format": "E4M3"},
}
"""Precision plug-ins by name without bf16_ or fp16_. They also gather weights in FP8, which changes
no product."""


def own_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Translate NeMo's and Megatron's names; return fields, and True if any was translated. Raises
    `RecipeError`."""
    plain = {_plain(name): value for name, value in values.items()}
    if len(plain) < len(values):
        spelled = collections.Counter(map(_plain, values))
        raise RecipeError(
            f"{shortened(spelled.most_common(1)[0][0])} is given twice, in two spellings: leave "
            "one out"
        )
    plugin = _plugin_fields(plain) | _blocks_in_bf16(plain)
    theirs = {name: value for name, value in plain.items() if name in NAMES or name in REFUSED}
    fields = {name: value for name, value in plain.items() if name not in theirs}
    if "fp8" in theirs and not _holds(lambda: theirs["fp8"], otherwise=True):
        raise RecipeError(
            f"fp8={shown(theirs['fp8'])} turns FP8 off in NeMo: train in bf16, or say 'hybrid' or "
            "'e4m3'"
        )
    for name, value in theirs.items():
        if name in REFUSED and _holds(lambda value=value: value, otherwise=True):
            raise RecipeError(f"{name}={shown(value)} cannot be honoured: {REFUSED[name]}")
    for name, value in theirs.items():
        if name not in NAMES or value is None:
            continue
        field, reads = NAMES[name]
        try:
            meant = reads(value) if field.name == "scaling" else field.parsed(reads(value))
        except ValueError as error:
            raise RecipeError(f"{name}: {error}") from None
        present = fields.get(field.name)
        if present is not None and not _holds(
            lambda present=present, pair=(value, meant): present in pair
        ):
            raise RecipeError(
                f"{name}={shown(value)} and {field.name}={shown(present)} are two names of one "
                "field: leave one out"
            )
        fields[field.name] = meant
    given = {name: value for name, value in fields.items() if value is not None}
    fields = {**fields, **plugin, **given}  # an argument overrides its plug-in
    spelled = any(name.startswith("--") and name != "--backend" for name in values)
    return fields, bool(theirs or plugin or spelled)


def _plain(name: str) -> str:
    """Spell a name such as `--fp8-margin` as Python does."""
    return name.removeprefix("--").replace("-", "_")


def _blocks_in_bf16(plain: dict[str, Any]) -> dict[str, Any]:
    """Remove Megatron's first and last layers in bf16 from `plain` and return them as `layers`."""
    numbers = {name: plain.pop(theirs, None) for name, theirs in _NUMBERS.items()}
    if _BLOCKS_IN_BF16 not in plain and any(numbers.values()):
        raise RecipeError(
            f"{' and '.join(_NUMBERS.values())} count only with {_BLOCKS_IN_BF16}=True"
        )
    if not parsed(_BLOCKS_IN_BF16, flag, plain.pop(_BLOCKS_IN_BF16, False)):
        return {}
    if plain.get("layers") is not None:
        raise RecipeError(
            f"{_BLOCKS_IN_BF16} and layers both name layers: write first and last in layers"
        )
    blocks = {
        name: 1 if number is None else number for name, number in numbers.items() if number != 0
    }
    return {"layers": blocks} if blocks else {}


def _plugin_fields(plain: dict[str, Any]) -> dict[str, Any]:
    """Remove a precision plug-in from `plain` and return its fields."""

    def spelled(key: str) -> str:
        return _plain(plain[key]).lower() if isinstance(plain.get(key), str) else ""

    named = [key for key in ("precision", "mixed_precision") if key in plain]
    if spelled("backend").startswith(("bf16_with_", "fp16_with_")):
        named.append("backend")
    if len(named) > 1:
        raise RecipeError(f"{' and '.join(named)} name a precision both: leave one out")
    if not named:
        return {}
    dtype, _, rest = spelled(named[0]).partition("_")
    written = f"{named[0]}={shown(plain.pop(named[0]))}"
    if dtype in ("bf16", "fp16") and rest in PLUGINS:
        return {**PLUGINS[rest], "autocast_dtype": dtype}
    names = [f"{dtype}_{rest}" for dtype in ("bf16", "fp16") for rest in PLUGINS]
    raise RecipeError(
        f"{written} is no FP8 precision of NeMo's or "
        f"Megatron-Bridge's{closest(f'{dtype}_{rest}', names)}; known are {', '.join(names)}"
    )
