"""Faults that a developer can plant, to see the checks of a comparison fail."""

from __future__ import annotations

import torch
from torch import nn

from ...errors import RecipeError


def freeze(weight: nn.Parameter, optimizer) -> None:
    """The optimizer does not know the weight, as when a conversion makes a new Parameter."""
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not weight]


def flip_wgrad(weight: nn.Parameter, optimizer) -> None:
    """The weight gradient has the wrong sign."""
    weight.register_hook(torch.neg)


PLANTS = {"frozen": freeze, "flipped-wgrad": flip_wgrad}


def plant(fault: str, model: nn.Module, optimizer) -> None:
    """Break the first Linear layer of a prepared model."""
    if fault not in PLANTS:
        raise RecipeError(f"no fault {fault!r} to plant: one of {', '.join(PLANTS)}")
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    PLANTS[fault](layer.weight, optimizer)
