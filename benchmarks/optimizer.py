"""Time an optimizer step over MS-AMP's states, relative to `torch.optim.AdamW(fused=True)` over
FP32, TorchAO's and bitsandbytes' low-bit AdamW, and a copy in memory.

All run interleaved in one process over the same number of elements; ratios refer to the other's
time in the same round. Bytes moved are a step's reads and writes without caches: one pass for the
levels. The share is relative to a copy's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from measuring import device, interleaved, options, ratio, summary, write_json
from tables import printed

from fp8_backends.formats.formats import E4M3, E4M11, FP16, ROOT8, Format
from fp8_backends.kernels.adam import AdamSteps, Job, Slot, adam_hypers
from fp8_backends.kernels.adam_table import measured
from fp8_backends.tensors.scaled_tensor import quantize


class Level(NamedTuple):
    """Describe the formats of a level; None: FP32."""

    weight: Format
    """At O3 the master's format."""
    exp_avg: Format | None = None
    exp_avg_sq: Format | None = None
    block_size: int = 0
    """Block size of exp_avg, and of exp_avg_sq in ROOT8."""
    copied: bool = False
    """True to write an E4M3 copy of the weight."""


LEVELS = {
    "O1": Level(FP16),
    "O2": Level(FP16, E4M3, FP16),
    "O2, nearest": Level(FP16, E4M3, FP16),
    "O2, blocks of 128": Level(FP16, E4M3, FP16, 128),
    "O2, blocks of 32": Level(FP16, E4M3, FP16, 32),
    "O3": Level(FP16, E4M3, FP16, copied=True),
    "O4": Level(E4M11, E4M3, ROOT8, 128),
}
FUSED, TORCHAO = "torch fused, FP32", "torchao AdamWFp8"
PEERS = (TORCHAO, "torchao AdamW8bit", "bitsandbytes AdamW8bit")
COPY = "copy"
COMPARED_FROM = 2**20


@dataclass
class Step:
    run: Callable[[], object]
    bytes: float | None = None
    """An element: weight, gradient and states."""
    moved: float | None = None
    """An element, read and written in a step."""


def slot(values: torch.Tensor, fmt: Format | None, block_size: int = 0) -> Slot:
    if fmt is None:
        return Slot(values)
    made = (
        quantize(values, torch.int8)
        if fmt is E4M11
        else quantize(values, fmt.dtype, block_size=block_size)
    )
    return Slot(made.codes, made.scale_inv, block_size, made.residual)


def bytes_of(slots) -> int:
    tensors = [
        part for each in slots if each for part in (each.data, each.scale_inv, each.residual)
    ]
    return sum(part.nbytes for part in tensors if part is not None)


def scaled_step(level: str, numel: int, tensors: int, device: str, compiled: bool) -> Step:
    """The step of a level over `tensors` parameters of `numel` elements in all."""
    weight, exp_avg, exp_avg_sq, block_size, copied = LEVELS[level]
    parameters = []
    for part in (torch.randn(numel, device=device) * 0.02).tensor_split(tensors):
        zeros = torch.zeros_like(part)
        slots = [slot(part, weight), slot(part, E4M3), slot(zeros, exp_avg, block_size)]
        slots += [slot(zeros.clone(), exp_avg_sq, block_size if exp_avg_sq is ROOT8 else 0)]
        slots += [slot(part, E4M3) if copied else None]
        parameters.append(slots)
    rounding = "nearest" if "nearest" in level else "stochastic"
    records = [measured(each[0], *each[2:4]) for each in parameters]
    count = torch.zeros(())

    def run() -> None:
        count.add_(1)
        hypers = adam_hypers(1e-4, (0.9, 0.999), 1e-8, 0.01, [count] * tensors, device)
        jobs = [
            Job(*slots, hyper, True, False, rounding, seed, copy, record=record)
            for seed, ((*slots, copy), hyper, record) in enumerate(
                zip(parameters, hypers.unbind(), records, strict=True)
            )
        ]
        AdamSteps(jobs, fused=compiled).run()

    of = [sum(bytes_of([each[i]]) for each in parameters) / numel for i in range(5)]
    read, written = sum(of[:4]), of[0] + of[2] + of[3] + of[4]
    return Step(run, sum(of), read + written)


def peer(name: str) -> type[torch.optim.Optimizer]:
    if name == FUSED:
        return lambda parameters, lr: torch.optim.AdamW(parameters, lr, fused=True)
    library, cls = name.split(" ")
    return getattr(__import__(f"{library}.optim", fromlist=[cls]), cls)


def peer_step(name: str, numel: int, tensors: int, device: str) -> Step:
    """The step of another AdamW over FP32 weights, tried once. Moments of 256 elements share a
    scale: it takes matrices."""
    parameters = []
    for part in range(tensors):
        rows = max(1, (numel * (part + 1) // tensors - numel * part // tensors) // 1024)
        weight = torch.nn.Parameter(torch.randn(rows, 1024, device=device))
        weight.grad = torch.randn_like(weight)
        parameters.append(weight)
    optimizer = peer(name)(parameters, lr=1e-4)
    optimizer.step()
    return Step(optimizer.step, *((16.0, 28.0) if name == FUSED else ()))


def peer_steps(numel: int, tensors: int, device: str) -> dict[str, Step]:
    """Return the available peers; print the reason for each missing one."""
    steps = {}
    if numel < COMPARED_FROM:
        print(
            f"not run: {', '.join(PEERS)}: below {COMPARED_FROM} elements they are calls and "
            "compiling alone"
        )
        return steps
    for name in PEERS:
        try:
            steps[name] = peer_step(name, numel, tensors, device)
        except Exception as error:  # a missing peer, or one without support for this device
            print(
                f"not run: {name}: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}"
            )
    return steps


def copy_step(numel: int, device: str) -> Step:
    """Copy four bytes per element, each read and written."""
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    return Step(lambda: target.copy_(source), None, 8.0)


def result(
    name: str, step: Step, seconds: dict[str, list[float]], elements: int, copied: float
) -> dict:
    """Return one step's figures. copied: bytes per element moved by the copy."""
    found = {"step": name, "bytes": step.bytes, "moved": step.moved, **summary(seconds[name])}
    found["nanoseconds_per_element"] = found["median_s"] / elements * 1e9
    for key, other in (("to_fused", FUSED), ("to_torchao", TORCHAO)):
        if other in seconds:
            found[key] = ratio(seconds[name], seconds[other])
    if step.moved:
        found["copy_share"] = ratio(seconds[COPY], seconds[name])["ratio"] * step.moved / copied
    return found


def main() -> None:
    on = device()
    arguments = options(
        __doc__,
        levels=";".join(LEVELS),
        elements=2**28 if on == "cuda" else 20_000_000,
        tensors=1,
        runs=9,
        eager=False,
    )
    size = arguments.elements, arguments.tensors, on
    steps = {COPY: copy_step(arguments.elements, on), FUSED: peer_step(FUSED, *size)}
    steps |= peer_steps(*size)
    for level in arguments.levels.split(";"):
        steps[level] = scaled_step(level, *size, not arguments.eager)
    functions = {name: step.run for name, step in steps.items()}
    calls = 8 if on == "cuda" else 1  # the GPU waits for Python's first call alone
    seconds = interleaved(functions, arguments.runs, calls=calls, by_events=True)
    results = [
        result(name, step, seconds, arguments.elements, steps[COPY].moved)
        for name, step in steps.items()
    ]
    printed("optimizer", write_json(arguments, "time of an optimizer step", results=results))


if __name__ == "__main__":
    main()
