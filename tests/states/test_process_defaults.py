"""Training an FP32 model on a CPU gives the same numbers at any default dtype and default device of
the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from level_steps import LEVELS, mlp

import fp8_backends
from fp8_backends.compute.native import NativeCompute

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-3),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run(dtype: torch.dtype, spec: dict, optimizer: str) -> tuple[list[float], dict]:
    """Losses, and the final values: of steps, of a step after loading, and of writes into
    weights."""
    model = mlp()
    with default_dtype(dtype):
        model, optimizer = fp8_backends.prepare(
            model, OPTIMIZERS[optimizer](model.parameters()), spec
        )
        losses = train_in_fp32(model, optimizer, range(3))
        optimizer.load_state_dict(optimizer.state_dict())
        with torch.no_grad():
            model[0].weight.fill_(0.5).mul_(1.5)
        losses += train_in_fp32(model, optimizer, range(3, 5))
        return losses, model.state_dict()


def train_in_fp32(model, optimizer, seeds) -> list[float]:
    """Train on the same data at each default dtype."""
    with default_dtype(torch.float32):
        batches = [
            torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) for seed in seeds
        ]
    losses = []
    for x in batches:
        losses.append((model(x) - x).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spec, optimizer, dtype",
    [
        ({"backend": "native:delayed", "guard": "warn"}, "adamw", torch.float64),
        ({"backend": "ao"}, "adamw", torch.bfloat16),
        ({"backend": "msamp:O1"}, "adamw", torch.float64),
        ({"backend": "msamp:O2"}, "sgd", torch.bfloat16),
        ({"backend": "msamp:O3", "guard": "skip"}, "adamw", torch.float64),
        ({"backend": "msamp:O4"}, "adamw", torch.bfloat16),
        ({"backend": "msamp:O4"}, "adafactor", torch.float64),
    ],
    ids=str,
)
def test_default_dtype_changes_no_bit(spec, optimizer, dtype):
    wanted, weights = run(torch.float32, spec, optimizer)
    found, found_weights = run(dtype, spec, optimizer)
    assert found == wanted
    assert {name: value.dtype for name, value in found_weights.items()} == dict.fromkeys(
        weights, torch.float32
    )
    assert all(torch.equal(value, weights[name]) for name, value in found_weights.items())


def losses_under(device: str, spec: dict, make_optimizer) -> tuple[list[float], dict]:
    """Losses of three steps under a default device, and the final values."""
    model = mlp()
    with torch.device(device):
        model, optimizer = fp8_backends.prepare(model, make_optimizer(model.parameters()), spec)
    losses = []
    for seed in range(3):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))
        with torch.device(device):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


SPECS = [
    *({"backend": f"native:{scaling}"} for scaling in NativeCompute.scalings),
    {"backend": "native:dynamic", "saved_activations": "fp8"},
    {"backend": "native:dynamic", "guard": "skip", "monitor_every": 1},
    {"backend": "native:dynamic", "schedule": {1: "bf16"}},
    {"backend": "ao:rowwise"},
    *({"backend": f"msamp:{level}"} for level in LEVELS),
    {"backend": "msamp:O4", "gradient_release": True},
]


@pytest.mark.nightly
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_default_device_changes_no_bit(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stock = "+msamp" not in str(fp8_backends.resolve(spec))
    # stock AdamW puts its counters on the default device, and fails
    make_optimizer = OPTIMIZERS["sgd" if stock else "adamw"]
    wanted, weights = losses_under("cpu", spec, make_optimizer)
    found, found_weights = losses_under("meta", spec, make_optimizer)
    assert found == wanted
    assert all(torch.equal(value, weights[name]) for name, value in found_weights.items())
