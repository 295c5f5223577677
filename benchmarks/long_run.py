"""Compare a long run at a level with FP32's, and check that stored scales follow their values.

A small Llama over Python's own sources, one token a byte, for 20,000 steps: for FP32 and every
backend the same initial weights, batches and schedule (a warm-up, then cosine to zero). Held-out
losses are taken at points along the way. At the same points each scale of a stored weight, gradient
or optimizer state is inspected: the range per kind, and the numbers of changed and of stuck scales.
A scale is stuck if it stays constant while max |x| of its elements changes by more than a factor of
four.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from measuring import options, pool, write_json
from tables import printed
from training import Prepared, held_out_loss, llama, schedule

import fp8_backends
from fp8_backends.tensors.scaled_tensor import ScaledTensor
from fp8_backends.tools.compare.workload import load_text

STUCK = 4.0
"""A scale is stuck if it stays constant while its amax changes by more than this factor."""


def stored(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, str, ScaledTensor]]:
    """Yield (kind, name, tensor) of every tensor with scales: weights, their gradients, and
    optimizer states."""
    for name, parameter in model.named_parameters():
        of = {
            "weight": parameter.detach(),
            "gradient": parameter.grad,
            **optimizer.state.get(parameter, {}),
        }
        for kind, tensor in of.items():
            if isinstance(tensor, ScaledTensor):
                yield kind, name, tensor


def scales_and_amaxes(tensor: ScaledTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale_inv of each block of elements, and max |x| of these, or of their roots where these
    are what is stored (uint8); FP32 [blocks]."""
    values, scale_inv = (
        tensor.dequantize(torch.float32).abs().flatten(),
        tensor.scale_inv.flatten().clone(),
    )
    values = values.sqrt() if tensor.codes.dtype == torch.uint8 else values
    missing = -values.numel() % (tensor.block_size or values.numel())
    return scale_inv, torch.nn.functional.pad(values, (0, missing)).view(
        scale_inv.numel(), -1
    ).amax(1)


class Scales:
    """Track all scales of a run: their range by kind, and the stuck ones."""

    def __init__(self) -> None:
        self.since: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}
        """(kind, name) -> (scale_inv, amax when this scale_inv was first seen)."""
        self.points: list[dict] = []
        self.stuck: dict[str, int] = {}
        """Inspections with a stuck scale, by `kind name`."""

    def look(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ranges: dict[str, list[float]] = {}
        for kind, name, tensor in stored(model, optimizer):
            scale_inv, amax = scales_and_amaxes(tensor)
            low, high, blocks, changed = ranges.setdefault(kind, [math.inf, 0.0, 0, 0])
            old, first_amax = self.since.get((kind, name), (scale_inv, amax))
            stays = scale_inv == old
            seen = stays & (amax > 0) & (first_amax > 0)  # nothing follows from zeros
            stuck = int((seen & ((amax / first_amax > STUCK) | (first_amax / amax > STUCK))).sum())
            if stuck:
                self.stuck[f"{kind} {name}"] = self.stuck.get(f"{kind} {name}", 0) + stuck
            self.since[kind, name] = (
                scale_inv,
                torch.where(stays & (first_amax > 0), first_amax, amax),
            )
            used = scale_inv[amax > 0].tolist()  # a block of zeros has any scale
            ranges[kind] = [
                min([low, *used]),
                max([high, *used]),
                blocks + scale_inv.numel(),
                changed + int((~stays).sum()),
            ]
        of = ("lowest_scale_inv", "highest_scale_inv", "scales", "changed")
        self.points.append(
            {
                "step": step,
                **{kind: dict(zip(of, found, strict=True)) for kind, found in ranges.items()},
            }
        )


def train(unit: tuple) -> dict:
    """Run one backend."""
    backend, arguments = unit
    sequence, text = arguments.sequence, load_text(limit_mb=2)
    prepared = Prepared(
        backend,
        lambda: llama(arguments.hidden, arguments.layers, sequence, num_attention_heads=4),
        arguments.lr,
        schedule=schedule(arguments.steps),
        decay=0.1,
        on="cpu",
    )
    windows = text.held_out_windows(arguments.held_out, sequence)
    every = max(1, arguments.steps // arguments.points)
    scales, points, recent, began = Scales(), [], [], time.perf_counter()
    batches = text.batches(arguments.steps, arguments.batch, sequence, seed=0)
    for step, starts in enumerate(batches, 1):
        prepared.optimizer.zero_grad()  # not after the step: its gradient is looked at
        tokens = text.windows(starts, sequence)
        recent.append(prepared.update(clip=1.0, input_ids=tokens, labels=tokens))
        if step % every == 0 or step == 1:
            train_loss = torch.stack(recent).mean().item()
            held_out = held_out_loss(prepared.model, windows)
            points.append({"step": step, "train_loss": train_loss, "held_out_loss": held_out})
            recent.clear()
            scales.look(step, prepared.model, prepared.optimizer.optimizer)
    audit = fp8_backends.audit(prepared.model, prepared.optimizer)
    return {
        "backend": backend,
        "points": points,
        "scales": scales.points,
        "stuck": scales.stuck,
        "bytes_per_element": audit.bytes_per_element,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    arguments = options(
        __doc__,
        backends="msamp:O2,msamp:O3",
        steps=20_000,
        points=80,
        lr=1e-3,
        hidden=64,
        layers=1,
        sequence=64,
        batch=4,
        held_out=512,
        workers=2,
    )
    backends = dict.fromkeys(["fp32", *arguments.backends.split(",")])
    with pool(arguments.workers) as processes:
        runs = processes.map(train, [(each, arguments) for each in backends], chunksize=1)
    printed("long-run", write_json(arguments, "a long run", runs=runs))


if __name__ == "__main__":
    main()
