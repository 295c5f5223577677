"""Compare final losses of training on several ranks with bf16's (FP32's on a CPU without bf16
products), under DDP and FSDP2.

    python -m torch.distributed.run --nproc_per_node 2 benchmarks/distributed.py

A backend may carry fields, as in "native:rowwise enable_fsdp_float8_all_gather=True".

The small Llama and the text of `fp8-backends compare`, its seeds, schedule and held-out windows;
each rank trains on its part of every batch. For each engine, plain training and every backend: the
held-out loss, its paired gap to plain training under the same engine with a 95 % interval, the
bytes stored by a rank per element of a converted weight, and the bytes sent by a rank in one whole
step, relative to plain FP32 training under DDP.
"""

from __future__ import annotations

import functools
import gc
import os
import time

import torch
import torch.distributed as dist
from measuring import DTYPES, options, plain, write_json
from tables import printed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import summaries
from transformers import get_cosine_schedule_with_warmup

import fp8_backends
from fp8_backends import FP8RecipeKwargs
from fp8_backends.compute import hardware
from fp8_backends.tools.compare.measuring import sent_bytes
from fp8_backends.tools.compare.summary import LOSS_GAP_BOUND
from fp8_backends.tools.compare.workload import (
    Settings,
    TrainingText,
    build_model,
    defaults,
    load_text,
)

MEASURED = 3
"""The step with counted bytes: the first ones create states, and DDP orders its buckets."""
BACKENDS = "native:dynamic,native:delayed,native:rowwise,ao:tensorwise,msamp:O1,msamp:O2,msamp:O3"
GATHERED = ",".join(
    f"native:{rule} enable_fsdp_float8_all_gather=True"
    for rule in ("dynamic", "rowwise", "blockwise", "mxfp8")
)
"""Rows only under FSDP2."""


def recipe_of(backend: str) -> FP8RecipeKwargs:
    """The recipe of a backend with fields behind it."""
    name, *fields = backend.split()
    return FP8RecipeKwargs(backend=name, **dict(field.split("=") for field in fields))


def wrap(model: torch.nn.Module, engine: str) -> torch.nn.Module:
    if engine == "DDP":
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(settings: Settings, text: TrainingText, backend: str, engine: str, seed: int) -> dict:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build_model(settings, text.vocab_size, seed)
    if backend not in DTYPES:
        fp8_backends.prepare(model, None, recipe_of(backend))
    wrapped = wrap(model, engine)
    optimizer = torch.optim.AdamW(
        wrapped.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=settings.weight_decay
    )
    if backend not in DTYPES:
        fp8_backends.prepare(wrapped, optimizer, recipe_of(backend))
    warmup = round(settings.steps * settings.warmup_share)
    scheduler = get_cosine_schedule_with_warmup(optimizer, warmup, settings.steps - 1)

    def loss_of(network, tokens):
        with hardware.fast_autocast(settings.device):
            return network(input_ids=tokens, labels=tokens).loss

    start, wrapped = time.perf_counter(), wrapped.train()

    def update(step: int, starts: torch.Tensor) -> None:
        loss_of(wrapped, text.windows(starts, settings.sequence).chunk(ranks)[rank]).backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), settings.clip)
        if step == settings.steps - 1 and backend not in DTYPES:
            stored.update(fp8_backends.audit(wrapped, optimizer).bytes_per_element)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    sent, stored = None, {}
    for step, starts in enumerate(
        text.batches(settings.steps, settings.batch, settings.sequence, seed)
    ):
        if step == MEASURED:
            sent = sent_bytes(functools.partial(update, step, starts))
        else:
            update(step, starts)
    seconds, wrapped = time.perf_counter() - start, wrapped.eval()
    windows = text.held_out_windows(settings.held_out_windows, settings.sequence).chunk(ranks)[rank]
    with torch.no_grad():
        total = sum(
            loss_of(wrapped, part).double() * len(part) for part in windows.split(settings.batch)
        )
    dist.all_reduce(total)
    found = {
        "engine": engine,
        "backend": backend,
        "seed": seed,
        "held_out_loss": total.item() / (len(windows) * ranks),
    }
    parameters = sum(p.numel() for p in model.parameters())
    over_fp32 = None if sent is None else sent / (2 * (ranks - 1) / ranks * 4 * parameters)
    return found | {
        "seconds": seconds,
        "bytes_per_element": stored or None,
        "sent_over_fp32_ddp": over_fp32,
    }


def main() -> None:
    args = options(__doc__, backends=BACKENDS, engines="DDP,FSDP2", seeds=5, steps=80)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)
    values = defaults(False) | {"seeds": args.seeds, "steps": args.steps}
    settings = Settings(
        **values,
        reference="bf16",
        loss_gap_bound=LOSS_GAP_BOUND,
        device="cpu",
        nproc=dist.get_world_size(),
    )
    text, runs = load_text(), []
    for engine in args.engines.split(","):
        backends = args.backends + (
            f",{GATHERED}" if engine == "FSDP2" and args.backends == BACKENDS else ""
        )
        for backend in [plain(settings.device), *backends.split(",")]:
            for seed in range(args.seeds):
                runs.append(train(settings, text, backend, engine, seed))
                gc.collect()
                if dist.get_rank() == 0:
                    print(engine, backend, seed, f"{runs[-1]['held_out_loss']:.4f}", flush=True)
    if dist.get_rank() == 0:
        found = summaries(runs, plain("cpu"), "engine")
        record = write_json(
            args,
            "held-out loss on several ranks",
            ranks=dist.get_world_size(),
            summaries=found,
            runs=runs,
        )
        printed("distributed", record)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
