"""All parameters of an optimizer step in one table, which a fused kernel reads: pointers, sizes, places of amaxes.

`adam_cpu` and `triton_adam` have the kernels. The numbers are those of `adam_passes` to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from .job import Job, Slot, is_finite
from .rounding import SEED_FACTOR

COLUMNS = 19
"""Of a parameter's row, int64: pointers to data (weight, grad, exp_avg, exp_avg_sq), to the copy's data, to scales in
the same order and the copy's (0: it has none), to hyperparameters, to whether the gradient is finite (0: its scale
tells); number of elements, index of the first in the whole tensor, seed, first chunk; places of the amaxes of weight,
exp_avg and exp_avg_sq. `adam_cpu.cpp` and `triton_adam.py` count them likewise."""


class Kind(NamedTuple):
    """What a kernel is compiled for. In the order of weight, grad, exp_avg, exp_avg_sq."""

    dtypes: tuple[torch.dtype, ...]
    scaled: tuple[bool, ...]
    blocked: tuple[bool, ...]
    block_size: int
    copy: torch.dtype | None
    decoupled: bool
    maximize: bool
    stochastic: bool

    finite_is_told: bool
    """Whether a flag says if the gradient is finite; else its only scale does."""


def kind_of(job: Job) -> Kind:
    slots = (job.weight, job.grad, job.exp_avg, job.exp_avg_sq)
    return Kind(
        tuple(slot.data.dtype for slot in slots),
        tuple(slot.scale_inv is not None for slot in slots),
        tuple(slot.block_size > 0 for slot in slots),
        job.block_size,
        None if job.copy is None else job.copy.data.dtype,
        job.decoupled,
        job.maximize,
        job.rounding == "stochastic",
        job.finite is not None or job.grad.data.dtype.itemsize > 1 or job.grad.block_size > 0,
    )


class Kernels(Protocol):
    """The kernels for one kind and one kind of device. Each is one launch over all parameters of a table."""

    def chunk_size(self) -> int:
        """Elements that are worked on together; a multiple of the kind's block size."""

    def find_finite(self, table: AdamTable) -> None: ...

    def amaxes(self, table: AdamTable) -> None: ...

    def write(self, table: AdamTable) -> None: ...

    def recast(self, table: AdamTable) -> None: ...


class AdamTable:
    """The steps of parameters of one kind on one device.

    Attributes:
        rows: int64 [parameters, COLUMNS], on the device.
        amax: FP32, on the device: three numbers for each parameter, then those of blocks.
        stored: FP32 [parameters]: amaxes of weights as they are stored, where they are copied.
        old_scale_inv: FP32 [parameters, 3], room for a kernel that cannot tell when all of it has read them.
        aligned: whether all data begin at multiples of 16 bytes.
        chunk_counts: chunks of each parameter, at least one: it writes the scales.
    """

    def __init__(self, kind: Kind, jobs: Sequence[Job], kernels: Kernels):
        self.kind, self.jobs, self.kernels = kind, jobs, kernels
        self.device = jobs[0].weight.data.device
        self.chunk_size, count = kernels.chunk_size(), len(jobs)
        self.chunk_counts = [max(1, -(-job.weight.data.numel() // self.chunk_size)) for job in jobs]
        self._finite = self._find_finite()
        self._amax_places, numbers = _amax_places(kind, jobs)
        self.amax = torch.zeros(numbers, dtype=torch.float32, device=self.device)
        self.stored = torch.zeros(count, dtype=torch.float32, device=self.device)
        self.old_scale_inv = torch.empty(count, 3, dtype=torch.float32, device=self.device)
        rows = self._rows()
        self.aligned = not any(pointer % 16 for row in rows for pointer in row[:5])
        pinned = self.device.type == "cuda"  # then the copy waits for nothing
        self.rows = torch.tensor(rows, dtype=torch.int64, pin_memory=pinned).to(self.device, non_blocking=True)
        if self._finite is not None and not kind.blocked[1]:
            kernels.find_finite(self)

    def run(self) -> None:
        """The whole step."""
        self._measure()
        self._write()
        self._recast()

    def amaxes(self) -> list[list[torch.Tensor | None]]:
        """The first pass: of each parameter max |x| of the new weight, exp_avg and exp_avg_sq, FP32: 0-dim, or [blocks]
        where they are blocked; None for those that have no scale. Nothing is written."""
        self._measure()
        return self._amax_views()

    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """The second pass, with scales from these amaxes. Returns max |x| of each weight as it is stored, 0-dim, if
        there is a copy of it."""
        kept = [view for of in self._amax_views() for view in of]
        given = [amax for of in amaxes for amax in of]
        pairs = [(view, amax) for view, amax in zip(kept, given, strict=True) if view is not None]
        changed = [(view, amax) for view, amax in pairs if view.data_ptr() != amax.data_ptr()]
        if changed:
            torch._foreach_copy_(*zip(*changed, strict=True))
        self._write()
        return [None] * len(self.jobs) if self.kind.copy is None else list(self.stored.unbind())

    def write_copies(self, amaxes: list[torch.Tensor | None]) -> None:
        """The copies and their scales, from these amaxes of the weights as they are stored."""
        if self.kind.copy is not None:
            self.stored.copy_(torch.stack(amaxes))
            self._recast()

    def _amax_views(self) -> list[list[torch.Tensor | None]]:
        views = [list(of.unbind()) for of in self.amax[: 3 * len(self.jobs)].view(-1, 3).unbind()]
        for of, job, places in zip(views, self.jobs, self._amax_places, strict=True):
            for i, slot in enumerate(job.written):
                if slot.scale_inv is None:
                    of[i] = None
                elif slot.block_size:
                    of[i] = self.amax[places[i] : places[i] + slot.scale_inv.numel()]
        return views

    def _measure(self) -> None:
        if any(self.kind.scaled[i] for i in (0, 2, 3)):
            self.kernels.amaxes(self)

    def _write(self) -> None:
        self.kernels.write(self)
        _count_as_changed(slot for job in self.jobs for slot in job.written)

    def _recast(self) -> None:
        if self.kind.copy is not None:
            self.kernels.recast(self)
            _count_as_changed(job.copy for job in self.jobs)

    def _find_finite(self) -> torch.Tensor | None:
        """Whether each gradient is finite, bool [parameters]; ones, for `find_finite` to correct, if its elements tell;
        None if its only scale does, or the jobs say so."""
        if self.jobs[0].finite is not None:
            return None
        if self.kind.blocked[1]:
            return torch.stack([is_finite(job.grad) for job in self.jobs])
        if self.kind.finite_is_told:
            return torch.ones(len(self.jobs), dtype=torch.bool, device=self.device)
        return None

    def _rows(self) -> list[list[int]]:
        rows, first_chunk = [], 0
        for i, (job, places) in enumerate(zip(self.jobs, self._amax_places, strict=True)):
            slots = (job.weight, job.grad, job.exp_avg, job.exp_avg_sq)
            copy = job.copy or _NO_SLOT
            finite = 0 if self._finite is None else self._finite.data_ptr() + i
            row = [slot.data.data_ptr() for slot in (*slots, copy)]
            row += [_pointer(slot.scale_inv) for slot in (*slots, copy)]
            row += [job.hyper.data_ptr(), finite if job.finite is None else job.finite.data_ptr()]
            row += [job.weight.data.numel(), job.first, job.seed * SEED_FACTOR % 2**32, first_chunk, *places]
            rows.append(row)
            first_chunk += self.chunk_counts[i]
        return rows


def _count_as_changed(slots: Iterable[Slot]) -> None:
    """Written through a pointer is written in place: autograd sees it, and whoever keeps what was made of them."""
    torch.autograd.graph.increment_version([part for slot in slots for part in slot[:2] if part is not None])


_NO_SLOT = Slot(torch.empty(0))


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _amax_places(kind: Kind, jobs: Iterable[Job]) -> tuple[list[tuple[int, ...]], int]:
    """Of each parameter the index of the (first) amax of weight, exp_avg and exp_avg_sq; and how many there are."""
    jobs = list(jobs)
    places, end = [], 3 * len(jobs)
    for i, job in enumerate(jobs):
        of_job = [3 * i, 3 * i + 1, 3 * i + 2]
        for j, slot in enumerate(job.written):
            if slot.block_size:
                of_job[j] = end
                end += slot.scale_inv.numel()
        places.append(tuple(of_job))
    return places, end
