"""Test the guard: it names each fault at its step, follows the recipe's action, and stays silent in
ordinary training."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from accelerate_state import fresh_accelerate
from torch import nn

import fp8_backends
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.formats import scaling
from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.formats.scaling import (
    GRAD_OUTPUT,
    HISTORY,
    INPUT,
    ROLLS,
    SCALE,
    new_delayed_state,
)
from fp8_backends.tensors.scaled_tensor import stored_parts
from fp8_backends.watch.guard import STUCK_AFTER, Guard, faults

__all__ = ["fresh_accelerate"]
MAX = torch.tensor([E4M3.max, E4M3.max, E5M2.max])


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)
    )


def batch():
    return torch.randn(16, 32)


class Training:
    """Train a net under an Accelerator with a guard."""

    def __init__(self, backend="native:delayed", guard="skip", folder=None, model=None, **fields):
        recipe = fp8_backends.FP8RecipeKwargs(backend=backend, guard=guard, **fields)
        project = ProjectConfiguration(str(folder)) if folder else None
        self.accelerator = Accelerator(
            mixed_precision="fp8", cpu=True, kwargs_handlers=[recipe], project_config=project
        )
        model = net() if model is None else model
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), 1e-3)
        )

    def step(self, x=None, tamper=lambda model: None):
        x = batch() if x is None else x
        self.accelerator.backward(self.model(x).float().square().mean())
        tamper(self.model)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, number):
        for _ in range(number):
            self.step()

    def stored(self):
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        return [
            part.clone()
            for each in (*self.model.parameters(), *states)
            for part in stored_parts(each.detach())
        ]

    @property
    def faults(self):
        return faults(self.optimizer)

    @property
    def kinds(self):
        return [(fault.step, fault.kind) for fault in self.faults]


def nan_batch():
    x = batch()
    x[2, 3] = math.nan
    return x


def equal(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# Actions


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O2", "ao:tensorwise"])
def test_skipped_step_leaves_weights_states_and_counters_unchanged(backend):
    training = Training(backend)
    training.steps(2)
    before = training.stored()
    training.step(nan_batch())
    assert equal(before, training.stored())
    assert training.kinds == [(3, "loss"), (3, "gradient")]
    assert training.faults[1].where[0] == "4.bias"  # the first reached by backward
    training.steps(1)
    assert len(training.faults) == 2 and not equal(before, training.stored())


@pytest.mark.parametrize("guard", ["skip", "stop"])
def test_a_closure_is_refused_by_a_guard_that_acts(guard):
    """Its gradients come after the guard's look."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fp8_backends.prepare(model, optimizer, {"backend": "native:dynamic", "guard": guard})
    with pytest.raises(FP8BackendError, match=r"step\(closure\) computes them inside it"):
        optimizer.step(lambda: model(batch()).square().mean())


@pytest.mark.usefixtures("fresh_accelerate")
def test_warn_changes_nothing_and_logs_each_kind_once(caplog):
    training = Training(guard="warn")
    training.steps(2)
    for _ in range(3):
        training.step(nan_batch())
    # the first step, as it would be without a guard, spoils the parameters
    spoiled = [(s, kind) for s in (4, 5) for kind in ("loss", "parameter")]
    assert training.kinds == [(3, "loss"), (3, "gradient"), *spoiled]
    assert [record.args[0].kind for record in caplog.records] == ["loss", "gradient", "parameter"]
    assert training.model[0].weight.isnan().any()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("backend", ["msamp:O1", "msamp:O4"])
def test_losses_are_watched_beside_released_gradients(backend):
    run = Training(backend, guard="warn", gradient_release=True)
    for x in (batch(), nan_batch()):
        assert run.faults == []
        run.accelerator.backward(run.model(x).float().square().mean())
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.kinds == [(2, "loss")]
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_stop_raises_before_the_step_and_saves_the_training(tmp_path):
    training = Training(guard="stop", folder=tmp_path)
    training.steps(2)
    before = training.stored()
    with pytest.raises(FP8BackendError, match=r"step 3: loss.*guard_step_3.*look at the data"):
        training.step(nan_batch())
    assert equal(before, training.stored())
    training.optimizer.zero_grad()
    training.accelerator.load_state(str(tmp_path / "guard_step_3"))
    assert equal(before, training.stored())


@pytest.mark.usefixtures("fresh_accelerate")
def test_persistent_fault_stops_training(monkeypatch):
    monkeypatch.setattr("fp8_backends.watch.guard.LEFT_OUT_AT_MOST", 3)
    training = Training()
    training.steps(1)
    for _ in range(3):
        training.step(nan_batch())
    with pytest.raises(FP8BackendError, match="3 steps in a row were left out"):
        training.step(nan_batch())


# Faults


class Block(nn.Module):
    """A norm and a layer, with a mask of infs as attention has."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.down = norm(32), nn.Linear(32, 32)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, x):
        return self.down(self.norm(x)).relu() + self.mask[0]


def deep(norm=nn.LayerNorm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), *(Block(norm) for _ in range(3)))


def spoil(tensor, value=math.nan):
    tensor.data.copy_(tensor.data.float().index_fill(0, torch.tensor(0), value))


SPOILED = {
    "parameter": (lambda t: spoil(t.model[2].norm.weight), "2.norm.weight"),
    "weight": (lambda t: spoil(t.model[1].down.weight, math.inf), "1.down.weight"),
    "state": (
        lambda t: spoil(t.optimizer.state[t.model[3].norm.bias]["exp_avg_sq"]),
        "3.norm.bias, its optimizer state",
    ),
    "buffer": (lambda t: spoil(t.model[1].mask), "1.mask"),
}


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("what", "backend", "action"),
    [
        ("parameter", "native:delayed", "skip"),
        ("weight", "msamp:O2", "skip"),
        ("weight", "native:delayed", "stop"),
        ("state", "msamp:O4", "stop"),
        ("buffer", "msamp:O2", "stop"),
    ],
)
def test_non_finite_parameter_is_named_and_stops_training(action, what, backend, tmp_path):
    plant, place = SPOILED[what]
    training = Training(backend, action, folder=tmp_path, model=deep())
    training.steps(2)
    plant(training)
    x = nan_batch() if what == "state" else None  # a finite loss triggers no scan
    before = training.stored()
    with pytest.raises(
        FP8BackendError,
        match=f"step 3: loss.*parameter in {place}.*leaving steps out does not heal",
    ):
        training.step(x)
    assert all(
        torch.equal(a, b) or a.isnan().any() for a, b in zip(before, training.stored(), strict=True)
    )
    assert (
        training.kinds == [(3, "loss"), (3, "parameter")] and training.faults[1].where[0] == place
    )
    assert not list(tmp_path.iterdir())  # such a training is not worth a checkpoint


@pytest.mark.usefixtures("fresh_accelerate")
def test_bad_batch_leaves_running_statistics_unchanged():
    training = Training(model=deep(nn.BatchNorm1d))
    training.steps(2)
    before = copy.deepcopy(dict(training.model.named_buffers()))
    training.step(nan_batch())
    assert training.kinds == [(3, "loss"), (3, "gradient")]
    after = dict(training.model.named_buffers())
    assert all(torch.equal(before[name], after[name]) for name in before if ".norm." in name)
    training.steps(2)
    assert len(training.faults) == 2 and training.model.eval()(batch()).isfinite().all()


@pytest.mark.usefixtures("fresh_accelerate")
def test_clipped_values_name_layer_and_operand():
    training = Training()
    training.steps(3)
    training.step(1e4 * batch())
    assert [(fault.kind, fault.where) for fault in training.faults] == [("clipped", ("0 (input)",))]


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O2"])
def test_guard_and_monitor_number_steps_alike_after_resume(backend, tmp_path):
    file = tmp_path / "samples"
    training = Training(backend, monitor_every=1, monitor_file=str(file))
    training.steps(2)
    for _ in range(3):
        training.step(nan_batch())
    training.steps(1)
    training.step(nan_batch())
    assert [step for step, kind in training.kinds if kind == "loss"] == [3, 4, 5, 7]
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [
        2,
        3,
        4,
        5,
        6,
        7,
    ]
    saved, states = (
        copy.deepcopy(training.optimizer.state_dict()),
        copy.deepcopy(training.model.state_dict()),
    )
    resumed = Training(backend, monitor_every=1, monitor_file=str(file))
    resumed.model.load_state_dict(states)
    resumed.optimizer.load_state_dict(saved)  # of three completed steps
    resumed.steps(1)
    resumed.step(nan_batch())
    assert (
        resumed.kinds[0] == (5, "loss")
        and json.loads(file.read_text().splitlines()[-1])["step"] == 5
    )


def test_without_accelerate_gradients_and_scales_are_watched():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fp8_backends.prepare(model, optimizer, {"backend": "native:delayed", "guard": "skip"})
    for spoil in (False, True, False):
        model(batch()).square().mean().backward()
        if spoil:
            model[2].weight.grad[3, 5] = math.inf
        optimizer.step()
        if spoil:
            assert model[2].weight.grad[3, 5] == math.inf  # as after any other step
        optimizer.zero_grad()
    assert [fault[:3] for fault in faults(optimizer)] == [(2, "gradient", ("2.weight",))]


@pytest.mark.usefixtures("fresh_accelerate")
def test_impossible_history_is_named_and_restarts():
    training = Training()
    training.steps(2)
    history = training.model[2].fp8_scaling.view(torch.float32)[GRAD_OUTPUT]
    training.step(tamper=lambda model: history[HISTORY + 1 :].fill_(math.nan))
    assert (training.kinds, training.faults[0].where) == (
        [(3, "stuck")],
        ("2 (output's gradient)",),
    )
    training.steps(2)
    assert len(training.faults) == 1


@pytest.mark.usefixtures("fresh_accelerate")
def test_stuck_history_is_named():
    training = Training(guard="warn")
    training.steps(2)
    frozen = training.model[0].fp8_scaling[:, ROLLS].clone()
    for _ in range(STUCK_AFTER + 3):
        training.step(tamper=lambda model: model[0].fp8_scaling[:, ROLLS].copy_(frozen))
    assert training.kinds == [(STUCK_AFTER + 3, "stuck")]


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O3"])
def test_ordinary_events_trigger_nothing(backend):
    training = Training(backend, "warn")
    training.model[2].weight.requires_grad_(False)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        training.optimizer.optimizer, lambda step: step / 10
    )
    for number in range(40):
        training.step(torch.randn((4, 16, 64)[number % 3], 32) * (0 if number == 30 else 1))
        schedule.step()
        if number == 20:
            training.model.eval()
            training.model(1e6 * batch())
            training.model.train()
    assert training.faults == []


def test_off_installs_nothing():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, "native:delayed")
    assert not any(isinstance(hook, Guard) for hook in optimizer._optimizer_step_pre_hooks.values())
    assert faults(optimizer) == []
    for on in (True, "on"):
        with pytest.raises(RecipeError, match="guard must be one of off, warn, skip"):
            fp8_backends.FP8RecipeKwargs(backend="native", guard=on)
    with pytest.raises(RecipeError, match="guard='bf16': guard must be one of off, warn, skip"):
        fp8_backends.FP8RecipeKwargs(backend="native", guard="bf16")


@pytest.mark.usefixtures("fresh_accelerate")
def test_loss_of_another_optimizer_is_accepted():
    recipe = fp8_backends.FP8RecipeKwargs(backend="native:dynamic", guard="skip")
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[recipe])
    models = net(), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-3) for model in models]
    generator, critic, *optimizers = accelerator.prepare(*models, *optimizers)
    for factor in (1.0, math.nan):
        accelerator.backward(factor * critic(generator(batch())).float().mean())
        optimizers[0].step()
        optimizers[1].zero_grad()
        before = critic[0].weight.clone()
        accelerator.backward(critic(torch.randn(16, 16)).float().square().mean())
        optimizers[1].step()
        assert not torch.equal(before, critic[0].weight)
    assert [fault.kind for fault in faults(optimizers[0])] == ["loss", "gradient"]
    assert faults(optimizers[1]) == []


def test_latest_recipe_sets_the_guard_action():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for guard, number in (("skip", 1), ("warn", 2), ("off", 2)):
        fp8_backends.prepare(model, optimizer, {"backend": "native:dynamic", "guard": guard})
        model(nan_batch()).sum().backward()
        optimizer.step()
        assert len(faults(optimizer)) == number
    fp8_backends.prepare(model, optimizer, {"backend": "native:dynamic", "guard": "skip"})
    fp8_backends.restore(model)  # to end the guard's work
    model(nan_batch()).sum().backward()
    optimizer.step()
    assert len(faults(optimizer)) == number


def test_optimizer_stepping_in_backward_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.fused_backward = lambda: None  # the mark of LOMO's optimizers, not installed here
    with pytest.raises(FP8BackendError, match="SGD makes its steps where no hook precedes them"):
        fp8_backends.prepare(model, optimizer, {"backend": "native", "guard": "warn"})


# Verdicts of an inspection and a window


def test_overshoot_and_invalid_states():
    states = torch.stack([new_delayed_state(4), new_delayed_state(4)])
    states[..., ROLLS] = 1
    numbers = states.view(torch.float32)
    numbers[0, INPUT, HISTORY] = 100 * E4M3.max
    numbers[1, GRAD_OUTPUT, HISTORY] = 100 * E5M2.max  # usual for a gradient
    over = scaling.overshoot(states, MAX, warm_from=1)
    assert over[0, INPUT] == 100 and over[1, GRAD_OUTPUT] == 100
    assert scaling.is_clipped(over).nonzero().tolist() == [[0, INPUT]]
    assert not scaling.overshoot(states, MAX, warm_from=2).any()
    renewed = scaling.anew(states, MAX, margin=0)
    assert renewed.view(torch.float32)[0, INPUT, SCALE] == 1 / 100
    for value, reads_history, invalid in [
        (math.inf, True, True),
        (math.inf, False, False),
        (math.nan, False, True),
    ]:
        numbers[1, INPUT, -1] = value
        assert bool(scaling.is_invalid(states, reads_history)[1, INPUT]) is invalid
    numbers[1, INPUT, -1] = 0
    for scale in (0.0, -1.0, math.inf, math.nan):
        numbers[0, INPUT, SCALE] = scale
        assert scaling.is_invalid(states, False).nonzero().tolist() == [[0, INPUT]]


# Scales of the most recent amax in a model called twice a step


def called_twice(steps=33, second=4.0, **fields):
    """Train on an input and one `second` times as large; return the optimizer, and the error of the
    last output."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    fp8_backends.prepare(model, optimizer, {"backend": "native:delayed", **fields})
    for _ in range(steps):
        x = batch()
        output = model(x), model(second * x)
        sum(y.square().mean() for y in output).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        exact = model.eval()(second * x)
    return optimizer, ((output[1] - exact).norm() / exact.norm()).item()


def test_default_scale_fits_both_calls_of_a_model():
    assert called_twice(8)[1] < 0.2
    assert called_twice(8, amax_compute_algo="most_recent")[1] > 0.4


@pytest.mark.nightly
def test_layers_that_clip_step_after_step_are_named_once(caplog):
    recent = {"amax_compute_algo": "most_recent"}
    for fields in ({**recent, "second": 1.5}, {**recent, "margin": 2}):
        called_twice(**fields)
        assert caplog.messages == [], fields
    called_twice(steps=64, **recent)
    (message,) = caplog.messages
    assert message.startswith("native:delayed: scales clip inputs of * (x2) step after step")
    assert 'leave out amax_compute_algo="most_recent"' in message
    caplog.clear()
    optimizer, _ = called_twice(guard="warn", **recent)
    (fault,) = faults(optimizer)
    assert (
        fault.kind == "clipped"
        and fault.figures.startswith("scales clip inputs")
        and len(caplog.messages) == 1
    )
