"""Gradient release: steps inside backward equal the usual steps to the bit, and free their
gradients."""

import copy

import pytest
import torch
from level_steps import (
    LEVELS,
    assert_equal_states,
    assert_same,
    batch,
    loss_of,
    mlp,
    parameters_of,
    prepared,
    train,
    values_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8_backends
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.states import gradient_release
from fp8_backends.states.gradient_release import is_dropped

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2, weight_decay=0.1),
    "muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], 1e-2),
}


class Words(nn.Module):
    """A large plain weight with scaled states, layers, small plain parameters, and an unused
    layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers, self.unused = nn.Embedding(128, 64), mlp(), nn.Linear(64, 64)

    def forward(self, x):
        return self.layers(x + self.embedding.weight[: len(x)])


def in_groups(parameters) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [
        {"params": parameters[1::2], "lr": 2e-3, "weight_decay": 0.3},
        {"params": parameters[::2]},
    ]
    return torch.optim.AdamW(groups, 1e-3, betas=(0.8, 0.95))


def train_with_a_scheduler(model, optimizer, seeds, released: bool) -> list[float]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    losses = []
    for seed in seeds:
        loss = loss_of(model, seed)
        loss.backward()
        used = [p for name, p in model.named_parameters() if not name.startswith("unused")]
        assert not released or all(map(is_dropped, (p.grad for p in used)))
        # manually: `step` handles the remaining ones
        model.unused.weight.grad = torch.full((64, 64), 0.01)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("level", "pending"), [*zip(LEVELS, (1, 2**13, 2**40, 1), strict=True), ("O4", 2**13)]
)
def test_steps_inside_backward_match_usual_order(level, pending, monkeypatch):
    """Step parameters one by one, some together, or all at the end."""
    monkeypatch.setattr(gradient_release, "PENDING", pending)
    usual = prepared(level, in_groups, Words())
    ours = prepared(level, in_groups, Words(), gradient_release=True)
    losses = train_with_a_scheduler(*usual, range(3), released=False)
    assert train_with_a_scheduler(*ours, range(3), released=True) == losses
    assert_same(ours, usual)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_step_inside_backward(name, monkeypatch):
    monkeypatch.setattr(gradient_release, "PENDING", 1)
    usual = prepared("O2", OPTIMIZERS[name])
    ours = prepared("O2", OPTIMIZERS[name], gradient_release=True)
    assert train(*ours, range(3)) == train(*usual, range(3))
    assert_same(ours, usual)


def test_a_single_parameter_steps_at_the_end_of_backward():
    ways = []
    for released in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64, bias=False)
        ways.append(prepared("O2", model=layer, gradient_release=released))
    assert train(*ways[0], range(3)) == train(*ways[1], range(3))
    before = ways[1][0].weight.exact().clone()
    loss_of(ways[1][0], 3).backward()
    assert not torch.equal(before, ways[1][0].weight.exact()), "stepped by backward itself"


def test_non_finite_gradient_counts_as_zero(monkeypatch):
    monkeypatch.setattr(gradient_release, "PENDING", 1)
    pairs = prepared("O2"), prepared("O2", gradient_release=True)
    for model, optimizer in pairs:
        model[0].weight.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
        train(model, optimizer, range(2))
    assert_same(*pairs)


def _held_by(model: nn.Module) -> int:
    return sum(each.grad is not None and not is_dropped(each.grad) for each in model.parameters())


def test_one_gradient_at_a_time_is_in_memory(monkeypatch):
    monkeypatch.setattr(gradient_release, "PENDING", 1)
    model, optimizer = prepared("O2", gradient_release=True)
    held = []
    for p in model.parameters():
        p.register_hook(lambda _: held.append(_held_by(model)))
    train(model, optimizer, range(1))
    assert held == [0] * len(list(model.parameters()))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_both_kinds_of_activation_checkpointing(use_reentrant, monkeypatch):
    monkeypatch.setattr(gradient_release, "PENDING", 1)

    def step(model, optimizer):
        hidden = checkpoint(model[:3], batch(0).requires_grad_(), use_reentrant=use_reentrant)
        checkpoint(model[3], hidden, use_reentrant=use_reentrant).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    pairs = prepared("O2"), prepared("O2", gradient_release=True)
    for pair in pairs:
        step(*pair)
        step(*pair)
    assert_same(*pairs)


def test_gradient_release_resumes_bitwise():
    model, optimizer = prepared("O2", gradient_release=True)
    train(model, optimizer, range(2))
    other, resumed = prepared("O2", gradient_release=True)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, resumed, range(2, 4)) == train(model, optimizer, range(2, 4))
    assert_equal_states(resumed, optimizer)


def test_copied_model_keeps_gradients():
    model, optimizer = prepared("O2", gradient_release=True)
    train(model, optimizer, range(1))
    copied, before = copy.deepcopy((model, optimizer)), values_of(model)
    loss_of(copied[0], 1).backward()
    assert all(p.grad is not None for p in copied[0].parameters())
    copied[1].step()
    assert all(torch.equal(before[name], value) for name, value in values_of(model).items())
    assert not torch.equal(values_of(copied[0])["3.weight"], before["3.weight"])


def test_gradients_take_no_bytes():
    model, optimizer = prepared("O2", gradient_release=True)
    loss_of(model, 0).backward()
    optimizer.step()
    found = fp8_backends.audit(model, optimizer)
    assert found.gradient_source == "released" and found.bytes_per_element["gradient"] == 0
    assert found.bytes_per_element["total"] == pytest.approx(5, abs=0.01)
    plan = fp8_backends.plan({"backend": "msamp:O2", "gradient_release": True})
    assert (plan.bytes_per_element, plan.weight_gradient) == (5, "FP8, released")


# Refusals


def test_a_second_backward_before_the_step_is_refused():
    model, optimizer = prepared("O2", gradient_release=True)
    loss_of(model, 0).backward()
    with pytest.raises(
        FP8BackendError,
        match=r"second gradient of a parameter of shape \(64, 128\).*after each backw",
    ):
        loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(1))


@pytest.mark.parametrize("stepped", [False, True])
def test_uses_of_a_dropped_gradient_are_refused(stepped):
    model, optimizer = prepared("O2", gradient_release=True)
    loss_of(model, 0).backward()
    before = values_of(model)
    if stepped:
        optimizer.step()
    parameters = list(model.parameters())
    uses = [
        lambda: [p.grad.mul_(0.1) for p in parameters if p.grad is not None],
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        lambda: parameters[0].grad.data.norm(),
        lambda: torch._foreach_mul_([p.grad for p in parameters], 0.1),
        lambda: parameters[0].grad.clone(),
        lambda: optimizer.zero_grad(set_to_none=False),
    ]
    for use in uses:
        with pytest.raises(
            FP8BackendError, match="stepped with it and dropped it.*gradient_release=False"
        ):
            use()
    assert "DroppedGradient" in repr(parameters[0].grad)
    assert all(map(torch.equal, before.values(), values_of(model).values()))
    model.to(torch.float64)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)


def test_a_gradient_cleared_before_the_step_is_refused():
    """Without gradient release the step would skip the parameter."""
    for clear in (lambda model: setattr(model[0].weight, "grad", None), nn.Module.zero_grad):
        model, optimizer = prepared("O2", gradient_release=True)
        loss_of(model, 0).backward()
        clear(model)
        with pytest.raises(
            FP8BackendError,
            match="cleared between backward.*requires_grad_.*gradient_release=False",
        ):
            optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(1))


def test_a_loop_that_never_clears_gradients_is_refused():
    """Without gradient release it would accumulate."""
    model, optimizer = prepared("O2", gradient_release=True)
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(
        FP8BackendError, match=r"second gradient of a parameter of shape .*zero_grad\(\)"
    ):
        loss_of(model, 1).backward()
    model.zero_grad()
    train(model, optimizer, range(2))


def test_manual_gradient_after_release_is_refused():
    model, optimizer = prepared("O2", gradient_release=True)
    loss_of(model, 0).backward()
    model[3].weight.grad = torch.ones(64, 128)
    with pytest.raises(
        FP8BackendError, match=r"second gradient of a parameter of shape \(64, 128\)"
    ):
        optimizer.step()


def test_weight_shared_by_reentrant_checkpoints_is_refused():
    model, _ = prepared("O2", gradient_release=True, model=nn.Sequential(nn.Linear(64, 64)))
    hidden = checkpoint(model, batch(0).requires_grad_(), use_reentrant=True)
    with pytest.raises(FP8BackendError, match="use_reentrant=False"):
        checkpoint(model, hidden, use_reentrant=True).square().mean().backward()


def test_options_changed_after_backward_are_refused():
    model, optimizer = prepared("O2", gradient_release=True)
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(FP8BackendError, match="lr of parameter group 0 changed between backward"):
        optimizer.step()


def test_a_closure_is_refused():
    model, optimizer = prepared("O2", gradient_release=True)
    with pytest.raises(FP8BackendError, match=r"step\(closure\).*call loss.backward\(\)"):
        optimizer.step(lambda: loss_of(model, 0))


@pytest.mark.parametrize(
    "fields", [{"guard": "skip"}, {"autocast_dtype": "fp16"}], ids=["guard", "fp16"]
)
def test_features_skipping_steps_are_refused(fields):
    model = mlp()
    with pytest.raises(RecipeError, match="gradient_release"):
        prepared("O2", model=model, gradient_release=True, **fields)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_warning_guard_accepts_gradient_release():
    model, optimizer = prepared("O2", gradient_release=True, guard="warn")
    train(model, optimizer, range(2))
    assert fp8_backends.watch.guard.faults(optimizer) == []


def test_added_parameter_steps_as_usual():
    model, optimizer = prepared("O2", gradient_release=True)
    extra = nn.Parameter(torch.ones(64))
    optimizer.add_param_group({"params": [extra]})
    (loss_of(model, 0) + extra.sum()).backward()
    assert extra.grad is not None and all(is_dropped(p.grad) for p in model.parameters())
    optimizer.step()
    assert all(
        optimizer.state[p]["step"] == 1 for p in parameters_of(optimizer)
    ) and not torch.equal(extra, torch.ones(64))
