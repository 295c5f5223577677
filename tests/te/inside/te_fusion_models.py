"""Modules around a norm and a Linear: some where one kernel can do both, and such where something else comes in."""

from __future__ import annotations

import torch
from torch import nn

N = 32


def settled(made: nn.Module) -> nn.Module:
    """With biases and norm weights that are no zeros and ones; the largest value of a normed row of zeros is a bias."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:
                spread = 6.0 if "norm.bias" in name else 0.3
                parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return made


class PreNorm(nn.Module):
    """The Linear that reads the norm lies in a container."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.fn = nn.Sequential(nn.Linear(N, 2 * N), nn.ReLU(), nn.Linear(2 * N, N, bias=False))

    def forward(self, x):
        return x + self.fn(self.norm(x))


class Model(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(N, N), PreNorm(norm())
        self.last = nn.ModuleDict({"norm": norm(), "out": nn.Linear(N, N)})

    def forward(self, x):
        x = self.block(self.first(x))
        return self.last["out"](self.last["norm"](x))


class Two(nn.Module):
    """A norm and a Linear, and what calls them in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.other = nn.LayerNorm(N), nn.Linear(N, N), nn.Linear(N, N)
        self.seen = None

    def forward(self, x):
        return self.linear(self.norm(x))


class Noting(Two):
    """What a forward notes on its module is not what the tracing made of it, nor are its random numbers."""

    def forward(self, x):
        self.noise = torch.rand(())
        self.seen = self.linear(self.norm(x))
        return self.seen


class TransformersStyle(Two):
    """Inputs that may be left out, and more of them by name."""

    def forward(self, x, mask=None, scale: float = 1.0, **kwargs):
        if mask is not None:
            x = x * mask
        return scale * self.linear(self.norm(x), **kwargs)


class SometimesRead(Two):
    """Where an input that may be left out is given, another reads the norm."""

    def forward(self, x, extra=None):
        y = self.norm(x)
        return self.linear(y) if extra is None else self.linear(y) + self.other(y)


class TwoReaders(Two):
    def forward(self, x):
        y = self.norm(x)
        return self.linear(y) + self.other(y)


class ResidualAfterNorm(Two):
    def forward(self, x):
        y = self.norm(x)
        return y + self.linear(y)


class Between(Two):
    def forward(self, x):
        return self.linear(2 * self.norm(x))


class Untraceable(Two):
    def forward(self, x):
        return self.linear(self.norm(x)) if x.sum() > 0 else x


class LinearTwice(Two):
    def forward(self, x):
        return self.linear(self.linear(self.norm(x)))


class NormTwice(Two):
    def forward(self, x):
        return self.linear(self.norm(x)) + self.other(self.norm(x))


class ToAnActivation(Two):
    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.GELU()

    def forward(self, x):
        return self.linear(self.activation(self.norm(x)))


class Peeking(nn.Module):
    """Its forward calls a part of a part, which tracing that part cannot show."""

    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, x):
        return self.two(x) + self.two.norm(x)
