"""Connect a prepared model to the other ranks: gradients, scaling states, weights as codes."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ..comm import ddp, fsdp2
from ..convert import fused_head
from ..convert.conversion import Prepared, prepared_roots
from ..recipes.handlers import Recipe
from ..states import levels


def connect_ranks(model: nn.Module, recipe: Recipe) -> None:
    """Reduce the gradients of a prepared model as its recipe says, inside `DistributedDataParallel` or `fully_shard`,
    and make ranks that share its layers agree on scaling states. Every rank calls it; repeating it does nothing.

    Raises:
        FP8BackendError: it was wrapped before it was prepared, or FP8 does not support the named wrapper.
    """
    for wrapper in ddp.wrappers(model):
        if roots := prepared_roots(wrapper.module):
            for _, _, prepared in roots:
                prepared.observed.wrapper = weakref.ref(wrapper)
            ddp.connect(wrapper, recipe.comm, levels.swap_gradient_hook, ScalingBuffers(roots))
    roots = prepared_roots(model)
    if fsdp2.fsdp_modules(model):
        for _, root, prepared in roots:
            prepared.compute.keep_weight_casts(root, False)
            fused_head.make_ordinary(root)
        fsdp2.connect(model, recipe.comm, ScalingBuffers(roots))
        levels.watch_shards(model)
        travelling: dict[fsdp2.Place, fsdp2.Travelling] = {}
        for _, root, prepared in roots:
            travelling |= prepared.compute.travelling(root, prepared.recipe)
        fsdp2.connect_weights(model, travelling)
    elif fsdp2.ranks_sharing_layers(model) > 1:
        fsdp2.agree(model, ScalingBuffers(roots))
        levels.expect_equal_gradients(model)


class ScalingBuffers:
    """Return the live scaling states of prepared roots, in a fixed order, when called. Copied with the model."""

    def __init__(self, roots: list[tuple[str, nn.Module, Prepared]]) -> None:
        self.roots = [(root, prepared.compute) for _, root, prepared in roots]

    def __call__(self) -> list[torch.Tensor]:
        return [state for root, compute in self.roots for state in compute.scaling_buffers(root)]
