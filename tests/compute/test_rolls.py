"""The delayed states of all layers move on by one step together."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.recipes.handlers import FP8RecipeKwargs, resolve

NO_WORK = {f"aten::{name}" for name in ("detach", "view", "select", "slice", "unbind", "unsqueeze")} | {"prim::device"}


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [func._schema.name] if func._schema.name not in NO_WORK else []
        return func(*args, **(kwargs or {}))


def prepared(layers):
    """A model of `native:delayed` on a GPU that is not there."""
    compute, recipe = NativeCompute(), resolve(FP8RecipeKwargs(backend="native:delayed"))
    shared = compute.new_shared(None, recipe)
    linears = [nn.Linear(16, 16, bias=False, device="meta") for _ in range(layers)]
    for linear in linears:
        linear.weight = nn.Parameter(torch.empty(16, 16, device="cuda"))
    model = nn.Sequential(*[compute.build(linear, recipe, shared) for linear in linears]).train()
    compute.attach(model, recipe, shared)
    return model


def test_states_of_more_layers_take_no_more_operations_and_nothing_comes_from_the_host():
    counts = []
    with FakeTensorMode():
        for layers in (2, 7):
            model = prepared(layers)
            with Operations() as ran:
                for roll in model._forward_pre_hooks.values():
                    roll(model, ())
            assert "aten::_foreach_copy_" in ran.names
            assert "aten::lift_fresh" not in ran.names, "numbers of the host"
            counts.append(len(ran.names))
    assert counts[0] == counts[1]
