"""Mixtures of experts in `transformers`: their products run through its registry of expert functions.

Such a model keeps the weights of all experts of a block in 3-D Parameters of one module, `gate_up_proj` (or `up_proj`)
and `down_proj`. The module's class says with attributes how they lie (`is_transposed`, `has_bias`, `has_gate`), and
its forward calls the function that the configuration names (`_experts_implementation`). Here a function of this package
joins that registry, and converted modules, and only these, name it.

Under expert parallelism (transformers' `MoEParamShard`) a weight is a DTensor whose first dimension, that of experts,
lies on the ranks of a mesh. The module's forward then sees this rank's experts alone, and the ids that it gets count
from the first of them; one past the last marks a row that belongs to another rank.

A converted weight stays the module's own Parameter. Its counter and scaling state lie in an `ExpertWeight` beside it,
under `fp8_weights`, a segment that the names of this package leave out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..numerics.formats import COMPUTE_DTYPES
from ..numerics.gathered_codes import GatheredCodes, WithoutTokens
from ..numerics.modules import CONTAINER, forward_obstacle
from ..numerics.scaling import Blocks, Quantized
from ..numerics.sharded_tensor import full_shape, is_distributed

NAME = "fp8_backends"
"""The name of the function in transformers' registry."""


def sizes_of(experts: nn.Module, part: str) -> tuple[int, int, int]:
    """(experts of all ranks, out, in) of the 3-D Parameter `part`."""
    count, *sizes = full_shape(experts._parameters[part])
    return count, *(reversed(sizes) if experts.is_transposed else sizes)


def own_experts(experts: nn.Module, part: str) -> slice:
    """Those that this rank runs of the 3-D Parameter `part`: all of them, without expert parallelism. To be asked
    outside of a forward, in which the Parameter is this rank's part."""
    weight = experts._parameters[part]
    if not (is_expert_parallel(experts) and is_distributed(weight)):
        return slice(0, full_shape(weight)[0])
    # the mesh of FSDP2, which gathers a weight before it runs, comes first
    first = weight.device_mesh.get_local_rank(weight.device_mesh.ndim - 1) * experts.num_experts
    return slice(first, first + experts.num_experts)


class ExpertWeight(nn.Module):
    """Stands for one 3-D weight of an experts module, which goes on holding the Parameter itself.

    Args:
        base: what a class beside this one is built with.
    """

    def __init__(self, experts: nn.Module, part: str, **base: Any) -> None:
        super().__init__(**base)
        self.fp8_part = part
        self.fp8_experts = (experts,)  # in a tuple, lest it becomes a child
        self.fp8_transposed = experts.is_transposed
        """Whether the Parameter is [experts, in, out], and not [experts, out, in]."""

    @property
    def fp8_owner(self) -> tuple[nn.Module, str]:
        """What `numerics.modules.owner_of` returns."""
        return self.fp8_experts[0], self.fp8_part

    @property
    def weight(self) -> nn.Parameter:
        """The Parameter, in three dimensions."""
        return self.fp8_experts[0]._parameters[self.fp8_part]

    @property
    def own_experts(self) -> slice:
        """`own_experts` of the Parameter."""
        return own_experts(self.fp8_experts[0], self.fp8_part)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(experts of all ranks, out, in)"""
        return sizes_of(self.fp8_experts[0], self.fp8_part)


class ExpertWeights(nn.ModuleDict):
    """The converted weights of one experts module, by the Parameter's name. Runs the module with them in FP8.

    Tokens [tokens, hidden] go to the experts `top_k_index` [tokens, k], and the results are added with the weights
    `top_k_weights` [tokens, k], as in the module that it stands in for. Products come in the autocast dtype if autocast
    is on, else in the input's. In eval mode, unless the recipe says `use_autocast_during_eval`, and without tokens,
    the function runs that the model's configuration names.
    """

    @property
    def fp8_in_eval(self) -> bool:
        """Whether the recipe has FP8 in eval mode too."""
        raise NotImplementedError

    def groups(self, ids: torch.Tensor, experts: int) -> Any:
        """What products ask of the experts of sorted rows: `ids`, int64 [rows], rising; `experts` for rows that belong
        to none of this rank's."""
        raise NotImplementedError

    def product(
        self,
        experts: nn.Module,
        part: str,
        x: torch.Tensor,
        groups: Any,
        out_dtype: torch.dtype,
        arrived: Quantized | None = None,
    ) -> torch.Tensor:
        """[rows, out] from sorted rows [rows, in], each with its expert's weight and bias, converted or not. `arrived`
        has the codes of x for fprop, where somebody made them before."""
        raise NotImplementedError

    def run(self, experts: nn.Module, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
        in_fp8, has_tokens = self.runs_in_fp8(experts, hidden_states), hidden_states.numel() > 0
        if in_fp8 and not has_tokens and any(isinstance(weight, GatheredCodes) for weight in experts.parameters()):
            shape = hidden_states.shape[-1], hidden_states.dtype
            return WithoutTokens.apply(hidden_states, *shape, *experts.parameters())
        if not in_fp8 or not has_tokens:
            return function_before(experts)(experts, hidden_states, top_k_index, top_k_weights)
        out_dtype, (tokens, k) = _out_dtype(hidden_states), top_k_index.shape
        ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
        first = first_weight(experts)
        number = len(own_part(experts, first))
        groups = self.groups(ids, number)
        # rows for the experts of other ranks lie at the end: zeros there keep out of the amaxes what belongs to none
        foreign = (ids >= number).unsqueeze(1) if is_expert_parallel(experts) else None
        x = _without(foreign, hidden_states.index_select(0, order // k))
        arrived = self.codes_taken(hidden_states)
        if arrived is not None:
            rows = order // k  # FP8 has no kernel that selects
            arrived = Quantized(*(p.view(torch.uint8).index_select(0, rows).view(p.dtype) for p in arrived))
        y = _without(foreign, self.product(experts, first, x, groups, out_dtype, arrived))
        y = experts._apply_gate(y) if has_gate(experts) else experts.act_fn(y)
        y = _without(foreign, self.product(experts, "down_proj", y, groups, out_dtype))
        if getattr(experts, "has_post_expert_norm", False):
            y = experts.post_expert_norm(y)
        y = y * top_k_weights.reshape(-1).index_select(0, order).unsqueeze(-1)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return y.index_select(0, back).view(tokens, k, -1).sum(1).to(hidden_states.dtype)

    def runs_in_fp8(self, experts: nn.Module, hidden_states: torch.Tensor) -> bool:
        """Whether these tokens would be multiplied in FP8 now."""
        return (experts.training or self.fp8_in_eval) and _out_dtype(hidden_states) in COMPUTE_DTYPES

    def blocks_of_tokens(self, experts: nn.Module, hidden_states: torch.Tensor) -> Blocks | None:
        """The blocks in which the first product takes its tokens [tokens, hidden], by which they may travel between
        ranks as codes; `ROWS` where it has one scale for many. None where it does not run in FP8 now."""
        return None

    def take_codes(self, tokens: torch.Tensor, codes: Quantized) -> None:
        """Note in which codes these very tokens arrived."""

    def codes_taken(self, tokens: torch.Tensor) -> Quantized | None:
        """The codes in which these tokens arrived, as fprop takes them, or None."""
        return None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _register()  # unpickled, maybe by a process that has converted nothing


def _out_dtype(hidden_states: torch.Tensor) -> torch.dtype:
    """Of products with these tokens."""
    device = hidden_states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype


def _without(foreign: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """These rows with zeros for those that are `foreign` [rows, 1], in their gradient too."""
    return rows if foreign is None else rows.masked_fill(foreign, 0.0)


class ExpertsConfig:
    """The configuration of a converted experts module: the model's own in all but the function that runs it. Other
    modules share the model's, and this one must not follow when the model is told to use another function."""

    _experts_implementation = NAME

    def __init__(self, config: Any) -> None:
        self.original = config

    def __getattr__(self, name: str) -> Any:
        if name == "original" or name.startswith("__"):  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.original, name)


def obstacle(experts: nn.Module, part: str) -> str | None:
    """Why this 3-D Parameter cannot run through the registry, whatever the backend; or None."""
    weight = experts._parameters[part]
    if converted_weight(experts, part) is not None:
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
    if not type(weight).__module__.startswith("torch."):
        return f"its weight is a {type(weight).__name__}, which has products of its own"
    return None


def unfit(experts: nn.Module, part: str, fp8_params: bool) -> str | None:
    """Why no backend multiplies by this 3-D Parameter in FP8, or None. `fp8_params`: the recipe's."""
    weight = experts._parameters[part]
    if weight.dtype not in COMPUTE_DTYPES:
        return f"weight dtype {weight.dtype} is not one of fp32, bf16, fp16"
    if 0 in full_shape(weight):
        return "experts of size zero have no product"
    if fp8_params:
        return "fp8_params stores 2-D weights in FP8, and leaves those of experts in high precision"
    return None


def converted_weight(experts: nn.Module, part: str) -> ExpertWeight | None:
    """What stands for this Parameter where it was converted."""
    weights = experts._modules.get(CONTAINER)
    return weights._modules.get(part) if isinstance(weights, ExpertWeights) else None


def _parts(experts: nn.Module) -> tuple[str, ...]:
    """Names of the weights that the functions of the registry multiply by; none for a class outside of it."""
    registered = hasattr(type(experts), "_apply_gate") and hasattr(type(experts).forward, "__wrapped__")
    # attributes that every version of the registry gives to its modules
    declared = all(hasattr(experts, name) for name in ("config", "has_bias", "is_transposed"))
    return (first_weight(experts), "down_proj") if registered and declared and _registry() is not None else ()


def first_weight(experts: nn.Module) -> str:
    """The name of the weight that is multiplied first."""
    return "gate_up_proj" if has_gate(experts) else "up_proj"


def is_expert_parallel(experts: nn.Module) -> bool:
    """Whether each rank of a mesh has other experts, and ids count those of this rank."""
    return getattr(experts, "_is_expert_parallel", False)


def own_part(experts: nn.Module, name: str) -> torch.Tensor:
    """What this rank has of a Parameter in the module's forward, differentiable. transformers' plans put it there; who
    shards by hand may leave a DTensor."""
    parameter = getattr(experts, name)
    return parameter.to_local() if is_distributed(parameter) else parameter


def has_gate(experts: nn.Module) -> bool:
    """Whether the first product makes a gate beside what it gates; where the registry does not say so yet, all do."""
    return getattr(experts, "has_gate", True)


def attach(experts: nn.Module, weights: ExpertWeights) -> None:
    """Let a module run with these weights in FP8, beside others that it has already."""
    _register()
    if CONTAINER in experts._modules:
        experts._modules[CONTAINER].update(weights)
        return
    experts.add_module(CONTAINER, weights)
    experts.config = ExpertsConfig(experts.config)


def detach(module: nn.Module, parts: Iterable[str] | None = None) -> None:
    """Undo `attach`, where it was done, for all weights or for those of these names."""
    weights = module._modules.get(CONTAINER)
    if not isinstance(weights, ExpertWeights):
        return
    for part in list(weights) if parts is None else parts:
        weights._modules.pop(part, None)
    if not weights:
        del module._modules[CONTAINER]
        if isinstance(module.config, ExpertsConfig):
            module.config = module.config.original


def function_before(experts: nn.Module) -> Callable:
    """What would run this module had it not been converted."""
    own = type(experts).forward.__wrapped__
    config = experts.config.original if isinstance(experts.config, ExpertsConfig) else experts.config
    name = config._experts_implementation
    return own if name in (None, NAME) else _registry().get(name, own)


def _run(experts: nn.Module, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
    weights = experts._modules.get(CONTAINER)
    if weights is None:  # named by a user's configuration; nothing is converted
        return function_before(experts)(experts, hidden_states, top_k_index, top_k_weights)
    return weights.run(experts, hidden_states, top_k_index, top_k_weights)


def _registry():
    """transformers' registry, without importing transformers: where it was never imported, there are no experts."""
    module = sys.modules.get("transformers.integrations.moe")
    return getattr(module, "ALL_EXPERTS_FUNCTIONS", None)


def _register() -> None:
    registry = _registry()
    if registry is not None and NAME not in registry:
        registry.register(NAME, _run)
