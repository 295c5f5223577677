"""SGD, Muon and Adafactor over scaled weights, gradients and states. Their steps are PyTorch's (`stock_steps.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch.optim import _muon

from ..numerics.faults import FINITE, NOT_NEGATIVE
from ..numerics.sharded_tensor import is_distributed
from . import sharding
from .scaled_states import Declaration
from .stock_steps import StockSteps


def _has_momentum(group: Mapping[str, Any]) -> bool:
    momentum = group.get("momentum")
    return not isinstance(momentum, Real) or momentum != 0  # a checkpoint may hold anything


_RATES = {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE}


class ScaledSGD(StockSteps, torch.optim.SGD):
    """A `torch.optim.SGD` that `convert` made train scaled weights."""

    fp8_declared = Declaration(
        torch.optim.SGD,
        roles={"momentum_buffer": "first_moment"},
        ranges={**_RATES, "momentum": NOT_NEGATIVE, "dampening": FINITE},
        refused=("differentiable",),
        counts=False,
        has_states=_has_momentum,
    )


class ScaledMuon(StockSteps, torch.optim.Muon):
    """A `torch.optim.Muon` that `convert` made train scaled weights."""

    fp8_declared = Declaration(
        torch.optim.Muon,
        roles={"momentum_buffer": "direction"},
        ranges={**_RATES, "momentum": NOT_NEGATIVE, "eps": NOT_NEGATIVE},
        counts=False,
        elementwise=False,
    )

    def whole_step(
        self,
        group: Mapping[str, Any],
        p: torch.Tensor,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """As `StockSteps.whole_step`. Of a sharded matrix only the direction travels, in the BF16 in which PyTorch
        makes it orthogonal: 2 bytes an element."""
        if not is_distributed(p):
            return super().whole_step(group, p, weight, gradient, state)
        momentum, lr = group["momentum"], float(group["lr"])
        average = state.get("momentum_buffer", torch.zeros_like(gradient)).lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(average, momentum) if group["nesterov"] else average
        direction = _muon._zeropower_via_newtonschulz(
            sharding.gathered(p, direction.bfloat16()), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        weight.mul_(1 - lr * group["weight_decay"])
        adjusted = _muon._adjust_lr(lr, group["adjust_lr_fn"], p.shape)
        weight.add_(sharding.shard_of(p, direction), alpha=-adjusted)
        return {"momentum_buffer": average}


def _variances(shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """The states of Adafactor: a number for each row and each column, or for each element of a vector."""
    if len(shape) < 2:
        return {"variance": tuple(shape)}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


class ScaledAdafactor(StockSteps, torch.optim.Adafactor):
    """A `torch.optim.Adafactor` that `convert` made train scaled weights."""

    fp8_declared = Declaration(
        torch.optim.Adafactor,
        roles={},
        ranges=_RATES,
        elementwise=False,
        exact_states=_variances,
    )
