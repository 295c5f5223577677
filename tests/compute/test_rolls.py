"""The delayed states of all layers move on by one step together."""

from __future__ import annotations

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.recipes.handlers import FP8RecipeKwargs, resolve

NO_WORK = {f"aten::{name}" for name in ("detach", "view", "select", "slice", "unbind", "unsqueeze")}


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [func._schema.name] if func._schema.name not in NO_WORK else []
        return func(*args, **(kwargs or {}))


def test_states_of_more_layers_take_no_more_operations_and_nothing_comes_from_the_host():
    """Numbers of Python become a tensor by `lift_fresh`, on a GPU by a copy that waits."""
    compute, recipe, counts = NativeCompute(), resolve(FP8RecipeKwargs(backend="native:delayed")), []
    for layers in (2, 7):
        shared = compute.new_shared(None, recipe)
        model = nn.Sequential(*[compute.build(nn.Linear(16, 16), recipe, shared) for _ in range(layers)]).train()
        compute.attach(model, recipe, shared)
        (roll,) = model._forward_pre_hooks.values()
        with Operations() as ran:
            roll(model, ())
        assert "aten::_foreach_copy_" in ran.names and "aten::lift_fresh" not in ran.names
        counts.append(len(ran.names))
    assert counts[0] == counts[1]
