"""Share between benchmarks: options, timing in turns, ratios with their interval, resident memory,
processes of their own, the baseline of FP8, a JSON record of the machine, plain tables.

As a script, print the name of this CPU's features, used in the names of its records.
"""

from __future__ import annotations

import argparse
import ast
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
import subprocess
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


def split(spec: str) -> tuple[str, dict[str, Any]]:
    """Return backend and recipe fields of text such as `native:dynamic?field=value&other=1`."""
    backend, _, told = spec.partition("?")
    pairs = (each.partition("=") for each in told.split("&") if each)
    return backend, {name: _value(text) for name, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def precision_of(spec: str, **fields) -> dict:
    """Return `Accelerator`'s argument for a backend with recipe fields, or for `bf16` or `fp32`
    without FP8."""
    backend, told = split(spec)
    if backend in DTYPES:
        return {"mixed_precision": "bf16" if backend == "bf16" else "no"}
    import fp8_backends

    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **told | fields)
    return {"mixed_precision": "fp8", "kwargs_handlers": [recipe]}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def options(description: str, **defaults: Any) -> argparse.Namespace:
    """Parse a benchmark's options, and `--json FILE` for its record.

    Args:
        defaults: by the option's name. False makes a switch, a tuple lists the choices with the
            default first, and a type has no default. `worker` is for the benchmark's own processes.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (defaults | {"json": str}).items():
        flag = f"--{name.replace('_', '-')}"
        if name == "worker":
            parser.add_argument(flag, help=argparse.SUPPRESS)
        elif default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        else:
            choices = default if isinstance(default, tuple) else None
            first = default[0] if choices else default
            shown = str(first).replace("%", "%%")
            parser.add_argument(
                flag, type=type(first), choices=choices, default=first, help=f"default: {shown}"
            )
    return parser.parse_args()


def answer(script: str, *words: object, ranks: int = 0, **environment: str) -> Any:
    """Return the JSON in the last line of another process's output.

    Args:
        ranks: processes to start by `torchrun`; 0 starts one without it.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [sys.executable, *(launcher if ranks else []), script, *map(str, words)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} ended with {done.returncode}, see above")
    return json.loads(done.stdout.splitlines()[-1])


RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Make the C library return freed blocks of 64 KB to the system at once: otherwise resident memory
would include its reserves."""


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


def timed(function: Callable, calls: int = 1, by_events: bool = False) -> float:
    """Return the seconds of one of several calls, between two device synchronizations.

    Args:
        by_events: read a GPU's own clock, before the first and after the last kernel.
    """
    synchronize()
    events = []
    if by_events and torch.cuda.is_available():
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if events:
        events[1].record()
    synchronize()
    if events:
        return events[0].elapsed_time(events[1]) / 1e3 / calls
    return (time.perf_counter() - start) / calls


def interleaved(
    functions: dict, runs: int, warmup: int = 2, calls: int = 1, by_events: bool = False
) -> dict[str, list[float]]:
    """Return the seconds of each function over `runs` rounds. Each round runs all of them, in a new
    random order, so a drift of the machine's speed affects all equally."""
    names, order = list(functions), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(warmup + runs):
        order.shuffle(names)
        for name in names:
            taken = timed(functions[name], calls, by_events)
            if round_ >= warmup:
                seconds[name].append(taken)
    return seconds


def clocks() -> dict[str, float] | None:
    """Return a GPU's clock in MHz, its power in W and its temperature; None without a GPU."""
    names = ("clocks.sm", "power.draw", "temperature.gpu")
    query = [f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "--id=0"]
    if not torch.cuda.is_available():
        return None
    try:
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True)
        return dict(zip(names, map(float, done.stdout.split(",")), strict=True))
    except (OSError, ValueError):  # a driver without the tool, or without one of the figures
        return None


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


def summary(seconds: list[float]) -> dict:
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "runs": len(seconds),
    }


def pool(workers: int):
    """Return processes of one thread each."""
    context = torch.multiprocessing.get_context("spawn")
    return context.Pool(workers, torch.set_num_threads, (1,), 1)


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


def write_json(arguments: argparse.Namespace, question: str, **figures: Any) -> dict:
    """Return the record with the machine and the options; write it if there is a file."""
    asked = {name: of for name, of in vars(arguments).items() if name not in ("json", "worker")}
    told = {"question": question, "precision": plain(), "arguments": asked}
    record = {"machine": machine(), **told, **figures}
    if arguments.json:
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def table(header: list[str], rows: list[list]) -> str:
    """A simple table of reStructuredText. The first column must not be empty."""
    cells = [header, *[[text(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    rule = "  ".join("=" * width for width in widths)
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def text(cell: object) -> str:
    if cell in (None, "-"):
        return "\N{EN DASH}"  # a lone hyphen would begin a list
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else str(round(cell))
    return str(cell)


if __name__ == "__main__":
    print(cpu_features())
