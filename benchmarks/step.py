"""Compare a whole training step in FP8 with bf16: tokens a second, peak memory, and the loss.

A Llama-shaped model through stock Accelerate (FP32 weights and states, bf16 autocast; a level
stores its own), AdamW, the same batches of text for every backend. On a CPU without bf16 products
FP32 takes the place of bf16. `--together` keeps all models in memory and takes their steps in turn;
without it one follows the other, the plain one runs again at the end, and `drift` is its change.
A steady state comes first: a chip gets slower as it gets hotter, and the first backend must not
have a cooler one. A backend may carry fields: `msamp:O2?fused_head=True&include=+lm_head`.
`--profile` adds the milliseconds of two steps by kinds of kernels.
"""

from __future__ import annotations

import re

import torch
from measuring import (
    DTYPES,
    Attempts,
    clocks,
    device,
    interleaved,
    options,
    plain,
    ratio,
    split,
    summary,
    synchronize,
    timed,
    write_json,
)
from tables import printed
from training import SHAPES, Text, Training, free


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
        "attention": training.attention(),
        "clocks": clocks(),
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


STEADY, MOST_READINGS = 0.01, 12
"""Relative change of two readings of a hot chip, and the most readings before giving up."""


def alone(training: Training, arguments) -> dict:
    """Take steps without another model in memory. Several run between two clock readings, and count
    as their mean: a device synchronization after every step would measure its latency as well."""
    losses = [training.step() for _ in range(arguments.warmup)]

    def read(steps: int) -> float:
        return timed(lambda: losses.append(training.step()), steps)

    readings = [read(arguments.every)]
    while len(readings) < MOST_READINGS:
        readings.append(read(arguments.every))
        if abs(readings[-1] / readings[-2] - 1) < STEADY:
            break
    seconds: list[float] = []
    while len(seconds) < arguments.steps:
        together = min(arguments.every, arguments.steps - len(seconds))
        seconds += [read(together)] * together
    found = {**describe(training, losses, seconds), "seconds": seconds, "until_steady_s": readings}
    if arguments.profile:
        found["profile_ms"] = profile(training)
    return found


KINDS = {
    "attention": r"cudnn.*(sdpa|fmha|attn)|flash|fmha|sdpa",
    "FP8 products": r"nvjet_(sm90_)?[qo]|e4m3|e5m2|fp8.*gemm|f8f8|cutlass.*f8",
    "other products": r"nvjet|gemm|cutlass|cublas|sm90_xmma|s16816",
    "optimizer": r"multi_tensor_apply|FusedAdam|write_kernel|bounds_kernel",
    "own kernels": r"cast_kernel|amax_kernel|vectors_kernel|squares_kernel|cross_entropy_kernel",
    "Inductor": r"^triton_",
    "others": "",
}
"""Names of kernels by kind; the first that fits counts."""


def profile(training: Training, steps: int = 2) -> dict[str, float]:
    """Return the milliseconds of a step by kind of kernel, and from its first kernel to its last."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        for _ in range(steps):
            training.step()
        synchronize()
    kernels = [e for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spent = dict.fromkeys(KINDS, 0.0)
    for each in kernels:
        kind = next(kind for kind, names in KINDS.items() if re.search(names, each.name))
        spent[kind] += each.time_range.elapsed_us() / steps / 1e3
    ends = [time for e in kernels for time in (e.time_range.start, e.time_range.end)] or [0.0]
    return spent | {"first to last kernel": (max(ends) - min(ends)) / steps / 1e3}


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


def runnable(backends: list[str], forms: list[str]) -> list[tuple[str, str]]:
    """Return every backend in every form, the plain one first; a backend without its library is
    named, not hidden."""
    import fp8_backends

    names = []
    for backend in dict.fromkeys([plain(), *backends]):
        name, _ = split(backend)
        available = (
            name in DTYPES or fp8_backends.available_backends()[fp8_backends.resolve(name).compute]
        )
        if available:
            names += [(backend, form) for form in forms]
        else:
            print(f"not run: {backend}: {available.reason}", flush=True)
    return sorted(names, key=lambda name: forms.index(name[1]))


def main() -> None:
    cuda = device() == "cuda"
    shapes = dict.fromkeys(["1b" if cuda else "small", *SHAPES])
    arguments = options(
        __doc__,
        backends="native:dynamic,native:delayed,ao:tensorwise,msamp:O2",
        forms="eager",
        shape=tuple(shapes),
        layers=int,
        sequence=4096 if cuda else 128,
        batch=2 if cuda else 4,
        steps=10,
        warmup=4,
        every=4 if cuda else 1,
        together=False,
        profile=False,
    )
    text = Text(arguments.sequence)

    def make(backend: str, form: str) -> Training:
        return Training(backend, arguments.shape, text, arguments.batch, form, arguments.layers)

    def keep(found: dict) -> dict:
        results = results_of(found)
        return write_json(
            arguments, "cost of a training step", text=text.text.description, results=results
        )

    names = runnable(arguments.backends.split(","), arguments.forms.split(","))
    attempt = Attempts()
    if arguments.together:
        found = together(names, make, arguments)
    else:
        found = in_turn(names, make, arguments, keep, attempt)
    printed("step", keep(found))
    attempt.end()


if __name__ == "__main__":
    main()
