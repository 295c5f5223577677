"""Run mixtures of experts in `transformers` through its registry of expert functions.

The weights of a block's experts are 3-D Parameters of one module, `gate_up_proj` (or `up_proj`) and
`down_proj`; class attributes describe their layout. The module's forward calls the function named
by its configuration (`_experts_implementation`); only converted modules name ours. Under expert
parallelism the weight is a DTensor split by experts, and forward sees only this rank's: ids count
from its first expert, and one past its last marks a foreign row. docs/experts.rst describes the
numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...formats.formats import COMPUTE_DTYPES
from ...tensors.block_codes import BlockCodes
from ...tensors.gathered_codes import WithoutTokens
from ...tensors.sharded_tensor import full_shape, is_distributed
from ...torch_tools.modules import CONTAINER, forward_obstacle, part_layer
from ..counts import result_dtype
from ..interface import Recipe
from ..native.weights import PLAIN, kind_of

IMPLEMENTATION = "fp8_backends"
"""This package's name in transformers' registry."""


def sizes_of(experts: nn.Module, part: str) -> tuple[int, int, int]:
    """Return (experts of all ranks, out, in) of the 3-D Parameter `part`."""
    count, *sizes = full_shape(experts._parameters[part])
    return count, *(reversed(sizes) if experts.is_transposed else sizes)


def own_experts(experts: nn.Module, part: str) -> slice:
    """Return this rank's experts of the 3-D Parameter `part`: all without expert parallelism. Not
    available inside a forward, where the Parameter is this rank's part."""
    weight = experts._parameters[part]
    if not (is_expert_parallel(experts) and is_distributed(weight)):
        return slice(0, full_shape(weight)[0])
    # FSDP2's mesh comes first: it gathers a weight before it runs
    first = weight.device_mesh.get_local_rank(weight.device_mesh.ndim - 1) * experts.num_experts
    return slice(first, first + experts.num_experts)


class ExpertWeight(nn.Module):
    """The stand-in for one 3-D weight of an experts module, which keeps the Parameter."""

    def __init__(self, experts: nn.Module, part: str, **base: Any) -> None:
        super().__init__(**base)
        self.fp8_part = part
        self.fp8_experts = (experts,)  # in a tuple, to be no child
        self.transposed_weight = experts.is_transposed
        """True if the Parameter is [experts, in, out], not [experts, out, in]."""

    @property
    def fp8_owner(self) -> tuple[nn.Module, str]:
        """The result of `torch_tools.modules.owner_of`."""
        return self.fp8_experts[0], self.fp8_part

    @property
    def weight(self) -> nn.Parameter:
        """The Parameter, in three dimensions."""
        return self.fp8_experts[0]._parameters[self.fp8_part]

    def detach(self) -> None:
        """Undo `ExpertWeights.attach` for this weight."""
        experts, part = self.fp8_owner
        if (weights := experts._modules.get(CONTAINER)) is None:
            return
        weights._modules.pop(part, None)
        if not weights:
            del experts._modules[CONTAINER]
            if isinstance(experts.config, ExpertsConfig):
                experts.config = experts.config.original


class ExpertWeights(nn.ModuleDict):
    """The converted weights of one experts module, by the Parameter's name; runs the module with
    them in FP8.

    Tokens [tokens, hidden] go to the experts `top_k_index` [tokens, k], and the results are added
    with the weights `top_k_weights` [tokens, k]. In high precision, and without tokens, the
    configuration's own function runs.
    """

    def has_fp8_products(self, experts: nn.Module) -> bool:
        """Return True if the weights have FP8 products in the mode of the module."""
        raise NotImplementedError

    def groups(self, ids: torch.Tensor, experts: int) -> Any:
        """Prepare the products' groups from sorted `ids`, int64 [rows]; `experts` marks rows of
        other ranks."""
        raise NotImplementedError

    def product(
        self,
        experts: nn.Module,
        part: str,
        x: torch.Tensor,
        groups: Any,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return [rows, out] from sorted rows [rows, in], each with its expert's weight and bias,
        converted or not."""
        raise NotImplementedError

    def run(self, experts: nn.Module, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
        in_fp8, has_tokens = self.runs_in_fp8(experts, hidden_states), hidden_states.numel() > 0
        if (
            in_fp8
            and not has_tokens
            and any(kind_of(weight).is_gathered for weight in experts.parameters())
        ):
            shape = hidden_states.shape[-1], hidden_states.dtype
            return WithoutTokens.apply(hidden_states, *shape, *experts.parameters())
        if not in_fp8 or not has_tokens:
            return function_before(experts)(experts, hidden_states, top_k_index, top_k_weights)
        out_dtype, (tokens, k) = result_dtype(hidden_states), top_k_index.shape
        ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
        first = first_weight(experts)
        number = len(own_part(experts, first))
        groups = self.groups(ids, number)
        # rows of other ranks are at the end: zeros keep them out of the amaxes
        foreign = (ids >= number).unsqueeze(1) if is_expert_parallel(experts) else None
        x = _without(foreign, hidden_states.index_select(0, order // k))
        y = _without(foreign, self.product(experts, first, x, groups, out_dtype))
        y = experts._apply_gate(y) if has_gate(experts) else experts.act_fn(y)
        y = _without(foreign, self.product(experts, "down_proj", y, groups, out_dtype))
        if getattr(experts, "has_post_expert_norm", False):
            y = experts.post_expert_norm(y)
        y = y * top_k_weights.reshape(-1).index_select(0, order).unsqueeze(-1)
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        return y.index_select(0, back).view(tokens, k, -1).sum(1).to(hidden_states.dtype)

    def runs_in_fp8(self, experts: nn.Module, hidden_states: torch.Tensor) -> bool:
        """Return True if these tokens would be multiplied in FP8 now."""
        return self.has_fp8_products(experts) and result_dtype(hidden_states) in COMPUTE_DTYPES

    def attach(self, experts: nn.Module) -> None:
        """Run the module with these weights in FP8, in addition to earlier ones."""
        _register()
        self.train(experts.training)
        if CONTAINER in experts._modules:
            experts._modules[CONTAINER].update(self)
        else:
            experts.add_module(CONTAINER, self)
            experts.config = ExpertsConfig(experts.config)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _register()  # a process that unpickles may have converted nothing


def _without(foreign: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Zero the `foreign` rows [rows, 1], in the gradient too."""
    return rows if foreign is None else rows.masked_fill(foreign, 0.0)


class ExpertsConfig:
    """The configuration of a converted experts module: the model's own except for the experts'
    function. A separate object, since other modules share the model's, and this module must ignore
    later changes of the function."""

    _experts_implementation = IMPLEMENTATION

    def __init__(self, config: Any) -> None:
        self.original = config

    def __getattr__(self, name: str) -> Any:
        if name == "original" or name.startswith("__"):  # a copy in the making has none yet
            raise AttributeError(name)
        return getattr(self.original, name)


def obstacle(experts: nn.Module, part: str) -> str | None:
    """Return the reason why this 3-D Parameter cannot run through the registry with any backend, or
    None."""
    weight = experts._parameters[part]
    if part_layer(experts, part) is not None:
        return None
    if type(experts).__module__.startswith("transformers.") and _registry() is None:
        return "expert weights in one 3-D Parameter: this transformers has no registry of expert functions (5.0 has)"
    if part not in _parts(experts):
        return f"{type(experts).__name__} multiplies by this 3-D Parameter outside transformers' expert functions"
    if replaced := forward_obstacle(experts):
        return replaced
    if torch.nn.utils.parametrize.is_parametrized(experts):
        return "parametrized: its weight is computed anew in each forward"
    if not weight.is_floating_point():
        return f"weight dtype {weight.dtype} is not a floating-point type"
    if not type(weight).__module__.startswith("torch.") and not isinstance(weight, BlockCodes):
        return f"its weight is a {type(weight).__name__}, which has products of its own"
    return None


def misfit(experts: nn.Module, part: str, recipe: Recipe) -> str | None:
    """Return the reason why no backend multiplies by this 3-D Parameter in FP8, or None."""
    weight = experts._parameters[part]
    if weight.dtype not in COMPUTE_DTYPES:
        return f"weight dtype {weight.dtype} is not one of fp32, bf16, fp16"
    if 0 in full_shape(weight):
        return "experts of size zero have no product"
    if recipe.fp8_params and kind_of(weight) is PLAIN:
        return "fp8_params stores 2-D weights in FP8, and leaves those of experts in high precision"
    return None


def _parts(experts: nn.Module) -> tuple[str, ...]:
    """Name the weights that the registry's functions multiply by; none for an unregistered
    class."""
    registered = hasattr(type(experts), "_apply_gate") and hasattr(
        type(experts).forward, "__wrapped__"
    )
    # every version of the registry sets these attributes
    declared = all(hasattr(experts, name) for name in ("config", "has_bias", "is_transposed"))
    return (
        (first_weight(experts), "down_proj")
        if registered and declared and _registry() is not None
        else ()
    )


def first_weight(experts: nn.Module) -> str:
    """Name the weight of the first product."""
    return "gate_up_proj" if has_gate(experts) else "up_proj"


def is_expert_parallel(experts: nn.Module) -> bool:
    """Return True if each rank of a mesh has other experts, and ids count from this rank's
    first."""
    return getattr(experts, "_is_expert_parallel", False)


def own_part(experts: nn.Module, name: str) -> torch.Tensor:
    """Return this rank's part of a Parameter in forward, differentiable; only a shard by hand is a
    DTensor."""
    parameter = getattr(experts, name)
    return parameter.to_local() if is_distributed(parameter) else parameter


def has_gate(experts: nn.Module) -> bool:
    """Return True if the first product computes a gate too; always, if the registry does not
    tell."""
    return getattr(experts, "has_gate", True)


def function_before(experts: nn.Module) -> Callable:
    """Return the function of this module before its conversion."""
    default = type(experts).forward.__wrapped__
    config = (
        experts.config.original if isinstance(experts.config, ExpertsConfig) else experts.config
    )
    name = config._experts_implementation
    return default if name in (None, IMPLEMENTATION) else _registry().get(name, default)


def _run(experts: nn.Module, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
    weights = experts._modules.get(CONTAINER)
    if weights is None:  # named by a user's configuration; nothing is converted
        return function_before(experts)(experts, hidden_states, top_k_index, top_k_weights)
    return weights.run(experts, hidden_states, top_k_index, top_k_weights)


def _registry():
    """Return transformers' registry without importing it: an unimported transformers has no
    experts."""
    module = sys.modules.get("transformers.integrations.moe")
    return getattr(module, "ALL_EXPERTS_FUNCTIONS", None)


def _register() -> None:
    registry = _registry()
    if registry is not None and IMPLEMENTATION not in registry:
        registry.register(IMPLEMENTATION, _run)
