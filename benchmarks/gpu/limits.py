"""Measure the limits of this chip: rates of bf16 and FP8 products by shape, and the bandwidth of a
copy.

Other measurements of the same run are compared with the highest rates. Products are PyTorch's own,
of random values: squares, the shapes of Llama's layers, a range of K, and a range of tokens. A
copy's bytes are read plus written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import device, interleaved, options, summary, write_json  # noqa: E402

LAYERS = [
    (2048, 2048),
    (2048, 8192),
    (8192, 2048),
    (4096, 4096),
    (4096, 6144),
    (4096, 14336),
    (14336, 4096),
]
"""(k, n) of layers of Llama 1B and 8B."""
SIZES = {
    "cuda": [
        (8192, 8192, 8192),
        (16384, 8192, 8192),
        *((8192, k, n) for k, n in LAYERS),
        *((8192, k, 8192) for k in (256, 512, 1024, 2048, 4096, 16384)),
        *((m, 4096, 4096) for m in (512, 1024, 2048, 4096, 16384)),
        *((4096, 8192, n) for n in (4096, 14336)),
        (14336, 8192, 4096),
    ],
    "cpu": [(64, 96, 128)],
}
"""(m, k, n) of [m, k] x [k, n]. The last three are wgrads of 8,192 tokens."""
COPIED = {"cuda": 4 * 2**30, "cpu": 2**20}
"""Bytes of the tensor that is copied: many times what caches hold."""
FLOPS = {"cuda": 1.2e13, "cpu": 1e7}
"""Operations between two readings of the clock: about 15 ms of FP8 products."""


def products(device: str, size: tuple[int, int, int]) -> dict:
    """Return bf16 and FP8 products by name: fast and full accumulation, FP32 results, rowwise
    scales."""
    m, k, n = size
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    half = a.bfloat16(), b.bfloat16().t()
    codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    rows, columns = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)

    def fp8(
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        fast: bool,
        dtype: torch.dtype = torch.bfloat16,
    ):
        return lambda: torch._scaled_mm(
            *codes, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast
        )

    return {
        "bf16": lambda: half[0] @ half[1],
        "FP8, fast accumulation": fp8(one, one, True),
        "FP8": fp8(one, one, False),
        "FP8, FP32 result": fp8(one, one, False, torch.float32),
        "FP8, a scale for each row": fp8(rows, columns, True),
    }


def repeated(function, times: int, device: str):
    """Return a function of that many calls; a CUDA graph on a GPU, where a small product takes less
    than its launch."""

    def run() -> None:
        for _ in range(times):
            function()

    if device == "cpu":
        return run
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # allocates workspaces before the capture
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def rates(device: str, runs: int) -> list[dict]:
    found = []
    for size in SIZES[device]:
        flops = 2 * size[0] * size[1] * size[2]
        times = max(2, int(FLOPS[device] / flops))
        functions = {name: repeated(f, times, device) for name, f in products(device, size).items()}
        for name, seconds in interleaved(functions, runs).items():
            time = summary(seconds)
            found.append(
                {
                    "product": name,
                    "size": size,
                    "flops_per_second": flops * times / time["median_s"],
                    **time,
                }
            )
    return found


def copy_bandwidth(device: str, runs: int) -> dict:
    source = torch.randint(256, (COPIED[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, runs)["copy"]
    time = summary(seconds)
    return {
        "bytes": source.nbytes,
        "bytes_per_second": 2 * source.nbytes / time["median_s"],
        **time,
    }


def main() -> None:
    arguments, on = options(__doc__, runs=5), device()
    found, copied = rates(on, arguments.runs), copy_bandwidth(on, arguments.runs)
    best: dict[str, float] = {}
    for each in found:
        best[each["product"]] = max(best.get(each["product"], 0.0), each["flops_per_second"])
    for product, rate in best.items():
        print(f"{product}: {rate / 1e12:.3g} TFLOP/s")
    print(f"copy: {copied['bytes_per_second'] / 1e9:.0f} GB/s, read plus written")
    write_json(
        arguments, "limits of the hardware", best_flops_per_second=best, copy=copied, products=found
    )


if __name__ == "__main__":
    main()
