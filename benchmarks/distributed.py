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

import argparse
import functools
import gc
import os
import time

import torch
import torch.distributed as dist
from measuring import DTYPES, plain, table, write_json
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import get_cosine_schedule_with_warmup

import fp8_backends
from fp8_backends import FP8RecipeKwargs
from fp8_backends.compute import hardware
from fp8_backends.tools.compare.measuring import sent_bytes
from fp8_backends.tools.compare.summary import LOSS_GAP_BOUND, paired_gap
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", default=BACKENDS)
    parser.add_argument("--engines", default="DDP,FSDP2")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json")
    args = parser.parse_args()
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
        report(args, runs)
    dist.destroy_process_group()


def report(args: argparse.Namespace, runs: list[dict]) -> None:
    losses: dict = {}
    precision = plain("cpu")
    for run in runs:
        losses.setdefault((run["engine"], run["backend"]), {})[run["seed"]] = run["held_out_loss"]
    rows, summaries = [], []
    for (engine, backend), of in losses.items():
        gap = paired_gap(of, losses[engine, precision])
        mean = sum(of.values()) / len(of)
        first = next(run for run in runs if (run["engine"], run["backend"]) == (engine, backend))
        stored, sent = first["bytes_per_element"], first["sent_over_fp32_ddp"]
        gaps = {"gap": gap.mean, "half_width": gap.half_width, "sent_over_fp32_ddp": sent}
        summaries.append({"engine": engine, "backend": backend, "loss": mean, **gaps})
        verdict = "" if backend == precision else f"{gap} ({gap.verdict()})"
        shown = f"{stored['total']:.2f}" if stored else "", "" if sent is None else f"{sent:.3f}"
        rows.append([engine, backend, f"{mean:.4f}", verdict, *shown])
    headings = [
        "engine",
        "backend",
        "held-out loss",
        f"gap to {precision}, nats",
        "bytes/element, one rank",
    ]
    print(table([*headings, "bytes sent / FP32 under DDP"], rows))
    arguments = vars(args) | {"json": None}
    record = {
        "question": "held-out loss on several ranks",
        "precision": precision,
        "ranks": dist.get_world_size(),
    }
    write_json(args.json, record | {"arguments": arguments, "summaries": summaries, "runs": runs})


if __name__ == "__main__":
    main()
