"""MS-AMP's levels through stock Accelerate: accumulation, clipping, loss scaling, checkpoints,
Trainer."""

import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from plugin_training import batches, mlp, run_python, train

import fp8_backends
from fp8_backends.errors import RecipeError
from fp8_backends.tensors.scaled_tensor import ScaledTensor


def accelerator(level: str, autocast: str = "bf16", steps: int = 1, **fields) -> Accelerator:
    recipe = fp8_backends.FP8RecipeKwargs(
        backend=f"msamp:{level}", autocast_dtype=autocast, **fields
    )
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False)
    return Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=[recipe],
        gradient_accumulation_plugin=plugin,
        cpu=True,
    )


def prepared(acc: Accelerator, lr: float = 5e-3, **options):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return acc.prepare(model, optimizer, scheduler)


@pytest.mark.parametrize(
    ("level", "autocast"),
    [("O1", "bf16"), ("O2", "fp16"), ("O3", "fp32"), ("O4", "bf16")],
)
def test_level_trains_clips_and_resumes_bitwise(level, autocast, tmp_path):
    acc = accelerator(level, autocast)
    parts = prepared(acc)
    data = [batches(1, seed=1)[0]] * 30
    losses = train(acc, *parts[:2], data[:20], parts[2], max_norm=1.0)
    assert losses[-1] < losses[0] and parts[1].param_groups[0]["lr"] < 5e-3
    products = fp8_backends.audit(parts[0]).products
    assert all(counts["fprop"] and counts["wgrad"] for counts in products.values())
    acc.save_state(str(tmp_path))
    unbroken = train(acc, *parts[:2], data[20:], parts[2], max_norm=1.0)
    after = {name: value.clone() for name, value in parts[0].state_dict().items()}
    acc.load_state(str(tmp_path))
    assert train(acc, *parts[:2], data[20:], parts[2], max_norm=1.0) == unbroken
    assert all(torch.equal(after[name], value) for name, value in parts[0].state_dict().items())


RESUME = """
import sys
sys.path.insert(0, {tests!r})
import torch
from plugin_training import batches, train
from test_plugin_levels import accelerator, prepared

acc = accelerator("O4")
parts = prepared(acc)
if {load}:
    acc.load_state({folder!r})
else:
    train(acc, *parts[:2], batches(20, seed=1), parts[2])
    acc.save_state({folder!r})
scaling = [layer.fp8_scaling.tolist() for layer in parts[0].modules() if hasattr(layer, "fp8_scaling")]
losses = train(acc, *parts[:2], batches(10, seed=2), parts[2])
total = sum(value.double().sum().item() for value in parts[0].state_dict().values())
print("resumed", scaling, [loss.hex() for loss in losses], total.hex())
"""


def test_new_process_resumes_bitwise(tmp_path):
    """More than 16 steps before it: the scaling windows are in their delayed phase."""
    tests, told = __file__.rpartition("/")[0], []
    for load in (False, True):
        script = tmp_path / "script.py"
        folder = str(tmp_path / "state")
        script.write_text(RESUME.format(tests=tests, load=load, folder=folder))
        output = run_python(str(script), sys.executable)
        told.append(next(line for line in output.splitlines() if line.startswith("resumed")))
    # the windows themselves: lost ones often choose the same powers of two
    assert told[0].startswith("resumed [[[")
    assert told[0] == told[1]


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_accumulated_gradient_is_cast_once(level):
    acc = accelerator(level, steps=4)
    model, optimizer, _ = prepared(acc)
    weight, seen = acc.unwrap_model(model)[0].weight, []
    for x, y in batches(4, seed=1):
        with acc.accumulate(model):
            acc.backward((model(x) - y).square().mean())
            seen.append(weight.grad.codes.dtype)
            optimizer.step()
            optimizer.zero_grad() if acc.sync_gradients else None
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    assert seen == [fp8, fp32, fp32, fp8]


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4"])
def test_loss_scaler_reports_true_norms(level):
    """Stock Accelerate reports MS-AMP's norms 65536 times too large."""
    norms = []
    for autocast in ("fp16", "fp32"):
        acc = accelerator(level, autocast)
        model, optimizer, _ = prepared(acc)
        x, y = batches(1, seed=1)[0]
        acc.backward((model(x) - y).square().mean())
        norms.append(acc.clip_grad_norm_(model.parameters(), 0.5).item())
        gradients = [p.grad for p in model.parameters()]
        total = torch.stack([torch.linalg.vector_norm(_plain(g)) for g in gradients]).norm().item()
        assert total == pytest.approx(min(0.5, norms[-1]), rel=1e-3)
        optimizer.step()
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.dequantize() if isinstance(gradient, ScaledTensor) else gradient


@pytest.mark.parametrize(("at", "level"), [(0, "O2"), (3, "O3"), (20, "O1"), (20, "O4")])
def test_loss_scaler_skips_non_finite_step(level, at):
    acc = accelerator(level, "fp16")
    model, optimizer, scheduler = prepared(acc)
    data = [batches(1, seed=1)[0]] * (at + 1)
    train(acc, model, optimizer, data[:-1], scheduler)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scale = acc.scaler.get_scale()
    x, y = data[-1]
    acc.backward((model(x) - y).square().mean() * float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped and acc.scaler.get_scale() < scale
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    losses = train(acc, model, optimizer, [data[0]] * 20, scheduler)
    assert losses[-1] < losses[0] and all(
        torch.isfinite(v).all() for v in model.state_dict().values()
    )


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_gradient_release_matches_usual_order_and_refuses_clipping(level):
    data = batches(3, seed=1)
    usual, acc = accelerator(level), accelerator(level, gradient_release=True)
    theirs, ours = prepared(usual), prepared(acc)
    assert train(acc, *ours[:2], data, ours[2]) == train(usual, *theirs[:2], data, theirs[2])
    for value, other in zip(
        ours[0].state_dict().values(), theirs[0].state_dict().values(), strict=True
    ):
        assert torch.equal(value, other)
    for clip in (acc.clip_grad_norm_, acc.clip_grad_value_):
        with pytest.raises(
            RecipeError,
            match=r"gradient_release.*max_grad_norm=0\.5.*clip nothing \(max_grad_norm=0",
        ):
            clip(ours[0].parameters(), 0.5)
    assert acc.clip_grad_norm_(ours[0].parameters(), float("inf")).isnan(), (
        "a Trainer only asks for the norm"
    )


def test_gradient_release_refuses_accumulation():
    with pytest.raises(RecipeError, match="gradient_release.*gradient_accumulation_steps=2"):
        accelerator("O2", steps=2, gradient_release=True)


def test_gradient_release_refuses_trainer_clipping_and_accumulation(tmp_path, monkeypatch):
    from transformers import Trainer, TrainingArguments

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp:O2")
    monkeypatch.setenv("ACCELERATE_FP8_GRADIENT_RELEASE", "true")
    for arguments, refused in (
        ({}, "max_grad_norm=1.*max_grad_norm=0 in TrainingArguments"),
        ({"max_grad_norm": 0, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
    ):
        with pytest.raises(RecipeError, match=refused):
            Trainer(mlp(), TrainingArguments(str(tmp_path), use_cpu=True, **arguments))


def test_fsdp1_is_refused_with_fix():
    acc = accelerator("O2")
    AcceleratorState._shared_state |= {  # as on GPUs; on a CPU Accelerate takes no FSDP
        "distributed_type": DistributedType.FSDP,
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1),
    }
    model = mlp()
    with pytest.raises(RecipeError, match="fsdp_version=2"):
        acc.prepare(model)
    assert not any(isinstance(p, ScaledTensor) for p in model.parameters())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_distributed_checkpoint_saves_and_loads(level, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    acc = accelerator(level)
    model, optimizer, scheduler = prepared(acc)
    train(acc, model, optimizer, batches(5, seed=1), scheduler)
    inner = optimizer.optimizer
    weights, states = get_state_dict(model, inner)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(tmp_path))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [inner.state[p]["exp_avg"].clone() for p in model.parameters()]
    train(acc, model, optimizer, batches(5, seed=2), scheduler)
    weights, states = get_state_dict(model, inner)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=str(tmp_path))
    set_state_dict(model, inner, model_state_dict=weights, optim_state_dict=states)
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    for p, moment in zip(model.parameters(), moments, strict=True):
        assert torch.equal(_plain(inner.state[p]["exp_avg"]), _plain(moment))
