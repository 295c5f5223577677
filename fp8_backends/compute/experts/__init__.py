"""Run mixtures of experts in `transformers` through its registries of expert functions and of
exchanges of tokens.

The weights of a block's experts are 3-D Parameters of one module, `gate_up_proj` (or `up_proj`) and
`down_proj`; class attributes describe their layout. The module's forward calls the function named
by its configuration (`_experts_implementation`); only converted modules name ours. Under expert
parallelism the weight is a DTensor split by experts, and forward sees only this rank's: ids count
from its first expert, and one past its last marks a foreign row. docs/experts.rst describes the
numbers, and the bytes of an exchange with `activation_comm="fp8"`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import FP8BackendError
from ...formats.formats import COMPUTE_DTYPES, E4M3
from ...formats.scaling import Blocks, Quantized
from ...kernels.quantize import dequantize_blocks, quantize_blocks
from ...tensors.gathered_codes import GatheredCodes, WithoutTokens
from ...tensors.sharded_tensor import full_shape, is_distributed
from ...torch_tools.modules import CONTAINER, forward_obstacle, part_layer
from ..counts import result_dtype
from ..interface import Recipe
from ..refusals import refuse_second_derivative

NAME = "fp8_backends"
"""This package's name in transformers' registries."""


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
        """Undo `ExpertWeights.attach` for this weight, and `install_exchange`."""
        experts, part = self.fp8_owner
        exchange = exchange_of(experts.__dict__.get("forward"))
        if isinstance(exchange, FP8AllToAll) and exchange.before is not None:
            experts.forward = exchange.before
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
        arrived=None,
    ) -> torch.Tensor:
        """Return [rows, out] from sorted rows [rows, in], each with its expert's weight and bias,
        converted or not. `arrived`: the `Quantized` x for fprop, if another rank sent it."""
        raise NotImplementedError

    def run(self, experts: nn.Module, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
        in_fp8, has_tokens = self.runs_in_fp8(experts, hidden_states), hidden_states.numel() > 0
        if (
            in_fp8
            and not has_tokens
            and any(isinstance(weight, GatheredCodes) for weight in experts.parameters())
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
        arrived = self.codes_taken(hidden_states)
        if arrived is not None:
            rows = order // k  # `index_select` has no float8 kernel
            arrived = Quantized(
                *(p.view(torch.uint8).index_select(0, rows).view(p.dtype) for p in arrived)
            )
        y = _without(foreign, self.product(experts, first, x, groups, out_dtype, arrived))
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

    def blocks_of_tokens(self, experts: nn.Module, hidden_states: torch.Tensor) -> Blocks | None:
        """Return the blocks for tokens [tokens, hidden] to travel in as codes: the first product's,
        or `ROWS` if it has one scale for a tensor. None if it does not run in FP8 now."""
        return None

    def take_codes(self, tokens: torch.Tensor, codes: Quantized) -> None:
        """Store the codes in which these very tokens arrived."""

    def codes_taken(self, tokens: torch.Tensor) -> Quantized | None:
        """Return the codes in which these tokens arrived, if fprop reads them, or None."""
        return None

    def attach(self, experts: nn.Module, recipe: Recipe) -> None:
        """Run the module with these weights in FP8, in addition to earlier ones."""
        _register()
        if CONTAINER in experts._modules:
            experts._modules[CONTAINER].update(self)
        else:
            experts.add_module(CONTAINER, self)
            experts.config = ExpertsConfig(experts.config)
        if recipe.activation_comm == "fp8":
            install_exchange(experts)

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

    _experts_implementation = NAME

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
    if not type(weight).__module__.startswith("torch."):
        return f"its weight is a {type(weight).__name__}, which has products of its own"
    return None


def misfit(experts: nn.Module, part: str, recipe: Recipe) -> str | None:
    """Return the reason why no backend multiplies by this 3-D Parameter in FP8, or None."""
    weight = experts._parameters[part]
    if weight.dtype not in COMPUTE_DTYPES:
        return f"weight dtype {weight.dtype} is not one of fp32, bf16, fp16"
    if 0 in full_shape(weight):
        return "experts of size zero have no product"
    if recipe.fp8_params:
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
    return default if name in (None, NAME) else _registry().get(name, default)


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
    if registry is not None and NAME not in registry:
        registry.register(NAME, _run)


_PARENT = "AllToAllEP"
_EXCHANGES = (_PARENT, "AutoEP")
"""transformers' implementations with an exchange of tokens."""


def install_exchange(experts: nn.Module) -> None:
    """Let tokens between ranks travel in FP8, if transformers exchanges them. Raises for another
    exchange."""
    before = experts.__dict__.get("forward")
    implementation = exchange_of(before)
    if implementation is None or isinstance(implementation, FP8AllToAll):
        return
    _parallelism().EPImplementationInterface.register(NAME, _implementation())
    del experts.forward
    style = _parallelism().ALL_PARALLEL_STYLES["ep_dispatch_experts"]
    style.install_forward(
        experts, implementation.ep_mesh, tp_mesh=implementation.tp_mesh, ep_implementation=NAME
    )
    installed = exchange_of(experts.forward)
    installed.plain, installed.before = implementation, before


def _parallelism() -> Any:
    """Return transformers' module without importing it: an unimported one shares no experts."""
    return sys.modules.get("transformers.distributed.expert_parallel")


def exchange_of(forward: Any) -> Any:
    """Return transformers' exchange of tokens in an experts module's forward; None for any other
    forward."""
    code = getattr(forward, "__code__", None)
    if _parallelism() is None or code is None or "implementation" not in code.co_freevars:
        return None
    implementation = forward.__closure__[code.co_freevars.index("implementation")].cell_contents
    exchanges = tuple(
        getattr(_parallelism(), name) for name in _EXCHANGES if hasattr(_parallelism(), name)
    )
    return implementation if isinstance(implementation, exchanges) else None


@functools.cache
def _implementation() -> type:
    """Derive `FP8AllToAll` from transformers' class, for its private methods."""
    parent = getattr(_parallelism(), _PARENT)
    state = getattr(_parallelism(), "_AllToAllState", None)
    fields = {"top_k_weights", "order", "send_sizes", "recv_sizes", "num_tokens"}
    has_methods = all(hasattr(parent, name) for name in ("_dispatch_tokens", "_combine_tokens"))
    if not has_methods or state is None or not fields <= set(state._fields):
        raise FP8BackendError(
            'activation_comm="fp8" needs the exchange of tokens as transformers 5.23 has it '
            f'({_PARENT}), and this version has another: use activation_comm="plain", or a version '
            "of transformers that this package is "
            "tested with"
        )
    return type("FP8AllToAllEP", (FP8AllToAll, parent), {"__doc__": FP8AllToAll.__doc__})


class FP8AllToAll:
    """transformers' exchange of tokens by all-to-all, as FP8 codes with scales, or without FP8
    products as before."""

    before = None
    """The replaced forward of the module."""

    def __init__(self, experts: nn.Module, ep_mesh, tp_mesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.plain = _parallelism().AutoEP(experts, ep_mesh, tp_mesh)
        """The exchange for tokens that do not travel in FP8."""

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        weights = self.experts._modules.get(CONTAINER)
        if weights is None or weights.blocks_of_tokens(self.experts, hidden_states) is None:
            return self.plain(hidden_states, top_k_index, top_k_weights)
        return super().__call__(hidden_states, top_k_index, top_k_weights)

    def _dispatch_tokens(self, hidden_states, top_k_index, top_k_weights):
        """Override the parent's method."""
        weights, columns = self.experts._modules[CONTAINER], hidden_states.shape[1]
        blocks = weights.blocks_of_tokens(self.experts, hidden_states)
        with torch.no_grad():
            sent = quantize_blocks(hidden_states, blocks, E4M3, columns=False)
        scales_dtype = sent.scale_inv.dtype
        message = torch.cat(
            [part.contiguous().view(torch.uint8) for part in (sent.codes, sent.scale_inv)], 1
        )
        message, ids, ones, state = super()._dispatch_tokens(message, top_k_index, top_k_weights)
        codes, scales = (part.contiguous() for part in message.tensor_split([columns], 1))
        arrived = Quantized(codes.view(E4M3.dtype), scales.view(scales_dtype))
        sent_state = state._replace(top_k_weights=state.top_k_weights.detach())
        tokens = _Arrived.apply(
            hidden_states, self, sent_state, _wire_dtype(hidden_states), blocks, *arrived
        )
        weights.take_codes(tokens, arrived)
        return tokens, ids, ones.to(tokens.dtype), state

    def gradients_back(
        self, state, wire_dtype: torch.dtype, gradient: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradients of sent tokens from the gradients of arrived tokens."""
        (rows, visited), columns, dtype = (
            state.top_k_weights.shape,
            gradient.shape[1],
            gradient.dtype,
        )
        gradient = gradient.to(wire_dtype).contiguous()
        pairs = gradient.new_empty(sum(state.send_sizes), columns)
        group = self.ep_mesh.get_group()
        dist.all_to_all_single(pairs, gradient, state.send_sizes, state.recv_sizes, group=group)
        tokens = gradient.new_zeros(rows, columns, dtype=dtype).index_add_(
            0, state.order // visited, pairs.to(dtype)
        )
        if self.tp_mesh.size() == 1:
            return tokens
        from torch.distributed.tensor import DTensor, Shard

        # each rank has sent its part
        whole = {"shape": (state.num_tokens, columns), "stride": (columns, 1)}
        return DTensor.from_local(tokens, self.tp_mesh, [Shard(0)], **whole).full_tensor()

    def _combine_tokens(self, expert_output, state):
        """Override the parent's method: weight results in the dtype of an exchange without FP8."""
        exact = not getattr(self.experts, "has_post_expert_norm", False)
        dtype = torch.promote_types(state.top_k_weights.dtype, expert_output.dtype)
        state = state._replace(top_k_weights=state.top_k_weights.to(dtype))
        sent = expert_output.to(_wire_dtype(expert_output)) if exact else expert_output
        return super()._combine_tokens(sent, state)


class _Arrived(torch.autograd.Function):
    """The values of arrived codes; their gradient goes to the sent tokens."""

    @staticmethod
    def forward(ctx, hidden_states, exchange, state, wire_dtype, blocks, codes, scale_inv):
        ctx.exchange, ctx.state, ctx.wire_dtype, dtype = (
            exchange,
            state,
            wire_dtype,
            hidden_states.dtype,
        )
        exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        return dequantize_blocks(Quantized(codes, scale_inv), blocks, exact).to(dtype)

    @staticmethod
    def backward(ctx, gradient):
        refuse_second_derivative(gradient)
        return ctx.exchange.gradients_back(ctx.state, ctx.wire_dtype, gradient), *(None,) * 6


def _wire_dtype(values: torch.Tensor) -> torch.dtype:
    """Return the dtype of results and gradients on the wire: bf16 if products return it, else their
    own."""
    return torch.bfloat16 if result_dtype(values) == torch.bfloat16 else values.dtype
