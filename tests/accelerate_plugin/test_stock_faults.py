"""Test the absence of each known FP8 fault of stock Accelerate 1.15.

Numbers follow the project's list of proven faults. For faults in stock code around the GPU-only
TransformerEngine and MS-AMP, the test sends the same request to the native compute. Faults 8 to 10,
12 and 14, in the conversion, are those of `convert/test_conversion.py`.
"""

from __future__ import annotations

import copy
import functools

import accelerate.utils
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import DummyOptim
from plugin_training import (
    assert_all_moved,
    assert_fp8_products,
    batches,
    copied_parameters,
    mlp,
    train,
)
from safetensors.torch import load_file
from torch import nn

import fp8_backends


def fp8_accelerator(handler) -> Accelerator:
    if isinstance(handler, str):
        handler = fp8_backends.FP8RecipeKwargs(backend=handler)
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[handler])


def trained(handler, model, data, make_optimizer=None):
    """(accelerator, prepared model, losses) after training on `data`."""
    accelerator = fp8_accelerator(handler)
    make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, 0.1))
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    return accelerator, model, train(accelerator, model, optimizer, data)


# 1, 2: TorchAO's weights never train, and cannot be saved


def test_faults_01_and_02_torchao_weights_train_and_save(tmp_path):
    """Use Accelerate's own handler and its defaults, including
    `enable_fsdp_float8_all_gather=True`."""
    model = mlp()
    before = copied_parameters(model)
    accelerator, prepared, _ = trained(
        accelerate.utils.AORecipeKwargs(), model, batches(3), torch.optim.AdamW
    )
    assert_all_moved(model, before)
    (optimizer,) = accelerator._optimizers
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert all(p.grad is None for p in model.parameters())
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_model(prepared, str(tmp_path / "export"))
    for file in ("state/model.safetensors", "export/model.safetensors"):
        saved = load_file(tmp_path / file)
        assert saved.keys() == before.keys()
        assert all(torch.equal(saved[name], p) for name, p in model.named_parameters())


# 11 and 13: conversion, and arguments of prepare


def test_fault_11_norms_and_missing_biases_stay_unchanged():
    torch.manual_seed(0)
    norms = nn.LayerNorm(64, elementwise_affine=False), nn.RMSNorm(64), nn.LayerNorm((64,))
    layers = nn.Linear(32, 64, bias=False), nn.Linear(64, 64), nn.Linear(64, 16, bias=False)
    model = nn.Sequential(layers[0], norms[0], layers[1], norms[1], norms[2], layers[2])
    names, before = list(model.state_dict()), copied_parameters(model)
    trained("native", model, batches(2))
    assert list(model.state_dict()) == names
    assert model[0].bias is None and tuple(model[1:5:2]) == norms[:2]
    assert_all_moved(model, before)
    assert_fp8_products(model, layers=3)


def test_fault_13_one_or_several_models_and_dummy_optimizers():
    accelerator = fp8_accelerator("native:delayed")
    alone = accelerator.prepare(mlp(0))
    with torch.no_grad():
        assert alone(batches(1)[0][0]).isfinite().all()
    model, other, dummy = mlp(1), mlp(2), DummyOptim([])
    before = copied_parameters(model), copied_parameters(other)
    model, other, optimizer, dummy = accelerator.prepare(
        model, other, torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1), dummy
    )
    x, y = batches(1)[0]
    accelerator.backward(nn.functional.mse_loss(model(x), y) + nn.functional.mse_loss(other(x), y))
    optimizer.step()
    assert_all_moved(model, before[0])
    assert_all_moved(other, before[1])


# 15, 16: a value given is a value used


def losses_with(**fields) -> list[float]:
    recipe = fp8_backends.FP8RecipeKwargs(backend="native:delayed", **fields)
    growing = [(x * 2.0**i, y) for i, (x, y) in enumerate(batches(6))]
    return trained(recipe, mlp(), growing)[2]


def test_faults_15_and_16_given_values_change_the_numbers():
    usual = losses_with()
    assert losses_with(amax_compute_algo="max") == usual
    for fields in (
        {"amax_compute_algo": "most_recent"},
        {"interval": 3},
        {"override_linear_precision": (False, False, True)},
    ):
        assert losses_with(**fields) != usual, fields


# 22, 24, 25


@pytest.mark.parametrize("backend", ["AO", "native"])
def test_fault_22_backend_variable_has_no_effect_without_fp8(backend, monkeypatch, caplog):
    def bf16_run():
        model = mlp()
        accelerator = Accelerator(mixed_precision="bf16")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        return accelerator, train(accelerator, model, optimizer, batches(3))

    _, expected = bf16_run()
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    accelerator, losses = bf16_run()
    assert losses == expected
    assert f"ACCELERATE_FP8_BACKEND={backend} has no effect" in caplog.text
    assert accelerator.fp8_backend == "NO" and not accelerator.fp8_enabled


def doubled(forward):
    @functools.wraps(forward)
    def wrapper(self, x):
        return 2 * forward(self, x)

    return wrapper


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = mlp()

    @doubled
    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("autocast_dtype", ["bf16", "fp16"])
def test_fault_24_unwrapping_keeps_the_users_decorators(autocast_dtype):
    recipe = fp8_backends.NativeRecipeKwargs(autocast_dtype=autocast_dtype)
    accelerator, model, _ = trained(recipe, Decorated(), batches(2))
    assert torch.equal(model(batches(1)[0][0]), model(batches(1)[0][0]))
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    x = batches(1)[0][0]
    unwrapped.eval()
    assert "forward" not in vars(unwrapped)
    assert torch.equal(unwrapped(x), 2 * unwrapped.layer(x))


def test_fault_24_unwrapping_keeps_instance_forward():
    model = mlp()
    plain = model.forward
    model.forward = doubled(lambda self, x: plain(x)).__get__(model)
    given = model.forward
    accelerator, model, _ = trained("native", model, batches(1))
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False).forward == given


def test_fault_24_copied_model_runs_its_own_weights():
    accelerator, model, _ = trained("native:delayed", mlp(), batches(2))
    twin = copy.deepcopy(accelerator.unwrap_model(model, keep_fp32_wrapper=False)).eval()
    x = batches(1)[0][0]
    before = twin(x)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(twin(x), before) and before.abs().max() > 0


def test_fault_25_filters_apply_and_tiny_models_convert():
    def first_and_last_stay(module, name):
        return name not in ("0", "4")

    handler = accelerate.utils.AORecipeKwargs(module_filter_func=first_and_last_stay)
    _, model, _ = trained(handler, mlp(), batches(2))
    assert list(fp8_backends.audit(model).products) == ["2"]

    torch.manual_seed(0)
    two = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    _, model, _ = trained(accelerate.utils.AORecipeKwargs(), two, batches(2))
    assert list(fp8_backends.audit(model).products) == ["0", "2"]
