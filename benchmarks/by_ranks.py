"""Measure training speed with more ranks, in bf16 and in FP8: the table of AWS's measurement, per
backend.

    benchmarks/by_ranks.py --nproc 1,2,4,8

Each rank has the same micro-batch for any number of ranks. Columns, by these formulas:

* tokens/s/GPU: tokens of one rank's step over the median time of a step
* decrease: 1 - tokens/s/GPU over the same backend's with the fewest ranks
* faster: tokens/s/GPU over bf16's with as many ranks - 1
* loss: of training, mean over ranks and over the last fifth of the steps
* above bf16: loss over bf16's with as many ranks - 1

NCCL on GPUs, gloo on a CPU. On one without bf16 products FP32 takes the place of bf16.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from measuring import Attempts, answer, device, options, plain, write_json
from step import in_turn, runnable, together
from tables import printed
from training import SHAPES, Text, Training

PASSED_ON = (
    "backends",
    "form",
    "engine",
    "shape",
    "layers",
    "sequence",
    "batch",
    "steps",
    "warmup",
)


def mean_over_ranks(value: float) -> float:
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def worker(arguments) -> None:
    """Measure every backend's speed, peak and loss on one rank; the first rank prints them."""
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    text = Text(arguments.sequence)

    def make(backend: str, form: str) -> Training:
        return Training(
            backend,
            arguments.shape,
            text,
            arguments.batch,
            form,
            arguments.layers,
            engine=arguments.engine,
        )

    names = runnable(arguments.backends.split(","), [arguments.form])
    if device() == "cpu":
        found = together(names, make, arguments)
    else:
        attempt = Attempts()
        found = in_turn(names, make, arguments, lambda found: None, attempt)
        attempt.end()  # after a failed rank the others' figures are meaningless
    kept = (
        "median_s",
        "min_s",
        "max_s",
        "runs",
        "tokens_per_second",
        "peak_bytes",
        "flops_share",
        "drift",
    )
    results = []
    for (backend, form), each in found.items():
        loss = mean_over_ranks(each["last_loss"])
        results.append(
            {
                "backend": backend,
                "form": form,
                "loss": loss,
                **{k: each[k] for k in kept if k in each},
            }
        )
    print(json.dumps(results), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(ranks: int, arguments) -> list[dict]:
    """Return the results of all backends on this many ranks."""
    words = ["--worker", "yes"]
    for name in PASSED_ON:
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name}", value]
    environment = {"ACCELERATE_USE_CPU": "true"} if device() == "cpu" else {}
    return [
        {"ranks": ranks, **each} for each in answer(__file__, *words, ranks=ranks, **environment)
    ]


def compared(results: list[dict], precision: str) -> list[dict]:
    """Add `decrease`, `faster` and `loss_above` as shares; see the formulas above.

    Args:
        precision: the baseline of the last two, `bf16` or `fp32`.
    """
    by = {(each["ranks"], each["backend"]): each for each in results}
    fewest: dict[str, int] = {}
    for ranks, backend in by:
        fewest[backend] = min(ranks, fewest.get(backend, ranks))
    made = []
    for (ranks, backend), each in by.items():
        speed, reference = each["tokens_per_second"], by[ranks, precision]
        decrease = 1 - speed / by[fewest[backend], backend]["tokens_per_second"]
        faster, above = (
            speed / reference["tokens_per_second"] - 1,
            each["loss"] / reference["loss"] - 1,
        )
        made.append({**each, "decrease": decrease, "faster": faster, "loss_above": above})
    return made


def main() -> None:
    cuda = device() == "cuda"
    shapes = dict.fromkeys(["1b" if cuda else "small", *SHAPES])
    arguments = options(
        __doc__,
        nproc="1,2",
        backends="te:delayed,ao:tensorwise,native:dynamic,msamp:O2,te+msamp:O2",
        form=("eager", "compiled"),
        engine=("ddp", "fsdp2"),
        shape=tuple(shapes),
        layers=int,
        sequence=4096 if cuda else 128,
        batch=2,
        steps=20,
        warmup=4,
        worker=str,
    )
    if arguments.worker:
        worker(arguments)
        return
    results: list[dict] = []
    for ranks in map(int, arguments.nproc.split(",")):
        if cuda and ranks > torch.cuda.device_count():
            print(f"not run: {ranks} ranks: this machine has {torch.cuda.device_count()} GPU(s)")
            continue
        results += launch(ranks, arguments)
        record = write_json(arguments, "speed with more ranks", results=compared(results, plain()))
    printed("ranks", record)


if __name__ == "__main__":
    main()
