"""Find the weights that a model multiplies by; conversion works on this list, and every share is
counted over it.

Embeddings and norms are none; Parameters of modules with their own product are
(`nn.MultiheadAttention`).
"""

import contextlib
import itertools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..recipes.handlers import Recipe
from ..tensors.block_codes import RAW_CODES, BlockCodes
from ..tensors.sharded_tensor import full_shape
from ..torch_tools.modules import (
    ADAPTERS_HOLD,
    CONVERSION,
    PLAIN_CONVERSION,
    Conversion,
    adapters_over,
    forward_obstacle,
    is_adapter,
    part_layer,
    plain_name,
)
from ..words import as_html, by_reason, counted, listed, share
from . import quantized_layers

FP8, HIGH_PRECISION, FOREIGN_FP8 = "fp8", "high precision", "foreign fp8"
"""Precision of a weight product. The last is FP8 of another library, such as transformers'
`FP8Linear`."""

CONVOLUTION = "convolution"
"""Kind of a convolution. Only a forward shows the number of products with its weight for each
token."""
BILINEAR = "Bilinear"
CONV1D = "Conv1D"
"""Kind of transformers' Linear with a weight [in, out] (`conv1d`)."""
NEVER_IN_FP8 = (CONVOLUTION, BILINEAR)
LINEARS = ("Linear", "head", "router", "adapter")
"""Kinds of weights that reports count as Linear."""
COUNTED = ("Linear", CONV1D, "experts")
"""Nouns in reports for weights with FP8 products."""

HEAD_NAMES = frozenset(
    {"lm_head", "embed_out", "output_layer", "classifier", "score", "qa_outputs", "head"}
)
"""Last segments in the name of a Linear that is an output head."""
ROOT_HEAD_NAMES = frozenset({"output"})
"""The same for a direct child of the model; deeper down the name is common for other layers."""
ROUTER_NAMES = frozenset({"gate", "router"})
"""Segments in the name of a router: a Linear or weight inside such a module. `gate_proj` is
none."""

_ADAPTER_SEGMENTS = frozenset({"base_layer", "original_module", "modules_to_save", "default"})
_WEIGHT_NAME = re.compile(r"weight|_proj$")
_NOT_A_PRODUCT = re.compile(r"embed|norm|conv", re.IGNORECASE)
_WITHOUT_PRODUCTS = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.ParameterList,
    nn.ParameterDict,
)
_DEFAULT_EXCLUSIONS = {
    kind: f"{words}: kept in high precision (name it with + in include to convert it, too)"
    for kind, words in (("head", "output head"), ("router", "router"), ("adapter", "adapter"))
}


@dataclass
class WeightProduct:
    """A weight that the model multiplies its activations by."""

    name: str
    """The module's name, or the Parameter's if the module is no Linear or Conv1D; "" for a root
    Linear."""
    kind: str
    """`Linear`, `Conv1D`, `experts`, `head`, `router`, `adapter`, `convolution`, `parameter`, … or
    a foreign class."""
    in_features: int
    """Input elements summed into one output element; under the kernel of a convolution."""
    out_features: int
    flops: float
    """Forward FLOPs per token: 2 * in * out, times the number of experts that a token visits; for a
    convolution per output position (transposed: per input position)."""
    state: str = HIGH_PRECISION
    reason: str | None = None
    """Reason against this package's FP8; a note, or None, for `fp8`."""
    aliases: tuple[str, ...] = ()
    """Further names of a shared module."""
    recipe: str = ""
    """Its word in `layers` of the recipe, such as "native:mxfp8" or "bf16", which a small layer has
    by `small_layers`; empty without one."""

    @property
    def sizes(self) -> tuple[int, int]:
        return self.in_features, self.out_features


@dataclass
class NormLayer:
    """A normalisation layer, for a backend with its own form of them."""

    name: str
    swapped: bool
    reason: str | None
    aliases: tuple[str, ...] = ()


@dataclass
class ConversionReport:
    """The state of every weight product of a model."""

    products: list[WeightProduct]
    norms: list[NormLayer] = field(default_factory=list)
    """Empty for a backend without its own norms."""

    @property
    def converted(self) -> list[str]:
        return [product.name for product in self.products if product.state == FP8]

    @property
    def high_precision(self) -> dict[str, str]:
        """Names of the weights in high precision, each with its reason."""
        return self._reasons(HIGH_PRECISION)

    @property
    def foreign_fp8(self) -> dict[str, str]:
        """Names of the weights in FP8 of another library, each with that library's class."""
        return self._reasons(FOREIGN_FP8)

    def _reasons(self, state: str) -> dict[str, str]:
        return {product.name: product.reason for product in self.products if product.state == state}

    @property
    def flops_share(self) -> float:
        """Share of the weight FLOPs in converted weights, 0 to 1, for a token that passes all: the
        upper bound of a step's share. Before a forward, a convolution counts with one position."""
        total = sum(product.flops for product in self.products)
        in_fp8 = sum(product.flops for product in self.products if product.state == FP8)
        return in_fp8 / total if total else 0.0

    @property
    def has_convolutions(self) -> bool:
        """True if `flops_share` is only an upper bound."""
        return any(product.kind == CONVOLUTION for product in self.products)

    def __str__(self) -> str:
        states = (f"  {state}: {names}" for state, names in self._names_by_state.items())
        return "\n".join([self._headline, *states, *(f"  {line}" for line in self._norms_line)])

    def _repr_html_(self) -> str:
        title = "; ".join([self._headline, *self._norms_line])
        return as_html(title, [("state", "weights"), *self._names_by_state.items()])

    @property
    def _headline(self) -> str:
        at_most = "at most " if self.has_convolutions else ""
        weights = counted(len(self.products), "weight")
        return f"{len(self.converted)} of {weights} in FP8, {at_most}{share(self.flops_share)} of weight FLOPs"

    @property
    def _names_by_state(self) -> dict[str, str]:
        noted = [
            (p.name, f"in FP8 ({p.reason})" if p.reason else "in FP8")
            for p in self.products
            if p.state == FP8
        ]
        groups = by_reason([*noted, *self.foreign_fp8.items(), *self.high_precision.items()])
        return {reason: listed(names) for reason, names in groups}

    @property
    def _norms_line(self) -> list[str]:
        if not self.norms:
            return []
        unswapped = by_reason((norm.name, norm.reason) for norm in self.norms if not norm.swapped)
        line = f"{sum(norm.swapped for norm in self.norms)} of {counted(len(self.norms), 'norm')} swapped"
        return [line + "".join(f"; {listed(names)}: {reason}" for reason, names in unswapped)]


Names = dict[nn.Module, list[str]]
"""Modules of a model with their names, of which a shared module has several."""


@dataclass
class Found:
    """A weight product with its module, and the facts that need no recipe."""

    product: WeightProduct
    module: nn.Module
    linear: nn.Module
    """The module, or a Linear that shows it to backends (`conv1d`)."""
    part: str
    """Name of the module's Parameter; "" for the weight of a Linear or Conv1D."""
    obstacle: str | None
    default_exclusion: str | None = None
    recipe: Recipe | None = None
    """Its own recipe; None: in bf16 by `layers`."""
    subclass: str = ""
    """The subclass of Linear that `include` names."""

    @property
    def conversion(self) -> Conversion | None:
        layer = part_layer(self.module, self.part) if self.part else self.module
        return None if layer is None else layer.__dict__.get(CONVERSION)


def find_weight_products(model: nn.Module) -> list[Found]:
    """Return the weight products of `model` in the order of `named_modules`, a shared module
    once."""
    names: Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(plain_name(name))
    adapters = Adapters()
    if any(
        "base_layer" in module._modules or not _LEFT_BY_ADAPTERS.isdisjoint(vars(module))
        for module in names
    ):
        adapters.find(names)
    heads = _output_heads(names)
    # transformers' class, or no class if transformers was never imported
    conv1d_class = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())
    with_experts = {
        module
        for module, (name, *_) in names.items()
        if "expert" in f"{type(module).__name__} {name}".lower()
    }
    visits = None
    if with_experts:
        from . import experts

        visits = experts.count_visits(names)
    has_codes = may_hold_codes(model)
    weights = []
    for module, own_names in names.items():
        finder = experts if module in with_experts else None
        for part, kind, sizes, obstacle in _products_of(module, own_names[0], conv1d_class, finder):
            full_names = [f"{name}.{part}".lstrip(".") if part else name for name in own_names]
            if kind in ("Linear", "router") and module in adapters.inside:
                kind = "adapter"
            if kind == "Linear" and module in heads:
                kind = "head"
            state = HIGH_PRECISION
            if has_codes and (foreign := quantized_layers.kind_of(module)):
                kind = foreign.title
                state = FOREIGN_FP8
                obstacle = f"{kind}, frozen: FP8 of a checkpoint that is not multiplied here"
            if module in adapters.outside:
                obstacle = "adapter beside the model: kept in high precision"
            if (module, part) in adapters.adapted:
                obstacle = "adapted by PEFT: the weight that is multiplied is computed anew in each forward"
            linear = module
            if kind == CONV1D:
                from . import conv1d

                linear = conv1d.as_linear(module)
            flops = 2 * sizes[0] * sizes[1]
            if visits:
                flops *= visits(full_names[0], module, part)
            product = WeightProduct(
                full_names[0], kind, *sizes, flops, state, aliases=tuple(full_names[1:])
            )
            weight = Found(product, module, linear, part, obstacle, _DEFAULT_EXCLUSIONS.get(kind))
            if weight.conversion is not None:
                product.state = FP8
            else:
                product.reason = obstacle or weight.default_exclusion or "not prepared"
            weights.append(weight)
    return weights


def _products_of(
    module: nn.Module, name: str, conv1d: Any, experts: ModuleType | None
) -> Iterator[tuple[str, str, tuple[int, int], str | None]]:
    """Yield (Parameter name or "", kind, (in, out), obstacle) of each weight multiplied by this
    module itself. `experts`: the feature, if the module may hold any."""
    if hasattr(type(module), "fp8_owner"):
        return  # another module has the Parameter
    if isinstance(module, conv1d):
        yield "", CONV1D, (module.nx, module.nf), layer_obstacle(module, conv1d)
    elif isinstance(module, nn.Linear) or CONVERSION in module.__dict__:
        kind = "router" if _is_router(name) else "Linear"
        yield "", kind, (module.in_features, module.out_features), layer_obstacle(module, nn.Linear)
    elif isinstance(module, nn.modules.conv._ConvNd):
        if module.in_channels and module.out_channels:  # else lazy
            kernel = math.prod(module.kernel_size)
            sizes = (module.in_channels // module.groups * kernel, module.out_channels)
            # each input element is multiplied by the kernels of all outputs of its group
            if module.transposed:
                sizes = (module.in_channels, module.out_channels // module.groups * kernel)
            yield "", CONVOLUTION, sizes, "convolution: FP8 has no product for it"
    elif isinstance(module, nn.Bilinear):
        sizes = (module.in1_features * module.in2_features, module.out_features)
        yield "", BILINEAR, sizes, "nn.Bilinear: FP8 has no product of two inputs with a weight"
    elif not isinstance(module, _WITHOUT_PRODUCTS) and not _NOT_A_PRODUCT.search(
        type(module).__name__
    ):
        for part, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter) or "bias" in part:
                continue
            shape = full_shape(parameter)
            if experts and (found := experts.find_part(module, part)):
                yield part, *found
            elif len(shape) == 2 and min(shape) > 1 and _WEIGHT_NAME.search(part):
                cls = type(module).__name__
                kind = "parameter"
                obstacle = f"{cls} multiplies by this Parameter itself, without a Linear"
                if "router" in cls.lower() or _is_router(name):
                    kind = "router"
                    obstacle = f"router: {obstacle}"
                yield part, kind, shape[::-1], obstacle


_OF_LOADERS = {"quantization_scheme", "hf_quantizer", "_weight_conversions"}
"""Attributes of modules loaded by compressed-tensors, and of models loaded by transformers."""


def may_hold_codes(model: nn.Module) -> bool:
    """Return True for a model with modules of transformers or compressed-tensors, frozen codes, or
    raw float8."""
    return any(
        not _OF_LOADERS.isdisjoint(vars(module))
        or any(cls.__module__.startswith("transformers.") for cls in type(module).__mro__)
        or any(
            isinstance(parameter, BlockCodes) or parameter.dtype in RAW_CODES
            for parameter in module._parameters.values()
            if parameter is not None
        )
        for module in model.modules()
    )


def layer_obstacle(layer: nn.Module, plain: type[nn.Module]) -> str | None:
    """Return the reason against replacing this layer by any backend's, or None. `plain`: the only
    supported class."""
    weight = layer._parameters.get("weight")
    if CONVERSION in layer.__dict__:
        return None
    if weight is not None and is_lazy(weight):
        return "its weight has no size yet: run one batch before preparing the model"
    if torch.nn.utils.parametrize.is_parametrized(layer):
        return "parametrized: its weight is computed anew in each forward"
    if type(layer) is not plain and PLAIN_CONVERSION not in layer.__dict__:
        return (
            f"{type(layer).__name__} is a subclass of {plain.__name__} with a behaviour of its own"
            + f" (if it only multiplies: include='+{type(layer).__name__}')" * (plain is nn.Linear)
        )
    if replaced := forward_obstacle(layer):
        return replaced
    if weight is None:
        return "its weight is no Parameter: something (weight norm, pruning, FSDP1) computes it before each forward"
    if not weight.is_floating_point():
        return f"weight dtype {weight.dtype} is not a floating-point type"
    if not type(weight).__module__.startswith("torch.") and not isinstance(weight, BlockCodes):
        return f"its weight is a {type(weight).__name__}, which has products of its own"
    if 0 in full_shape(weight):
        return "a layer of size zero has no product"
    return None


def offloaded_modules(model: nn.Module) -> set[int]:
    """Return the identities of modules with weights on the meta device between forwards, by
    Accelerate's hooks."""
    offloaded: set[int] = set()
    for module in model.modules():
        outer = module.__dict__.get("_hf_hook")
        for hook in getattr(outer, "hooks", (outer,)):
            if getattr(hook, "offload", False):
                offloaded.update(map(id, module.modules() if hook.place_submodules else (module,)))
    return offloaded


def memory_sharers(model: nn.Module) -> dict[int, str]:
    """Map the identity of each Parameter in overlapping (or interleaved) memory to the name of one
    that overlaps."""
    views: dict[int, list[tuple[int, int, str, int]]] = defaultdict(list)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if type(tensor) in (nn.Parameter, torch.Tensor) and tensor.numel():
            last = sum(
                (size - 1) * stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            begin, end = (tensor.itemsize * (tensor.storage_offset() + at) for at in (0, last + 1))
            views[tensor.untyped_storage()._cdata].append(
                (begin, end, plain_name(name), id(tensor))
            )
    sharers: dict[int, str] = {}
    for views_of_storage in views.values():
        furthest, *others = sorted(views_of_storage)
        for view in others:
            if view[0] < furthest[1]:
                sharers.setdefault(view[3], furthest[2])
                sharers.setdefault(furthest[3], view[2])
            furthest = max(furthest, view, key=lambda view: view[1])
    return sharers


def _is_router(name: str) -> bool:
    return not ROUTER_NAMES.isdisjoint(name.split("."))


def _output_heads(names: Names) -> set[nn.Module]:
    """Return the modules of output heads: by `get_output_embeddings`, an embedding's weight, or a
    head's name."""
    heads: set[nn.Module] = set()
    embeddings = {
        id(module._parameters.get("weight")) for module in names if isinstance(module, nn.Embedding)
    }
    embeddings.discard(id(None))
    for module, own_names in names.items():
        if id(module._parameters.get("weight")) in embeddings or any(map(_ends_as_head, own_names)):
            heads.add(module)
        if callable(getattr(type(module), "get_output_embeddings", None)):
            # a backbone inherits the method without a head, or the name means something else in
            # this model
            with contextlib.suppress(Exception):
                heads.update(module.get_output_embeddings().modules())
    return heads


def _ends_as_head(name: str) -> bool:
    *parents, last = [part for part in name.split(".") if part not in _ADAPTER_SEGMENTS] or [""]
    return last in HEAD_NAMES or (not parents and last in ROOT_HEAD_NAMES)


_LEFT_BY_ADAPTERS = ADAPTERS_HOLD | {"forward"}
"""Attributes of an adapter outside the model, and of the module under it."""


@dataclass
class Adapters:
    """Modules of adapters, such as LoRA's A and B."""

    inside: set[nn.Module] = field(default_factory=set)
    outside: set[nn.Module] = field(default_factory=set)
    """Parts of adapters over modules of the model, and not in it."""
    adapted: set[tuple[nn.Module, str]] = field(default_factory=set)
    """Parameters that PEFT adapts directly (`target_parameters`), by module and name."""

    def find(self, names: Names) -> None:
        """Find the adapters of a model, and add the parts outside it to its modules."""
        for module, (name, *_) in list(names.items()):
            for adapter in adapters_over(module) if "forward" in module.__dict__ else ():
                for part_name, part in adapter.named_modules():
                    if part not in names:  # else the adapted module
                        self.outside.add(part)
                        full_name = f"{name}.{type(adapter).__name__}.{part_name}"
                        names[part] = [full_name.lstrip(".")]
        for module in names:
            base = module._modules.get("base_layer")
            if not ADAPTERS_HOLD.isdisjoint(vars(module)) and is_adapter(module):
                self.inside.update(module.modules())
            if not isinstance(base, nn.Module):
                continue
            for name, child in module._modules.items():
                if name != "base_layer" and child is not None:
                    self.inside.update(child.modules())
            if isinstance(part := module.__dict__.get("parameter_name"), str):
                while isinstance(inner := base._modules.get("base_layer"), nn.Module):
                    base = inner  # one wrapper for each adapted Parameter
                self.adapted.add((base, part))
