"""Run the logic of Accelerate's own tests and examples over our backends: shared parts of
`test_ported_*`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from plugin_training import batches, mlp
from torch import nn
from torch.utils.data import DataLoader

import fp8_backends

BACKENDS = ("native:dynamic", "native:delayed", "ao:tensorwise", "msamp:O2", "msamp:O3")
"""One of each kind: stateless and stateful scaling, TorchAO's layers, and two ways to store
weights."""


def fresh_accelerator(backend: str, fields: dict | None = None, **arguments) -> Accelerator:
    """A new `Accelerator`, as a new process would make it."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **(fields or {}))
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], **arguments)


class Tied(nn.Module):
    """Share weight and bias between two layers, as `ModelWithTiedWeights` of Accelerate's tests."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear1, self.linear2 = nn.Linear(32, 32), nn.Linear(32, 32)
        self.linear2.weight, self.linear2.bias = self.linear1.weight, self.linear1.bias

    def forward(self, x):
        return self.linear2(self.linear1(x))


def components(model: nn.Module | None = None, count: int = 3) -> tuple:
    """Return (model, optimizer, scheduler, loader), unprepared, as `create_components` does."""
    model = mlp() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.01, steps_per_epoch=2 * count, epochs=1
    )
    rows = [row for batch in batches(count) for row in zip(*batch, strict=True)]
    return model, optimizer, scheduler, DataLoader(rows, batch_size=16)


def train(accelerator: Accelerator, model, optimizer, scheduler, data) -> list[float]:
    """Accelerate's loop; the loss of each batch."""
    losses = []
    for x, y in data:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x)[:, : y.shape[1]], y)
            accelerator.backward(loss)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a state dict's values: plain weights at full stored precision."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one, other) -> None:
    """Equal to the bit, through dictionaries, lists and tensors of any storage."""
    assert type(one) is type(other), (type(one), type(other))
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(plain(one), plain(other))
    else:
        assert one == other


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, whatever it is stored as."""
    return (
        tensor.detach().clone() if type(tensor) is torch.Tensor else tensor.detach().float() + 0.0
    )
