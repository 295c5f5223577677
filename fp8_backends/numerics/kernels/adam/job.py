"""What the Adam step of one parameter works on: its tensors, its hyperparameters and its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...formats import E4M3, E5M2
from ...scaling import tensor_amax
from ..reference import adam_numbers

ROUNDINGS = ("stochastic", "nearest")

# places in the tensor of hyperparameters: the order of `adam_numbers`
STEP_SIZE, DECAY, WEIGHT_DECAY, NEW_IN_EXP_AVG, BETA2, NEW_IN_EXP_AVG_SQ, INV_SQRT_BIAS2, EPS, STEP = range(9)

WRITTEN = (0, 2, 3)
"""The places of weight, exp_avg and exp_avg_sq among the slots, of which the gradient has place 1."""


class Slot(NamedTuple):
    """A tensor that the step reads, and writes in place unless it is the gradient."""

    data: torch.Tensor
    """Contiguous, any shape: E4M3, E5M2, FP16, BF16 or FP32."""
    scale_inv: torch.Tensor | None = None
    """FP32; 0-dim, or [ceil(numel / block_size)]; value = data * scale_inv. None: plain values."""
    block_size: int = 0
    """So many elements of the flattened data share a scale; 0: one scale for all."""


class Job(NamedTuple):
    """One step of Adam of one parameter, or of a shard of it."""

    weight: Slot
    grad: Slot
    exp_avg: Slot
    exp_avg_sq: Slot
    hyper: torch.Tensor
    """FP32 [9], from `adam_hyper`."""
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

    @property
    def slots(self) -> tuple[Slot, Slot, Slot, Slot]:
        return self.weight, self.grad, self.exp_avg, self.exp_avg_sq

    @property
    def written(self) -> tuple[Slot, Slot, Slot]:
        return self.weight, self.exp_avg, self.exp_avg_sq

    @property
    def kind(self) -> Kind:
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
        )

    def check(self) -> None:
        """Raise ValueError for a slot that is not contiguous, block sizes that differ, or an unknown rounding."""
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding is one of {', '.join(ROUNDINGS)}, not {self.rounding!r}")
        sizes, copy = set(), self.copy
        for slot in self.slots if copy is None else (*self.slots, copy):
            if not slot.data.is_contiguous():
                raise ValueError(f"the step works on contiguous tensors; strides {slot.data.stride()} are not")
            sizes.add(slot.block_size)
        mixed = len(sizes - {0}) > 1
        if mixed or copy and (copy.block_size or copy.data.dtype not in (E4M3.dtype, E5M2.dtype)):
            raise ValueError("one step has one block size, and the copy of the weight is E4M3 or E5M2 with one scale")
        if copy and self.weight.block_size:
            raise ValueError("a weight that is copied has one scale")


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
    """Whether a flag says if the gradient is finite; else its only scale does."""


def is_finite(grad: Slot) -> torch.Tensor:
    """Whether all values of a gradient are finite: bool, 0-dim, on the gradient's device."""
    if grad.scale_inv is None:
        finite = torch.ones((), dtype=torch.bool, device=grad.data.device)
    else:
        finite = torch.isfinite(grad.scale_inv.detach()).all()
    if grad.data.dtype.itemsize > 1 and grad.data.numel():
        finite = finite & torch.isfinite(tensor_amax(grad.data.detach()))
    return finite


def adam_hyper(group_lr, betas, eps: float, weight_decay: float, step: torch.Tensor, device) -> torch.Tensor:
    """`reference.adam_numbers` as one FP32 tensor on `device`, [9].

    Args:
        group_lr, betas: floats or 0-dim tensors.
        step: FP32, 0-dim, this step included (1 in the first). On the CPU its value is read; elsewhere it stays on its
            device, so nothing waits for the device.
    """
    return adam_hypers(group_lr, betas, eps, weight_decay, [step], device)[0]


def adam_hypers(
    group_lr, betas, eps: float, weight_decay: float, steps: Sequence[torch.Tensor], device
) -> torch.Tensor:
    """`adam_hyper` of several parameters' counts of steps, all on one device, at once: FP32 [len(steps), 9]."""
    numbers = [_number(x) for x in (group_lr, *betas)]
    if steps[0].device.type == "cpu":
        counts = [step.item() for step in steps]
        if not any(isinstance(number, torch.Tensor) for number in numbers):
            rows = {t: adam_numbers(*numbers, eps, weight_decay, t) for t in set(counts)}
            return torch.tensor([rows[t] for t in counts], dtype=torch.float32).to(device, non_blocking=True)
        t = torch.tensor(counts, dtype=torch.float64).to(device, non_blocking=True)
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
