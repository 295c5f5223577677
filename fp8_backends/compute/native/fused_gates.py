"""Gated activations, `down(act(gate(x)) * up(x))`, by one kernel forward and one backward (`fuse_activations`).

The kernels write what PyTorch's operations write, and note the amax of it (`known_amax`): of the product, which `down`
quantizes, and of the two gradients, which `gate` and `up` quantize. All that passes between the layers stays a plain
tensor, so hooks, adapters and whatever else reads it see what they saw before.

A block is recognised by what it computes: its forward is tried with layers that return known numbers. The kernels run
in eager training on a GPU; elsewhere the block runs as it was written. Under `torch.compile` too: Inductor makes one
kernel of the activation and the casts around it, in both layouts, without storing the product.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...numerics.forwards import forward_obstacle
from ...numerics.kernels.quantize.known_amax import note
from ...numerics.kernels.triton_gate import usable
from ...numerics.modules import is_hooked
from ...numerics.saved_values import ValuesFunction
from ..derivatives import refuse_second_derivative
from ..interface import COMPUTE_DTYPES
from .fused_class import carrier_for

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""Those that the kernels have, by their names there."""


class Gate(NamedTuple):
    """The parts of a block: the names of its children, and the activation, one of ACTIVATIONS."""

    gate: str
    up: str
    down: str
    activation: str


def carriers(root: nn.Module, layers: Container[nn.Module], keeps_nan: bool) -> list[tuple[nn.Module, nn.Module]]:
    """The blocks of `root` that are recognised and not swapped yet, each with its carrier (`Compute.build`).

    Args:
        layers: those that are about to become FP8 layers.
        keeps_nan: of their rule (`LayerRule`).
    """
    found = []
    for block in root.modules():
        gate = None if isinstance(block, FusedGate) else _gate_of(block, layers)
        if gate is not None:
            found.append((block, carrier_for(FusedGate, block, fp8_gate=gate, fp8_keeps_nan=keeps_nan)))
    return found


# recognising


class _Returns(nn.Module):
    """Stands for a layer: returns the same numbers whatever it gets, and remembers what that was."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result, self.calls = result, []

    def forward(self, *args: Any) -> torch.Tensor:
        self.calls.append(args)
        return self.result


def _gate_of(block: nn.Module, layers: Container[nn.Module]) -> Gate | None:
    """The parts of a block that computes nothing but `down(act(gate(x)) * up(x))` in training, else None."""
    linears = [name for name, child in block.named_children() if child in layers]
    others = len(block._modules) - len(linears)
    if len(linears) != 3 or others > 1 or len(inspect.signature(type(block).forward).parameters) != 2:
        return None
    if forward_obstacle(block) is not None or type(type(block)) is not type:
        return None
    try:
        found = {_tried(block, linears, dtype) for dtype in (torch.float32, torch.bfloat16)}
    except Exception:  # of any kind: a forward that looks into its layers
        return None
    return found.pop() if len(found) == 1 else None


@torch.no_grad()
def _tried(block: nn.Module, linears: list[str], dtype: torch.dtype) -> Gate | None:
    """The parts by one forward of a copy in this dtype, on the CPU, to the bit."""
    generator = torch.Generator().manual_seed(0)
    x, *results = (3 * torch.randn(4, 64, generator=generator).to(dtype) for _ in range(4))
    stands = {name: _Returns(result) for name, result in zip(linears, results, strict=True)}
    tried = copy.copy(block)
    tried.__dict__ = {**block.__dict__, "training": True, "_modules": {**block._modules, **stands}}
    with torch.autocast("cpu", enabled=False):
        y = type(block).forward(tried, x)
    reads_x = [name for name, stand in stands.items() if [id(a) for call in stand.calls for a in call] == [id(x)]]
    ends = [name for name, stand in stands.items() if y is stand.result and len(stand.calls) == 1]
    if len(reads_x) != 2 or len(ends) != 1 or ends[0] in reads_x:
        return None
    (product,) = stands[ends[0]].calls[0]
    for gate, up in (reads_x, reads_x[::-1]):
        for name, activation in ACTIVATIONS.items():
            if torch.equal(product, activation(stands[gate].result) * stands[up].result):
                return Gate(gate, up, ends[0], name)
    return None


# running


class FusedGate(nn.Module):
    """What a block becomes, mixed into the class that it was."""

    fp8_gate: Gate
    fp8_keeps_nan: bool
    """Whether NaN counts in an amax by the layers' rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training and usable(x)) or self._has_hooked_activation():
            return super().forward(x)
        gate, up, down, activation = self.fp8_gate
        h = gated_product(self._modules[gate](x), self._modules[up](x), activation, self.fp8_keeps_nan)
        return self._modules[down](h)

    def _has_hooked_activation(self) -> bool:
        """Whether hooks see the result of the activation's module, which the kernel does not call."""
        return any(is_hooked(child) for name, child in self._modules.items() if name not in self.fp8_gate)


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: str, keep_nan: bool) -> torch.Tensor:
    """`act(gate) * up`, with its amax noted where the kernel makes it."""
    alike = gate.dtype == up.dtype and gate.shape == up.shape and gate.dtype in COMPUTE_DTYPES
    if not (alike and gate.is_contiguous() and up.is_contiguous() and usable(gate) and usable(up)):
        return ACTIVATIONS[activation](gate) * up
    h, partials = _Product.apply(gate, up, activation, keep_nan)
    note(h, partials, keep_nan)
    return h


class _Product(ValuesFunction):
    """`act(gate) * up` and the maxima of its parts."""

    @staticmethod
    def forward(ctx, gate, up, activation, keep_nan):
        from ...numerics.kernels.fused import triton_gated  # Triton takes a second to load

        made = triton_gated.forward(gate, up, activation, keep_nan)
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.keep_nan = activation, keep_nan
        ctx.mark_non_differentiable(made.partials)
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx, grad, _):
        from ...numerics.kernels.fused import triton_gated

        refuse_second_derivative()
        made = triton_gated.backward(grad.contiguous(), *ctx.saved_tensors, ctx.activation, ctx.keep_nan)
        for each in made:
            note(each.values, each.partials, ctx.keep_nan)
        return made.gate.values, made.up.values, None, None
