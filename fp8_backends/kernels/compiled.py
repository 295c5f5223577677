"""The Adam step over low-precision states, fused: no full-precision copy of any state exists.

A scale follows from the amax of this step's own values, so the values are computed twice: the first pass over the flat
parts returns amaxes alone, the second computes the same values again, rounds them and writes them in place. Each pass
is one function of elementwise operations and reductions; `torch.compile` makes one loop of it, on CPU and GPU, once
for a combination of dtypes and options. Without a compiler the same functions run eagerly, part by part.

Formats of eight bits are decoded and encoded with integer operations on their bits: these run in vector registers
on every CPU, and on GPUs that have no FP8 casts.
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..formats import E4M3, E5M2, FORMAT_OF, Format
from ..scaling import power_of_two_scale, scale_inv_of, tensor_amax

ROUNDINGS = ("stochastic", "nearest")

# Fields of the random bits of one element, (lowest bit, bits): an FP16 weight drops 13 bits, a BF16 weight 16. The
# states need fewer, because their updates are not small against their own rounding.
WEIGHT_BITS, EXP_AVG_BITS, EXP_AVG_SQ_BITS = (16, 16), (8, 8), (0, 8)

GRADIENT_LIMIT = 2.0**63
"""A larger element of a gradient counts as zero, so that squares are finite FP32 numbers."""

_EAGER_PART, _COMPILED_PART = 2**18, 2**28  # elements; an eager part makes FP32 copies, a compiled one makes none
_ROW = 128
"""Elements of a row, where no block size says otherwise. Counting elements in vector registers is slow on a CPU: a
compiled loop counts rows, and reads the numbers within a row."""

# places in the tensor of hyperparameters
_STEP_SIZE, _DECAY, _WEIGHT_DECAY, _NEW_IN_EXP_AVG, _BETA2, _NEW_IN_EXP_AVG_SQ, _INV_SQRT_BIAS2, _EPS, _STEP = range(9)


class Slot(NamedTuple):
    """A tensor that the step reads, and writes in place unless it is the gradient."""

    data: torch.Tensor
    """Contiguous, any shape: E4M3, E5M2, FP16, BF16 or FP32."""
    scale_inv: torch.Tensor | None = None
    """FP32; 0-dim, or [ceil(numel / block_size)]; value = data * scale_inv. None: plain values."""
    block_size: int = 0
    """So many elements of the flattened data share a scale; 0: one scale for all."""


class _Kind(NamedTuple):
    """What a pass is compiled for."""

    dtypes: tuple[torch.dtype, ...]  # weight, grad, exp_avg, exp_avg_sq
    scaled: tuple[bool, ...]  # weight, exp_avg, exp_avg_sq: whether a scale is wanted
    blocked: tuple[bool, ...]  # weight, exp_avg, exp_avg_sq
    decoupled: bool
    maximize: bool
    stochastic: bool
    copied: bool
    width: int  # parts are worked on as [rows, width]; blocks are rows


def adam_hyper(group_lr, betas, eps: float, weight_decay: float, step: torch.Tensor, device) -> torch.Tensor:
    """What changes from step to step, as one FP32 tensor on `device`, [9].

    Args:
        group_lr, betas: floats or 0-dim tensors.
        step: FP32, 0-dim, this step included (1 in the first). On the CPU its value is read; elsewhere it stays on its
            device, so nothing waits for the device.
    """
    numbers = [x.double() if isinstance(x, torch.Tensor) else x for x in (group_lr, *betas, step)]
    lr, beta1, beta2, t = (x.item() if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for x in numbers)
    inv_sqrt_bias2 = (1 - beta2**t) ** -0.5
    values = (lr / (1 - beta1**t), 1 - lr * weight_decay, weight_decay, 1 - beta1, beta2, 1 - beta2, inv_sqrt_bias2)
    values = (*values, eps, t)  # in the order of the places above
    if not any(isinstance(value, torch.Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)
    parts = [v if isinstance(v, torch.Tensor) else torch.full((), v, device=device) for v in values]
    return torch.stack([part.to(device, torch.float32, non_blocking=True) for part in parts])


@torch.no_grad()
def scaled_adam_(
    weight: Slot,
    grad: Slot,
    exp_avg: Slot,
    exp_avg_sq: Slot,
    hyper: torch.Tensor,
    *,
    copy: Slot | None = None,
    decoupled: bool,
    maximize: bool,
    rounding: str,
    seed: int,
    compiled: bool = True,
) -> None:
    """One step of Adam (`decoupled`: AdamW) in FP32, in place on data and scale_inv of weight and states.

    New scales are powers of two from this step's amaxes; NaN marks a weight that is not finite. A gradient that holds
    a non-finite value counts as zero throughout, and a positive exp_avg_sq is stored as at least the smallest number
    of its format.

    Args:
        hyper: from `adam_hyper`.
        copy: an E4M3 or E5M2 tensor that receives the new, already rounded weight, to nearest.
        rounding: of weight and states below FP32. "stochastic" keeps their expected values; "nearest" is MS-AMP's,
            and loses updates below half a step of the format.
        seed: random bits are a function of seed, step and element index alone.
        compiled: False runs the same operations eagerly, which is faster for a few thousand elements in all.

    Raises:
        ValueError: a slot that is not contiguous, block sizes that differ, an unknown rounding.
    """
    if weight.data.numel() == 0:
        return
    step = AdamStep(
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        hyper,
        copy=copy,
        decoupled=decoupled,
        maximize=maximize,
        rounding=rounding,
        seed=seed,
        compiled=compiled,
    )
    amax = step.write(step.amaxes())
    if copy is not None:
        step.write_copy(amax)


class AdamStep:
    """`scaled_adam_` in its parts, for slots that are shards of a tensor: what each part sees of the tensor is agreed
    on between the ranks before the next one. Arguments as there, and

    Args:
        first: index in the whole tensor of the slots' first element, for the random bits.
        finite: whether the whole tensor's gradient is, bool, 0-dim (default: what the slot shows).
    """

    @torch.no_grad()
    def __init__(
        self,
        weight: Slot,
        grad: Slot,
        exp_avg: Slot,
        exp_avg_sq: Slot,
        hyper: torch.Tensor,
        *,
        copy: Slot | None,
        decoupled: bool,
        maximize: bool,
        rounding: str,
        seed: int,
        compiled: bool,
        first: int = 0,
        finite: torch.Tensor | None = None,
    ):
        slots = (weight, grad, exp_avg, exp_avg_sq)
        self.written, self.copy, self.hyper = (weight, exp_avg, exp_avg_sq), copy, hyper
        block = _block_size(slots, copy, rounding)
        self.kind = kind = _Kind(
            dtypes=tuple(slot.data.dtype for slot in slots),
            scaled=tuple(slot.scale_inv is not None for slot in self.written),
            blocked=tuple(slot.block_size > 0 for slot in self.written),
            decoupled=decoupled,
            maximize=maximize,
            stochastic=rounding == "stochastic",
            copied=copy is not None,
            width=block or _ROW,
        )
        finite = is_finite(grad) if finite is None else finite
        grad = grad._replace(scale_inv=_nan_unless(finite, _inverse(grad)))
        self.spans = list(_spans(weight.data.numel(), kind.width, _COMPILED_PART if compiled else _EAGER_PART))
        slots = (weight, grad, exp_avg, exp_avg_sq)
        self.parts = [_parts(slots, start, stop, kind.width) for start, stop in self.spans]
        self.random = _Random(seed, hyper, kind.width, first) if kind.stochastic else None
        self.run = functools.partial(_run, compiled=compiled, kind=kind)

    @torch.no_grad()
    def amaxes(self) -> list[torch.Tensor | None]:
        """The first pass: max |x| of the new weight, exp_avg and exp_avg_sq, FP32: 0-dim, or [blocks] where they are
        blocked; None for those that have no scale. Nothing is written."""
        if not any(self.kind.scaled):
            return [None, None, None]
        if not self.parts:
            return [_nothing(slot) for slot in self.written]
        found = [self.run(_amaxes, *part, self.hyper) for part in self.parts]
        scaled, blocked = self.kind.scaled, self.kind.blocked
        return [_joined([of[i] for of in found], blocked[i]) if scaled[i] else None for i in range(3)]

    @torch.no_grad()
    def write(self, amaxes: list[torch.Tensor | None]) -> torch.Tensor | None:
        """The second pass: write weight and states, with scales from these amaxes. Returns max |x| of the weight as it
        is stored, 0-dim, if there is a copy of it."""
        scales = [_scale(slot, amax) for slot, amax in zip(self.written, amaxes, strict=True)]
        copy_amaxes = []
        for (start, stop), part in zip(self.spans, self.parts, strict=True):
            by_part = [_of_part(s, slot, start, stop) for s, slot in zip(scales, self.written, strict=True)]
            bits = self.random.of_part(start, stop) if self.random else (None, None)
            copy_amaxes.append(self.run(_write, *part, by_part, self.hyper, *bits))
        for slot, scale, amax in zip(self.written, scales, amaxes, strict=True):
            if amax is not None:
                slot.scale_inv.copy_(scale_inv_of(scale, amax))
        if self.copy is None:
            return None
        inverse = _inverse(self.written[0])
        return torch.stack(copy_amaxes).amax() * inverse if copy_amaxes else torch.zeros_like(inverse)

    @torch.no_grad()
    def write_copy(self, amax: torch.Tensor) -> None:
        """MS-AMP's O3: the weight that computes, from the master as it is stored. amax: from `write`."""
        weight, copy = self.written[0], self.copy
        if weight.block_size:
            raise ValueError("a weight that is copied has one scale")
        inverse, scale = _inverse(weight), power_of_two_scale(amax, _format(copy))
        kind = _CastKind(weight.data.dtype, copy.data.dtype, self.kind.width)
        for start, stop in self.spans:
            data, _ = _parts((weight, copy), start, stop, self.kind.width)
            self.run(_cast, data, inverse, scale, kind=kind)
        copy.scale_inv.copy_(scale_inv_of(scale, amax))


def is_finite(grad: Slot) -> torch.Tensor:
    """Whether all values of a gradient are finite; bool, 0-dim. Stays on the device."""
    finite = torch.isfinite(_inverse(grad)).all()
    if grad.data.dtype.itemsize > 1 and grad.data.numel():
        finite = finite & torch.isfinite(tensor_amax(grad.data.detach()))
    return finite


# The two passes


def _amaxes(data, inverses, hyper, kind: _Kind):
    """max |x| of the new weight, exp_avg and exp_avg_sq of one part, 0-dim or [blocks]; None for plain ones."""
    amaxes = []
    for values, scaled, blocked in zip(_updated(data, inverses, hyper, kind), kind.scaled, kind.blocked, strict=True):
        amax = None
        if scaled:
            amax = values.abs().amax(1)  # of each row, always: loops of one form are fused
            amax = amax if blocked else amax.amax()
        amaxes.append(amax)
    return tuple(amaxes)


def _write(data, inverses, scales, hyper, key, index, kind: _Kind):
    """Write weight, exp_avg and exp_avg_sq of one part. Returns the weight's amax, still scaled, if a copy needs it."""
    random = _random_bits(data[0].shape[0], key, index) if kind.stochastic else None
    amax = None
    targets = zip((0, 2, 3), (WEIGHT_BITS, EXP_AVG_BITS, EXP_AVG_SQ_BITS), scales, strict=True)
    for values, (i, field, scale) in zip(_updated(data, inverses, hyper, kind), targets, strict=True):
        dtype = kind.dtypes[i]
        stored = values
        if dtype != torch.float32:
            values = values * scale
            stored = _stochastic(values, dtype, random, *field) if random is not None else _nearest(values, dtype)
            stored = _encoded(*stored, values, dtype, above_zero=i == 3)
        if i == 0 and kind.copied:
            amax = _decoded(stored, dtype).abs().amax(1).amax()
        data[i].copy_(stored)
    return amax


def _updated(data, inverses, hyper, kind: _Kind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new weight, exp_avg and exp_avg_sq of one part in FP32: torch.optim's Adam and AdamW."""
    p, g, m, v = (_decoded(d, dtype) * inv for d, dtype, inv in zip(data, kind.dtypes, inverses, strict=True))
    g = torch.where(g.abs() < GRADIENT_LIMIT, g, 0.0)  # NaN, from the scale, is not less
    if kind.maximize:
        g = -g
    if kind.decoupled:
        p = p * hyper[_DECAY]
    else:
        g = g + hyper[_WEIGHT_DECAY] * p
    m = m + hyper[_NEW_IN_EXP_AVG] * (g - m)
    v = v * hyper[_BETA2] + hyper[_NEW_IN_EXP_AVG_SQ] * g * g
    return p - hyper[_STEP_SIZE] * m / (v.sqrt() * hyper[_INV_SQRT_BIAS2] + hyper[_EPS]), m, v


class _CastKind(NamedTuple):
    source: torch.dtype
    target: torch.dtype
    width: int


def _cast(data, inverse, scale, kind: _CastKind):
    """The weight as it was stored, times a scale, to the copy's format. data: (source, target)."""
    values = _decoded(data[0], kind.source) * inverse * scale
    data[1].copy_(_encoded(*_nearest(values, kind.target), values, kind.target))


# Formats as grids


class _Grid(NamedTuple):
    """The numbers of a format: multiples of `2**(exponent - mantissa_bits)`, the exponent at least `min_exponent`."""

    dropped: int  # mantissa bits that FP32 has and the format has not
    min_exponent: int
    max_bits: int  # the largest number, as FP32 bits
    smallest: float


def _grid_of(dtype: torch.dtype) -> _Grid:
    info = torch.finfo(dtype)
    mantissa_bits, min_exponent = -int(math.log2(info.eps)), int(math.log2(info.smallest_normal))
    max_bits = torch.tensor(info.max, dtype=torch.float32).view(torch.int32).item()
    return _Grid(23 - mantissa_bits, min_exponent, max_bits, 2.0 ** (min_exponent - mantissa_bits))


_GRIDS = {dtype: _grid_of(dtype) for dtype in (*FORMAT_OF, torch.bfloat16)}


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def _magnitude(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """min(|x|, max) and a shift: 0, or the smallest normal number of the format for what is below it.

    The sum of both has just the mantissa bits in front of `dropped` that the format stores, subnormal or not.
    """
    grid = _GRIDS[dtype]
    # as integers, the minimum is one instruction
    magnitude = (_bits(values) & 0x7FFFFFFF).clamp(max=grid.max_bits).view(torch.float32)
    return magnitude, torch.where(magnitude < 2.0**grid.min_exponent, 2.0**grid.min_exponent, 0.0)


def _stochastic(values: torch.Tensor, dtype: torch.dtype, random: torch.Tensor, low: int, bits: int):
    """Up with the probability of the fraction that is cut off: adding random bits carries with just that probability.

    Returns the bits of |x| + shift, on the grid, and the shift.
    """
    dropped = _GRIDS[dtype].dropped
    magnitude, shift = _magnitude(values, dtype)
    used = min(bits, dropped)
    addend = ((random >> (low + bits - used)) & (2**used - 1)) << (dropped - used)
    if used < dropped:
        addend = addend + 2 ** (dropped - used - 1)  # the middle of what the fewer bits leave open: no bias
    return (_bits(magnitude + shift) + addend) & -(2**dropped), shift


def _nearest(values: torch.Tensor, dtype: torch.dtype):
    """To nearest, ties to even. Returns the bits of |x| + shift, on the grid, and the shift."""
    grid = _GRIDS[dtype]
    magnitude, shift = _magnitude(values, dtype)
    bits = _bits(magnitude)
    normal = bits + ((bits >> grid.dropped) & 1) + (2 ** (grid.dropped - 1) - 1)
    step = grid.smallest * 2.0**23  # at this size an FP32 addition rounds to the smallest number of the format
    subnormal = _bits(((magnitude + step) - step) + shift)
    return torch.where(shift > 0, subnormal, normal) & -(2**grid.dropped), shift


def _encoded(bits: torch.Tensor, shift: torch.Tensor, signs: torch.Tensor, dtype: torch.dtype, above_zero=False):
    """What `_stochastic` or `_nearest` returned, as `dtype`; as uint8 for formats of eight bits.

    above_zero: positive values were rounded, and none of them may become 0.
    """
    grid = _GRIDS[dtype]
    if dtype.itemsize > 1:
        magnitude = bits.view(torch.float32) - shift
        if above_zero:
            return torch.maximum(magnitude, torch.where(signs > 0, grid.smallest, 0.0)).to(dtype)
        return (_bits(magnitude) | (_bits(signs) & -(2**31))).view(torch.float32).to(dtype)
    code = (bits - ((grid.min_exponent + 126) << 23) - ((shift > 0).to(torch.int32) << 23)) >> grid.dropped
    if above_zero:
        return torch.maximum(code, (signs > 0).to(torch.int32)).to(torch.uint8)
    return (code | ((_bits(signs) >> 24) & 0x80)).to(torch.uint8)


def _decoded(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP32 values of stored data; a NaN of an eight-bit format is not seen, its scale tells of it."""
    if dtype.itemsize > 1:
        return data.float()
    grid = _GRIDS[dtype]
    code = data.to(torch.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << grid.dropped) + ((grid.min_exponent + 126) << 23)).view(torch.float32)
    values = torch.where(magnitude < 2 ** (23 - grid.dropped), magnitude.float() * grid.smallest, normal)
    return torch.where(code >= 128, -values, values)


# Random bits: a hash of a counter, the same on every device


class _Random:
    """Random bits of one parameter's step. first: what its first element counts as."""

    def __init__(self, seed: int, hyper: torch.Tensor, width: int, first: int = 0):
        self.first = first
        self.key = _hash(_hash(hyper[_STEP].to(torch.int32)) + _int32(seed * 0x9E3779B1))
        self.index = torch.arange(width, dtype=torch.int32, device=hyper.device)

    def of_part(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[key, index of the first element], and 0, 1, 2, ... of a row."""
        key = torch.stack([self.key, torch.full_like(self.key, _int32(self.first + start))])
        return key, self.index[: stop - start].data


def _random_bits(rows: int, key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    width = index.shape[0]
    first = torch.arange(rows, dtype=torch.int32, device=index.device) * width + key[1]
    return _hash((first.unsqueeze(1) + index) ^ key[0])


def _hash(x: torch.Tensor) -> torch.Tensor:
    """32 mixed bits of an int32: the finaliser "lowbias32" of Chris Wellons' hash-prospector."""
    x = x ^ ((x >> 16) & 0xFFFF)  # torch shifts the sign in
    x = x * _int32(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _int32(number: int) -> int:
    """The lowest 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31


# Parts


def _block_size(slots: tuple[Slot, ...], copy: Slot | None, rounding: str) -> int:
    """The block size of those that have one, after a check of all."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is one of {', '.join(ROUNDINGS)}, not {rounding!r}")
    for slot in (*slots, *([copy] if copy else [])):
        if not slot.data.is_contiguous():
            raise ValueError(f"the step works on contiguous tensors; strides {slot.data.stride()} are not")
    sizes = {slot.block_size for slot in slots if slot.block_size}
    if len(sizes) > 1 or (copy and (copy.block_size or copy.data.dtype not in (E4M3.dtype, E5M2.dtype))):
        raise ValueError("one step has one block size, and the copy of the weight is E4M3 or E5M2 with one scale")
    return sizes.pop() if sizes else 0


def _spans(numel: int, width: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the parts: equal numbers of whole rows, about `size` elements at most; then what is left."""
    whole = numel - numel % width
    count = max(-(-whole // max(size, width)), 1)
    length = -(-whole // (count * width)) * width
    for start in range(0, whole, max(length, 1)):
        yield start, min(start + length, whole)
    if whole < numel:
        yield whole, numel


def _parts(slots: tuple[Slot, ...], start: int, stop: int, width: int):
    """Data and scale_inv of one part: [rows, width], and 0-dim or [rows, 1]; bytes of eight-bit formats."""
    data = []
    for slot in slots:
        flat = slot.data.detach().view(-1)[start:stop]
        flat = flat.view(torch.uint8) if slot.data.dtype.itemsize == 1 else flat
        rows = flat.view(-1, min(width, stop - start))
        data.append(rows.data)  # `.data` is no view: a pass would be compiled anew for another base of a view
    inverses = [_of_part(_inverse(slot), slot, start, stop) for slot in slots]
    if len(slots) > 1 and inverses[1].dim() == 0:
        # As many copies as a row is wide: with it all loops of a pass have rows and columns, and are fused into one.
        # Inductor would flatten some otherwise, and write their results to memory in FP32.
        inverses[1] = inverses[1].expand(data[0].shape[1]).contiguous()
    return tuple(data), tuple(inverses)


def _of_part(scale: torch.Tensor, slot: Slot, start: int, stop: int) -> torch.Tensor:
    if not slot.block_size:
        return scale
    return scale[start // slot.block_size : -(-stop // slot.block_size)].unsqueeze(1).data


def _inverse(slot: Slot) -> torch.Tensor:
    if slot.scale_inv is None:
        return torch.ones((), device=slot.data.device)
    return slot.scale_inv.detach()


def _nan_unless(finite: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return torch.where(finite, inverse, torch.full_like(inverse, float("nan")))


def _nothing(slot: Slot) -> torch.Tensor | None:
    """The amax of a slot without elements."""
    return None if slot.scale_inv is None else torch.zeros_like(slot.scale_inv)


def _joined(amaxes: list[torch.Tensor], blocked: bool) -> torch.Tensor:
    return torch.cat(amaxes) if blocked else torch.stack(amaxes).amax()


def _scale(slot: Slot, amax: torch.Tensor | None) -> torch.Tensor:
    if amax is None or slot.data.dtype not in FORMAT_OF:
        return torch.ones_like(amax) if amax is not None else torch.ones((), device=slot.data.device)
    return power_of_two_scale(amax, FORMAT_OF[slot.data.dtype])


def _format(slot: Slot) -> Format:
    return FORMAT_OF[slot.data.dtype]


# Compiling


_no_compiler: set[str] = set()
"""Kinds of devices whose compiler failed: their passes run eagerly from then on."""


def _run(function, data, *arguments, compiled: bool, kind):
    numel, device = data[0].numel(), data[0].device.type
    # dynamic shapes do not include 1: a lone row would be compiled anew
    if not compiled or numel < 2 * kind.width or device in _no_compiler:
        return function(data, *arguments, kind)
    for tensor in (*data, *_vectors(arguments)):
        # the number of rows is a variable of the compiled code, their width is not: it would vectorise badly
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    try:
        return _compiled(function, kind)(data, *arguments)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        _no_compiler.add(device)
        warnings.warn(f"the optimizer step runs uncompiled, which is slower: {error}", stacklevel=2)
        return function(data, *arguments, kind)


def _vectors(arguments) -> Iterator[torch.Tensor]:
    for argument in arguments:
        for tensor in argument if isinstance(argument, (tuple, list)) else (argument,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 1:
                yield tensor


@functools.cache
def _compiled(function, kind):
    """`function` for one kind, compiled on its first call."""
    # a code object of its own: Dynamo counts compilations by code object, and refuses after eight
    code = function.__code__.replace(co_name=f"{function.__name__}_{len(_compiled_names)}")
    _compiled_names.append(code.co_name)
    own = types.FunctionType(code, function.__globals__, code.co_name, (kind,))
    return torch.compile(own, fullgraph=True, dynamic=True)


_compiled_names: list[str] = []
