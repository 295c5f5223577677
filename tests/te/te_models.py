"""Share a small model, its training loop, and the same loop written with TransformerEngine's own
classes."""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_backends.compute import hardware

BATCHES = [torch.randn(4, 4, 32, generator=torch.Generator().manual_seed(i)) for i in range(5)]


class Block(nn.Module):
    """recompute: None, or `use_reentrant` of plain activation checkpointing."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.recompute = recompute

    def body(self, x):
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x):
        return (
            self.body(x)
            if self.recompute is None
            else checkpoint(self.body, x, use_reentrant=self.recompute)
        )


class Model(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))
        self.last = nn.Linear(32, 32)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def model(recompute: bool | None = None) -> Model:
    torch.manual_seed(0)
    return Model(recompute)


class Adapted(nn.Module):
    """Put a trainable adapter before a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.base = model().requires_grad_(False)
        self.adapter = nn.Linear(32, 32)

    def forward(self, x):
        return self.base(self.adapter(x))


def adamw(made: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(made.parameters(), lr=1e-2)


def loss_of(made: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with hardware.fast_autocast("cpu"):
        return (made(batch).float() - batch).square().mean()


def losses(made, optimizer, batches=BATCHES, accumulate: int = 1) -> list[float]:
    found = []
    for i, batch in enumerate(batches, 1):
        loss = loss_of(made, batch)
        loss.backward()
        found.append(loss.item())
        if i % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return found


def of_te_linear() -> Model:
    """Return the same model of `te.Linear`, with its weights copied. `enter_fp8` belongs around its
    forward."""
    made = model()
    for parent in list(made.modules()):
        for name, layer in list(parent._modules.items()):
            if type(layer) is nn.Linear:
                own = te.Linear(
                    layer.in_features, layer.out_features, bias=layer.bias is not None, device="cpu"
                )
                own.weight.data.copy_(layer.weight.data)
                if layer.bias is not None:
                    own.bias.data.copy_(layer.bias.data)
                parent._modules[name] = own
    return made


class InAutocast(nn.Module):
    """A model inside `te.autocast`, as TransformerEngine's documentation has it."""

    def __init__(self, inner: nn.Module, recipe) -> None:
        super().__init__()
        self.inner, self.recipe = inner, recipe

    def forward(self, x):
        with te.autocast(recipe=self.recipe):
            return self.inner(x)


def by_hand(recipe, accumulate: int = 1) -> list[float]:
    """Losses of the model of `te.Linear` in `te.autocast`."""
    made = InAutocast(of_te_linear(), recipe)
    return losses(made, adamw(made), accumulate=accumulate)
