"""Recipe handlers, and `resolve`, which turns a backend string or any recipe object into one.

A recipe checks itself when it is created: it refuses a field that its backend or scaling rule does
not read. The launcher, `Accelerator` and `prepare` check later that the backend can run on the
machine.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from ..announcement import announce, logger
from ..compute import hardware, registry
from ..compute.counts import FPROP, KINDS
from ..compute.fields import DEFAULT_LEVEL, STATEFUL, Field, parsed
from ..errors import RecipeError
from ..formats.formats import E4M3, E5M2, RECIPE_FORMATS, Format
from ..words import shortened, shown
from .fields import (
    BF16,
    COMMON,
    FIELDS,
    NAMING,
    OF_LEVELS,
    SETTINGS,
    BackendField,
    CommonFields,
    ConfigFields,
    GatherField,
    LevelFields,
    RuleFields,
    ScalingField,
    fields_of,
    mxfp8_scaling,
    readers,
    unknown_field,
)
from .sources import (
    environment_fields,
    environment_name,
    file_source,
    foreign_fields,
    is_launched,
    own_names,
)
from .strings import (
    AUTO,
    MSAMP,
    BackendName,
    canonical_name,
    level_name,
    names_file,
    parse_backend,
    scaling_name,
)


class TransformerEngineRecipe(Protocol):
    """A recipe object of TransformerEngine, such as `DelayedScaling`."""

    @property
    def fp8_format(self) -> Any:
        """Its `Format`."""


Spec: TypeAlias = (
    "str | os.PathLike[str] | Mapping[str, Any] | Recipe | TransformerEngineRecipe | None"
)
"""A backend string, the path of a recipe file, a dictionary `{"backend": …, field: value}`, a
recipe; None picks for this machine. Handlers of Accelerate are valid, too; they have no types."""

AnyRecipe = TypeVar("AnyRecipe", bound="Recipe")
_MXFP8 = "use_mxfp8_block_scaling"


@dataclass(eq=False, repr=False)
class Recipe(CommonFields):
    """Base of the handlers. A field given as None takes its default.

    A recipe is immutable. Two recipes are equal if all their values are, however they were written.
    Beyond its fields a recipe has `compute` ("native", "te", "ao", or a registered name),
    `scaling`, `level` ("O0" to "O4"), `name` (the canonical backend string), `given` (the names of
    the fields that the user gave) and the fields of all other backends, at their defaults.

    Raises:
        RecipeError: a field does not take the value, or fields contradict each other.
    """

    backend_name: ClassVar[str] = AUTO
    further_fields: ClassVar[Mapping[str, Any]] = {}
    """Values for fields of a registered backend."""
    compute: ClassVar[str]
    level: ClassVar[str]
    given: ClassVar[frozenset[str]]
    by_backend: ClassVar[Mapping[str, Recipe]] = {}
    """The recipe of the layers with each backend in `layers`."""
    gradient_formats: ClassVar[Mapping[str, Format]] = {}
    """The formats of the gradient's codes, E4M3 or E5M2, that `products` gives in place of
    `fp8_format`'s."""
    by_phase: ClassVar[Mapping[str, Recipe | None]] = {}
    """The recipe of each word in `schedule`; None for bf16."""

    def __post_init__(self, use_mxfp8_block_scaling: bool | None = None) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)} | dict(
            self.further_fields
        )
        given[_MXFP8] = use_mxfp8_block_scaling
        given = {name: value for name, value in given.items() if value is not None}
        read = _read_fields(given, self.backend_name)
        include = read.values.get("include", ())
        if "module_filter_func" in read.values and any(
            pattern.startswith("+") for pattern in include
        ):
            raise RecipeError(
                f"include={shown(list(include))} adds to the layers that are converted by default, "
                "and module_filter_func chooses all layers: leave one of the two out, or let the "
                "function accept these, too"
            )
        named = {name for name in ("scaling", "level") if getattr(read.asked, name) is not None}
        compute, scaling, level = read.backend
        defaults = {
            name: field.default_for(scaling) for name, field in settings_of(compute).items()
        }
        names = {
            "backend": given.get("backend"),
            "compute": compute,
            "scaling": scaling,
            "level": level,
        }
        given = frozenset(given) - {_MXFP8} | named
        values = _with_products(read.values)
        self.__dict__.update(defaults | values | names | {"opt_level": level, "given": given})
        if compute == AUTO:
            return
        if error := _refusal(
            read.backend, {name: read.values[name] for name in sorted(read.values)}, self.name
        ):
            raise error
        if self.monitor_every and not registry.get_compute(compute).casts_by:
            raise RecipeError(
                f"monitor_every: {compute} cannot tell how its layers cast; leave it out"
            )
        self.__dict__.update(self._derived())
        registry.get_compute(compute).check(self)
        for recipe in self.recipes if self.by_phase else ():
            if BF16 not in registry.get_compute(recipe.compute).switches(recipe):
                raise RecipeError(
                    f"schedule: layers of {recipe.name} cannot change in a run; those of native can"
                )
        if len(self.recipes) > 1:
            _check_together(self)

    def _derived(self) -> dict[str, Mapping[str, Any]]:
        """Return the formats of `products`, and the recipes of `layers` and `schedule` by their
        words."""
        of_layers = (
            word for word in (self.layers or {}).values() if word != BF16 and isinstance(word, str)
        )
        of_phases = (word for word in (self.schedule or {}).values() if isinstance(word, str))
        return {
            "gradient_formats": self._gradient_formats(),
            "by_backend": {word: self._for_layers(word) for word in dict.fromkeys(of_layers)},
            "by_phase": {word: self._in_phase(word) for word in dict.fromkeys(of_phases)},
        }

    def _gradient_formats(self) -> dict[str, Format]:
        formats = {}
        for kind, word in (self.products or {}).items():
            fmt = _GRADIENT_FORMATS.get(word)  # None for bf16
            if kind != FPROP and fmt not in (None, RECIPE_FORMATS[self.fp8_format][1]):
                formats[kind] = fmt
        return formats

    @property
    def name(self) -> str:
        """The canonical backend string; `auto` until `resolve` has picked one."""
        if self.compute == AUTO:
            return AUTO
        names_level = self.level != "O0" or "level" in self.given
        return canonical_name(self.compute, self.scaling, self.level if names_level else None)

    @property
    def comm(self) -> str:
        """The format of gradients between ranks, "fp8" or "plain": `gradient_comm`, or the level's
        default."""
        return self.gradient_comm or ("plain" if self.level == "O0" else "fp8")

    @property
    def shares_states(self) -> bool:
        """True if the ranks of DDP or DeepSpeed shard masters, residuals and optimizer states by
        weight."""
        return self.level in ("O3", "O4") if self.shard_states is None else self.shard_states

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """This recipe and the others in `layers`, each once."""
        return tuple(dict.fromkeys((self, *self.by_backend.values())))

    @property
    def stateful(self) -> Recipe:
        """The recipe of the layers with scales kept from step to step, if any."""
        return next((recipe for recipe in self.recipes if recipe.scaling in STATEFUL), self)

    def _in_phase(self, word: str) -> Recipe | None:
        """Return the recipe of a phase of `schedule`; None for bf16."""
        if word == BF16:
            return None
        recipe, switches = (
            self._for_layers(word, "schedule"),
            registry.get_compute(self.compute).switches(self),
        )
        if recipe is not self and (recipe.compute != self.compute or "rule" not in switches):
            raise RecipeError(
                f"schedule: {self.name} cannot change to {word} in a run; only to bf16 and back"
            )
        if recipe is not self and recipe.scaling in (*STATEFUL, "nvfp4"):
            raise RecipeError(
                f"schedule: {word} is no rule of a phase alone: make it the backend of the run"
            )
        return recipe

    def _for_layers(self, backend: str, field: str = "layers") -> Recipe:
        """Return this recipe with another backend, without fields of another backend's or scaling
        rule's own."""
        naming = backend if self.level == "O0" else f"{backend}+msamp:{self.level}"
        given = {
            name: value
            for name, value in self.to_kwargs().items()
            if name not in {*NAMING, *_WHOLE, field}
        }
        kept = {name: value for name, value in given.items() if name not in _OF_ONE_RULE}
        kept |= {
            name: given[name]
            for name in given.keys() - kept
            if refusal_of(naming, {name: given[name]}) is None
        }
        try:
            recipe = FP8RecipeKwargs(backend=naming, **kept)
        except RecipeError as error:
            raise RecipeError(f"{field}: {error}") from None
        return self if (recipe.compute, recipe.scaling) == (self.compute, self.scaling) else recipe

    @property
    def described(self) -> dict[str, Any]:
        """Every field with its value, except those that name the backend."""
        return {name: getattr(self, name) for name in settings_of(self.compute)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the given fields: `type(recipe)(**recipe.to_kwargs()) == recipe`."""
        names = (*(field.name for field in fields(self)), *self.further_fields)
        return {name: getattr(self, name) for name in names if name in self.given}

    def replace(self: AnyRecipe, **values: Any) -> AnyRecipe:
        """Return a recipe with the given fields of this one and these."""
        return type(self)(**{**self.to_kwargs(), **values})

    def to_dict(self) -> dict[str, Any]:
        """Return every field with its value."""
        return {"name": self.name} | copy.deepcopy(self.described)

    def __setattr__(self, name: str, value: Any) -> None:
        if "given" in self.__dict__:
            raise RecipeError(
                f"{name}: a recipe is fixed once it is made; make another: "
                f"{type(self).__name__}(**{{**recipe.to_kwargs(), {name!r}: ...}})"
            )
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recipe):
            return NotImplemented
        return self.name == other.name and self.described == other.described

    def __hash__(self) -> int:
        return hash(self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self  # immutable, and users' objects in it are used as they are

    def __repr__(self) -> str:
        given = [
            f"{name}={value!r}" for name, value in self.to_kwargs().items() if name not in NAMING
        ]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"


def _explains_names(cls: type) -> type:
    """Let a handler's `__init__` translate NeMo's names, accept registered fields, and explain
    unknown ones."""
    generated = cls.__init__
    names = [name for name in inspect.signature(generated).parameters if name != "self"]

    @functools.wraps(generated)
    def __init__(self, /, *args, **kwargs):
        kwargs, renamed = own_names(kwargs)
        if renamed and not args and "backend" in names:
            kwargs.setdefault("backend", "te")
        backend = kwargs.get("backend", args[0] if args else None)
        if "backend" in names and names_file(backend):
            in_file = file_source(backend).fields
            try:
                return self.__init__(
                    **_over(in_file, {**dict(zip(names, args, strict=False)), **kwargs})
                )
            except RecipeError as error:
                raise RecipeError(f"{backend}: {error}") from None
        unknown = [name for name in kwargs if name not in names]
        if unknown and "backend" in names:
            declared = _fields_by_string(kwargs.get("backend", args[0] if args else None))
            self.__dict__["further_fields"] = {
                name: kwargs.pop(name) for name in unknown if name in declared
            }
            unknown = [name for name in unknown if name not in declared]
        if unknown:
            by_handler = {
                handler.__name__: [field.name for field in fields(handler)] for handler in HANDLERS
            }
            raise unknown_field(unknown[0], type(self).__name__, names, by_handler)
        generated(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


def _over(in_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe file's fields, overridden by the given ones. The file's string is split into
    naming fields."""
    asked = asked_backend(in_file)
    names = {"backend": asked.compute, "scaling": asked.scaling, "opt_level": asked.level}
    over = {name: value for name, value in given.items() if name != "backend"}
    return {
        **in_file,
        **{name: value for name, value in {**names, **over}.items() if value is not None},
    }


def _fields_by_string(backend: Any) -> dict[str, Field]:
    """Return the fields that the backend of this string reads; none if the string names no
    backend."""
    try:
        compute = parse_backend(backend).compute if isinstance(backend, str) else AUTO
    except RecipeError:
        return {}
    return {} if compute == AUTO else fields_of(registry.get_compute(compute))


@_explains_names
@dataclass(eq=False, repr=False)
class TERecipeKwargs(Recipe, RuleFields, ScalingField):
    """Train with TransformerEngine's products: `te:delayed`, or another scaling. Extends
    Accelerate's handler."""

    backend_name = "te"


@_explains_names
@dataclass(eq=False, repr=False)
class AORecipeKwargs(Recipe, GatherField, ConfigFields, ScalingField):
    """Train with TorchAO's products: `ao:tensorwise`, or another scaling. Extends Accelerate's
    handler."""

    backend_name = "ao"


@_explains_names
@dataclass(eq=False, repr=False)
class MSAMPRecipeKwargs(Recipe, LevelFields):
    """Train with MS-AMP's levels on native products: `msamp:LEVEL`. Extends Accelerate's
    handler."""

    backend_name = "msamp"


@_explains_names
@dataclass(eq=False, repr=False)
class NativeRecipeKwargs(Recipe, GatherField, RuleFields, ScalingField):
    """Train with this package's products: `native:dynamic`, or another scaling."""

    backend_name = "native"


@_explains_names
@dataclass(eq=False, repr=False)
class FP8RecipeKwargs(
    Recipe,
    GatherField,
    ConfigFields,
    RuleFields,
    LevelFields,
    ScalingField,
    BackendField,
):
    """Train with any backend by its string, and its fields, also those of a registered backend."""


HANDLERS = (TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs, NativeRecipeKwargs)


def settings_of(compute: str) -> dict[str, Field]:
    """Return every field of a recipe with this backend: this package's fields, and the backend's in
    their place."""
    return SETTINGS if compute == AUTO else {**SETTINGS, **fields_of(registry.get_compute(compute))}


class _ReadFields(NamedTuple):
    asked: BackendName
    """The backend as string and fields name it."""
    backend: BackendName
    """The same with default scaling and level filled in; `auto` has no scaling."""
    values: dict[str, Any]
    """The given values of other fields, parsed."""


def _read_fields(given: Mapping[str, Any], backend_name: str = AUTO) -> _ReadFields:
    asked = asked_backend(given, backend_name)
    settings, level = settings_of(asked.compute), asked.level or "O0"
    values = {
        name: settings[name].parsed(value) for name, value in given.items() if name in settings
    }
    scaling = asked.scaling
    if scaling is None and asked.compute != AUTO:
        backend = registry.get_compute(asked.compute)
        named = [
            field.names_scaling(values[name])
            for name, field in fields_of(backend).items()
            if name in values and field.names_scaling
        ]
        by_level = backend.level_scaling if level != "O0" else None
        scaling = next(filter(None, [*named, by_level, backend.default_scaling]))
    return _ReadFields(asked, BackendName(asked.compute, scaling, level), values)


def asked_backend(given: Mapping[str, Any], default: str = AUTO) -> BackendName:
    """Combine backend string and naming fields, with the backend's own names. Raises `RecipeError`
    if they disagree."""
    text = given.get("backend", default)
    if not isinstance(text, str):
        raise RecipeError(
            f"backend={shown(text)}: a backend string is wanted, such as 'native:delayed'"
        )
    compute, scaling, level = parse_backend(text)
    if "scaling" in given:
        word = given["scaling"]
        scaling = _agreed(
            text, scaling, "scaling", scaling_name(compute, word, f"scaling={shown(word)}")
        )
    if _MXFP8 in given and parsed(_MXFP8, mxfp8_scaling, given[_MXFP8]):
        scaling = _agreed(text, scaling, _MXFP8, scaling_name(compute, "mxfp8", _MXFP8))
    elif _MXFP8 in given and scaling == "mxfp8":
        raise RecipeError(
            f"{shown(text)} with scaling mxfp8 and {_MXFP8}=False disagree: leave one out"
        )
    if "opt_level" in given:
        word = given["opt_level"]
        level = _agreed(
            text, level or None, "opt_level", level_name(word, f"opt_level={shown(word)}")
        )
    return BackendName(compute, scaling, DEFAULT_LEVEL if level == "" else level)


def _agreed(text: str, part: str | None, name: str, value: str) -> str:
    if part is not None and part != value:
        raise RecipeError(
            f"{shown(text)} says {part} and {name} says {value}: leave one of the two out"
        )
    return value


_WHOLE = ("layers", "schedule")
"""Fields of the whole model."""
_OF_ONE_RULE = (
    "margin",
    "interval",
    "amax_history_len",
    "amax_compute_algo",
    "fast_accumulation",
    "config",
)
_OF_ONE_RULE += ("pad_inner_dim",)
"""Fields with a meaning for some scaling rules or one backend only: other layers of a model go
without them."""
_GRADIENT_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}


def _with_products(values: dict[str, Any]) -> dict[str, Any]:
    """Add `override_linear_precision` by `products`, and the other way round. Raises `RecipeError`
    if they disagree."""
    flags, products = values.get("override_linear_precision"), values.get("products")
    if products is None and flags is not None and any(flags):
        products = {kind: BF16 for kind, high in zip(KINDS, flags, strict=True) if high}
    by_products = tuple((products or {}).get(kind) == BF16 for kind in KINDS)
    if flags not in (None, by_products):
        raise RecipeError(
            f"products={shown(products)} and override_linear_precision={flags} disagree: leave one "
            "of the two out"
        )
    return values | (
        {"products": products, "override_linear_precision": by_products} if products else {}
    )


def _check_together(recipe: Recipe) -> None:
    """Raise `RecipeError` for backends in `layers` that do not go together in one model."""
    stateful = [other.name for other in recipe.recipes if other.scaling in STATEFUL]
    if len(stateful) > 1:
        raise RecipeError(
            f"layers: {' and '.join(stateful)} keep scales from step to step; a model has one such "
            "rule"
        )
    by_te = [other.name for other in recipe.recipes if other.compute == "te"]
    if len(by_te) > 1:
        raise RecipeError(
            f"layers: {' and '.join(by_te)}: TransformerEngine runs a forward under one recipe; "
            "use native for the rest"
        )
    products = {
        registry.get_compute(other.compute).high_precision_products(other)
        for other in recipe.recipes
    }
    if len(products) > 1:
        raise RecipeError("layers: all layers must keep the same products in high precision")


_LEVELS_IN_WORDS = {
    ("O1", "O2", "O3", "O4"): "a level O1 to O4",
    ("O3", "O4"): "a level O3 or O4, whose weights travel in FP8",
    ("O0",): "weights that no level stores",
}


def _refusal(backend: BackendName, values: Mapping[str, Any], name: str) -> RecipeError | None:
    """Return the error for a level or a field that this backend, called `name`, supports on no
    machine."""
    compute = registry.get_compute(backend.compute)
    if backend.level not in compute.levels:
        others = ", ".join(
            other for other in registry.BUILT_IN if len(registry.get_compute(other).levels) > 1
        )
        return RecipeError(
            f"{name}: {backend.compute} goes with {', '.join(compute.levels)} only, its weights "
            f"stay as they are; backends that go with msamp: {others}"
        )
    declared, settings = fields_of(compute), settings_of(backend.compute)
    for field in map(settings.__getitem__, values):
        if field.name in COMMON or (field.idle is not None and values[field.name] == field.idle):
            continue
        unread = f"{field.name} is not read by {name}"
        if backend.level not in field.levels:
            level = DEFAULT_LEVEL if DEFAULT_LEVEL in field.levels else field.levels[0]
            return RecipeError(
                f"{unread}, only with {_LEVELS_IN_WORDS[field.levels]}: leave it out, or use "
                f"{backend.compute if level == 'O0' else f'{backend.compute}+msamp:{level}'}"
            )
        if field.name not in declared and field.name not in OF_LEVELS:
            return RecipeError(
                f"{unread}, only by {readers(field.name)}: leave it out, or use these"
            )
        rules = [
            f"{backend.compute}:{rule}" for rule in field.scalings or () if rule in compute.scalings
        ]
        if rules and f"{backend.compute}:{backend.scaling}" not in rules:
            return RecipeError(f"{unread}, only by {', '.join(rules)}: leave it out, or use that")
    return None


def resolve(spec: Spec = None) -> FP8RecipeKwargs:
    """Return the recipe for `spec`, with every default filled in.

    Args:
        spec: a backend string, the path of a recipe file, a recipe of this package, a recipe
            handler of Accelerate, a dict `{"backend": …, field: value}`, a recipe object of
            TransformerEngine; None or "auto" picks for this machine.

    Raises:
        RecipeError: unknown strings, fields and combinations, each with the valid ones. Missing
            hardware or libraries are no error here: `prepare` checks them.
    """
    recipe = _as_recipe(spec)
    if recipe.compute != AUTO:
        return recipe
    chosen, reason = chosen_by_auto(recipe)
    if hardware.fp8_products():
        announce(f"backend auto: {chosen.name} ({reason})")
    else:
        logger.warning(
            "backend auto: this machine has no FP8 hardware, so FP8 trains slower than bf16 here"
        )
    return chosen


def chosen_by_auto(recipe: FP8RecipeKwargs) -> tuple[FP8RecipeKwargs, str]:
    """Return the `auto` recipe with this machine's backend, and the reason. Raises `RecipeError`
    without one."""
    backend, reason = registry.auto_choice(
        lambda backend: refusal_of(backend, recipe.to_kwargs()) is None
    )
    return recipe.replace(backend=backend), reason


def refusal_of(backend: str, given: Mapping[str, Any]) -> RecipeError | None:
    """Return the error if the backend of this string cannot honour these fields."""
    try:
        read = _read_fields({**given, "backend": backend})
    except RecipeError as error:
        return error
    for name in given:
        if name not in NAMING and name not in read.values:
            return unknown_field(name, "FP8RecipeKwargs", FIELDS, {})
    compute, scaling, _ = read.backend
    return _refusal(read.backend, read.values, canonical_name(compute, scaling, read.asked.level))


def from_environment(environ: Mapping[str, str] | None = None) -> Recipe | None:
    """Return the recipe in `FP8_BACKENDS_RECIPE` (from `fp8-backends launch`), else in
    `ACCELERATE_FP8_*` (any case), or None.

    A value of `ACCELERATE_FP8_*` equal to the default of Accelerate's launcher counts as not given.
    Without `ACCELERATE_FP8_BACKEND`, `auto` picks the backend.
    """
    try:
        asked = environment_fields(environ)
        names_msamp = any(word in asked.get("backend", AUTO).lower() for word in MSAMP)
        if "opt_level" in asked and not names_msamp and not is_launched(environ):
            level = shortened(asked["opt_level"])  # Accelerate's launcher always exports one
            raise RecipeError(
                f"OPT_LEVEL={level} selects no level by itself: say "
                f"ACCELERATE_FP8_BACKEND=msamp:{level} or COMPUTE+msamp:{level}, or leave it out"
            )
        return FP8RecipeKwargs(**asked) if asked else None
    except RecipeError as error:
        raise RecipeError(f"{environment_name(environ)} in the environment: {error}") from None


def _as_recipe(spec: Any) -> FP8RecipeKwargs:
    if isinstance(spec, FP8RecipeKwargs):
        return spec
    if isinstance(spec, Recipe):
        return FP8RecipeKwargs(**{"backend": spec.backend_name, **spec.to_kwargs()})
    if spec is None or isinstance(spec, (str, os.PathLike)):
        return FP8RecipeKwargs(backend=spec if spec is None else os.fspath(spec))
    if isinstance(spec, Mapping):
        return FP8RecipeKwargs(**{str(name): value for name, value in spec.items()})
    fields_of_spec = foreign_fields(spec)
    if fields_of_spec is None:
        raise RecipeError(
            f"a recipe cannot be read from {type(spec).__name__}: pass a backend string, a recipe "
            "handler of fp8_backends or Accelerate, a dict, or a recipe of TransformerEngine"
        )
    return FP8RecipeKwargs(**fields_of_spec)


def as_json(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's fields as JSON returns them; objects become a text without addresses."""
    return json.loads(
        json.dumps(recipe.to_dict(), default=lambda value: re.sub(r" at 0x\w+", "", repr(value)))
    )


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Map each common field that differs between two recipes to both values, except the name, the
    placement of states and fields of monitoring. `before`, `after`: `Recipe.to_dict` or `as_json`;
    one may come from a checkpoint."""
    ignored = {
        "name",
        "shard_states",
        *(name for name, field in SETTINGS.items() if field.only_watches),
    }
    return {
        name: (before[name], value)
        for name, value in after.items()
        if name not in ignored and name in before and before[name] != value
    }
