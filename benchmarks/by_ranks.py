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

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import Attempts, plain, table, write_json
from step import in_turn, runnable, together
from training import SHAPES, Text, Training, device

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
    total = torch.tensor(
        value, dtype=torch.float64, device=device() if device() == "cpu" else "cuda"
    )
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def worker(arguments) -> None:
    """Measure every backend's speed, peak and loss on one rank; the first rank writes them."""
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
    if rank == 0:
        Path(arguments.worker).write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(ranks: int, arguments) -> list[dict]:
    """Return the results of all backends on this many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(ranks),
        ]
        command += [__file__, "--worker", str(file)]
        for name in PASSED_ON:
            if (value := getattr(arguments, name)) is not None:
                command += [f"--{name}", str(value)]
        environment = os.environ | ({"ACCELERATE_USE_CPU": "true"} if device() == "cpu" else {})
        done = subprocess.run(command, env=environment)
        if done.returncode:
            raise SystemExit(f"{ranks} ranks: ended with {done.returncode}, see above")
        return [{"ranks": ranks, **each} for each in json.loads(file.read_text())]


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


def printed(results: list[dict]) -> str:
    header = [
        "ranks",
        "backend",
        "tokens/s/GPU",
        "decrease %",
        "faster %",
        "loss",
        f"above {plain()} %",
        "peak MB",
    ]
    rows = []
    for r in results:
        row = [
            r["ranks"],
            r["backend"],
            round(r["tokens_per_second"]),
            100 * r["decrease"],
            100 * r["faster"],
        ]
        rows.append(
            [
                *row,
                r["loss"],
                100 * r["loss_above"],
                round(r["peak_bytes"] / 1e6) if r["peak_bytes"] else "-",
            ]
        )
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = device() == "cuda"
    parser.add_argument("--nproc", default="1,2", help="numbers of ranks, with commas")
    parser.add_argument(
        "--backends", default="te:delayed,ao:tensorwise,native:dynamic,msamp:O2,te+msamp:O2"
    )
    parser.add_argument("--form", choices=("eager", "compiled"), default="eager")
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--shape", choices=list(SHAPES), default="1b" if cuda else "small")
    parser.add_argument("--layers", type=int, help="in place of the shape's own")
    parser.add_argument("--sequence", type=int, default=4096 if cuda else 128)
    parser.add_argument("--batch", type=int, default=2, help="of one rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    results: list[dict] = []
    for ranks in map(int, arguments.nproc.split(",")):
        if cuda and ranks > torch.cuda.device_count():
            print(f"not run: {ranks} ranks: this machine has {torch.cuda.device_count()} GPU(s)")
            continue
        results += launch(ranks, arguments)
        told = {
            name: value for name, value in vars(arguments).items() if name not in ("json", "worker")
        }
        record = {"question": "speed with more ranks", "precision": plain(), "arguments": told}
        write_json(arguments.json, {**record, "results": compared(results, plain())})
    print(printed(compared(results, plain())))


if __name__ == "__main__":
    main()
