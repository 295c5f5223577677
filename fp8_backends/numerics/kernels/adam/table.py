"""All parameters of an optimizer step in one table, which a fused kernel reads: pointers, sizes, places of amaxes.

`cpu.py` and `triton_adam.py` have the kernels. The numbers are those of `passes.py` to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from .job import WRITTEN, Job, Kind, Slot, is_finite
from .rounding import SEED_FACTOR

COLUMNS = 19
"""A parameter's row has so many int64: pointers to data (weight, grad, exp_avg, exp_avg_sq), to the copy's data, to
scales in the same order and the copy's (0: it has none), to hyperparameters, to whether the gradient is finite (0: its
scale tells); number of elements, index of the first in the whole tensor, seed, first chunk; places of the amaxes of
weight, exp_avg and exp_avg_sq. `cpu.cpp` and `triton_tiles.py` count them likewise."""


class Kernels(Protocol):
    """The kernels for one kind and one kind of device. Each is one launch over all parameters of a table."""

    def chunk_size(self) -> int:
        """How many elements are worked on together; a multiple of the kind's block size."""

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
        self._amax_places, numbers = _amax_places(jobs)
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
        """The first pass, as `AdamSteps.amaxes`."""
        self._measure()
        return self._amax_views()

    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """The second pass, as `AdamSteps.write`."""
        own, given = ([amax for row in rows for amax in row] for rows in (self._amax_views(), amaxes))
        pairs = [(view, amax) for view, amax in zip(own, given, strict=True) if view is not None]
        changed = [(view, amax) for view, amax in pairs if view.data_ptr() != amax.data_ptr()]
        if changed:
            torch._foreach_copy_(*zip(*changed, strict=True))
        self._write()
        return [None] * len(self.jobs) if self.kind.copy is None else list(self.stored.unbind())

    def write_copies(self, amaxes: list[torch.Tensor | None]) -> None:
        """The third pass, as `AdamSteps.write_copies`."""
        if self.kind.copy is not None:
            self.stored.copy_(torch.stack(amaxes))
            self._recast()

    def _amax_views(self) -> list[list[torch.Tensor | None]]:
        single = self.amax[: 3 * len(self.jobs)].unbind()

        def view(slot: Slot, place: int) -> torch.Tensor | None:
            if slot.scale_inv is None:
                return None
            return self.amax[place : place + slot.scale_inv.numel()] if slot.block_size else single[place]

        return [
            [view(slot, place) for slot, place in zip(job.written, places, strict=True)]
            for job, places in zip(self.jobs, self._amax_places, strict=True)
        ]

    def _measure(self) -> None:
        if any(self.kind.scaled[i] for i in WRITTEN):
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
            slots = (*job.slots, job.copy or _NO_SLOT)
            finite = 0 if self._finite is None else self._finite.data_ptr() + i
            row = [slot.data.data_ptr() for slot in slots]
            row += [0 if slot.scale_inv is None else slot.scale_inv.data_ptr() for slot in slots]
            row += [job.hyper.data_ptr(), finite if job.finite is None else job.finite.data_ptr()]
            row += [job.weight.data.numel(), job.first, job.seed * SEED_FACTOR % 2**32, first_chunk, *places]
            rows.append(row)
            first_chunk += self.chunk_counts[i]
        return rows


def _count_as_changed(slots: Iterable[Slot]) -> None:
    """Tell autograd that these were written in place: it does not see a write through a pointer."""
    torch.autograd.graph.increment_version([part for slot in slots for part in slot[:2] if part is not None])


_NO_SLOT = Slot(torch.empty(0))


def _amax_places(jobs: Sequence[Job]) -> tuple[list[list[int]], int]:
    """The index of the (first) amax of each parameter's weight, exp_avg and exp_avg_sq; and the number of amaxes."""
    places, end = [], 3 * len(jobs)
    for i, job in enumerate(jobs):
        places.append([3 * i, 3 * i + 1, 3 * i + 2])
        for j, slot in enumerate(job.written):
            if slot.block_size:
                places[i][j] = end
                end += slot.scale_inv.numel()
    return places, end
