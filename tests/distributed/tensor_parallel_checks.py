"""Checks of `native` on the parts of tensor-parallel layers: the codes of one process, and its losses."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8_backends

WIDTH, INNER = 64, 96
PLAN = {"up": ColwiseParallel, "other": ColwiseParallel, "down": RowwiseParallel}


class Net(nn.Module):
    """[batch, tokens, WIDTH] -> the same. Two layers read one input."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.other = nn.Linear(WIDTH, INNER, bias), nn.Linear(WIDTH, INNER, bias)
        self.down = nn.Linear(INNER, WIDTH, bias)

    def forward(self, x):
        return self.down(F.silu(self.up(x)) * self.other(x))


def both(spec) -> tuple[Net, Net]:
    """One model on one process, and on all ranks."""
    alone = Net()
    together = parallelize_module(
        copy.deepcopy(alone), init_device_mesh("cpu", (dist.get_world_size(),)), {k: v() for k, v in PLAN.items()}
    )
    for model in (alone, together):
        fp8_backends.prepare(model, None, spec)
    return alone, together


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def check_gradients_are_those_of_one_process() -> dict:
    found = {}
    for spec in ("native:dynamic",):
        alone, together = both(spec)
        results = []
        for model in (alone, together):
            x = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
            y = model(2 * x)
            y.square().mean().backward()
            gradients = [p.grad.full_tensor() if model is together else p.grad for p in model.parameters()]
            results.append([y.detach(), x.grad, *gradients])
        found[spec] = max(map(off, *results))
        assert found[spec] < 1e-6, found
        counts = fp8_backends.audit(together).products
        assert counts == {name: {"fprop": 1, "dgrad": 1, "wgrad": 1, "recomputed": 0} for name in PLAN}, counts
    return found


if __name__ == "__main__":
    main(globals())
