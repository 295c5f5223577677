"""MS-AMP's levels: how the weights of converted layers and their gradients are stored.

=====  ==============  =============  ===============  =================
level  weight          master         weight gradient  Adam states
=====  ==============  =============  ===============  =================
O1     scaled FP16     (the weight)   scaled E4M3      FP32, FP32
O2     scaled FP16     (the weight)   scaled E4M3      scaled E4M3, FP16
O3     scaled E4M3     scaled FP16    scaled E4M3      scaled E4M3, FP16
=====  ==============  =============  ===============  =================

A weight changes inside its Parameter object. A gradient is made E4M3 as soon as it is complete, so no second one is
ever held in high precision; while microbatches accumulate it is FP32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import FP8BackendError
from ..numerics.parameter_swap import refuse_if_held, swap
from ..numerics.scaled_tensor import SHARD, ScaledTensor, agree_on_scale, quantize
from ..numerics.sharded_tensor import (
    dequantize_shards,
    is_distributed,
    local_part,
    quantize_shards,
    shard_groups,
    with_local,
)
from .adamw import StateRule

if TYPE_CHECKING:
    from ..recipes.handlers import Recipe

FP32, FP16, E4M3 = torch.float32, torch.float16, torch.float8_e4m3fn

WEIGHT = {"O1": FP16, "O2": FP16, "O3": E4M3}
MOMENTS = {"O1": (FP32, FP32), "O2": (E4M3, FP16), "O3": (E4M3, FP16)}
BLOCK = {"tensor": 0, "block": 128}
"""`exp_avg_scaling` of a recipe -> elements that share a scale."""

LEVEL = "_fp8_level"
"""Attribute of a layer whose weight is stored at a level."""


def state_rule(recipe: Recipe) -> StateRule:
    """How the optimizer of a resolved recipe stores its states."""
    exp_avg, exp_avg_sq = MOMENTS[recipe.level]
    block = BLOCK[recipe.exp_avg_scaling] if exp_avg != FP32 else 0
    return StateRule(recipe.level, exp_avg, exp_avg_sq, block, recipe.rounding)


def store_weights(layers: Mapping[str, nn.Module], level: str) -> None:
    """Store the `weight` of each layer as `level` says, in place; ties, frozen flags and `.grad` stay. Idempotent.

    Raises:
        FP8BackendError: a weight that something else holds on to, or that is sharded already, named; no weight has
            changed then.
    """
    new = {name: layer for name, layer in layers.items() if not is_stored(layer.weight, level)}
    for name, layer in new.items():
        _refuse_if_sharded(layer.weight, f"{name}.weight", level)
        refuse_if_held(layer.weight, f"{name}.weight")
    for name, layer in new.items():
        _store(layer.weight, level, f"{name}.weight")
    for layer in layers.values():
        layer.__dict__[LEVEL] = level
        _watch_gradient(layer.weight)
        _hook_state_dict(layer)


def _refuse_if_sharded(weight: torch.Tensor, name: str, level: str) -> None:
    if is_distributed(weight):
        raise FP8BackendError(
            f"{name} is sharded already, and its storage can no longer be swapped for level {level}: call "
            f"prepare(model, None, spec) first, then fully_shard, then prepare(model, optimizer, spec)"
        )


def is_stored(weight: torch.Tensor, level: str) -> bool:
    """Whether a weight, sharded or not, is stored as `level` says."""
    weight = local_part(weight)
    return isinstance(weight, ScaledTensor) and weight._data.dtype == WEIGHT[level]


def stored(values: torch.Tensor, level: str) -> ScaledTensor:
    """Plain values as a weight of that level."""
    if level != "O3":
        return quantize(values, WEIGHT[level])
    master = quantize(values, FP16)
    tensor = quantize(master.dequantize(FP32), E4M3, master.dtype)  # as after every optimizer step
    tensor.master = master
    return tensor


def _store(weight: nn.Parameter, level: str, name: str) -> None:
    if is_stored(weight, level):
        return  # tied to a layer before it
    values = weight.exact() if isinstance(weight, ScaledTensor) else weight.detach()
    swap(weight, stored(values, level), name)
    _cast_gradient(weight)


def plain_weights(model: nn.Module) -> nn.Module:
    """Give a prepared model plain weights in place of scaled ones, its FP8 products kept; returns the same module.

    For a copy that is written to by other means than our optimizer, such as an average of weights: steps of 1e-4 of a
    weight would be lost in scaled FP16.
    """
    for layer in model.modules():
        if LEVEL in layer.__dict__:
            make_plain(layer)
    return model


def make_plain(layer: nn.Module) -> None:
    """Undo `store_weights` on one layer: a plain weight with the values of this moment."""
    weight = layer.weight
    layer.__dict__.pop(LEVEL, None)
    _forget_hooks(layer)
    if isinstance(weight, ScaledTensor):
        _unwatch_gradient(weight)
        swap(weight, weight.exact(), "weight")
        if isinstance(weight.grad, ScaledTensor):
            weight.grad = weight.grad.dequantize()


def _hook_state_dict(layer: nn.Module) -> None:
    """Behind all hooks that are there: what brings back shards from their gathered form comes first."""
    _forget_hooks(layer)
    layer.register_state_dict_post_hook(export_plain)
    layer.register_load_state_dict_pre_hook(store_shards)
    layer.register_load_state_dict_post_hook(store_again)


def _forget_hooks(layer: nn.Module) -> None:
    of_loading = layer._load_state_dict_pre_hooks
    for key in [key for key, hook in of_loading.items() if getattr(hook, "hook", None) is store_shards]:
        del of_loading[key]
    for hooks, own in ((layer._state_dict_hooks, export_plain), (layer._load_state_dict_post_hooks, store_again)):
        for key in [key for key, hook in hooks.items() if hook is own]:
            del hooks[key]


# Gradients


class CastGradient:
    """Post-accumulate-grad hook of a weight: a gradient that has just become complete is stored in E4M3.

    A gradient that more microbatches were added to is FP32 inside and stays so until `finish_accumulation`.
    """

    def __call__(self, weight: torch.Tensor) -> None:
        _cast_gradient(weight)


def _cast_gradient(weight: torch.Tensor) -> None:
    gradient = weight.grad
    if gradient is not None and not isinstance(local_part(gradient), ScaledTensor):
        made = quantize(local_part(gradient), E4M3)  # of a shard with a scale of its own: each rank steps its rows
        made.accumulates = True
        weight.grad = with_local(gradient, made) if is_distributed(gradient) else made


def _watch_gradient(weight: torch.Tensor) -> None:
    if getattr(weight, "partial", False):
        return  # what FSDP2 has gathered: its gradient is reduced first, and becomes that of the shard
    hooks = weight._post_accumulate_grad_hooks or {}
    if weight.requires_grad and not any(map(_sees_gradient, hooks.values())):
        weight.register_post_accumulate_grad_hook(CastGradient())


def swap_gradient_hook(weight: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Let `hook` see the complete gradient of a weight, in place of what stores it in E4M3 at once: a hook with an
    attribute `reduces`, which takes gradients to other ranks and stores the average."""
    _unwatch_gradient(weight)
    weight.register_post_accumulate_grad_hook(hook)


def _unwatch_gradient(weight: torch.Tensor) -> None:
    hooks = weight._post_accumulate_grad_hooks or {}
    for key in [key for key, hook in hooks.items() if _sees_gradient(hook)]:
        del hooks[key]


def _sees_gradient(hook: Callable) -> bool:
    return isinstance(hook, CastGradient) or hasattr(hook, "reduces")


def finish_accumulation(parameters: Iterable[torch.Tensor]) -> None:
    """Cast what microbatches accumulated, once they are complete."""
    for parameter in parameters:
        if parameter.grad is not None and isinstance(local_part(parameter.grad), ScaledTensor):
            local_part(parameter.grad).finish_accumulation()


# State dicts: plain weights out, scaled weights in


def export_plain(layer: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """State-dict hook of a layer: its weight as a plain tensor, of the values with all their precision."""
    weight = state_dict.get(f"{prefix}weight")
    if weight is None or weight.requires_grad or not isinstance(local_part(weight), ScaledTensor):
        return  # keep_vars=True asks for the Parameter itself
    state_dict[f"{prefix}weight"] = dequantize_shards(weight) if is_distributed(weight) else weight.exact()


def store_shards(layer: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Load hook of a layer whose weight is sharded: plain shards become scaled ones, with a scale that the ranks agree.

    A copy into the shards, which is what loading does otherwise, would find a scale for each.
    """
    weight, new = layer.weight, state_dict.get(f"{prefix}weight")
    level = layer.__dict__.get(LEVEL)
    if level is None or not is_distributed(weight) or not is_distributed(new) or new.shape != weight.shape:
        return  # what does not fit is for PyTorch to say
    local = local_part(new)
    if isinstance(local, ScaledTensor):
        if local.unagreed:  # `set_model_state_dict` has copied what it broadcast into the shards themselves
            agree_on_scale(local, shard_groups(new))
    else:
        new = new.redistribute(weight.device_mesh, weight.placements)
        state_dict[f"{prefix}weight"] = _into_shards(weight, stored_shards(new.to(weight.dtype), level))


def stored_shards(values: torch.Tensor, level: str) -> torch.Tensor:
    """`stored`, of a DTensor."""
    made = quantize_shards(values, WEIGHT[level] if level != "O3" else FP16)
    if level == "O3":
        master, made = made, quantize_shards(dequantize_shards(made, FP32), E4M3, made.dtype)
        local_part(made).master = local_part(master)
        local_part(master).partial = SHARD
    local_part(made).partial = SHARD
    return made


def _into_shards(weight: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The values of `new` inside `weight`, which FSDP2 knows, and `weight` itself; where it is on the meta device,
    `new`."""
    old, made = local_part(weight.detach()), local_part(new)
    if old.is_meta:
        return new
    for target, source in ((old, made), (old.master, made.master)):
        if target is not None:
            target._data.copy_(source._data)
            target._scale_inv.copy_(source._scale_inv)
    return weight


def store_again(layer: nn.Module, incompatible_keys) -> None:
    """Load hook of a layer: `load_state_dict(assign=True)` put a new Parameter in the place of the scaled one."""
    weight, level = layer.weight, layer.__dict__.get(LEVEL)
    if level is None:
        return
    if not is_distributed(weight) and not isinstance(weight, ScaledTensor):
        swap(weight, stored(weight.detach(), level), "weight")
    _watch_gradient(weight)


# FSDP2


def watch_shards(model: nn.Module) -> None:
    """After `fully_shard`, which makes new Parameters: let their gradients be stored as before. Repeating it does
    nothing."""
    layers = [layer for layer in model.modules() if LEVEL in layer.__dict__]
    for layer in layers:
        _watch_gradient(layer.weight)
        _hook_state_dict(layer)
    for parameter in model.parameters() if layers else ():
        hooks = (parameter._post_accumulate_grad_hooks or {}).values()
        watched = any(isinstance(hook, OwnGradient) or _sees_gradient(hook) for hook in hooks)
        if parameter.requires_grad and is_distributed(parameter) and not watched:
            parameter.register_post_accumulate_grad_hook(OwnGradient())


class OwnGradient:
    """Post-accumulate-grad hook of a small sharded parameter. FSDP2 hands out views of what it has reduced: the FP32
    gradient of a bias would keep those of all weights beside it alive, which are E4M3 by now."""

    def __call__(self, parameter: torch.Tensor) -> None:
        local = local_part(parameter.grad)
        if local.untyped_storage().nbytes() > 2 * local.nbytes:
            parameter.grad = with_local(parameter.grad, local.clone())
