"""What the user asks for: a backend string or a recipe object, and `resolve`, which understands both.

    COMPUTE[:SCALING][+msamp[:LEVEL]]        msamp[:LEVEL]        auto

A recipe checks itself when it is made: a field that its backend or scaling rule does not read is an error, never
dropped. Whether the backend can run on this machine is asked where it is about to run: by the launcher, `Accelerator`
and `prepare`.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, ClassVar

from accelerate.utils import KwargsHandler

from ..announcement import announce
from ..compute import hardware, registry
from ..compute.fields import DEFAULT_LEVEL, Field
from ..compute.interface import Compute
from ..errors import RecipeError
from ..words import shortened, shown
from .fields import (
    COMMON,
    FIELDS,
    NAMING,
    OF_BACKENDS,
    OF_LEVELS,
    SETTINGS,
    docstring,
    fields_of,
    readers,
    unknown_field,
)
from .sources import environment_fields, environment_name, foreign_fields, is_launched, own_names
from .specs import Spec
from .strings import AUTO, MSAMP, BackendName, canonical_name, level_name, parse_backend, scaling_name

logger = logging.getLogger("fp8_backends")

# Recipes


def _explains_names(cls: type) -> type:
    """Let the `__init__` of a dataclass understand NeMo's names, take the fields of a registered backend, and explain
    an unknown field."""
    generated = cls.__init__

    @functools.wraps(generated)
    def __init__(self, /, *args, **kwargs):
        own = _field_names(type(self))
        kwargs, renamed = own_names(kwargs)
        if renamed and not args and "backend" in own:
            kwargs.setdefault("backend", "te")
        beyond = [name for name in kwargs if name not in own]
        if beyond and "backend" in own:
            declared = _fields_by_string(kwargs.get("backend", args[0] if args else None))
            self.__dict__["further_fields"] = {name: kwargs.pop(name) for name in beyond if name in declared}
            beyond = [name for name in beyond if name not in declared]
        if beyond:
            by_handler = {cls.__name__: _field_names(cls) for cls in HANDLERS}
            raise unknown_field(beyond[0], type(self).__name__, own, by_handler)
        generated(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


def _fields_by_string(backend: Any) -> dict[str, Field]:
    """The fields that the backend of this string declares; none for a string that names no backend."""
    try:
        compute = parse_backend(backend).compute if isinstance(backend, str) else AUTO
    except RecipeError:
        return {}
    return {} if compute == AUTO else fields_of(registry.get_compute(compute))


class Recipe(KwargsHandler):
    """What every recipe has. None stands for "not given"; a recipe that was made has every default filled in.

    A recipe is fixed once it is made. Two are equal when they mean the same, however they were written. Beside its
    fields it has `compute` ("native", "te", "ao", or a registered name), `scaling`, `level` ("O0" to "O4"), `name`
    (the canonical backend string), `given` (the names of what the user gave) and the fields of every other backend,
    at their defaults. A process group in it is described by its ranks.
    """

    backend_name: ClassVar[str] = AUTO
    further_fields: ClassVar[Mapping[str, Any]] = {}
    """What was given of the fields that a registered backend declares."""

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)} | dict(self.further_fields)
        given = {name: value for name, value in given.items() if value is not None}
        _check_layer_choice(given)
        self.__dict__.update(_settled(type(self), given))
        if self.compute != AUTO:
            _check(self)

    @property
    def name(self) -> str:
        """The canonical backend string; `auto` until `resolve` has picked one."""
        if self.compute == AUTO:
            return AUTO
        names_level = self.level != "O0" or "level" in self.given
        return canonical_name(self.compute, self.scaling, self.level if names_level else None)

    @property
    def comm(self) -> str:
        """How gradients travel between ranks, "fp8" or "plain": `gradient_comm`, by default as the level has it."""
        return self.gradient_comm or ("plain" if self.level == "O0" else "fp8")

    @property
    def shares_states(self) -> bool:
        """Whether under DDP the optimizer's states of each weight, and its master or residual, lie on one rank."""
        return self.shard_states and self.level in FIELDS["shard_states"].levels

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that were given: `type(recipe)(**recipe.to_kwargs()) == recipe`."""
        names = (*_field_names(type(self)), *self.further_fields)
        return {name: getattr(self, name) for name in names if name in self.given}

    def to_dict(self) -> dict[str, Any]:
        """Every field with its value."""
        return {"name": self.name} | copy.deepcopy(self.described)

    def __setattr__(self, name: str, value: Any) -> None:
        if "given" in self.__dict__:
            raise RecipeError(
                f"{name}: a recipe is fixed once it is made; make another: "
                f"{type(self).__name__}(**{{**recipe.to_kwargs(), {name!r}: …}})"
            )
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recipe):
            return NotImplemented
        return self.name == other.name and self.described == other.described

    def __hash__(self) -> int:
        return hash(self.name)

    def __copy__(self) -> Recipe:
        return _with_attributes(type(self), dict(self.__dict__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        for each in settings_of(self.compute).values():
            if each.pack(value := getattr(self, each.name)) is not value or callable(value):
                memo[id(value)] = value  # a thing that a process has once, or code
        return _with_attributes(type(self), copy.deepcopy(self.__dict__, memo))

    def __reduce__(self) -> tuple:
        packed = {each.name: each.pack(getattr(self, each.name)) for each in settings_of(self.compute).values()}
        return _with_attributes, (type(self), {**self.__dict__, **packed})

    def __repr__(self) -> str:
        given = [f"{name}={self.described[name]!r}" for name in self.to_kwargs() if name in self.described]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"


def _handler(name: str, backend: str, summary: str, declared: tuple[Field, ...]) -> type[Recipe]:
    """The handler of a backend, with the fields that it declares."""
    doc = f"{summary}\n\n{docstring((*declared, *COMMON))}\n\n{_RAISES}"
    namespace = {"backend_name": backend, "__module__": __name__, "__doc__": doc}
    columns = [(each.name, Any, field(default=None)) for each in declared]
    columns += [(each.name, Any, field(default=None, kw_only=True)) for each in COMMON]
    return _explains_names(make_dataclass(name, columns, bases=(Recipe,), namespace=namespace, eq=False, repr=False))


_RAISES = """Raises:
    RecipeError: a value that its field does not take, or fields that do not go together.
"""


def _named(*names: str) -> tuple[Field, ...]:
    return tuple(FIELDS[name] for name in names)


TERecipeKwargs = _handler(
    "TERecipeKwargs",
    "te",
    "TransformerEngine's products: `te:delayed`, or the scaling named. The fields of Accelerate's handler.",
    (*OF_BACKENDS["te"], *_named("scaling")),
)
AORecipeKwargs = _handler(
    "AORecipeKwargs",
    "ao",
    "TorchAO's products: `ao:tensorwise`, or the scaling named. The fields of Accelerate's handler.",
    _named("config", "pad_inner_dim", "enable_fsdp_float8_all_gather", "scaling", "auto_filter", "fused_head"),
)
MSAMPRecipeKwargs = _handler(
    "MSAMPRecipeKwargs",
    "msamp",
    "MS-AMP's levels on native products: `msamp:LEVEL`.",
    (*_named("opt_level"), *OF_LEVELS),
)
NativeRecipeKwargs = _handler(
    "NativeRecipeKwargs",
    "native",
    "This package's own products: `native:dynamic`, or the scaling named.",
    (*_named("scaling"), *OF_BACKENDS["native"]),
)
FP8RecipeKwargs = _handler(
    "FP8RecipeKwargs",
    AUTO,
    "Any backend by its string, with the fields that this backend reads, also those of a registered backend.",
    (
        *_named("backend", "opt_level"),
        *OF_LEVELS,
        *_named("scaling"),
        *(each for name, each in SETTINGS.items() if each not in (*OF_LEVELS, *COMMON)),
    ),
)

HANDLERS = (TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs, NativeRecipeKwargs)


def _with_attributes(cls: type[Recipe], attributes: dict[str, Any]) -> Recipe:
    """A recipe with the attributes that `_settled` gave another one."""
    recipe = cls.__new__(cls)
    unpacked = {each.name: each.unpack(attributes[each.name]) for each in settings_of(attributes["compute"]).values()}
    recipe.__dict__.update({**attributes, **unpacked})
    return recipe


def settings_of(compute: str) -> dict[str, Field]:
    """Every field that a recipe of this backend holds: those of this package, and its own in their place."""
    return SETTINGS if compute == AUTO else {**SETTINGS, **fields_of(registry.get_compute(compute))}


def _field_names(cls: type) -> list[str]:
    return [f.name for f in fields(cls)]


# From what was given to what it means


def _settled(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """Every attribute of a recipe, from the fields that were given. Raises `RecipeError`."""
    asked = _asked_backend(cls, given)
    compute, level = asked.compute, asked.level or "O0"
    settings = settings_of(compute)
    values = {name: settings[name].parsed(value) for name, value in given.items() if name in settings}
    scaling = asked.scaling or (None if compute == AUTO else _default_scaling(compute, level, values))
    settled = {name: each.default_for(scaling) for name, each in settings.items()} | values
    settled["use_mxfp8_block_scaling"] = scaling == "mxfp8"
    named = {name for name in ("scaling", "level") if getattr(asked, name) is not None}
    return settled | {
        "described": {name: settings[name].describe(value) for name, value in settled.items()},
        "backend": given.get("backend"),
        "compute": compute,
        "scaling": scaling,
        "level": level,
        "opt_level": level,
        "given": frozenset(given) | named,
    }


def _default_scaling(compute: str, level: str, values: Mapping[str, Any]) -> str:
    """The scaling rule that a field stands for, else the backend's default."""
    backend = registry.get_compute(compute)
    for name, each in fields_of(backend).items():
        if name in values and each.names_scaling and (scaling := each.names_scaling(values[name])):
            return scaling
    return backend.level_scaling if level != "O0" and backend.level_scaling else backend.default_scaling


def _asked_backend(cls: type, given: dict[str, Any]) -> BackendName:
    """The backend that string and fields name together, in that backend's own words. They may not disagree."""
    text = given.get("backend", cls.backend_name)
    if not isinstance(text, str):
        raise RecipeError(f"backend={shown(text)}: a backend string is wanted, such as 'native:delayed'")
    compute, scaling, level = parse_backend(text)
    if "scaling" in given:
        word = given["scaling"]
        scaling = _agreed(text, scaling, "scaling", scaling_name(compute, word, f"scaling={shown(word)}"))
    name = "use_mxfp8_block_scaling"
    if name in given and FIELDS[name].parsed(given[name]):
        scaling = _agreed(text, scaling, name, scaling_name(compute, "mxfp8", name))
    elif name in given and scaling == "mxfp8":
        raise RecipeError(f"{shown(text)} with scaling mxfp8 and use_mxfp8_block_scaling=False disagree: leave one out")
    if "opt_level" in given:
        word = given["opt_level"]
        level = _agreed(text, level or None, "opt_level", level_name(word, f"opt_level={shown(word)}"))
    return BackendName(compute, scaling, DEFAULT_LEVEL if level == "" else level)


def _agreed(text: str, part: str | None, name: str, value: str) -> str:
    if part is not None and part != value:
        raise RecipeError(f"{shown(text)} says {part} and {name} says {value}: leave one of the two out")
    return value


def _check_layer_choice(given: Mapping[str, Any]) -> None:
    """Refuse an addition to the default choice of layers where another choice takes its place."""
    chosen_by = [name for name in ("include", "module_filter_func") if name in given]
    if "also_include" in given and chosen_by:
        raise RecipeError(
            f"also_include adds layers to those that are converted by default, and {' and '.join(chosen_by)} "
            f"chooses all layers: leave one of the two out, or let {chosen_by[0]} name these layers, too"
        )


def _check(recipe: Recipe) -> None:
    """Refuse what this backend, scaling and level cannot honour on any machine."""
    compute = registry.get_compute(recipe.compute)
    levels = registry.levels_of(recipe.compute)
    if recipe.level not in levels:
        others = ", ".join(name for name in registry.BUILT_IN if len(registry.levels_of(name)) > 1)
        raise RecipeError(
            f"{recipe.name}: {recipe.compute} goes with {', '.join(levels)} only, its weights stay as they are; "
            f"backends that go with msamp: {others}"
        )
    declared = fields_of(compute)
    for name, each in sorted(settings_of(recipe.compute).items()):
        if name in recipe.given and each not in COMMON and each not in NAMING:
            _check_read(each, recipe, compute, declared)
    if recipe.monitor_every and not compute.casts_by:
        raise RecipeError(f"monitor_every: {recipe.compute} cannot tell how its layers cast; leave it out")
    compute.check(recipe)


def _check_read(field: Field, recipe: Recipe, compute: Compute, declared: Mapping[str, Field]) -> None:
    """Refuse a field that this backend, scaling and level do not read."""
    name = field.name
    if field.idle is not None and getattr(recipe, name) == field.idle:
        return
    if recipe.level not in field.levels:
        level = DEFAULT_LEVEL if DEFAULT_LEVEL in field.levels else field.levels[0]
        raise RecipeError(
            f"{name} is not read by {recipe.name}, only with {_LEVELS_IN_WORDS[field.levels]}: leave it out, or use "
            f"{recipe.compute if level == 'O0' else f'{recipe.compute}+msamp:{level}'}"
        )
    if field in OF_LEVELS:
        return
    if name not in declared:
        raise RecipeError(f"{name} is not read by {recipe.name}, only by {readers(name)}: leave it out, or use these")
    if field.scalings and recipe.scaling not in field.scalings and set(field.scalings) & set(compute.scalings):
        raise RecipeError(
            f"{name} is not read by {recipe.name}, only by "
            f"{', '.join(f'{recipe.compute}:{scaling}' for scaling in field.scalings)}: leave it out, or use that"
        )


_LEVELS_IN_WORDS = {
    ("O1", "O2", "O3", "O4"): "a level O1 to O4",
    ("O2", "O3"): "a level O2 or O3, whose exp_avg may have one scale or blocks",
    ("O3", "O4"): "a level O3 or O4, whose weights travel in FP8",
    ("O0",): "weights that no level stores",
}


# What users call


def resolve(spec: Spec = None) -> Recipe:
    """The recipe that `spec` means, with every default filled in.

    Args:
        spec: a backend string, a recipe of this package, a recipe handler of Accelerate, a dict
            `{"backend": …, field: value}`, a recipe object of TransformerEngine; None or "auto" picks for this machine.

    Raises:
        RecipeError: unknown strings, fields and combinations, each with what is valid. A valid name never fails here
            for want of hardware or libraries: that is for `prepare` to say.
    """
    recipe = _as_recipe(spec)
    if recipe.compute != AUTO:
        return recipe
    chosen, reason = chosen_by_auto(recipe)
    if hardware.fp8_products():
        announce(f"backend auto: {chosen.name} ({reason})")
    else:
        logger.warning("backend auto: this machine has no FP8 hardware, so FP8 trains slower than bf16 here")
    return chosen


def chosen_by_auto(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe that an `auto` recipe means on this machine, and why. Raises `RecipeError` where no backend that auto
    may choose honours its fields."""

    def of(backend: str) -> FP8RecipeKwargs:
        return FP8RecipeKwargs(**{**recipe.to_kwargs(), "backend": backend})

    def fits(backend: str) -> bool:
        try:
            of(backend)
        except RecipeError:
            return False
        return True

    backend, reason = registry.auto_choice(fits)
    return of(backend), reason


def from_environment(environ: Mapping[str, str] | None = None) -> Recipe | None:
    """What `FP8_BACKENDS_RECIPE` (from `fp8-backends launch`), else `ACCELERATE_FP8_*` (any case) asks for, or None.

    A value of `ACCELERATE_FP8_*` that equals the default of Accelerate's launcher counts as not given. Without
    `ACCELERATE_FP8_BACKEND`, other values belong to the backend that `auto` picks.
    """
    try:
        asked = environment_fields(environ)
        if not is_launched(environ):
            _check_level_has_backend(asked, asked.get("backend", AUTO))
        return FP8RecipeKwargs(**asked) if asked else None
    except RecipeError as error:
        raise RecipeError(f"{environment_name(environ)} in the environment: {error}") from None


def with_environment(recipe: Recipe, environ: Mapping[str, str] | None = None) -> Recipe:
    """The recipe, completed by the fields that `ACCELERATE_FP8_*` gives, as Accelerate completes its own handlers.

    The backend's name is left to the recipe. A field for which both say something different is a `RecipeError`.
    """
    try:
        asked = environment_fields(environ)
        asked.pop("backend", None)
        _check_level_has_backend(asked, recipe.name)
        for name, value in asked.items():
            value = scaling_name(recipe.compute, value, f"scaling={shown(value)}") if name == "scaling" else value
            if name in recipe.given and getattr(recipe, name) != value:
                raise RecipeError(
                    f"{name} is {shown(value)} there and {shown(getattr(recipe, name))} in {recipe}: remove one"
                )
        return type(recipe)(**{**recipe.to_kwargs(), **asked}) if asked else recipe
    except RecipeError as error:
        raise RecipeError(f"ACCELERATE_FP8_* in the environment: {error}") from None


def _check_level_has_backend(asked: dict[str, Any], backend: str) -> None:
    if "opt_level" in asked and not any(word in backend.lower() for word in MSAMP):
        level = shortened(asked["opt_level"])
        raise RecipeError(
            f"OPT_LEVEL={level} selects no level by itself: say ACCELERATE_FP8_BACKEND=msamp:{level} "
            f"or COMPUTE+msamp:{level}, or leave it out"
        )


def _as_recipe(spec: Any) -> Recipe:
    if isinstance(spec, Recipe):
        return spec
    if spec is None or isinstance(spec, str):
        return FP8RecipeKwargs(backend=spec)
    if isinstance(spec, Mapping):
        return FP8RecipeKwargs(**{str(name): value for name, value in spec.items()})
    fields_of_spec = foreign_fields(spec)
    if fields_of_spec is None:
        raise RecipeError(
            f"a recipe cannot be read from {type(spec).__name__}: pass a backend string, a recipe handler of "
            "fp8_backends or Accelerate, a dict, or a recipe of TransformerEngine"
        )
    return FP8RecipeKwargs(**fields_of_spec)
