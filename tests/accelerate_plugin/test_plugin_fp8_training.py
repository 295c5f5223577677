"""Training through `Accelerator(mixed_precision="fp8")`: losses, parameters and product counts."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from plugin_training import (
    assert_all_moved,
    assert_fp8_products,
    batches,
    copied_parameters,
    mlp,
    train,
)
from torch import nn
from widths import nightly

import fp8_backends
from fp8_backends.compute import hardware
from fp8_backends.errors import FP8BackendError, RecipeError


def fp8_accelerator(
    backend: str = "native", handlers=(), accumulate: int = 1, **fields
) -> Accelerator:
    return Accelerator(
        mixed_precision="fp8",
        gradient_accumulation_steps=accumulate,
        kwargs_handlers=[fp8_backends.FP8RecipeKwargs(backend=backend, **fields), *handlers],
    )


def test_ao_losses_match_raw_torchao_loop():
    """Compare `ao` through Accelerate with TorchAO's documented loop, bit for bit on one device."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = mlp()
    twin = convert_to_float8_training(
        copy.deepcopy(model), config=Float8LinearConfig(pad_inner_dim=True)
    )
    accelerator = fp8_accelerator("ao")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 5e-3))
    losses = train(accelerator, model, optimizer, batches(6))

    optimizer, raw = torch.optim.AdamW(twin.parameters(), 5e-3), []
    for x, y in batches(6):
        with hardware.fast_autocast("cpu"):
            output = twin(x)
        loss = nn.functional.mse_loss(output.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        raw.append(loss.item())
    assert losses == raw


def test_optimizer_may_be_prepared_before_the_model():
    accelerator = fp8_accelerator()
    model = mlp()
    before = copied_parameters(model)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    model = accelerator.prepare_model(model)
    train(accelerator, model, optimizer, batches(2))
    assert_all_moved(model, before)
    assert_fp8_products(model, layers=3)


def test_model_without_optimizer_prepares_for_evaluation():
    accelerator = fp8_accelerator()
    model = mlp().eval()
    x = batches(1)[0][0]
    with torch.no_grad(), hardware.fast_autocast("cpu"):
        expected = model(x).float()
    model = accelerator.prepare_model(model, evaluation_mode=True)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert not model.training


def test_weightless_module_prepares():
    accelerator = fp8_accelerator()
    model = mlp()
    before = copied_parameters(model)
    model, optimizer, loss_function = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss()
    )
    x, y = batches(1)[0]
    accelerator.backward(loss_function(model(x), y))
    optimizer.step()
    assert_all_moved(model, before)


def test_network_without_linear_layers_trains_with_converted_model(caplog):
    accelerator = fp8_accelerator()
    convolution, model = nn.Conv1d(2, 2, 3), mlp()
    before = copied_parameters(convolution)
    optimizer = torch.optim.SGD([*convolution.parameters(), *model.parameters()], 0.1)
    convolution, model, optimizer = accelerator.prepare(convolution, model, optimizer)
    accelerator.backward(convolution(torch.ones(1, 2, 8)).sum() + model(torch.ones(4, 32)).sum())
    optimizer.step()
    assert_all_moved(convolution, before)
    assert_fp8_products(model, layers=3)
    assert "Conv1d has no layer for FP8" in caplog.text


def test_fp8_without_any_linear_layer_is_refused():
    with pytest.raises(FP8BackendError, match="convolution: FP8 has no product for it"):
        fp8_accelerator().prepare(nn.Conv1d(2, 2, 3))
    with pytest.raises(FP8BackendError, match="no Linear"):
        fp8_accelerator().prepare(nn.LayerNorm(32))


def test_backward_without_a_prepared_model_raises():
    model, x = mlp(), batches(1)[0][0]
    with pytest.raises(
        FP8BackendError, match=r"prepared no model.*write model, optimizer = accelerator\.prepare"
    ):
        fp8_accelerator().backward(model(x).sum())
    assert all(p.grad is None for p in model.parameters())
    with pytest.warns(UserWarning, match="prepared no model"):
        fp8_accelerator(on_unproven="warn").backward(model(x).sum())
    accelerator = fp8_accelerator()
    trained = accelerator.prepare(model)
    fp8_backends.restore(trained)  # and trains on in high precision
    accelerator.backward(trained(x).sum())


@pytest.mark.parametrize("backend", ["native:dynamic", "msamp:O2"])
def test_unprepared_optimizer_warns_once_after_first_backward(backend, caplog):
    accelerator, x = fp8_accelerator(backend), batches(1)[0][0]
    model = accelerator.prepare(mlp())
    model(x)
    assert caplog.messages == []
    for _ in range(2):
        accelerator.backward(model(x).sum())
    (told,) = caplog.messages
    assert told.startswith(f"{backend}: Sequential got gradients and its optimizer is not prepared")
    assert ("level O2 does not reach its states" in told) == (backend == "msamp:O2")


def test_unprepared_optimizer_warns_for_each_model(caplog):
    """Train a GAN with a separate backward per model and one forgotten optimizer."""
    accelerator, x = fp8_accelerator(), batches(1)[0][0]
    first, second = mlp(), mlp(1)
    first, optimizer = accelerator.prepare(first, torch.optim.SGD(first.parameters(), 0.1))
    second = accelerator.prepare(second)
    for model in (first, second, first, second):
        accelerator.backward(model(x).sum())
        optimizer.step()
    assert len(caplog.messages) == 1 and "its optimizer is not prepared" in caplog.messages[0]


def test_frozen_models_need_no_optimizer(caplog):
    accelerator, x = fp8_accelerator(), batches(1)[0][0]
    evaluated, teacher, model = accelerator.prepare(mlp(1), mlp(2).requires_grad_(False), mlp())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))  # apart, and later
    with torch.no_grad():
        evaluated.eval()(x)
    accelerator.backward((model(x) - teacher(x)).square().sum())
    optimizer.step()
    assert caplog.messages == []


@pytest.mark.parametrize("prepared_first", ["model", "optimizer"])
def test_separately_prepared_foreign_optimizer_is_refused_at_first_step(prepared_first):
    accelerator, model = fp8_accelerator(), mlp()
    objects = {"model": model, "optimizer": torch.optim.SGD(mlp().parameters(), 0.1)}
    names = [prepared_first, *objects.keys() - {prepared_first}]
    objects |= {name: accelerator.prepare(objects[name]) for name in names}
    with pytest.raises(FP8BackendError, match="holds no parameter of the prepared model"):
        train(accelerator, objects["model"], objects["optimizer"], batches(1))


def test_optimizer_may_hold_extra_parameters():
    accelerator, model = fp8_accelerator(), mlp()
    temperature = nn.Parameter(torch.ones(()))
    beside = accelerator.prepare(torch.optim.SGD([temperature], 0.1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    temperature.grad = torch.ones(())
    beside.step()
    train(accelerator, model, optimizer, batches(1))
    assert temperature.item() == pytest.approx(0.9)
    assert_fp8_products(model, layers=3)


@pytest.mark.parametrize("backend", ["native:delayed", nightly("ao:tensorwise")])
def test_compiled_losses_match_eager(backend):
    losses = []
    for dynamo_backend in (None, "eager"):
        recipe = fp8_backends.FP8RecipeKwargs(backend=backend)
        accelerator = Accelerator(
            mixed_precision="fp8", kwargs_handlers=[recipe], dynamo_backend=dynamo_backend
        )
        model = mlp()
        before = copied_parameters(model)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        losses.append(train(accelerator, prepared, optimizer, batches(4)))
        assert_all_moved(model, before)
        assert_fp8_products(model, layers=3)
        assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
        AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[0] == losses[1]


def test_megatron_is_refused():
    accelerator = fp8_accelerator()
    AcceleratorState._shared_state["distributed_type"] = DistributedType.MEGATRON_LM
    with pytest.raises(RecipeError, match="Megatron"):
        accelerator.prepare(mlp())
