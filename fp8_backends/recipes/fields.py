"""Declare every field of a recipe once: its values, default, readers, and meaning as a docstring.
Names and defaults are Accelerate's where its FP8 handlers have the field. None means "not
given"."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import nn

from ..compute import registry
from ..compute.chips import products_with_rates
from ..compute.counts import FPROP, KINDS
from ..compute.fields import (
    DEFAULT_LEVEL,
    FALSE,
    Field,
    Variable,
    amax_algorithm,
    closest,
    flag,
    fp8_format,
    one_of,
    parsed,
    same,
    three_flags,
    whole_number,
    word,
)
from ..compute.interface import Compute
from ..compute.torchao import float8_config, scaling_of
from ..errors import FP8BackendError, RecipeError
from ..formats.scaling import RULES
from ..words import shortened, shown
from .strings import AUTO, parse_backend

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

MYPY = False
if MYPY:  # Accelerate has no types, and a dataclass with an untyped base accepts every argument

    class KwargsHandler:
        pass
else:
    from accelerate.utils import KwargsHandler

KEPT_IN_BF16 = "bf16"
"""The value of `layers` and `products` for high precision."""
ONE_SCALE = (*(name for name, rule in RULES.items() if rule.blocks is None), "tensorwise")
"""Scaling rules with one scale for a tensor."""
STEPS = "steps"
"""The key of `schedule` for the steps of the whole training."""
END_BLOCKS = ("first", "last")
"""Keys of `layers` for the first and last numbered blocks of a model."""
ABOVE_O0 = ("O1", "O2", "O3", "O4")
DELAYED = ("delayed",)
_LISTS = ("['", '["', "('", '("')
"""Openings of a list written as text."""


def _patterns(value: str | Collection[str]) -> tuple[str, ...]:
    """Parse name patterns: one comma-separated string or a sequence of strings."""
    value = _literal(value)
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    # an iterator could be endless; a collection is not
    is_list = isinstance(value, Collection) and not isinstance(value, Mapping)
    if not is_list or not len(value) or not all(isinstance(name, str) and name for name in value):
        raise ValueError(
            'must be name patterns, such as "model.layers.*.mlp.*" or ["q_proj", "k_proj"]'
        )
    return tuple(value)


def _choice(value: str | Collection[str]) -> tuple[str, ...]:
    """Parse name patterns, either all with a leading `+` or none."""
    patterns = _patterns(value)
    added = [pattern.startswith("+") for pattern in patterns]
    if any(added) and not all(added) or "+" in patterns:
        raise ValueError(
            "must have + before each pattern, which adds to the layers converted by default, or "
            "before none, which names all layers"
        )
    return patterns


def pairs_of(value: Any, wanted: str) -> dict[str, Any]:
    """Parse a mapping, also as text: "a=b, c=d", or a dictionary as Python or JSON writes it."""
    value = _literal(value, ("{",))
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",")]
        value = {key.strip(): word.strip() for key, _, word in pairs}
        if len(value) < len(pairs):
            raise ValueError(f"must name each key once, as in {wanted}")
    if not isinstance(value, Mapping) or not value or not all(str(key).strip() for key in value):
        raise ValueError(f"must be a mapping such as {wanted}")
    return {
        str(key).strip(): word.strip() if isinstance(word, str) else word
        for key, word in value.items()
    }


def _layers(value: Any) -> dict[str, str | int]:
    """Parse name patterns with a backend or bf16 each. A level is one choice for the whole
    model."""

    def choice(pattern: str, name: Any) -> str | int:
        if pattern in END_BLOCKS and (not isinstance(name, str) or name.lstrip("-").isdigit()):
            return whole_number(1)(name)
        wanted = f"must have COMPUTE[:SCALING] or bf16 for {pattern!r}, not {shown(name)}"
        if not isinstance(name, str) or not name:
            raise ValueError(wanted)
        if name.lower() == KEPT_IN_BF16:
            return KEPT_IN_BF16
        try:
            backend = parse_backend(name)
        except RecipeError as error:
            raise ValueError(f"{wanted}: {error}") from None
        if backend.compute == AUTO or backend.level is not None:
            raise ValueError(f"{wanted}: backend names the level, one for the whole model")
        return name.lower()

    pairs = pairs_of(value, '{"*.down_proj": "native:mxfp8", "lm_head": "bf16", "first": 1}')
    return {pattern: choice(pattern, name) for pattern, name in pairs.items()}


def _products(value: Any) -> dict[str, str]:
    """Parse a precision by product."""
    products = pairs_of(value, '{"dgrad": "e5m2", "wgrad": "bf16"}')
    for kind, name in products.items():
        if kind not in KINDS or str(name).lower() not in (KEPT_IN_BF16, "e4m3", "e5m2"):
            raise ValueError("must map fprop, dgrad or wgrad to bf16, e4m3 or e5m2")
    products = {kind: name.lower() for kind, name in products.items()}
    if products.get(FPROP) == "e5m2":
        raise ValueError("must not have fprop in e5m2: activations and weights are E4M3")
    three_flags([products.get(kind) == KEPT_IN_BF16 for kind in KINDS])
    return products


def _schedule(value: Any) -> dict[str | int | float, str | int]:
    """Parse the recipes of later steps: by step, or by share of all `steps`."""
    schedule: dict[str | int | float, str | int] = {}
    for key, name in pairs_of(value, '{0.9: "bf16"} or {0: "bf16", 100: "native:dynamic"}').items():
        if key == STEPS:
            schedule[STEPS] = whole_number(1)(name)
        elif not isinstance(name, str) or not name:
            raise ValueError(f"must have bf16 or a backend string from {key} on, not {shown(name)}")
        else:
            start = float(key) if re.fullmatch(r"0?\.[0-9]{1,9}", key) else whole_number(0)(key)
            schedule[start] = name.lower()
    starts = schedule.keys() - {STEPS}
    shares = [start for start in starts if isinstance(start, float)]
    if not starts or shares and len(shares) < len(starts - {0}):
        raise ValueError(
            "must have its starts as steps, 100, or as shares of training, 0.9: one kind"
        )
    return schedule


def _flag_or_patterns(value: Any) -> bool | tuple[str, ...]:
    with contextlib.suppress(ValueError):
        return flag(value)
    return _patterns(value)


_flag_or_patterns.values = "True, False, name patterns"


def _function(value: Any) -> Callable[[nn.Module, str], bool]:
    if not callable(value):
        raise ValueError(
            "must be a function of (module, name) that returns whether to convert the module"
        )
    return value


def _path(value: Any) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    path = path.strip() if isinstance(path, str) else ""
    if not path or not path.isprintable() or path.startswith(_LISTS):
        raise ValueError("must be the path of a file")
    return path


def _off_or(*words: str) -> Callable[[Any], str]:
    """Return a parser of "off" or one of these words. YAML parses a bare `off` as False, so that is
    "off", too."""
    one = one_of("off", *words)

    def parse(value: Any) -> str:
        # text of it too, by Accelerate's launcher
        text = str(value).strip().lower() if isinstance(value, (bool, str)) else None
        return "off" if text in ("", "none", *FALSE) else one(value)

    parse.values = one.values
    return parse


def mxfp8_scaling(value: Any) -> str | None:
    """Read `use_mxfp8_block_scaling` as a scaling rule, or None for False."""
    return "mxfp8" if flag(value) else None


def setting(default: Any, parse: Callable[[Any], Any], **declared: Any) -> Any:
    """Declare a field of a handler. `declared`: more attributes of `Field`."""
    return dataclasses.field(
        default=None, metadata={"default": default, "parse": parse, **declared}
    )


@dataclass(kw_only=True)
class CommonFields(KwargsHandler):
    """Fields of every backend."""

    include: str | Collection[str] | None = setting(None, _choice)
    """Name patterns of layers to convert, separated by commas (fnmatch on the full name; a pattern
    without a dot also matches any one part of it), or a subclass of Linear that only multiplies.
    Patterns with a leading + add to the default choice: +lm_head, +FalconLinear."""
    exclude: str | Collection[str] | None = setting(None, _patterns)
    """Name patterns of layers to keep in high precision, separated by commas."""
    module_filter_func: Callable[[nn.Module, str], bool] | None = setting(
        None, _function, is_object=True
    )
    """A function (module, name) -> whether to convert the module."""
    layers: str | Mapping[str, str | int] | None = setting(None, _layers)
    """Name patterns, as in include, with another backend or bf16 for their layers; the first match
    wins: {"*.down_proj": "native:mxfp8", "lm_head": "native:rowwise", "first": 1, "last": 2}, or as
        text
    *.down_proj=native:mxfp8, first=1. first and last keep so many numbered blocks in bf16 (the
    dtype of autocast). A pattern for nothing but heads, routers or adapters converts them."""
    small_layers: str = setting(
        "fp8", one_of("fp8", KEPT_IN_BF16, *products_with_rates()), is_feature=True
    )
    """Precision of Linears predicted to be slower in FP8, with casts, than in bf16, compiled and at
    8,192 tokens: bf16 decides for this machine's chip, a chip's name for that one. Layers named by
    layers, or by + in include, stay in FP8."""
    schedule: str | Mapping[Any, str | int] | None = setting(None, _schedule, is_feature=True)
    """Recipes of later optimizer steps, from a step or a share of training on: {0.9: "bf16"}, or
    for a warm-up in bf16 {0: "bf16", 100: "native:dynamic"}. A share needs the number of all steps:
    {0.9: "bf16", "steps": 2000}; Trainer knows it."""
    autocast_dtype: str = setting("bf16", one_of("bf16", "fp16", "fp32"))
    """Autocast dtype around FP8 under Accelerate (the default is fp32 on a CPU without bf16
    products)."""
    gradient_comm: str | None = setting(None, one_of("fp8", "plain"))
    """Format of gradients sent between ranks (default: fp8 at a level above O0, else plain)."""
    activation_comm: str = setting("plain", one_of("plain", "fp8"))
    """Format of activations sent between ranks in forward: fp8 sends E4M3 codes with their scales
    in the gathers of sequence-parallel activations (tensor parallelism; native)."""
    on_unproven: str = setting("raise", one_of("raise", "warn"))
    """What to do when no FP8 product ran in the first step."""
    saved_activations: str = setting("off", _off_or("fp8", "fp8+attention"), is_feature=True)
    """Format of activations saved for backward outside converted layers, as by norms and gates: fp8
    saves E4M3 codes, 33/32 bytes an element; fp8+attention includes attention."""
    fused_head: bool = setting(False, flag, is_feature=True)
    """Compute the output head and its loss in chunks of tokens, without storing all logits. The
    head stays in high precision unless include names it (native)."""
    monitor_every: int = setting(0, whole_number(0, 1_000_000), is_feature=True, only_watches=True)
    """Optimizer steps between samples of FP8 tensor statistics; 0 takes none."""
    monitor_file: str | os.PathLike[str] = setting("fp8_monitor.jsonl", _path, only_watches=True)
    """File for the statistics, one line a sample."""
    guard: str = setting("off", _off_or("warn", "skip", "stop"), is_feature=True, only_watches=True)
    """Action when a step goes wrong: warn logs, skip leaves the step out, stop raises an error."""


@dataclass(kw_only=True)
class ScalingField(KwargsHandler):
    """The scaling rule, and the precision of its products."""

    scaling: str | None = setting(
        None,
        word,
        synonyms={"fp8_recipe": same},
        further_variables=(
            Variable("USE_MXFP8_BLOCK_SCALING", launcher_default=False, reads=mxfp8_scaling),
        ),
    )
    """Scaling rule, unless the string names it: delayed, dynamic, rowwise, blockwise, mxfp8,
    window or another."""
    products: str | Mapping[str, str] | None = setting(None, _products)
    """Precision of single products, fprop, dgrad and wgrad: bf16, or the format of the gradient's
    codes, e4m3 or e5m2: {"dgrad": "e5m2", "wgrad": "bf16"} (te: only wgrad in bf16)."""
    fast_accumulation: bool | str | Collection[str] = setting(
        True,
        _flag_or_patterns,
        scalings=("dynamic", "delayed", "rowwise", "window", "tensorwise", "rowwise_with_gw_hp"),
        idle=True,
    )
    """Let the products of forward sum in the fewer bits of Hopper's and Ada's tensor cores; False
    adds every 128 products in FP32. Name patterns turn it off for these layers only."""


@dataclass
class RuleFields(KwargsHandler):
    """TransformerEngine's options, which `native` follows on any device. In the order of
    Accelerate's handler."""

    use_autocast_during_eval: bool = setting(False, flag, launcher_default=False)
    """Also run FP8 products in evaluation; by default evaluation runs in high precision."""
    # beyond 64 every code is zero, or saturated
    margin: int = setting(
        0,
        whole_number(-64, 64),
        scalings=DELAYED,
        launcher_default=0,
        synonyms={"fp8_margin": same},
    )
    """Divide the scale by 2**margin."""
    interval: int = setting(
        1,
        whole_number(1, 1_000_000),
        scalings=DELAYED,
        launcher_default=1,
        synonyms={"fp8_interval": same},
    )
    """Steps between updates of the scale (te supports only 1)."""
    fp8_format: str | Enum = setting(
        "HYBRID",
        fp8_format,
        default_of_scaling={
            name: rule.default_format for name, rule in RULES.items() if rule.blocks
        },
        launcher_default="HYBRID",
        # here a value equal to the launcher's default is meant; under the first name it counts as
        # not given
        further_variables=(Variable("NUMBER_FORMAT"),),
        synonyms={"fp8": same},
    )
    """HYBRID: E4M3 in forward, E5M2 for gradients; E4M3: E4M3 everywhere."""
    amax_history_len: int = setting(
        1024,
        whole_number(1, 1_000_000),
        scalings=DELAYED,
        launcher_default=1024,
        further_variables=(Variable("AMAX_HISTORY_LENGTH", 1024),),
        synonyms={"fp8_amax_history_len": same},
    )
    """Length of the amax history in steps."""
    amax_compute_algo: str = setting(
        "max",
        amax_algorithm,
        scalings=DELAYED,
        launcher_default="most_recent",
        further_variables=(
            Variable("AMAX_COMPUTE_ALGORITHM", "most_recent", question_default="max"),
        ),
        synonyms={"fp8_amax_compute_algo": same},
    )
    """Compute the scale from the maximum of the history, or from the most recent amax, which clips
    if a model is called twice a step with inputs of other magnitudes."""
    override_linear_precision: tuple[bool, bool, bool] = setting(
        (False, False, False),
        three_flags,
        launcher_default=(False, False, False),
        synonyms={
            "fp8_wgrad": lambda value: (False, False, not flag(value)),
            "no_fp8_wgrad": lambda value: (False, False, flag(value)),
        },
    )
    """Keep (fprop, dgrad, wgrad) in high precision (te supports only wgrad): Accelerate's name for
    bf16 in products."""
    use_mxfp8_block_scaling: InitVar[bool | None] = None
    """Accelerate's name for scaling="mxfp8"."""
    fp8_params: bool = setting(
        False,
        flag,
        levels=("O0",),
        idle=False,
        launcher_default=False,
        synonyms={"fp8_param": same, "fp8_param_gather": same},
    )
    """Store frozen weights in FP8, about 1 byte an element. Not with a level, which stores weights
    itself."""


@dataclass
class ConfigFields(KwargsHandler):
    """TorchAO's configuration. In the order of Accelerate's handler."""

    config: Float8LinearConfig | None = setting(
        None, float8_config, names_scaling=scaling_of, is_object=True
    )
    """A torchao.float8.Float8LinearConfig, used as it is."""
    pad_inner_dim: bool | None = setting(None, flag, launcher_default=True)
    """Pad products whose inner dimension is no multiple of 16 (default: on)."""


@dataclass
class GatherField(KwargsHandler):
    """Weight gathers of FSDP2."""

    enable_fsdp_float8_all_gather: bool | None = setting(
        None,
        flag,
        scalings=("tensorwise",),
        idle=False,
        launcher_default=True,
        # here a value equal to the launcher's default is meant; under the first name it counts as
        # not given
        further_variables=(Variable("ALL_GATHER"),),
    )
    """Let FSDP2 gather weights in FP8, 1 byte an element, or as stored (default: FP8 at a level
    above O0 if one set of codes serves both products, so not with rowwise or mxfp8; else as
    stored)."""


@dataclass
class LevelFields(KwargsHandler):
    """Fields of the levels, for any backend."""

    opt_level: str | None = setting(
        None,
        lambda value: word(value).upper(),
        launcher_default=DEFAULT_LEVEL,
        further_variables=(Variable("OPTIMIZATION_LEVEL", DEFAULT_LEVEL),),
    )
    """Level, O0 (no level) to O4, unless the backend string names it."""
    rounding: str = setting("stochastic", one_of("stochastic", "nearest"), levels=ABOVE_O0)
    """Rounding of stored weights and Adam states; nearest, as in MS-AMP, loses small updates."""
    implementation: str = setting("native", one_of("native", "original"), levels=ABOVE_O0)
    """Run the levels with this package, or with the installed package msamp (original)."""
    shard_states: bool | None = setting(None, flag, levels=ABOVE_O0)
    """Under DDP and DeepSpeed shard masters, residuals and Adam states between N ranks, as ZeRO-1
    does (default: at O3 and O4, and under ZeRO-1 and 2): 3 + 3/N bytes an element at O2, 2 + 5/N at
    O3, 2 + 3/N at O4."""
    gradient_release: bool = setting(False, flag, levels=ABOVE_O0, idle=False)
    """Step each parameter inside backward, as soon as its gradient is complete, and free the
    gradient. Not with accumulation or clipping."""
    offload: str = setting("off", _off_or("states"), levels=ABOVE_O0, idle="off")
    """Keep masters, residuals and Adam states in the memory of the host, and step weights there:
    1 byte an element on the device at O4, 2 at O2, and 1 more for gradients unless released. For
    one process and DDP."""


@dataclass
class BackendField(KwargsHandler):
    """The backend string."""

    backend: str | None = setting(None, word)
    """COMPUTE[:SCALING][+msamp[:LEVEL]]: native:rowwise, ao, te+msamp:O3, msamp:O2, ... (default:
    auto, the choice for this machine); or a file with fields, recipe.yaml."""


def _declared(*holders: type) -> dict[str, Field]:
    """Collect the fields of these dataclasses by name."""
    return {
        field.name: Field(field.name, **field.metadata)
        for cls in holders
        for field in dataclasses.fields(cls)
    }


COMMON = _declared(CommonFields)
OF_LEVELS = {name: field for name, field in _declared(LevelFields).items() if name != "opt_level"}
FIELDS = _declared(
    BackendField,
    ScalingField,
    LevelFields,
    RuleFields,
    ConfigFields,
    GatherField,
    CommonFields,
)
"""Every field of this package."""
NAMING = ("backend", "scaling", "opt_level")
"""Fields that name the backend."""
SETTINGS = {name: field for name, field in FIELDS.items() if name not in NAMING}
"""Every other field."""
OF_FEATURES = {name: field for name, field in SETTINGS.items() if field.is_feature}


def _by_suffix(fields: Iterable[Field]) -> dict[str, tuple[Field, Variable]]:
    return {variable.suffix: (field, variable) for field in fields for variable in field.variables}


VARIABLES = _by_suffix(FIELDS.values())
"""Their names in the environment and in YAML files, without `ACCELERATE_FP8_`."""


def fields_of(compute: Compute) -> dict[str, Field]:
    """Return the fields that a backend reads, by name. It may declare a field of this package by
    name only.

    Raises `FP8BackendError` if a third party declares anything else."""
    declared = [
        SETTINGS.get(entry) if isinstance(entry, str) else entry for entry in compute.fields
    ]
    for field, entry in zip(declared, compute.fields, strict=True):
        if not isinstance(field, Field):
            raise FP8BackendError(
                f"fields of {type(compute).__name__}: {shown(entry)} is neither a "
                "fp8_backends.compute.fields.Field nor the name of a field of this package"
            )
    return {field.name: field for field in declared}


def settings_of(compute: str) -> dict[str, Field]:
    """Return every field of a recipe with this backend: this package's fields, and the backend's in
    their place."""
    return SETTINGS if compute == AUTO else {**SETTINGS, **fields_of(registry.get_compute(compute))}


def registered_fields() -> dict[str, Field]:
    """Return the additional fields of registered backends. Loads these backends and skips one that
    does not load."""
    registered = [name for name in registry.valid_names() if name not in registry.BUILT_IN]
    return {
        name: field
        for backend in registered
        for name, field in _read_by(backend).items()
        if name not in FIELDS
    }


def _read_by(backend: str) -> dict[str, Field]:
    try:
        return fields_of(registry.get_compute(backend))
    except FP8BackendError:
        return {}


def find_variable(suffix: str) -> tuple[Field, Variable] | None:
    """Return the field and variable for a name in the environment or in a YAML file."""
    return VARIABLES.get(suffix) or _by_suffix(registered_fields().values()).get(suffix)


def variable_value(field: Field, variable: Variable, value: Any) -> Any:
    """Parse a value given under one of the field's names; None means "not given". Raises
    `RecipeError`."""
    if variable.reads is not None:
        value = parsed(variable.suffix.lower(), variable.reads, value)
    return None if value is None else field.parsed(_literal(value))


def _literal(value: Any, openings: tuple[str, ...] = _LISTS) -> Any:
    """Parse a list or dictionary that Accelerate's launcher exported as Python writes it; strip
    other text."""
    if isinstance(value, str):
        value = value.strip()
        if value.startswith(openings):
            # the last two: too deep
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                value = ast.literal_eval(value)
    return value


def readers(name: str) -> str:
    """List this package's backends that read a field, with their scaling rules."""
    texts = []
    for backend in registry.BUILT_IN:
        if field := _read_by(backend).get(name):
            supported = registry.get_compute(backend).scalings
            rules = [rule for rule in field.scalings or () if rule in supported]
            texts += [f"{backend}:{rule}" for rule in rules] or [backend]
    return ", ".join(texts) or "no backend"


def unknown_field(
    name: str, owner: str, names: Iterable[str], elsewhere: dict[str, list[str]]
) -> RecipeError:
    """Return the error for a field that `owner` does not have. `elsewhere`: the fields of the other
    handlers."""
    holders = [holder for holder, fields in elsewhere.items() if name in fields]
    if holders:
        return RecipeError(
            f"{name} is not a field of {owner} but of {' and '.join(holders)}; use that, or "
            "FP8RecipeKwargs(backend=...), which takes the fields of every backend"
        )
    names = sorted(names)
    return RecipeError(
        f"{shortened(name)} is not a field of {owner}{closest(name, names)}; it has "
        f"{', '.join(names)}"
    )


@functools.cache
def _docstrings() -> dict[str, str]:
    """Read the docstring under each field of this module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    except OSError:  # installed without its source
        return {}
    bodies = [cls.body for cls in tree.body if isinstance(cls, ast.ClassDef)]
    pairs = [pair for body in bodies for pair in zip(body, body[1:], strict=False)]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def help_of(field: Field) -> str:
    """Return the meaning of a field in a sentence."""
    return field.help or _docstrings().get(field.name, "")
