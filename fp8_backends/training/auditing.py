"""What really happened: products by layer and kind, and dtypes and bytes, all read from live tensors."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..compute import registry
from ..compute.counts import DGRAD, KINDS, WGRAD, ProductCounts
from ..compute.profiling import Layer
from ..errors import FP8BackendError
from ..notebooks import as_html
from ..numerics.modules import check_is_module, plain_name
from ..numerics.sharded_tensor import full_shape, local_part
from ..states.gradient_release import is_dropped, is_released
from ..words import counted, readable_bytes, share
from . import conversion, saved_activations
from .flops import Flops, count_flops, tokens_of
from .weight_products import FOREIGN_FP8

if TYPE_CHECKING:
    from ..recipes.handlers import Recipe
    from .conversion import Prepared

logger = logging.getLogger("fp8_backends")

BYTE_KEYS = ("weight", "master", "gradient", "optimizer")
MANY_LOST_UPDATES = 0.5
"""The share of lost updates above which an audit warns."""


@dataclass
class Audit:
    """What `audit` found. All values are plain: names, numbers, text."""

    recipe: str
    """The backend string of the prepared model (several, joined by a comma, where parts were prepared apart)."""
    products: dict[str, dict[str, int]] = field(default_factory=dict)
    """FP8 products of each converted layer: `fprop`, `dgrad`, `wgrad`, and `recomputed` (forward again, by activation
    checkpointing). Since `prepare` for a backend that counts; of one profiled step for one that cannot (`ao`)."""
    engine: dict[str, str] = field(default_factory=dict)
    """What makes the products of each converted layer: `scaled_mm`, `bf16-exact`, `fp32-exact`, `emulated`, `te`,
    `ao`."""
    flops_share: float = 0.0
    """FP8 share, 0 to 1, of all FLOPs that training spends on products with weights, convolutions included; as many
    rows pass each weight as in the first step, or one for each token where that step was compiled."""
    uncounted: list[str] = field(default_factory=list)
    """Convolutions that `flops_share` leaves out, since nothing showed their shapes: they ran in compiled code, or
    another module multiplied by their weights."""
    high_precision: dict[str, str] = field(default_factory=dict)
    """The reason why each of the other weights stays in high precision."""
    foreign_fp8: dict[str, str] = field(default_factory=dict)
    """Weights that another library holds in FP8 and multiplies, such as transformers' `FP8Linear`, with its name. They
    are frozen, and count as not in FP8 in `flops_share`: nothing here proves them."""
    bytes_per_element: dict[str, float | None] = field(default_factory=dict)
    """Bytes of an element of the converted weights: `weight`, `master`, `gradient`, `optimizer`, `total`. None where
    no optimizer is known. The residuals of weights (O4) count as masters. Of what several ranks
    share, the bytes on this rank over the elements of the whole."""
    bytes_per_parameter: dict[str, float | None] = field(default_factory=dict)
    """The same for the whole model; `weight` includes the copies that last from forward to backward."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Dtypes of the converted weights, their gradients and optimizer states."""
    gradient_source: str = "none"
    """Where the gradients' bytes were read: `live` (`.grad`), `last step` (its dtype, `.grad` being freed), `released`
    (there are none: backward steps and drops them), `none`."""
    lost_updates: float | None = None
    """Share of the weight updates that rounding swallows. With scaled weights (O1 to O4) what the optimizer's next
    step would lose, as projected on the exact update; else None."""

    saved_activations: dict[str, int] = field(default_factory=dict)
    """What the last training forward has kept for backward in FP8 beside the codes of converted layers: `tensors`,
    `bytes`, and `plain_bytes`, which they would have taken. Empty where the recipe does not ask for it."""

    def to_dict(self) -> dict[str, Any]:
        """The same as dictionaries, numbers and text, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        text = "\n".join([self._headline, *(line for rows in self._tables() for line in _table(rows))])
        return "\n\n".join([text, *self._notes])

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
        rows = [("layer", *KINDS, "recomputed", "engine")]
        for name, counts in self.products.items():
            rows.append((name or "(root)", *(str(counts[kind]) for kind in (*KINDS, "recomputed")), self.engine[name]))
        if len(rows) > 1:
            yield _grouped(rows)
        for title, found in (("in high precision", self.high_precision), ("in FP8 of others", self.foreign_fp8)):
            if found:
                reasons = [(name or "(root)", reason) for name, reason in found.items()]
                yield _grouped([(title, "reason"), *reasons])
        rows = [("bytes", *BYTE_KEYS, "total")]
        for title, measured in (("per element", self.bytes_per_element), ("per parameter", self.bytes_per_parameter)):
            sizes = [measured.get(key) for key in (*BYTE_KEYS, "total")]
            rows.append((title, *("?" if size is None else f"{size:.4g}" for size in sizes)))
        yield rows


def audit(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Audit:
    """Read from a live model, prepared or not, what runs in FP8 and what everything weighs.

    Args:
        model: prepared by this package, or not (then nothing is in FP8). May be wrapped (DDP, `torch.compile`, PEFT).
        optimizer: whose states to weigh. Left out: the one that `prepare` or the Accelerator was given with the model.

    Raises:
        FP8BackendError: `model` is no module, or `optimizer` no optimizer.
    """
    check_is_module(model)
    model = conversion.unwrapped(model)
    roots = conversion.prepared_roots(model)
    optimizers = [known for _, _, prepared in roots for known in prepared.observed.optimizers()]
    if optimizer is not None:
        check_is_optimizer(optimizer)
        optimizers = [unwrapped(optimizer)]
    # an engine may train buffers of its own (DeepSpeed), which nobody can tell apart by weight: their bytes are unknown
    parameters = {id(parameter) for parameter in model.parameters()}
    optimizers = [each for each in optimizers if not parameters.isdisjoint(parameter_ids(each))]
    result = Audit(recipe=", ".join(dict.fromkeys(prepared.recipe.name for _, _, prepared in roots)) or "not prepared")
    tokens = max((tokens_of(prepared, prepared.observed.work) for _, _, prepared in roots), default=1)
    parts = [_read_root(result, *root, tokens) for root in roots] or [_read_unprepared(result, model)]
    needed = sum(part.flops.needed for part in parts)
    result.flops_share = sum(part.flops.in_fp8 for part in parts) / needed if needed else 0.0
    _read_bytes(result, model, parts, optimizers)
    saved = [found for _, root, _ in roots if (found := saved_activations.saved_bytes(root)) is not None]
    if saved:
        result.saved_activations = {key: sum(getattr(each, key) for each in saved) for key in asdict(saved[0])}
    losses = [each.lost_updates() for each in optimizers if hasattr(each, "lost_updates")]
    result.lost_updates = max((loss for loss in losses if loss is not None), default=None)
    if result.lost_updates is not None and result.lost_updates > MANY_LOST_UPDATES:
        logger.warning(
            f"{result.recipe}: rounding swallows {share(result.lost_updates)} of the weight updates, so the model "
            'hardly trains: store weights with rounding="stochastic", or raise the learning rate'
        )
    return result


def incomplete_layers(audit: Audit, recipe: Recipe) -> dict[str, list[str]]:
    """Layers that lack a kind of FP8 product that their recipe asks for, with the kinds."""
    high = registry.get_compute(recipe.compute).high_precision_products(recipe)
    missing = {
        layer: [kind for kind in KINDS if kind not in high and not counts[kind]]
        for layer, counts in audit.products.items()
    }
    return {layer: kinds for layer, kinds in missing.items() if kinds}


def unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """The PyTorch optimizer inside Accelerate's and similar wrappers."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def check_is_optimizer(optimizer: object, hint: str = "") -> None:
    """Raise `FP8BackendError` for what is no optimizer, and holds none. `hint` ends the text."""
    if not isinstance(unwrapped(optimizer), torch.optim.Optimizer):
        raise FP8BackendError(
            f"optimizer must be a torch.optim.Optimizer or None, not {type(optimizer).__name__}{hint}"
        )


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """The identities of the parameters that an optimizer holds."""
    return set(map(id, parameters_of(optimizer)))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that an optimizer holds, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def steps_of(optimizer: torch.optim.Optimizer) -> int | None:
    """Steps that an optimizer's states have seen, also before they were loaded; None where they do not tell."""
    for state in optimizer.state.values():
        with contextlib.suppress(TypeError, LookupError, ValueError, ArithmeticError, RuntimeError):  # of other code
            return int(state["step"])
    return None


def layers_to_profile(prefix: str, root: nn.Module, prepared: Prepared) -> list[Layer]:
    """The converted layers of a root whose backend does not count its products; none where it does."""
    layers = prepared.compute.converted_layers(root)
    if not layers or prepared.compute.products(next(iter(layers.values()))) is not None:
        return []
    high = prepared.compute.high_precision_products(prepared.recipe)
    kinds = tuple(kind for kind in (DGRAD, WGRAD) if kind not in high)
    return [Layer(name, module, kinds, prepared.profiled) for name, module in layers.items()]


def count_products(root: nn.Module, prepared: Prepared) -> dict[str, ProductCounts]:
    """FP8 products of each converted layer, by its own counter or from the last profiled step."""
    return {
        name: prepared.compute.products(module) or prepared.profiled.get(name, ProductCounts())
        for name, module in prepared.compute.converted_layers(root).items()
    }


@dataclass
class RootMeasures:
    """The part of an audit that one prepared root adds."""

    flops: Flops
    weights: list[nn.Parameter] = field(default_factory=list)
    """The converted weights."""
    transient_bytes: float = 0.0
    """Copies of converted weights that last from forward to backward."""
    gradient_dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    """Dtypes that the gradients had at the first optimizer step, by the parameter's identity."""


def _read_root(result: Audit, prefix: str, root: nn.Module, prepared: Prepared, tokens: float) -> RootMeasures:
    """Write products, engines and reasons of one prepared root into the audit; return its FLOPs and weights."""
    conversion.update_report(root, prepared)
    counts = count_products(root, prepared)
    measures = RootMeasures(count_flops(root, prepared, counts, tokens))
    for name, module in prepared.compute.converted_layers(root).items():
        full = _joined(prefix, name)
        result.products[full] = asdict(counts[name])
        result.engine[full] = prepared.compute.engine(module)
        measures.weights.append(module.weight)
        elements = full_shape(module.weight).numel()
        measures.transient_bytes += prepared.compute.transient_bytes_per_element(module) * elements
    seen = prepared.observed.gradient_dtypes
    named = ((plain_name(name), parameter) for name, parameter in root.named_parameters())
    measures.gradient_dtypes = {id(parameter): seen[name] for name, parameter in named if name in seen}
    result.high_precision |= {_joined(prefix, name): why for name, why in prepared.report.high_precision.items()}
    result.foreign_fp8 |= {_joined(prefix, name): why for name, why in prepared.report.foreign_fp8.items()}
    result.uncounted += [_joined(prefix, name) for name in measures.flops.uncounted]
    return measures


def _read_unprepared(result: Audit, model: nn.Module) -> RootMeasures:
    products = conversion.weight_products(model)
    foreign = {product.name: product.reason for product in products if product.state == FOREIGN_FP8}
    result.foreign_fp8 = foreign
    result.high_precision = {each.name: "not prepared" for each in products if each.name not in foreign}
    return RootMeasures(Flops(needed=sum(product.flops for product in products)))


def _read_bytes(result: Audit, model: nn.Module, parts: list[RootMeasures], optimizers: list) -> None:
    gradient_dtypes = {key: dtype for part in parts for key, dtype in part.gradient_dtypes.items()}
    converted = {id(weight) for part in parts for weight in part.weights}
    weighed = [_weigh(parameter, optimizers, gradient_dtypes) for parameter in model.parameters()]
    chosen = [w for w in weighed if w.key in converted] if converted else weighed
    result.bytes_per_element = _average(chosen, bool(optimizers))
    result.bytes_per_parameter = _average(weighed, bool(optimizers), sum(part.transient_bytes for part in parts))
    sources = {w.gradient_source for w in chosen}
    result.gradient_source = next((each for each in ("live", "last step", "released") if each in sources), "none")
    result.dtypes = {key: ", ".join(sorted({w.dtypes[key] for w in chosen} - {""})) for key in BYTE_KEYS}


@dataclass
class _Weighed:
    key: int
    elements: int
    bytes: dict[str, int]
    dtypes: dict[str, str]
    gradient_source: str


def _weigh(parameter: nn.Parameter, optimizers: list, gradient_dtypes: dict[int, torch.dtype]) -> _Weighed:
    """The bytes of one parameter and of what trains it on this rank, and its elements on all ranks."""
    sizes = dict.fromkeys(BYTE_KEYS, 0) | {"weight": stored_bytes(parameter)}
    gradient, source = parameter.grad, "none"
    dtypes = dict.fromkeys(BYTE_KEYS, "") | {"weight": _dtype_name(stored_dtype(parameter))}
    if gradient is not None and not is_dropped(gradient):
        sizes["gradient"], source = stored_bytes(gradient), "live"
        dtypes["gradient"] = _dtype_name(stored_dtype(gradient))
    elif is_released(parameter):
        source = "released"
    elif parameter.requires_grad and (dtype := gradient_dtypes.get(id(parameter))) is not None:
        sizes["gradient"], source = dtype.itemsize * _local(parameter).numel(), "last step"
        dtypes["gradient"] = _dtype_name(dtype)
    state = next((o.state[parameter] for o in optimizers if parameter in o.state), {})
    states = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
    master, residual = getattr(_local(parameter), "master", None), residual_of(parameter)
    if master is not None and not parameter.requires_grad:  # no optimizer knows it
        states["master"] = master
    if residual is not None:
        sizes["weight"] -= residual.nbytes
        states["master"] = residual
    for key, value in states.items():
        kind = "master" if "master" in key else "optimizer"
        sizes[kind] += stored_bytes(value)
        dtypes[kind] += ("+" if dtypes[kind] else "") + _dtype_name(stored_dtype(value))
    return _Weighed(id(parameter), parameter.numel(), sizes, dtypes, source)


def _average(weighed: list[_Weighed], knows_optimizer: bool, transient_bytes: float = 0.0) -> dict[str, float | None]:
    elements = sum(w.elements for w in weighed) or 1
    sizes: dict[str, float | None] = {key: sum(w.bytes[key] for w in weighed) / elements for key in BYTE_KEYS}
    sizes["weight"] += transient_bytes / elements
    if not knows_optimizer:
        sizes["master"] = sizes["optimizer"] = None
    sizes["total"] = sum(sizes.values()) if knows_optimizer else None
    return sizes


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes on this rank: the shard of a DTensor, the parts of a wrapper subclass."""
    return sum(inner.numel() * inner.element_size() for inner in inner_tensors(tensor))


def residual_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The residuals that this rank has of a weight at level O4, int8: they are no part of what products read."""
    return getattr(_local(parameter), "residual", None)


def stored_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a tensor's data in memory: of the first part, where it is a wrapper subclass."""
    return next(inner_tensors(tensor)).dtype


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's bytes on this rank."""
    tensor = _local(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from inner_tensors(getattr(tensor, name))
    if (residual := residual_of(tensor)) is not None:
        yield residual


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "ds_tensor") and tensor.numel() == 0:
        return tensor.ds_tensor  # this rank's part under ZeRO-3
    return local_part(tensor)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(prefix: str, name: str) -> str:
    return plain_name(f"{prefix}.{name}".strip("."))


def _grouped(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for all layers that differ in their number only: `layers.*.q_proj ×24`."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        groups.setdefault((re.sub(r"\d+", "*", name), *cells), []).append(name)
    return [
        (f"{pattern} ×{len(names)}" if len(names) > 1 else names[0], *cells)
        for (pattern, *cells), names in groups.items()
    ]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """An empty line, and the rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return ["", *(line.rstrip() for line in lines)]
