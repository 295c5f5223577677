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

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import BackendUnavailableError
from ..parameter_exchange import exchange, refuse_if_held
from ..scaled_tensor import ScaledTensor, quantize
from .adamw import StateRule, several_ranks

if TYPE_CHECKING:
    from ..recipes import Recipe

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


def refuse_several_ranks(level: str) -> None:
    """Raise `BackendUnavailableError` where gradients would have to travel: stock DDP would not reduce scaled ones."""
    if several_ranks():
        raise BackendUnavailableError(
            f"level {level} on several processes is not in this version yet: its weights and gradients do not travel "
            f"between ranks; use one process, or a backend of level O0 such as native:dynamic, which trains on many"
        )


def store_weights(layers: Mapping[str, nn.Module], level: str) -> None:
    """Store the `weight` of each layer as `level` says, in place; ties, frozen flags and `.grad` stay. Idempotent.

    Raises:
        FP8BackendError: a weight that something else holds on to, named; no weight has changed then.
    """
    refuse_several_ranks(level)
    new = {name: layer for name, layer in layers.items() if not is_stored(layer.weight, level)}
    for name, layer in new.items():
        refuse_if_held(layer.weight, f"{name}.weight")
    for name, layer in new.items():
        _store(layer.weight, level, f"{name}.weight")
    for layer in layers.values():
        layer.__dict__[LEVEL] = level
        _watch_gradient(layer.weight)
        if export_plain not in layer._state_dict_hooks.values():
            layer.register_state_dict_post_hook(export_plain)
            layer.register_load_state_dict_post_hook(store_again)


def is_stored(weight: torch.Tensor, level: str) -> bool:
    """Whether a weight is stored as `level` says."""
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
    exchange(weight, stored(values, level), name)
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
        exchange(weight, weight.exact(), "weight")
        if isinstance(weight.grad, ScaledTensor):
            weight.grad = weight.grad.dequantize()


def _forget_hooks(layer: nn.Module) -> None:
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
    if gradient is not None and not isinstance(gradient, ScaledTensor):
        made = quantize(gradient, E4M3)
        made.accumulates = True
        weight.grad = made


def _watch_gradient(weight: torch.Tensor) -> None:
    hooks = weight._post_accumulate_grad_hooks or {}
    if weight.requires_grad and not any(isinstance(hook, CastGradient) for hook in hooks.values()):
        weight.register_post_accumulate_grad_hook(CastGradient())


def _unwatch_gradient(weight: torch.Tensor) -> None:
    hooks = weight._post_accumulate_grad_hooks or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, CastGradient)]:
        del hooks[key]


def finish_accumulation(parameters: Iterable[torch.Tensor]) -> None:
    """Cast what microbatches accumulated, once they are complete."""
    for parameter in parameters:
        if isinstance(parameter.grad, ScaledTensor):
            parameter.grad.finish_accumulation()


# State dicts: plain weights out, scaled weights in


def export_plain(layer: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """State-dict hook of a layer: its weight as a plain tensor, of the values with all their precision."""
    weight = state_dict.get(f"{prefix}weight")
    if isinstance(weight, ScaledTensor) and not weight.requires_grad:  # keep_vars=True asks for the Parameter itself
        state_dict[f"{prefix}weight"] = weight.exact()


def store_again(layer: nn.Module, incompatible_keys) -> None:
    """Load hook of a layer: `load_state_dict(assign=True)` put a plain Parameter in the place of the scaled one."""
    weight, level = layer.weight, layer.__dict__.get(LEVEL)
    if level is not None and not isinstance(weight, ScaledTensor):
        exchange(weight, stored(weight.detach(), level), "weight")
        _watch_gradient(weight)
