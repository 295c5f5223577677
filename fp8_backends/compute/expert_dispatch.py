"""Tokens that travel to the experts of other ranks as FP8 codes (`activation_comm="fp8"`).

transformers' expert parallelism sends each pair of a token and an expert to the expert's rank by an all-to-all, and the
results back by a second one (`AllToAllEP`). A class here derives from it and joins transformers' registry of such
implementations. Of a pair with H values travel

    forward, to the expert      E4M3 codes and their scales, H + 4 bytes with one scale
    forward, back               results in bf16 under autocast in bf16, which is what products give; else in the
                                tokens' dtype
    backward                    both gradients, in that dtype

so nothing is rounded but the tokens. Rules whose scales lie along the contraction (`rowwise`, `blockwise`, `mxfp8`)
make the very codes on the sender that fprop multiplies, and the rows need no further cast there; wgrad, which contracts
rows, casts the values that the codes stand for. All other rules get codes with a scale for each row, and cast their
values once more, with the scale of an expert.

In evaluation without FP8 tokens travel as they did before.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..errors import FP8BackendError
from ..numerics.formats import E4M3
from ..numerics.kernels.quantize.dispatch import dequantize_blocks, quantize_blocks
from ..numerics.modules import CONTAINER
from ..numerics.scaling import Quantized
from .refusals import refuse_second_derivative

NAME = "fp8_backends"
"""The name of the implementation in transformers' registry."""

_PARENT = "AllToAllEP"
_EXCHANGES = (_PARENT, "AutoEP")
"""transformers' implementations in which tokens travel."""


def install(experts: nn.Module) -> None:
    """Let the tokens of a converted experts module travel in FP8, where transformers exchanges them between ranks.

    Raises:
        FP8BackendError: this transformers exchanges them in another way.
    """
    before = experts.__dict__.get("forward")
    implementation = _implementation_of(before)
    if implementation is None or isinstance(implementation, FP8AllToAll):
        return
    _transformers().EPImplementationInterface.register(NAME, _implementation())
    del experts.forward
    style = _transformers().ALL_PARALLEL_STYLES["ep_dispatch_experts"]
    style.install_forward(experts, implementation.ep_mesh, tp_mesh=implementation.tp_mesh, ep_implementation=NAME)
    installed = _implementation_of(experts.forward)
    installed.plain, installed.before = implementation, before


def uninstall(module: nn.Module) -> None:
    """Undo `install`, where it was done."""
    installed = _implementation_of(module.__dict__.get("forward"))
    if isinstance(installed, FP8AllToAll) and installed.before is not None:
        module.forward = installed.before


def _transformers() -> Any:
    """transformers' module, without importing it: where it was never imported, no experts are shared out."""
    return sys.modules.get("transformers.distributed.expert_parallel")


def _implementation_of(forward: Any) -> Any:
    """What exchanges the tokens in a forward that transformers put on an experts module; None for any other forward,
    and for an implementation in which no tokens travel."""
    code = getattr(forward, "__code__", None)
    if _transformers() is None or code is None or "implementation" not in code.co_freevars:
        return None
    found = forward.__closure__[code.co_freevars.index("implementation")].cell_contents
    exchanges = tuple(getattr(_transformers(), name) for name in _EXCHANGES if hasattr(_transformers(), name))
    return found if isinstance(found, exchanges) else None


@functools.cache
def _implementation() -> type:
    """`FP8AllToAll` as a subclass of transformers' class, of which it takes methods that are private."""
    parent = getattr(_transformers(), _PARENT)
    state = getattr(_transformers(), "_AllToAllState", None)
    wanted = {"top_k_weights", "order", "send_sizes", "recv_sizes", "num_tokens"}
    known = all(hasattr(parent, name) for name in ("_dispatch_tokens", "_combine_tokens"))
    if not known or state is None or not wanted <= set(state._fields):
        raise FP8BackendError(
            f'activation_comm="fp8" needs the exchange of tokens as transformers 5.23 has it ({_PARENT}), and this '
            f'version has another: use activation_comm="plain", or a version of transformers that this package is '
            f"tested with"
        )
    return type("FP8AllToAllEP", (FP8AllToAll, parent), {"__doc__": FP8AllToAll.__doc__})


class FP8AllToAll:
    """transformers' exchange of tokens by all-to-all, in which they travel as FP8 codes with their scales."""

    before = None
    """The module's forward in place of which this one was installed, if it was."""

    def __init__(self, experts: nn.Module, ep_mesh, tp_mesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.plain = _transformers().AutoEP(experts, ep_mesh, tp_mesh)
        """What exchanges the tokens where they do not travel in FP8."""

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        weights = self.experts._modules.get(CONTAINER)
        if weights is None or weights.blocks_of_tokens(self.experts, hidden_states) is None:
            return self.plain(hidden_states, top_k_index, top_k_weights)
        return super().__call__(hidden_states, top_k_index, top_k_weights)

    def _dispatch_tokens(self, hidden_states, top_k_index, top_k_weights):
        """As in the class that this derives from."""
        weights, columns = self.experts._modules[CONTAINER], hidden_states.shape[1]
        blocks = weights.blocks_of_tokens(self.experts, hidden_states)
        with torch.no_grad():
            sent = quantize_blocks(hidden_states, blocks, E4M3, columns=False)
        scales_dtype = sent.scale_inv.dtype
        message = torch.cat([part.contiguous().view(torch.uint8) for part in (sent.codes, sent.scale_inv)], 1)
        message, ids, ones, state = super()._dispatch_tokens(message, top_k_index, top_k_weights)
        codes, scales = (part.contiguous() for part in message.tensor_split([columns], 1))
        arrived = Quantized(codes.view(E4M3.dtype), scales.view(scales_dtype))
        route = _Route.of(self, state, _wire_dtype(hidden_states))
        tokens = _Arrived.apply(hidden_states, route, blocks, *arrived)
        weights.take_codes(tokens, arrived)
        return tokens, ids, ones.to(tokens.dtype), state

    def _combine_tokens(self, expert_output, state):
        """As in the class that this derives from: results are weighted in the dtype in which they would have come."""
        exact = not getattr(self.experts, "has_post_expert_norm", False)
        dtype = torch.promote_types(state.top_k_weights.dtype, expert_output.dtype)
        state = state._replace(top_k_weights=state.top_k_weights.to(dtype))
        sent = expert_output.to(_wire_dtype(expert_output)) if exact else expert_output
        return super()._combine_tokens(sent, state)


class _Route(NamedTuple):
    """How tokens came to this rank, and how their gradients go back."""

    order: torch.Tensor
    """int64 [pairs sent], the pairs in the order in which they were sent."""
    visited: int
    """Experts that a token visits."""
    tokens: int
    """Tokens of this rank."""
    shared_tokens: int
    """Tokens of all ranks that hold the same batch (tensor parallelism), each of which sends its part."""
    sent: list[int]
    received: list[int]
    ep_group: dist.ProcessGroup
    tp_mesh: Any
    dtype: torch.dtype
    """In which gradients travel."""

    @classmethod
    def of(cls, exchange: FP8AllToAll, state: Any, dtype: torch.dtype) -> _Route:
        tokens, visited = state.top_k_weights.shape
        sizes = (visited, tokens, state.num_tokens, state.send_sizes, state.recv_sizes)
        return cls(state.order, *sizes, exchange.ep_mesh.get_group(), exchange.tp_mesh, dtype)

    def back(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradients of tokens that were sent, from those of tokens that arrived."""
        columns, dtype = gradient.shape[1], gradient.dtype
        gradient = gradient.to(self.dtype).contiguous()
        pairs = gradient.new_empty(sum(self.sent), columns)
        dist.all_to_all_single(pairs, gradient, self.sent, self.received, group=self.ep_group)
        tokens = gradient.new_zeros(self.tokens, columns, dtype=dtype)
        tokens.index_add_(0, self.order // self.visited, pairs.to(dtype))
        if self.tp_mesh.size() == 1:
            return tokens
        from torch.distributed.tensor import DTensor, Shard

        whole = {"shape": (self.shared_tokens, columns), "stride": (columns, 1)}
        return DTensor.from_local(tokens, self.tp_mesh, [Shard(0)], **whole).full_tensor()


class _Arrived(torch.autograd.Function):
    """The values of codes that arrived; their gradient goes to the tokens that were sent."""

    @staticmethod
    def forward(ctx, hidden_states, route, blocks, codes, scale_inv):
        ctx.route, dtype = route, hidden_states.dtype
        values = dequantize_blocks(
            Quantized(codes, scale_inv), blocks, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        )
        return values.to(dtype)

    @staticmethod
    def backward(ctx, gradient):
        refuse_second_derivative()
        return ctx.route.back(gradient), None, None, None, None


def _wire_dtype(values: torch.Tensor) -> torch.dtype:
    """In which results and gradients travel: bf16 where products give that, else as they come."""
    device = values.device.type
    in_bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return torch.bfloat16 if in_bf16 else values.dtype
