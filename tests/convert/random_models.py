"""Build random models from a seed, in odd combinations.

`RandomModel(seed)` is a chain of blocks over [batch, tokens, width], with an embedding or a Linear
in front and a head behind. Its blocks hold layers of several dtypes; frozen, reused, shared, tied,
parametrized and lazy parts; and weights in other memory. `described` lists the draws in words.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

WIDTHS = (16, 16, 32, 32, 48, 20, 33)
HIDDEN = (16, 32, 64, 64, 40, 7)
DTYPES = (torch.float32,) * 6 + (torch.bfloat16, torch.bfloat16, torch.float16, torch.float64)
VOCABULARY, BATCH, TOKENS = 32, 4, 8


class Block(nn.Module):
    """A part in its own dtype between FP32 activations."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype, residual: bool, twice: bool) -> None:
        super().__init__()
        self.inner, self.dtype, self.residual, self.times = (
            inner.to(dtype),
            dtype,
            residual,
            1 + twice,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            y = self.inner(x.to(self.dtype)).float()
            x = x + y if self.residual else y
        return x


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Mirrored(nn.Module):
    """A layer and its transpose, under a second name of the Parameter, and a gain of no
    dimension."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.mirror, self.gain = self.up.weight, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.gelu(self.up(x)), self.mirror.t()) * self.gain


class Around(nn.Module):
    """Wrap a module skipped by conversion in a function of (module, input)."""

    def __init__(
        self, inner: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner, x)


class Listed(nn.Module):
    """Parts in containers without a forward of their own."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.by_name = nn.ModuleDict({"first": parts[0]})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x + self.by_name["first"](x)


class RandomModel(nn.Module):
    """The model of a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.draw, self.described = seed, random.Random(seed), []
        torch.manual_seed(seed)
        self.width = self.draw.choice(WIDTHS)
        self.reads_tokens = self.draw.random() < 0.6
        self.stem = (
            nn.Embedding(VOCABULARY, self.width) if self.reads_tokens else nn.Linear(24, self.width)
        )
        self.blocks = nn.ModuleList(self._block() for _ in range(self.draw.randint(1, 4)))
        self.head = nn.Linear(self.width, VOCABULARY, bias=self._often(0.5))
        self._tie_head()
        for _ in range(self.draw.choice((0, 0, 1, 1, 2))):
            self._make_odd()
        self._freeze()
        if self._often(0.5):
            self.described.append("run once before it is prepared")
            with torch.no_grad():
                self(self.inputs())
        del self.draw

    def inputs(self) -> torch.Tensor:
        """A batch, the same one for all models of this width."""
        made = torch.Generator().manual_seed(0)
        if self.reads_tokens:
            return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=made)
        return torch.randn(BATCH, TOKENS, 24, generator=made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).float()
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype)).float()

    # the drawn choices

    def _often(self, chance: float) -> bool:
        return self.draw.random() < chance

    def _block(self) -> Block:
        self.dtype, twice = self.draw.choice(DTYPES), self._often(0.2)
        inner = self._part(depth=0)
        residual = twice or self._often(0.6)
        self.described.append(f"{type(inner).__name__} in {self.dtype}{', used twice' * twice}")
        return Block(inner, self.dtype, residual, twice)

    def _part(self, depth: int) -> nn.Module:
        width, bias = self.width, self._often(0.6)
        kinds = [
            "mlp",
            "mlp",
            "linear",
            "linear",
            "parametrized",
            "pruned",
            "lazy",
            "norm",
            "conv",
            "attention",
        ]
        kinds += ["mirrored", "recurrent"]
        kind = self.draw.choice(kinds + ["sequence", "listed"] * (depth < 2))
        if kind == "mlp":
            return Mlp(width, self.draw.choice(HIDDEN), bias)
        if kind == "linear":
            return nn.Linear(width, width, bias)
        if kind == "parametrized":
            # PyTorch's exponential of a matrix in 16 bits gives NaN now and then
            names = ("weight_norm", "spectral_norm") + ("orthogonal",) * (self.dtype.itemsize > 2)
            name = self.draw.choice(names)
            self.described.append(name)
            return getattr(parametrizations, name)(nn.Linear(width, width, bias))
        if kind == "pruned":
            self.described.append(kind)
            return prune.random_unstructured(nn.Linear(width, width, bias), "weight", amount=0.3)
        if kind == "lazy":
            self.described.append(kind)
            return nn.LazyLinear(width, bias)
        if kind == "norm":
            return self.draw.choice((nn.LayerNorm, nn.RMSNorm))(width)
        if kind == "mirrored":
            return Mirrored(width, self.draw.choice(HIDDEN))
        if kind == "recurrent":
            return Around(nn.GRU(width, width, batch_first=True), lambda gru, x: gru(x)[0])
        if kind == "conv":
            convolution = nn.Conv1d(width, width, 3, padding=1)
            return Around(convolution, lambda inner, x: inner(x.transpose(1, 2)).transpose(1, 2))
        if kind == "attention":
            attention = nn.MultiheadAttention(width, 1, batch_first=True)
            return Around(attention, lambda inner, x: inner(x, x, x, need_weights=False)[0])
        parts = [self._part(depth + 1) for _ in range(self.draw.randint(1, 3))]
        if self._often(0.3):
            self.described.append("a part that is there twice")
            parts.append(parts[0])
        if kind == "listed":
            return Listed(parts)
        return nn.Sequential(*parts, nn.Dropout(0.1), nn.GELU())

    def linears(self) -> list[nn.Linear]:
        """Return plain Linear layers with their own weight."""
        found = [m for m in self.modules() if type(m) is nn.Linear and "weight" in m._parameters]
        return [m for m in found if not nn.utils.parametrize.is_parametrized(m)]

    def _tie_head(self) -> None:
        if self.reads_tokens and self._often(0.4):
            self.described.append("head tied to the embedding")
            self.head.weight = self.stem.weight

    def _make_odd(self) -> None:
        """Tie the weight of a layer, or make it a view of other memory."""
        layer = self.draw.choice(self.linears())
        weight = layer.weight.detach()
        like = [m for m in self.linears() if m is not layer and m.weight.dtype == weight.dtype]
        same = [m for m in like if m.weight.shape == weight.shape]
        turned = [m for m in like if m.weight.shape == weight.t().shape]
        kinds = ["slice", "columns", "transposed", "expanded row", "expanded number"]
        kinds += ["tied", "tied memory", "frozen tied memory"] * bool(same)
        kinds += ["tied transposed", "frozen tied transposed"] * bool(turned) + [
            "slices of one buffer"
        ] * bool(same)
        kind = self.draw.choice(kinds)
        self.described.append(f"a weight that is {kind}")
        # PyTorch cannot train an expanded weight: its optimizer refuses to write to one element
        # through several
        trains = not kind.startswith("frozen") and not (
            kind.startswith("expanded") and self._often(0.8)
        )
        if kind == "slice":
            new = torch.cat([weight, weight])[: weight.shape[0]]
        elif kind == "columns":
            new = torch.cat([weight, weight], dim=1)[:, : weight.shape[1]]
        elif kind == "transposed":
            new = weight.t().contiguous().t()
        elif kind == "expanded row":
            new = weight[:1].clone().expand(weight.shape)
        elif kind == "expanded number":
            new = weight[:1, :1].clone().expand(weight.shape)
        elif kind == "tied":
            layer.weight = self.draw.choice(same).weight
            return
        elif kind == "slices of one buffer":
            other = self.draw.choice(same)
            buffer = torch.cat([weight, other.weight.detach()])
            other.weight, new = nn.Parameter(buffer[weight.shape[0] :]), buffer[: weight.shape[0]]
        elif "transposed" in kind:
            new = self.draw.choice(turned).weight.detach().t()
        else:
            new = self.draw.choice(same).weight.detach()
        layer.weight = nn.Parameter(new, requires_grad=trains)

    def _freeze(self) -> None:
        kind = self.draw.choice(("nothing", "nothing", "a block", "parameters", "biases"))
        if kind == "nothing":
            return
        self.described.append(f"{kind} frozen")
        block = self.draw.randrange(len(self.blocks))
        for name, parameter in self.named_parameters():
            chosen = {
                "a block": name.startswith(f"blocks.{block}."),
                "parameters": self._often(0.3),
                "biases": name.endswith("bias"),
            }
            if chosen[kind]:
                parameter.requires_grad = False
