"""The states of all layers move on by one step together: few operations, and nothing from the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.recipes.handlers import FP8RecipeKwargs, resolve

VIEWS = {"aten::detach", "aten::view", "aten::select", "aten::slice", "aten::unbind", "aten::unsqueeze", "aten::alias"}


class Operations(TorchDispatchMode):
    """Names of the operations that run, and of those that bring data from the host to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.from_host = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name not in VIEWS:
            self.names.append(name)
        reads = [each.device.type for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        writes = [each.device.type for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        if "cpu" in reads and set(writes) - {"cpu"} or name == "aten::lift_fresh":  # the latter: of Python's numbers
            self.from_host.append(name)
        return made


def model_of(layers, rule):
    """Prepared for the rule, on a device of which every tensor of the host is told apart."""
    compute, recipe = NativeCompute(), resolve(FP8RecipeKwargs(backend=f"native:{rule}"))
    linears = [nn.Linear(16, 16, device="meta") for _ in range(layers)]
    shared = compute.new_shared(None, recipe)
    model = nn.Sequential(*[compute.build(each, recipe, shared) for each in linears]).train()
    compute.attach(model, recipe, shared)
    return compute, model


@pytest.mark.parametrize("rule", ["delayed", "window"])
def test_states_of_more_layers_take_no_more_operations_and_nothing_comes_from_the_host(rule):
    counts = []
    for layers in (2, 7):
        compute, model = model_of(layers, rule)
        with Operations() as ran:
            for hook in model._forward_pre_hooks.values():
                hook(model, ())
            compute.after_optimizer_step(model)
        assert len(model._forward_pre_hooks) == (rule == "delayed") and len(ran.names) > 5
        assert not ran.from_host, ran.from_host
        counts.append(len(ran.names))
    assert counts[0] == counts[1]
