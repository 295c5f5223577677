"""What every benchmark here shares: interleaved timing, ratios with their interval, a JSON record of the machine."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import random
import statistics
import time
from pathlib import Path

import torch


def machine() -> dict:
    """Chip, versions and date of this run. No host name, no paths."""
    from fp8_backends import hardware

    record = {
        "date": datetime.date.today().isoformat(),
        "chip": hardware.describe().device,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    return record | {name: hardware.version(name) for name in (*hardware.LIBRARIES, "triton", "fp8-backends")}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(functions: dict, runs: int, warmup: int = 2, seed: int = 0) -> dict[str, list[float]]:
    """Seconds of each function over `runs` rounds. Each round runs all of them once, in a new random order, so that
    a drift of the machine's speed meets all alike."""
    names, order = list(functions), random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(warmup + runs):
        order.shuffle(names)
        for name in names:
            synchronize()
            start = time.perf_counter()
            functions[name]()
            synchronize()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(numerator: list[float], denominator: list[float], resamples: int = 4000) -> dict:
    """Median of the ratios paired by round, with a 95 % bootstrap interval of that median."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return {
        "ratio": statistics.median(ratios),
        "low": medians[math.floor(0.025 * resamples)],
        "high": medians[math.ceil(0.975 * resamples) - 1],
        "runs": len(ratios),
    }


def summary(seconds: list[float]) -> dict:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds), "runs": len(seconds)}


def write_json(path: str | None, record: dict) -> None:
    """Write the record with the machine's description; nothing when no path was given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"machine": machine(), **record}, indent=1) + "\n")


def table(header: list[str], rows: list[list]) -> str:
    """Plain aligned text."""
    cells = [header, *[[f"{c:.3f}" if isinstance(c, float) else str(c) for c in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
