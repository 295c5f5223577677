"""Every field of a recipe: those that each recipe has, those of the levels, and those that backends declare."""

from __future__ import annotations

import ast
import contextlib
import os
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from ..compute import registry
from ..compute.fields import (
    DEFAULT_LEVEL,
    NATIVE_FIELDS,
    USE_MXFP8_BLOCK_SCALING,
    Field,
    Variable,
    closest,
    flag,
    one_of,
    same,
    whole_number,
    word,
)
from ..compute.interface import Compute
from ..compute.te import fields as te
from ..compute.torchao import fields as torchao
from ..errors import FP8BackendError, RecipeError
from ..words import shortened, shown

ABOVE_O0 = ("O1", "O2", "O3", "O4")
_LISTS = ("['", '["', "('", '("')
"""How a list begins in a text."""


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


NAMING = (
    Field(
        "backend",
        None,
        word,
        "COMPUTE[:SCALING][+msamp[:LEVEL]]: native:rowwise, ao, te+msamp:O3, msamp:O2, … (default: auto, which picks "
        "for this machine).",
    ),
    Field(
        "scaling",
        None,
        word,
        "The scaling rule, if the backend string does not name it: delayed, dynamic, rowwise, blockwise, mxfp8, window "
        "and so on.",
        synonyms={"fp8_recipe": same},
    ),
    Field(
        "opt_level",
        None,
        _level,
        "The level, O0 (no level) to O4, if the backend string does not name it.",
        launcher_default=DEFAULT_LEVEL,
        further_variables=(Variable("OPTIMIZATION_LEVEL", DEFAULT_LEVEL),),
    ),
    USE_MXFP8_BLOCK_SCALING,
)
"""Fields that take part in the backend's name."""

OF_LEVELS = (
    Field(
        "rounding",
        "stochastic",
        one_of("stochastic", "nearest"),
        "How stored weights and Adam states are rounded; nearest, MS-AMP's own, loses small updates.",
        levels=ABOVE_O0,
    ),
    Field(
        "exp_avg_scaling",
        "tensor",
        one_of("tensor", "block"),
        "One scale of the E4M3 exp_avg for the tensor, or one for each block of 128 elements, which keeps magnitudes "
        "apart that differ by more than 1e5 inside one tensor.",
        levels=("O2", "O3"),
    ),
    Field(
        "implementation",
        "native",
        one_of("native", "original"),
        "Of the levels: this package's own, or the package msamp where it is installed.",
        levels=ABOVE_O0,
    ),
    Field(
        "shard_states",
        True,
        flag,
        "Under DDP masters, residuals and Adam states lie on one rank each: 2 + 5/N bytes an element at O3, not 7, "
        "and 2 + 3/N at O4, not 5.",
        levels=("O3", "O4"),
    ),
    Field(
        "gradient_release",
        False,
        flag,
        "Each parameter is stepped inside backward, as soon as its gradient is complete, and the gradient is dropped: "
        "not with accumulation or clipping.",
        levels=ABOVE_O0,
        idle=False,
    ),
)
"""Fields that levels read, whatever the backend."""

MONITOR = (
    Field(
        "monitor_every",
        0,
        whole_number(0, 1_000_000),
        "Optimizer steps from one sample of the statistics of FP8 tensors to the next; 0: none are taken.",
        only_watches=True,
    ),
    Field(
        "monitor_layers",
        None,
        _patterns,
        "Name patterns of the FP8 layers whose statistics are taken, as for include, separated by commas (default: "
        "all).",
        only_watches=True,
    ),
    Field(
        "monitor_file",
        "fp8_monitor.jsonl",
        _path,
        "The file to which statistics are added, a line a sample.",
        only_watches=True,
    ),
)
"""Fields that `training.watching.monitor` reads."""

COMMON = (
    Field(
        "include",
        None,
        _patterns,
        "Name patterns of layers to convert (fnmatch, over the full name; without a dot also any one part of it), "
        "separated by commas.",
    ),
    Field(
        "also_include",
        None,
        _patterns,
        "Name patterns of layers to convert beside those that are converted by default, such as the output head "
        "(lm_head), separated by commas. Not with include or module_filter_func, which choose all layers.",
    ),
    Field("exclude", None, _patterns, "Name patterns of layers to keep in high precision, separated by commas."),
    Field(
        "module_filter_func",
        None,
        _function,
        "A function (module, name) -> whether to convert the module.",
        is_object=True,
    ),
    Field(
        "autocast_dtype",
        "bf16",
        one_of("bf16", "fp16", "fp32"),
        "What runs around FP8 under Accelerate (on a CPU without bf16 products the default is fp32).",
    ),
    Field(
        "gradient_comm",
        None,
        one_of("fp8", "plain"),
        "How gradients travel between ranks (default: fp8 at a level above O0, else plain).",
    ),
    Field(
        "activation_comm",
        "plain",
        one_of("plain", "fp8"),
        "How activations travel between ranks in forward: fp8 is E4M3 codes with their scales, of sequence-parallel "
        "activations that tensor parallelism gathers and of tokens that expert parallelism sends to their experts "
        "(native).",
    ),
    Field(
        "on_unproven",
        "raise",
        one_of("raise", "warn"),
        "What to do when no FP8 product ran in the first step.",
    ),
    Field(
        "saved_activations",
        "off",
        _saved_activations,
        "In what activations are kept for backward beside the codes of converted layers, such as those of norms and "
        "gates: fp8 keeps E4M3 codes, 33/32 bytes an element; fp8+attention those of attention, too.",
    ),
    *MONITOR,
    Field(
        "guard",
        "off",
        _guard_action,
        "What to do when a step goes wrong: warn; skip leaves the step out; stop raises an error.",
        only_watches=True,
    ),
    Field(
        "guard_every",
        100,
        whole_number(1, 1_000_000),
        "Steps from one comparison of the replicas of all ranks to the next, where guard is not off.",
        only_watches=True,
    ),
    Field(
        "guard_steps",
        50,
        whole_number(1, 1_000_000),
        "Steps that guard=skip leaves out in a row before it stops the training.",
        only_watches=True,
    ),
)
"""Fields that every recipe has, whatever the backend."""

OF_BACKENDS = {"te": te.FIELDS, "ao": torchao.FIELDS, "native": NATIVE_FIELDS}
"""What the backends of this package declare. Reading it loads none of them."""


def by_name(*groups: Iterable[Field]) -> dict[str, Field]:
    return {each.name: each for group in groups for each in group}


SETTINGS = by_name(*OF_BACKENDS.values(), OF_LEVELS, COMMON)
"""Every field of this package but backend, scaling and opt_level: what a recipe holds."""

FIELDS = by_name(NAMING, SETTINGS.values())
"""Every field of this package."""


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
    return by_name(declared)


def registered_fields() -> dict[str, Field]:
    """The further fields that registered backends declare. Loads these backends, and passes over one that cannot be
    loaded."""
    registered = [name for name in registry.valid_names() if name not in registry.BUILT_IN]
    declared = by_name(*(_declared_by(name).values() for name in registered))
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


def _list_of_text(value: Any) -> Any:
    """A list of a YAML file, which Accelerate's launcher exports as Python writes it; any other value as it is, text
    without the spaces around it."""
    if isinstance(value, str):
        value = value.strip()
        if value.startswith(_LISTS):
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: too deep
                value = ast.literal_eval(value)
    return value


def readers(name: str, backends: Iterable[str] = tuple(registry.BUILT_IN)) -> str:
    """Which of these backends read a field, with the scaling rules by which they do."""
    return _readers(name, {backend: _declared_by(backend) for backend in backends})


def _readers(name: str, declared: Mapping[str, Mapping[str, Field]]) -> str:
    found = [(backend, fields[name].scalings or ("",)) for backend, fields in declared.items() if name in fields]
    return ", ".join(f"{b}:{scaling}".rstrip(":") for b, scalings in found for scaling in scalings) or "no backend"


WITHDRAWN = {
    "optimizer_scales": "scales of weights and Adam states always follow from bounds (as 'bound' did); leave it out",
}
"""Fields of earlier versions, and the way on without them."""


def unknown_field(name: str, owner: str, own: Iterable[str], elsewhere: dict[str, list[str]]) -> RecipeError:
    """The error for a field that `owner` does not have. `elsewhere` has the fields of the other handlers."""
    if name in WITHDRAWN:
        return RecipeError(f"{name} is no longer a field: {WITHDRAWN[name]}")
    holders = [holder for holder, names in elsewhere.items() if name in names]
    if holders:
        return RecipeError(
            f"{name} is not a field of {owner} but of {' and '.join(holders)}; use that, or "
            "FP8RecipeKwargs(backend=…), which takes the fields of every backend"
        )
    known = sorted(own)
    return RecipeError(f"{shortened(name)} is not a field of {owner}{closest(name, known)}; it has {', '.join(known)}")


# Fields in words


def restructured_text() -> str:
    """Every field with its values, its default and the backends that read it, for the documentation."""
    declared = {backend: _declared_by(backend) for backend in registry.valid_names()}
    lines = []
    for field in (*FIELDS.values(), *registered_fields().values()):
        lines.append(f"``{field.name}``" + _in_brackets(field))
        text = f"{field.help} *Read by* {_readers_in_words(field, declared)}."
        lines += _indented(text.replace("_ ", "\\_ ").replace("**", "\\*\\*"), 4, 118)
    return "\n".join(lines) + "\n"


def docstring(fields: Iterable[Field]) -> str:
    """The same of these fields, as the arguments of a handler of this package. Loads no backend."""
    declared = {backend: by_name(OF_BACKENDS[backend]) for backend in registry.BUILT_IN}
    lines = ["Args:"]
    for field in fields:
        lines.append(f"    {field.name}{_in_brackets(field)}:")
        lines += _indented(f"{field.help} Read by {_readers_in_words(field, declared)}.", 8, 116)
    return "\n".join(lines)


def _in_brackets(field: Field) -> str:
    return f" ({field.values_and_default})" if field.values_and_default else ""


def _indented(text: str, columns: int, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * columns, subsequent_indent=" " * columns)


def _readers_in_words(field: Field, declared: Mapping[str, Mapping[str, Field]]) -> str:
    if field in NAMING or field in COMMON:
        return "every backend"
    if field in OF_LEVELS:
        return f"level{'s' * (len(field.levels) > 1)} {', '.join(field.levels)}"
    return _readers(field.name, declared)
