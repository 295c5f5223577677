"""Scaling states travel in the optimizer's state dict, without Accelerate as with it."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fp8_backends
from fp8_backends.errors import FP8BackendError


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def new_run(backend: str, seed: int = 0) -> tuple:
    model = mlp(seed)
    return fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), backend)


def train(model, optimizer, seeds) -> list[tuple[float, float]]:
    """Return the loss and the largest gradient of the first layer in each step, too small for scale
    1."""
    seen = []
    for seed in seeds:
        x = torch.randn(16, model[0].in_features, generator=torch.Generator().manual_seed(seed))
        loss = model(x).square().mean() * 1e-4
        loss.backward()
        seen.append((loss.item(), model[0].weight.grad.abs().max().item()))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def saved_run(backend: str) -> tuple:
    """Return state dicts after a few steps, and the results of the next steps."""
    model, optimizer = new_run(backend)
    train(model, optimizer, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return *saved, train(model, optimizer, range(4, 8))


@pytest.mark.parametrize(
    "backend", ["native:delayed", "native:window", "msamp:O2", "native:delayed+msamp:O4"]
)
def test_state_dicts_resume_run_bitwise(backend):
    weights, states, unbroken = saved_run(backend)
    assert list(weights) == list(mlp().state_dict())
    model, optimizer = new_run(backend, seed=5)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    assert train(model, optimizer, range(4, 8)) == unbroken
    torch.optim.AdamW(mlp().parameters()).load_state_dict(states)


def test_state_dict_without_scaling_states_warns_about_fresh_scales(caplog):
    """Saved by stock PyTorch, or converted by `torch.distributed.checkpoint`."""
    weights, states, unbroken = saved_run("native:delayed")
    model, optimizer = new_run("native:delayed")
    model.load_state_dict(weights)
    optimizer.load_state_dict(
        {name: copy.deepcopy(states[name]) for name in ("state", "param_groups")}
    )
    assert "saved without FP8 scaling state: the scales of this run start afresh" in caplog.text
    assert train(model, optimizer, range(4, 8)) != unbroken
    caplog.clear()
    model, optimizer = new_run("native:delayed")
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    sharded = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    model, optimizer = new_run("native:delayed")
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, sharded)
    assert "start afresh" in caplog.text
    optimizer.load_state_dict({**optimizer.state_dict(), "fp8_scaling": states["fp8_scaling"]})
    assert train(model, optimizer, range(4, 8)) == unbroken


@pytest.mark.parametrize("backend, warns", [("native:delayed", True), ("native:dynamic", False)])
def test_state_dicts_loaded_before_prepare_are_noticed(backend, warns, caplog):
    """PyTorch passes over the scaling states there."""
    weights, states, unbroken = saved_run(backend)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        fp8_backends.prepare(model, optimizer, backend)
    assert (
        "prepare model and optimizer first, then load their state dicts" in caplog.text
    ) is warns
    assert (train(model, optimizer, range(4, 8)) != unbroken) is warns


def test_foreign_layers_are_named():
    _, states, _ = saved_run("native:delayed")
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    fp8_backends.prepare(
        model, optimizer, fp8_backends.FP8RecipeKwargs(backend="native:delayed", exclude=["0"])
    )
    with pytest.raises(
        FP8BackendError, match=r"only the checkpoint has 0\): prepare the saved model.*exclude was"
    ):
        optimizer.load_state_dict(states)
    states["fp8_scaling"]["tensors"]["0.0/extra.fp8_scaling"] = torch.zeros(3, 3, dtype=torch.int32)
    del states["fp8_scaling"]["tensors"]["0.0/0.fp8_scaling"]
    model, optimizer = new_run("native:delayed")
    with pytest.raises(
        FP8BackendError, match=r"\(only the checkpoint has extra; only this model has 0\)"
    ):
        optimizer.load_state_dict(states)


def test_partly_compiled_model_loads_states_of_eager_model():
    _, states, _ = saved_run("native:delayed")
    model, optimizer = new_run("native:delayed")
    model[0] = torch.compile(model[0], backend="eager")
    optimizer.load_state_dict(states)
    saved = optimizer.state_dict()["fp8_scaling"]["tensors"]
    assert saved.keys() == states["fp8_scaling"]["tensors"].keys()
    assert all(
        torch.equal(tensor, states["fp8_scaling"]["tensors"][name])
        for name, tensor in saved.items()
    )


@pytest.mark.parametrize("backend", ["native:dynamic", "ao"])
def test_stateless_rules_leave_state_dict_unchanged(backend):
    model, optimizer = new_run(backend)
    train(model, optimizer, range(1))
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
