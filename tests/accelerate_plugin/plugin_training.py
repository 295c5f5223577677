"""Share small models, data and loops between the tests of the Accelerate plug-in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import fp8_backends


def mlp(seed: int = 0, width: int = 64) -> nn.Sequential:
    """Return three Linear layers, 32 -> width -> width -> 16, in sizes divisible by 16."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16)
    )


def batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(32, 16, generator=generator)
    inputs = [torch.randn(16, 32, generator=generator) for _ in range(count)]
    return [(x, torch.tanh(x @ teacher)) for x in inputs]


def train(accelerator, model, optimizer, data, scheduler=None, max_norm=None) -> list[float]:
    """The usual Accelerate loop; the loss of each batch."""
    losses = []
    for x, y in data:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x.to(accelerator.device)), y.to(accelerator.device))
            accelerator.backward(loss)
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def copied_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_all_moved(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    still = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and torch.equal(p, before[name])
    ]
    assert not still, f"did not train: {still}"


def assert_fp8_products(model: nn.Module, layers: int) -> None:
    """Assert that exactly `layers` layers ran forward, wgrad and dgrad (the first layer's input
    needs none)."""
    products = fp8_backends.audit(model).products
    assert len(products) == layers
    for name, counts in products.items():
        assert counts["fprop"] > 0 and counts["wgrad"] > 0, name
    assert sum(counts["dgrad"] > 0 for counts in products.values()) >= layers - 1


def run_python(script: str, *launcher: str, timeout: int = 120, **environment: str) -> str:
    """Run a script in its own process, under `launcher`, and return its output, shown on failure.
    `warm_process` replaces a leading `sys.executable`."""
    repository = str(Path(fp8_backends.__file__).parent.parent)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FP8_"))
    }
    clean |= {"PYTHONPATH": repository, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # stock Accelerate imports DeepSpeed, which prints its device
    clean |= {"DS_ACCELERATOR": "cpu"}
    import warm_process  # tests/ is not on the path of the scripts that import this file

    assert launcher[:1] in ((), (sys.executable,)), launcher
    done = warm_process.run(*launcher[1:], script, env=clean | environment, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
