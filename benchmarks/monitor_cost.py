"""Measure the cost of `monitor_every`: steps of a small Llama without a monitor, between two
samples, and sampled.

A model without a monitor and one with it take their steps in turn, in random order, paired by
round; each round ends with a sampled step. That may take up to two further steps' time: then
sampling every 100th step costs at most 2 %. Exits with 1 above that.
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import device, options, ratio, summary, synchronize, write_json
from tables import printed
from training import llama

RECIPES = (
    ("native:dynamic", False),
    ("native:delayed", False),
    ("msamp:O2", False),
    ("native:dynamic", True),
)
"""Backend, and True for a compiled model."""
EVERY, LIMIT = 100, 0.02
"""Steps from sample to sample, and the largest share of time for sampling."""
IN_A_ROUND = 3
"""Steps of the monitored model in a round. The last is sampled; after the one before it, compiled
code runs eagerly, also the other model's, which has already stepped."""


def training_step(model, backend: str, every: int, file: Path, batch: torch.Tensor, compiled: bool):
    """Return a function that steps a copy of the model."""
    import fp8_backends
    from fp8_backends.compute import hardware

    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    fp8_backends.prepare(
        model, optimizer, {"backend": backend, "monitor_every": every, "monitor_file": str(file)}
    )
    runs = torch.compile(model) if compiled else model

    def step() -> None:
        with hardware.fast_autocast(batch.device.type):
            loss = runs(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(model, backend: str, compiled: bool, batch: torch.Tensor, rounds: int) -> dict:
    """The record of one recipe."""
    seconds: dict[str, list[float]] = {"off": [], "between": [], "sampled": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.jsonl"
        off, monitored = (
            training_step(model, backend, every, file, batch, compiled) for every in (0, IN_A_ROUND)
        )
        order = [("off", off), ("between", monitored)]
        for warm_up in (True, *[False] * rounds):
            random.shuffle(order)
            found = {name: timed(step) for name, step in order}
            monitored()
            found["sampled"] = timed(monitored)
            for name, values in () if warm_up else seconds.items():
                values.append(found[name])
        samples = len(file.read_text().splitlines())
    assert samples == rounds + 1, f"{samples} samples in {rounds + 1} rounds"
    sampled, between = (ratio(seconds[name], seconds["off"]) for name in ("sampled", "between"))
    return {
        "backend": backend,
        "compiled": compiled,
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "sampled": sampled,
        "between": between,
        "share": (sampled["ratio"] - 1) / EVERY,
    }


def timed(step: Callable[[], None]) -> float:
    """Return the seconds of one call: on a CPU the process time, independent of other load."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    synchronize()
    start = clock()
    step()
    synchronize()
    return clock() - start


def main() -> None:
    arguments = options(
        __doc__, rounds=40, hidden=256, layers=2, batch=4, sequence=128, quick=False
    )
    if arguments.quick:
        arguments.hidden, arguments.layers, arguments.rounds = 128, 1, 5

    model = llama(arguments.hidden, arguments.layers, 2048).to(device())
    batch = torch.randint(256, (arguments.batch, arguments.sequence), device=device())
    measured = []
    for backend, compiled in RECIPES[: len(RECIPES) - arguments.quick]:
        measured.append(measure(model, backend, compiled, batch, arguments.rounds))
        torch.compiler.reset()
    figures = {"every": EVERY, "limit": LIMIT, "recipes": measured}
    printed("monitor", write_json(arguments, "cost of a monitor", **figures))
    if costly := [each["backend"] for each in measured if each["share"] > LIMIT]:
        raise SystemExit(f"over {100 * LIMIT:g} % of the time: {', '.join(costly)}")


if __name__ == "__main__":
    main()
