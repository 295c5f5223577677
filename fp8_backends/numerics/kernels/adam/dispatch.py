"""The Adam step over low-precision states, fused: no full-precision copy of any state exists.

A job has a record of its stored tensors: scales follow from bounds of this step's amaxes (`bounds.py`), and one pass
computes the new values, rounds them and writes them in place. On a CPU and on an NVIDIA GPU that is one kernel over all
parameters of a kind (`table.py`, with `cpu.py` and `triton_adam.py`). Elsewhere, without a compiler, and without a
record it is PyTorch's operations, parameter by parameter (`passes.py`), which need no record: a first pass finds the
amaxes then. All compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .. import triton_gate
from . import cpu
from .passes import Passes
from .table import ROUNDINGS, AdamTable, Job, Kind, Slot, adam_hyper, adam_hypers, is_finite

if TYPE_CHECKING:
    from .triton_adam import TritonKernels

__all__ = [
    "ROUNDINGS",
    "AdamSteps",
    "Job",
    "Slot",
    "adam_hyper",
    "adam_hypers",
    "has_kernels",
    "is_finite",
]


class AdamSteps:
    """One step of several parameters, in FP32 and in place on data and scale_inv of weights and states.

    Call `run`; or its three parts one after the other, where ranks that have shards of the parameters agree on the
    results of each part before the next one. New scales are powers of two; a scale_inv of NaN marks a weight that is
    not finite. A gradient with a value that is not finite counts as zero throughout, and a positive exp_avg_sq is
    stored as at least the smallest number of its format. Rounding "stochastic" keeps the expected values of weight and
    states below FP32; "nearest" is MS-AMP's, and loses updates below half a step of the format.

    Args:
        fused: by a kernel over all parameters, where there is one for their device and jobs.
        compiled: elsewhere by `torch.compile`, which takes half a minute once and does not pay for few elements; else
            eagerly.

    Raises:
        ValueError: what `Job.check` raises.
    """

    @torch.no_grad()
    def __init__(self, jobs: Sequence[Job], *, fused: bool = True, compiled: bool = False):
        self._count = len(jobs)
        self._parts: list[tuple[AdamTable | _Singly, list[int]]] = []
        groups: dict[tuple[torch.device, bool, Kind], list[int]] = {}
        for i, job in enumerate(jobs):
            job.check()
            groups.setdefault((job.weight.data.device, job.finite is None, job.kind), []).append(i)
        for (device, _, kind), members in groups.items():
            together = [jobs[i] for i in members]
            fits = fused and kind.takes_one_pass
            kernels = _kernels(kind, together[0].weight.data) if fits else None
            if kernels is not None:
                steps = AdamTable(kind, together, kernels)
            else:  # where a fused kernel cannot be compiled for a CPU, nothing can
                steps = _Singly(together, compiled and not (fits and device.type == "cpu"))
            self._parts.append((steps, members))

    @torch.no_grad()
    def run(self) -> None:
        """Make the whole step."""
        for steps, _ in self._parts:
            steps.run()

    @torch.no_grad()
    def amaxes(self) -> list[list[torch.Tensor | None]]:
        """The first pass: each parameter's max |x| of the new weight, exp_avg and exp_avg_sq, FP32: 0-dim, or [blocks]
        where they are blocked; None for those that have no scale. Nothing is written.

        For a job with a record, bounds of these that follow from it without a pass, and nothing of blocks. The record
        is used up: `write` makes it anew."""
        return self._each(lambda steps, _: steps.amaxes())

    @torch.no_grad()
    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """The second pass: write weights and states, with scales from these amaxes. Returns max |x| of each weight as
        it is stored, 0-dim, or None if no copy of it is left to write."""
        return self._each(lambda steps, members: steps.write([amaxes[i] for i in members]))

    @torch.no_grad()
    def write_copies(self, amaxes: list[torch.Tensor | None]) -> None:
        """The third pass: write the copies of weights that have an amax here, from the weights as they are stored.
        amaxes: from `write`."""
        for steps, members in self._parts:
            if isinstance(steps, _Singly):
                steps.write_copies([amaxes[i] for i in members])

    def _each(self, function: Callable[[AdamTable | _Singly, list[int]], list]) -> list:
        found = [None] * self._count
        for steps, members in self._parts:
            for i, result in zip(members, function(steps, members), strict=True):
                found[i] = result
        return found


class _Singly:
    """Steps of parameters of one kind as PyTorch's operations, a parameter at a time."""

    def __init__(self, jobs: Sequence[Job], compiled: bool):
        self.steps = [Passes(job, compiled) for job in jobs]

    def run(self) -> None:
        self.write_copies(self.write(self.amaxes()))

    def amaxes(self) -> list[list[torch.Tensor | None]]:
        return [step.amaxes() for step in self.steps]

    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        return [step.write(each) for step, each in zip(self.steps, amaxes, strict=True)]

    def write_copies(self, amaxes: list[torch.Tensor | None]) -> None:
        for step, amax in zip(self.steps, amaxes, strict=True):
            if amax is not None:
                step.write_copy(amax)


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether there are fused kernels for this tensor's device."""
    return triton_gate.usable(tensor) or cpu.usable(tensor)


def _kernels(kind: Kind, weight: torch.Tensor) -> cpu.CPUKernels | TritonKernels | None:
    """The fused kernels for parameters of a kind on the device of this one."""
    if triton_gate.usable(weight):
        from . import triton_adam  # Triton takes a second to load

        return triton_adam.kernels(kind, weight)
    return cpu.kernels(kind) if cpu.usable(weight) else None
