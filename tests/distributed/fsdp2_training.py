"""Train a small language model with every case that is hard to shard, on any number of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8_backends

WIDTH = 64


class Block(nn.Module):
    """Give uneven shards with `rows` = 65."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, rows),
            nn.Linear(rows, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Map token ids [batch, length] to logits [batch, length, 64]."""

    _no_split_modules = ["Block"]  # noqa: RUF012, transformers' name for what FSDP wraps

    def __init__(self, rows: int = 65, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(rows) for _ in range(blocks))
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        """A separate unit: all its parameters are FP8."""
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.loudness = nn.Linear(WIDTH, 1, bias=False)
        """One row: the shards of all ranks but the first are empty."""
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.tie_weights()

    def tie_weights(self):
        """Tie weights like transformers' models; Accelerate calls it after loading."""
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        x = self.frozen(self.mix(x)) + x
        return self.head(self.norm(x) * torch.sigmoid(self.loudness(x)))


def shard(model: Net, **options) -> Net:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model.mix, **options)
    return fully_shard(model, **options)


def prepared(spec, rows: int = 65, sharded: bool = True, lr: float = 3e-3, **options):
    """(model, optimizer) from seed 0, without Accelerate; `spec` None: stock FSDP2."""
    torch.manual_seed(0)
    model = Net(rows)
    if spec is not None:
        fp8_backends.prepare(model, None, spec)
    if sharded:
        shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if spec is not None:
        fp8_backends.prepare(model, optimizer, spec)
    return model, optimizer


def prepared_in(wrap, model: nn.Module, spec, lr: float = 1e-3):
    """(model, optimizer), wrapped for several ranks between the two calls of `prepare`."""
    fp8_backends.prepare(model, None, spec)
    model = wrap(model)
    return fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr), spec)


def batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Return this rank's share of ids [8, 17] from a simple rule: the next token is the last plus
    three."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 64, (count, 8), generator=generator)
    ids = (starts.unsqueeze(-1) + 3 * torch.arange(17)) % 64
    return list(ids[:, dist.get_rank() :: dist.get_world_size()])


def loss_of(model, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def mean(value: torch.Tensor) -> float:
    """Over the ranks."""
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(model, optimizer, steps: int, seed: int = 0) -> list[float]:
    losses = []
    for ids in batches(steps, seed):
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_all_ranks(value, group: dist.ProcessGroup | None = None) -> list:
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def same_on_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    first, *others = on_all_ranks(tensor.detach().clone(), group)
    return all(torch.equal(first, other) for other in others)
