"""How much of Adam's next update the rounding of the weights would lose."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..numerics.kernels.adam import AdamSteps, Job, Slot, adam_hyper
from ..numerics.kernels.adam_table import exact_update
from ..numerics.scaled_tensor import ScaledTensor
from ..numerics.sharded_tensor import local_part

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of Adam's states."""


@torch.no_grad()
def share_of_lost_updates(optimizer: torch.optim.Optimizer) -> float | None:
    """The share, 0 to 1, of the next update of scaled weights that rounding would lose: 1 minus the projection of the
    stored update on the exact one. It is read from live states of this rank; None before the first step."""
    stored_share = total = 0.0
    parameters = ((group, p) for group in optimizer.param_groups for p in group["params"])
    for index, (group, p) in enumerate(parameters):
        state, weight = optimizer.state.get(p, {}), local_part(p)
        has_moments = all(name in state for name in MOMENTS)
        if not isinstance(weight, ScaledTensor) or not has_moments or not all(group["betas"]):
            continue
        weight.settle()
        weight = weight if weight.master is None else weight.master
        before = weight.exact(torch.float32)
        exact = exact_update(
            before,
            *(_float(state[name]) for name in MOMENTS),
            lr=float(group["lr"]),
            betas=tuple(map(float, group["betas"])),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=float(state["step"]),
            decoupled=group["decoupled_weight_decay"],
        )
        stored = _rounded_step(optimizer, group, state, weight, index).exact(torch.float32) - before
        stored_share += (stored.double() * exact).sum().item()
        total += exact.square().sum().item()
    return min(1.0, max(0.0, 1.0 - stored_share / total)) if total > 0 else None


def _rounded_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], state: dict[str, Any], weight: ScaledTensor, index: int
) -> ScaledTensor:
    """A copy of the weight after a step that leaves the moments as they are: with a gradient of zero, it
    multiplies them by the betas that they were divided by."""
    stepped = copy.deepcopy(weight.detach())
    moments = [_float(state[name]) / beta for name, beta in zip(MOMENTS, group["betas"], strict=True)]
    decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
    job = Job(
        Slot(stepped._data, stepped._scale_inv, residual=stepped.residual),
        Slot(torch.zeros_like(moments[0])),
        *map(Slot, moments),
        adam_hyper(group["lr"], group["betas"], group["eps"], decay, state["step"], weight.device),
        decoupled=True,
        maximize=False,
        rounding=optimizer.fp8_states.rounding,
        seed=index,
    )
    AdamSteps([job], fused=False).run()
    return stepped


def _float(value: torch.Tensor) -> torch.Tensor:
    value = local_part(value)
    return value.dequantize(torch.float32) if isinstance(value, ScaledTensor) else value.float()
