"""Frozen FP8 weights (`fp8_params`) in `te` and `native`: the refusals, and the swap in and out.

A weight that trains is refused: an update of ordinary size is smaller than half a step of E4M3, and
an optimizer that rounds to nearest would lose nearly all of them. The levels from O3 on train FP8
weights.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..errors import FP8BackendError, RecipeError, Refusal
from ..tensors.parameter_swap import refuse_if_held, swap
from ..tensors.sharded_tensor import is_distributed, local_part
from ..torch_tools.modules import CONVERSION

SHARDED = Refusal(
    "fp8_params=True does not go with these sharded weights, nor do codes of a checkpoint: FSDP1, "
    "DeepSpeed and te take frozen weights whole, and weights that were plain when FSDP2 sharded "
    "them stay plain",
    "use DDP; or native:... under FSDP2, prepared (prepare(model, None, spec)) before fully_shard; "
    "or level O3 or O4 (msamp:O4, te+msamp:O4), whose FP8 weights FSDP2 shards",
)
TRAINS = Refusal(
    "fp8_params=True, like codes of a checkpoint, leaves no weight in high precision: an update "
    "below half a step, in E4M3 3 to 6 % of the weight, would be lost, so weights that train are "
    "refused",
    "use level O3 or O4 (msamp:O4, te+msamp:O4), which train FP8 weights with an FP16 master or a "
    "residual of eight bits; or freeze the layers whose weights FP8 shall hold "
    "(requires_grad_(False)) and name those that train, such as adapters, in exclude",
)

OFFLOADED = Refusal(
    "fp8_params=True does not go with cpu_offload, disk_offload or dispatch_model to the CPU or "
    "the disk: Accelerate's hooks put plain weights in place for each forward, in place of those "
    "in FP8",
    "leave fp8_params out, or keep the model on its device, where its weights take a byte an "
    "element",
)


def check(layer: nn.Linear) -> None:
    """Raise `RecipeError` unless the layer's weight can be frozen in FP8."""
    weight = layer.weight
    sizes = f"a layer {layer.in_features} -> {layer.out_features}"
    if weight.requires_grad:
        raise RecipeError(f"{sizes} trains: {TRAINS}")
    if weight.is_meta:
        raise RecipeError(
            f"fp8_params=True, and {sizes} is on the meta device: load its weight first"
        )
    is_plain_shard = is_distributed(weight) and type(local_part(weight)) is torch.Tensor
    if is_plain_shard or hasattr(weight, "ds_id"):
        raise RecipeError(SHARDED)


def check_running(layer: nn.Linear, is_frozen: bool) -> None:
    """Raise `RecipeError` if the weight of a running layer trains by now, or is no longer
    frozen."""
    check(layer)
    if not is_frozen:
        raise RecipeError(OFFLOADED if "_hf_hook" in layer.__dict__ else SHARDED)


def freeze(
    root: nn.Module,
    layers: Mapping[str, nn.Linear],
    is_frozen: Callable[[torch.Tensor], bool],
    quantized: Callable[[torch.Tensor, nn.Linear], torch.Tensor],
    make_plain: Callable[[nn.Module], None],
) -> None:
    """Swap these layers' weights for `quantized(weight, layer)`, once, with their ties;
    `make_plain` undoes it on restoring. Raises `FP8BackendError`, without a change, for a weight
    that is sharded, or held by something else."""
    new = {name: layer for name, layer in layers.items() if not is_frozen(layer.weight)}
    for name, layer in new.items():
        if is_distributed(layer.weight):  # sharded since it was frozen
            raise RecipeError(SHARDED)
        for other_name, module in root.named_modules():
            if not isinstance(module, type(layer)) and any(
                p is layer.weight for p in module._parameters.values()
            ):
                raise FP8BackendError(
                    f"fp8_params=True: the weight of {name} is that of {other_name} too "
                    f"({type(module).__name__}), which does not multiply FP8 weights: leave {name} "
                    "out by exclude"
                )
        refuse_if_held(layer.weight, f"{name}.weight")
    for name, layer in new.items():
        if not is_frozen(layer.weight):  # tied to a layer before it
            swap(layer.weight, quantized(layer.weight, layer), f"{name}.weight")
    for layer in layers.values():  # also weights that came as codes
        undo = layer.__dict__[CONVERSION].undo
        if make_plain not in undo:
            undo.append(make_plain)
