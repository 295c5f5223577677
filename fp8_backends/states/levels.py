"""Levels: the storage of converted layers' weights, their gradients and optimizer states
(docs/levels.rst).

A weight changes inside its Parameter object. A complete gradient becomes E4M3 at once, so that at
most one is held in high precision. While microbatches accumulate, a gradient is FP32 and rounds
once at the end.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import float8_e4m3fn, float16, float32, nn

from ..errors import FP8BackendError
from ..formats.formats import ROOT8
from ..recipes.handlers import Recipe
from ..tensors.parameter_swap import KeepsBelongings, refuse_if_held, swap
from ..tensors.scaled_tensor import (
    Kind,
    Partial,
    ScaledTensor,
    dequantize_shards,
    quantize,
)
from ..tensors.sharded_tensor import is_distributed, local_part, placed_as, shard_groups, with_local
from ..torch_tools.modules import owner_of, weight_name

STORED_WEIGHTS = {"O1": float16, "O2": float16, "O3": float8_e4m3fn, "O4": float8_e4m3fn}
"""dtype of a weight's data, as products read them."""

STATE_BLOCK = 128
"""Elements of a state with one scale, at O4."""

REPLACED_WEIGHT = (
    "replaced after the model was prepared, and plain: "
    "prepare model and optimizer again to store it at the level"
)

LEVEL = "_fp8_level"
"""Attribute of a module with stored weights: Parameter name -> level."""


class StateFormat(NamedTuple):
    """Storage of an elementwise optimizer state."""

    dtype: torch.dtype
    block_size: int = 0
    """Elements that share a scale; 0: the whole tensor, as in MS-AMP."""


STATE_FORMATS = {
    "O1": (StateFormat(float32), StateFormat(float32)),
    "O2": (StateFormat(float8_e4m3fn), StateFormat(float16)),
    "O3": (StateFormat(float8_e4m3fn), StateFormat(float16)),
    "O4": (StateFormat(float8_e4m3fn, STATE_BLOCK), StateFormat(ROOT8.dtype, STATE_BLOCK)),
}
"""The formats of first and of second moments."""


class StateRule(NamedTuple):
    """Storage of one optimizer's states by role (`Declaration.roles`)."""

    level: str
    first_moment: StateFormat
    """Averages of gradients, with signs: exp_avg, momentum_buffer."""
    second_moment: StateFormat
    """Averages of squared gradients, not negative: exp_avg_sq."""
    rounding: str
    """"stochastic" or "nearest"."""

    @property
    def direction(self) -> StateFormat:
        """Averages of gradients before they are made orthogonal. Two bytes: FP8's noise would count
        as a direction."""
        return self.first_moment if self.first_moment.dtype == float32 else StateFormat(float16)


ROLES = ("first_moment", "second_moment", "direction")


def state_rule(recipe: Recipe) -> StateRule:
    """Return the storage of optimizer states for a resolved recipe."""
    return StateRule(recipe.level, *STATE_FORMATS[recipe.level], recipe.rounding)


def scale_bytes_per_element(recipe: Recipe) -> float:
    """Return the bytes of block scales of optimizer states for each element of a weight."""
    blocks = [fmt.block_size for fmt in STATE_FORMATS.get(recipe.level, ()) if fmt.block_size]
    return float(sum(float32.itemsize / block for block in blocks))


# Weights


def store_weights(layers: Mapping[str, nn.Module], level: str, by_fsdp2: bool = False) -> None:
    """Store the `weight` of each layer at `level`, in place; ties, frozen flags and `.grad` stay.
    Idempotent. Under tensor parallelism each rank stores its part, with a scale agreed on by all:
    all ranks call this.

    Args:
        by_fsdp2: FSDP2 has sharded the weights that are DTensors.

    Raises:
        FP8BackendError: something else holds a weight, or FSDP2 has sharded it already. The error
            names the weight, and no weight has changed.
    """
    weights = {weight_name(name, layer): layer.weight for name, layer in layers.items()}
    new = {name: weight for name, weight in weights.items() if not _is_stored(weight, level)}
    for name, weight in new.items():
        if by_fsdp2 and is_distributed(weight):
            raise FP8BackendError(
                f"{name} is sharded already, and its storage can no longer be swapped for level "
                f"{level}: call prepare(model, None, spec) first, then fully_shard, then "
                f"prepare(model, optimizer, spec)"
            )
        refuse_if_held(weight, name)
    for name, weight in new.items():
        if not _is_stored(weight, level):  # it may be tied to a layer before this one
            stored = quantize_weight(dequantize_shards(weight), level, weight.requires_grad)
            if is_distributed(weight):
                _hold(weight, stored)
            else:
                swap(weight, stored, name)
            cast_gradient(weight)
    for layer in layers.values():
        owner, part = owner_of(layer)
        owner.__dict__[LEVEL] = owner.__dict__.get(LEVEL, {}) | {part: level}
        if owner is not layer:  # its class does not keep hooks and attributes
            owner._apply = KeepsBelongings(owner)
        _add_gradient_hook(layer.weight)
        _add_state_dict_hooks(owner)


def _hold(weight: torch.Tensor, shards: torch.Tensor) -> None:
    """Replace the local part of a DTensor, which stays the same object."""
    weight._local_tensor = local = local_part(shards)
    if isinstance(local, ScaledTensor):
        local.partial = Partial.WHOLE  # FSDP2 did not make it, and does not gather it


def _is_stored(weight: torch.Tensor, level: str) -> bool:
    weight = local_part(weight)
    return isinstance(weight, ScaledTensor) and weight.codes.dtype == STORED_WEIGHTS[level]


def quantize_weight(values: torch.Tensor, level: str, trains: bool = True) -> torch.Tensor:
    """Quantize plain values as a weight of a level, with its master at O3 and its residual at O4.
    The ranks of a DTensor agree on the scales, so all of them call this.

    Rows become contiguous, as the optimizer's kernels need them (for transposed, expanded or sliced
    weights).
    """
    values = values if is_distributed(values) else values.contiguous()
    if level == "O4":
        weight = quantize(values, torch.int8, values.dtype)  # E4M3 and a residual
    elif level == "O3":
        master = quantize(values, float16, values.dtype)
        # as after every optimizer step
        weight = quantize(dequantize_shards(master, float32), float8_e4m3fn, master.dtype)
        local_part(weight).rest = local_part(master)
    else:
        weight = quantize(values, STORED_WEIGHTS[level], values.dtype)
    if is_distributed(values):
        for part in (local_part(weight), local_part(weight).master):
            if part is not None:
                part.partial = Partial.SHARD
    if not trains:
        local_part(weight).kind = Kind.UNTRAINED
    return weight


def write_weight_shards(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Write plain shards into the shards of `weight` and of its master or residual. All ranks agree
    on the scales."""
    local = local_part(weight.detach())
    local.stored.state_dict_copies.accept()
    local.settle()
    local.write_shard(local_part(values), shard_groups(weight))


def make_plain(layer: nn.Module) -> None:
    """Undo `store_weights` on one layer: give it a plain weight with the present values."""
    owner, part = owner_of(layer)
    weight = owner._parameters[part]
    unmark(layer)
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
    """Return True if a converted layer's weight is stored at a level."""
    owner, part = owner_of(layer)
    return part in owner.__dict__.get(LEVEL, ())


def unmark(layer: nn.Module) -> None:
    """Let a layer save and load its weight unchanged. `store_weights` marks it again."""
    owner, part = owner_of(layer)
    others = {name: level for name, level in owner.__dict__.pop(LEVEL, {}).items() if name != part}
    if others:
        owner.__dict__[LEVEL] = others
    else:
        if isinstance(owner.__dict__.get("_apply"), KeepsBelongings):
            del owner._apply
        _remove_state_dict_hooks(owner)


# Gradients


class Arrivals:
    """Tensor hook of a weight: note the threads about to accumulate into its gradient.

    PyTorch locks the accumulation and runs hooks outside of the lock, so one thread could add to a
    gradient that another is replacing. The last one to arrive replaces it.
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
        """Hold other threads back. Yield True if none of them is accumulating."""
        with self.lock:
            self.threads -= {threading.get_ident()}
            self.threads &= sys._current_frames().keys()  # others may have died on their way
            yield not self.threads


def cast_gradient(weight: torch.Tensor) -> None:
    """Post-accumulate-grad hook of a weight: store a gradient in E4M3 once it is complete.

    After the second microbatch a gradient is FP32 inside, until `finish_accumulation`.
    """
    arrivals = next(
        (hook for hook in (weight._backward_hooks or {}).values() if isinstance(hook, Arrivals)),
        None,
    )
    with contextlib.nullcontext(True) if arrivals is None else arrivals.leave() as is_complete:
        gradient = weight.grad
        if (
            is_complete
            and gradient is not None
            and not isinstance(local_part(gradient), ScaledTensor)
        ):
            gradient = placed_as(weight, gradient)
            # a shard of a gradient has its own scale: each rank steps only its own rows
            quantized = quantize(local_part(gradient), float8_e4m3fn, gradient.dtype)
            quantized.kind = Kind.GRADIENT
            weight.grad = with_local(gradient, quantized)


def cast_equal_gradient(weight: torch.Tensor) -> None:
    """`cast_gradient` for a whole weight on several ranks with equal gradients."""
    cast_gradient(weight)


def expect_equal_gradients(model: nn.Module) -> None:
    """Declare equal gradients of whole scaled weights on all ranks, as under tensor parallelism.
    Idempotent."""
    for weight in model.parameters():
        if isinstance(weight, ScaledTensor) and weight.requires_grad:
            swap_gradient_hook(weight, cast_equal_gradient)


def _add_gradient_hook(weight: torch.Tensor) -> None:
    """Let a weight's gradient be stored in E4M3. Idempotent."""
    if getattr(weight, "partial", False):
        return  # gathered by FSDP2: its gradient is reduced first, and becomes the shard's
    hooks = weight._post_accumulate_grad_hooks or {}
    if weight.requires_grad and not any(map(_is_gradient_hook, hooks.values())):
        weight.register_post_accumulate_grad_hook(cast_gradient)
        weight.register_hook(Arrivals())


def swap_gradient_hook(weight: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Replace the hook that stores a weight's gradient in E4M3 by one that also reduces, or expects
    equal ones."""
    _remove_gradient_hooks(weight)
    weight.register_post_accumulate_grad_hook(hook)


def _remove_gradient_hooks(weight: torch.Tensor) -> None:
    for hooks in (weight._post_accumulate_grad_hooks or {}, weight._backward_hooks or {}):
        for key in [key for key, hook in hooks.items() if _is_gradient_hook(hook)]:
            del hooks[key]


def _is_gradient_hook(hook: Callable) -> bool:
    return (
        hook in (cast_gradient, cast_equal_gradient)
        or hasattr(hook, "reduces")
        or isinstance(hook, Arrivals)
    )


def finish_accumulation(parameters: Iterable[torch.Tensor]) -> None:
    """Cast complete gradients of several microbatches from FP32 to E4M3. Let weights that were frozen
    when they were stored, or copied, have the next ones in E4M3."""
    for parameter in parameters:
        gradient = local_part(parameter.grad)
        if isinstance(gradient, ScaledTensor):
            gradient.finish_accumulation()
        elif isinstance(local_part(parameter), ScaledTensor):
            _add_gradient_hook(parameter)


# State dicts hold plain weights: module hooks dequantize saved weights and quantize loaded ones


def _add_state_dict_hooks(module: nn.Module) -> None:
    """Put the hooks behind all others: a hook that turns gathered weights back into shards runs
    first."""
    _remove_state_dict_hooks(module)
    module.register_state_dict_post_hook(export_plain)
    module.register_load_state_dict_pre_hook(load_into_shards)
    module.register_load_state_dict_post_hook(quantize_assigned)


def _remove_state_dict_hooks(module: nn.Module) -> None:
    ours = (export_plain, load_into_shards, quantize_assigned)
    for hooks in (
        module._state_dict_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    ):
        # PyTorch wraps pre-hooks, with the original in `hook`
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in ours]:
            del hooks[key]


def export_plain(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """State-dict hook of a module: save its weights as plain tensors in full precision."""
    for name in module._parameters:
        weight = state_dict.get(f"{prefix}{name}")
        if (
            weight is None
            or weight.requires_grad
            or not isinstance(local_part(weight), ScaledTensor)
        ):
            continue  # keep_vars=True asks for the Parameter itself
        # autograd counts no writes to tensors made in inference mode
        with torch.inference_mode(False):
            values = dequantize_shards(weight)
            if (for_files := local_part(weight).stored.offloaded) is not None:
                values = for_files(values)
        local_part(weight).stored.state_dict_copies.add(values, f"{prefix}{name}")
        state_dict[f"{prefix}{name}"] = values


def export_ties(root: nn.Module) -> None:
    """Let other modules with a stored weight, such as a tied head, save it as a plain tensor.
    Idempotent."""
    stored = {
        id(weight) for module in root.modules() for weight, _ in _stored_weights(module).values()
    }
    for module in root.modules():
        if LEVEL not in module.__dict__ and not stored.isdisjoint(
            map(id, module._parameters.values())
        ):
            _remove_state_dict_hooks(module)
            module.register_state_dict_post_hook(export_plain)


def forget_ties(root: nn.Module) -> None:
    """Undo `export_ties`."""
    for module in root.modules():
        if LEVEL not in module.__dict__:
            _remove_state_dict_hooks(module)


def plain_weights_of(root: nn.Module) -> list[str]:
    """Return the names of plain Parameters in the place of weights that a level stored."""
    return [
        f"{name}.{part}".strip(".")
        for name, module in root.named_modules()
        for part, (weight, level) in _stored_weights(module).items()
        if not _is_stored(weight, level)
    ]


def _stored_weights(module: nn.Module) -> dict[str, tuple[nn.Parameter, str]]:
    levels, parameters = module.__dict__.get(LEVEL, {}), module._parameters
    return {
        part: (parameters[part], levels[part])
        for part in levels
        if parameters.get(part) is not None
    }


def load_into_shards(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Load pre-hook of a module with sharded weights: quantize plain shards with a scale agreed on
    by the ranks."""
    for part, (weight, level) in _stored_weights(module).items():
        name = f"{prefix}{part}"
        new = state_dict.get(name)
        if not (is_distributed(weight) and is_distributed(new) and new.shape == weight.shape):
            continue  # PyTorch reports a mismatch
        local = local_part(new)
        if isinstance(local, ScaledTensor):
            # `set_model_state_dict` has broadcast into the shards themselves
            if local.partial is Partial.WRITTEN:
                local.agree_on_scale(shard_groups(new))
            continue
        new = new.redistribute(weight.device_mesh, weight.placements).to(weight.dtype)
        if local_part(weight.detach()).is_meta:
            state_dict[name] = quantize_weight(new, level)
        else:
            write_weight_shards(weight, new)  # FSDP2 knows these shards
            state_dict[name] = weight


def quantize_assigned(module: nn.Module, incompatible_keys) -> None:
    """Load post-hook of a module: quantize the plain Parameters of
    `load_state_dict(assign=True)`."""
    for part, (weight, level) in _stored_weights(module).items():
        if not is_distributed(weight):
            if not isinstance(weight, ScaledTensor):
                values = weight.detach()
                swap(weight, quantize_weight(values, level, weight.requires_grad), part)
                if weight.kind is Kind.UNTRAINED:
                    weight.data = values
            weight.drop_exact_edits()
        _add_gradient_hook(weight)


# FSDP2


def watch_shards(model: nn.Module) -> None:
    """Add hooks to the new Parameters of `fully_shard`, so that gradients of shards are stored in
    E4M3. Idempotent."""
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
    """Post-accumulate-grad hook of a small sharded parameter: give its gradient memory of its own.

    FSDP2's gradients are views of its reduction buffer: the FP32 gradient of a bias would keep the
    whole buffer alive, after the weights' gradients have become E4M3.
    """
    local = local_part(parameter.grad)
    if local.untyped_storage().nbytes() > 2 * local.nbytes:
        parameter.grad = with_local(parameter.grad, local.clone())
