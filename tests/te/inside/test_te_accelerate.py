"""The `te` compute through stock Accelerate, over the stand-in for TransformerEngine's kernels."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from te_models import BATCHES, adamw, losses, model
from widths import nightly

import fp8_backends
from fp8_backends import TERecipeKwargs, prepare
from fp8_backends.compute import hardware
from fp8_backends.compute.te.linear import TELinear


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator(**options) -> Accelerator:
    fp8_backends.connect()
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**options)])


def step(acc, made, optimizer, batches) -> list[float]:
    found = []
    for batch in batches:
        with acc.accumulate(made):
            loss = (made(batch) - batch).square().mean()
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("scaling", ["delayed", "dynamic"])
def test_stock_accelerate_trains_identically_with_proof(scaling, capfd):
    acc = accelerator(scaling=scaling)
    made = model()
    given = list(made.parameters())
    made, optimizer = acc.prepare(made, adamw(made))
    found = step(acc, made, optimizer, BATCHES)
    plain = model()
    assert found == losses(*prepare(plain, adamw(plain), f"te:{scaling}"))
    assert all(a is b for a, b in zip(given, made.parameters(), strict=True))
    assert (
        f"te:{scaling}: 6/6 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad (te)"
        in capfd.readouterr().err
    )
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    assert isinstance(pickle.loads(pickle.dumps(acc.unwrap_model(made))).first, TELinear)


def test_save_state_and_load_state_resume_bitwise(tmp_path):
    acc = accelerator(amax_history_len=4, amax_compute_algo="max")
    made, optimizer = (lambda m: acc.prepare(m, adamw(m)))(model())
    step(acc, made, optimizer, BATCHES[:3])
    acc.save_state(str(tmp_path))
    unbroken = step(acc, made, optimizer, BATCHES[3:])
    acc.load_state(str(tmp_path))  # over moved scales
    assert step(acc, made, optimizer, BATCHES[3:]) == unbroken
    made, optimizer = (lambda m: acc.prepare(m, adamw(m)))(model())
    acc._models, acc._optimizers = acc._models[-1:], acc._optimizers[-1:]
    acc.load_state(str(tmp_path))  # before the first forward
    assert step(acc, made, optimizer, BATCHES[3:]) == unbroken


def test_saved_state_is_plain(tmp_path):
    from safetensors.torch import load_file

    acc = accelerator()
    made, optimizer = (lambda m: acc.prepare(m, adamw(m)))(model())
    step(acc, made, optimizer, BATCHES[:1])
    acc.save_model(made, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model().state_dict().keys()
    assert all(torch.equal(tensor, made.state_dict()[name]) for name, tensor in saved.items())


@pytest.mark.parametrize("scaling", ["delayed", nightly("dynamic")])
def test_compiled_model_runs_in_fp8_with_proof(scaling, caplog):
    """Graphs exclude TransformerEngine's layers; the code in between is compiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with caplog.at_level(logging.INFO, "fp8_backends"):
        compiled, eager = model(), model()
        optimizers = adamw(compiled), adamw(eager)
        (
            prepare(compiled, optimizers[0], f"te:{scaling}"),
            prepare(eager, optimizers[1], f"te:{scaling}"),
        )
        wrapped = torch.compile(compiled, backend=backend)
        found = losses(wrapped, optimizers[0], BATCHES[:4])
    assert found == losses(eager, optimizers[1], BATCHES[:4])
    assert any("relu" in graph.code for graph in graphs)
    assert "6/6 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad (te)" in caplog.text
    assert fp8_backends.audit(wrapped).products["blocks.0.up"]["dgrad"] == 4


def test_accumulation_matches_training_without_accelerate():
    acc = accelerator()
    acc.gradient_accumulation_steps = 2
    made, optimizer = (lambda m: acc.prepare(m, adamw(m)))(model())
    found = step(acc, made, optimizer, BATCHES)
    plain = model()
    _, its_optimizer = prepare(plain, adamw(plain), "te:delayed")
    expected = []
    for i, batch in enumerate(BATCHES, 1):
        with hardware.fast_autocast("cpu"):
            loss = (plain(batch).float() - batch).square().mean()
        (loss / 2).backward()
        expected.append(loss.item())
        if i % 2 == 0:
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert found == expected


def test_averaged_copy_follows_without_affecting_training():
    acc = accelerator()
    made, optimizer = (lambda m: acc.prepare(m, adamw(m)))(model())
    averaged = copy.deepcopy(acc.unwrap_model(made)).eval().requires_grad_(False)
    found = []
    for batch in BATCHES:
        found += step(acc, made, optimizer, [batch])
        for mean, p in zip(averaged.parameters(), made.parameters(), strict=True):
            mean.lerp_(p, 0.5)
        with torch.no_grad():
            averaged(batch)
    plain = model()
    assert found == losses(*prepare(plain, adamw(plain), "te:delayed"))
