"""Use the original MS-AMP package (`implementation="original"`).

It needs PyTorch 2.1, a patched NCCL and a build from source, and no package index carries it. It
changes PyTorch for the whole process and returns new model and optimizer objects; its training is
not counted or audited.
"""

import importlib
import importlib.util

import torch
from torch import nn

from ..errors import BackendUnavailableError, RecipeError
from ..recipes.fields import OF_FEATURES
from ..recipes.handlers import Recipe

UNREADABLE = (
    "rounding",
    "shard_states",
    "gradient_release",
    "offload",
    "include",
    "exclude",
    "module_filter_func",
    "gradient_comm",
    *OF_FEATURES,
)
"""Fields without an equivalent in the original."""


def check(recipe: Recipe) -> None:
    """Raise `RecipeError` for unsupported fields, `BackendUnavailableError` if the package is not
    installed."""
    if recipe.level not in ("O1", "O2"):
        raise RecipeError(
            f"implementation='original': msamp.initialize takes O1 and O2, not {recipe.level}; "
            f"{recipe.level} is available with implementation='native', the default"
        )
    if given := [name for name in UNREADABLE if name in recipe.given]:
        raise RecipeError(
            f"{', '.join(given)}: not read by implementation='original'; leave it out"
        )
    if importlib.util.find_spec("msamp") is None:
        raise BackendUnavailableError(
            "implementation='original': the package msamp is not installed. It cannot be installed "
            "with current PyTorch (it needs torch 2.1 and a patched NCCL, and no index carries "
            "it); the native levels msamp:O1 to msamp:O4 need none of that: leave implementation "
            "out"
        )


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> tuple:
    """Return the new objects from `msamp.initialize`."""
    check(recipe)
    if optimizer is None:
        raise RecipeError(
            "implementation='original': msamp.initialize wants model and optimizer together"
        )
    msamp = importlib.import_module("msamp")
    return msamp.initialize(model, optimizer, opt_level=recipe.level, use_te=recipe.compute == "te")
