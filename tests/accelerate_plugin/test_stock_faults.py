"""Test the absence of each known FP8 fault of stock Accelerate 1.15.

Numbers follow the project's list of proven faults. For faults in stock code around the GPU-only
TransformerEngine and MS-AMP, the test sends the same request to the native compute.
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
from fp8_backends.convert.conversion import restore


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


def test_fault_01_torchao_weights_train():
    """Use Accelerate's own handler and its defaults, including
    `enable_fsdp_float8_all_gather=True`."""
    model = mlp()
    before = copied_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    accelerator = fp8_accelerator(accelerate.utils.AORecipeKwargs())
    prepared, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, prepared, optimizer, batches(3))
    assert_all_moved(model, before)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert all(p.grad is None for p in model.parameters())


def test_fault_02_torchao_models_save(tmp_path):
    accelerator, model, _ = trained(accelerate.utils.AORecipeKwargs(), mlp(), batches(2))
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_model(model, str(tmp_path / "export"))
    for file in ("state/model.safetensors", "export/model.safetensors"):
        saved = load_file(tmp_path / file)
        assert saved.keys() == mlp().state_dict().keys()
        assert all(torch.equal(saved[name], p) for name, p in model.named_parameters())


# 8 to 12: conversion


class Awkward(nn.Module):
    """Put one Linear of odd sizes before its siblings."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Linear(32, 25)
        self.back = nn.Linear(25, 32)
        self.even = nn.Linear(32, 64)
        self.last = nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.even(self.back(torch.relu(self.odd(x))))))


def test_fault_08_siblings_of_odd_layer_convert():
    torch.manual_seed(0)
    model = Awkward()
    before = copied_parameters(model)
    trained("native", model, batches(2))
    assert_all_moved(model, before)
    assert_fp8_products(model, layers=4)


class Tied(nn.Module):
    """Tie the embedding to the output projection, and use one block twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.block = nn.Linear(32, 32)
        self.again = self.block
        self.projection = nn.Linear(32, 16, bias=False)
        self.projection.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.embedding(x.argmax(1) % 16)
        return self.projection(torch.relu(self.again(torch.relu(self.block(hidden)))))


def test_fault_09_ties_and_shared_modules_survive():
    torch.manual_seed(0)
    model = Tied()
    weight = model.embedding.weight
    before = copied_parameters(model)
    trained("native", model, batches(3), lambda parameters: torch.optim.AdamW(parameters, 1e-2))
    assert model.projection.weight is model.embedding.weight is weight
    assert model.block is model.again
    assert_all_moved(model, before)
    products = fp8_backends.audit(model).products
    assert products["block"]["fprop"] == products["block"]["wgrad"] == 6


def test_fault_10_frozen_flags_eval_mode_and_hooks_survive():
    model = mlp()
    model[0].requires_grad_(False)
    model[4].eval()
    seen = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    frozen, before = model[0].weight.clone(), copied_parameters(model)
    trained("native", model, batches(3))
    assert torch.equal(model[0].weight, frozen) and not model[0].weight.requires_grad
    assert not model[4].training and model[2].training
    assert seen == [(16, 64)] * 3
    assert_all_moved(model, before)


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


@pytest.mark.parametrize("backend", ["native:delayed", "ao:tensorwise"])
def test_fault_12_conversion_restores(backend):
    accelerator, model, _ = trained(backend, mlp(), batches(2))
    weights = copied_parameters(model)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    restore(model)
    assert all(type(layer) is nn.Linear for layer in model[::2])
    x, y = batches(1)[0]
    twin = mlp()
    twin.load_state_dict(weights)
    assert torch.equal(model(x), twin(x))
    nn.functional.mse_loss(model(x), y).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert_all_moved(model, weights)


# 13, 14: arguments of prepare


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


def test_fault_14_optimizers_with_state_and_foreign_parameters():
    model = mlp()
    foreign = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": [foreign]}], 1e-2)
    for x, y in batches(2):
        (nn.functional.mse_loss(model(x), y) + foreign.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    before, moments = copied_parameters(model), optimizer.state[model[0].weight]["exp_avg"].clone()
    accelerator = fp8_accelerator("native")
    model, prepared = accelerator.prepare(model, optimizer)
    assert torch.equal(prepared.state[model[0].weight]["exp_avg"], moments)
    train(accelerator, model, prepared, batches(2))
    assert optimizer.state[model[0].weight]["step"] == 4
    assert_all_moved(model, before)


# 15, 16: a value given is a value used


def losses_with(**fields) -> list[float]:
    recipe = fp8_backends.FP8RecipeKwargs(backend="native:delayed", **fields)
    growing = [(x * 2.0**i, y) for i, (x, y) in enumerate(batches(6))]
    return trained(recipe, mlp(), growing)[2]


def test_fault_15_explicit_defaults_are_kept():
    assert (
        losses_with(amax_compute_algo="max")
        == losses_with()
        != losses_with(amax_compute_algo="most_recent")
    )
    recipe = fp8_backends.resolve(
        fp8_backends.TERecipeKwargs(amax_compute_algo="most_recent", margin=0)
    )
    assert recipe.to_kwargs() == {"backend": "te", "amax_compute_algo": "most_recent", "margin": 0}
    assert (recipe.amax_compute_algo, recipe.fp8_format, recipe.amax_history_len) == (
        "most_recent",
        "HYBRID",
        1024,
    )


def test_fault_16_interval_and_override_change_the_numbers():
    assert losses_with(interval=3) != losses_with()
    assert losses_with(override_linear_precision=(False, False, True)) != losses_with()


# 22, 24, 25, 27


@pytest.mark.parametrize("backend", ["ao", "AO", "TE", "native"])
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


@pytest.mark.parametrize("autocast_dtype", ["bf16", "fp16", "fp32"])
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
