"""`fp8_params`: weights that TransformerEngine keeps in FP8, in the Parameters that the model already has.

Of 4 bytes an element in FP32 remain 2 on Hopper (codes, and the transposed copy that dgrad multiplies) or 1. A weight
that trains is refused: an update of ordinary size is smaller than half a step of E4M3, and an optimizer without a
master copy would lose nearly all of them. That is what `te+msamp:O3` is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import FP8BackendError, RecipeError
from ...parameter_exchange import exchange, refuse_if_held
from ...sharded_tensor import is_distributed
from ...weight_products import ADOPTED
from .recipes import FP8_WEIGHT_SLOT, QuantizedTensor, RecipeState, te_recipe
from .refusals import FP8_PARAMS_SHARDED

if TYPE_CHECKING:
    from .linear import TELinear


def check(linear: nn.Linear) -> None:
    """Raise `RecipeError` for a layer whose weight cannot be kept in FP8."""
    weight = linear.weight
    sizes = f"a layer {linear.in_features} -> {linear.out_features}"
    if weight.requires_grad:
        raise RecipeError(
            f"fp8_params=True, and {sizes} trains: rounding to E4M3 would swallow its updates. Use te+msamp:O3, which "
            f"trains FP8 weights with an FP16 master; or freeze the layers whose weights FP8 shall keep "
            f"(requires_grad_(False)) and name those that train, such as adapters, in exclude"
        )
    if weight.is_meta:
        raise RecipeError(f"fp8_params=True, and {sizes} is on the meta device: load its weight first")
    if is_distributed(weight) or hasattr(weight, "ds_id"):
        raise RecipeError(FP8_PARAMS_SHARDED)


def check_kept(layer: TELinear) -> None:
    """Raise where a layer that runs has its weight in FP8 no more, or trains it since."""
    check(layer)
    if layer.is_fsdp2 or not is_kept(layer.weight):
        raise RecipeError(FP8_PARAMS_SHARDED)


def is_kept(weight: torch.Tensor) -> bool:
    """Whether TransformerEngine keeps this weight in FP8."""
    return isinstance(weight, QuantizedTensor)


def keep(root: nn.Module, layers: Mapping[str, TELinear]) -> None:
    """Keep the weights of these layers of `root` in FP8. Repeating it does nothing; ties stay.

    Raises:
        FP8BackendError: something else holds on to a weight, named; no weight has changed then.
    """
    new = {name: layer for name, layer in layers.items() if not is_kept(layer.weight)}
    for name, layer in new.items():
        _refuse_if_tied(root, name, layer)
        refuse_if_held(layer.weight, f"{name}.weight")
    for name, layer in new.items():
        if not is_kept(layer.weight):  # tied to a layer before it
            exchange(layer.weight, quantised(layer.weight, layer), f"{name}.weight")
        layer.__dict__[ADOPTED].undo.append(make_plain)


def _refuse_if_tied(root: nn.Module, name: str, layer: TELinear) -> None:
    for other_name, module in root.named_modules():
        if not isinstance(module, type(layer)) and any(p is layer.weight for p in module._parameters.values()):
            raise FP8BackendError(
                f"fp8_params=True: the weight of {name} is that of {other_name} too ({type(module).__name__}), which "
                f"does not multiply FP8 weights: leave {name} out by exclude"
            )


@torch.no_grad()
def quantised(weight: torch.Tensor, layer: TELinear) -> torch.Tensor:
    """A weight as TransformerEngine's tensor with the copies that fprop and dgrad multiply."""
    return _quantizer(layer)(weight.detach().contiguous())


def _quantizer(layer: TELinear) -> Any:
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


def revive(layer: TELinear) -> None:
    """Complete an unpickled layer: TransformerEngine's pickles of a tensor hold its data alone."""
    if is_kept(layer.weight):
        layer.weight._is_param = True
        layer.weight._quantizer = _quantizer(layer)


def make_plain(layer: TELinear) -> None:
    """Undo `keep` on one layer."""
    if is_kept(layer.weight):
        exchange(layer.weight, plain(layer.weight), "weight")


@torch.no_grad()
def plain(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight, as an ordinary tensor of the dtype that it stands for."""
    return weight.dequantize(dtype=weight.dtype).detach() if is_kept(weight) else weight
