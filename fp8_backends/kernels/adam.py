"""Step Adam over low-precision states in FP32, without full-precision copies of any state.

With a record of a job's stored tensors, scales follow from bounds of this step's amaxes, and one
kernel steps all parameters of a kind (`adam_table.py` with `adam_cpu.py` or `triton_adam.py`).
Elsewhere, without a compiler or a record (a first pass then finds the amaxes), PyTorch operations
step each parameter. All give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..formats.formats import FORMAT_OF, FP32, ROOT8
from ..formats.scaling import power_of_two_scale, scale_inv_of
from . import adam_cpu, triton_gate
from .adam_table import (
    GRADIENT_LIMIT,
    ROUNDINGS,
    AdamTable,
    Job,
    Kind,
    Part,
    Slot,
    adam_hyper,
    adam_hypers,
    inverse_of,
    is_finite,
    largest_gradient,
    measured,
    new_bounds,
    spans,
    square_root,
)
from .rounding import EXP_AVG_BITS, EXP_AVG_SQ_BITS, WEIGHT_BITS, codes_of, random_bits, random_key

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

_CPU_PART, _GPU_PART = 2**18, 2**24
"""Elements of a part of `_Passes`: FP32 copies in a CPU's cache, few launches on a GPU."""
_FIELDS = (WEIGHT_BITS, EXP_AVG_BITS, EXP_AVG_SQ_BITS)


class AdamSteps:
    """Step several parameters in FP32, in place on data and scale_inv of weights and states.

    Call `run`; or `amaxes`, `write` and `write_copies` in this order, so that ranks with shards of
    the parameters can agree on the results in between. New scales are powers of two; a non-finite
    weight gets a scale_inv of NaN. A gradient with a non-finite value counts as zero, all of it,
    and a positive exp_avg_sq is stored as at least the smallest number of its format. Rounding
    "stochastic" keeps expected values of weight and states below FP32; "nearest", as in MS-AMP,
    loses updates below half a step of the format.

    Args:
        fused: use a kernel over all parameters if their device and jobs have one.

    Raises:
        ValueError: from `Job.check`.
    """

    @torch.no_grad()
    def __init__(self, jobs: Sequence[Job], *, fused: bool = True):
        self._count = len(jobs)
        self.parts: list[tuple[AdamTable | _Passes, list[int]]] = []
        groups: dict[tuple[torch.device, bool, Kind], list[int]] = {}
        for i, job in enumerate(jobs):
            job.check()
            groups.setdefault((job.weight.data.device, job.finite is None, job.kind), []).append(i)
        for (_, _, kind), members in groups.items():
            kernels = (
                _kernels(kind, jobs[members[0]].weight.data)
                if fused and kind.takes_one_pass
                else None
            )
            if kernels is not None:
                self.parts.append((AdamTable(kind, [jobs[i] for i in members], kernels), members))
            else:
                self.parts += [(_Passes(jobs[i], kind), [i]) for i in members]

    @torch.no_grad()
    def run(self) -> None:
        """Make the whole step."""
        for steps, _ in self.parts:
            steps.run()

    @torch.no_grad()
    def amaxes(self) -> list[list[torch.Tensor | None]]:
        """Return each parameter's max |x| of the new weight, exp_avg and exp_avg_sq, and write
        nothing. FP32: 0-dim, or [blocks]; None without a scale.

        For a job with a record: bounds of these, without a pass, and None for blocks. Uses up the
        record until `write`.
        """
        return self._for_each_part(lambda steps, _: steps.amaxes())

    @torch.no_grad()
    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Write weights and states with scales from these amaxes. Return max |x| of stored weights
        that need a copy."""
        return self._for_each_part(lambda steps, members: steps.write([amaxes[i] for i in members]))

    @torch.no_grad()
    def write_copies(self, amaxes: list[torch.Tensor | None]) -> None:
        """Write the copies of stored weights. amaxes: from `write`."""
        for steps, members in self.parts:
            if isinstance(steps, _Passes) and amaxes[members[0]] is not None:
                steps.write_copy(amaxes[members[0]])

    def _for_each_part(self, function: Callable[[AdamTable | _Passes, list[int]], list]) -> list:
        results = [None] * self._count
        for steps, members in self.parts:
            for i, result in zip(members, function(steps, members), strict=True):
                results[i] = result
        return results


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's device has fused kernels; a fake tensor stands for such a
    device."""
    return triton_gate.usable(tensor) or adam_cpu.usable(tensor) or triton_gate.is_fake(tensor)


def _kernels(kind: Kind, weight: torch.Tensor) -> adam_cpu.CPUKernels | TritonKernels | None:
    if triton_gate.usable(weight):
        from . import triton_adam  # Triton takes a second to load

        return triton_adam.kernels(kind, weight)
    return adam_cpu.kernels(kind) if adam_cpu.usable(weight) else None


class _Passes:
    """Step one parameter by PyTorch operations, part by part: what the fused kernels compute, to
    the bit."""

    def __init__(self, job: Job, kind: Kind):
        self.job, self.kind, self.written = job, kind, job.written
        self.finite, inverse = (
            is_finite(job.grad) if job.finite is None else job.finite,
            inverse_of(job.grad),
        )
        nan_unless_finite = torch.where(
            self.finite, inverse, torch.full_like(inverse, float("nan"))
        )
        self.slots = (
            job.weight,
            job.grad._replace(scale_inv=nan_unless_finite),
            job.exp_avg,
            job.exp_avg_sq,
        )
        data = job.weight.data
        size = _CPU_PART if data.device.type == "cpu" else _GPU_PART
        # has no values to step: only the amaxes have shapes
        self.is_fake = triton_gate.is_fake(data)
        numel = 0 if self.is_fake else data.numel()
        self.parts = [Part(*span, kind.block_size) for span in spans(numel, kind.block_size, size)]
        self.key = random_key(job.seed, job.hyper[-1]) if kind.stochastic else None

    def run(self) -> None:
        (amax,) = self.write(self.amaxes())
        if amax is not None:
            self.write_copy(amax)

    def amaxes(self) -> list[list[torch.Tensor | None]]:
        """Run `AdamSteps.amaxes`."""
        if not self.kind.bounded or self.is_fake:
            return [self._amaxes()]
        exp_avg_sq, hyper = self.job.exp_avg_sq, self.job.hyper
        inverse = inverse_of(exp_avg_sq)
        if exp_avg_sq.block_size:  # a stored root needs no correction
            inverse = torch.full_like(hyper[0], 1.0 if exp_avg_sq.format is ROOT8 else math.inf)
        amax = largest_gradient(self.job.grad, self.finite)
        bounds = new_bounds(self.job.record, amax, hyper, inverse, self.kind.decoupled)
        pairs = zip(self.written, bounds, strict=True)
        return [
            [None if slot.scale_inv is None or slot.block_size else bound for slot, bound in pairs]
        ]

    def _amaxes(self) -> list[torch.Tensor | None]:
        if not self.parts or all(slot.scale_inv is None for slot in self.written):
            return [
                None if slot.scale_inv is None else torch.zeros_like(slot.scale_inv)
                for slot in self.written
            ]
        rows = zip(
            *[[x.abs().amax(1) for x in self._new_values(part)] for part in self.parts], strict=True
        )
        amaxes = [torch.cat(of) for of in rows]
        return [
            None if slot.scale_inv is None else amax if slot.block_size else amax.amax()
            for slot, amax in zip(self.written, amaxes, strict=True)
        ]

    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Run `AdamSteps.write`."""
        (amaxes,) = amaxes
        if self.is_fake:
            return [
                None
                if self.kind.bounded or self.job.copy is None
                else torch.zeros_like(self.job.copy.scale_inv)
            ]
        scales = [_scale(slot, amax) for slot, amax in zip(self.written, amaxes, strict=True)]
        copy_amaxes = [self._write(part, scales) for part in self.parts]
        for slot, scale, amax in zip(self.written, scales, amaxes, strict=True):
            if amax is not None:
                slot.scale_inv.copy_(scale_inv_of(scale, amax))
        if self.kind.bounded:
            self.job.record.copy_(measured(*self.written))
            if self.job.copy is not None:
                self.write_copy(amaxes[0])
        if self.kind.bounded or self.job.copy is None:
            return [None]
        inverse = inverse_of(self.job.weight)
        return [
            torch.stack(copy_amaxes).amax() * inverse if copy_amaxes else torch.zeros_like(inverse)
        ]

    def write_copy(self, amax: torch.Tensor) -> None:
        """Run `AdamSteps.write_copies`: write O3's weight from the stored master."""
        weight, copy = self.job.weight, self.job.copy
        if self.is_fake:
            return
        inverse, scale = inverse_of(weight), _scale(copy, amax)
        for part in self.parts:
            part.rows(copy.data).copy_(
                codes_of(part.decoded(weight) * inverse * scale, copy.format)[0]
            )
        copy.scale_inv.copy_(scale_inv_of(scale, amax))

    def _write(self, part: Part, scales: list[torch.Tensor]) -> torch.Tensor | None:
        """Write weight, exp_avg and exp_avg_sq of one part. Return the stored weight's amax,
        unscaled, for a copy."""
        random = None
        if self.key is not None:
            random = random_bits(self.key, self.job.first + part.start, part.stop - part.start)
        for i, values in enumerate(self._new_values(part)):
            slot, scale = self.written[i], scales[i]
            if slot.block_size and self.kind.bounded:
                amax = values.abs().amax(1, keepdim=True)
                scale = power_of_two_scale(amax, slot.format)
                part.blocks(slot.scale_inv, slot).copy_(scale_inv_of(scale, amax))
            elif slot.block_size:
                scale = part.blocks(scale, slot)
            residual = None
            if slot.format is not FP32:
                bits = None if random is None else random.view(values.shape)
                values, residual = codes_of(
                    values * scale, slot.format, bits, _FIELDS[i], above_zero=i == 2
                )
            if residual is not None:
                part.rows(slot.residual).copy_(residual)
            part.rows(slot.data).copy_(values)
        return None if self.job.copy is None else part.decoded(self.job.weight).abs().amax()

    def _new_values(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute torch.optim's Adam in FP32: new weight, exp_avg and exp_avg_sq, or its root if
        stored."""
        kind = self.kind
        step_size, decay, weight_decay, n, beta2, new_in_exp_avg_sq, c, eps, _ = (
            self.job.hyper.unbind()
        )
        p, g, m, v = (
            part.decoded(slot) * part.blocks(inverse_of(slot), slot) for slot in self.slots
        )
        has_roots = kind.format(3) is ROOT8
        if has_roots:
            v = v * v
        g = torch.where(g.abs() < GRADIENT_LIMIT, g, 0.0)  # NaN, from the scale, is not less
        if kind.maximize:
            g = -g
        if kind.decoupled:
            p = p * decay
        else:
            g = g + weight_decay * p
        m = m + n * (g - m)
        v = v * beta2 + new_in_exp_avg_sq * g * g
        root = square_root(v)
        return p - step_size * m / (root * c + eps), m, root if has_roots else v


def _scale(slot: Slot, amax: torch.Tensor | None) -> torch.Tensor:
    if amax is None:
        return torch.ones((), dtype=torch.float32, device=slot.data.device)
    fmt = FORMAT_OF.get(slot.data.dtype)  # E4M11 has the scale of its E4M3 codes
    return torch.ones_like(amax) if fmt is None else power_of_two_scale(amax, fmt)
