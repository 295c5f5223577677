"""Training at a level under torch.compile and under activation checkpointing equals eager training
to the bit."""

import pytest
import torch
from level_steps import assert_equal_states, prepared, train, values_of
from torch.utils.checkpoint import checkpoint

import fp8_backends
from fp8_backends.tensors.scaled_tensor import ScaledTensor

STEPS = 20
"""More than the 16 steps before a window's delayed scales."""


@pytest.mark.nightly
def test_compiled_training_matches_eager():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    model, optimizer = prepared("O4")
    other, other_optimizer = prepared("O4")
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    assert train(model, optimizer, range(STEPS)) == train(compiled, other_optimizer, range(STEPS))
    assert len(graphs) == 1
    assert_equal_states(optimizer, other_optimizer)
    assert all(
        torch.equal(a, b)
        for a, b in zip(values_of(model).values(), values_of(other).values(), strict=True)
    )
    products = [fp8_backends.audit(each).products for each in (model, other)]
    assert products[0] == products[1]


def test_a_compiled_optimizer_step_runs_eagerly():
    torch._dynamo.reset()
    usual, (model, optimizer) = prepared("O4"), prepared("O4")
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    assert train(model, optimizer, range(2)) == train(*usual, range(2))


@pytest.mark.nightly
@pytest.mark.parametrize(("level", "reentrant"), [("O2", True), ("O3", False), ("O4", False)])
def test_recomputation_changes_nothing(level, reentrant):
    model, optimizer = prepared(level)
    other, other_optimizer = prepared(level)
    forward = other.forward
    other.forward = lambda x: checkpoint(forward, x.requires_grad_(), use_reentrant=reentrant)
    assert train(model, optimizer, range(STEPS)) == train(other, other_optimizer, range(STEPS))
    assert_equal_states(optimizer, other_optimizer)
    counts = fp8_backends.audit(other).products["0"]
    assert counts["fprop"] == counts["wgrad"] == counts["recomputed"] == STEPS
    assert isinstance(other[0].weight, ScaledTensor)
