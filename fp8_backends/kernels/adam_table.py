"""Describe Adam steps: the job of each parameter, bounds of its results, and one table of all jobs
of a kind.

A step in one pass needs scales before its results are known. They follow from bounds
(`new_bounds`), of a `record`, FP32 [4]: max |x| of the stored weight, exp_avg and exp_avg_sq, and
R, the largest |exp_avg| / sqrt(exp_avg_sq) of an element, coded (`RATIO_BITS`); of the gradient's
amax G; and of the hyperparameters. With n = 1 - beta1, the step size s, the root c of exp_avg_sq's
bias correction, and primes for values after the step:

* |exp_avg'| <= (1 - n) |exp_avg| + n G, and exp_avg_sq' <= beta2 exp_avg_sq + (1 - beta2) G**2.
* |weight'| <= decay |weight| + |update|. The update is at most s |exp_avg'| / eps, and at most
  s / c ((1 - n) / sqrt(beta2) R + n / sqrt(1 - beta2)), as the root of exp_avg_sq' is at least that
  of each summand.

R is measured, so this holds for any betas and states. Data of exp_avg_sq below 2**-126, FP32's
limit, count as 2**-126, and a stored root of 0 as 2**-63.5: if eps is below c times this root, the
second bound grows by their ratio. Coupled weight decay is part of g. FP32 rounding errs by at most
2**-24 of its operands; `SLACK` of each is added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..formats.formats import E4M3, E4M11, E5M2, FORMATS, ROOT8, Format
from ..formats.scaling import tensor_amax
from .devices import on_device
from .rounding import SEED_FACTOR, decoded
from .triton_gate import is_fake

ROUNDINGS = ("stochastic", "nearest")

GRADIENT_LIMIT = 2.0**63
"""A larger element of a gradient counts as zero, to keep squares finite in FP32."""

WRITTEN = (0, 2, 3)
"""Places of weight, exp_avg and exp_avg_sq among the slots; the gradient has place 1."""

RATIO_BITS = math.ceil((63.5 + 2 * 0.0861) * 2**23)
"""Added to bits(m) - bits(v) / 2, gives FP32 bits of at least |m| / sqrt(v).

The bits of a positive number are 2**23 times its base-2 logarithm plus 127, less 0.0861 at most
between powers of two: once for exp_avg, once for its scale.
"""
SLACK, UPDATE_SLACK = 2.0**-20, 1 + 2.0**-10
LEAST_ROOT = 2.0**-63
"""Least counted root of exp_avg_sq's data. A smaller eps puts bounds far above the updates."""
HALF_OF_ONE = 63 * 2**23 + 2**22
"""Half of 127 * 2**23: bits of a root minus this are half the bits of its square, in the sense of
`RATIO_BITS`."""
INF_BITS = 0x7F800000
_INT32_MAX = 2**31 - 1
_ONE = 127 << 23
_MEASURED_PART = 2**20


class Slot(NamedTuple):
    """A tensor that the step reads, and unless it is the gradient writes in place."""

    data: torch.Tensor
    """Contiguous, any shape: E4M3, E5M2, FP16, BF16 or FP32; for exp_avg_sq also ROOT8, in
    blocks."""
    scale_inv: torch.Tensor | None = None
    """FP32, 0-dim or [ceil(numel / block_size)]: value = data * scale_inv, squared for ROOT8. None:
    plain values."""
    block_size: int = 0
    """Elements of the flattened data with a common scale; 0: all."""
    residual: torch.Tensor | None = None
    """int8, shaped as E4M3 `data`: a weight in E4M11."""

    @property
    def format(self) -> Format:
        """Return the format of data and residual together."""
        return FORMATS[self.data.dtype] if self.residual is None else E4M11


class Job(NamedTuple):
    """One step of Adam of one parameter, or of its shard."""

    weight: Slot
    grad: Slot
    exp_avg: Slot
    exp_avg_sq: Slot
    hyper: torch.Tensor
    """FP32 [9], from `adam_hyper`."""
    decoupled: bool
    """True for AdamW's weight decay."""
    maximize: bool
    rounding: str
    """One of `ROUNDINGS`, for weight and states below FP32."""
    seed: int
    """Random bits depend only on seed, step and element index."""
    copy: Slot | None = None
    """E4M3 or E5M2 copy of the rounded new weight, to nearest: O3's weight, from its master."""
    first: int = 0
    """Index of the slots' first element in the whole tensor, for the random bits."""
    finite: torch.Tensor | None = None
    """bool, 0-dim: the whole tensor's gradient is finite. None: decided from the slot."""
    record: torch.Tensor | None = None
    """FP32 [4], contiguous: `measured` of the stored tensors, updated by the step. With it, scales
    follow from bounds in one pass; without it, from amaxes in two, without a fused kernel."""

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
            finite_is_told=self.finite is not None
            or self.grad.data.dtype.itemsize > 1
            or self.grad.block_size > 0,
            bounded=self.record is not None and (scaled[0] if self.copy else any(scaled)),
            split=self.weight.residual is not None,
        )

    def check(self) -> None:
        """Raise ValueError for a non-contiguous slot, differing block sizes, an unknown rounding, a
        split weight with a copy or blocks, or roots without blocks."""
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding is one of {', '.join(ROUNDINGS)}, not {self.rounding!r}")
        copy = self.copy
        for slot in (*self.slots, copy) if copy else self.slots:
            if not slot.data.is_contiguous():
                raise ValueError(
                    f"the step works on contiguous tensors; strides {slot.data.stride()} are not"
                )
        mixed = len({slot.block_size for slot in self.slots} - {0}) > 1
        if mixed or copy and (copy.block_size or copy.data.dtype not in (E4M3.dtype, E5M2.dtype)):
            raise ValueError(
                "one step has one block size, and the copy of the weight is E4M3 or E5M2 with one "
                "scale"
            )
        if copy and self.weight.block_size:
            raise ValueError("a weight that is copied has one scale")
        if self.weight.residual is not None and (copy or self.weight.block_size):
            raise ValueError("a weight with a residual has one scale, and no copy")
        if self.exp_avg_sq.format is ROOT8 and not self.exp_avg_sq.block_size:
            raise ValueError("the roots of exp_avg_sq are stored in blocks")


class Kind(NamedTuple):
    """Properties a step is compiled for. Tuples are in the order weight, grad, exp_avg,
    exp_avg_sq."""

    dtypes: tuple[torch.dtype, ...]
    scaled: tuple[bool, ...]
    blocked: tuple[bool, ...]
    block_size: int
    copy: torch.dtype | None
    decoupled: bool
    maximize: bool
    stochastic: bool
    finite_is_told: bool
    """True if a flag marks a finite gradient; False if its only scale does."""
    bounded: bool = False
    """True if scales follow from bounds, and scales of blocks from their amaxes, in one pass."""
    split: bool = False
    """True for a weight in E4M11: E4M3 data and a residual."""

    @property
    def takes_one_pass(self) -> bool:
        """Return True if no scale needs an amax from another pass."""
        return self.bounded or self.copy is None and not any(self.scaled[i] for i in WRITTEN)

    def format(self, slot: int) -> Format:
        """Return the format of weight, grad, exp_avg or exp_avg_sq."""
        return E4M11 if slot == 0 and self.split else FORMATS[self.dtypes[slot]]


class Part(NamedTuple):
    """Elements of flattened tensors, in rows: blocks, or a single row."""

    start: int
    stop: int
    block_size: int

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """View this part as [rows, elements]; eight-bit floats as uint8."""
        flat = tensor.detach().view(-1)[self.start : self.stop]
        is_fp8 = flat.dtype.is_floating_point and flat.dtype.itemsize == 1
        length = self.stop - self.start
        return (flat.view(torch.uint8) if is_fp8 else flat).view(
            -1, min(self.block_size or length, length)
        )

    def decoded(self, slot: Slot) -> torch.Tensor:
        """Return FP32 values of a slot without their scale."""
        return decoded(
            self.rows(slot.data),
            slot.format,
            None if slot.residual is None else self.rows(slot.residual),
        )

    def blocks(self, scale: torch.Tensor, slot: Slot) -> torch.Tensor:
        """View the scales of this part: [rows, 1], or 0-dim if the slot has one scale."""
        if not slot.block_size or not scale.dim():
            return scale
        return scale[self.start // self.block_size : -(-self.stop // self.block_size)].unsqueeze(1)


def spans(numel: int, block_size: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of parts of about `size` elements: whole blocks, then the rest."""
    width = block_size or 1
    whole, step = numel - numel % width, max(size // width, 1) * width
    for start in range(0, whole, step):
        yield start, min(start + step, whole)
    if whole < numel:
        yield whole, numel


def inverse_of(slot: Slot) -> torch.Tensor:
    """Return the slot's scale_inv, or 1."""
    if slot.scale_inv is None:
        return torch.ones((), dtype=torch.float32, device=slot.data.device)
    return slot.scale_inv.detach()


def square_root(values: torch.Tensor) -> torch.Tensor:
    """Return FP32 roots, correctly rounded."""
    if values.device.type == "cpu":
        # PyTorch's own of FP32 is off by a last bit now and then
        return values.double().sqrt().float()
    return values.sqrt()


def is_finite(grad: Slot) -> torch.Tensor:
    """Return whether all values of a gradient are finite: bool, 0-dim, on the gradient's device."""
    if grad.scale_inv is None:
        finite = torch.ones((), dtype=torch.bool, device=grad.data.device)
    else:
        finite = torch.isfinite(grad.scale_inv.detach()).all()
    if grad.data.dtype.itemsize > 1 and grad.data.numel():
        finite = finite & torch.isfinite(tensor_amax(grad.data.detach()))
    return finite


def largest_gradient(grad: Slot, finite: torch.Tensor) -> torch.Tensor:
    """Return a bound of max |x| of a gradient, 0 if it counts as zero. FP32, 0-dim."""
    if not grad.data.numel():
        amax = torch.zeros((), dtype=torch.float32, device=grad.data.device)
    elif grad.scale_inv is None:
        amax = tensor_amax(grad.data.detach())
    else:
        amax = grad.scale_inv.detach().amax() * FORMATS[grad.data.dtype].max
    return torch.where(finite, amax, 0.0)


def adam_numbers(lr, beta1, beta2, eps, weight_decay, step) -> tuple:
    """Compute a step's hyperparameters, numbers or tensors: step size, factor of decoupled weight
    decay, weight decay, share of the gradient in exp_avg, beta2, share of its square in exp_avg_sq,
    factor of the root of exp_avg_sq, eps, and the step, 1 in the first."""
    inv_sqrt_bias2 = (1 - beta2**step) ** -0.5
    decay, new_in_exp_avg, new_in_exp_avg_sq = 1 - lr * weight_decay, 1 - beta1, 1 - beta2
    step_size = lr / (1 - beta1**step)
    shares = new_in_exp_avg, beta2, new_in_exp_avg_sq
    return step_size, decay, weight_decay, *shares, inv_sqrt_bias2, eps, step


def exact_update(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: float,
    decoupled: bool,
) -> torch.Tensor:
    """Compute Adam's change of a weight in FP64 from the moments after the step."""
    step_size, decay, _, _, _, _, inv_sqrt_bias2, eps, _ = adam_numbers(
        lr, *betas, eps, weight_decay, step
    )
    p, m, root = weight.double(), exp_avg.double(), exp_avg_sq.double().sqrt()
    return (p * decay if decoupled else p) - step_size * m / (root * inv_sqrt_bias2 + eps) - p


def adam_hyper(
    group_lr, betas, eps: float, weight_decay: float, step: torch.Tensor, device
) -> torch.Tensor:
    """Return `adam_hypers` of one step count, [9]."""
    return adam_hypers(group_lr, betas, eps, weight_decay, [step], device)[0]


def adam_hypers(
    group_lr, betas, eps: float, weight_decay: float, steps: Sequence[torch.Tensor], device
) -> torch.Tensor:
    """Return `adam_numbers` of each step count as FP32 on `device`, [len(steps), 9].

    Args:
        group_lr, betas: floats or 0-dim tensors.
        steps: FP32, 0-dim, on one device, 1 in the first step. CPU tensors are read; others stay,
        without waiting.
    """
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
    return torch.stack(
        [v.to(device, torch.float32, non_blocking=True).expand(len(steps)) for v in values], 1
    )


def _number(x):
    if not isinstance(x, torch.Tensor):
        return x
    return x.item() if x.device.type == "cpu" else x.double()


def measured(weight: Slot, exp_avg: Slot, exp_avg_sq: Slot) -> torch.Tensor:
    """Measure the record of stored tensors, FP32 [4], equal to the bit to a step's own update of
    it."""
    slots = (weight, exp_avg, exp_avg_sq)
    block_size, has_roots = max(slot.block_size for slot in slots), exp_avg_sq.format is ROOT8
    record = torch.zeros(4, dtype=torch.int32, device=weight.data.device)
    for span in spans(
        0 if is_fake(weight.data) else weight.data.numel(), block_size, _MEASURED_PART
    ):
        part = Part(*span, block_size)
        w, m, v = ((part.decoded(slot), part.blocks(inverse_of(slot), slot)) for slot in slots)
        # abs: of a NaN
        amaxes = [(data.abs() * inverse).amax().abs() for data, inverse in (w, m, v)]
        if has_roots:
            amaxes[2] = amaxes[2] * amaxes[2]
        largest = [
            *(amax.view(torch.int32) for amax in amaxes),
            _coded_ratios(*m, *v, has_roots).amax(),
        ]
        record = torch.maximum(record, torch.stack(largest))
    return record.view(torch.float32)


def _coded_ratios(m, m_inverse, v, v_inverse, has_roots: bool) -> torch.Tensor:
    """Return |exp_avg| / sqrt(exp_avg_sq) of each element, coded, int32; 0 if exp_avg is 0. v:
    roots if `has_roots`."""
    half_of_inverse, half_of_v = v_inverse.view(torch.int32) - _ONE, v.view(torch.int32)
    if has_roots:  # a root of 0 and its scale add up to 0
        half_of_v = torch.where(v > 0, half_of_v - HALF_OF_ONE, -half_of_inverse)
    else:
        half_of_inverse, half_of_v = half_of_inverse >> 1, half_of_v >> 1
    bits = m.view(torch.int32) & _INT32_MAX
    ratios = torch.where(bits > 0, bits - half_of_v, 0)
    shift = m_inverse.view(torch.int32) - _ONE - half_of_inverse
    largest = INF_BITS - RATIO_BITS - shift.clamp(min=0)
    return torch.where(ratios > 0, (torch.minimum(ratios, largest) + shift).clamp(min=0), 0)


def new_bounds(
    record: torch.Tensor,
    grad_amax: torch.Tensor,
    hyper: torch.Tensor,
    exp_avg_sq_inverse: torch.Tensor,
    decoupled: bool,
) -> list[torch.Tensor]:
    """Bound max |x| of the new weight, exp_avg and exp_avg_sq before rounding; FP32, 0-dim.

    Args:
        record: of the stored tensors, FP32 [4].
        grad_amax: bound of the gradient's finite values, 0 if it counts as zero. FP32, 0-dim.
        hyper: FP32 [9], from `adam_hyper`.
        exp_avg_sq_inverse: scale_inv of the stored exp_avg_sq, or 1, as for roots. FP32, 0-dim.
        decoupled: True for AdamW's weight decay.
    """
    step_size, decay, weight_decay, n, beta2, new_in_exp_avg_sq, c, eps, _ = hyper.unbind()
    w, m, v, coded = record.unbind()
    ratio = (coded.view(torch.int32) + RATIO_BITS).view(torch.float32)
    g = grad_amax.clamp(max=GRADIENT_LIMIT)
    if not decoupled:
        g = g + weight_decay.abs() * w
    kept, new = 1 - n + SLACK, n + SLACK
    m = kept * m + new * g
    v = v * beta2 + new_in_exp_avg_sq * g * g
    of_exp_avg, of_gradient = (
        kept / square_root(beta2) * ratio,
        new / square_root(new_in_exp_avg_sq),
    )
    least_root = LEAST_ROOT * square_root(exp_avg_sq_inverse.clamp(min=1.0))
    above_eps = (c * least_root / eps).clamp(min=1.0)
    of_quotient = step_size.abs() * (of_exp_avg + of_gradient) / c * above_eps
    of_eps = step_size.abs() * m / eps
    update = torch.where(of_quotient < of_eps, of_quotient, of_eps) * UPDATE_SLACK
    if decoupled:
        w = w * decay.abs()
    return [(w + update) * (1 + SLACK), m, v]


COLUMNS = 17
"""int64 in a parameter's row: pointers to data (weight, grad, exp_avg, exp_avg_sq), to the copy's
data or the weight's residual, to scales in the same order and the copy's (0: none), to
hyperparameters, to a finite flag (0: the scale decides); number of elements, index of the first in
the whole tensor, seed, first chunk; pointer to the record (0: none). `adam.cpp` and
`triton_tiles.py` use the same order."""


class AdamTable:
    """Step parameters of one kind on one device by `adam_cpu.CPUKernels` or
    `triton_adam.TritonKernels`.

    Attributes:
        rows: int64 [parameters, COLUMNS], on the device.
        bounds: FP32 [parameters, 3], on the device: of weight, exp_avg and exp_avg_sq with one
            scale each.
        grad_amax: FP32 [parameters]: of gradients without a scale to bound them.
        old_scale_inv: FP32 [parameters, 3]: copies for a kernel with programs in any order.
        aligned: True if all data begin at multiples of 16 bytes.
        chunk_counts: chunks of each parameter, at least one to write the scales.
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
        self._find_bounds()
        self._write()

    def amaxes(self) -> list[list[torch.Tensor | None]]:
        """Run `AdamSteps.amaxes`."""
        self._find_bounds()
        has_bound = [self.kind.scaled[i] and not self.kind.blocked[i] for i in WRITTEN]
        rows = [zip(row.unbind(), has_bound, strict=True) for row in self.bounds.unbind()]
        return [[bound if has else None for bound, has in row] for row in rows]

    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[None]:
        """Run `AdamSteps.write`, copies included."""
        bounds = [bound for row in self.bounds.unbind() for bound in row.unbind()]
        pairs = zip(bounds, [amax for row in amaxes for amax in row], strict=True)
        changed = [
            (b, amax) for b, amax in pairs if amax is not None and b.data_ptr() != amax.data_ptr()
        ]
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
        tensors = [
            part
            for slot in slots
            for part in (slot.data, slot.scale_inv, slot.residual)
            if part is not None
        ]
        # autograd does not see writes through pointers
        torch.autograd.graph.increment_version(tensors)

    def _grad_amaxes(self) -> torch.Tensor:
        """Return zeros for the kernel that measures gradients, or amaxes it does not measure."""
        kind, told = self.kind, self.jobs[0].finite is not None
        if not kind.bounded or not (kind.blocked[1] or told and not kind.scaled[1]):
            return torch.zeros(len(self.jobs), dtype=torch.float32, device=self.device)
        finite = torch.stack([job.finite for job in self.jobs]) if told else self._finite
        if kind.blocked[1]:
            amaxes = self._largest_inverses * FORMATS[kind.dtypes[1]].max
        else:
            amaxes = torch.stack([largest_gradient(job.grad, job.finite) for job in self.jobs])
        return torch.where(finite, amaxes, 0.0)

    @functools.cached_property
    def _largest_inverses(self) -> torch.Tensor:
        """Find the largest scale_inv of each gradient's blocks, FP32 [parameters], in few
        launches."""
        inverses = [job.grad.scale_inv.detach() for job in self.jobs]
        inverses = [inverse if inverse.numel() else inverse.new_zeros(1) for inverse in inverses]
        return torch.stack(torch._foreach_norm(inverses, math.inf))

    def _find_finite(self) -> torch.Tensor | None:
        """Return finite flags of the gradients, bool [parameters]: ones to be corrected by a kernel
        if elements decide; None if the only scale decides, or jobs have flags."""
        if self.jobs[0].finite is not None or not self.kind.finite_is_told:
            return None
        if not self.kind.blocked[1]:
            return torch.ones(len(self.jobs), dtype=torch.bool, device=self.device)
        if self.kind.dtypes[1].itemsize == 1:
            return torch.isfinite(self._largest_inverses)
        return torch.stack([is_finite(job.grad) for job in self.jobs])

    def _rows(self) -> list[list[int]]:
        rows, first_chunk = [], 0
        for i, job in enumerate(self.jobs):
            residual = _EMPTY if job.weight.residual is None else job.weight.residual
            slots = (*job.slots, job.copy or Slot(residual))
            finite = 0 if self._finite is None else self._finite.data_ptr() + i
            row = [slot.data.data_ptr() for slot in slots]
            row += [0 if slot.scale_inv is None else slot.scale_inv.data_ptr() for slot in slots]
            row += [job.hyper.data_ptr(), finite if job.finite is None else job.finite.data_ptr()]
            row += [job.weight.data.numel(), job.first, job.seed * SEED_FACTOR % 2**32, first_chunk]
            row += [0 if job.record is None else job.record.data_ptr()]
            rows.append(row)
            first_chunk += self.chunk_counts[i]
        return rows


_EMPTY = torch.empty(0, device="cpu")
