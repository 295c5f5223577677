"""Walking a model, choosing layers, and swapping them in place: once, for every backend.

A layer is converted by swapping its class. The backend builds a carrier, an FP8 layer around the same Parameters,
and the carrier's class and added attributes move onto the Linear or `Conv1D` that the model already has. So the module
object stays, and with it every reference to it: Parameters, ties, shared modules, frozen flags, hooks, the optimizer
and its state, weak references. The 3-D weights of experts are the exception: what runs them stands beside them
(`expert_functions`). `restore` turns all back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ..compute import expert_dispatch, expert_functions
from ..compute.conv1d import is_conv1d, linear_like
from ..compute.expert_functions import ExpertWeights
from ..compute.interface import Compute
from ..errors import FP8BackendError, RecipeError
from ..numerics.forwards import follows_class
from ..numerics.modules import CONVERSION, HEAD_CONVERSION, Conversion, check_is_module, plain_name
from ..recipes.handlers import differences
from . import fused_head
from .layer_filter import LayerFilter, NamePattern, excluded
from .observed import Observed
from .report import ConversionReport, NormLayer
from .weight_products import (
    FP8,
    HIGH_PRECISION,
    Found,
    WeightProduct,
    find_weight_products,
    memory_sharers,
    offloaded_modules,
)

if TYPE_CHECKING:
    from ..recipes.handlers import Recipe

ALIGNMENT = 16
"""FP8 products take sizes in multiples of this; a backend that takes others pads them."""

NORM_CONVERSION = "_fp8_norm_conversion"
"""Attribute of a swapped normalisation layer, as `CONVERSION` is of a weight's layer: its `Conversion`."""
MARKS = (CONVERSION, NORM_CONVERSION, HEAD_CONVERSION)

ADDED = "added after the model was prepared: prepare it again to convert this layer"
"""Reason of a layer that `convert` has not seen."""

PREPARED = "_fp8_prepared"
"""Attribute of a prepared root: its `Prepared`."""


@dataclass
class Prepared:
    """What a prepared root remembers."""

    recipe: Recipe
    compute: Compute
    report: ConversionReport
    shared: Any = None
    """What `compute.new_shared` returned: state that all layers of this model share."""
    attached: dict[str, list] = field(default_factory=dict)
    """What `compute.attach` added to the root: attribute name -> hook keys; None stands for the whole attribute."""
    undo: list[Callable[[nn.Module], None]] = field(default_factory=list, repr=False, compare=False)
    """What others did to the root since, to be undone when the model is restored."""
    profiled: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Counts of the last profiled step, for a backend that does not count by itself."""
    observed: Observed = field(default_factory=Observed, repr=False, compare=False)
    """What the first optimizer step showed."""


def convert(model: nn.Module, recipe: Recipe, compute: Compute) -> Prepared:
    """Convert the layers of `model` in place for a resolved recipe, all of them or none.

    Converting again with an equal recipe changes nothing, but for layers that were added meanwhile. Layers of a part
    that was converted before, on its own or as part of another model, count as converted.

    Args:
        model: any `nn.Module`, an `nn.Linear` included; on any device, meta too. Converted inside its DDP,
            DataParallel or `torch.compile` wrapper.

    Raises:
        RecipeError: `include` or `exclude` name nothing, or the model is prepared with another recipe.
        FP8BackendError: no layer can run in FP8 (a warning where the recipe says `on_unproven="warn"`).
    """
    root = unwrapped(model)
    prepared: Prepared | None = root.__dict__.get(PREPARED)
    if prepared is not None:
        _check_same_recipe("this model", prepared.recipe, recipe)
    found = _find(root, recipe)
    norms, new_norms = _norms(root, recipe, compute)
    chosen = _choose(found, recipe, compute, norms)
    if prepared is not None and not chosen and not new_norms:
        return prepared
    shared = compute.new_shared(root, recipe) if prepared is None else prepared.shared
    head = fused_head.find(root, found, recipe, compute) if recipe.fused_head else None
    built = _build([each for each in chosen if not each.part], recipe, compute, shared, head)
    experts = _build_experts([each for each in chosen if each.part], recipe, compute, shared)
    report = ConversionReport([each.product for each in found], norms)
    if not report.converted:
        message = f"{recipe.name}: no layer of this model can run in FP8. {report if found else 'It has no Linear.'}"
        if recipe.on_unproven == "raise":
            raise FP8BackendError(f'{message}\non_unproven="warn" goes on without FP8')
        warnings.warn(message, stacklevel=3)
    is_new = prepared is None
    prepared = prepared or Prepared(recipe, compute, report, shared)
    try:
        for linear, carrier in built:
            swap_class(linear, carrier, recipe)
        for norm, carrier in new_norms:
            swap_class(norm, carrier, recipe, NORM_CONVERSION)
        if head is not None and head.product.state != FP8:
            swap_class(head.module, fused_head.high_precision_carrier(head.module), recipe, HEAD_CONVERSION)
        for module, weights in experts:
            expert_functions.attach(module, weights)
            if recipe.activation_comm == "fp8":
                expert_dispatch.install(module)
        if is_new:
            _attach(root, prepared)
    except BaseException:
        for module, _ in (*built, *new_norms):
            restore_layer(module)
        if head is not None:
            restore_layer(head.module)
        for module, weights in experts:
            expert_dispatch.uninstall(module)
            expert_functions.detach(module, list(weights))
        if is_new:
            _detach(root, prepared)
        raise
    prepared.report = report
    root.__dict__[PREPARED] = prepared
    return prepared


def restore(model: nn.Module) -> None:
    """Undo `prepare` on a model and all its parts, in place: plain layers again, with the Parameters of this moment.

    Weights hold their exact values, in the dtype that they stand for. The optimizer stays what it is.

    Args:
        model: prepared, or holds prepared models; any other stays as it is.

    Raises:
        FP8BackendError: a converted layer was wrapped since, such as by FSDP2; or something else holds on to a weight
            that is stored in another form, named; or `model` is no module.
    """
    check_is_module(model)
    modules = list(model.modules())
    for name, module in model.named_modules():
        conversion = next((module.__dict__[mark] for mark in MARKS if mark in module.__dict__), None)
        if conversion is not None and type(module) is not conversion.converted:
            raise FP8BackendError(
                f"{name}: its class is {type(module).__name__} now, so it cannot be restored: "
                "restore a model before it is wrapped"
            )
    for module in modules:
        restore_layer(module)
        expert_dispatch.uninstall(module)
        expert_functions.detach(module)
        prepared = module.__dict__.pop(PREPARED, None)
        if prepared is not None:
            _detach(module, prepared)


def prepared_roots(model: nn.Module) -> list[tuple[str, nn.Module, Prepared]]:
    """(name in `model`, module, `Prepared`) of each prepared root, found inside any wrapper.

    Each root once; one that lies inside another prepared root is part of that one and not listed.
    """
    roots = [(name, module, module.__dict__[PREPARED]) for name, module in model.named_modules() if is_root(module)]
    inner = {id(part) for _, root, _ in roots for part in root.modules() if part is not root}
    return [root for root in roots if id(root[1]) not in inner]


def is_root(module: nn.Module) -> bool:
    """Whether `convert` was called on this very module."""
    return PREPARED in module.__dict__


def weight_products(model: nn.Module) -> list[WeightProduct]:
    """The weight products of any model, prepared or not. Without a recipe the reasons are those that need none."""
    found = find_weight_products(unwrapped(model))
    for each in found:
        if each.conversion is not None:
            each.product.state = FP8
        else:
            each.product.reason = each.obstacle or each.default_exclusion or "not prepared"
    return [each.product for each in found]


def expected(model: nn.Module, recipe: Recipe, compute: Compute) -> ConversionReport:
    """What `convert` would make of the weight products of `model`, which stays as it is. Norms are left out.

    Raises `RecipeError` as `convert` does.
    """
    root = unwrapped(model)
    found = _find(root, recipe)
    norms = [name for name, module in root.named_modules() if "norm" in type(module).__name__.lower()]
    _choose(found, recipe, compute, [NormLayer(plain_name(name), False, None) for name in norms])
    return ConversionReport([each.product for each in found])


def update_report(root: nn.Module, prepared: Prepared) -> list[str]:
    """Bring the report of a prepared root up to date with the layers that the model has now. Returns the names of those
    that came after `convert`, and that it would convert now."""
    known = {product.name: product for product in prepared.report.products}
    layer_filter = LayerFilter(prepared.recipe)
    products = []
    for each in _find(root, prepared.recipe):
        product, is_converted = each.product, each.conversion is not None
        before = known.get(product.name)
        if before is not None and (before.state == FP8) == is_converted and before.sizes == product.sizes:
            product = before
        elif is_converted:
            product.state = FP8
        elif product.state == HIGH_PRECISION:
            product.reason = _reason_against(each, prepared.recipe, prepared.compute, layer_filter) or ADDED
        products.append(product)
    prepared.report.products = products
    return [product.name for product in products if product.reason == ADDED]


def swaps_weights(recipe: Recipe) -> bool:
    """Whether weights are stored in another form; else every weight stays where it lies."""
    return recipe.level != "O0" or bool(recipe.fp8_params)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that hold it whole: `torch.compile`, DDP, DataParallel."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod
        else:
            return model


# choosing layers


def _find(root: nn.Module, recipe: Recipe) -> list[Found]:
    """The weight products of a model, those that this recipe cannot store with their obstacle."""
    found = find_weight_products(root)
    if not swaps_weights(recipe):
        return found
    sharers, offloaded = memory_sharers(root), offloaded_modules(root)
    for each in found:
        if each.obstacle is None and each.conversion is None and id(each.module) in offloaded:
            each.obstacle = (
                "Accelerate's hooks put a plain weight in place for each forward (cpu_offload, disk_offload, a "
                "device_map), which cannot be stored in another form: offload the model when it is prepared"
            )
        other = sharers.get(id(each.module._parameters.get(each.part or "weight")))
        if each.obstacle is None and each.conversion is None and other is not None:
            each.obstacle = (
                f"it lies in the same memory as {other}, and would be stored apart from it: let one Parameter have "
                "both names (a.weight = b.weight), or clone one of the two"
            )
    return found


def _choose(found: list[Found], recipe: Recipe, compute: Compute, norms: list[NormLayer]) -> list[Found]:
    """The layers to convert now. Writes the state and reason of every product."""
    chosen = []
    layer_filter = LayerFilter(recipe)
    layer_filter.check(found, norms)
    for each in found:
        product, conversion = each.product, each.conversion
        if conversion is not None:
            _check_same_recipe(f"layer {product.name!r}", conversion.recipe, recipe)
        elif reason := _reason_against(each, recipe, compute, layer_filter):
            product.reason = reason
            continue
        else:
            chosen.append(each)
        product.state = FP8
        notes = [compute.note_on_experts(recipe)] if each.part else []
        if product.in_features % ALIGNMENT or product.out_features % ALIGNMENT:
            notes.append(f"sizes padded to multiples of {ALIGNMENT}")
        product.reason = "; ".join(filter(None, notes)) or None
    return chosen


def _reason_against(each: Found, recipe: Recipe, compute: Compute, layer_filter: LayerFilter) -> str | None:
    """Why this weight is not converted, or None where it is to be."""
    return each.obstacle or layer_filter.exclusion(each) or _unfit(each, recipe, compute)


def _unfit(each: Found, recipe: Recipe, compute: Compute) -> str | None:
    if is_conv1d(each.module):
        if compute.takes_conv1d:
            return compute.unfit(linear_like(each.module), recipe)
        return f"Conv1D, whose weight lies transposed: {compute.name} has no products for it (native has)"
    if each.part:
        return compute.unfit_experts(each.module, each.part, recipe)
    return compute.unfit(each.module, recipe)


def _norms(root: nn.Module, recipe: Recipe, compute: Compute) -> tuple[list[NormLayer], list]:
    """The report of the model's norms, and those to swap now with their carriers."""
    answers = {id(norm.module): norm for norm in compute.norms(root, recipe)}
    exclude = [NamePattern(text) for text in recipe.exclude or ()]
    modules: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if id(module) in answers or NORM_CONVERSION in module.__dict__:
            modules.setdefault(id(module), (module, []))[1].append(plain_name(name))
    report, new = [], []
    for key, (module, names) in modules.items():
        layer = NormLayer(names[0], key not in answers, None, tuple(names[1:]))
        if key in answers:
            layer.reason = excluded(layer, exclude) or answers[key].reason
            layer.swapped = layer.reason is None
            if layer.swapped:
                new.append((module, answers[key].carrier))
        report.append(layer)
    return report, new


def _check_same_recipe(what: str, had: Recipe, wanted: Recipe) -> None:
    differing = differences(had.to_dict(), wanted.to_dict())
    if had.name == wanted.name and not differing:
        return
    difference = f" (they differ in {', '.join(differing)})" if had.name == wanted.name else ""
    raise RecipeError(
        f"{what} is prepared with {had.name} already, and {wanted.name} is asked for{difference}: call "
        f"fp8_backends.restore(model) first, or prepare a copy of the model made before"
    )


# swapping layers

_OF_EVERY_LAYER = frozenset(nn.Linear(1, 1, device="meta").__dict__) | {"nf", "nx"}
"""Attributes of every Linear, and the sizes of a `Conv1D`."""


def swap_class(linear: nn.Module, carrier: nn.Module, recipe: Recipe, mark: str = CONVERSION) -> None:
    """Move the carrier's class and added attributes onto `linear`. What `restore_layer` needs is noted under `mark`."""
    attributes = _added_attributes(carrier)
    conversion = Conversion(type(linear), type(carrier), tuple(attributes), recipe)
    with follows_class(linear):
        linear.__class__ = type(carrier)
    linear.__dict__.update(attributes)
    linear.__dict__[mark] = conversion


def restore_layer(linear: nn.Module) -> None:
    """Undo `swap_class`, where the module was converted."""
    mark = next((mark for mark in MARKS if mark in linear.__dict__), None)
    if mark is None:
        return
    conversion: Conversion = linear.__dict__.pop(mark)
    for undo in reversed(conversion.undo):
        undo(linear)
    with follows_class(linear):
        linear.__class__ = conversion.original
    for name in conversion.attributes:
        linear.__dict__.pop(name, None)


def _build(
    chosen: list[Found], recipe: Recipe, compute: Compute, shared: Any, head: Found | None
) -> list[tuple[nn.Module, nn.Module]]:
    """Layers and their carriers, all made before the first layer changes. Some drop out, with the reason noted. `head`:
    the one that is to defer its logits."""
    built = []
    for each in chosen:
        linear, product = each.module, each.product
        build = compute.build_conv1d if is_conv1d(linear) else compute.build
        build = compute.build_head if each is head else build
        carrier = build(linear, recipe, shared)
        if any(carrier._parameters.get(key) is not parameter for key, parameter in linear._parameters.items()):
            raise FP8BackendError(
                f"{product.name}: the backend {compute.name!r} built a layer with other Parameters, which no "
                f"optimizer would know; its build() must hand on the very objects of the layer that it is given"
            )
        if carrier._buffers:
            raise FP8BackendError(
                f"{product.name}: the backend {compute.name!r} built a layer with buffers "
                f"({', '.join(carrier._buffers)}), which a copy made before would not have; its build() must keep "
                f"tensors in attributes that are no buffers"
            )
        taken = [name for name in _added_attributes(carrier) if hasattr(linear, name)]
        if taken:
            product.state = HIGH_PRECISION
            product.reason = f"it has {', '.join(taken)} of its own, a name that its FP8 form needs"
        else:
            built.append((linear, carrier))
    return built


def _build_experts(
    chosen: list[Found], recipe: Recipe, compute: Compute, shared: Any
) -> list[tuple[nn.Module, ExpertWeights]]:
    """Experts modules, each with the layers that stand for those of its weights that are converted now."""
    parts: dict[nn.Module, list[str]] = {}
    for each in chosen:
        parts.setdefault(each.module, []).append(each.part)
    built = [(module, compute.build_experts(module, names, recipe, shared)) for module, names in parts.items()]
    for layer in (layer for _, weights in built for layer in weights.values()):
        layer.__dict__[CONVERSION] = Conversion(type(layer), type(layer), (), recipe)
    return built


def _added_attributes(carrier: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in carrier.__dict__.items() if name not in _OF_EVERY_LAYER}


def _attach(root: nn.Module, prepared: Prepared) -> None:
    """Let the backend install its hooks on the root, and note which, so that `restore` can take them away."""
    before = _names_and_hooks(root)
    try:
        prepared.compute.attach(root, prepared.recipe, prepared.shared)
    finally:
        for name, hooks in _names_and_hooks(root).items():
            if name not in before:
                prepared.attached[name] = None
            elif hooks - before[name]:
                prepared.attached[name] = sorted(hooks - before[name])


def _detach(root: nn.Module, prepared: Prepared) -> None:
    for undo in prepared.undo:
        undo(root)
    for name, hooks in prepared.attached.items():
        if hooks is None:
            root.__dict__.pop(name, None)
        for key in hooks or ():
            root.__dict__[name].pop(key, None)


def _names_and_hooks(module: nn.Module) -> dict[str, set]:
    """The names of the instance attributes, with the keys of those that hold hooks."""
    return {
        name: set(value) if "_hooks" in name and isinstance(value, dict) else set()
        for name, value in module.__dict__.items()
    }
