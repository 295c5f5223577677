"""Measure the error of a mean of gradients sent in FP8.

Relative L2 error, and the share of nonzero elements flushed to zero, for N ranks (simulated in one
process; tests/distributed compares the simulation with the real collective to the bit):

- two-shot, with one scale for 128 elements (fp8_backends.comm's message), for 1024, and for the
  whole tensor;
- a ring whose partial sums are E4M3, after a factor 1/sqrt(N) that leaves room for them (FP8-LM's
DDP).
"""

from __future__ import annotations

import itertools

import torch
from measuring import options, write_json
from tables import printed

from fp8_backends.formats.formats import E4M3, saturating_cast
from fp8_backends.formats.scaling import power_of_two_scale

NUMEL = 2**19


def gradients(kind: str, ranks: int) -> torch.Tensor:
    """[ranks, NUMEL] in FP32."""
    torch.manual_seed(0)
    noise = torch.randn(ranks, NUMEL)
    if kind == "correlated":
        return torch.randn(NUMEL) + noise
    if kind == "heavy-tailed":
        return torch.distributions.StudentT(3.0).sample((ranks, NUMEL))
    if kind == "rows of many sizes":
        return noise * torch.exp(3 * torch.randn(NUMEL // 1024, 1)).expand(-1, 1024).reshape(-1)
    return noise


def cast(values: torch.Tensor, block: int) -> torch.Tensor:
    """Cast to E4M3 and back, with one scale per this many elements; 0: one for all."""
    rows = values.view(-1, block or values.numel())
    scale = power_of_two_scale(rows.abs().amax(1, keepdim=True), E4M3)
    return (saturating_cast(rows * scale, E4M3).float() / scale).view(-1)


def two_shot(all_of: torch.Tensor, block: int) -> torch.Tensor:
    size, shard = all_of.shape[0], NUMEL // all_of.shape[0]
    sent = torch.stack([cast(each, block) for each in all_of]).view(size, size, shard)
    owners = torch.arange(size)
    # an owner's own part is not sent
    sent[owners, owners] = all_of.view(size, size, shard)[owners, owners]
    return cast(sent.mean(0).reshape(-1), block)


def ring(all_of: torch.Tensor) -> torch.Tensor:
    size = all_of.shape[0]
    factor = power_of_two_scale(all_of.abs().max(), E4M3) / size**0.5
    total = torch.zeros(NUMEL)
    for each in all_of:
        total = saturating_cast(total + each * factor, E4M3).float()
    return total / factor / size


METHODS = {
    "two-shot, 128": lambda g: two_shot(g, 128),
    "two-shot, 1024": lambda g: two_shot(g, 1024),
    "two-shot, tensor": lambda g: two_shot(g, 0),
    "ring of FP8 sums": ring,
}


KINDS = ("independent", "correlated", "heavy-tailed", "rows of many sizes")


def main() -> None:
    arguments = options(__doc__, ranks="2,4,8,32")
    figures = []
    for kind, ranks in itertools.product(KINDS, map(int, arguments.ranks.split(","))):
        all_of = gradients(kind, ranks)
        exact = all_of.double().mean(0)
        for name, method in METHODS.items():
            made = method(all_of).double()
            error = ((made - exact).norm() / exact.norm()).item()
            lost = ((made == 0) & (exact != 0)).double().mean().item()
            of = {"gradients": kind, "ranks": ranks, "method": name}
            figures.append({**of, "error": error, "lost": lost})
    record = write_json(arguments, "error of a mean over ranks", elements=NUMEL, figures=figures)
    printed("gradient-mean", record)


if __name__ == "__main__":
    main()
