"""`implementation="original"` calls the package msamp, or explains its absence.

The package cannot be installed with this PyTorch: a stub replaces it.
"""

import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from level_steps import mlp

import fp8_backends
from fp8_backends.errors import BackendUnavailableError, RecipeError


@pytest.fixture
def stub_msamp(monkeypatch):
    calls = []

    def initialize(model, optimizer, opt_level="O1", use_te=False):
        calls.append((opt_level, use_te))
        new = mlp(seed=7)
        return new, torch.optim.AdamW(new.parameters())

    stub = types.ModuleType("msamp")
    stub.__spec__, stub.initialize = ModuleSpec("msamp", None), initialize
    monkeypatch.setitem(sys.modules, "msamp", stub)
    return calls


def recipe(**fields):
    return fp8_backends.MSAMPRecipeKwargs(implementation="original", **fields)


def test_missing_msamp_recommends_native_levels():
    model = mlp()
    with pytest.raises(BackendUnavailableError, match=r"torch 2.1.*msamp:O1 to msamp:O4"):
        fp8_backends.prepare(model, torch.optim.AdamW(model.parameters()), recipe())
    assert type(model[0]) is torch.nn.Linear


def test_model_and_optimizer_reach_msamp(stub_msamp):
    model = mlp()
    new, optimizer = fp8_backends.prepare(
        model, torch.optim.AdamW(model.parameters()), recipe(opt_level="O1")
    )
    assert new is not model and stub_msamp == [("O1", False)]
    assert optimizer.param_groups[0]["params"][0] is next(new.parameters())


def test_accelerate_passes_objects_to_msamp(stub_msamp):
    # another precision, after an earlier test
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe()], cpu=True)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    new, wrapped = accelerator.prepare(model, optimizer)
    assert stub_msamp == [("O2", False)] and new is not model and wrapped.optimizer is not optimizer
    with pytest.raises(RecipeError, match="one model with one optimizer"):
        accelerator.prepare(mlp())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opt_level": "O3"}, "O3"),
        ({"rounding": "nearest"}, "rounding"),
        ({"include": "0"}, "include"),
        ({"include": "+0"}, "include"),
    ],
)
def test_unsupported_options_are_refused_by_name(stub_msamp, fields, message):
    model = mlp()
    with pytest.raises(RecipeError, match=message):
        fp8_backends.prepare(model, torch.optim.AdamW(model.parameters()), recipe(**fields))
    assert not stub_msamp
