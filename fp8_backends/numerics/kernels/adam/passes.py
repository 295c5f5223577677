"""The Adam step of one parameter as passes of PyTorch operations: the reference of the fused kernels, and what runs
where none of them does.

A scale follows from the amax of this step's own values, so the values are computed twice: the first pass over the flat
parts returns amaxes alone, the second computes the same values again, rounds them and writes them in place. Each pass
is one function of elementwise operations and reductions. `torch.compile` makes one loop of it, once for a combination
of dtypes and options; without a compiler the same functions run eagerly, part by part.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...formats import FORMAT_OF, Format
from ...scaling import power_of_two_scale, scale_inv_of
from .job import (
    BETA2,
    DECAY,
    EPS,
    INV_SQRT_BIAS2,
    NEW_IN_EXP_AVG,
    NEW_IN_EXP_AVG_SQ,
    STEP,
    STEP_SIZE,
    WEIGHT_DECAY,
    Job,
    Slot,
    is_finite,
)
from .rounding import (
    EXP_AVG_BITS,
    EXP_AVG_SQ_BITS,
    WEIGHT_BITS,
    RandomBits,
    decoded,
    encoded,
    nearest,
    random_bits,
    stochastic,
)

GRADIENT_LIMIT = 2.0**63
"""A larger element of a gradient counts as zero, so that squares are finite FP32 numbers."""

_EAGER_PART, _COMPILED_PART = 2**18, 2**28  # elements; an eager part makes FP32 copies, a compiled one makes none
_ROW = 128
"""Elements of a row, where no block size says otherwise. Counting elements in vector registers is slow on a CPU: a
compiled loop counts rows, and reads the numbers within a row."""


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


class Passes:
    """The step of one parameter in its parts. compiled: by `torch.compile`, for parts that are not tiny."""

    def __init__(self, job: Job, compiled: bool):
        self.written, self.copy, self.hyper = job.written, job.copy, job.hyper
        slots = (job.weight, job.grad, job.exp_avg, job.exp_avg_sq)
        self.kind = kind = _Kind(
            dtypes=tuple(slot.data.dtype for slot in slots),
            scaled=tuple(slot.scale_inv is not None for slot in self.written),
            blocked=tuple(slot.block_size > 0 for slot in self.written),
            decoupled=job.decoupled,
            maximize=job.maximize,
            stochastic=job.rounding == "stochastic",
            copied=job.copy is not None,
            width=job.block_size or _ROW,
        )
        finite = is_finite(job.grad) if job.finite is None else job.finite
        grad = job.grad._replace(scale_inv=_nan_unless(finite, _inverse(job.grad)))
        self.spans = list(_spans(job.weight.data.numel(), kind.width, _COMPILED_PART if compiled else _EAGER_PART))
        slots = (job.weight, grad, job.exp_avg, job.exp_avg_sq)
        self.parts = [_parts(slots, start, stop, kind.width) for start, stop in self.spans]
        self.random = None
        if kind.stochastic:
            self.random = RandomBits(job.seed, job.hyper[STEP], kind.width, job.first)
        self.run = functools.partial(_run, compiled=compiled, kind=kind)

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

    def write_copy(self, amax: torch.Tensor) -> None:
        """MS-AMP's O3: the weight that computes, from the master as it is stored. amax: from `write`."""
        weight, copy = self.written[0], self.copy
        inverse, scale = _inverse(weight), power_of_two_scale(amax, _format(copy))
        kind = _CastKind(weight.data.dtype, copy.data.dtype, self.kind.width)
        for start, stop in self.spans:
            data, _ = _parts((weight, copy), start, stop, self.kind.width)
            self.run(_cast, data, inverse, scale, kind=kind)
        copy.scale_inv.copy_(scale_inv_of(scale, amax))


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
    random = random_bits(data[0].shape[0], key, index) if kind.stochastic else None
    amax = None
    targets = zip((0, 2, 3), (WEIGHT_BITS, EXP_AVG_BITS, EXP_AVG_SQ_BITS), scales, strict=True)
    for values, (i, field, scale) in zip(_updated(data, inverses, hyper, kind), targets, strict=True):
        dtype = kind.dtypes[i]
        stored = values
        if dtype != torch.float32:
            values = values * scale
            stored = stochastic(values, dtype, random, *field) if random is not None else nearest(values, dtype)
            stored = encoded(*stored, values, dtype, above_zero=i == 3)
        if i == 0 and kind.copied:
            amax = decoded(stored, dtype).abs().amax(1).amax()
        data[i].copy_(stored)
    return amax


def _updated(data, inverses, hyper, kind: _Kind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new weight, exp_avg and exp_avg_sq of one part in FP32: torch.optim's Adam and AdamW."""
    p, g, m, v = (decoded(d, dtype) * inv for d, dtype, inv in zip(data, kind.dtypes, inverses, strict=True))
    g = torch.where(g.abs() < GRADIENT_LIMIT, g, 0.0)  # NaN, from the scale, is not less
    if kind.maximize:
        g = -g
    if kind.decoupled:
        p = p * hyper[DECAY]
    else:
        g = g + hyper[WEIGHT_DECAY] * p
    m = m + hyper[NEW_IN_EXP_AVG] * (g - m)
    v = v * hyper[BETA2] + hyper[NEW_IN_EXP_AVG_SQ] * g * g
    return p - hyper[STEP_SIZE] * m / (_square_root(v) * hyper[INV_SQRT_BIAS2] + hyper[EPS]), m, v


def _square_root(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu" and not torch.compiler.is_compiling():
        return values.double().sqrt().float()  # PyTorch's eager one of FP32 is off by a last bit now and then
    return values.sqrt()


class _CastKind(NamedTuple):
    source: torch.dtype
    target: torch.dtype
    width: int


def _cast(data, inverse, scale, kind: _CastKind):
    """The weight as it was stored, times a scale, to the copy's format. data: (source, target)."""
    values = decoded(data[0], kind.source) * inverse * scale
    data[1].copy_(encoded(*nearest(values, kind.target), values, kind.target))


# Parts


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
