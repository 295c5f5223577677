"""The delayed states of all layers move on by one step together."""

from __future__ import annotations

from gpu_rules import Calls
from torch import nn

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.recipes.handlers import FP8RecipeKwargs, resolve

NO_WORK = {f"aten::{name}" for name in ("detach", "view", "select", "slice", "unbind", "unsqueeze")}


def test_roll_has_constant_operations_and_no_host_copies():
    """Python numbers become tensors by `lift_fresh`, a waiting copy on a GPU."""
    compute, recipe, counts = (
        NativeCompute(),
        resolve(FP8RecipeKwargs(backend="native:delayed")),
        [],
    )
    for layers in (2, 7):
        shared = compute.new_shared(None, recipe)
        model = nn.Sequential(
            *[compute.build(nn.Linear(16, 16), recipe, shared) for _ in range(layers)]
        ).train()
        compute.attach(model, recipe, shared)
        (roll,) = model._forward_pre_hooks.values()
        with Calls() as calls:
            roll(model, ())
        names = [name for call in calls.seen if (name := call._schema.name) not in NO_WORK]
        assert "aten::_foreach_copy_" in names and "aten::lift_fresh" not in names
        counts.append(len(names))
    assert counts[0] == counts[1]
