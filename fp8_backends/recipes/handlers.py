"""What the user asks for: a backend string or a recipe object, and `resolve`, which understands both.

    COMPUTE[:SCALING][+msamp[:LEVEL]]        msamp[:LEVEL]        auto

A recipe checks itself when it is made: a field that its backend or scaling rule does not read is an error, never
dropped. Whether the backend can run on this machine is asked where it is about to run: by the launcher, `Accelerator`
and `prepare`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..announcement import announce
from ..compute import hardware, registry
from ..compute.fields import DEFAULT_LEVEL, Field, parsed
from ..compute.interface import Compute
from ..errors import RecipeError
from ..words import shortened, shown
from .fields import (
    COMMON,
    FIELDS,
    NAMING,
    OF_LEVELS,
    SETTINGS,
    BackendField,
    CommonFields,
    ConfigFields,
    GatherField,
    HeadField,
    LevelFields,
    RuleFields,
    ScalingField,
    fields_of,
    mxfp8_scaling,
    readers,
    unknown_field,
)
from .sources import environment_fields, environment_name, foreign_fields, is_launched, own_names
from .specs import Spec
from .strings import (
    AUTO,
    MSAMP,
    BackendName,
    canonical_name,
    known_scaling,
    level_name,
    parse_backend,
    scaling_name,
    unknown_scaling,
)

logger = logging.getLogger("fp8_backends")

# Recipes

_MXFP8 = "use_mxfp8_block_scaling"


@dataclass(eq=False, repr=False)
class Recipe(CommonFields):
    """Base of the handlers. None stands for "not given"; a recipe that was made has every default filled in.

    A recipe is fixed once it is made. Two are equal when they mean the same, however they were written. Besides its
    fields it has `compute` ("native", "te", "ao", or a registered name), `scaling`, `level` ("O0" to "O4"), `name`
    (the canonical backend string), `given` (the names of the fields that the user gave) and the fields of every other
    backend, at their defaults.

    Raises:
        RecipeError: a value that its field does not take, or fields that do not go together.
    """

    backend_name: ClassVar[str] = AUTO
    further_fields: ClassVar[Mapping[str, Any]] = {}
    """Values given for fields of a registered backend."""
    compute: ClassVar[str]
    level: ClassVar[str]
    given: ClassVar[frozenset[str]]

    def __post_init__(self, use_mxfp8_block_scaling: bool | None = None) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)} | dict(self.further_fields)
        given[_MXFP8] = use_mxfp8_block_scaling
        given = {name: value for name, value in given.items() if value is not None}
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
        return self.shard_states and self.level in OF_LEVELS["shard_states"].levels

    @property
    def described(self) -> dict[str, Any]:
        """Every field but the backend's name with its value."""
        return {name: getattr(self, name) for name in settings_of(self.compute)}

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that were given: `type(recipe)(**recipe.to_kwargs()) == recipe`."""
        names = (*(f.name for f in fields(self)), *self.further_fields)
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self  # fixed, and what it holds is used as it is

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self.to_kwargs().items() if name not in NAMING]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"


def _explains_names(cls: type) -> type:
    """Let the `__init__` of a handler understand NeMo's names, take the fields of a registered backend, and explain
    an unknown field."""
    generated = cls.__init__
    own = [name for name in inspect.signature(generated).parameters if name != "self"]

    @functools.wraps(generated)
    def __init__(self, /, *args, **kwargs):
        kwargs, renamed = own_names(kwargs)
        if renamed and not args and "backend" in own:
            kwargs.setdefault("backend", "te")
        beyond = [name for name in kwargs if name not in own]
        if beyond and "backend" in own:
            declared = _fields_by_string(kwargs.get("backend", args[0] if args else None))
            self.__dict__["further_fields"] = {name: kwargs.pop(name) for name in beyond if name in declared}
            beyond = [name for name in beyond if name not in declared]
        if beyond:
            by_handler = {handler.__name__: [f.name for f in fields(handler)] for handler in HANDLERS}
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


@_explains_names
@dataclass(eq=False, repr=False)
class TERecipeKwargs(Recipe, RuleFields, ScalingField, HeadField):
    """Train with TransformerEngine's products: `te:delayed`, or the scaling named. Accelerate's handler, extended."""

    backend_name = "te"


@_explains_names
@dataclass(eq=False, repr=False)
class AORecipeKwargs(Recipe, GatherField, ConfigFields, ScalingField, HeadField):
    """Train with TorchAO's products: `ao:tensorwise`, or the scaling named. Accelerate's handler, extended."""

    backend_name = "ao"


@_explains_names
@dataclass(eq=False, repr=False)
class MSAMPRecipeKwargs(Recipe, LevelFields):
    """Train with MS-AMP's levels on native products: `msamp:LEVEL`. Accelerate's handler, extended."""

    backend_name = "msamp"


@_explains_names
@dataclass(eq=False, repr=False)
class NativeRecipeKwargs(Recipe, GatherField, RuleFields, ScalingField, HeadField):
    """Train with this package's own products: `native:dynamic`, or the scaling named."""

    backend_name = "native"


@_explains_names
@dataclass(eq=False, repr=False)
class FP8RecipeKwargs(
    Recipe, GatherField, ConfigFields, RuleFields, LevelFields, ScalingField, HeadField, BackendField
):
    """Train with any backend by its string, and the fields that this backend reads, a registered backend's included."""


HANDLERS = (TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs, NativeRecipeKwargs)


def settings_of(compute: str) -> dict[str, Field]:
    """Every field that a recipe of this backend holds: those of this package, and its own in their place."""
    return SETTINGS if compute == AUTO else {**SETTINGS, **fields_of(registry.get_compute(compute))}


# From what was given to what it means


def _settled(cls: type[Recipe], given: dict[str, Any]) -> dict[str, Any]:
    """Every attribute of a recipe, from the fields that were given. Raises `RecipeError`."""
    asked = asked_backend(given, cls.backend_name)
    compute, level = asked.compute, asked.level or "O0"
    settings = settings_of(compute)
    values = {name: settings[name].parsed(value) for name, value in given.items() if name in settings}
    _check_layer_choice(values)
    scaling = asked.scaling or (None if compute == AUTO else _default_scaling(compute, level, values))
    named = {name for name in ("scaling", "level") if getattr(asked, name) is not None}
    return {name: each.default_for(scaling) for name, each in settings.items()} | {
        **values,
        "backend": given.get("backend"),
        "compute": compute,
        "scaling": scaling,
        "level": level,
        "opt_level": level,
        "given": frozenset(given) - {_MXFP8} | named,
    }


def _default_scaling(compute: str, level: str, values: Mapping[str, Any]) -> str:
    """The scaling rule that a field stands for, else the backend's default."""
    backend = registry.get_compute(compute)
    for name, each in fields_of(backend).items():
        if name in values and each.names_scaling and (scaling := each.names_scaling(values[name])):
            return scaling
    return backend.level_scaling if level != "O0" and backend.level_scaling else backend.default_scaling


def asked_backend(given: Mapping[str, Any], default: str = AUTO) -> BackendName:
    """The backend that string and fields name together, in that backend's own words. They may not disagree."""
    text = given.get("backend", default)
    if not isinstance(text, str):
        raise RecipeError(f"backend={shown(text)}: a backend string is wanted, such as 'native:delayed'")
    compute, scaling, level = parse_backend(text)
    if "scaling" in given:
        word = given["scaling"]
        scaling = _agreed(text, scaling, "scaling", scaling_name(compute, word, f"scaling={shown(word)}"))
    if _MXFP8 in given and parsed(_MXFP8, mxfp8_scaling, given[_MXFP8]):
        scaling = _agreed(text, scaling, _MXFP8, scaling_name(compute, "mxfp8", _MXFP8))
    elif _MXFP8 in given and scaling == "mxfp8":
        raise RecipeError(f"{shown(text)} with scaling mxfp8 and {_MXFP8}=False disagree: leave one out")
    if "opt_level" in given:
        word = given["opt_level"]
        level = _agreed(text, level or None, "opt_level", level_name(word, f"opt_level={shown(word)}"))
    return BackendName(compute, scaling, DEFAULT_LEVEL if level == "" else level)


def _agreed(text: str, part: str | None, name: str, value: str) -> str:
    if part is not None and part != value:
        raise RecipeError(f"{shown(text)} says {part} and {name} says {value}: leave one of the two out")
    return value


def _check_layer_choice(values: Mapping[str, Any]) -> None:
    """Refuse an addition to the default choice of layers where a function chooses all of them."""
    if "module_filter_func" in values and any(pattern.startswith("+") for pattern in values.get("include", ())):
        raise RecipeError(
            f"include={shown(list(values['include']))} adds to the layers that are converted by default, and "
            "module_filter_func chooses all layers: leave one of the two out, or let the function accept these, too"
        )


def _check(recipe: Recipe) -> None:
    """Refuse what this backend, scaling and level cannot honour on any machine."""
    compute = registry.get_compute(recipe.compute)
    values = {name: getattr(recipe, name) for name in sorted(recipe.given) if name not in ("level", *NAMING)}
    if error := refusal(BackendName(recipe.compute, recipe.scaling, recipe.level), values, recipe.name):
        raise error
    if recipe.monitor_every and not compute.casts_by:
        raise RecipeError(f"monitor_every: {recipe.compute} cannot tell how its layers cast; leave it out")
    compute.check(recipe)


def refusal(backend: BackendName, values: Mapping[str, Any], name: str) -> RecipeError | None:
    """Why this backend, called `name`, does not go with its level or does not read one of these fields, or None."""
    compute = registry.get_compute(backend.compute)
    if backend.level not in compute.levels:
        others = ", ".join(other for other in registry.BUILT_IN if len(registry.get_compute(other).levels) > 1)
        return RecipeError(
            f"{name}: {backend.compute} goes with {', '.join(compute.levels)} only, its weights stay as they are; "
            f"backends that go with msamp: {others}"
        )
    declared = fields_of(compute)
    settings = {**SETTINGS, **declared}
    refusals = (_unread(settings[field], value, backend, name, compute, declared) for field, value in values.items())
    return next((each for each in refusals if each is not None), None)


def _unread(
    field: Field, value: Any, backend: BackendName, name: str, compute: Compute, declared: Mapping[str, Field]
) -> RecipeError | None:
    """Why this backend, scaling and level do not read the field, or None where they do, or need not."""
    if field.name in COMMON or (field.idle is not None and value == field.idle):
        return None
    unread = f"{field.name} is not read by {name}"
    if backend.level not in field.levels:
        level = DEFAULT_LEVEL if DEFAULT_LEVEL in field.levels else field.levels[0]
        return RecipeError(
            f"{unread}, only with {_LEVELS_IN_WORDS[field.levels]}: leave it out, or use "
            f"{backend.compute if level == 'O0' else f'{backend.compute}+msamp:{level}'}"
        )
    if field.name not in declared and field.name not in OF_LEVELS:
        return RecipeError(f"{unread}, only by {readers(field.name)}: leave it out, or use these")
    rules = [rule for rule in field.scalings or () if rule in compute.scalings]
    if rules and backend.scaling not in rules:
        rules_in_words = ", ".join(f"{backend.compute}:{rule}" for rule in rules)
        return RecipeError(f"{unread}, only by {rules_in_words}: leave it out, or use that")
    return None


_LEVELS_IN_WORDS = {
    ("O1", "O2", "O3", "O4"): "a level O1 to O4",
    ("O3", "O4"): "a level O3 or O4, whose weights travel in FP8",
    ("O0",): "weights that no level stores",
}


# What users call


def resolve(spec: Spec = None) -> FP8RecipeKwargs:
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


def chosen_by_auto(recipe: FP8RecipeKwargs) -> tuple[FP8RecipeKwargs, str]:
    """The recipe that an `auto` recipe means on this machine, and why. Raises `RecipeError` where no backend that auto
    may choose honours its fields."""
    backend, reason = registry.auto_choice(lambda backend: refusal_of(backend, recipe.to_kwargs()) is None)
    return FP8RecipeKwargs(**{**recipe.to_kwargs(), "backend": backend}), reason


def refusal_of(backend: str, given: Mapping[str, Any]) -> RecipeError | None:
    """Why the backend of this string cannot honour fields that were given, or None."""
    name = parse_backend(backend)
    if "scaling" in given and known_scaling(name.compute, given["scaling"]) is None:
        return unknown_scaling(name.compute, given["scaling"], f"scaling={shown(given['scaling'])}")
    asked, settings, values = asked_backend({**given, "backend": backend}), settings_of(name.compute), {}
    for field in given.keys() - set(NAMING):
        if field not in settings:
            return unknown_field(field, "FP8RecipeKwargs", FIELDS, {})
        try:
            values[field] = settings[field].parsed(given[field])
        except RecipeError as error:
            return error
    level = asked.level or "O0"
    scaling = asked.scaling or _default_scaling(asked.compute, level, values)
    named = canonical_name(asked.compute, scaling, asked.level)
    return refusal(BackendName(asked.compute, scaling, level), values, named)


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


def _as_recipe(spec: Any) -> FP8RecipeKwargs:
    if isinstance(spec, FP8RecipeKwargs):
        return spec
    if isinstance(spec, Recipe):
        return FP8RecipeKwargs(**{"backend": spec.backend_name, **spec.to_kwargs()})
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
