"""The weights that a model multiplies by: conversion works on this list, and every share is counted over it.

They are Linear layers, transformers' `Conv1D`, expert tensors, routers, the output head, convolutions, `nn.Bilinear`,
and weights that a module multiplies by itself (`nn.MultiheadAttention.in_proj_weight`); embeddings and norms are not.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..compute import expert_functions
from ..compute.conv1d import conv1d_class, is_conv1d
from ..compute.expert_functions import ExpertWeight
from ..numerics.block_codes import BlockCodes
from ..numerics.modules import CONVERSION, HEAD_CONVERSION, Conversion, forward_obstacle, plain_name
from ..numerics.sharded_tensor import full_shape
from . import quantized_layers

FP8, HIGH_PRECISION, FOREIGN_FP8 = "fp8", "high precision", "foreign fp8"
"""What a weight product runs in. The last is FP8 of another library, such as transformers' `FP8Linear`."""

CONVOLUTION = "convolution"
"""The kind of a convolution. How often its weight is multiplied for each token, only a forward tells."""
BILINEAR = "Bilinear"
NEVER_IN_FP8 = (CONVOLUTION, BILINEAR)
"""Kinds for which there is no FP8 product."""

HEAD_NAMES = frozenset({"lm_head", "embed_out", "output_layer", "classifier", "score", "qa_outputs", "head"})
"""A Linear whose own name is one of these is an output head, wherever it lies."""
ROOT_HEAD_NAMES = frozenset({"output"})
"""The same for a Linear that is a direct child of the model; deeper down the name is common for other layers."""
ROUTER_NAMES = frozenset({"gate", "router"})
"""A Linear or weight below a module of exactly such a name is a router (so `gate_proj` is none)."""

_ADAPTER_SEGMENTS = frozenset({"base_layer", "original_module", "modules_to_save", "default"})
_TOP_K_FIELDS = ("num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "moe_topk")
_WEIGHT_NAME = re.compile(r"weight|_proj$")
_NOT_A_PRODUCT = re.compile(r"embed|norm|conv", re.IGNORECASE)


@dataclass
class WeightProduct:
    """One weight that the model multiplies its activations by."""

    name: str
    """The module's name, or the Parameter's where the module is not a Linear or Conv1D; "" for a root Linear."""
    kind: str
    """`Linear`, `Conv1D`, `experts`, `head`, `router`, `adapter`, `convolution`, `Bilinear`, `parameter`, or the class
    of foreign FP8 layers."""
    in_features: int
    """Elements of the input that one output element is a sum over: of a convolution those under its kernel."""
    out_features: int
    flops: float
    """Forward FLOPs per token: 2 * in * out, times the number of experts that a token visits; for a convolution per
    output position (transposed: per input position)."""
    state: str = HIGH_PRECISION
    """`fp8`, `high precision` or `foreign fp8`."""
    reason: str | None = None
    """Why it is not in this package's FP8; a note, or None, for `fp8`."""
    aliases: tuple[str, ...] = ()
    """Further names of a module that the model holds more than once."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.in_features, self.out_features


@dataclass
class Found:
    """A weight product with its module, and what is known before a recipe is asked."""

    product: WeightProduct
    module: nn.Module
    part: str
    """Which Parameter of the module it is; "" for the weight of a Linear or Conv1D."""
    obstacle: str | None
    """Why it can never be converted, or None."""
    default_exclusion: str | None = None
    """Why it is left out unless the user chooses otherwise, or None."""

    @property
    def conversion(self) -> Conversion | None:
        """What it was converted with, if it was."""
        layer = expert_functions.converted_weight(self.module, self.part) if self.part else self.module
        return None if layer is None else layer.__dict__.get(CONVERSION)


def find_weight_products(model: nn.Module) -> list[Found]:
    """Every weight product of `model` in the order of `named_modules`, a shared module once, under its first name."""
    modules: dict[int, nn.Module] = {}
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(id(module), module)
        names.setdefault(id(module), []).append(plain_name(name))
    is_head, adapters = _head_test(modules.values()), _adapter_parts(modules.values())
    experts_visited, adapted = _expert_counter(model, modules, names), _adapted_parameters(modules.values())
    found = []
    for key, module in modules.items():
        for part, kind, sizes, obstacle in _products_of(module, names[key][0]):
            own_names = [f"{name}.{part}".lstrip(".") if part else name for name in names[key]]
            if kind in ("Linear", "router") and key in adapters:
                kind = "adapter"
            kind = "head" if kind == "Linear" and is_head(module, own_names) else kind
            foreign = quantized_layers.kind_of(module)
            if foreign:
                kind, obstacle = (
                    foreign.title,
                    f"{foreign.title}, frozen: FP8 of a checkpoint that is not multiplied here",
                )
            flops = 2 * sizes[0] * sizes[1] * experts_visited(own_names[0], module, part)
            state = FOREIGN_FP8 if foreign else HIGH_PRECISION
            product = WeightProduct(own_names[0], kind, *sizes, flops, state, aliases=tuple(own_names[1:]))
            if (key, part) in adapted:
                obstacle = "adapted by PEFT: the weight that is multiplied is computed anew in each forward"
            found.append(Found(product, module, part, obstacle, _DEFAULT_EXCLUSIONS.get(kind)))
    return found


_DEFAULT_EXCLUSIONS = {
    kind: f"{words}: kept in high precision (name it with + in include to convert it, too)"
    for kind, words in (("head", "output head"), ("router", "router"), ("adapter", "adapter"))
}


def _products_of(module: nn.Module, name: str) -> Iterator[tuple[str, str, tuple[int, int], str | None]]:
    """(Parameter name or "", kind, (in, out), obstacle) of each weight that this module itself multiplies by."""
    if isinstance(module, ExpertWeight):
        return  # its experts module has the Parameter
    if is_conv1d(module):
        yield "", "Conv1D", (module.nx, module.nf), layer_obstacle(module, conv1d_class())
    elif isinstance(module, nn.Linear) or CONVERSION in module.__dict__:
        kind = "router" if _is_router(name) else "Linear"
        yield "", kind, (module.in_features, module.out_features), layer_obstacle(module, nn.Linear)
    elif isinstance(module, nn.modules.conv._ConvNd):
        if module.in_channels and module.out_channels:  # else lazy
            kernel = math.prod(module.kernel_size)
            sizes = (module.in_channels // module.groups * kernel, module.out_channels)
            if module.transposed:  # each input element is multiplied by the kernels of all outputs of its group
                sizes = (module.in_channels, module.out_channels // module.groups * kernel)
            yield "", CONVOLUTION, sizes, "convolution: FP8 has no product for it"
    elif isinstance(module, nn.Bilinear):
        sizes = (module.in1_features * module.in2_features, module.out_features)
        yield "", BILINEAR, sizes, "nn.Bilinear: FP8 has no product of two inputs with a weight"
    elif not isinstance(module, _WITHOUT_PRODUCTS) and not _NOT_A_PRODUCT.search(type(module).__name__):
        for part, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter) or "bias" in part:
                continue
            shape = full_shape(parameter)
            if len(shape) == 3 and "expert" in f"{type(module).__name__} {name}".lower():
                sizes = shape[1:] if getattr(module, "is_transposed", False) else shape[:0:-1]
                yield part, "experts", tuple(sizes), expert_functions.obstacle(module, part)
            elif len(shape) == 2 and min(shape) > 1 and _WEIGHT_NAME.search(part):
                kind = "router" if _is_router(name) or "router" in type(module).__name__.lower() else "parameter"
                obstacle = f"{type(module).__name__} multiplies by this Parameter itself, without a Linear"
                obstacle = f"router: {obstacle}" if kind == "router" else obstacle
                yield part, kind, tuple(reversed(shape)), obstacle


_WITHOUT_PRODUCTS = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.ParameterList,
    nn.ParameterDict,
)


def layer_obstacle(layer: nn.Module, plain: type[nn.Module]) -> str | None:
    """Why no backend could take the place of this layer, or None. `plain`: the class whose behaviour is known."""
    weight = layer._parameters.get("weight")
    if CONVERSION in layer.__dict__:
        return None
    if weight is not None and is_lazy(weight):
        return "its weight has no size yet: run one batch before preparing the model"
    if torch.nn.utils.parametrize.is_parametrized(layer):
        return "parametrized: its weight is computed anew in each forward"
    if type(layer) is not plain and HEAD_CONVERSION not in layer.__dict__:
        return f"{type(layer).__name__} is a subclass of {plain.__name__} with a behaviour of its own"
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
    """Identities of the modules whose weights hooks of Accelerate's put in place for each forward alone (`cpu_offload`,
    `disk_offload`, `dispatch_model`): between forwards they lie on the meta device."""
    found: set[int] = set()
    for module in model.modules():
        hook = module.__dict__.get("_hf_hook")
        for each in getattr(hook, "hooks", (hook,)):
            if getattr(each, "offload", False):
                found.update(map(id, module.modules() if each.place_submodules else (module,)))
    return found


def memory_sharers(model: nn.Module) -> dict[int, str]:
    """Identities of Parameters whose memory another Parameter or buffer of the model lies in too, each with the name of
    such a one. Where two views of one memory interleave, such as columns, they count as overlapping."""
    views: dict[int, list[tuple[int, int, str, int]]] = defaultdict(list)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if type(tensor) in (nn.Parameter, torch.Tensor) and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin, end = (tensor.itemsize * (tensor.storage_offset() + at) for at in (0, last + 1))
            views[tensor.untyped_storage()._cdata].append((begin, end, plain_name(name), id(tensor)))
    found: dict[int, str] = {}
    for of_one_memory in views.values():
        furthest, *others = sorted(of_one_memory)
        for view in others:
            if view[0] < furthest[1]:
                found.setdefault(view[3], furthest[2])
                found.setdefault(furthest[3], view[2])
            furthest = max(furthest, view, key=lambda each: each[1])
    return found


def _is_router(name: str) -> bool:
    return not ROUTER_NAMES.isdisjoint(name.split("."))


def _head_test(modules) -> Callable[[nn.Module, list[str]], bool]:
    """A test for output heads: what `get_output_embeddings` returns, what shares a weight with an embedding, or what
    bears a head's name."""
    declared: set[int] = set()
    embeddings = {id(module._parameters.get("weight")) for module in modules if isinstance(module, nn.Embedding)}
    for module in modules:
        if callable(getattr(type(module), "get_output_embeddings", None)):
            # a backbone inherits the method without a head, or the name means something else in this model
            with contextlib.suppress(Exception):
                declared.update(map(id, module.get_output_embeddings().modules()))

    def is_head(module: nn.Module, names: list[str]) -> bool:
        weight = module._parameters.get("weight")
        return (
            id(module) in declared
            or (weight is not None and id(weight) in embeddings)
            or any(map(_has_head_name, names))
        )

    return is_head


def _adapter_parts(modules: Iterable[nn.Module]) -> set[int]:
    """Identities of the modules that PEFT put beside the layers it adapts, such as LoRA's A and B: products too small
    to gain from FP8, and the few weights that learn. PEFT calls the adapted layer `base_layer`."""
    return {
        id(part)
        for module in modules
        if isinstance(module._modules.get("base_layer"), nn.Module)
        for name, child in module._modules.items()
        if name != "base_layer" and child is not None
        for part in child.modules()
    }


def _adapted_parameters(modules: Iterable[nn.Module]) -> set[tuple[int, str]]:
    """Parameters that PEFT adapts themselves (`target_parameters`), by a wrapper for each that lies around the module.
    Each is (identity of the module, name of the Parameter)."""
    found = set()
    for module in modules:
        wrapped = module._modules.get("base_layer")
        if isinstance(wrapped, nn.Module) and isinstance(part := module.__dict__.get("parameter_name"), str):
            while isinstance(inner := wrapped._modules.get("base_layer"), nn.Module):
                wrapped = inner
            found.add((id(wrapped), part))
    return found


def _has_head_name(name: str) -> bool:
    segments = [part for part in name.split(".") if part not in _ADAPTER_SEGMENTS]
    return bool(segments) and (segments[-1] in HEAD_NAMES or (len(segments) == 1 and segments[0] in ROOT_HEAD_NAMES))


def _expert_counter(model, modules, names) -> Callable[[str, nn.Module, str], float]:
    """How many times a token passes a weight: the experts that it visits; 1 for what is no expert.

    The number comes from the model's configuration. Without one, every expert counts.
    """
    top_k = next((k for module in modules.values() if (k := _experts_per_token(module)) is not None), None)
    lists = {
        name: len(module)
        for key, module in modules.items()
        if isinstance(module, nn.ModuleList) and (name := names[key][0]).split(".")[-1] == "experts"
    }

    def visited(name: str, module: nn.Module, part: str) -> float:
        parameter = module._parameters.get(part)
        if parameter is not None and len(full_shape(parameter)) == 3:
            return top_k or full_shape(parameter)[0]
        listed = _LISTED_EXPERT.match(name)
        number = lists.get(listed[1]) if listed else None
        return top_k / number if top_k and number else 1

    return visited


_LISTED_EXPERT = re.compile(r"((?:.*\.)?experts)\.\d+(?:\.|$)")


def _experts_per_token(module: nn.Module) -> int | None:
    config = module.__dict__.get("config")
    parts = (config, getattr(config, "text_config", None))
    numbers = (getattr(part, field, None) for part in parts for field in _TOP_K_FIELDS)
    return next((number for number in numbers if isinstance(number, int)), None)
