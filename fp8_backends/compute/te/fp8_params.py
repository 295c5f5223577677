"""`fp8_params`: weights that TransformerEngine keeps in FP8, in the Parameters that the model already has.

Of 4 bytes an element in FP32 remain 2 on Hopper (codes, and the transposed copy that dgrad multiplies) or 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import RecipeError
from ...numerics.parameter_swap import swap
from .. import frozen_weights
from .recipes import FP8_WEIGHT_SLOT, QuantizedTensor, RecipeState, te_recipe

LEVEL_O3 = "te+msamp:O3"


def check(linear: nn.Linear) -> None:
    """Raise `RecipeError` for a layer whose weight cannot be kept in FP8."""
    frozen_weights.check(linear, LEVEL_O3)


def check_kept(layer: nn.Linear) -> None:
    """Raise where a layer that runs has its weight in FP8 no more, or trains it since."""
    check(layer)
    if layer.is_fsdp2 or not is_kept(layer.weight):
        raise RecipeError(frozen_weights.SHARDED)


def is_kept(weight: torch.Tensor) -> bool:
    """Whether TransformerEngine keeps this weight in FP8."""
    return isinstance(weight, QuantizedTensor)


def keep(root: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Keep the weights of these layers of `root` in FP8. Repeating it does nothing; ties stay."""
    frozen_weights.keep(root, layers, is_kept, quantized, make_plain)


@torch.no_grad()
def quantized(weight: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """A weight as TransformerEngine's tensor with the copies that fprop and dgrad multiply."""
    return _quantizer(layer)(weight.detach().contiguous())


def _quantizer(layer: nn.Linear) -> Any:
    """By the recipe's rule, but for `delayed`: values that do not change have the scale of their own amax, so that a
    checkpoint which is loaded later is scaled anew."""
    recipe = layer.te_state.te_recipe
    if recipe.delayed():
        recipe = te_recipe.Float8CurrentScaling(fp8_format=recipe.fp8_format)
    state = RecipeState.create(recipe, mode="forward", num_quantizers=3, device=layer.weight.device)
    quantizer = state.make_quantizers()[FP8_WEIGHT_SLOT]
    quantizer.internal = False
    quantizer.set_usage(rowwise=True, columnwise=True)
    return quantizer


def revive(layer: nn.Linear) -> None:
    """Complete an unpickled layer: TransformerEngine's pickles of a tensor hold its data alone."""
    if is_kept(layer.weight):
        layer.weight._is_param = True
        layer.weight._quantizer = _quantizer(layer)


def make_plain(layer: nn.Linear) -> None:
    """Undo `keep` on one layer."""
    if is_kept(layer.weight):
        swap(layer.weight, plain(layer.weight), "weight")


@torch.no_grad()
def plain(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight, as an ordinary tensor of the dtype that it stands for."""
    return weight.dequantize(dtype=weight.dtype).detach() if is_kept(weight) else weight
