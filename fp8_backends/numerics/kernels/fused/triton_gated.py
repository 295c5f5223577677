"""Triton kernels of a gated activation, `act(gate) * up`, forward and backward, each one pass over memory.

PyTorch reads and writes ten bytes an element forward and eighteen backward, in bf16; these kernels six and ten. They
also leave the maxima of what they write, of which the quantizing kernel makes the scale without reading it first.

Every value that PyTorch would store is rounded as if it were stored, and the formulas are those of PyTorch's CUDA
kernels in FP32. What is written is what they write, but for the last place of `exp` and `tanh`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .. import triton_gate
from ..quantize.triton_quantize import AMAX_PROGRAMS
from ..triton_common import OPTIONS, as_fp32, ceil_div
from .triton_values import larger, store_largest, stored

BLOCK, WARPS = 2048, 4
"""Elements and warps of a program: sixteen elements a thread, loaded in vectors."""
_PROGRAMS_AT_A_TIME = 4
"""The registers of a multiprocessor allow so many: no more are started, so that all work to the end."""

_ROOT_2_OVER_PI = tl.constexpr(math.sqrt(2 / math.pi))
_CUBIC = tl.constexpr(0.044715)


class Gated(NamedTuple):
    """`act(gate) * up`."""

    values: torch.Tensor
    partials: torch.Tensor
    """As in `KnownAmax`."""


class GatedGradients(NamedTuple):
    """The gradients of gate and up, each with its maxima."""

    gate: Gated
    up: Gated


def forward(gate: torch.Tensor, up: torch.Tensor, activation: str, keep_nan: bool) -> Gated:
    """`act(gate) * up` and its amax.

    Args:
        gate, up: bf16, fp16 or fp32, one shape and dtype, contiguous.
        activation: "silu" or "gelu_tanh".
        keep_nan: whether NaN counts in the amax.
    """
    made, programs = _empty(gate), _programs(gate)
    with triton_gate.on_device_of(gate):
        _forward_kernel[(programs,)](gate, up, *made, gate.numel(), **_options(gate, activation, keep_nan))
    return made


def backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, keep_nan: bool
) -> GatedGradients:
    """The gradients of gate and up from that of the product, and their amaxes. Arguments as in `forward`."""
    made, programs = GatedGradients(_empty(gate), _empty(gate)), _programs(gate)
    with triton_gate.on_device_of(gate):
        _backward_kernel[(programs,)](
            grad, gate, up, *made.gate, *made.up, gate.numel(), **_options(gate, activation, keep_nan)
        )
    return made


def _programs(x: torch.Tensor) -> int:
    at_a_time = _PROGRAMS_AT_A_TIME * triton_gate.multiprocessors(x)
    return max(min(ceil_div(x.numel(), BLOCK), at_a_time, AMAX_PROGRAMS), 1)


def _empty(x: torch.Tensor) -> Gated:
    return Gated(torch.empty_like(x), torch.empty(_programs(x), dtype=torch.int32, device=x.device))


def _options(x: torch.Tensor, activation: str, keep_nan: bool) -> dict[str, object]:
    names = {"ACTIVATION": activation, "KEEP_NAN": keep_nan, "ON_GPU": x.is_cuda, "BLOCK": BLOCK}
    return {**names, "num_warps": WARPS, **OPTIONS}


# the formulas, in FP32. ON_GPU: with the functions of CUDA's library, which the interpreter has not


@triton.jit
def _exp(x, ON_GPU: tl.constexpr):
    return libdevice.exp(x) if ON_GPU else tl.exp(x)


@triton.jit
def _tanh(x, ON_GPU: tl.constexpr):
    if ON_GPU:
        return libdevice.tanh(x)
    else:
        return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _sigmoid(x, ON_GPU: tl.constexpr):
    return tl.div_rn(tl.zeros_like(x) + 1.0, 1.0 + _exp(-x, ON_GPU))


@triton.jit
def _tanh_of_gelu(x, ON_GPU: tl.constexpr):
    return _tanh((x + x * x * x * _CUBIC) * _ROOT_2_OVER_PI, ON_GPU)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr, ON_GPU: tl.constexpr):
    if ACTIVATION == "silu":
        return tl.div_rn(x, 1.0 + _exp(-x, ON_GPU))
    else:
        return 0.5 * x * (1.0 + _tanh_of_gelu(x, ON_GPU))


@triton.jit
def _activation_gradient(grad, x, ACTIVATION: tl.constexpr, ON_GPU: tl.constexpr):
    """The gradient of x from that of the activation."""
    if ACTIVATION == "silu":
        sigmoid = _sigmoid(x, ON_GPU)
        return grad * sigmoid * (1.0 + x * (1.0 - sigmoid))
    else:
        tanh = _tanh_of_gelu(x, ON_GPU)
        inner = (1.0 + x * x * _CUBIC * 3.0) * _ROOT_2_OVER_PI
        return grad * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner)


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    values_ptr,
    partial_ptr,  # int32 [programs]
    elements,
    ACTIVATION: tl.constexpr,
    KEEP_NAN: tl.constexpr,
    ON_GPU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes every n-th block, n being the number of programs."""
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    block = tl.program_id(0)
    while block < (elements - 1) // BLOCK + 1:  # elements near 2**31 may get no addend
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        gate, up = tl.load(gate_ptr + at, mask=inside, other=0.0), tl.load(up_ptr + at, mask=inside, other=0.0)
        activated = stored(_activated(as_fp32(gate), ACTIVATION, ON_GPU), gate.dtype, ON_GPU)
        values = stored(as_fp32(activated) * as_fp32(up), gate.dtype, ON_GPU)
        tl.store(values_ptr + at, values, mask=inside)
        largest = larger(largest, values, KEEP_NAN)
        block += tl.num_programs(0)
    store_largest(partial_ptr, largest)


@triton.jit
def _backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    gate_grad_ptr,
    gate_partial_ptr,  # int32 [programs]
    up_grad_ptr,
    up_partial_ptr,  # int32 [programs]
    elements,
    ACTIVATION: tl.constexpr,
    KEEP_NAN: tl.constexpr,
    ON_GPU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blocks as in `_forward_kernel`."""
    largest_of_gate, largest_of_up = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    block = tl.program_id(0)
    while block < (elements - 1) // BLOCK + 1:  # elements near 2**31 may get no addend
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        grad = as_fp32(tl.load(grad_ptr + at, mask=inside, other=0.0))
        gate, up = tl.load(gate_ptr + at, mask=inside, other=0.0), tl.load(up_ptr + at, mask=inside, other=0.0)
        activated = stored(_activated(as_fp32(gate), ACTIVATION, ON_GPU), gate.dtype, ON_GPU)
        of_up = stored(grad * as_fp32(activated), gate.dtype, ON_GPU)
        of_activated = as_fp32(stored(grad * as_fp32(up), gate.dtype, ON_GPU))
        of_gate = _activation_gradient(of_activated, as_fp32(gate), ACTIVATION, ON_GPU)
        of_gate = stored(of_gate, gate.dtype, ON_GPU)
        tl.store(up_grad_ptr + at, of_up, mask=inside)
        tl.store(gate_grad_ptr + at, of_gate, mask=inside)
        largest_of_up = larger(largest_of_up, of_up, KEEP_NAN)
        largest_of_gate = larger(largest_of_gate, of_gate, KEEP_NAN)
        block += tl.num_programs(0)
    store_largest(up_partial_ptr, largest_of_up)
    store_largest(gate_partial_ptr, largest_of_gate)
