"""Bounds of what a step of Adam will store, from numbers that are known before it: scales for a step of one pass.

A parameter has a `record`, FP32 [4]: max |x| of the stored weight, exp_avg and exp_avg_sq, and the largest quotient
|exp_avg| / sqrt(exp_avg_sq) of an element, coded (`RATIO_BITS`). `new_bounds` follows from the record, the gradient's
amax G and the hyperparameters. With n = 1 - beta1, the step size s, the root c of exp_avg_sq's bias correction, and
exp_avg' and exp_avg_sq' after the step:

* |exp_avg'| <= (1 - n) |exp_avg| + n G, and exp_avg_sq' <= beta2 exp_avg_sq + (1 - beta2) G**2.
* |weight'| <= decay |weight| + |update|, and |update| = s |exp_avg'| / (c sqrt(exp_avg_sq') + eps) is at most
  s |exp_avg'| / eps. It is also at most s / c ((1 - n) / sqrt(beta2) R + n / sqrt(1 - beta2)), where R is the largest
  quotient before the step: exp_avg_sq' is a sum of beta2 exp_avg_sq and (1 - beta2) g**2, so its root is at least
  that of each; the parts of exp_avg' are divided by one each. The smaller of the two bounds counts.

That holds for any betas and any states, those of another optimizer's checkpoint too, since R is measured and not
assumed. (Exact states that began at zero have R <= n / sqrt((1 - beta2) (1 - beta1**2 / beta2)) by the inequality of
Cauchy and Schwarz, 7.3 with the usual betas; rounded ones may exceed it.) Data of exp_avg_sq below 2**-126, where FP32
ends, count as that number, and a root that is stored as 0 counts as 2**-63.5. Such an element is divided by eps and by
little else: where eps is less than c times the root of what it counts as, the second bound is that many times larger.

`maximize` changes the sign of g. Weight decay that is not decoupled is a part of g, in exp_avg and exp_avg_sq alike. A
gradient that counts as zero leaves the first part.

Roundings to FP32 are at most 2**-24 of the numbers that take part; `SLACK` of each is added.
"""

from __future__ import annotations

import math

import torch

from ...formats import ROOT8
from ..reference import GRADIENT_LIMIT
from .rounding import decoded
from .table import Slot

RATIO_BITS = math.ceil((63.5 + 2 * 0.0861) * 2**23)
"""What makes FP32 bits of at least the quotient |m| / sqrt(v) of bits(m) - bits(v) / 2.

The bits of a positive number are its logarithm to base 2, times 2**23, plus 127 of the exponent; between two powers of
two they are below it by 0.0861 at most. Twice: for an element of exp_avg, and for its scale.
"""
SLACK, UPDATE_SLACK = 2.0**-20, 1 + 2.0**-10
LEAST_ROOT = 2.0**-63
"""What the root of exp_avg_sq's data counts as, at least. With a smaller eps bounds are far above the updates."""
INT32_MAX = 2**31 - 1
HALF_OF_ONE = 63 * 2**23 + 2**22
"""Half of 127 * 2**23: bits of a root minus this are half the bits of its square, in the sense of `RATIO_BITS`."""
INF_BITS = 0x7F800000
_ONE = 127 << 23
_PART = 2**20


def measured(weight: Slot, exp_avg: Slot, exp_avg_sq: Slot) -> torch.Tensor:
    """The record of tensors as they are stored, FP32 [4]. What a step keeps of what it writes is this to the bit."""
    block_size = max(slot.block_size for slot in (weight, exp_avg, exp_avg_sq)) or 1
    size, numel = -(-_PART // block_size) * block_size, weight.data.numel()
    record = torch.zeros(4, dtype=torch.int32, device=weight.data.device)
    for start in range(0, numel, size):
        w, m, v = (_part(slot, start, min(start + size, numel)) for slot in (weight, exp_avg, exp_avg_sq))
        amaxes = [(data.abs() * inverse).amax().abs() for data, inverse in (w, m, v)]  # abs: of a NaN
        is_root = exp_avg_sq.format is ROOT8
        if is_root:
            amaxes[2] = amaxes[2] * amaxes[2]
        ratios = _coded_ratios(*m, *(_halves_of_roots(*v) if is_root else _halves(*v)))
        found = torch.stack([*(amax.view(torch.int32) for amax in amaxes), ratios.amax()])
        record = torch.maximum(record, found)
    return record.view(torch.float32)


def _part(slot: Slot, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 data of some elements, and what each is multiplied by."""
    flat = slot.data.detach().view(-1)[start:stop]
    residual = None if slot.residual is None else slot.residual.detach().view(-1)[start:stop]
    data = decoded(flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat, slot.format, residual)
    inverse = (
        torch.ones((), dtype=torch.float32, device=flat.device) if slot.scale_inv is None else slot.scale_inv.detach()
    )
    if slot.block_size:
        first, last = start // slot.block_size, -(-stop // slot.block_size)
        inverse = inverse[first:last].repeat_interleave(slot.block_size)[: stop - start]
    return data, inverse


def _halves(v: torch.Tensor, v_inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the bits of exp_avg_sq's data and of its scale_inv over 1."""
    return v.view(torch.int32) >> 1, (v_inverse.view(torch.int32) - _ONE) >> 1


def _halves_of_roots(root: torch.Tensor, root_inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`_halves` where the root is stored. Of a root of 0 both together are 0."""
    half = root_inverse.view(torch.int32) - _ONE
    return torch.where(root > 0, root.view(torch.int32) - HALF_OF_ONE, -half), half


def _coded_ratios(m, m_inverse, half_of_v, half_of_inverse) -> torch.Tensor:
    """|exp_avg| / sqrt(exp_avg_sq) of each element, coded, int32; 0 where exp_avg is 0."""
    bits = m.view(torch.int32) & INT32_MAX
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
    """No less than max |x| of the new weight, exp_avg and exp_avg_sq, before they are rounded; FP32, 0-dim.

    Args:
        record: of what is stored, FP32 [4].
        grad_amax: no less than that of the gradient's finite values; 0 if it counts as zero. FP32, 0-dim.
        hyper: FP32 [9], from `table.adam_hyper`.
        exp_avg_sq_inverse: scale_inv of the stored exp_avg_sq, or 1, as for roots. FP32, 0-dim.
        decoupled: whether weight decay is AdamW's.
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
    of_exp_avg, of_gradient = kept / _square_root(beta2) * ratio, new / _square_root(new_in_exp_avg_sq)
    least_root = LEAST_ROOT * _square_root(exp_avg_sq_inverse.clamp(min=1.0))
    above_eps = (c * least_root / eps).clamp(min=1.0)
    of_quotient = step_size.abs() * (of_exp_avg + of_gradient) / c * above_eps
    of_eps = step_size.abs() * m / eps
    update = torch.where(of_quotient < of_eps, of_quotient, of_eps) * UPDATE_SLACK
    if decoupled:
        w = w * decay.abs()
    return [(w + update) * (1 + SLACK), m, v]


def _square_root(number: torch.Tensor) -> torch.Tensor:
    return number.double().sqrt().float()  # PyTorch's own of FP32 is off by a last bit now and then
