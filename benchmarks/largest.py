"""Find a backend's largest micro-batch and largest model in a given memory, and its tokens a second
at its best batch.

Train two sizes and extrapolate their peaks by a line; try the predicted size, then its neighbours,
until one fits and the next does not. On a GPU a size fits if a whole step with AdamW's states
completes within memory; on a CPU if the tensors of this step stay within `--memory`. The largest
model has more decoder layers of the same shape, at a batch of one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from measuring import Attempts, plain, synchronize, table, write_json
from step import runnable
from training import SHAPES, Text, Training, device, free

MOST_TRIES = 10
"""Trials beyond the first two. After them the exact size is given up, as noted in `exact_batch` and
`exact_layers`."""


class Probe:
    """Train a backend at some size and tell if it fits."""

    def __init__(self, backend: str, form: str, arguments, text: Text) -> None:
        self.backend, self.form, self.arguments, self.text = backend, form, arguments, text
        self.memory = arguments.memory or (
            torch.cuda.get_device_properties(0).total_memory if device() == "cuda" else 0
        )
        if not self.memory:
            raise SystemExit("--memory: without a GPU, how many bytes there are has to be said")

    def run(self, batch: int, layers: int | None) -> dict | None:
        """Return peak bytes, tokens a second and parameters; None for a size that does not fit."""
        try:
            found = self._train(batch, layers)
        except torch.OutOfMemoryError:
            found = None
        free()
        return found if found and found["peak_bytes"] <= self.memory else None

    def _train(self, batch: int, layers: int | None) -> dict:
        training = Training(self.backend, self.arguments.shape, self.text, batch, self.form, layers)
        for _ in range(2 if self.form == "compiled" else 1):  # makes the optimizer's states
            training.step()
        seconds = []
        if device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(self.arguments.steps):
            synchronize()
            start = time.perf_counter()
            training.step()
            synchronize()
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() if device() == "cuda" else training.peak()
        tokens = batch * self.text.sequence / statistics.median(seconds)
        return {
            "peak_bytes": peak,
            "tokens_per_second": tokens,
            "parameters": training.parameters(),
        }


def largest(
    probe: Callable[[int], dict | None], memory: float
) -> tuple[int, dict[int, dict | None]]:
    """Return the largest size that fits (0: none), and the results of each tried size."""
    tried = {size: probe(size) for size in (1, 2)}
    for _ in range(MOST_TRIES):
        fits = sorted(size for size, found in tried.items() if found)
        too_large = min((size for size, found in tried.items() if not found), default=None)
        if not fits or too_large == fits[-1] + 1:
            break
        tried[size] = probe(size := _next_size(fits, too_large, tried, memory))
    return max((size for size, found in tried.items() if found), default=0), tried


def _next_size(fits: list[int], too_large: int | None, tried: dict, memory: float) -> int:
    """Return the intersection of memory with the line through the two largest fitting sizes. The
    peak bends upwards when another part of the step dominates it, so a promise beyond a failed size
    is halved."""
    best = fits[-1]
    (below, low), (_, high) = ((size, tried[size]["peak_bytes"]) for size in fits[-2:])
    growth = max(1, (high - low) / (best - below))
    promised = best + int((memory - high) / growth)
    limit = 16 * best if too_large is None else min(too_large - 1, (best + too_large + 1) // 2)
    return max(best + 1, min(promised, limit))


def measure(backend: str, form: str, arguments, text: Text) -> dict:
    probe = Probe(backend, form, arguments, text)
    result: dict = {"backend": backend, "form": form}
    if "batch" in arguments.questions:
        batch, tried = largest(lambda size: probe.run(size, arguments.layers), probe.memory)
        fits = {size: found for size, found in tried.items() if found}
        for size in (2**power for power in range(2, 12) if 2**power < batch):
            if size not in fits and (found := probe.run(size, arguments.layers)):
                fits[size] = found
        best = max(fits, key=lambda size: fits[size]["tokens_per_second"], default=None)
        result |= {"largest_batch": batch, "best_batch": best, "by_batch": fits}
        result["exact_batch"] = batch + 1 in tried
        result["best_tokens_per_second"] = fits[best]["tokens_per_second"] if best else None
    if "model" in arguments.questions:
        layers, tried = largest(lambda size: probe.run(1, size), probe.memory)
        result |= {"largest_layers": layers, "exact_layers": layers + 1 in tried}
        result["largest_parameters"] = tried[layers]["parameters"] if layers else None
    return result


def printed(results: list[dict]) -> str:
    def of(result: dict, key: str, scale: float = 1) -> object:
        value = result.get(key)
        return "-" if value is None else round(value / scale, 2) if scale > 1 else round(value)

    header = [
        "backend",
        "form",
        "largest batch",
        "best batch",
        "tokens/s there",
        "layers",
        "billion parameters",
    ]
    keys = ["largest_batch", "best_batch", "best_tokens_per_second", "largest_layers"]
    rows = [
        [r["backend"], r["form"], *(of(r, key) for key in keys), of(r, "largest_parameters", 1e9)]
        for r in results
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = device() == "cuda"
    parser.add_argument(
        "--backends", default="te:delayed,ao:tensorwise,native:dynamic,msamp:O1,msamp:O2,msamp:O3"
    )
    parser.add_argument("--form", choices=("eager", "compiled"), default="eager")
    parser.add_argument("--questions", default="batch,model")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b-4layers" if cuda else "tiny")
    parser.add_argument("--layers", type=int, help="of the model whose largest batch is asked for")
    parser.add_argument("--sequence", type=int, default=4096 if cuda else 64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory", type=float, help="bytes; default: the GPU's")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    text, results, attempt = Text(arguments.sequence), [], Attempts()
    for backend, form in runnable(arguments.backends.split(","), [arguments.form]):
        if found := attempt(f"{backend}, {form}", measure, backend, form, arguments, text):
            results.append(found)
        told = {name: value for name, value in vars(arguments).items() if name != "json"}
        record = {
            "question": "largest batch and model",
            "precision": plain(),
            "arguments": told,
            "results": results,
        }
        write_json(arguments.json, record)
        print(printed(results[-1:]), flush=True)
    print(printed(results))
    attempt.end()


if __name__ == "__main__":
    main()
