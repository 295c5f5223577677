"""Measure a live model: FP8 products by layer and kind, their share of FLOPs, dtypes and bytes."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..announcement import logger
from ..compute.counts import KINDS
from ..compute.registry import compute_of
from ..convert import conversion, features
from ..convert.conversion import Root
from ..convert.weight_products import FOREIGN_FP8, FP8, HIGH_PRECISION
from ..recipes.handlers import Recipe
from ..states.gradient_release import is_dropped, is_released
from ..tensors.sharded_tensor import full_shape, inner_tensors, stored_dtype, stored_part
from ..torch_tools.modules import check_is_module, plain_name
from ..torch_tools.optimizers import check_is_optimizer, parameter_ids, unwrapped
from ..words import as_html, by_reason, counted, in_columns, readable_bytes, share
from .proof import Flops, count_flops, count_products, tokens_of

BYTE_KEYS = ("weight", "master", "gradient", "optimizer")
MANY_LOST_UPDATES = 0.5
"""Share of lost updates above which an audit warns."""


@dataclass
class Audit:
    """The result of `audit`: names, numbers, text."""

    recipe: str
    """Backend string of the prepared model; several, joined by a comma, if parts were prepared
    apart."""
    products: dict[str, dict[str, int]] = field(default_factory=dict)
    """FP8 products of each converted layer: `fprop`, `dgrad`, `wgrad`, and `recomputed` (forward
    again, by activation checkpointing). Since `prepare` for a backend with counters; of one
    profiled step for the others (`ao`)."""
    engine: dict[str, str] = field(default_factory=dict)
    """Engine of each converted layer's products: `scaled_mm`, `bf16-exact`, `fp32-exact`,
    `emulated`, `te`, `ao`."""
    notes: dict[str, str] = field(default_factory=dict)
    """Remarks on converted layers, such as a subclass of Linear that `include` names."""
    flops_share: float = 0.0
    """FP8 share, 0 to 1, of all FLOPs of products with weights in training, convolutions included.
    Each weight counts with its rows in the first step, or one for each token if that step was
    compiled."""
    uncounted: list[str] = field(default_factory=list)
    """Convolutions missing from `flops_share`: compiled, or their weights multiplied by another
    module."""
    high_precision: dict[str, str] = field(default_factory=dict)
    """Reason for each of the other weights to stay in high precision."""
    foreign_fp8: dict[str, str] = field(default_factory=dict)
    """Weights in FP8 of another library, by name, such as transformers' `FP8Linear`: frozen, and
    not proven here."""
    bytes_per_element: dict[str, float | None] = field(default_factory=dict)
    """Bytes of an element of the converted weights: `weight`, `master`, `gradient`, `optimizer`,
    `total`. None without a known optimizer. The residuals of weights (O4) count as masters. For
    shared tensors: bytes on this rank over elements on all ranks."""
    bytes_per_parameter: dict[str, float | None] = field(default_factory=dict)
    """The same for the whole model; `weight` includes copies held from forward to backward."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Dtypes of the converted weights, their gradients and optimizer states."""
    gradient_source: str = "none"
    """Source of the gradients' bytes: `live` (`.grad`), `last step` (its dtype, `.grad` being
    freed), `released` (there are none: backward steps and drops them), `none`."""
    lost_updates: float | None = None
    """Share of the weight updates lost to rounding. With scaled weights (O1 to O4) a projection of
    the optimizer's next step on the exact update; else None."""

    saved_activations: dict[str, int] = field(default_factory=dict)
    """FP8 activations of the last training forward, without the codes of converted layers:
    `tensors`, `bytes`, and `plain_bytes`, their size in high precision. Empty unless the recipe
    saves activations in FP8."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to dictionaries, numbers and text, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n\n".join([self._headline, *map(in_columns, self._tables()), *self._notes])

    def _repr_html_(self) -> str:
        return as_html("; ".join([self._headline, *self._notes]), *self._tables())

    @property
    def _headline(self) -> str:
        return f"{self.recipe}: {share(self.flops_share)} of weight FLOPs in FP8"

    @property
    def _notes(self) -> list[str]:
        notes = []
        if saved := self.saved_activations:
            sizes = f"{readable_bytes(saved['bytes'])} in place of {readable_bytes(saved['plain_bytes'])}"
            notes.append(f"activations kept in FP8: {counted(saved['tensors'], 'tensor')}, {sizes}")
        if self.lost_updates is not None:
            notes.append(f"updates lost to rounding: {share(self.lost_updates)}")
        return notes

    def _tables(self) -> Iterator[list[tuple[str, ...]]]:
        kinds = (*KINDS, "recomputed")
        products = [
            (name, *map(str, of.values()), self.engine[name]) for name, of in self.products.items()
        ]
        for headings, rows in (
            (("layer", *kinds, "engine"), products),
            (("in FP8", "note"), self.notes.items()),
            (("in high precision", "reason"), self.high_precision.items()),
            (("in FP8 of others", "reason"), self.foreign_fp8.items()),
        ):
            # one row for layers that differ only in a number
            groups = by_reason(
                (name or "(root)", (re.sub(r"\d+", "*", name), *cells)) for name, *cells in rows
            )
            if groups:
                yield [
                    headings,
                    *(
                        (f"{pattern} x{len(names)}" if names[1:] else names[0], *cells)
                        for (pattern, *cells), names in groups
                    ),
                ]
        rows = [("bytes", *BYTE_KEYS, "total")]
        for title, measured in (
            ("per element", self.bytes_per_element),
            ("per parameter", self.bytes_per_parameter),
        ):
            sizes = [measured.get(key) for key in rows[0][1:]]
            rows.append((title, *("?" if size is None else f"{size:.4g}" for size in sizes)))
        yield rows


def audit(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Audit:
    """Measure FP8 products and bytes of a live model, prepared or not.

    Args:
        model: prepared by this package, or not (then nothing is in FP8). May be wrapped (DDP,
            `torch.compile`, PEFT).
        optimizer: owner of the states to weigh. Default: the optimizer prepared with the model.

    Raises:
        FP8BackendError: `model` is no module, or `optimizer` no optimizer.
    """
    check_is_module(model)
    model = conversion.unwrapped(model)
    roots = conversion.prepared_roots(model)
    optimizers = [
        optimizer for _, _, prepared in roots for optimizer in prepared.observed.optimizers()
    ]
    if optimizer is not None:
        check_is_optimizer(optimizer)
        optimizers = [unwrapped(optimizer)]
    # DeepSpeed trains its own flat buffers, which belong to no weight: their bytes are unknown
    parameters = set(map(id, model.parameters()))
    optimizers = [
        optimizer for optimizer in optimizers if not parameters.isdisjoint(parameter_ids(optimizer))
    ]
    result = Audit(
        recipe=", ".join(dict.fromkeys(prepared.name for _, _, prepared in roots)) or "not prepared"
    )
    _read_roots(result, roots)
    for product in () if roots else conversion.weight_products(model):
        if product.state == FOREIGN_FP8:
            result.foreign_fp8[product.name] = product.reason
        else:
            result.high_precision[product.name] = "not prepared"
    _read_bytes(result, model, roots, optimizers)
    for _, root, prepared in roots:
        if saved_activations := features.wanted("saved_activations", prepared.recipe):
            saved_activations.add_sizes(result.saved_activations, root)
    losses = [
        optimizer.lost_updates() for optimizer in optimizers if hasattr(optimizer, "lost_updates")
    ]
    result.lost_updates = max((loss for loss in losses if loss is not None), default=None)
    if result.lost_updates is not None and result.lost_updates > MANY_LOST_UPDATES:
        logger.warning(
            f"{result.recipe}: rounding swallows {share(result.lost_updates)} of the weight "
            "updates, so the model "
            'hardly trains: store weights with rounding="stochastic", or raise the learning rate'
        )
    return result


def incomplete_layers(audit: Audit, recipe: Recipe) -> dict[str, list[str]]:
    """Return layers without FP8 products of a kind in their recipe, with these kinds."""
    high = compute_of(recipe).high_precision_products(recipe)
    missing = {
        layer: [kind for kind in KINDS if kind not in high and not counts[kind]]
        for layer, counts in audit.products.items()
    }
    return {layer: kinds for layer, kinds in missing.items() if kinds}


def _read_roots(result: Audit, roots: list[Root]) -> None:
    """Write products, engines, reasons and the share of prepared roots into the audit."""
    tokens = max(
        (tokens_of(prepared, prepared.observed.work) for _, _, prepared in roots), default=1
    )
    flops = Flops()
    reasons = {
        FP8: result.notes,
        HIGH_PRECISION: result.high_precision,
        FOREIGN_FP8: result.foreign_fp8,
    }
    for prefix, root, prepared in roots:
        conversion.update_report(root, prepared)
        counts = count_products(root, prepared)
        part = count_flops(root, prepared, counts, tokens=tokens)
        flops.needed += part.needed
        flops.in_fp8 += part.in_fp8
        result.uncounted += [_joined(prefix, name) for name in part.uncounted]
        for name, module in prepared.compute.converted_layers(root).items():
            result.products[_joined(prefix, name)] = asdict(counts[name])
            result.engine[_joined(prefix, name)] = prepared.compute.engine(module)
        for product in prepared.report.products:
            if product.reason:
                reasons[product.state][_joined(prefix, product.name)] = product.reason
    result.flops_share = flops.share


def _joined(prefix: str, name: str) -> str:
    return plain_name(f"{prefix}.{name}".strip("."))


class _Weighed(NamedTuple):
    """Bytes of one parameter, its gradient and states on this rank, and its elements on all
    ranks."""

    elements: int
    bytes: dict[str, int]
    dtypes: dict[str, str]
    gradient_source: str


def _read_bytes(result: Audit, model: nn.Module, roots: list, optimizers: list) -> None:
    gradient_dtypes = {}
    converted = set()
    transient_bytes = 0.0
    for _, root, prepared in roots:
        for layer in prepared.compute.converted_layers(root).values():
            converted.add(id(layer.weight))
            elements = full_shape(layer.weight).numel()
            transient_bytes += prepared.compute.transient_bytes_per_element(layer) * elements
        seen = prepared.observed.gradient_dtypes
        named = ((plain_name(name), parameter) for name, parameter in root.named_parameters())
        gradient_dtypes |= {id(parameter): seen[name] for name, parameter in named if name in seen}
    weighed = {id(p): _weigh(p, optimizers, gradient_dtypes.get(id(p))) for p in model.parameters()}
    chosen = [w for key, w in weighed.items() if key in converted or not converted]
    result.bytes_per_element = _average(chosen, bool(optimizers))
    result.bytes_per_parameter = _average(list(weighed.values()), bool(optimizers), transient_bytes)
    sources = {w.gradient_source for w in chosen}
    result.gradient_source = next(
        (name for name in ("live", "last step", "released") if name in sources), "none"
    )
    result.dtypes = {
        key: ", ".join(sorted({w.dtypes[key] for w in chosen} - {""})) for key in BYTE_KEYS
    }


def _weigh(
    parameter: nn.Parameter, optimizers: list, gradient_dtype: torch.dtype | None
) -> _Weighed:
    sizes = dict.fromkeys(BYTE_KEYS, 0)
    dtypes = dict.fromkeys(BYTE_KEYS, "")
    source = "none"

    def add(key: str, size: int, dtype: torch.dtype) -> None:
        sizes[key] += size
        dtypes[key] += ("+" if dtypes[key] else "") + str(dtype).removeprefix("torch.")

    add("weight", stored_bytes(parameter), stored_dtype(parameter))
    if parameter.grad is not None and not is_dropped(parameter.grad):
        source = "live"
        add("gradient", stored_bytes(parameter.grad), stored_dtype(parameter.grad))
    elif is_released(parameter):
        source = "released"
    elif parameter.requires_grad and gradient_dtype is not None:
        source = "last step"
        add("gradient", gradient_dtype.itemsize * stored_part(parameter).numel(), gradient_dtype)
    state = next((o.state[parameter] for o in optimizers if parameter in o.state), {})
    states = {
        key: value
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    }
    master = getattr(stored_part(parameter), "master", None)
    residual = residual_of(parameter)
    if master is not None:
        states["master"] = master
    if residual is not None:
        sizes["weight"] -= residual.nbytes
        states["master"] = residual
    for key, value in states.items():
        add("master" if "master" in key else "optimizer", stored_bytes(value), stored_dtype(value))
    return _Weighed(parameter.numel(), sizes, dtypes, source)


def _average(
    weighed: list[_Weighed], knows_optimizer: bool, transient_bytes: float = 0.0
) -> dict[str, float | None]:
    elements = sum(w.elements for w in weighed) or 1
    sizes: dict[str, float | None] = {
        key: sum(w.bytes[key] for w in weighed) / elements for key in BYTE_KEYS
    }
    sizes["weight"] += transient_bytes / elements
    if not knows_optimizer:
        return sizes | dict.fromkeys(("master", "optimizer", "total"))
    return sizes | {"total": sum(sizes.values())}


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes on this rank: the shard of a DTensor, the parts of a wrapper
    subclass."""
    return sum(inner.nbytes for inner in inner_tensors(tensor))


def residual_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's residual of a weight at level O4, int8, or None. Products do not read
    it."""
    return getattr(stored_part(parameter), "residual", None)
