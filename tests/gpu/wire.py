"""Does FP8 travel between GPUs as it should? The collective, and training under DDP and FSDP2, over
NCCL.

    python -m torch.distributed.run --nproc_per_node 2 tests/gpu/wire.py --json FILE

One GPU is enough to try streams, kernels and NCCL's byte collectives. Prints a line a check; exits
with 1 if one failed. `--device cpu` rehearses the same over gloo.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from measuring import options, write_json  # noqa: E402

import fp8_backends  # noqa: E402
from fp8_backends.comm.two_shot import MESSAGE_BLOCK, AllReduce, reduce_scatter  # noqa: F401
from fp8_backends.recipes.handlers import FP8RecipeKwargs  # noqa: F401

RESULTS: list[dict] = []
BACKENDS = {
    "native:dynamic": {"backend": "native:dynamic"},
    "native:delayed, FP8 gradients": {"backend": "native:delayed", "gradient_comm": "fp8"},
    "msamp:O1": {"backend": "msamp:O1"},
    "msamp:O2": {"backend": "msamp:O2"},
    "msamp:O3": {"backend": "msamp:O3"},
}
WIDTH, STEPS = 256, 30
LARGEST_GAP = 0.02
"""Relative difference of the mean of the last five losses to one rank's: gradients differ by 4 %
and less."""


def check(name: str, passed: bool, **figures) -> None:
    RESULTS.append({"check": name, "passed": bool(passed), **figures})
    if dist.get_rank() == 0:
        print(
            f"{'ok  ' if passed else 'FAIL'} {name} {json.dumps(figures) if figures else ''}",
            flush=True,
        )


def of_rank(numel: int, rank: int, device: str) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(device)


def collective(device: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for numel in (1, MESSAGE_BLOCK + 1, 70_001, 2**22):
        exact = sum(of_rank(numel, r, device).double() for r in range(size)) / size
        reductions = [AllReduce(of_rank(numel, rank, device)) for _ in range(3)]
        made = [reduction.wait().values() for reduction in reductions]
        error = ((made[0].double() - exact).norm() / exact.norm()).item()
        check(
            f"all-reduce of {numel}",
            error < (0.04 if numel > MESSAGE_BLOCK else 0.125),
            error=error,
        )
        check(f"all-reduce of {numel} repeats", all(torch.equal(made[0], each) for each in made))
        others = [torch.empty_like(made[0]) for _ in range(size)]
        dist.all_gather(others, made[0])
        check(
            f"all-reduce of {numel} is equal on all ranks",
            all(torch.equal(each, made[0]) for each in others),
        )
    values = torch.ones(3 * MESSAGE_BLOCK, device=device)
    if rank == size - 1:
        values[MESSAGE_BLOCK] = float("inf")
    made = AllReduce(values).wait().values()
    check(
        "an inf is seen by all",
        made.isnan().sum().item() == MESSAGE_BLOCK and made.nansum().item() == 2 * MESSAGE_BLOCK,
    )
    rows = torch.stack([of_rank(5000, 100 * rank + r, device) for r in range(size)])
    exact = sum(of_rank(5000, 100 * r + rank, device) for r in range(size))
    error = ((reduce_scatter(rows) - exact).norm() / exact.norm()).item()
    check("reduce-scatter", error < 0.03, error=error)


def model_of(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=i % 2 > 0), nn.GELU())
        for i in range(4)
    ]
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64)).to(device)


def train(model: nn.Module, optimizer, device: str, part: slice) -> list[float]:
    teacher = (
        torch.randn(WIDTH, 64, generator=torch.Generator().manual_seed(7)).to(device) / WIDTH**0.5
    )
    losses = []
    for step in range(STEPS):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        with torch.autocast(device, torch.bfloat16):
            error = model(x[part]).float() - torch.tanh(x[part] @ teacher)
        error.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            total = error.detach().square().mean()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def training(device: str, name: str, fields: dict, engine: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    recipe = FP8RecipeKwargs(**fields)
    alone, optimizer = fp8_backends.prepare(plain := model_of(device), adamw(plain), recipe.backend)
    if size == 1 or fields["backend"].startswith("native"):
        expected = train(alone, optimizer, device, slice(None))
    else:
        expected = None  # a level refuses to train apart from the other ranks
    model = model_of(device)
    fp8_backends.prepare(model, None, recipe)
    if engine == "DDP":
        model = DistributedDataParallel(model)
    else:
        for block in model[:4]:
            fully_shard(block)
        fully_shard(model)
    model, optimizer = fp8_backends.prepare(model, adamw(model), recipe)
    start = time.perf_counter()
    losses = train(model, optimizer, device, slice(rank * 64 // size, (rank + 1) * 64 // size))
    figures = {"first": losses[0], "last": losses[-1], "seconds": time.perf_counter() - start}
    check(f"{name} under {engine} learns", losses[-1] < 0.8 * losses[0], **figures)
    if expected:
        gap = abs(sum(losses[-5:]) / sum(expected[-5:]) - 1)
        check(f"{name} under {engine} follows one rank", gap < LARGEST_GAP, gap=gap)
    products = fp8_backends.audit(model, optimizer).products
    kinds = ("fprop", "dgrad", "wgrad")
    check(
        f"{name} under {engine} in FP8",
        all(all(count[k] for k in kinds) for count in products.values()),
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def main() -> int:
    args = options(__doc__, device="cuda", engines="DDP,FSDP2")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    jobs = [("the collective", collective, (args.device,))]
    for engine in args.engines.split(","):
        jobs += [
            (f"{name} under {engine}", training, (args.device, name, BACKENDS[name], engine))
            for name in BACKENDS
        ]
    for name, function, arguments in jobs:
        try:
            function(*arguments)
        # the other ranks may wait for this one: nothing after it would mean anything
        except Exception as error:
            traceback.print_exc()
            check(name, False, error=f"{type(error).__name__}: {error}"[:300])
            break
    failed = [result for result in RESULTS if not result["passed"]]
    if dist.get_rank() == 0:
        write_json(args, "messages between GPUs", ranks=dist.get_world_size(), checks=RESULTS)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
