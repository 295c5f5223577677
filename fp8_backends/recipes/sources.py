"""Read recipes of Accelerate, TransformerEngine, NeMo and Megatron, files and environments as
fields of `FP8RecipeKwargs`. Objects are recognized by class name; no library is imported."""

import collections
import contextlib
import dataclasses
import difflib
import json
import os
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
    given = {name: value for name in _READ if (value := getattr(handler, name, None)) is not None}
    fields = {
        name: value
        for name, value in given.items()
        if FIELDS[name].parsed(value) != FIELDS[name].launcher_default
    }
    options = {name: given[name] for name in _AO_OPTIONS if name in given}
    # without the user's config, Accelerate builds one from both options
    if len(options) == 2 and given["config"] == type(given["config"])(**options):
        del fields["config"]
    else:
        fields |= options
    if getattr(handler, "use_mxfp8_block_scaling", None):
        fields["scaling"] = "mxfp8"
    return {"backend": backend or getattr(handler, "backend", None) or "te", **fields}


_AO_OPTIONS = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
_READ = (
    *(field.name for field in dataclasses.fields(RuleFields)),
    "opt_level",
    "config",
    "module_filter_func",
    *_AO_OPTIONS,
)
"""Fields with an attribute in Accelerate's handlers."""
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
    for name, value in vars(spec).items():
        default = getattr(type(spec), name, dataclasses.MISSING)
        if name == "backward_override":
            default = None  # the class may read another value from the environment
        if name.startswith("_") or name in read or _equal(value, default):
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


def _equal(one: Any, other: Any) -> bool:
    """Compare arbitrary objects; False if the comparison has no truth value, as with arrays."""
    try:
        return bool(one == other)
    except Exception:
        return False


@contextlib.contextmanager
def placed(place: str | None) -> Iterator[None]:
    """Put the place of a value in front of a `RecipeError` of this block; None leaves it as it
    is."""
    try:
        yield
    except RecipeError as error:
        if place is None:
            raise
        raise RecipeError(f"{place}: {error}") from None


@dataclasses.dataclass
class Source:
    """The recipe fields from one place."""

    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Values by name; None: not given."""
    places: dict[str, str] = dataclasses.field(default_factory=dict)
    """Each field as the place writes it, for messages; empty for code."""
    idle: set[str] = dataclasses.field(default_factory=set)
    """Fields at a default that the place fills in: not given, unless the backend reads them."""
    fills_in: bool = False
    """True if the place fills in defaults. There an `opt_level` selects no level, unless the
    backend string names msamp."""

    def read(
        self,
        match: tuple[Field, Variable],
        value: Any,
        place: str,
        launcher_default: Any = None,
    ) -> None:
        """Parse a value under one of a field's names, and add it unless it is that default. Raises
        `RecipeError` with the place."""
        field, variable = match
        is_no = field.name == "backend" and str(value).strip().upper() in ("", "NO")
        if value is None or is_no and self.fills_in:
            return
        with placed(place):
            parsed = variable_value(field, variable, value)
        if parsed is None or parsed == launcher_default:
            return
        self.add(field.name, parsed, place)
        if self.fills_in and parsed in (variable.launcher_default, variable.question_default):
            self.idle.add(field.name)

    def add(self, name: str, value: Any, place: str) -> None:
        """Add a parsed value. Raises `RecipeError` if the place gives another value, too."""
        if self.fields.setdefault(name, value) != value:
            raise RecipeError(
                f"{place} disagrees with {self.places[name]}: leave one of the two out"
            )
        self.places.setdefault(name, place)


LAUNCH = "fp8-backends launch"
LAUNCHED = "FP8_BACKENDS_RECIPE"
"""Variable with the launched recipe for workers: JSON of given fields, percent-encoded for a remote
shell."""

_OVERRIDES = ("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD")
"""Accelerate's launcher exports `override_linear_precision` as these three."""


def unknown_variable(
    written: str, suffix: str, prefix: str = "", names: Iterable[str] = tuple(VARIABLES)
) -> RecipeError:
    """Return the error for a name without a field, as `written`; `prefix` begins names there."""
    objects = {field.own_suffix: field.name for field in FIELDS.values() if field.is_object}
    if field := objects.get(suffix):
        return RecipeError(
            f"{written}: {field} takes a Python object, which no text can give: pass it in the "
            f"script, Accelerator(kwargs_handlers=[fp8_backends.FP8RecipeKwargs({field}=...)])"
        )
    near = difflib.get_close_matches(suffix, list(names), n=1, cutoff=0.5)
    spelled = prefix + "".join(near if prefix.isupper() else map(str.lower, near))
    hint = f" (did you mean {spelled!r}?)" if near else ""
    return RecipeError(f"{shortened(written, 400)} is not known{hint}")


def _variable(suffix: str, written: str, prefix: str = "") -> tuple[Field, Variable]:
    """Return the field of a name, and the name. Raises `RecipeError`."""
    match = find_variable(suffix)
    if match is None:
        raise unknown_variable(written, suffix, prefix)
    return match


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if `fp8-backends launch` passed the recipe."""
    return LAUNCHED in (os.environ if environ is None else environ)


def environment_name(environ: Mapping[str, str] | None = None) -> str:
    """Name the variables that `environment_source` reads, for messages."""
    return LAUNCHED if is_launched(environ) else f"{PREFIX}*"


def environment_source(environ: Mapping[str, str] | None = None) -> Source:
    """Read `FP8_BACKENDS_RECIPE`, else `ACCELERATE_FP8_*` without the launcher's defaults."""
    environ = os.environ if environ is None else environ
    if is_launched(environ):
        launched = _launched_fields(environ[LAUNCHED])
        return Source(launched, dict.fromkeys(launched, f"{LAUNCHED} in the environment"))
    source = Source(fills_in=True)
    overrides = dict.fromkeys(_OVERRIDES, "False")
    for key, text in variables(environ).items():
        suffix = key.upper().removeprefix(PREFIX)
        if suffix in overrides:
            overrides[suffix] = text
            continue
        match = _variable(suffix, key, PREFIX)
        default = match[1].launcher_default
        source.read(match, text, f"{key}={shortened(text)}", launcher_default=default)
    named = ", ".join(f"{suffix}={shortened(text)}" for suffix, text in overrides.items())
    try:
        flags = three_flags([*overrides.values()])
    except ValueError:
        raise RecipeError(
            f"{named}: three bools are wanted, one of them False. Accelerate's launcher cuts a "
            'YAML string such as "(false, false, false)" into letters: write a list, [false, '
            "false, false], or use fp8-backends launch"
        ) from None
    if any(flags):
        source.add("override_linear_precision", flags, named)
    return source


def _launched_fields(text: str) -> dict[str, Any]:
    """Read the fields of a launch, percent-encoded or not."""
    try:
        given = from_json(urllib.parse.unquote(text) if text.startswith("%7B") else text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        wanted = 'not a JSON object of recipe fields, such as {"backend": "native:rowwise"}'
        raise RecipeError(f"{LAUNCHED} in the environment: {wanted}: {shown(text)}")
    return given


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the non-empty variables `ACCELERATE_FP8_*`, in any case."""
    return {
        key: text
        for key, text in environ.items()
        if key.upper().startswith(PREFIX) and text.strip()
    }


def file_source(path: str) -> Source:
    """Read a recipe file, a mapping of fields (docs/launching.rst). Raises `RecipeError` with file
    and key."""
    path = path.strip()
    source = Source()
    _read_block(source, read_file(path), f"{path}: ")
    if names_file(source.fields.get("backend")):
        raise RecipeError(
            f"{source.places['backend']}: a recipe file names a backend, not another file"
        )
    return source


def config_source(fp8_config: Mapping[str, Any] | None, path: str) -> Source:
    """Read the `fp8_config` block of the Accelerate YAML file of this path: Accelerate's keys,
    those of `accelerate config`, and every field of a recipe, each with or without `fp8_` in front.
    Raises `RecipeError`, with key and file, for an unknown key or an invalid value."""
    block = fp8_config or {}
    if not isinstance(block, Mapping):
        raise RecipeError(f"{path}: fp8_config must be a block of keys, not {shown(block)}")
    source = Source(fills_in=True)
    _read_block(source, block, f"{path}: fp8_config.")
    return source


def _read_block(source: Source, block: Mapping[str, Any], prefix: str) -> None:
    for key, value in block.items():
        suffix = str(key).strip().lower().removeprefix("fp8_").upper()
        match = _variable(suffix, f"{prefix}{key}")
        source.read(match, value, f"{prefix}{key}={shown(value)}")


# NeMo, Megatron and Megatron-Bridge. Megatron's arguments may be written as on its command line
# (`--fp8-margin`). Precision plug-ins of NeMo and Bridge (`bf16_with_fp8_mixed`, with hyphens too)
# may be a backend string, or the value of `precision` or `mixed_precision`. An unsupported argument
# is refused by name, unless its value is falsy.

SYNONYMS = {
    synonym: (field, reads)
    for field in FIELDS.values()
    for synonym, reads in field.synonyms.items()
}
"""Their names of our fields, each with the translation of values."""

_GATHERED = "it belongs to Megatron's own gathering of FP8 weights: leave it out"

_BLOCKS_IN_BF16 = "first_last_layers_bf16"
_NUMBERS = {"first": "num_layers_at_start_in_bf16", "last": "num_layers_at_end_in_bf16"}
"""Megatron reads them only with first_last_layers_bf16, and their default is 1."""

REFUSED_NAMES = {
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
_PLUGINS = {
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
PLUGINS = {
    f"{dtype}_{name}": {**fields, "autocast_dtype": dtype}
    for dtype in ("bf16", "fp16")
    for name, fields in _PLUGINS.items()
}
"""Fields of each precision plug-in. They also gather weights in FP8, which changes no product."""


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
    theirs = {
        name: plain.pop(name) for name in [*plain] if name in SYNONYMS or name in REFUSED_NAMES
    }
    if "fp8" in theirs and _is_off(theirs["fp8"]):
        raise RecipeError(
            f"fp8={shown(theirs['fp8'])} turns FP8 off in NeMo: train in bf16, or say 'hybrid' or "
            "'e4m3'"
        )
    source = Source()
    for name, value in theirs.items():
        written = f"{name}={shown(value)}"
        if name in REFUSED_NAMES or value is None:
            if not _is_off(value):
                raise RecipeError(f"{written} cannot be honoured: {REFUSED_NAMES[name]}")
            continue
        field, reads = SYNONYMS[name]
        source.read((field, Variable(name, reads=reads)), value, written)
        own = plain.get(field.name, value)
        if own is not None and not (_equal(own, value) or _equal(own, source.fields[field.name])):
            raise RecipeError(
                f"{written} disagrees with {field.name}={shown(own)}: leave one of the two out"
            )
    given = plain | source.fields
    # an argument overrides its plug-in
    given |= {name: value for name, value in plugin.items() if given.get(name) is None}
    spelled = any(name.startswith("--") and name != "--backend" for name in values)
    return given, bool(theirs or plugin or spelled)


def _is_off(value: Any) -> bool:
    """Return True for a value that turns an argument off."""
    return any(_equal(value, off) for off in (None, False, "", [], {}))


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
    words = {
        key: _plain(plain[key]).lower() if isinstance(plain[key], str) else ""
        for key in ("precision", "mixed_precision", "backend")
        if key in plain
    }
    if not words.get("backend", "").startswith(("bf16_with_", "fp16_with_")):
        words.pop("backend", None)
    if len(words) > 1:
        raise RecipeError(f"{' and '.join(words)} name a precision both: leave one out")
    for key, word in words.items():
        value = plain.pop(key)
        if word not in PLUGINS:
            raise RecipeError(
                f"{key}={shown(value)} is no FP8 precision of NeMo's or "
                f"Megatron-Bridge's{closest(word, PLUGINS)}; known are {', '.join(PLUGINS)}"
            )
        return PLUGINS[word]
    return {}
