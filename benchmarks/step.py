"""Compare a whole training step in FP8 with bf16: tokens a second, peak memory, and the loss.

A Llama-shaped model through stock Accelerate (FP32 weights and states, bf16 autocast; a level
stores its own), AdamW, the same batches of text for every backend. On a CPU without bf16 products
FP32 takes the place of bf16. `--together` keeps all models in memory and takes their steps in turn;
without it one follows the other, the plain one runs again at the end, and `drift` is its change.
"""

from __future__ import annotations

import argparse
import time

import torch
from measuring import (
    DTYPES,
    Attempts,
    interleaved,
    interval,
    plain,
    ratio,
    summary,
    synchronize,
    table,
    write_json,
)
from training import SHAPES, Text, Training, device, free


def describe(training: Training, losses: list[torch.Tensor], seconds: list[float]) -> dict:
    """Summarize one backend's run. Losses are of single steps; the last is a mean over a fifth of
    them."""
    import fp8_backends

    values = [loss.item() for loss in losses]
    tail = values[-max(1, len(values) // 5) :]
    audit = fp8_backends.audit(training.model, training.optimizer)
    time_ = summary(seconds)
    return {
        **time_,
        "tokens_per_second": training.batch * training.text.sequence / time_["median_s"],
        "peak_bytes": training.peak(),
        "flops": training.flops(),
        "flops_share": audit.flops_share,
        "bytes_per_parameter": audit.bytes_per_parameter["total"],
        "parameters": training.parameters(),
        "last_loss": sum(tail) / len(tail),
        "losses": values,
    }


def together(names: list[tuple[str, str]], make, arguments) -> dict:
    trainings = {name: make(*name) for name in names}
    losses: dict = {name: [] for name in names}
    steps = {name: lambda name=name: losses[name].append(trainings[name].step()) for name in names}
    seconds = interleaved(steps, arguments.steps, arguments.warmup)
    return {
        name: {**describe(trainings[name], losses[name], seconds[name]), "seconds": seconds[name]}
        for name in names
    }


def alone(training: Training, arguments) -> dict:
    """Take steps without another model in memory. Several run between two clock readings, and count
    as their mean: a device synchronization after every step would measure its latency as well."""
    losses = [training.step() for _ in range(arguments.warmup)]
    seconds: list[float] = []
    while len(seconds) < arguments.steps:
        together = min(arguments.every, arguments.steps - len(seconds))
        synchronize()
        start = time.perf_counter()
        losses += [training.step() for _ in range(together)]
        synchronize()
        seconds += [(time.perf_counter() - start) / together] * together
    return {**describe(training, losses, seconds), "seconds": seconds}


def in_turn(names: list[tuple[str, str]], make, arguments, keep, attempt: Attempts) -> dict:
    found: dict = {}
    for name in [*names, names[0]]:
        result = attempt(", ".join(name), lambda name=name: alone(make(*name), arguments))
        if result and name in found:
            found[name]["drift"] = result["median_s"] / found[name]["median_s"]
        elif result:
            found[name] = result
        keep(found)
        free()
    return found


def results_of(found: dict) -> list[dict]:
    """Return the recorded list: each with its ratios to the plain step in the same form, above 1 is
    faster."""
    results = []
    for (backend, form), each in found.items():
        reference = found.get((plain(), form))
        result = {
            "backend": backend,
            "form": form,
            **{k: v for k, v in each.items() if k != "seconds"},
        }
        if reference:
            result["times_plain"] = ratio(reference["seconds"], each["seconds"])
            known = each["peak_bytes"] is not None
            result["peak_to_plain"] = (
                each["peak_bytes"] / reference["peak_bytes"] if known else None
            )
        results.append(result)
    return results


def printed(results: list[dict]) -> str:
    times, peaks = f"times {plain()}", f"peak / {plain()}"
    header = ["backend", "form", "tokens/s", times, "peak MB", peaks, "FP8 share", "last loss"]
    rows = []
    for r in results:
        speed = interval(r["times_plain"]) if "times_plain" in r else "-"
        peak = round(r["peak_bytes"] / 1e6) if r["peak_bytes"] else "-"
        rows.append([r["backend"], r["form"], round(r["tokens_per_second"]), speed, peak])
        rows[-1] += [r.get("peak_to_plain") or "-", r["flops_share"], r["last_loss"]]
    return table(header, rows)


def runnable(backends: list[str], forms: list[str]) -> list[tuple[str, str]]:
    """Return every backend in every form, the plain one first; a backend without its library is
    named, not hidden."""
    import fp8_backends

    names = []
    for backend in dict.fromkeys([plain(), *backends]):
        available = (
            backend in DTYPES
            or fp8_backends.available_backends()[fp8_backends.resolve(backend).compute]
        )
        if available:
            names += [(backend, form) for form in forms]
        else:
            print(f"not run: {backend}: {available.reason}", flush=True)
    return sorted(names, key=lambda name: forms.index(name[1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = device() == "cuda"
    parser.add_argument(
        "--backends", default="native:dynamic,native:delayed,ao:tensorwise,msamp:O2"
    )
    parser.add_argument(
        "--forms", default="eager", help="eager, compiled (each decoder layer) or both with a comma"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="1b" if cuda else "small")
    parser.add_argument("--layers", type=int, help="in place of the shape's own")
    parser.add_argument("--sequence", type=int, default=4096 if cuda else 128)
    parser.add_argument("--batch", type=int, default=2 if cuda else 4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument(
        "--every",
        type=int,
        default=4 if cuda else 1,
        help="steps between two readings of the clock",
    )
    parser.add_argument(
        "--together", action="store_true", help="all models in memory, steps in turn"
    )
    parser.add_argument("--json")
    arguments = parser.parse_args()
    text = Text(arguments.sequence)

    def make(backend: str, form: str) -> Training:
        return Training(backend, arguments.shape, text, arguments.batch, form, arguments.layers)

    def keep(found: dict) -> None:
        told = {name: value for name, value in vars(arguments).items() if name != "json"}
        record = {"question": "cost of a training step", "precision": plain(), "arguments": told}
        record["text"] = text.text.description
        write_json(arguments.json, {**record, "results": results_of(found)})

    names = runnable(arguments.backends.split(","), arguments.forms.split(","))
    attempt = Attempts()
    if arguments.together:
        found = together(names, make, arguments)
    else:
        found = in_turn(names, make, arguments, keep, attempt)
    keep(found)
    print(printed(results_of(found)))
    attempt.end()


if __name__ == "__main__":
    main()
