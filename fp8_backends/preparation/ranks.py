"""Connect a prepared model to the other ranks: gradients, scaling states, weights as codes."""

import functools
import weakref
from functools import partial

import torch
from torch import nn

from ..comm import ddp, deepspeed, fsdp2
from ..comm.backward import States
from ..convert import features
from ..convert.conversion import Root, prepared_roots
from ..formats.scaling import STATEFUL
from ..recipes.handlers import Recipe
from ..states import levels
from ..states.checkpoint import whole_states
from ..torch_tools.modules import is_engine


def connect_ranks(model: nn.Module, recipe: Recipe) -> None:
    """Reduce the gradients of a prepared model as its recipe says, inside
    `DistributedDataParallel`, `fully_shard` or DeepSpeed's engine, and make ranks that share its
    layers agree on scaling states. Every rank calls it; repeating it does nothing. Raises
    `FP8BackendError` if it was wrapped before it was prepared, or FP8 does not support the
    wrapper."""
    roots = prepared_roots(model)
    for wrapper in ddp.wrappers(model):
        # or DDP wraps a part of a prepared model
        inside = prepared_roots(wrapper.module) or [
            root for root in roots if wrapper in root.module.modules()
        ]
        if inside:
            for _, _, prepared in inside:
                prepared.observed.wrapper = weakref.ref(wrapper)
            ddp.connect(wrapper, recipe, levels.swap_gradient_hook, _states(inside))
    states = _states(roots)
    if is_engine(model) and recipe.level != "O0":
        deepspeed.connect(model, recipe.comm, levels.swap_gradient_hook, states)
        save_whole_states(model)
    if fsdp2.fsdp_modules(model):
        for _, root, prepared in roots:
            prepared.compute.keep_weight_casts(root, False)
            if fused_head := features.wanted("fused_head", recipe):
                fused_head.make_ordinary(root)
        fsdp2.connect(model, recipe.comm, states)
        levels.watch_shards(model)
        travelling: dict[fsdp2.Place, fsdp2.Travelling] = {}
        for _, root, prepared in roots:
            travelling |= prepared.compute.travelling(root, prepared.recipe)
        fsdp2.connect_weights(model, travelling)
    elif fsdp2.ranks_sharing_layers(model) > 1:
        fsdp2.agree(model, states)
        levels.expect_equal_gradients(model)


def save_whole_states(engine: nn.Module) -> None:
    """Let a DeepSpeed engine save states that its ranks shard. Idempotent."""
    if "save_checkpoint" in engine.__dict__ or engine.optimizer is None:
        return
    save = engine.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(*args, **kwargs):
        with whole_states(engine.optimizer, receives=engine.save_non_zero_checkpoint):
            return save(*args, **kwargs)

    engine.save_checkpoint = save_checkpoint


def _states(roots: list[Root]) -> States:
    """Return a function for `scaling_buffers`, now or in a later phase of `schedule`; `list` if no
    rule keeps any."""
    recipes = [prepared.recipe for _, _, prepared in roots]
    later = any(recipe.schedule and recipe.stateful.scaling in STATEFUL for recipe in recipes)
    return partial(scaling_buffers, roots) if later or scaling_buffers(roots) else list


def scaling_buffers(roots: list[Root]) -> list[torch.Tensor]:
    """Return the live scaling states of prepared roots, in a fixed order."""
    return [
        state for _, root, prepared in roots for state in prepared.compute.scaling_buffers(root)
    ]
