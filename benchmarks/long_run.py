"""Compare a long run at a level with FP32's, and check that stored scales follow their values.

A small Llama over Python's own sources, one token a byte, for 20,000 steps: for FP32 and every
backend the same initial weights, batches and schedule (a warm-up, then cosine to zero). Held-out
losses are taken at points along the way. At the same points each scale of a stored weight, gradient
or optimizer state is inspected: the range per kind, and the numbers of changed and of stuck scales.
A scale is stuck if it stays constant while max |x| of its elements changes by more than a factor of
four.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

import torch
from measuring import precision_of, table, write_json

import fp8_backends
from fp8_backends.tensors.scaled_tensor import ScaledTensor

STUCK = 4.0
"""A scale is stuck if it stays constant while its amax changes by more than this factor."""


def build(arguments) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_attention_heads": 4,
    }
    shape |= {"num_hidden_layers": arguments.layers, "max_position_embeddings": arguments.sequence}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, use_cache=False, tie_word_embeddings=False, **shape)
    )


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


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, windows: torch.Tensor) -> float:
    model.eval()
    losses = [
        model(input_ids=part, labels=part).loss.item() * len(part) for part in windows.split(64)
    ]
    model.train()
    return sum(losses) / len(windows)


def train(unit: tuple) -> dict:
    """Run one backend."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from fp8_backends.tools.compare.workload import load_text

    backend, arguments = unit
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(**precision_of(backend), cpu=True)
    text, model = load_text(limit_mb=2), build(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(arguments.steps))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    starts = text.batches(arguments.steps, arguments.batch, arguments.sequence, seed=0)
    windows = text.held_out_windows(arguments.held_out, arguments.sequence)
    every = max(1, arguments.steps // arguments.points)
    scales, points, recent, began = Scales(), [], [], time.perf_counter()
    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad()  # not after the step: its gradient is looked at
        tokens = text.windows(starts[step - 1], arguments.sequence)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        recent.append(loss.detach())
        if step % every == 0 or step == 1:
            held_out = held_out_loss(model, windows)
            points.append(
                {
                    "step": step,
                    "train_loss": torch.stack(recent).mean().item(),
                    "held_out_loss": held_out,
                }
            )
            recent.clear()
            scales.look(step, model, optimizer.optimizer)
    return {
        "backend": backend,
        "points": points,
        "scales": scales.points,
        "stuck": scales.stuck,
        "bytes_per_element": fp8_backends.audit(model, optimizer).bytes_per_element,
        "seconds": time.perf_counter() - began,
    }


def schedule(steps: int):
    """Rising over a twentieth of the steps, then cosine to zero."""
    warmup = max(1, steps // 20)
    return lambda step: min(
        (step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1, step / steps))
    )


def printed(runs: list[dict]) -> str:
    header = [
        "backend",
        "held-out loss",
        f"above {runs[0]['backend']}",
        "largest above, any point",
        "scales stuck",
    ]
    rows, reference = [], [point["held_out_loss"] for point in runs[0]["points"]]
    for run in runs:
        above = [p["held_out_loss"] - r for p, r in zip(run["points"], reference, strict=True)]
        stuck = sum(run["stuck"].values())
        rows.append(
            [
                run["backend"],
                f"{reference[-1] + above[-1]:.4f}",
                f"{above[-1]:+.4f}",
                f"{max(above):+.4f}",
                stuck,
            ]
        )
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", default="msamp:O2,msamp:O3")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--points", type=int, default=80, help="looks at losses and scales")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=512, help="windows")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    units = [
        (backend, arguments) for backend in dict.fromkeys(["fp32", *arguments.backends.split(",")])
    ]
    pool = torch.multiprocessing.get_context("spawn").Pool(
        arguments.workers, torch.set_num_threads, (1,), 1
    )
    with pool:
        runs = pool.map(train, units, chunksize=1)
    print(printed(runs))
    told = vars(arguments) | {"json": None}
    write_json(arguments.json, {"question": "a long run", "arguments": told, "runs": runs})


if __name__ == "__main__":
    main()
