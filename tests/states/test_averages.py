"""Averages of a prepared model's weights (EMA): PyTorch's `AveragedModel` and diffusers' `EMAModel`
average exactly up to FP32 rounding, and training continues unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from level_steps import mlp, train, values_of
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8_backends

BACKENDS = ["native:dynamic", "msamp:O2", "msamp:O3", "msamp:O4", "ao"]
STEPS = 6


def prepared(backend: str) -> tuple:
    model = mlp()
    return fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), backend)


def assert_averages(found: dict, wanted: dict) -> None:
    """Each step may round once more in FP32."""
    torch.testing.assert_close(found, wanted, rtol=STEPS * 2**-23, atol=1e-8)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "inside"), list(zip(BACKENDS, (False, True, True, False, True), strict=True))
)
def test_averaged_model_averages_exact_weights(backend, inside):
    """`inside`: created inside `plain_weights`. A plain twin takes the exact values of every step
    (the masters at O3)."""
    model, optimizer = prepared(backend)
    rule = get_ema_multi_avg_fn(0.999)
    if inside:
        with fp8_backends.checkpoints.plain_weights(model):
            averaged = AveragedModel(model, multi_avg_fn=rule)
    else:
        averaged = AveragedModel(model, multi_avg_fn=rule)
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    twins_average = AveragedModel(twin, multi_avg_fn=rule)
    for batch in range(STEPS):
        train(model, optimizer, [batch])
        twin.load_state_dict(model.state_dict())
        averaged.update_parameters(model)
        twins_average.update_parameters(twin)
    assert_averages(values_of(averaged.module), values_of(twins_average.module))
    assert inside <= all(type(p) is torch.nn.Parameter for p in averaged.parameters())
    alone, its_optimizer = prepared(backend)
    train(alone, its_optimizer, range(STEPS))
    assert train(model, optimizer, range(3)) == train(alone, its_optimizer, range(3))


@pytest.mark.parametrize("backend", ["native:delayed", "native:window", "msamp:O2", "ao"])
def test_average_made_before_prepare_keeps_its_buffers(backend):
    model = torch.nn.Sequential(*mlp(), torch.nn.BatchNorm1d(mlp()[-1].out_features))
    averaged = AveragedModel(model, use_buffers=True)
    by_hand = copy.deepcopy(model)
    names = [name for name, _ in model.named_buffers()]
    model, optimizer = fp8_backends.prepare(
        model, torch.optim.AdamW(model.parameters(), 1e-3), backend
    )
    train(model, optimizer, range(2))
    assert [name for name, _ in model.named_buffers()] == names
    for ours, theirs in zip(by_hand.buffers(), model.buffers(), strict=True):
        ours.copy_(theirs)
    averaged.update_parameters(model)
    assert torch.equal(averaged.module[-1].running_mean, model[-1].running_mean)


@pytest.mark.nightly  # loading diffusers
@pytest.mark.parametrize(
    ("backend", "foreach"), list(zip(BACKENDS[1:], (False, True, False, True), strict=True))
)
def test_diffusers_average_is_exact_and_leaves_training_unchanged(backend, foreach):
    from diffusers.training_utils import EMAModel

    model, optimizer = prepared(backend)
    alone, its_optimizer = prepared(backend)
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    average = EMAModel(model.parameters(), decay=0.999, min_decay=0.9, foreach=foreach)
    wanted = EMAModel(twin.parameters(), decay=0.999, min_decay=0.9, foreach=foreach)
    for batch in range(STEPS):
        train(model, optimizer, [batch])
        twin.load_state_dict(model.state_dict())
        average.step(model.parameters())
        wanted.step(twin.parameters())
    train(alone, its_optimizer, range(STEPS))
    assert all(type(shadow) is torch.Tensor for shadow in average.shadow_params)
    assert_averages(dict(enumerate(average.shadow_params)), dict(enumerate(wanted.shadow_params)))

    stored = [type(p) for p in model.parameters()]
    average.store(model.parameters())
    with fp8_backends.checkpoints.plain_weights(model):  # with an unrounded average
        average.copy_to(model.parameters())
        assert_averages(dict(enumerate(model.parameters())), dict(enumerate(wanted.shadow_params)))
        average.restore(model.parameters())
    assert [type(p) for p in model.parameters()] == stored
    average.store(model.parameters())
    average.copy_to(model.parameters())  # rounded to the level's format
    assert not torch.equal(model[0].weight, alone[0].weight)
    average.restore(model.parameters())
    torch.testing.assert_close(values_of(model), values_of(alone), rtol=0, atol=0)
    assert train(model, optimizer, range(3)) == train(alone, its_optimizer, range(3))
