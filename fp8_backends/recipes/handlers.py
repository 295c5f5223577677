"""Recipe handlers, and `resolve`, which turns a backend string or any recipe object into one.

A recipe checks itself when it is created: it refuses a field that its backend or scaling rule does
not read. The launcher, `Accelerator` and `prepare` check later that the backend can run on the
machine.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

from ..announcement import announce, logger
from ..compute import hardware, registry
from ..compute.counts import FPROP, KINDS
from ..compute.fields import flag, parsed
from ..errors import RecipeError
from ..formats.formats import E4M3, E5M2, RECIPE_FORMATS, Format
from ..formats.scaling import STATEFUL
from ..words import shown
from .fields import (
    FIELDS,
    KEPT_IN_BF16,
    NAMING,
    SETTINGS,
    BackendField,
    CommonFields,
    ConfigFields,
    GatherField,
    LevelFields,
    RuleFields,
    ScalingField,
    settings_of,
    unknown_field,
)
from .merging import Merged, merge, merged, refusal_of
from .sources import (
    LAUNCH,
    Source,
    environment_name,
    environment_source,
    foreign_fields,
    own_names,
    placed,
)
from .strings import AUTO, canonical_name, names_file, scaling_name


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
    compute: ClassVar[str]
    level: ClassVar[str]
    name: ClassVar[str]
    """The canonical backend string; `auto` until `resolve` has picked one."""
    given: ClassVar[frozenset[str]]
    by_backend: ClassVar[Mapping[str, Recipe]] = {}
    """The recipe of the layers with each backend in `layers`."""
    gradient_formats: ClassVar[Mapping[str, Format]] = {}
    """The formats of the gradient's codes, E4M3 or E5M2, that `products` gives in place of
    `fp8_format`'s."""
    by_phase: ClassVar[Mapping[str, Recipe | None]] = {}
    """The recipe of each word in `schedule`; None for bf16."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        given = _arguments(self, args, kwargs)
        mxfp8 = given.pop(_MXFP8, None)
        source = Source(dict(given))
        if given.get("backend") is None:
            source.fields["backend"] = self.backend_name
        if mxfp8 is not None:
            mxfp8 = parsed(_MXFP8, flag, mxfp8)
        if mxfp8 and given.get("scaling") is None:
            source.fields["scaling"] = "mxfp8"
            source.places["scaling"] = _MXFP8
        merged = merge([source])
        asked, (compute, scaling, level), read = merged
        if mxfp8 is not None and mxfp8 != (asked.scaling == "mxfp8"):
            raise RecipeError(
                f"{shown(source.fields['backend'])} with scaling {asked.scaling} and "
                f"{_MXFP8}={mxfp8} disagree: leave one out"
            )
        include = read.get("include", ())
        if "module_filter_func" in read and any(pattern.startswith("+") for pattern in include):
            raise RecipeError(
                f"include={shown(list(include))} adds to the layers that are converted by default, "
                "and module_filter_func chooses all layers: leave one of the two out, or let the "
                "function accept these, too"
            )
        if names_file(given.get("backend")):
            given = merged.fields
        defaults = {
            name: field.default_of_scaling.get(scaling, field.default)
            for name, field in settings_of(compute).items()
        }
        named = {name for name in ("scaling", "level") if getattr(asked, name) is not None}
        named |= {name for name in NAMING if given.get(name) is not None}
        both_forms = {}
        if read.keys() & {"products", "override_linear_precision"}:
            both_forms = _with_products(read)
        self.__dict__.update(
            defaults | read | both_forms,
            name=AUTO if compute == AUTO else canonical_name(compute, scaling, asked.level),
            backend=given.get("backend"),
            compute=compute,
            scaling=scaling,
            level=level,
            opt_level=level,
            given=frozenset({*read, *named}),
        )
        if compute == AUTO:
            return
        if self.monitor_every and not registry.get_compute(compute).casts_by:
            raise RecipeError(
                f"monitor_every: {compute} cannot tell how its layers cast; leave it out"
            )
        if self.products or self.layers or self.schedule:
            self._derive()
        registry.get_compute(compute).check(self)
        for recipe in self.recipes if self.by_phase else ():
            if KEPT_IN_BF16 not in registry.get_compute(recipe.compute).switches(recipe):
                raise RecipeError(
                    f"schedule: layers of {recipe.name} cannot change in a run; those of native can"
                )
        if len(self.recipes) > 1:
            _check_together(self)

    def _derive(self) -> None:
        """Set the formats of `products`, and the recipes of `layers` and `schedule` by their
        words."""
        formats = {
            kind: _GRADIENT_FORMATS[word]
            for kind, word in (self.products or {}).items()
            if kind != FPROP and word != KEPT_IN_BF16
        }
        of_layers = (
            word
            for word in (self.layers or {}).values()
            if word != KEPT_IN_BF16 and isinstance(word, str)
        )
        of_phases = (word for word in (self.schedule or {}).values() if isinstance(word, str))
        self.__dict__.update(
            gradient_formats={
                kind: fmt
                for kind, fmt in formats.items()
                if fmt is not RECIPE_FORMATS[self.fp8_format][1]
            },
            by_backend={word: self._for_layers(word) for word in dict.fromkeys(of_layers)},
            by_phase={word: self._in_phase(word) for word in dict.fromkeys(of_phases)},
        )

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

    @functools.cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """This recipe and the others in `layers`, each once."""
        return tuple(dict.fromkeys((self, *self.by_backend.values())))

    @property
    def stateful(self) -> Recipe:
        """The recipe of the layers with scales kept from step to step, if any."""
        return next((recipe for recipe in self.recipes if recipe.scaling in STATEFUL), self)

    def _in_phase(self, word: str) -> Recipe | None:
        """Return the recipe of a phase of `schedule`; None for bf16."""
        if word == KEPT_IN_BF16:
            return None
        if word == self.name.lower():  # a level goes with this word, and with no other
            return self
        recipe = self._for_layers(word, "schedule")
        if recipe is self:
            return recipe
        switches = registry.get_compute(self.compute).switches(self)
        if recipe.compute != self.compute or "rule" not in switches:
            raise RecipeError(
                f"schedule: {self.name} cannot change to {word} in a run; only to bf16 and back"
            )
        if recipe.scaling in STATEFUL:
            raise RecipeError(
                f"schedule: {word} is no rule of a phase alone: make it the backend of the run"
            )
        return recipe

    def _for_layers(self, backend: str, field: str = "layers") -> Recipe:
        """Return this recipe with another backend, without fields of another backend's or scaling
        rule's own."""
        naming = backend if self.level == "O0" else f"{backend}+msamp:{self.level}"
        left_out = {*NAMING, *_WHOLE, field}
        kept = {
            name: value
            for name, value in self.to_kwargs().items()
            if name not in left_out
            and (name not in _OF_ONE_RULE or refusal_of(naming, {name: value}) is None)
        }
        with placed(field):
            recipe = FP8RecipeKwargs(backend=naming, **kept)
        return self if (recipe.compute, recipe.scaling) == (self.compute, self.scaling) else recipe

    @property
    def described(self) -> dict[str, Any]:
        """Every field with its value, except those that name the backend."""
        return {name: getattr(self, name) for name in settings_of(self.compute)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the given fields: `type(recipe)(**recipe.to_kwargs()) == recipe`."""
        names = dict.fromkeys([*(field.name for field in fields(self)), *self.described])
        return {name: getattr(self, name) for name in names if name in self.given}

    @property
    def given_settings(self) -> dict[str, Any]:
        """The given fields, except those that name the backend."""
        return {name: value for name, value in self.to_kwargs().items() if name not in NAMING}

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
        given = [f"{name}={value!r}" for name, value in self.given_settings.items()]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"


def _arguments(recipe: Recipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a handler by this package's names. Raises `RecipeError` for a field
    of another handler; `merge` checks the fields of any backend."""
    handler = type(recipe).__name__
    names = recipe.__dataclass_fields__
    positional = dict(zip(recipe.__match_args__, args, strict=False))
    if len(positional) < len(args) or positional.keys() & kwargs.keys():
        raise RecipeError(f"{handler}: write the name of each field, once: {handler}(name=value)")
    given = {**positional, **kwargs}
    backend = given.get("backend")
    is_plugin = isinstance(backend, str) and "with" in backend.lower()
    is_translated = False
    if is_plugin or given.keys() - FIELDS.keys():  # NeMo's and Megatron's names
        given, is_translated = own_names(given)
    if "backend" in names:
        return {"backend": "te", **given} if is_translated else given
    for name in given:
        if name not in names:
            by_handler = {other.__name__: [*other.__dataclass_fields__] for other in HANDLERS}
            raise unknown_field(name, handler, names, by_handler)
    return given


if TYPE_CHECKING:  # a type checker sees each field as an argument of the handler
    from typing_extensions import dataclass_transform

    @dataclass_transform()
    def _handler(cls: type[AnyRecipe]) -> type[AnyRecipe]: ...
else:

    def _handler(cls):
        cls = dataclass(cls, eq=False, repr=False, init=False)
        # for `help` and completion
        names = [Parameter(name, Parameter.KEYWORD_ONLY) for name in cls.__dataclass_fields__]
        cls.__signature__ = Signature(names)
        return cls


@_handler
class TERecipeKwargs(Recipe, RuleFields, ScalingField):
    """Train with TransformerEngine's products: `te:delayed`, or another scaling. Extends
    Accelerate's handler."""

    backend_name = "te"


@_handler
class AORecipeKwargs(Recipe, GatherField, ConfigFields, ScalingField):
    """Train with TorchAO's products: `ao:tensorwise`, or another scaling. Extends Accelerate's
    handler."""

    backend_name = "ao"


@_handler
class MSAMPRecipeKwargs(Recipe, LevelFields):
    """Train with MS-AMP's levels on native products: `msamp:LEVEL`. Extends Accelerate's
    handler."""

    backend_name = "msamp"


@_handler
class NativeRecipeKwargs(Recipe, GatherField, RuleFields, ScalingField):
    """Train with this package's products: `native:dynamic`, or another scaling."""

    backend_name = "native"


@_handler
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


_WHOLE = ("layers", "schedule")
"""Fields of the whole model."""
_OF_ONE_RULE = (
    "margin",
    "interval",
    "amax_history_len",
    "amax_compute_algo",
    "fast_accumulation",
    "config",
    "pad_inner_dim",
)
"""Fields with a meaning for some scaling rules or one backend only: other layers of a model go
without them."""
_GRADIENT_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}


def _with_products(values: dict[str, Any]) -> dict[str, Any]:
    """Return `products` with the same as `override_linear_precision`. Raises `RecipeError` if both
    are given and disagree."""
    flags = values.get("override_linear_precision")
    products = values.get("products")
    if products is None and flags is not None and any(flags):
        products = {kind: KEPT_IN_BF16 for kind, high in zip(KINDS, flags, strict=True) if high}
    by_products = tuple((products or {}).get(kind) == KEPT_IN_BF16 for kind in KINDS)
    if flags not in (None, by_products):
        raise RecipeError(
            f"products={shown(products)} and override_linear_precision={flags} disagree: leave one "
            "of the two out"
        )
    return {"products": products, "override_linear_precision": by_products} if products else {}


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


def from_environment(environ: Mapping[str, str] | None = None) -> Recipe | None:
    """Return the recipe in `FP8_BACKENDS_RECIPE` (from `fp8-backends launch`), else in
    `ACCELERATE_FP8_*` (any case), or None.

    A value of `ACCELERATE_FP8_*` equal to the default of Accelerate's launcher counts as not given.
    Without `ACCELERATE_FP8_BACKEND`, `auto` picks the backend.
    """
    source = environment_source(environ)
    if not source.fields:
        return None
    fields = merge([source]).fields
    with placed(f"{environment_name(environ)} in the environment"):
        return FP8RecipeKwargs(**fields)


def code_over_launch(
    handler: Any, launch: Source, origin: str = LAUNCH
) -> tuple[Recipe, str | None]:
    """Merge a handler with the fields of a launch or of the environment (`origin`, for messages); a
    handler with another backend ignores them. Return the recipe, and a warning in one line if the
    script overrides the launch. In Accelerate's handlers, which fill in every field, a value equal
    to the default counts as not given."""
    name = type(handler).__name__
    recipe = handler
    if not isinstance(handler, Recipe):  # Accelerate's: ours of the same name
        foreign = foreign_fields(handler)
        backend = foreign.pop("backend").lower()
        ours = next(other for other in HANDLERS if other.backend_name == backend)
        recipe = ours(**foreign)
    # a level completes a script that names msamp
    launched = merge([replace(launch, fills_in=False)])
    if not _agree_on_backend(recipe, launched):
        warning = (
            f"{name} in the script means {recipe.name}, {origin} said {_written(launch.fields)}: "
        )
        return recipe, warning + "the script's recipe is used, and alone"
    given = recipe.to_kwargs()
    if recipe.compute == AUTO:
        given.pop("backend", None)
    elif launched.asked.compute == AUTO:
        given.setdefault("backend", recipe.backend_name)
    theirs = {**launched.values, "opt_level": launched.backend.level}
    naming = launch.fields.keys() & {"scaling", "opt_level"}
    both = given.keys() & (launched.values.keys() | naming)
    if "scaling" in both:
        word = launched.backend.scaling
        theirs["scaling"] = scaling_name(recipe.compute, word, launch.places["scaling"])
    overridden = {
        field: launch.fields.get(field, theirs[field])
        for field in sorted(both)
        if theirs[field] != given[field]
    }
    warning = None
    if overridden:
        warning = (
            f"{name} in the script says {_written({field: given[field] for field in overridden})}, "
            f"{origin} said {_written(overridden)}: the script's value is used"
        )
    code = Source(given, {field: f"{field} of {name} in the script" for field in given})
    return FP8RecipeKwargs(**merged([code, launch])), warning


def _agree_on_backend(recipe: Recipe, launched: Merged) -> bool:
    """Return True if a script's recipe keeps the launch's backend. A recipe without a backend
    completes any."""
    compute, scaling, level = launched.backend
    if AUTO in (recipe.compute, compute):
        return True
    if "backend" in recipe.given:
        return recipe.name == canonical_name(compute, scaling, launched.asked.level)
    given = recipe.to_kwargs()
    same_scaling = "scaling" not in given or recipe.scaling == scaling
    same_level = "opt_level" not in given or recipe.level == level
    # an MSAMPRecipeKwargs completes levels alone
    has_level = "level" not in recipe.given or level != "O0"
    return recipe.compute == compute and same_scaling and same_level and has_level


def _written(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in fields.items())


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
