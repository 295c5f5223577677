"""The Adam step's inputs: the job of each parameter, and one table of all jobs of a kind for a fused kernel.

`cpu.py` and `triton_adam.py` have the kernels, which read pointers and sizes from the table. Their numbers are those of
`passes.py` to the bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...formats import E4M3, E4M11, E5M2, FORMATS, ROOT8, Format
from ...scaling import tensor_amax
from ..eager import on_device
from ..reference import adam_numbers
from .rounding import SEED_FACTOR

ROUNDINGS = ("stochastic", "nearest")

# places in the tensor of hyperparameters: the order of `adam_numbers`
HYPERS = 9
"""How many hyperparameters there are."""
STEP_SIZE, DECAY, WEIGHT_DECAY, NEW_IN_EXP_AVG, BETA2 = range(5)
NEW_IN_EXP_AVG_SQ, INV_SQRT_BIAS2, EPS, STEP = range(5, HYPERS)

WRITTEN = (0, 2, 3)
"""The places of weight, exp_avg and exp_avg_sq among the slots, of which the gradient has place 1."""


class Slot(NamedTuple):
    """A tensor that the step reads, and writes in place unless it is the gradient."""

    data: torch.Tensor
    """Contiguous, any shape: E4M3, E5M2, FP16, BF16 or FP32; exp_avg_sq also ROOT8, in blocks."""
    scale_inv: torch.Tensor | None = None
    """FP32; 0-dim, or [ceil(numel / block_size)]; value = data * scale_inv, of ROOT8 its square. None: plain values."""
    block_size: int = 0
    """So many elements of the flattened data share a scale; 0: one scale for all."""
    residual: torch.Tensor | None = None
    """int8, of the shape of `data`, which are E4M3 then: a weight in E4M11."""

    @property
    def format(self) -> Format:
        """What data and residual are together."""
        return FORMATS[self.data.dtype] if self.residual is None else E4M11


class Job(NamedTuple):
    """One step of Adam of one parameter, or of a shard of it."""

    weight: Slot
    grad: Slot
    exp_avg: Slot
    exp_avg_sq: Slot
    hyper: torch.Tensor
    """FP32 [HYPERS], from `adam_hyper`."""
    decoupled: bool
    """Whether weight decay is AdamW's."""
    maximize: bool
    rounding: str
    """How weight and states below FP32 are rounded: one of `ROUNDINGS`."""
    seed: int
    """Random bits are a function of seed, step and element index alone."""
    copy: Slot | None = None
    """An E4M3 or E5M2 tensor that receives the new, already rounded weight, to nearest: O3's weight, of its master."""
    first: int = 0
    """Index in the whole tensor of the slots' first element, for the random bits."""
    finite: torch.Tensor | None = None
    """Whether the whole tensor's gradient is finite, bool, 0-dim. None: what the slot shows."""
    record: torch.Tensor | None = None
    """FP32 [4], contiguous: `bounds.measured` of the stored tensors, which the step updates. Scales follow from bounds
    of this step's amaxes, in one pass; without a record from the amaxes, in two, for which there is no fused kernel."""

    @property
    def slots(self) -> tuple[Slot, Slot, Slot, Slot]:
        return self.weight, self.grad, self.exp_avg, self.exp_avg_sq

    @property
    def written(self) -> tuple[Slot, Slot, Slot]:
        return self.weight, self.exp_avg, self.exp_avg_sq

    @property
    def kind(self) -> Kind:
        scaled = [slot.scale_inv is not None for slot in self.written]
        return Kind(
            dtypes=tuple(slot.data.dtype for slot in self.slots),
            scaled=tuple(slot.scale_inv is not None for slot in self.slots),
            blocked=tuple(slot.block_size > 0 for slot in self.slots),
            block_size=max(slot.block_size for slot in self.slots),
            copy=None if self.copy is None else self.copy.data.dtype,
            decoupled=self.decoupled,
            maximize=self.maximize,
            stochastic=self.rounding == "stochastic",
            finite_is_told=self.finite is not None or self.grad.data.dtype.itemsize > 1 or self.grad.block_size > 0,
            bounded=self.record is not None and (scaled[0] if self.copy else any(scaled)),
            split=self.weight.residual is not None,
        )

    def check(self) -> None:
        """Raise ValueError for a slot that is not contiguous, block sizes that differ, or an unknown rounding; a split
        weight that is copied or has blocks; roots without blocks."""
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding is one of {', '.join(ROUNDINGS)}, not {self.rounding!r}")
        copy = self.copy
        for slot in (*self.slots, copy) if copy else self.slots:
            if not slot.data.is_contiguous():
                raise ValueError(f"the step works on contiguous tensors; strides {slot.data.stride()} are not")
        mixed = len({slot.block_size for slot in self.slots} - {0}) > 1
        if mixed or copy and (copy.block_size or copy.data.dtype not in (E4M3.dtype, E5M2.dtype)):
            raise ValueError("one step has one block size, and the copy of the weight is E4M3 or E5M2 with one scale")
        if copy and self.weight.block_size:
            raise ValueError("a weight that is copied has one scale")
        if self.weight.residual is not None and (copy or self.weight.block_size):
            raise ValueError("a weight with a residual has one scale, and no copy")
        if self.exp_avg_sq.format is ROOT8 and not self.exp_avg_sq.block_size:
            raise ValueError("the roots of exp_avg_sq are stored in blocks")


class Kind(NamedTuple):
    """What a step is compiled for. Tuples are in the order of weight, grad, exp_avg, exp_avg_sq."""

    dtypes: tuple[torch.dtype, ...]
    scaled: tuple[bool, ...]
    blocked: tuple[bool, ...]
    block_size: int
    copy: torch.dtype | None
    decoupled: bool
    maximize: bool
    stochastic: bool
    finite_is_told: bool
    """Whether a flag tells if the gradient is finite; else its only scale does."""
    bounded: bool = False
    """Whether scales follow from bounds of amaxes, and those of blocks from their amaxes, in one pass."""
    split: bool = False
    """Whether the weight is E4M11: E4M3 data and a residual."""

    @property
    def takes_one_pass(self) -> bool:
        """Whether no scale follows from an amax that another pass would have to find."""
        return self.bounded or self.copy is None and not any(self.scaled[i] for i in WRITTEN)

    def format(self, slot: int) -> Format:
        """The format of weight, grad, exp_avg or exp_avg_sq."""
        return E4M11 if slot == 0 and self.split else FORMATS[self.dtypes[slot]]


def is_finite(grad: Slot) -> torch.Tensor:
    """Whether all values of a gradient are finite: bool, 0-dim, on the gradient's device."""
    if grad.scale_inv is None:
        finite = torch.ones((), dtype=torch.bool, device=grad.data.device)
    else:
        finite = torch.isfinite(grad.scale_inv.detach()).all()
    if grad.data.dtype.itemsize > 1 and grad.data.numel():
        finite = finite & torch.isfinite(tensor_amax(grad.data.detach()))
    return finite


def largest_gradient(grad: Slot, finite: torch.Tensor) -> torch.Tensor:
    """No less than max |x| of a gradient; 0 if it counts as zero. FP32, 0-dim."""
    if not grad.data.numel():
        amax = torch.zeros((), dtype=torch.float32, device=grad.data.device)
    elif grad.scale_inv is None:
        amax = tensor_amax(grad.data.detach())
    else:
        amax = grad.scale_inv.detach().amax() * FORMATS[grad.data.dtype].max
    return torch.where(finite, amax, 0.0)


def adam_hyper(group_lr, betas, eps: float, weight_decay: float, step: torch.Tensor, device) -> torch.Tensor:
    """`reference.adam_numbers` as one FP32 tensor on `device`, [HYPERS].

    Args:
        group_lr, betas: floats or 0-dim tensors.
        step: FP32, 0-dim, this step included (1 in the first). On the CPU its value is read; elsewhere it stays on its
            device, so nothing waits for the device.
    """
    return adam_hypers(group_lr, betas, eps, weight_decay, [step], device)[0]


def adam_hypers(
    group_lr, betas, eps: float, weight_decay: float, steps: Sequence[torch.Tensor], device
) -> torch.Tensor:
    """`adam_hyper` of several parameters' counts of steps, all on one device, at once: FP32 [len(steps), HYPERS]."""
    numbers = [_number(x) for x in (group_lr, *betas)]
    if steps[0].device.type == "cpu":
        counts = [step.item() for step in steps]
        if not any(isinstance(number, torch.Tensor) for number in numbers):
            rows = {t: adam_numbers(*numbers, eps, weight_decay, t) for t in set(counts)}
            return on_device([rows[t] for t in counts], torch.float32, device)
        t = on_device(counts, torch.float64, device)
    else:
        t = torch.stack(list(steps)).double()
    values = [
        v if isinstance(v, torch.Tensor) else torch.full((), v, device=device, dtype=torch.float64)
        for v in adam_numbers(*numbers, eps, weight_decay, t)
    ]
    return torch.stack([v.to(device, torch.float32, non_blocking=True).expand(len(steps)) for v in values], 1)


def _number(x):
    if not isinstance(x, torch.Tensor):
        return x
    return x.item() if x.device.type == "cpu" else x.double()


# All jobs of a kind in one table


COLUMNS = 17
"""A parameter's row has so many int64: pointers to data (weight, grad, exp_avg, exp_avg_sq), to the copy's data or the
weight's residual, to scales in the same order and the copy's (0: it has none), to hyperparameters, to whether the
gradient is finite (0: its scale tells); number of elements, index of the first in the whole tensor, seed, first chunk;
pointer to the record (0: none). `cpu.cpp` and `triton_tiles.py` count them likewise."""


class AdamTable:
    """The steps of parameters of one kind on one device, by `cpu.CPUKernels` or `triton_adam.TritonKernels`.

    Attributes:
        rows: int64 [parameters, COLUMNS], on the device.
        bounds: FP32 [parameters, 3], on the device: of weight, exp_avg and exp_avg_sq where they have one scale each.
        grad_amax: FP32 [parameters]: of gradients that have no scale which bounds them.
        old_scale_inv: FP32 [parameters, 3], room for a kernel that cannot tell when all of it has read them.
        aligned: whether all data begin at multiples of 16 bytes.
        chunk_counts: chunks of each parameter, at least one: it writes the scales.
    """

    def __init__(self, kind: Kind, jobs: Sequence[Job], kernels: Any):
        self.kind, self.jobs, self.kernels = kind, jobs, kernels
        self.device = jobs[0].weight.data.device
        self.chunk_size, count = kernels.chunk_size(), len(jobs)
        self.chunk_counts = [max(1, -(-job.weight.data.numel() // self.chunk_size)) for job in jobs]
        self._finite = self._find_finite()
        self.bounds = torch.zeros(count, 3, dtype=torch.float32, device=self.device)
        self.grad_amax = self._grad_amaxes()
        self.old_scale_inv = torch.empty(count, 3, dtype=torch.float32, device=self.device)
        rows = self._rows()
        self.aligned = not any(pointer % 16 for row in rows for pointer in row[:5])
        self.rows = on_device(rows, torch.int64, self.device)
        if self._finite is not None and not kind.blocked[1]:
            kernels.run("measure_gradients", self)

    def run(self) -> None:
        """The whole step."""
        self._find_bounds()
        self._write()

    def amaxes(self) -> list[list[torch.Tensor | None]]:
        """The first pass, as `AdamSteps.amaxes`."""
        self._find_bounds()
        has_bound = [self.kind.scaled[i] and not self.kind.blocked[i] for i in WRITTEN]
        rows = [zip(row.unbind(), has_bound, strict=True) for row in self.bounds.unbind()]
        return [[bound if has else None for bound, has in row] for row in rows]

    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[None]:
        """The second pass, as `AdamSteps.write`. Copies are written with it."""
        own = [bound for row in self.bounds.unbind() for bound in row.unbind()]
        given = [amax for row in amaxes for amax in row]
        changed = [pair for pair in zip(own, given, strict=True) if pair[1] is not None]
        changed = [(bound, amax) for bound, amax in changed if bound.data_ptr() != amax.data_ptr()]
        if changed:
            torch._foreach_copy_(*zip(*changed, strict=True))
        self._write()
        return [None] * len(self.jobs)

    def _find_bounds(self) -> None:
        if self.kind.bounded:
            self.kernels.run("bounds", self)

    def _write(self) -> None:
        self.kernels.run("write", self)
        slots = [slot for job in self.jobs for slot in (*job.written, job.copy) if slot is not None]
        parts = [part for slot in slots for part in (slot.data, slot.scale_inv, slot.residual) if part is not None]
        torch.autograd.graph.increment_version(parts)  # autograd does not see a write through a pointer

    def _grad_amaxes(self) -> torch.Tensor:
        """Zeros for the kernel that measures gradients, or what it does not measure."""
        kind, told = self.kind, self.jobs[0].finite is not None
        if kind.bounded and (kind.blocked[1] or told and not kind.scaled[1]):
            finite = torch.stack([job.finite for job in self.jobs]) if told else self._finite
            if kind.blocked[1]:
                amaxes = self._largest_inverses * FORMATS[kind.dtypes[1]].max
            else:
                amaxes = torch.stack([largest_gradient(job.grad, job.finite) for job in self.jobs])
            return torch.where(finite, amaxes, 0.0)
        return torch.zeros(len(self.jobs), dtype=torch.float32, device=self.device)

    @functools.cached_property
    def _largest_inverses(self) -> torch.Tensor:
        """The largest scale_inv of each gradient's blocks, FP32 [parameters], in few launches."""
        inverses = [job.grad.scale_inv.detach() for job in self.jobs]
        inverses = [each if each.numel() else each.new_zeros(1) for each in inverses]
        return torch.stack(torch._foreach_norm(inverses, math.inf))

    def _find_finite(self) -> torch.Tensor | None:
        """Whether each gradient is finite, bool [parameters]; ones, for the kernel to correct, if its elements tell;
        None if its only scale does, or the jobs have it."""
        if self.jobs[0].finite is not None:
            return None
        if self.kind.blocked[1] and self.kind.dtypes[1].itemsize == 1:
            return torch.isfinite(self._largest_inverses)
        if self.kind.blocked[1]:
            return torch.stack([is_finite(job.grad) for job in self.jobs])
        if self.kind.finite_is_told:
            return torch.ones(len(self.jobs), dtype=torch.bool, device=self.device)
        return None

    def _rows(self) -> list[list[int]]:
        rows, first_chunk = [], 0
        for i, job in enumerate(self.jobs):
            fifth = job.copy or (_NO_SLOT if job.weight.residual is None else Slot(job.weight.residual))
            slots = (*job.slots, fifth)
            finite = 0 if self._finite is None else self._finite.data_ptr() + i
            row = [slot.data.data_ptr() for slot in slots]
            row += [0 if slot.scale_inv is None else slot.scale_inv.data_ptr() for slot in slots]
            row += [job.hyper.data_ptr(), finite if job.finite is None else job.finite.data_ptr()]
            row += [job.weight.data.numel(), job.first, job.seed * SEED_FACTOR % 2**32, first_chunk]
            row += [0 if job.record is None else job.record.data_ptr()]
            rows.append(row)
            first_chunk += self.chunk_counts[i]
        return rows


_NO_SLOT = Slot(torch.empty(0))
