"""prepare() without Accelerate: the same objects come back, and wrong input explains itself."""

from __future__ import annotations

import pytest
import torch
from conversion_steps import take_steps
from torch import nn

import fp8_backends
from fp8_backends import preparation
from fp8_backends.errors import BackendUnavailableError, FP8BackendError, RecipeError

BACKENDS = ("ao:tensorwise", "native:dynamic", "native:delayed")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def step(model, optimizer):
    return take_steps(lambda: model(torch.randn(16, 32)).square().mean(), optimizer)[0]


@pytest.mark.parametrize("spec", BACKENDS)
def test_prepare_returns_both_objects_and_they_train(spec):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)  # states made before prepare survive
    state = optimizer.state[model[0].weight]["exp_avg"]
    assert preparation.prepare(model, optimizer, spec) == (model, optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"] is state
    losses = [step(model, optimizer) for _ in range(20)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(("arguments", "level"), [((), "O1"), (("O2",), "O2"), (("O3",), "O3")])
def test_initialize_has_msamps_signature_and_meaning(arguments, level):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    assert preparation.initialize(model, optimizer, *arguments) == (model, optimizer)
    step(model, optimizer)
    assert optimizer.fp8_states.level == level
    assert fp8_backends.audit(model).recipe == f"msamp:{level}"


def test_initialize_names_unsupported_arguments(monkeypatch):
    monkeypatch.setattr(
        "fp8_backends.compute.te.backend.importlib.util.find_spec", lambda name: None
    )
    model = net()
    with pytest.raises(BackendUnavailableError, match="TransformerEngine is not installed"):
        preparation.initialize(
            model, torch.optim.AdamW(model.parameters()), opt_level="O2", use_te=True
        )
    with pytest.raises(RecipeError, match="O7"):
        preparation.initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O7")


def test_swapped_arguments_are_explained():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(FP8BackendError, match="optimizer must be"):
        preparation.prepare(optimizer, model, "native")
    with pytest.raises(FP8BackendError, match="model must be"):
        preparation.prepare(None, optimizer, "native")


@pytest.mark.parametrize(
    "function",
    [
        fp8_backends.audit,
        fp8_backends.restore,
        fp8_backends.checkpoints.dequantize,
        lambda model: fp8_backends.checkpoints.plain_weights(model).__enter__(),
        lambda model: fp8_backends.checkpoints.export(model, "nowhere"),
        lambda model: fp8_backends.validate("native", model),
    ],
    ids=["audit", "restore", "dequantize", "plain_weights", "export", "validate"],
)
def test_result_of_prepare_is_refused_as_a_model(function):
    pair = fp8_backends.prepare(net(), None, "native:dynamic")
    with pytest.raises(FP8BackendError, match=r"not tuple: prepare returns \(model, optimizer\)"):
        function(pair)
    with pytest.raises(FP8BackendError, match="model must be a torch.nn.Module, not str$"):
        function("gpt2")


def test_an_optimizer_of_another_model_is_refused():
    model, others = net(), torch.optim.AdamW(net().parameters())
    with pytest.raises(FP8BackendError, match="holds no parameter of the prepared model"):
        preparation.prepare(model, others, "native")
    assert type(model[0]) is nn.Linear
    with pytest.warns(UserWarning, match="holds no parameter of the prepared model"):
        preparation.prepare(net(), others, {"backend": "native", "on_unproven": "warn"})


def test_wrapped_optimizer_is_watched(capfd):
    class Wrapper(torch.optim.Optimizer):
        """A torch optimizer around another, like Accelerate's."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            return self.optimizer.step()

    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    preparation.prepare(model, Wrapper(inner), "native")
    step(model, inner)
    assert "2/2 Linear" in capfd.readouterr().err
