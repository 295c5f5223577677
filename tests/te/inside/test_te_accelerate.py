"""The `te` compute through stock Accelerate, over the stand-in for TransformerEngine's kernels."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from te_models import BATCHES, adamw, losses, model

import fp8_backends
from fp8_backends import TERecipeKwargs, prepare
from fp8_backends.compute.te.linear import TELinear


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator(**options) -> Accelerator:
    fp8_backends.connect()
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**options)])


def test_stock_accelerate_trains_identically_with_proof(capfd):
    acc = accelerator()
    made = model()
    given = list(made.parameters())
    made, optimizer = acc.prepare(made, adamw(made))
    found = []
    for batch in BATCHES:
        loss = (made(batch) - batch).square().mean()
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    plain = model()
    assert found == losses(*prepare(plain, adamw(plain), "te:delayed"))
    assert all(a is b for a, b in zip(given, made.parameters(), strict=True))
    assert (
        "te:delayed: 6/6 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad (te)"
        in capfd.readouterr().err
    )
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    assert isinstance(pickle.loads(pickle.dumps(acc.unwrap_model(made))).first, TELinear)


def test_compiled_model_runs_in_fp8_with_proof(caplog):
    """Graphs exclude TransformerEngine's layers; the code in between is compiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with caplog.at_level(logging.INFO, "fp8_backends"):
        compiled, eager = model(), model()
        optimizers = adamw(compiled), adamw(eager)
        for made, optimizer in zip((compiled, eager), optimizers, strict=True):
            prepare(made, optimizer, "te:delayed")
        wrapped = torch.compile(compiled, backend=backend)
        found = losses(wrapped, optimizers[0], BATCHES[:4])
    assert found == losses(eager, optimizers[1], BATCHES[:4])
    assert any("relu" in graph.code for graph in graphs)
    assert "6/6 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad (te)" in caplog.text
    assert fp8_backends.audit(wrapped).products["blocks.0.up"]["dgrad"] == 4
