"""The products of `te` with experts, as `Compute.parts`; only `build` imports TransformerEngine."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...formats.scaling import RULES
from ..interface import Recipe
from ..te.backend import unaligned
from . import is_expert_parallel, misfit, sizes_of


def unfit(experts: nn.Module, part: str, recipe: Recipe) -> str | None:
    """Do as `Compute.parts`."""
    if reason := misfit(experts, part, recipe):
        return reason
    if is_expert_parallel(experts) and RULES[recipe.scaling].state_name:
        return "expert parallel: TransformerEngine would mix the amaxes of different experts over the ranks"
    _, out_features, in_features = sizes_of(experts, part)
    return unaligned(in_features, out_features, recipe)


def note(recipe: Recipe) -> str | None:
    """Do as `Compute.parts`."""
    return None


def build(experts: nn.Module, parts: list[str], recipe: Recipe, shared: Any) -> nn.ModuleDict:
    """Do as `Compute.parts`."""
    from . import te_layer

    return te_layer.build(experts, parts, recipe, shared)
