"""The precision around FP8: bf16 by default, fp16 with a loss scaler (NeMo's fp16_with_fp8_mixed),
or fp32."""

from __future__ import annotations

import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, GradScalerKwargs
from plugin_training import (
    assert_all_moved,
    assert_fp8_products,
    batches,
    copied_parameters,
    mlp,
    train,
)
from torch import nn

import fp8_backends
from fp8_backends.compute import hardware


def accelerator_with(autocast_dtype: str, *handlers) -> Accelerator:
    recipe = fp8_backends.NativeRecipeKwargs(autocast_dtype=autocast_dtype)
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe, *handlers])


def prepared(accelerator) -> tuple[nn.Module, torch.optim.Optimizer, list[torch.dtype]]:
    """Return model and optimizer, and the list of the dtypes of its activations."""
    model, seen = mlp(), []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    return *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1)), seen


@pytest.mark.parametrize(
    "name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_autocast_dtype_rules_activations_and_outputs_are_fp32(name, dtype):
    accelerator = accelerator_with(name)
    model, optimizer, seen = prepared(accelerator)
    before = copied_parameters(model)
    assert model(batches(1)[0][0]).dtype == torch.float32
    train(accelerator, model, optimizer, batches(3))
    assert set(seen) == {dtype}
    assert_all_moved(model, before)
    assert_fp8_products(model, layers=3)
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == dtype


@pytest.fixture
def cpu_without_bf16(monkeypatch):
    """Report no bf16 support to the package; its products follow."""
    monkeypatch.setattr(hardware, "cpu_bf16", lambda: False)


def test_cpu_without_bf16_runs_fp32_around_fp8_with_notice(cpu_without_bf16, caplog):
    with caplog.at_level("INFO", logger="fp8_backends"):
        accelerator = Accelerator(
            mixed_precision="fp8", kwargs_handlers=[fp8_backends.NativeRecipeKwargs()]
        )
        model, optimizer, seen = prepared(accelerator)
        train(accelerator, model, optimizer, batches(3))
        Accelerator(mixed_precision="fp8", kwargs_handlers=[fp8_backends.NativeRecipeKwargs()])
    assert accelerator.fp8_autocast_dtype == "fp32" and set(seen) == {torch.float32}
    assert set(fp8_backends.audit(model).engine.values()) == {"fp32-exact"}
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    said = [record.getMessage() for record in caplog.records if "around FP8" in record.getMessage()]
    assert len(said) == 1 and "autocast_dtype='bf16'" in said[0]


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_explicit_autocast_dtype_without_bf16_warns(name, dtype, cpu_without_bf16, caplog):
    accelerator = accelerator_with(name)
    model, optimizer, seen = prepared(accelerator)
    train(accelerator, model, optimizer, batches(1))
    assert set(seen) == {dtype}
    assert [
        record.levelname for record in caplog.records if "slow_autocast" in record.getMessage()
    ] == ["WARNING"]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_autocast_handler_is_honoured(name):
    accelerator = accelerator_with(name, AutocastKwargs(enabled=False))
    model, optimizer, seen = prepared(accelerator)
    train(accelerator, model, optimizer, batches(1))
    assert seen == [torch.float32]
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    with accelerator.autocast(AutocastKwargs(enabled=True)):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype != torch.float32


def test_only_fp16_has_a_loss_scaler():
    assert accelerator_with("bf16").scaler is None
    assert accelerator_with("fp32").scaler is None
    scaler = accelerator_with("fp16", GradScalerKwargs(init_scale=32.0, growth_interval=7)).scaler
    assert scaler.is_enabled() and scaler.get_scale() == 32.0 and scaler.get_growth_interval() == 7


def test_fp16_clips_to_the_true_norm():
    accelerator = accelerator_with("fp16", GradScalerKwargs(init_scale=1024.0))
    model, optimizer, _ = prepared(accelerator)
    x, y = batches(1)[0]
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    scaled = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(norm * 1024, scaled)
    torch.testing.assert_close(
        torch.stack([p.grad.norm() for p in model.parameters()]).norm(), norm
    )


def test_fp16_loss_scale_is_part_of_save_state(tmp_path):
    accelerator = accelerator_with("fp16", GradScalerKwargs(init_scale=64.0, growth_interval=2))
    model, optimizer, _ = prepared(accelerator)
    train(accelerator, model, optimizer, batches(3))
    saved = accelerator.scaler.state_dict()
    accelerator.save_state(str(tmp_path))
    train(accelerator, model, optimizer, batches(3))
    assert accelerator.scaler.state_dict() != saved
    accelerator.load_state(str(tmp_path))
    assert accelerator.scaler.state_dict() == saved


def test_fp16_accelerator_pickles():
    loaded = pickle.loads(pickle.dumps(accelerator_with("fp16")))
    model, optimizer, seen = prepared(loaded)
    train(loaded, model, optimizer, batches(1))
    assert seen == [torch.float16]
