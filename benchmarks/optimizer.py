"""How long does an optimizer step over MS-AMP's states take, against `torch.optim.AdamW(fused=True)` over FP32?

All run interleaved in one process over as many elements; the ratio is to the fused step's time in the same round.
"""

from __future__ import annotations

import argparse

import torch
from measuring import interleaved, ratio, summary, table, write_json

from fp8_backends.kernels.compiled import Slot, adam_hyper, scaled_adam_
from fp8_backends.scaled_tensor import quantize

E4M3, FP16 = torch.float8_e4m3fn, torch.float16
LEVELS = {
    "O1": (FP16, None, None, 0, False),
    "O2": (FP16, E4M3, FP16, 0, False),
    "O2, nearest": (FP16, E4M3, FP16, 0, False),
    "O2, blocks of 128": (FP16, E4M3, FP16, 128, False),
    "O2, blocks of 32": (FP16, E4M3, FP16, 32, False),
    "O3": (FP16, E4M3, FP16, 0, True),
}
"""weight (O3: the master), exp_avg, exp_avg_sq, block size of exp_avg, whether an E4M3 copy of the weight is made."""


def slot(values: torch.Tensor, dtype: torch.dtype | None, block_size: int = 0) -> Slot:
    if dtype is None:
        return Slot(values)
    made = quantize(values, dtype, block_size=block_size)
    return Slot(made._data, made._scale_inv, block_size)


def bytes_of(slots) -> int:
    return sum(part.nbytes for each in slots if each for part in each[:2] if part is not None)


def scaled_step(level: str, numel: int, device: str, compiled: bool):
    """The step over one tensor of `numel` elements, and its bytes an element, gradient included."""
    weight, exp_avg, exp_avg_sq, block_size, copied = LEVELS[level]
    values = torch.randn(numel, device=device) * 0.02
    slots = [slot(values, weight), slot(values, E4M3)]
    slots += [slot(torch.zeros(numel, device=device), exp_avg, block_size)]
    slots += [slot(torch.zeros(numel, device=device), exp_avg_sq)]
    copy = slot(values, E4M3) if copied else None
    options = {"decoupled": True, "maximize": False, "seed": 0, "compiled": compiled, "copy": copy}
    options["rounding"] = "nearest" if "nearest" in level else "stochastic"
    count = torch.zeros(())

    def step():
        count.add_(1)
        scaled_adam_(*slots, adam_hyper(1e-4, (0.9, 0.999), 1e-8, 0.01, count, device), **options)

    return step, bytes_of([*slots, copy]) / numel


def fused_step(numel: int, device: str):
    weight = torch.nn.Parameter(torch.randn(numel, device=device))
    weight.grad = torch.randn(numel, device=device)
    return torch.optim.AdamW([weight], lr=1e-4, fused=True).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", default=";".join(LEVELS), help="separated by semicolons")
    parser.add_argument("--elements", type=int, default=2**28 if torch.cuda.is_available() else 2**25)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps, size = {"fused FP32": fused_step(arguments.elements, device)}, {"fused FP32": 16.0}
    for level in arguments.levels.split(";"):
        steps[level], size[level] = scaled_step(level, arguments.elements, device, not arguments.eager)
    seconds = interleaved(steps, arguments.runs)
    rows, results = [], []
    for name in steps:
        against = ratio(seconds[name], seconds["fused FP32"])
        nanoseconds = summary(seconds[name])["median_s"] / arguments.elements * 1e9
        rows.append([name, size[name], nanoseconds, against["ratio"], against["low"], against["high"]])
        results.append({"step": name, "bytes": size[name], **summary(seconds[name]), "to_fused": against})
    print(table(["step", "bytes / element", "ns / element", "time / fused", "low", "high"], rows))
    record = {"question": "time of an optimizer step", "elements": arguments.elements, "compiled": not arguments.eager}
    write_json(arguments.json, {**record, "results": results})


if __name__ == "__main__":
    main()
