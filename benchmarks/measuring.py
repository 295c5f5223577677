"""Share between benchmarks: interleaved timing, ratios with their interval, resident memory, the
baseline of FP8, a JSON record of the machine.

As a script, print the name of this CPU's features, used in the names of its records.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import math
import os
import platform
import random
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

OTHERS = ("triton", "bitsandbytes", "fp8-backends")
"""Distributions with versions in a record, besides `hardware.LIBRARIES`."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Training without FP8, by the name used in place of a backend's."""
_BF16_FEATURES = {
    "amx_bf16": "amx_bf16",
    "avx512_bf16": "avx512_bf16",
    "avx_ne_convert": "avx2_bf16",
    "bf16": "neon_bf16",
    "sve_bf16": "neon_bf16",
}
"""By capability, as named by `torch.cpu.get_capabilities`; the best first, the last two are
Arm's."""


def cpu_features() -> str:
    """Return the instructions used by PyTorch on this CPU in its current setting: `avx512_bf16` and
    the like with bf16 products in hardware, else `avx2`, `avx512`, `neon`, …"""
    from fp8_backends.compute import hardware

    capabilities = torch.cpu.get_capabilities()
    if hardware.cpu_bf16():
        return next(features for name, features in _BF16_FEATURES.items() if capabilities.get(name))
    return "neon" if capabilities.get("neon") else torch.backends.cpu.get_cpu_capability().lower()


def switched() -> str:
    """Return manual switches that keep PyTorch from using all of this CPU; empty if there are
    none."""
    vectors = os.environ.get("ATEN_CPU_CAPABILITY")
    parts = [
        f"ATEN_CPU_CAPABILITY={vectors}" if vectors else "",
        "" if torch.backends.mkldnn.enabled else "oneDNN off",
    ]
    return ", ".join(filter(None, parts))


def plain(device: str | None = None) -> str:
    """Return the fast precision without FP8 on this machine's device, or on another: `bf16`, or
    `fp32` on a CPU without bf16 products. It is FP8's baseline, and Accelerate's precision around
    FP8."""
    from fp8_backends.compute import hardware

    return hardware.fast_precision(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def precision_of(backend: str, **fields) -> dict:
    """Return `Accelerator`'s argument for a backend with recipe fields, or for `bf16` or `fp32`
    without FP8."""
    if backend in DTYPES:
        return {"mixed_precision": "bf16" if backend == "bf16" else "no"}
    import fp8_backends

    return {
        "mixed_precision": "fp8",
        "kwargs_handlers": [fp8_backends.FP8RecipeKwargs(backend=backend, **fields)],
    }


def machine() -> dict:
    """Chip, versions and date of this run. No host name, no paths."""
    from fp8_backends.compute import hardware

    record = {
        "date": datetime.date.today().isoformat(),
        "chip": hardware.describe()["device"],
        "features": cpu_features(),
        "cpu_bf16": hardware.cpu_bf16(),
        **({"switched": switched()} if switched() else {}),
        "gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    return record | {name: hardware.version(name) for name in (*hardware.LIBRARIES, *OTHERS)}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(
    functions: dict, runs: int, warmup: int = 2, seed: int = 0, calls: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each function over `runs` rounds. Each round runs all of them, in a new
    random order, so a drift of the machine's speed affects all equally. calls: number of calls
    between two clock readings, each after a device synchronization; seconds are per call."""
    names, order = list(functions), random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(warmup + runs):
        order.shuffle(names)
        for name in names:
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                functions[name]()
            synchronize()
            if round_ >= warmup:
                seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def ratio(numerator: list[float], denominator: list[float], resamples: int = 4000) -> dict:
    """Return the median of the ratios paired by round, with a 95 % bootstrap interval."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(resamples)
    )
    return {
        "ratio": statistics.median(ratios),
        "low": medians[math.floor(0.025 * resamples)],
        "high": medians[math.ceil(0.975 * resamples) - 1],
        "runs": len(ratios),
    }


def interval(of: dict) -> str:
    """A ratio with its interval, as text."""
    return f"{of['ratio']:.3f} [{of['low']:.3f}, {of['high']:.3f}]"


def summary(seconds: list[float]) -> dict:
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "runs": len(seconds),
    }


class Attempts:
    """Run one backend after another: report and remember failures, and continue."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def __call__(self, label: str, function: Callable, *arguments) -> Any:
        """Return the function's result; None if it raises. A missing library is no failure."""
        try:
            return function(*arguments)
        except ImportError as error:
            print(f"not run: {label}: {error}", flush=True)
        except Exception:
            traceback.print_exc()
            print(f"failed: {label}", flush=True)
            self.failed.append(label)
        return None

    def end(self) -> None:
        """Exit with 1 if anything failed."""
        if self.failed:
            raise SystemExit(f"failed: {', '.join(self.failed)}")


def settle() -> None:
    """Return freed memory to the system, as far as the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def resident() -> dict[str, int]:
    """Bytes in RAM now and at the highest since the last reset. Without /proc both are the highest
    ever."""
    try:
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return {
            name: int(fields[key].split()[0]) * 1024
            for name, key in (("now", "VmRSS"), ("highest", "VmHWM"))
        }
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return dict.fromkeys(
            ("now", "highest"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        )


def reset_highest() -> bool:
    """Reset the system's record of this process's highest resident memory; False if it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def write_json(path: str | None, record: dict) -> None:
    """Write the record with the machine's description; do nothing without a path."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"machine": machine(), **record}, indent=1) + "\n")


def table(header: list[str], rows: list[list]) -> str:
    """Plain aligned text."""
    cells = [
        header,
        *[[f"{c:.3f}" if isinstance(c, float) else str(c) for c in row] for row in rows],
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


if __name__ == "__main__":
    print(cpu_features())
