"""Measure this chip's limits: matrix products in bf16 and in FP8, and a copy in its memory.

They are the baseline of the other measurements in the same run. Products are PyTorch's own, of random values, square
and of the shapes of Llama's layers; the copy's bytes are those read plus those written. The highest rate counts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import interleaved, summary, table, write_json  # noqa: E402

SIZES = {
    "cuda": [(8192, 8192, 8192), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 8192, 8192)],
    "cpu": [(64, 96, 128)],
}
"""(m, k, n) of [m, k] x [k, n]."""
COPIED = {"cuda": 4 * 2**30, "cpu": 2**20}
"""Bytes of the copied tensor: many times the size of caches."""
REPEATS = {"cuda": 20, "cpu": 2}
"""Products between two readings of the clock."""


def products(device: str, size: tuple[int, int, int]) -> dict:
    """bf16, FP8 with fast and with full accumulation, FP8 with a scale for each row."""
    m, k, n = size
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    half = a.bfloat16(), b.bfloat16().t()
    codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    rows, columns = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)

    def fp8(scale_a: torch.Tensor, scale_b: torch.Tensor, fast: bool):
        return lambda: torch._scaled_mm(*codes, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return {
        "bf16": lambda: half[0] @ half[1],
        "FP8, fast accumulation": fp8(one, one, True),
        "FP8": fp8(one, one, False),
        "FP8, a scale for each row": fp8(rows, columns, True),
    }


def repeated(function, times: int):
    def run() -> None:
        for _ in range(times):
            function()

    return run


def rates(device: str, runs: int) -> list[dict]:
    found = []
    for size in SIZES[device]:
        functions = {name: repeated(f, REPEATS[device]) for name, f in products(device, size).items()}
        for name, seconds in interleaved(functions, runs).items():
            time = summary(seconds)
            flops = 2 * size[0] * size[1] * size[2] * REPEATS[device] / time["median_s"]
            found.append({"product": name, "size": size, "flops_per_second": flops, **time})
    return found


def copy_bandwidth(device: str, runs: int) -> dict:
    source = torch.randint(256, (COPIED[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, runs)["copy"]
    time = summary(seconds)
    return {"bytes": source.nbytes, "bytes_per_second": 2 * source.nbytes / time["median_s"], **time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, copied = rates(device, arguments.runs), copy_bandwidth(device, arguments.runs)
    best: dict[str, float] = {}
    for each in found:
        best[each["product"]] = max(best.get(each["product"], 0.0), each["flops_per_second"])
    rows = [[each["product"], "x".join(map(str, each["size"])), each["flops_per_second"] / 1e12] for each in found]
    print(table(["product", "m x k x n", "TFLOP/s"], rows))
    print(f"copy: {copied['bytes_per_second'] / 1e9:.0f} GB/s, read plus written")
    record = {"question": "limits of the hardware", "best_flops_per_second": best, "copy": copied, "products": found}
    write_json(arguments.json, record)


if __name__ == "__main__":
    main()
