"""The Adam step of one parameter as passes of PyTorch operations: what the fused kernels compute to the bit, and what
runs where none of them does.

Each pass (`AdamSteps` says what it does) is one function of elementwise operations and reductions. `torch.compile`
makes one loop of it, once for a combination of dtypes and options; without a compiler the same functions run eagerly,
part by part.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator

import torch

from ...formats import FORMAT_OF, ROOT8
from ...scaling import power_of_two_scale, scale_inv_of
from ..reference import GRADIENT_LIMIT
from .bounds import measured, new_bounds
from .rounding import (
    EXP_AVG_BITS,
    EXP_AVG_SQ_BITS,
    WEIGHT_BITS,
    RandomBits,
    codes_of,
    decoded,
    random_bits,
)
from .table import (
    BETA2,
    DECAY,
    EPS,
    INV_SQRT_BIAS2,
    NEW_IN_EXP_AVG,
    NEW_IN_EXP_AVG_SQ,
    STEP,
    STEP_SIZE,
    WEIGHT_DECAY,
    WRITTEN,
    Job,
    Kind,
    Slot,
    is_finite,
    largest_gradient,
)

_EAGER_PART, _COMPILED_PART = 2**18, 2**28  # elements; an eager part makes FP32 copies, a compiled one makes none
_ROW = 128
"""Elements of a row, where no block size says otherwise. Counting elements in vector registers is slow on a CPU: a
compiled loop counts rows, and reads the numbers within a row."""


class Passes:
    """The step of one parameter, part by part. compiled: `torch.compile` works on parts that are not tiny."""

    def __init__(self, job: Job, compiled: bool):
        self.job, self.written, self.copy, self.compiled = job, job.written, job.copy, compiled
        self.hyper = job.hyper.data  # no view: a pass of as many rows as its base has numbers would be compiled anew
        self.bounded = job.kind.bounded
        finds_blocks = self.bounded and any(slot.block_size for slot in job.written)
        self.kind = job.kind._replace(finite_is_told=False, bounded=finds_blocks)
        self.width = job.kind.block_size or _ROW
        self.finite, inverse = is_finite(job.grad) if job.finite is None else job.finite, _inverse(job.grad)
        nan_unless_finite = torch.where(self.finite, inverse, torch.full_like(inverse, float("nan")))
        slots = (job.weight, job.grad._replace(scale_inv=nan_unless_finite), job.exp_avg, job.exp_avg_sq)
        size = _COMPILED_PART if compiled else _EAGER_PART
        self.spans = list(_spans(job.weight.data.numel(), self.width, size))
        self.parts = [_part(slots, *span, self.width) for span in self.spans]
        self.random = None
        if self.kind.stochastic:
            self.random = RandomBits(job.seed, job.hyper[STEP], self.width, job.first)

    def amaxes(self) -> list[torch.Tensor | None]:
        """The first pass, as `AdamSteps.amaxes`."""
        if not self.bounded:
            return self._amaxes()
        pairs = zip(self.written, self._bounds(), strict=True)
        return [None if slot.scale_inv is None or slot.block_size else bound for slot, bound in pairs]

    def _bounds(self) -> list[torch.Tensor]:
        """Bounds of the amaxes, FP32, 0-dim."""
        exp_avg_sq = self.job.exp_avg_sq
        inverse = _inverse(exp_avg_sq)
        if exp_avg_sq.block_size:  # that of a stored root needs no correction
            inverse = torch.full_like(self.hyper[0], 1.0 if exp_avg_sq.format is ROOT8 else math.inf)
        amax = largest_gradient(self.job.grad, self.finite)
        return new_bounds(self.job.record, amax, self.job.hyper, inverse, self.kind.decoupled)

    def _amaxes(self) -> list[torch.Tensor | None]:
        if not self.parts or all(slot.scale_inv is None for slot in self.written):
            return [None if slot.scale_inv is None else torch.zeros_like(slot.scale_inv) for slot in self.written]
        found = zip(*[self._run(_amaxes, *part, self.hyper) for part in self.parts], strict=True)
        return [
            None if slot.scale_inv is None else torch.cat(each) if slot.block_size else torch.stack(each).amax()
            for slot, each in zip(self.written, found, strict=True)
        ]

    def write(self, amaxes: list[torch.Tensor | None]) -> torch.Tensor | None:
        """The second pass, as `AdamSteps.write`."""
        scales = [_scale(slot, amax) for slot, amax in zip(self.written, amaxes, strict=True)]
        copy_amaxes = []
        for span, part in zip(self.spans, self.parts, strict=True):
            part_scales = [_part_of_scale(s, slot, *span) for s, slot in zip(scales, self.written, strict=True)]
            random = self.random.part(*span) if self.random else (None, None)
            copy_amaxes.append(self._run(_write, *part, part_scales, self.hyper, *random))
        for slot, scale, amax in zip(self.written, scales, amaxes, strict=True):
            if amax is not None:
                slot.scale_inv.copy_(scale_inv_of(scale, amax))
        if self.bounded:
            self.job.record.copy_(measured(*self.written))
            if self.copy is not None:
                self.write_copy(amaxes[0])
            return None
        if self.copy is None:
            return None
        inverse = _inverse(self.written[0])
        return torch.stack(copy_amaxes).amax() * inverse if copy_amaxes else torch.zeros_like(inverse)

    def write_copy(self, amax: torch.Tensor) -> None:
        """The third pass, as `AdamSteps.write_copies`: O3's weight, from the master as it is stored."""
        weight, copy = self.written[0], self.copy
        inverse, scale = _inverse(weight), _scale(copy, amax)
        for span in self.spans:
            data, _ = _part((weight, copy), *span, self.width)
            self._run(_cast, data, inverse, scale)
        copy.scale_inv.copy_(scale_inv_of(scale, amax))

    def _run(self, function, data, *arguments):
        # dynamic shapes do not include 1: a lone row would be compiled anew
        if not self.compiled or data[0].numel() < 2 * self.width:
            return function(data, *arguments, self.kind)
        for tensor in (*data, *_vectors(arguments)):
            # the number of rows is a variable of the compiled code, their width is not: it would vectorize badly
            torch._dynamo.mark_static(tensor, tensor.dim() - 1)
        return _compiled(function, self.kind)(data, *arguments)


# The passes, over one part


def _amaxes(data, inverses, hyper, kind: Kind):
    """max |x| of the new weight, exp_avg and exp_avg_sq of one part, 0-dim or [blocks]; None for plain ones."""
    amaxes = []
    w, m, v, root = adam_step(data, inverses, hyper, kind)
    for i, values in zip(WRITTEN, (w, m, root if kind.format(3) is ROOT8 else v), strict=True):
        rows = values.abs().amax(1) if kind.scaled[i] else None  # each row, always: loops of one form are fused
        amaxes.append(rows if rows is None or kind.blocked[i] else rows.amax())
    return tuple(amaxes)


def _write(data, inverses, scales, hyper, key, index, kind: Kind):
    """Write weight, exp_avg and exp_avg_sq of one part, and where the kind is bounded the scale_inv of blocks. Returns
    the weight's amax, still scaled, if a copy needs it."""
    random = random_bits(data[0].shape[0], key, index) if kind.stochastic else None
    w, m, v, root = adam_step(data, inverses, hyper, kind)
    stored = _store(data, inverses, 0, w, scales[0], random, WEIGHT_BITS, kind)
    _store(data, inverses, 2, m, scales[1], random, EXP_AVG_BITS, kind)
    v = root if kind.format(3) is ROOT8 else v
    _store(data, inverses, 3, v, scales[2], random, EXP_AVG_SQ_BITS, kind)
    return decoded(stored, kind.format(0)).abs().amax(1).amax() if kind.copy is not None else None


def _store(data, inverses, slot: int, values, scale, random, field, kind: Kind):
    """Write values into the data of a slot, rounded, and into the residual of a weight that is split. Returns what was
    written to the data."""
    fmt = kind.format(slot)
    if kind.bounded and kind.blocked[slot]:  # a row is a block
        amax = values.abs().amax(1, keepdim=True)
        scale = power_of_two_scale(amax, fmt)
        inverses[slot].copy_(scale_inv_of(scale, amax))
    stored = values
    if fmt.dtype != torch.float32:
        stored, residual = codes_of(values * scale, fmt, random, field, above_zero=slot == 3)
        if residual is not None:
            data[-1].copy_(residual)
    data[slot].copy_(stored)
    return stored


def adam_step(data, inverses, hyper, kind: Kind) -> tuple[torch.Tensor, ...]:
    """`reference.adam_step` with FP32 operations: the new weight, exp_avg and exp_avg_sq of one part, and the root
    of the last."""
    residual = data[-1] if kind.split else None
    p = decoded(data[0], kind.format(0), residual) * inverses[0]
    g, m, v = (decoded(data[i], kind.format(i)) * inverses[i] for i in (1, 2, 3))
    if kind.format(3) is ROOT8:
        v = v * v
    g = torch.where(g.abs() < GRADIENT_LIMIT, g, 0.0)  # NaN, from the scale, is not less
    if kind.maximize:
        g = -g
    if kind.decoupled:
        p = p * hyper[DECAY]
    else:
        g = g + hyper[WEIGHT_DECAY] * p
    m = m + hyper[NEW_IN_EXP_AVG] * (g - m)
    v = v * hyper[BETA2] + hyper[NEW_IN_EXP_AVG_SQ] * g * g
    root = _square_root(v)
    denominator = root * hyper[INV_SQRT_BIAS2] + hyper[EPS]
    return p - hyper[STEP_SIZE] * m / denominator, m, v, root


def _square_root(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu" and not torch.compiler.is_compiling():
        return values.double().sqrt().float()  # PyTorch's eager one of FP32 is off by a last bit now and then
    return values.sqrt()


def _cast(data, inverse, scale, kind: Kind):
    """Cast the weight as it was stored, times a scale, to the copy's format. data: (weight, copy)."""
    fmt = FORMAT_OF[kind.copy]
    values = decoded(data[0], kind.format(0)) * inverse * scale
    data[1].copy_(codes_of(values, fmt)[0])


# Parts


def _spans(numel: int, width: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the parts: equal numbers of whole rows, about `size` elements at most; then the rest."""
    whole = numel - numel % width
    count = max(-(-whole // max(size, width)), 1)
    length = -(-whole // (count * width)) * width
    for start in range(0, whole, max(length, 1)):
        yield start, min(start + length, whole)
    if whole < numel:
        yield whole, numel


def _part(slots: tuple[Slot, ...], start: int, stop: int, width: int):
    """Data and scale_inv of one part: [rows, width], and 0-dim or [rows, 1]; bytes of eight-bit formats. The data of
    the slots, and last the residual of the first if it has one."""
    data, tensors = [], [slot.data for slot in slots]
    if slots[0].residual is not None:
        tensors.append(slots[0].residual)
    for tensor in tensors:
        flat = tensor.detach().view(-1)[start:stop]
        flat = flat.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 else flat
        rows = flat.view(-1, min(width, stop - start))
        data.append(rows.data)  # `.data` is no view: a pass would be compiled anew for another base of a view
    inverses = [_part_of_scale(_inverse(slot), slot, start, stop) for slot in slots]
    if inverses[1].dim() == 0:
        # As many copies as a row is wide: with it all loops of a pass have rows and columns, and are fused into one.
        # Inductor would flatten some otherwise, and write their results to memory in FP32.
        inverses[1] = inverses[1].expand(data[0].shape[1]).contiguous()
    return tuple(data), tuple(inverses)


def _part_of_scale(scale: torch.Tensor, slot: Slot, start: int, stop: int) -> torch.Tensor:
    if not slot.block_size or not scale.dim():  # the scales of blocks may follow from what is written
        return scale
    return scale[start // slot.block_size : -(-stop // slot.block_size)].unsqueeze(1).data


def _inverse(slot: Slot) -> torch.Tensor:
    return (
        torch.ones((), dtype=torch.float32, device=slot.data.device)
        if slot.scale_inv is None
        else slot.scale_inv.detach()
    )


def _scale(slot: Slot, amax: torch.Tensor | None) -> torch.Tensor:
    if amax is None:
        return torch.ones((), dtype=torch.float32, device=slot.data.device)
    fmt = FORMAT_OF.get(slot.data.dtype)  # E4M11 has the scale of its E4M3 codes
    return torch.ones_like(amax) if fmt is None else power_of_two_scale(amax, fmt)


# Compiling


class _CompiledPass:
    """A pass for one kind, compiled at its first call; eager from then on, after a warning, where that fails."""

    def __init__(self, function, kind: Kind):
        def run(data, *arguments, kind=kind):  # numbers of a default are constants of the compiled code
            return function(data, *arguments, kind)

        self.eager, self.run = run, torch.compile(run, fullgraph=True, dynamic=True)

    def __call__(self, data, *arguments):
        try:
            with torch._dynamo.config.patch(recompile_limit=_MOST_KINDS):
                return self.run(data, *arguments)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            warnings.warn(f"the optimizer step runs uncompiled, which is slower: {error}", stacklevel=2)
            self.run = self.eager
            return self.eager(data, *arguments)


_compiled = functools.cache(_CompiledPass)

_MOST_KINDS = 256
"""Dynamo counts what it compiles by the code of `run`, which all kinds share, and refuses after eight. From torch 2.13
on `torch.compile(isolate_recompiles=True)` would count each kind by itself."""


def _vectors(arguments) -> Iterator[torch.Tensor]:
    for argument in arguments:
        for tensor in argument if isinstance(argument, (tuple, list)) else (argument,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 1:
                yield tensor
