"""Every field of a recipe, each declared once: its values and defaults, who reads it, and its meaning as a docstring.

The handlers of `recipes.handlers` inherit their fields from here. Names and defaults are Accelerate's where its FP8
handlers have the field. None stands for "not given": a recipe fills the default in.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import nn

from ..compute import registry
from ..compute.fields import (
    DEFAULT_LEVEL,
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
from ..words import shortened, shown

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

MYPY = False
if MYPY:  # it finds no types in Accelerate, and a dataclass of an unknown base takes every argument

    class KwargsHandler:
        pass
else:
    from accelerate.utils import KwargsHandler

ABOVE_O0 = ("O1", "O2", "O3", "O4")
DELAYED = ("delayed",)
_LISTS = ("['", '["', "('", '("')
"""How a list begins in a text."""


# Parsers


def _patterns(value: str | Collection[str]) -> tuple[str, ...]:
    """Name patterns: one string (commas separate several) or a sequence of strings."""
    value = _list_of_text(value)
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    # a collection has an end, which an iterator may not have
    is_list = isinstance(value, Collection) and not isinstance(value, Mapping)
    if not is_list or not len(value) or not all(isinstance(name, str) and name for name in value):
        raise ValueError('must be name patterns, such as "model.layers.*.mlp.*" or ["q_proj", "k_proj"]')
    return tuple(value)


def _choice(value: str | Collection[str]) -> tuple[str, ...]:
    """Name patterns, with `+` before all of them or before none."""
    patterns = _patterns(value)
    added = [pattern.startswith("+") for pattern in patterns]
    if any(added) and not all(added) or "+" in patterns:
        raise ValueError(
            "must have + before each pattern, which adds to the layers converted by default, or before none, which "
            "names all layers"
        )
    return patterns


def _function(value: Any) -> Callable[[nn.Module, str], bool]:
    if not callable(value):
        raise ValueError("must be a function of (module, name) that returns whether to convert the module")
    return value


def _path(value: Any) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    path = path.strip() if isinstance(path, str) else ""
    if not path or not path.isprintable() or path.startswith(_LISTS):
        raise ValueError("must be the path of a file")
    return path


def _level(value: Any) -> str:
    return word(value).upper()


GUARD_ACTIONS = one_of("off", "warn", "skip", "stop")


def _guard_action(value: Any) -> str:
    try:  # YAML reads a bare `off` as False, and Accelerate's launcher exports that
        is_on = flag(value)
    except ValueError:
        return GUARD_ACTIONS(value)
    if is_on:
        raise ValueError(f"must say what is to be done: one of {GUARD_ACTIONS.values}")
    return "off"


_guard_action.values = GUARD_ACTIONS.values

SAVED_ACTIVATIONS = ("off", "fp8", "fp8+attention")
"""What activations are kept in for backward."""


def _saved_activations(value: Any) -> str:
    is_off = value is False or (isinstance(value, str) and value.strip().lower() in ("", "none", "false"))
    return "off" if is_off else one_of(*SAVED_ACTIVATIONS)(value)


_saved_activations.values = ", ".join(SAVED_ACTIVATIONS)


def mxfp8_scaling(value: Any) -> str | None:
    """Read `use_mxfp8_block_scaling` as a scaling rule; False asks for none."""
    return "mxfp8" if flag(value) else None


# The fields


def setting(default: Any, parse: Callable[[Any], Any], **declared: Any) -> Any:
    """Declare a field of a handler. `declared`: further attributes of `Field`."""
    return dataclasses.field(default=None, metadata={"default": default, "parse": parse, **declared})


@dataclass(eq=False, repr=False, kw_only=True)
class CommonFields(KwargsHandler):
    """Fields that every backend reads."""

    include: str | Collection[str] | None = setting(None, _choice)
    """Name patterns of layers to convert (fnmatch, over the full name; without a dot also any one part of it),
    separated by commas. With + before each they add to the layers converted by default: +lm_head."""
    exclude: str | Collection[str] | None = setting(None, _patterns)
    """Name patterns of layers to keep in high precision, separated by commas."""
    module_filter_func: Callable[[nn.Module, str], bool] | None = setting(None, _function, is_object=True)
    """A function (module, name) -> whether to convert the module."""
    autocast_dtype: str = setting("bf16", one_of("bf16", "fp16", "fp32"))
    """What runs around FP8 under Accelerate (on a CPU without bf16 products the default is fp32)."""
    gradient_comm: str | None = setting(None, one_of("fp8", "plain"))
    """How gradients travel between ranks (default: fp8 at a level above O0, else plain)."""
    activation_comm: str = setting("plain", one_of("plain", "fp8"))
    """How activations travel between ranks in forward: fp8 is E4M3 codes with their scales, of sequence-parallel
    activations that tensor parallelism gathers and of tokens that expert parallelism sends to their experts
    (native)."""
    on_unproven: str = setting("raise", one_of("raise", "warn"))
    """What to do when no FP8 product ran in the first step."""
    saved_activations: str = setting("off", _saved_activations)
    """In what activations are kept for backward beside the codes of converted layers, such as those of norms and
    gates: fp8 keeps E4M3 codes, 33/32 bytes an element; fp8+attention those of attention, too."""
    monitor_every: int = setting(0, whole_number(0, 1_000_000), only_watches=True)
    """Optimizer steps from one sample of the statistics of FP8 tensors to the next; 0: none are taken."""
    monitor_file: str | os.PathLike[str] = setting("fp8_monitor.jsonl", _path, only_watches=True)
    """The file to which statistics are added, a line a sample."""
    guard: str = setting("off", _guard_action, only_watches=True)
    """What to do when a step goes wrong: warn; skip leaves the step out; stop raises an error."""


@dataclass(eq=False, repr=False, kw_only=True)
class ScalingField(KwargsHandler):
    """The scaling rule, for handlers of a backend that has several."""

    scaling: str | None = setting(
        None,
        word,
        synonyms={"fp8_recipe": same},
        further_variables=(Variable("USE_MXFP8_BLOCK_SCALING", launcher_default=False, reads=mxfp8_scaling),),
    )
    """The scaling rule, if the backend string does not name it: delayed, dynamic, rowwise, blockwise, mxfp8, window
    and so on."""


@dataclass(eq=False, repr=False, kw_only=True)
class HeadField(KwargsHandler):
    """The output head together with its loss."""

    fused_head: bool = setting(False, flag, idle=False)
    """The output head and its loss are computed in chunks of tokens, and logits are never whole. The head stays in high
    precision unless include names it (native)."""


@dataclass(eq=False, repr=False)
class RuleFields(KwargsHandler):
    """TransformerEngine's rules, which `native` follows on any device. In the order of Accelerate's handler."""

    use_autocast_during_eval: bool = setting(False, flag, launcher_default=False)
    """FP8 products in evaluation too; by default evaluation runs in high precision."""
    margin: int = setting(
        0,
        whole_number(-64, 64),  # beyond it every code is zero, or saturated
        scalings=DELAYED,
        launcher_default=0,
        synonyms={"fp8_margin": same},
    )
    """The scale is divided by 2**margin."""
    interval: int = setting(
        1, whole_number(1, 1_000_000), scalings=DELAYED, launcher_default=1, synonyms={"fp8_interval": same}
    )
    """Steps between two computations of the scale (te takes 1 alone)."""
    fp8_format: str | Enum = setting(
        "HYBRID",
        fp8_format,
        # scales this fine leave a gradient little need of E5M2's range; TransformerEngine and TorchAO agree
        default_of_scaling={"rowwise": "E4M3", "blockwise": "E4M3", "mxfp8": "E4M3"},
        launcher_default="HYBRID",
        # where a value that equals the launcher's default is meant, and would count as not given
        further_variables=(Variable("NUMBER_FORMAT"),),
        synonyms={"fp8": same},
    )
    """HYBRID is E4M3 forward and E5M2 for gradients; E4M3 is E4M3 everywhere."""
    amax_history_len: int = setting(
        1024,
        whole_number(1, 1_000_000),  # of FP32 numbers, three times for each layer
        scalings=DELAYED,
        launcher_default=1024,
        further_variables=(Variable("AMAX_HISTORY_LENGTH", 1024),),
        synonyms={"fp8_amax_history_len": same},
    )
    """Steps that the amax history holds."""
    amax_compute_algo: str = setting(
        "most_recent",
        amax_algorithm,
        scalings=DELAYED,
        launcher_default="most_recent",
        further_variables=(Variable("AMAX_COMPUTE_ALGORITHM", "most_recent", question_default="max"),),
        synonyms={"fp8_amax_compute_algo": same},
    )
    """The scale follows the most recent amax, or the largest of the history."""
    override_linear_precision: tuple[bool, bool, bool] = setting(
        (False, False, False),
        three_flags,
        launcher_default=(False, False, False),
        synonyms={
            "fp8_wgrad": lambda value: (False, False, not flag(value)),
            "no_fp8_wgrad": lambda value: (False, False, flag(value)),
        },
    )
    """Which of fprop, dgrad and wgrad stay in high precision (te takes wgrad alone)."""
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
    """Weights that do not train are stored in FP8, about 1 byte an element. Not with a level, which stores weights
    itself."""


@dataclass(eq=False, repr=False)
class ConfigFields(KwargsHandler):
    """TorchAO's own configuration. In the order of Accelerate's handler."""

    config: Float8LinearConfig | None = setting(None, float8_config, names_scaling=scaling_of, is_object=True)
    """A torchao.float8.Float8LinearConfig, used as it is."""
    pad_inner_dim: bool | None = setting(None, flag, launcher_default=True)
    """Pad products whose inner dimension is no multiple of 16 (on unless it is turned off)."""


@dataclass(eq=False, repr=False)
class GatherField(KwargsHandler):
    """Gathers of FSDP2."""

    enable_fsdp_float8_all_gather: bool | None = setting(
        None,
        flag,
        scalings=("tensorwise",),
        idle=False,
        launcher_default=True,
        # where a value that equals the launcher's default is meant, and would count as not given
        further_variables=(Variable("ALL_GATHER"),),
    )
    """FSDP2 gathers weights in FP8, 1 byte an element, or as they are stored (default: in FP8 at a level above O0 with
    codes that serve both products, not rowwise or mxfp8, else as they are stored)."""


@dataclass(eq=False, repr=False)
class LevelFields(KwargsHandler):
    """Fields that levels read, whatever the backend."""

    opt_level: str | None = setting(
        None,
        _level,
        launcher_default=DEFAULT_LEVEL,
        further_variables=(Variable("OPTIMIZATION_LEVEL", DEFAULT_LEVEL),),
    )
    """The level, O0 (no level) to O4, if the backend string does not name it."""
    rounding: str = setting("stochastic", one_of("stochastic", "nearest"), levels=ABOVE_O0)
    """How stored weights and Adam states are rounded; nearest, MS-AMP's own, loses small updates."""
    implementation: str = setting("native", one_of("native", "original"), levels=ABOVE_O0)
    """Of the levels: this package's own, or the package msamp where it is installed."""
    shard_states: bool = setting(True, flag, levels=("O3", "O4"))
    """Under DDP masters, residuals and Adam states lie on one rank each: 2 + 5/N bytes an element at O3, not 7, and
    2 + 3/N at O4, not 5."""
    gradient_release: bool = setting(False, flag, levels=ABOVE_O0, idle=False)
    """Each parameter is stepped inside backward, as soon as its gradient is complete, and the gradient is dropped: not
    with accumulation or clipping."""


@dataclass(eq=False, repr=False)
class BackendField(KwargsHandler):
    """The backend, for the handler of any backend."""

    backend: str | None = setting(None, word)
    """COMPUTE[:SCALING][+msamp[:LEVEL]]: native:rowwise, ao, te+msamp:O3, msamp:O2, … (default: auto, which picks for
    this machine)."""


def _declared(*holders: type) -> dict[str, Field]:
    """Collect the fields of these dataclasses by name."""
    return {each.name: Field(each.name, **each.metadata) for cls in holders for each in dataclasses.fields(cls)}


COMMON = _declared(CommonFields)
OF_LEVELS = {name: each for name, each in _declared(LevelFields).items() if name != "opt_level"}
FIELDS = _declared(
    BackendField, ScalingField, LevelFields, RuleFields, ConfigFields, GatherField, HeadField, CommonFields
)
"""Every field of this package."""
NAMING = ("backend", "scaling", "opt_level")
"""Fields that make the backend's name."""
SETTINGS = {name: each for name, each in FIELDS.items() if name not in NAMING}
"""Every other field."""

REMOVED = {
    "also_include": "put + before the patterns of include: include=['+lm_head']",
    "auto_filter": "use module_filter_func=torchao.float8._auto_filter_for_recipe(RULE, [])",
    "exp_avg_scaling": "one scale for a tensor at O2 and O3, one for a block at O4",
    "fp8_group": "all ranks share their amaxes; te:dynamic needs none of other ranks",
    "fuse_activations": "torch.compile fuses them",
    "fuse_norms": "norms run as TransformerEngine's own, before the layers that read them",
    "guard_every": "replicas are compared every 100 steps",
    "guard_steps": "guard=skip stops the training after 50 steps in a row",
    "monitor_layers": "every FP8 layer is sampled",
    "optimizer_scales": "scales follow from bounds, as by default",
    "weight_comm": "use enable_fsdp_float8_all_gather=True or False",
}
"""Fields of earlier versions, each with the way on."""


def removed_field(name: str) -> RecipeError | None:
    """Return the error for a field of an earlier version."""
    return RecipeError(f"{name} is no field any more: {REMOVED[name]}") if name in REMOVED else None


def _variables(fields: Iterable[Field]) -> dict[str, tuple[Field, Variable]]:
    return {variable.suffix: (field, variable) for field in fields for variable in field.variables}


VARIABLES = _variables(FIELDS.values())
"""Their names in the environment and in YAML files, without `ACCELERATE_FP8_`."""


def fields_of(compute: Compute) -> dict[str, Field]:
    """The fields that a backend declares, by name. It declares a field of this package by that field's name.

    Raises `FP8BackendError` for a third party's declaration that is neither a field nor such a name."""
    declared = [SETTINGS.get(each) if isinstance(each, str) else each for each in compute.fields]
    for each, written in zip(declared, compute.fields, strict=True):
        if not isinstance(each, Field):
            raise FP8BackendError(
                f"fields of {type(compute).__name__}: {shown(written)} is neither a fp8_backends.compute.fields.Field "
                "nor the name of a field of this package"
            )
    return {each.name: each for each in declared}


def registered_fields() -> dict[str, Field]:
    """The further fields that registered backends declare. Loads these backends, and passes over one that cannot be
    loaded."""
    registered = [name for name in registry.valid_names() if name not in registry.BUILT_IN]
    declared = {name: field for backend in registered for name, field in _declared_by(backend).items()}
    return {name: field for name, field in declared.items() if name not in FIELDS}


def _declared_by(name: str) -> dict[str, Field]:
    try:
        return fields_of(registry.get_compute(name))
    except FP8BackendError:
        return {}


def find_variable(suffix: str) -> tuple[Field, Variable] | None:
    """The field that a name in the environment or in a YAML file stands for, with what is known of the name."""
    return VARIABLES.get(suffix) or _variables(registered_fields().values()).get(suffix)


def field_value(field: Field, value: Any) -> Any:
    """A value that was given as text or by a file, in its one spelling. Raises `RecipeError`."""
    return field.parsed(_list_of_text(value))


def variable_value(field: Field, variable: Variable, value: Any) -> Any:
    """The same under one of the field's names, or None where the value asks for nothing."""
    if variable.reads is None:
        return field_value(field, value)
    return parsed(variable.suffix.lower(), variable.reads, value)


def _list_of_text(value: Any) -> Any:
    """A list of a YAML file, which Accelerate's launcher exports as Python writes it; any other value as it is, text
    without the spaces around it."""
    if isinstance(value, str):
        value = value.strip()
        if value.startswith(_LISTS):
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: too deep
                value = ast.literal_eval(value)
    return value


def readers(name: str) -> str:
    """Which backends of this package read a field, with the scaling rules by which they do."""
    return _readers(name, {backend: _declared_by(backend) for backend in registry.BUILT_IN})


def _readers(name: str, declared: Mapping[str, Mapping[str, Field]]) -> str:
    found = []
    for backend, fields in declared.items():
        if name in fields:
            supported = registry.get_compute(backend).scalings
            rules = [rule for rule in fields[name].scalings or () if rule in supported]
            found += [f"{backend}:{rule}" for rule in rules] or [backend]
    return ", ".join(found) or "no backend"


def unknown_field(name: str, owner: str, own: Iterable[str], elsewhere: dict[str, list[str]]) -> RecipeError:
    """The error for a field that `owner` does not have. `elsewhere` has the fields of the other handlers."""
    if error := removed_field(name):
        return error
    holders = [holder for holder, names in elsewhere.items() if name in names]
    if holders:
        return RecipeError(
            f"{name} is not a field of {owner} but of {' and '.join(holders)}; use that, or "
            "FP8RecipeKwargs(backend=…), which takes the fields of every backend"
        )
    known = sorted(own)
    return RecipeError(f"{shortened(name)} is not a field of {owner}{closest(name, known)}; it has {', '.join(known)}")


# Fields in words


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
    """Return the sentence that says what a field means."""
    return field.help or _docstrings().get(field.name, "")


def restructured_text() -> str:
    """Every field with its values, its default and the backends that read it, for the documentation."""
    declared = {backend: _declared_by(backend) for backend in registry.valid_names()}
    lines = []
    for field in (*FIELDS.values(), *registered_fields().values()):
        lines.append(f"``{field.name}``" + (f" ({field.values_and_default})" if field.values_and_default else ""))
        text = f"{help_of(field)} *Read by* {_readers_in_words(field, declared)}."
        text = text.replace("_ ", "\\_ ").replace("**", "\\*\\*")
        lines += textwrap.wrap(text, 118, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _readers_in_words(field: Field, declared: Mapping[str, Mapping[str, Field]]) -> str:
    if field.name in NAMING or field.name in COMMON:
        return "every backend"
    if field.name in OF_LEVELS:
        return f"level{'s' * (len(field.levels) > 1)} {', '.join(field.levels)}"
    return _readers(field.name, declared)
