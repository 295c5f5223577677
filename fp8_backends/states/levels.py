"""Levels: how the weights of converted layers, their gradients and their Adam states are stored. O1 to O3 are MS-AMP's.

=====  ==============  =============  ===============  =======================
level  weight          master         weight gradient  Adam states
=====  ==============  =============  ===============  =======================
O1     scaled FP16     (the weight)   scaled E4M3      FP32, FP32
O2     scaled FP16     (the weight)   scaled E4M3      scaled E4M3, FP16
O3     scaled E4M3     scaled FP16    scaled E4M3      scaled E4M3, FP16
O4     scaled E4M3     residual INT8  scaled E4M3      E4M3, ROOT8, in blocks
=====  ==============  =============  ===============  =======================

At O4 weight and residual are one number of 16 bits in two planes (`formats.E4M11`).

A weight changes inside its Parameter object. A gradient is stored in E4M3 as soon as it is complete, so that no second
one is ever held in high precision. While microbatches accumulate, a gradient is FP32 and is rounded once at the end.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ..errors import FP8BackendError
from ..numerics.formats import ROOT8
from ..numerics.modules import owner_of, weight_name
from ..numerics.parameter_swap import KeepsBelongings, refuse_if_held, swap
from ..numerics.scaled_tensor import SHARD, ScaledTensor, agree_on_scale, quantize, quantize_pair, write_parts
from ..numerics.sharded_tensor import (
    dequantize_shards,
    is_distributed,
    local_part,
    placed_as,
    quantize_pair_shards,
    quantize_shards,
    shard_groups,
    with_local,
)

if TYPE_CHECKING:
    from ..recipes.handlers import Recipe

FP32, FP16, E4M3 = torch.float32, torch.float16, torch.float8_e4m3fn

WEIGHT = {"O1": FP16, "O2": FP16, "O3": E4M3, "O4": E4M3}
"""How the data of a weight are stored: what products read."""

BLOCK = 128
"""Elements of a state that share a scale, where it is stored in blocks."""

LEVEL = "_fp8_level"
"""Attribute of a module that has weights which are stored at a level: Parameter name -> level."""


class StateFormat(NamedTuple):
    """How a state that has a number for each element is stored."""

    dtype: torch.dtype
    block_size: int = 0
    """Elements that share a scale; 0: the whole tensor, as in MS-AMP."""


STATE_FORMATS = {
    "O1": (StateFormat(FP32), StateFormat(FP32)),
    "O2": (StateFormat(E4M3), StateFormat(FP16)),
    "O3": (StateFormat(E4M3), StateFormat(FP16)),
    "O4": (StateFormat(E4M3, BLOCK), StateFormat(ROOT8.dtype, BLOCK)),
}
"""The formats of first and of second moments."""


class StateRule(NamedTuple):
    """How one optimizer stores its states. An optimizer says which of the formats a state has (`Declaration.roles`)."""

    level: str
    first_moment: StateFormat
    """Of averages of gradients, which have signs: exp_avg, momentum_buffer."""
    second_moment: StateFormat
    """Of averages of squared gradients, which are not negative: exp_avg_sq."""
    rounding: str
    """"stochastic" or "nearest"."""

    @property
    def direction(self) -> StateFormat:
        """Of averages of gradients that are made orthogonal, so that their smallest directions count as much as their
        largest: in FP8 the noise of the rounding would be among these. Two bytes."""
        return self.first_moment if self.first_moment.dtype == FP32 else StateFormat(FP16)


ROLES = ("first_moment", "second_moment", "direction")
"""The attributes of `StateRule` that say how a state is stored."""


def state_rule(recipe: Recipe) -> StateRule:
    """How the optimizer of a resolved recipe stores its states."""
    return StateRule(recipe.level, *STATE_FORMATS[recipe.level], recipe.rounding)


def scale_bytes_per_element(recipe: Recipe) -> float:
    """Bytes that the scales of blocks of optimizer states take for each element of a weight."""
    if recipe.level == "O0":
        return 0.0
    rule = state_rule(recipe)
    return sum(FP32.itemsize / each.block_size for each in (rule.first_moment, rule.second_moment) if each.block_size)


def store_weights(layers: Mapping[str, nn.Module], level: str, by_fsdp2: bool = False) -> None:
    """Store the `weight` of each layer as `level` says, in place; ties, frozen flags and `.grad` stay. Idempotent. Of a
    weight that ranks share by tensor parallelism, each stores its part, with a scale that they agree on: all call it.

    Args:
        by_fsdp2: the weights that are DTensors are FSDP2's.

    Raises:
        FP8BackendError: something else holds on to a weight, or FSDP2 has sharded it already. The error names the
            weight, and no weight has changed.
    """
    weights = {weight_name(name, layer): layer.weight for name, layer in layers.items()}
    new = {name: weight for name, weight in weights.items() if not _is_stored(weight, level)}
    for name, weight in new.items():
        if by_fsdp2 and is_distributed(weight):
            raise FP8BackendError(
                f"{name} is sharded already, and its storage can no longer be swapped for level {level}: call "
                f"prepare(model, None, spec) first, then fully_shard, then prepare(model, optimizer, spec)"
            )
        refuse_if_held(weight, name)
    for name, weight in new.items():
        if not _is_stored(weight, level):  # it may be tied to a layer before this one
            if is_distributed(weight):
                _hold(weight, quantize_weight_shards(dequantize_shards(weight), level))
                cast_gradient(weight)
                continue
            values = weight.exact() if isinstance(weight, ScaledTensor) else weight.detach()
            swap(weight, quantize_weight(values, level), name)
            cast_gradient(weight)
    for layer in layers.values():
        owner, part = owner_of(layer)
        owner.__dict__[LEVEL] = owner.__dict__.get(LEVEL, {}) | {part: level}
        if owner is not layer:  # its class keeps nothing
            owner._apply = KeepsBelongings(owner)
        _add_gradient_hook(layer.weight)
        _add_state_dict_hooks(owner)


def _hold(weight: torch.Tensor, shards: torch.Tensor) -> None:
    """Let a DTensor have the local part of another that lies as it does. It stays the same object."""
    weight._local_tensor = local = local_part(shards)
    if isinstance(local, ScaledTensor):
        local.partial = False  # FSDP2 has not made it, and does not gather it


def _is_stored(weight: torch.Tensor, level: str) -> bool:
    weight = local_part(weight)
    return isinstance(weight, ScaledTensor) and weight._data.dtype == WEIGHT[level]


def quantize_weight(values: torch.Tensor, level: str) -> ScaledTensor:
    """Plain values as a weight of that level, with its master at O3 and its residual at O4. Its rows lie in order, as
    the optimizer's kernels want them, also where those of the values did not (a transposed, expanded or sliced
    weight)."""
    values = values.contiguous()
    if level == "O4":
        return quantize_pair(values, values.dtype)
    if level != "O3":
        return quantize(values, WEIGHT[level], values.dtype)
    master = quantize(values, FP16, values.dtype)
    weight = quantize(master.dequantize(FP32), E4M3, master.dtype)  # as after every optimizer step
    weight.master = master
    return weight


def quantize_weight_shards(values: torch.Tensor, level: str) -> torch.Tensor:
    """`quantize_weight` for a DTensor. Its ranks agree on the scales, so all of them call it."""
    if level == "O3":
        master = quantize_shards(values, FP16)
        weight = quantize_shards(dequantize_shards(master, FP32), E4M3, master.dtype)
        local_part(weight).master = local_part(master)
        local_part(master).partial = SHARD
    else:
        weight = quantize_pair_shards(values) if level == "O4" else quantize_shards(values, WEIGHT[level])
    local_part(weight).partial = SHARD
    return weight


def write_weight_shards(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Write plain values, a DTensor that lies as `weight` does, into the shards of `weight` and of its master or
    residual. The ranks agree on the scales, so all of them call it."""
    local = local_part(weight.detach())
    local.stored.state_dict_copies.accept()
    local.settle()
    for target in (local.master, local):
        if target is not None:
            is_pair = target.residual is not None
            shards = quantize_pair_shards(values) if is_pair else quantize_shards(values, target._data.dtype)
            write_parts(target, local_part(shards))
            target.unagreed = False
            values = dequantize_shards(shards, FP32)


def plain_weights(model: nn.Module) -> nn.Module:
    """Give a prepared model plain weights in place of scaled ones. Its products stay in FP8. Returns the same module.

    This is for a copy that something other than our optimizer writes to, such as an average of weights: steps of 1e-4
    of a weight would be lost in scaled FP16.
    """
    for owner in model.modules():
        for part in list(owner.__dict__.get(LEVEL, ())):
            _make_plain(owner, part)
    return model


def make_plain(layer: nn.Module) -> None:
    """Undo `store_weights` on one layer: it gets a plain weight with the values of this moment."""
    _make_plain(*owner_of(layer))


def _make_plain(owner: nn.Module, part: str) -> None:
    weight = owner._parameters[part]
    _unmark(owner, part)
    if is_distributed(weight) and not getattr(local_part(weight), "partial", True):
        _remove_gradient_hooks(weight)
        _hold(weight, dequantize_shards(weight))
        if weight.grad is not None:
            weight.grad = dequantize_shards(weight.grad)
    elif isinstance(weight, ScaledTensor):
        _remove_gradient_hooks(weight)
        swap(weight, weight.exact(), part)
        if isinstance(weight.grad, ScaledTensor):
            weight.grad = weight.grad.dequantize()


def is_marked(layer: nn.Module) -> bool:
    """Whether the weight of a converted layer is stored at a level."""
    owner, part = owner_of(layer)
    return part in owner.__dict__.get(LEVEL, ())


def unmark(layer: nn.Module) -> None:
    """Let a layer save and load its weight as it is. `store_weights` marks it again."""
    _unmark(*owner_of(layer))


def _unmark(owner: nn.Module, part: str) -> None:
    others = {name: level for name, level in owner.__dict__.pop(LEVEL, {}).items() if name != part}
    if others:
        owner.__dict__[LEVEL] = others
    else:
        if isinstance(owner.__dict__.get("_apply"), KeepsBelongings):
            del owner._apply
        _remove_state_dict_hooks(owner)


# Gradients


class Arrivals:
    """Tensor hook of a weight: notes the threads that are about to accumulate into its gradient.

    PyTorch locks the accumulation and runs hooks outside of the lock, so a thread could add to the very gradient that
    another thread replaces. The last one to arrive replaces it.
    """

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), set()

    def __call__(self, gradient: torch.Tensor) -> None:
        with self.lock:
            self.threads.add(threading.get_ident())

    def __reduce__(self):
        return Arrivals, ()

    @contextlib.contextmanager
    def leave(self) -> Iterator[bool]:
        """Hold other threads back. Yields whether none of them is accumulating."""
        with self.lock:
            self.threads -= {threading.get_ident()}
            self.threads &= sys._current_frames().keys()  # others may have died on their way
            yield not self.threads


def cast_gradient(weight: torch.Tensor) -> None:
    """Post-accumulate-grad hook of a weight: stores a gradient in E4M3 when it has just become complete.

    A gradient that a further microbatch was added to is FP32 inside, and stays so until `finish_accumulation`.
    """
    arrivals = next((hook for hook in (weight._backward_hooks or {}).values() if isinstance(hook, Arrivals)), None)
    with contextlib.nullcontext(True) if arrivals is None else arrivals.leave() as is_complete:
        gradient = weight.grad
        if is_complete and gradient is not None and not isinstance(local_part(gradient), ScaledTensor):
            gradient = placed_as(weight, gradient)
            # a shard of a gradient has a scale of its own: each rank steps only its own rows
            quantized = quantize(local_part(gradient), E4M3, gradient.dtype)
            quantized.accumulates = True
            weight.grad = with_local(gradient, quantized)


def cast_equal_gradient(weight: torch.Tensor) -> None:
    """`cast_gradient` of a weight that several ranks hold whole, and whose gradient they compute alike."""
    cast_gradient(weight)


def expect_equal_gradients(model: nn.Module) -> None:
    """Say that the ranks compute the gradients of whole scaled weights alike, as those of tensor parallelism do, which
    see the same batch. Repeating it does nothing."""
    for weight in model.parameters():
        if isinstance(weight, ScaledTensor) and weight.requires_grad:
            swap_gradient_hook(weight, cast_equal_gradient)


def _add_gradient_hook(weight: torch.Tensor) -> None:
    """Let a weight's gradient be stored in E4M3. Repeating it does nothing."""
    if getattr(weight, "partial", False):
        return  # FSDP2 has gathered this weight: its gradient is reduced first, and becomes that of the shard
    hooks = weight._post_accumulate_grad_hooks or {}
    if weight.requires_grad and not any(map(_is_gradient_hook, hooks.values())):
        weight.register_post_accumulate_grad_hook(cast_gradient)
        weight.register_hook(Arrivals())


def swap_gradient_hook(weight: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Put `hook` in the place of the hook that stores a weight's complete gradient in E4M3. `hook` is
    `cast_equal_gradient`, or takes the gradient to other ranks and stores the average, with an attribute `reduces`."""
    _remove_gradient_hooks(weight)
    weight.register_post_accumulate_grad_hook(hook)


def _remove_gradient_hooks(weight: torch.Tensor) -> None:
    for hooks in (weight._post_accumulate_grad_hooks or {}, weight._backward_hooks or {}):
        for key in [key for key, hook in hooks.items() if _is_gradient_hook(hook)]:
            del hooks[key]


def _is_gradient_hook(hook: Callable) -> bool:
    return hook in (cast_gradient, cast_equal_gradient) or hasattr(hook, "reduces") or isinstance(hook, Arrivals)


def finish_accumulation(parameters: Iterable[torch.Tensor]) -> None:
    """Cast gradients that microbatches accumulated in FP32 to E4M3, once they are complete."""
    for parameter in parameters:
        if parameter.grad is not None and isinstance(local_part(parameter.grad), ScaledTensor):
            local_part(parameter.grad).finish_accumulation()


# State dicts hold plain weights: hooks of a module dequantize what it saves and quantize what it loads


def _add_state_dict_hooks(module: nn.Module) -> None:
    """Put the hooks behind all that are there: a hook that turns gathered weights back into shards runs first."""
    _remove_state_dict_hooks(module)
    module.register_state_dict_post_hook(export_plain)
    module.register_load_state_dict_pre_hook(load_into_shards)
    module.register_load_state_dict_post_hook(quantize_assigned)


def _remove_state_dict_hooks(module: nn.Module) -> None:
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        # PyTorch wraps hooks that run before loading, and has the hook itself in `hook`
        ours = (export_plain, load_into_shards, quantize_assigned)
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in ours]:
            del hooks[key]


def export_plain(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """State-dict hook of a module: saves its weights as plain tensors, with all the precision that is stored."""
    for name in module._parameters:
        weight = state_dict.get(f"{prefix}{name}")
        if weight is None or weight.requires_grad or not isinstance(local_part(weight), ScaledTensor):
            continue  # keep_vars=True asks for the Parameter itself
        with torch.inference_mode(False):  # autograd counts no writes to tensors made in inference mode
            values = dequantize_shards(weight)
        local_part(weight).stored.state_dict_copies.add(values, f"{prefix}{name}")
        state_dict[f"{prefix}{name}"] = values


def export_ties(root: nn.Module) -> None:
    """Let modules of other kinds that have a stored weight too, such as an embedding or a head that is tied to a
    layer, save it as a plain tensor. Repeating it does nothing."""
    stored = {id(weight) for module in root.modules() for weight, _ in _stored_weights(module).values()}
    for module in root.modules():
        if LEVEL not in module.__dict__ and not stored.isdisjoint(map(id, module._parameters.values())):
            _remove_state_dict_hooks(module)
            module.register_state_dict_post_hook(export_plain)


def forget_ties(root: nn.Module) -> None:
    """Undo `export_ties`."""
    for module in root.modules():
        if LEVEL not in module.__dict__:
            _remove_state_dict_hooks(module)


def _stored_weights(module: nn.Module) -> dict[str, tuple[nn.Parameter, str]]:
    """The weights of a module that are stored at a level, each with it, by their names."""
    return {part: (module._parameters[part], level) for part, level in module.__dict__.get(LEVEL, {}).items()}


def load_into_shards(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Hook that runs before a module whose weights are sharded is loaded: it quantizes plain shards with a scale that
    the ranks agree on. PyTorch's own copy into the shards would choose a scale for each."""
    for part, (weight, level) in _stored_weights(module).items():
        new = state_dict.get(f"{prefix}{part}")
        if is_distributed(weight) and is_distributed(new) and new.shape == weight.shape:  # else PyTorch says what is
            _load_into_shards(weight, level, new, state_dict, f"{prefix}{part}")


def _load_into_shards(weight: torch.Tensor, level: str, new: torch.Tensor, state_dict: dict, name: str) -> None:
    local = local_part(new)
    if isinstance(local, ScaledTensor):
        if local.unagreed:  # `set_model_state_dict` has copied what it broadcast into the shards themselves
            agree_on_scale(local, shard_groups(new))
        return
    new = new.redistribute(weight.device_mesh, weight.placements).to(weight.dtype)
    if local_part(weight.detach()).is_meta:
        state_dict[name] = quantize_weight_shards(new, level)
    else:
        write_weight_shards(weight, new)  # FSDP2 knows these shards
        state_dict[name] = weight


def quantize_assigned(module: nn.Module, incompatible_keys) -> None:
    """Hook that runs after a module was loaded: `load_state_dict(assign=True)` has put new, plain Parameters in the
    place of scaled ones."""
    for part, (weight, level) in _stored_weights(module).items():
        if not is_distributed(weight) and not isinstance(weight, ScaledTensor):
            swap(weight, quantize_weight(weight.detach(), level), part)
        _add_gradient_hook(weight)


# FSDP2


def watch_shards(model: nn.Module) -> None:
    """Store the gradients of shards as those of whole weights before them: `fully_shard` has made new Parameters, which
    have no hooks. Repeating it does nothing."""
    owners = [module for module in model.modules() if LEVEL in module.__dict__]
    for owner in owners:
        for weight, _ in _stored_weights(owner).values():
            _add_gradient_hook(weight)
        _add_state_dict_hooks(owner)
    export_ties(model)
    for parameter in model.parameters() if owners else ():
        hooks = (parameter._post_accumulate_grad_hooks or {}).values()
        has_hook = any(hook is copy_gradient or _is_gradient_hook(hook) for hook in hooks)
        if parameter.requires_grad and is_distributed(parameter) and not has_hook:
            parameter.register_post_accumulate_grad_hook(copy_gradient)


def copy_gradient(parameter: torch.Tensor) -> None:
    """Post-accumulate-grad hook of a small sharded parameter: gives its gradient memory of its own.

    FSDP2 hands out views of the buffer that it has reduced. The FP32 gradient of a bias would keep the whole buffer
    alive, although the weights in it have E4M3 gradients by now.
    """
    local = local_part(parameter.grad)
    if local.untyped_storage().nbytes() > 2 * local.nbytes:
        parameter.grad = with_local(parameter.grad, local.clone())
