"""Walk a model, choose layers, and swap them in place, for every backend.

The backend builds a carrier, an FP8 layer around the same Parameters; its class and added
attributes move onto the model's own Linear, so every reference to the module stays valid. 3-D
weights of mixtures of experts get FP8 layers as children of the module that multiplies by them.
"""

import difflib
import fnmatch
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from ..compute.interface import ALIGNMENT, Compute, TransposedLinear
from ..compute.registry import compute_of, get_compute
from ..errors import FP8BackendError, RecipeError
from ..recipes.fields import KEPT_IN_BF16
from ..recipes.handlers import Recipe, differences
from ..torch_tools.modules import (
    CONVERSION,
    PLAIN_CONVERSION,
    PREPARED,
    Conversion,
    change_class,
    check_is_module,
    is_engine,
    plain_name,
)
from ..words import counted
from . import features
from .first_step import Observed
from .weight_products import (
    FP8,
    HIGH_PRECISION,
    ConversionReport,
    Found,
    NormLayer,
    WeightProduct,
    find_weight_products,
    layer_obstacle,
    memory_sharers,
    offloaded_modules,
)

MARKS = (CONVERSION, PLAIN_CONVERSION)

ADDED = "added after the model was prepared: prepare it again to convert this layer"


@dataclass
class Prepared:
    """The record of a prepared root."""

    recipe: Recipe
    compute: Compute
    report: ConversionReport
    shared: dict[Recipe, Any] = field(default_factory=dict)
    """Results of `Compute.new_shared`: state for all layers of this model by recipe."""
    attached: dict[tuple[str, Any], Any] = field(default_factory=dict, repr=False, compare=False)
    """What `compute.attach` put into the root, and what it replaced, by (attribute name, hook key);
    the key None stands for the whole attribute."""
    undo: list[Callable[[nn.Module], None]] = field(default_factory=list, repr=False, compare=False)
    """Undo later changes of the root when the model is restored."""
    profiled: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Counts of the last profiled step, for a backend without counters."""
    observed: Observed = field(default_factory=Observed, repr=False, compare=False)
    steps: int = 0
    """Optimizer steps counted for `schedule`."""
    phase: str = ""
    """The word of the running phase of `schedule`; empty before the first."""

    @property
    def name(self) -> str:
        """The backend string, with the layers of `layers`: `native:dynamic + 4 layers mxfp8 + 2
        bf16`."""
        words = Counter(
            product.recipe
            for product in self.report.products
            if product.recipe == KEPT_IN_BF16 or product.recipe and product.state == FP8
        )
        texts = [self.recipe.name]
        for word in sorted(words, key=lambda word: word == KEPT_IN_BF16):
            number = str(words[word]) if texts[1:] else counted(words[word], "layer")
            texts.append(f"{number} {word.removeprefix(f'{self.recipe.compute}:')}")
        return " + ".join(texts)


class Root(NamedTuple):
    """A prepared root."""

    name: str
    """Its name in the model."""
    module: nn.Module
    prepared: Prepared


def convert(model: nn.Module, recipe: Recipe) -> Prepared:
    """Convert the layers of `model` in place for a resolved recipe, all of them or none.

    Converting again with an equal recipe only converts layers added since. Parts converted earlier
    count as converted. A model is converted inside its DDP, DataParallel or `torch.compile`
    wrapper.

    Raises:
        RecipeError: `include` or `exclude` name nothing, or the model is prepared with another
            recipe.
        FP8BackendError: no layer can run in FP8 (a warning if the recipe has `on_unproven="warn"`).
    """
    root = unwrapped(model)
    compute = compute_of(recipe)
    prepared: Prepared | None = root.__dict__.get(PREPARED)
    if prepared is not None:
        _check_same_recipe("this model", prepared.recipe, recipe)
    layer_filter = LayerFilter(recipe)
    weights = _find(root, recipe, layer_filter)
    norms, new_norms = _norms(root, recipe, compute, layer_filter)
    chosen = _choose(weights, layer_filter, norms)
    if prepared is not None and not chosen and not new_norms:
        return prepared
    shared = {} if prepared is None else prepared.shared
    for each in () if prepared else recipe.recipes:
        shared[each] = get_compute(each.compute).new_shared(root, each)
    layers = _build([weight for weight in chosen if not weight.part], shared)
    part_layers = []
    if parts := [weight for weight in chosen if weight.part]:
        part_layers = _build_parts(parts, shared)
    if recipe.fast_accumulation is not True:
        _turn_off_fast_accumulation(recipe, weights, layers, part_layers)
    report = ConversionReport([weight.product for weight in weights], norms)
    if not report.converted:
        message = f"{recipe.name}: no layer of this model can run in FP8. {report if weights else 'It has no Linear.'}"
        if recipe.on_unproven == "raise":
            raise FP8BackendError(f'{message}\non_unproven="warn" goes on without FP8')
        warnings.warn(message, stacklevel=3)
    carriers = {weight.module: carrier for weight, carrier in layers}
    if fused_head := features.wanted("fused_head", recipe):
        new_norms += fused_head.defer_logits(root, weights, recipe, compute, carriers)
    swaps = [(weight.module, carrier, weight.recipe, CONVERSION) for weight, carrier in layers]
    swaps += [(*layer, recipe, PLAIN_CONVERSION) for layer in new_norms]
    new = Prepared(recipe, compute, report, shared) if prepared is None else None
    _swap_all(root, swaps, part_layers, new)
    prepared = prepared or new
    prepared.report = report
    root.__dict__[PREPARED] = prepared
    return prepared


def _swap_all(root: nn.Module, swaps: list, part_layers: list, new: Prepared | None) -> None:
    """Swap layers, attach those of parts and the hooks of a new root; undo everything on an
    error."""
    with ExitStack() as undo:
        for module, *swap in swaps:
            undo.callback(restore_layer, module)
            swap_class(module, *swap)
        for module, layers, recipe in part_layers:
            for layer in layers.values():
                layer.__dict__[CONVERSION] = Conversion(
                    type(layer), type(layer), (), recipe, [type(layer).detach]
                )
                undo.callback(restore_layer, layer)
            layers.attach(module)
        if new is not None:
            undo.callback(_detach, root, new)
            before = _attributes_and_hooks(root)
            try:
                for recipe, shared in new.shared.items():
                    get_compute(recipe.compute).attach(root, recipe, shared)
            finally:
                new.attached = {
                    place: (added, before.get(place))
                    for place, added in _attributes_and_hooks(root).items()
                    if before.get(place) is not added
                }
        undo.pop_all()


def restore(model: nn.Module) -> None:
    """Undo `prepare` on a model and all its parts, in place: plain layers again, with their current
    Parameters.

    Weights hold their exact values in their nominal dtype. The optimizer stays unchanged.

    Args:
        model: prepared, or holds prepared models; any other stays unchanged.

    Raises:
        FP8BackendError: a converted layer was wrapped since, such as by FSDP2; or another object
            refers to a weight stored in another form, named; or `model` is no module.
    """
    check_is_module(model)
    modules = list(model.modules())
    for name, module in model.named_modules():
        conversion = next(
            (module.__dict__[mark] for mark in MARKS if mark in module.__dict__), None
        )
        if conversion is not None and type(module) is not conversion.converted:
            raise FP8BackendError(
                f"{name}: restore before wrapping: its class is {type(module).__name__} now"
            )
    for module in modules:
        restore_layer(module)
        prepared = module.__dict__.pop(PREPARED, None)
        if prepared is not None:
            _detach(module, prepared)


def prepared_roots(*models: nn.Module) -> list[Root]:
    """Return each prepared root outside any other of its model, inside any wrapper."""
    roots = []
    for model in models:
        found = [
            Root(name, module, module.__dict__[PREPARED])
            for name, module in model.named_modules()
            if PREPARED in module.__dict__
        ]
        inner = {id(part) for _, root, _ in found for part in root.modules() if part is not root}
        roots += [root for root in found if id(root.module) not in inner]
    return roots


def weight_products(model: nn.Module) -> list[WeightProduct]:
    """Return the weight products of any model, prepared or not, with the reasons that need no
    recipe."""
    return [weight.product for weight in find_weight_products(unwrapped(model))]


def expected(model: nn.Module, recipe: Recipe) -> ConversionReport:
    """Predict the report of `convert`, without norms. The model stays unchanged. Raise
    `RecipeError` as `convert`."""
    root = unwrapped(model)
    layer_filter = LayerFilter(recipe)
    weights = _find(root, recipe, layer_filter)
    norms = [
        name for name, module in root.named_modules() if "norm" in type(module).__name__.lower()
    ]
    _choose(weights, layer_filter, [NormLayer(plain_name(name), False, None) for name in norms])
    return ConversionReport([weight.product for weight in weights])


def update_report(root: nn.Module, prepared: Prepared) -> list[str]:
    """Update the report of a prepared root for its current layers. Return the names of convertible
    ones added since."""
    known = {product.name: product for product in prepared.report.products}
    layer_filter = LayerFilter(prepared.recipe)
    products = []
    for weight in _find(root, prepared.recipe, layer_filter):
        product = weight.product
        is_converted = weight.conversion is not None
        before = known.get(product.name)
        if (
            before is not None
            and (before.state == FP8) == is_converted
            and before.sizes == product.sizes
        ):
            product = before
        elif product.state == HIGH_PRECISION:
            product.reason = _reason_against(weight, layer_filter) or ADDED
        products.append(product)
    prepared.report.products = products
    return [product.name for product in products if product.reason == ADDED]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `torch.compile`, DDP, DataParallel and DeepSpeed's engine."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or is_engine(
            model
        ):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod
        else:
            return model


# Choose layers


class LayerFilter:
    """The user's choice of layers: `exclude` overrides all, then `layers`; then a layer must match
    `include` and pass `module_filter_func`. Heads, routers and adapters stay out unless a pattern
    of `include` with `+` names them."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.layers = recipe.layers or {}
        patterns = recipe.include or ()
        self.include = [pattern for pattern in patterns if not pattern.startswith("+")]
        self.added = [pattern[1:] for pattern in patterns if pattern.startswith("+")]
        self.exclude = recipe.exclude or ()
        self.accepts = recipe.module_filter_func

    def check(self, weights: list[Found], norms: list[NormLayer]) -> None:
        """Raise `RecipeError` for a pattern without a match, or one of `include` that matches only
        obstacles."""
        for pattern in (*self.include, *self.added):
            matched = _matched("include", pattern, weights)
            if all(weight.obstacle for weight in matched):
                raise RecipeError(
                    f"include: {pattern!r} matches only weights that cannot be converted, such as "
                    f"{matched[0].product.name}: {matched[0].obstacle}"
                )
        named = [pattern for pattern, word in self.layers.items() if isinstance(word, str)]
        for name, patterns in (("exclude", self.exclude), ("layers", named)):
            for pattern in patterns:
                if not any(_matches(pattern, norm) for norm in norms):
                    _matched(name, pattern, weights)
        blocks = len(_block_names(weights)) if self.layers else 0
        for name, word in self.layers.items():
            if isinstance(word, int) and word >= blocks:
                raise RecipeError(
                    f"layers: {name}={word}, and this model has {blocks} numbered blocks"
                )

    def take_classes(self, weights: list[Found]) -> None:
        """Take Linear subclasses by their name in `include`, whose forward only multiplies."""
        for weight in weights:
            cls = type(weight.module)
            if weight.conversion is not None:
                cls = weight.conversion.original
            if cls is nn.Linear or not issubclass(cls, nn.Linear):
                continue
            is_named = cls.__name__ in (*self.include, *self.added)
            if is_named and weight.obstacle == layer_obstacle(weight.module, nn.Linear):
                weight.subclass = cls.__name__
                weight.product.aliases += (cls.__name__,)
                weight.obstacle = layer_obstacle(weight.module, cls)

    def assign_recipes(self, weights: list[Found]) -> None:
        """Give each weight its recipe. A pattern without any other layer overrides default
        exclusions. Layers that the recipe names stay in FP8, small or not."""
        for weight in weights:
            weight.recipe = self.recipe
        blocks = _block_names(weights) if self.layers else []
        for pattern, word in self.layers.items():
            if isinstance(word, int):
                names = blocks[:word] if pattern == "first" else blocks[-word:]
                matched = [weight for weight in weights if _block_of(weight.product) in names]
            else:
                matched = [weight for weight in weights if _matches(pattern, weight.product)]
            named = all(weight.default_exclusion for weight in matched)
            for weight in matched:
                if weight.product.recipe:
                    continue  # by an earlier pattern
                weight.product.recipe = KEPT_IN_BF16 if isinstance(word, int) else word
                weight.recipe = self.recipe.by_backend.get(weight.product.recipe)
                weight.default_exclusion = None if named else weight.default_exclusion
        if small_layers := features.wanted("small_layers", self.recipe):
            unnamed = [
                weight
                for weight in weights
                if not weight.product.recipe
                and not any(_matches(pattern, weight.product) for pattern in self.added)
            ]
            small_layers.keep_in_bf16(unnamed, self.recipe)

    def exclusion(self, weight: Found) -> str | None:
        product = weight.product
        if reason := self.excluded(product):
            return reason
        if product.recipe:
            return "in bf16 by layers" if weight.recipe is None else weight.default_exclusion
        if self.include and not any(_matches(pattern, product) for pattern in self.include):
            return "not named in include"
        if self.accepts is not None and not self.accepts(weight.module, product.name):
            return "left out by module_filter_func"
        if self.include or self.accepts is not None:
            return None
        if any(_matches(pattern, product) for pattern in self.added):
            return None
        return weight.default_exclusion

    def excluded(self, layer: WeightProduct | NormLayer) -> str | None:
        for pattern in self.exclude:
            if _matches(pattern, layer):
                return f"left out by exclude={pattern!r}"
        return None

    def excluded_norm(self, norm: NormLayer) -> str | None:
        words = (
            word
            for pattern, word in self.layers.items()
            if isinstance(word, str) and _matches(pattern, norm)
        )
        by_layers = "in bf16 by layers" if next(words, None) == KEPT_IN_BF16 else None
        return self.excluded(norm) or by_layers


def _matches(pattern: str, layer: WeightProduct | NormLayer) -> bool:
    """Match an fnmatch pattern with any full name of a layer; without a dot also with any single
    segment of it."""
    names = [layer.name, *layer.aliases]
    segments = [] if "." in pattern else [segment for name in names for segment in name.split(".")]
    return any(fnmatch.fnmatchcase(name, pattern) for name in (*names, *segments))


def _matched(field_name: str, pattern: str, weights: list[Found]) -> list[Found]:
    if matched := [weight for weight in weights if _matches(pattern, weight.product)]:
        return matched
    names = [weight.product.name for weight in weights]
    words = {*names, *(part for name in names for part in name.split("."))}
    near = difflib.get_close_matches(pattern, sorted(words), n=3) or names[:3]
    raise RecipeError(
        f"{field_name}: no weight of this model matches {pattern!r}; names are such as "
        f"{', '.join(map(repr, near))}. A pattern without a dot matches any one part of a name; "
        "'a.b.*' matches all inside a.b"
    )


def _turn_off_fast_accumulation(
    recipe: Recipe, weights: list[Found], layers: list[tuple[Found, nn.Module]], part_layers: list
) -> None:
    """Turn it off in new layers named by the recipe. Raises `RecipeError` for a pattern without an
    FP8 layer."""
    built = {(weight.module, ""): carrier for weight, carrier in layers}
    built |= {
        (module, part): layer for module, parts, _ in part_layers for part, layer in parts.items()
    }
    for pattern in recipe.fast_accumulation or (None,):
        matched = weights if pattern is None else _matched("fast_accumulation", pattern, weights)
        if pattern is not None and all(weight.product.state != FP8 for weight in matched):
            name = matched[0].product.name
            raise RecipeError(
                f"fast_accumulation: {pattern!r} matches only layers in high precision, such as "
                f"{name}"
            )
        for weight in matched:
            carrier = built.get((weight.module, weight.part))
            if carrier is not None and weight.recipe.fast_accumulation is not True:
                get_compute(weight.recipe.compute).turn_off_fast_accumulation(carrier)


def _find(root: nn.Module, recipe: Recipe, layer_filter: LayerFilter) -> list[Found]:
    """Return the weight products of a model, with the obstacles of recipes that store weights in
    another form."""
    weights = find_weight_products(root)
    if recipe.include:
        layer_filter.take_classes(weights)
    layer_filter.assign_recipes(weights)
    if recipe.level == "O0" and not recipe.fp8_params:
        return weights
    sharers = memory_sharers(root)
    offloaded = offloaded_modules(root)
    for weight in weights:
        if weight.obstacle is not None or weight.conversion is not None:
            continue
        if id(weight.module) in offloaded:
            weight.obstacle = (
                "Accelerate's hooks put a plain weight in place for each forward (cpu_offload, "
                "disk_offload, a device_map), which cannot be stored in another form: offload the "
                "model when it is prepared"
            )
        elif (
            other := sharers.get(id(weight.module._parameters.get(weight.part or "weight")))
        ) is not None:
            weight.obstacle = (
                f"it lies in the same memory as {other}, and would be stored apart from it: let "
                "one Parameter have both names (a.weight = b.weight), or clone one of the two"
            )
    return weights


def _block_of(product: WeightProduct) -> str | None:
    """Return the name of the outermost numbered block around a weight, such as `model.layers.0`."""
    match = re.match(r"(.*?\.)?\d+(?=\.|$)", product.name)
    return match and match[0]


def _block_names(weights: list[Found]) -> list[str]:
    return list(dict.fromkeys(filter(None, (_block_of(weight.product) for weight in weights))))


def _choose(weights: list[Found], layer_filter: LayerFilter, norms: list[NormLayer]) -> list[Found]:
    """Return the weights to convert now. Write the state and reason of every product."""
    chosen = []
    layer_filter.check(weights, norms)
    for weight in weights:
        product = weight.product
        conversion = weight.conversion
        if conversion is not None:
            _check_same_recipe(
                f"layer {product.name!r}", conversion.recipe, weight.recipe or layer_filter.recipe
            )
        elif reason := _reason_against(weight, layer_filter):
            product.reason = reason
            continue
        else:
            chosen.append(weight)
        product.state = FP8
        notes = (
            [get_compute(weight.recipe.compute).parts.note(weight.recipe)] if weight.part else []
        )
        if weight.subclass:
            notes.append(f"a {weight.subclass}, multiplied as nn.Linear by include")
        if product.in_features % ALIGNMENT or product.out_features % ALIGNMENT:
            notes.append(f"sizes padded to multiples of {ALIGNMENT}")
        product.reason = "; ".join(filter(None, notes)) or None
    return chosen


def _reason_against(weight: Found, layer_filter: LayerFilter) -> str | None:
    if reason := weight.obstacle or layer_filter.exclusion(weight):
        return reason
    recipes = [weight.recipe]
    if weight.recipe is layer_filter.recipe:
        recipes += filter(None, weight.recipe.by_phase.values())
    return next(filter(None, (_unfit(weight, recipe) for recipe in recipes)), None)


def _unfit(weight: Found, recipe: Recipe) -> str | None:
    compute = get_compute(recipe.compute)
    if weight.part:
        if compute.parts is None:
            return f"expert weights in one 3-D Parameter: {compute.name} has no products for them (native and te have)"
        return compute.parts.unfit(weight.module, weight.part, recipe)
    if isinstance(weight.linear, TransposedLinear) and not compute.takes_transposed:
        kind = weight.product.kind
        return f"{kind}, whose weight lies transposed: {compute.name} has no products for it (native has)"
    return compute.unfit(weight.linear, recipe)


def _norms(
    root: nn.Module, recipe: Recipe, compute: Compute, layer_filter: LayerFilter
) -> tuple[list[NormLayer], list[tuple[nn.Module, nn.Module]]]:
    """Return the report of the model's norms, and the norms to swap now with their carriers."""
    answers = {norm.module: norm for norm in compute.norms(root, recipe)}
    names_of: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        is_swapped = PLAIN_CONVERSION in module.__dict__ and not isinstance(module, nn.Linear)
        if module in answers or is_swapped:
            names_of.setdefault(module, []).append(plain_name(name))
    report = []
    new = []
    for module, names in names_of.items():
        answer = answers.get(module)
        layer = NormLayer(names[0], answer is None, None, tuple(names[1:]))
        if answer is not None:
            layer.reason = layer_filter.excluded_norm(layer) or answer.reason
            layer.swapped = layer.reason is None
            if layer.swapped:
                new.append((module, answer.carrier))
        report.append(layer)
    return report, new


def _check_same_recipe(what: str, had: Recipe, wanted: Recipe) -> None:
    differing = differences(had.to_dict(), wanted.to_dict())
    if had.name == wanted.name and not differing:
        return
    difference = f" (they differ in {', '.join(differing)})" if had.name == wanted.name else ""
    raise RecipeError(
        f"{what} is prepared with {had.name} already, and {wanted.name} is asked for{difference}: "
        "call fp8_backends.restore(model) first, or prepare a copy of the model made before"
    )


# Swap layers

_OF_EVERY_LAYER = frozenset(nn.Linear(1, 1, device="meta").__dict__)


def swap_class(
    linear: nn.Module, carrier: nn.Module, recipe: Recipe, mark: str = CONVERSION
) -> None:
    """Move the carrier's class and added attributes onto `linear`, and note under `mark` how to
    undo it."""
    # of PyTorch's Linear, a leaf that torch.fx calls as a module
    attributes = _added_attributes(carrier) | {"__module__": nn.Linear.__module__}
    conversion = Conversion(type(linear), type(carrier), tuple(attributes), recipe)
    change_class(linear, type(carrier))
    linear.__dict__.update(attributes)
    linear.__dict__[mark] = conversion


def restore_layer(linear: nn.Module) -> None:
    """Undo `swap_class`, if the module was converted."""
    mark = next((mark for mark in MARKS if mark in linear.__dict__), None)
    if mark is None:
        return
    conversion: Conversion = linear.__dict__.pop(mark)
    for undo in reversed(conversion.undo):
        undo(linear)
    change_class(linear, conversion.original)
    for name in conversion.attributes:
        linear.__dict__.pop(name, None)


def _build(chosen: list[Found], shared: dict[Recipe, Any]) -> list[tuple[Found, nn.Module]]:
    """Return weights with their carriers. A name conflict drops a layer, with the reason noted."""
    layers = []
    for weight in chosen:
        linear = weight.module
        product = weight.product
        compute = get_compute(weight.recipe.compute)
        carrier = compute.build(weight.linear, weight.recipe, shared[weight.recipe])
        if any(
            carrier._parameters.get(key) is not parameter
            for key, parameter in linear._parameters.items()
        ):
            raise FP8BackendError(
                f"{product.name}: build() of the backend {compute.name!r} returned other "
                "Parameters, unknown to the optimizer: it must keep the layer's Parameter objects"
            )
        if carrier._buffers:
            raise FP8BackendError(
                f"{product.name}: build() of the backend {compute.name!r} added buffers "
                f"({', '.join(carrier._buffers)}), missing in earlier copies: it must keep tensors "
                "in plain attributes"
            )
        if taken := [name for name in _added_attributes(carrier) if hasattr(linear, name)]:
            product.state = HIGH_PRECISION
            product.reason = f"it has {', '.join(taken)} of its own, a name that its FP8 form needs"
            continue
        if weight.linear is not linear:
            from . import conv1d

            carrier = conv1d.adapted(carrier)
        layers.append((weight, carrier))
    return layers


def _build_parts(
    chosen: list[Found], shared: dict[Recipe, Any]
) -> list[tuple[nn.Module, Any, Recipe]]:
    """Return modules of experts with their layers and recipe."""
    layers = []
    for module in dict.fromkeys(weight.module for weight in chosen):
        weights = [weight for weight in chosen if weight.module is module]
        recipe = weights[0].recipe
        name = weights[0].product.name
        if any(weight.recipe != recipe for weight in weights):
            raise RecipeError(
                f"layers: the experts of one module share one backend: name {name} by its module"
            )
        parts = get_compute(recipe.compute).parts
        layers.append(
            (module, parts.build(module, [w.part for w in weights], recipe, shared[recipe]), recipe)
        )
    return layers


def _added_attributes(carrier: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in carrier.__dict__.items() if name not in _OF_EVERY_LAYER}


def _detach(root: nn.Module, prepared: Prepared) -> None:
    for undo in prepared.undo:
        undo(root)
    for (name, key), (added, replaced) in prepared.attached.items():
        holder = root.__dict__ if key is None else root.__dict__.get(name, {})
        place = name if key is None else key
        if holder.get(place) is not added:  # others have wrapped or removed it
            continue
        del holder[place]
        if replaced is not None:
            holder[place] = replaced


def _attributes_and_hooks(module: nn.Module) -> dict[tuple[str, Any], Any]:
    """Return instance attributes by (name, None), and hooks by (name, key)."""
    attributes = {(name, None): value for name, value in module.__dict__.items()}
    hooks = {
        (name, key): hook
        for name, hooks in module.__dict__.items()
        if "_hooks" in name and isinstance(hooks, dict)
        for key, hook in hooks.items()
    }
    return attributes | hooks
