"""`fp8_params`: weights that do not train are kept in FP8, in the Parameters that the model already has.

What TransformerEngine and the native compute have in common: which weights are refused, and how a kept one is put in
its place, saved, loaded and restored. In which tensor they keep it is their own.

A weight that trains is refused: an update of ordinary size is smaller than half a step of E4M3, and an optimizer
without a master copy would lose nearly all of them. That is what level O3 is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..errors import FP8BackendError, RecipeError, Refusal
from ..numerics.modules import CONVERSION
from ..numerics.parameter_swap import refuse_if_held, swap
from ..numerics.sharded_tensor import is_distributed

SHARDED = Refusal(
    "fp8_params=True does not go with sharded weights: FSDP and DeepSpeed cut parameters up, and frozen FP8 weights "
    "are whole",
    "use DDP; or level O3 (msamp:O3, te+msamp:O3), whose FP8 weights FSDP2 shards",
)


def check(linear: nn.Linear, level_o3: str) -> None:
    """Raise `RecipeError` for a layer whose weight cannot be kept in FP8. `level_o3`: the backend for weights that
    train."""
    weight = linear.weight
    sizes = f"a layer {linear.in_features} -> {linear.out_features}"
    if weight.requires_grad:
        raise RecipeError(
            f"fp8_params=True, and {sizes} trains: rounding to E4M3 would swallow its updates. Use {level_o3}, which "
            f"trains FP8 weights with an FP16 master; or freeze the layers whose weights FP8 shall keep "
            f"(requires_grad_(False)) and name those that train, such as adapters, in exclude"
        )
    if weight.is_meta:
        raise RecipeError(f"fp8_params=True, and {sizes} is on the meta device: load its weight first")
    if is_distributed(weight) or hasattr(weight, "ds_id"):
        raise RecipeError(SHARDED)


def keep(
    root: nn.Module,
    layers: Mapping[str, nn.Linear],
    is_kept: Callable[[torch.Tensor], bool],
    quantized: Callable[[torch.Tensor, nn.Linear], torch.Tensor],
    make_plain: Callable[[nn.Module], None],
) -> None:
    """Swap the weights of these layers of `root` for `quantized(weight, layer)`. Repeating it does nothing; ties
    stay. `make_plain` undoes it where a layer is restored.

    Raises:
        FP8BackendError: something else holds on to a weight, named, or it is sharded; no weight has changed then.
    """
    new = {name: layer for name, layer in layers.items() if not is_kept(layer.weight)}
    for name, layer in new.items():
        if is_distributed(layer.weight):  # sharded since it was kept
            raise RecipeError(SHARDED)
        _refuse_if_tied(root, name, layer)
        refuse_if_held(layer.weight, f"{name}.weight")
    for name, layer in new.items():
        if not is_kept(layer.weight):  # tied to a layer before it
            swap(layer.weight, quantized(layer.weight, layer), f"{name}.weight")
        layer.__dict__[CONVERSION].undo.append(make_plain)


def _refuse_if_tied(root: nn.Module, name: str, layer: nn.Linear) -> None:
    for other_name, module in root.named_modules():
        if not isinstance(module, type(layer)) and any(p is layer.weight for p in module._parameters.values()):
            raise FP8BackendError(
                f"fp8_params=True: the weight of {name} is that of {other_name} too ({type(module).__name__}), which "
                f"does not multiply FP8 weights: leave {name} out by exclude"
            )
