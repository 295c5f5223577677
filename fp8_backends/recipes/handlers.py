"""What the user asks for: a backend string or a recipe object, and `resolve`, which understands both.

    COMPUTE[:SCALING][+msamp[:LEVEL]]        msamp[:LEVEL]        auto

A recipe checks itself when it is made: a field that its backend or scaling rule does not read is an error, never
dropped. Whether the backend can run on this machine is asked only by `prepare`.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate.utils import KwargsHandler

from ..compute import hardware, registry
from ..compute.fields import (
    COMMON_FIELDS,
    DEFAULT_LEVEL,
    FIELDS,
    FORMAT_OF_SCALING,
    LEVEL_FIELDS,
    parse_field,
    unknown_field,
)
from ..compute.te.amax_group import AbsentGroup, present, ranks_of
from ..errors import RecipeError
from .backend_string import AUTO, MSAMP, BackendName, level_name, parse_backend, scaling_name
from .nemo_names import own_names
from .sources import environment_fields, environment_name, foreign_fields, is_launched

if TYPE_CHECKING:
    from ..compute.interface import Compute

logger = logging.getLogger("fp8_backends")

# Recipes


def _checks_names(cls: type) -> type:
    """`dataclass`, whose `__init__` understands NeMo's names and explains an unknown field."""
    cls = dataclass(eq=False, repr=False)(cls)
    generated = cls.__init__

    @functools.wraps(generated)
    def __init__(self, *args, **kwargs):
        own = _field_names(type(self))
        kwargs, renamed = own_names(kwargs)
        if renamed and not args and "backend" in own:
            kwargs.setdefault("backend", "te")
        for name in kwargs:
            if name not in own:
                raise unknown_field(name, type(self).__name__, own, _fields_by_handler())
        generated(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


@_checks_names
class Recipe(KwargsHandler):
    """What every recipe has. None stands for "not given"; a recipe that was made has every default filled in.

    A recipe is fixed once it is made. Two are equal when they mean the same, however they were spelled. Beside its
    fields it has `compute` ("native", "te", "ao", or a registered name), `scaling`, `level` ("O0" to "O3"), `name`
    (the canonical backend string), `given` (the names of what the user said) and the fields of every other backend,
    at their defaults. A process group in it is described by its ranks, `fp8_group_ranks`.
    """

    backend_name: ClassVar[str] = AUTO

    include: tuple[str, ...] | None = field(default=None, kw_only=True)
    """Name patterns (fnmatch, over the full module name; without a dot also any one part of it) to convert."""
    exclude: tuple[str, ...] | None = field(default=None, kw_only=True)
    """Name patterns to keep in high precision."""
    module_filter_func: Callable | None = field(default=None, kw_only=True)
    """(module, name) -> whether to convert the module. Accelerate's name."""
    autocast_dtype: str | None = field(default=None, kw_only=True)
    """What runs around FP8 under Accelerate: "bf16" (default; "fp32" on a CPU without bf16 products), "fp16" or
    "fp32"."""
    gradient_comm: str | None = field(default=None, kw_only=True)
    """How gradients travel between ranks: "fp8" (default at a level above O0) or "plain" (default at O0)."""
    on_unproven: str | None = field(default=None, kw_only=True)
    """What to do when no FP8 product ran in the first step: "raise" (default) or "warn"."""

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        self.__dict__.update(_settled(type(self), given))
        if self.compute != AUTO:
            _check(self)

    @property
    def name(self) -> str:
        """The canonical backend string; `auto` until `resolve` has picked one."""
        if self.compute == AUTO:
            return AUTO
        level = f"+msamp:{self.level}" if self.level != "O0" or "level" in self.given else ""
        return f"{self.compute}:{self.scaling}{level}"

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that were given: `type(recipe)(**recipe.to_kwargs()) == recipe`."""
        return {name: getattr(self, name) for name in _field_names(type(self)) if name in self.given}

    def to_dict(self) -> dict[str, Any]:
        """Every field with its value."""
        return {"name": self.name} | {name: copy.deepcopy(self._plain(name)) for name in FIELDS}

    def _plain(self, name: str) -> Any:
        """The field's value; the ranks in place of a process group, which means nothing outside of its process."""
        return self.__dict__["fp8_group_ranks" if name == "fp8_group" else name]

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
        return self.name == other.name and all(self._plain(name) == other._plain(name) for name in FIELDS)

    def __hash__(self) -> int:
        return hash(self.name)

    def __copy__(self) -> Recipe:
        return _with_attributes(type(self), dict(self.__dict__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        memo[id(self.fp8_group)] = self.fp8_group  # the one thing that a process has once
        return _with_attributes(type(self), copy.deepcopy(self.__dict__, memo))

    def __reduce__(self) -> tuple:
        absent = None if self.fp8_group is None else AbsentGroup(self.fp8_group_ranks)
        return _with_attributes, (type(self), {**self.__dict__, "fp8_group": absent})

    def __repr__(self) -> str:
        given = [f"{name}={self._plain(name)!r}" for name in self.to_kwargs() if name in FIELDS]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"


@_checks_names
class TERecipeKwargs(Recipe):
    """TransformerEngine's products: `te:delayed`, or the scaling named. The fields of Accelerate's handler."""

    backend_name: ClassVar[str] = "te"

    use_autocast_during_eval: bool | None = None
    """FP8 products in evaluation too (default: high precision)."""
    margin: int | None = None
    """The scale is divided by 2**margin. `delayed` only."""
    interval: int | None = None
    """Steps between two computations of the scale. `delayed` only."""
    fp8_format: str | None = None
    """"HYBRID": E4M3 forward and E5M2 gradients. "E4M3": E4M3 everywhere."""
    amax_history_len: int | None = None
    """Steps that the amax history holds (default 1024). `delayed` only."""
    amax_compute_algo: str | None = None
    """"most_recent" (default) or "max" of the history. `delayed` only."""
    override_linear_precision: tuple[bool, bool, bool] | None = None
    """fprop, dgrad, wgrad in high precision."""
    use_mxfp8_block_scaling: bool | None = None
    """The same as scaling="mxfp8"."""
    fp8_params: bool | None = None
    """TransformerEngine keeps weights that do not train in FP8 (default: as they are). Not with a level, which keeps
    weights itself."""
    fp8_group: Any = None
    """A `torch.distributed.ProcessGroup`: the ranks over which an amax is reduced (default: all). `delayed` only."""
    fuse_norms: bool | None = None
    """A norm that one Linear alone reads is computed by that Linear's kernel (default False)."""
    fp8_dpa: bool | None = None
    """Attention in FP8: refused unless False."""
    fp8_mha: bool | None = None
    """As `fp8_dpa`."""
    scaling: str | None = None
    """"delayed" (default), "dynamic", "blockwise", "mxfp8"."""


@_checks_names
class AORecipeKwargs(Recipe):
    """TorchAO's products: `ao:tensorwise`, or the scaling named. The fields of Accelerate's handler."""

    backend_name: ClassVar[str] = "ao"

    config: Any = None
    """A `torchao.float8.Float8LinearConfig`, used as it is."""
    pad_inner_dim: bool | None = None
    """Pad products whose inner dimension is no multiple of 16 (default True)."""
    enable_fsdp_float8_all_gather: bool | None = None
    """Gather weights in FP8 under FSDP2 (default False)."""
    scaling: str | None = None
    """"tensorwise" (default), "rowwise", "rowwise_with_gw_hp"."""
    auto_filter: bool | None = None
    """Leave layers in high precision that TorchAO finds too small to gain."""


@_checks_names
class MSAMPRecipeKwargs(Recipe):
    """MS-AMP's levels on native products: `native:window+msamp:LEVEL`."""

    backend_name: ClassVar[str] = "msamp"

    opt_level: str | None = None
    """"O1", "O2" (default), "O3"; "O0" leaves weights and optimizer states alone."""
    rounding: str | None = None
    """Of stored weights and Adam states: "stochastic" (default), or "nearest", MS-AMP's, which loses small updates."""
    exp_avg_scaling: str | None = None
    """One scale of the E4M3 exp_avg for the "tensor" (default), or one for each "block" of 128 elements, which keeps
    magnitudes apart that differ by more than 1e5 inside one tensor."""
    implementation: str | None = None
    """"native" (default), or "original": hand over to the package `msamp`, where it is installed."""
    shard_states: bool | None = None
    """Under DDP, masters and Adam states of O3 lie on one rank each (default True): 2 + 5/N bytes an element, not 7."""


@_checks_names
class NativeRecipeKwargs(Recipe):
    """This package's own products: `native:dynamic`, or the scaling named."""

    backend_name: ClassVar[str] = "native"

    scaling: str | None = None
    """"dynamic" (default), "delayed" (TransformerEngine's rule), "rowwise", "window" (MS-AMP's rule)."""
    fp8_format: str | None = None
    """"HYBRID": E4M3 forward and E5M2 gradients. "E4M3": E4M3 everywhere."""
    margin: int | None = None
    """The scale is divided by 2**margin. `delayed` only."""
    interval: int | None = None
    """Steps between two computations of the scale. `delayed` only."""
    amax_history_len: int | None = None
    """Steps that the amax history holds (default 1024). `delayed` only."""
    amax_compute_algo: str | None = None
    """"most_recent" (default) or "max" of the history. `delayed` only."""
    override_linear_precision: tuple[bool, bool, bool] | None = None
    """fprop, dgrad, wgrad in high precision."""
    use_autocast_during_eval: bool | None = None
    """FP8 products in evaluation too (default: high precision)."""
    fp8_params: bool | None = None
    """Weights that do not train are kept in FP8, 1 byte an element (default: as they are). Not with a level, which
    keeps weights itself."""


@_checks_names
class FP8RecipeKwargs(Recipe):
    """Any backend by its string, with the fields that this backend has."""

    backend: str | None = None
    """A backend string; None is "auto"."""
    opt_level: str | None = None
    rounding: str | None = None
    exp_avg_scaling: str | None = None
    implementation: str | None = None
    shard_states: bool | None = None
    scaling: str | None = None
    fp8_format: str | None = None
    margin: int | None = None
    interval: int | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_autocast_during_eval: bool | None = None
    use_mxfp8_block_scaling: bool | None = None
    fp8_params: bool | None = None
    fp8_group: Any = None
    fuse_norms: bool | None = None
    fp8_dpa: bool | None = None
    fp8_mha: bool | None = None
    config: Any = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    auto_filter: bool | None = None


def _with_attributes(cls: type[Recipe], attributes: dict[str, Any]) -> Recipe:
    """A recipe that was settled before."""
    recipe = cls.__new__(cls)
    recipe.__dict__.update(attributes, fp8_group=present(attributes["fp8_group"]))
    return recipe


HANDLERS = (TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs, NativeRecipeKwargs)


def _field_names(cls: type) -> list[str]:
    return [f.name for f in fields(cls)]


def _fields_by_handler() -> dict[str, list[str]]:
    return {cls.__name__: _field_names(cls) for cls in HANDLERS}


# From what was given to what it means


def _settled(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """Every attribute of a recipe, from the fields that were given. Raises `RecipeError`."""
    values = {name: parse_field(name, value) for name, value in given.items() if name in FIELDS}
    asked = _asked_backend(cls, given, values)
    compute, level = asked.compute, asked.level or "O0"
    scaling = asked.scaling
    if scaling is None and compute != AUTO:
        scaling = registry.get_compute(compute).scaling_for(level, values)
    said = {"scaling": asked.scaling, "level": asked.level}
    settled = {name: rule.default for name, rule in FIELDS.items()}
    settled |= {"fp8_format": FORMAT_OF_SCALING.get(scaling, "HYBRID")} | values
    settled |= {"use_mxfp8_block_scaling": scaling == "mxfp8", "backend": given.get("backend")}
    settled |= {"compute": compute, "scaling": scaling, "level": level, "opt_level": level}
    settled["fp8_group_ranks"] = ranks_of(settled["fp8_group"])
    settled["given"] = frozenset(given) | {name for name, value in said.items() if value is not None}
    return settled


def _asked_backend(cls: type, given: dict[str, Any], values: dict[str, Any]) -> BackendName:
    """What string and fields say together, in the compute's own words. They may not disagree."""
    text = given.get("backend", cls.backend_name)
    if not isinstance(text, str):
        raise RecipeError(f"backend={text!r}: a backend string is wanted, such as 'native:delayed'")
    compute, scaling, level = parse_backend(text)
    if "scaling" in given:
        scaling = _agreed(text, scaling, "scaling", scaling_name(compute, given["scaling"], given["scaling"]))
    if "use_mxfp8_block_scaling" in values:
        scaling = _mxfp8_agreed(text, compute, scaling, values["use_mxfp8_block_scaling"])
    if "opt_level" in given:
        level = _agreed(text, level or None, "opt_level", level_name(given["opt_level"], given["opt_level"]))
    return BackendName(compute, scaling, DEFAULT_LEVEL if level == "" else level)


def _agreed(text: str, said: str | None, name: str, value: str) -> str:
    if said is not None and said != value:
        raise RecipeError(f"{text!r} says {said} and {name} says {value}: leave one of the two out")
    return value


def _mxfp8_agreed(text: str, compute: str, scaling: str | None, wanted: bool) -> str | None:
    if not wanted and scaling == "mxfp8":
        raise RecipeError(f"{text!r} with scaling mxfp8 and use_mxfp8_block_scaling=False disagree: leave one out")
    if not wanted:
        return scaling
    return _agreed(text, scaling, "use_mxfp8_block_scaling", scaling_name(compute, "mxfp8", "use_mxfp8_block_scaling"))


def _check(recipe: Recipe) -> None:
    """Refuse what this compute, scaling and level cannot honour on any machine."""
    compute = registry.get_compute(recipe.compute)
    levels = registry.levels_of(recipe.compute)
    if recipe.level not in levels:
        others = ", ".join(name for name in registry.BUILT_IN if len(registry.levels_of(name)) > 1)
        raise RecipeError(
            f"{recipe.name}: {recipe.compute} goes with {', '.join(levels)} only, its weights stay as they are; "
            f"computes that go with msamp: {others}"
        )
    if recipe.scaling == "custom" and recipe.config is None:
        raise RecipeError("ao:custom stands for a Float8LinearConfig of your own: pass config=")
    for name in sorted((recipe.given & FIELDS.keys()) - {*COMMON_FIELDS, "use_mxfp8_block_scaling"}):
        _check_read(name, recipe, compute)
    compute.check(recipe)


def _check_read(name: str, recipe: Recipe, compute: Compute) -> None:
    """Refuse a field that this compute, scaling and level do not read."""
    rule = FIELDS[name]
    if rule.idle is not None and getattr(recipe, name) == rule.idle:
        return
    if recipe.level not in rule.levels:
        level = DEFAULT_LEVEL if DEFAULT_LEVEL in rule.levels else rule.levels[-1]
        raise RecipeError(
            f"{name} is not read by {recipe.name}, only with {_LEVELS_IN_WORDS[rule.levels]}: leave it out, or use "
            f"{recipe.compute if level == 'O0' else f'{recipe.compute}+msamp:{level}'}"
        )
    if name in LEVEL_FIELDS:
        return
    if name not in compute.fields:
        raise RecipeError(f"{name} is not read by {recipe.name}, only by {_readers(name)}: leave it out, or use these")
    if rule.scalings and recipe.scaling not in rule.scalings and set(rule.scalings) & set(compute.scalings):
        raise RecipeError(
            f"{name} is not read by {recipe.name}, only by "
            f"{', '.join(f'{recipe.compute}:{scaling}' for scaling in rule.scalings)}: leave it out, or use that"
        )


_LEVELS_IN_WORDS = {
    ("O1", "O2", "O3"): "a level O1, O2 or O3",
    ("O3",): "level O3, which has masters to share out",
    ("O0",): "weights that no level stores",
}


def _readers(name: str) -> str:
    computes = [compute for compute in registry.BUILT_IN if name in registry.get_compute(compute).fields]
    scalings = FIELDS[name].scalings or ("",)
    return ", ".join(f"{compute}:{scaling}".rstrip(":") for compute in computes for scaling in scalings) or "no backend"


# What users call


def resolve(spec: Any = None) -> Recipe:
    """The recipe that `spec` means, with every default filled in.

    Args:
        spec: a backend string, a recipe of this package, a recipe handler of Accelerate, a dict
            `{"backend": …, field: value}`, a recipe object of TransformerEngine; None or "auto" picks for this machine.

    Raises:
        RecipeError: unknown strings, fields and combinations, each with what is valid. A valid name never fails here
            for want of hardware or libraries: that is for `prepare` to say.
    """
    recipe = _as_recipe(spec)
    return _picked(recipe) if recipe.compute == AUTO else recipe


def from_environment(environ: Mapping[str, str] | None = None) -> Recipe | None:
    """What `FP8_BACKENDS_RECIPE` (from `fp8-backends launch`), else `ACCELERATE_FP8_*` (any case) asks for, or None.

    Of `ACCELERATE_FP8_*` a value that equals the default of Accelerate's launcher counts as not given. Without
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
            if name == "scaling":
                value = scaling_name(recipe.compute, value, value)
            if name in recipe.given and getattr(recipe, name) != value:
                raise RecipeError(f"{name} is {value!r} there and {getattr(recipe, name)!r} in {recipe}: remove one")
        return type(recipe)(**{**recipe.to_kwargs(), **asked}) if asked else recipe
    except RecipeError as error:
        raise RecipeError(f"ACCELERATE_FP8_* in the environment: {error}") from None


def _check_level_has_backend(asked: dict[str, Any], backend: str) -> None:
    if "opt_level" in asked and not any(word in backend.lower() for word in MSAMP):
        level = asked["opt_level"]
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


def _picked(recipe: Recipe) -> Recipe:
    """`auto`, with the compute that suits this machine."""
    if not hardware.fp8_products():
        logger.warning("backend auto: this machine has no FP8 hardware, so FP8 trains slower than bf16 here")
    return FP8RecipeKwargs(**{**recipe.to_kwargs(), "backend": registry.auto_backend()})
