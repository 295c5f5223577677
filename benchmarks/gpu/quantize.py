"""Compare the bandwidth of kernels that quantize a matrix with the memory's.

Each kernel of the native compute against a copy in the same run: bytes read plus written, over the
time, as a share of the copy's. `dynamic` and `rowwise` read the matrix twice, since the scales
follow from all of it; `least` counts every matrix once. Launches are replayed from a CUDA graph, to
time kernels without Python; `call_us` includes Python. Inputs rotate to miss the cache.

    python benchmarks/gpu/quantize.py [--json FILE]

`tests/gpu/check.py` compares their results with the CPU's. Without a GPU the front's functions run on a
CPU (in Triton's interpreter, with TRITON_INTERPRET=1 and FP8_BACKENDS_TRITON=interpret), as a
rehearsal.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import (  # noqa: E402
    device,
    interleaved,
    options,
    summary,
    synchronize,
    write_json,
)
from tables import printed  # noqa: E402

from fp8_backends.formats import scaling  # noqa: F401
from fp8_backends.formats.formats import E4M3, E5M2  # noqa: E402
from fp8_backends.formats.scaling import MX, ROWS, SQUARES, VECTORS  # noqa: F401
from fp8_backends.kernels import quantize as quantization  # noqa: F401
from fp8_backends.kernels import triton_gate  # noqa: F401
from fp8_backends.kernels.layouts import Layouts  # noqa: F401

SHAPES = {"cuda": [(8192, 4096), (8192, 14336)], "cpu": [(48, 80)]}
"""Activations of Llama 8B's layers, bf16."""
ROTATED = {"cuda": 2**30, "cpu": 1}
"""Bytes of different inputs in one measurement, many times the cache."""

ELEMENT, CODE = 2, 1
"""Bytes."""
KERNELS: dict[str, tuple[Callable, int, int]] = {
    "amax": (lambda x: amax(x), ELEMENT, ELEMENT),
    "dynamic, both layouts": (
        lambda x: quantization.quantize(x, E4M3),
        2 * ELEMENT + 2 * CODE,
        ELEMENT + 2 * CODE,
    ),
    "delayed, both layouts": (
        lambda x: quantization.quantize(x, E4M3, one(x)),
        ELEMENT + 2 * CODE,
        ELEMENT + 2 * CODE,
    ),
    "delayed, E5M2": (
        lambda x: quantization.quantize(x, E5M2, one(x)),
        ELEMENT + 2 * CODE,
        ELEMENT + 2 * CODE,
    ),
    "delayed, rows": (
        lambda x: quantization.quantize(x, E4M3, one(x), True, False),
        ELEMENT + CODE,
        ELEMENT + CODE,
    ),
    "rowwise, both": (lambda x: blocks(x, ROWS), 2 * ELEMENT + 2 * CODE, ELEMENT + 2 * CODE),
    "rowwise, rows": (lambda x: blocks(x, ROWS, True, False), ELEMENT + CODE, ELEMENT + CODE),
    "blockwise 1 x 128, both": (
        lambda x: blocks(x, VECTORS),
        ELEMENT + 2 * CODE,
        ELEMENT + 2 * CODE,
    ),
    "blockwise 128 x 128, both": (
        lambda x: blocks(x, SQUARES),
        ELEMENT + 2 * CODE,
        ELEMENT + 2 * CODE,
    ),
    "mxfp8, both": (lambda x: blocks(x, MX), ELEMENT + 2 * CODE, ELEMENT + 2 * CODE),
}
"""The function; bytes per element moved by its passes; the minimum of any. Scales are not counted:
at most 1/16 of a byte per element."""


def amax(x: torch.Tensor) -> torch.Tensor:
    """Run only the first of the two passes of `dynamic`."""
    if not triton_gate.usable(x):
        return quantization.amax_of(x)
    from fp8_backends.kernels import triton_matrix

    return triton_matrix.amax(x)


def one(x: torch.Tensor) -> torch.Tensor:
    """Return a scale for this device, created once."""
    return _ONES.setdefault(x.device, torch.ones((), device=x.device))


_ONES: dict[torch.device, torch.Tensor] = {}


def blocks(
    x: torch.Tensor, kind: scaling.Blocks, rows: bool = True, columns: bool = True
) -> Layouts:
    return quantization.quantize_blocks(x, kind, E4M3, rows, columns)


def inputs(shape: tuple[int, int], device: str) -> list[torch.Tensor]:
    count = max(2, ROTATED[device] // (shape[0] * shape[1] * ELEMENT))
    return [torch.randn(shape, device=device).bfloat16() for _ in range(count)]


def over_all(function: Callable, matrices: list[torch.Tensor]) -> Callable[[], None]:
    """Return one call for every input; on a GPU a replayed graph."""

    def run() -> list:
        return [function(x) for x in matrices]

    if not matrices[0].is_cuda:
        return run
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def call_microseconds(function: Callable, x: torch.Tensor, calls: int = 20) -> float:
    """Return the time of a call from Python, until the device has finished."""
    seconds = []
    for _ in range(calls):
        synchronize()
        start = time.perf_counter()
        function(x)
        synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def measured(shape: tuple[int, int], device: str, runs: int) -> list[dict]:
    """Measure one shape: the copy first."""
    matrices = inputs(shape, device)
    target, found = torch.empty_like(matrices[0]), []
    copied = over_all(lambda x: target.copy_(x), matrices)
    for name, (function, moved, least) in {
        "copy": (None, 2 * ELEMENT, 2 * ELEMENT),
        **KERNELS,
    }.items():
        run = copied if function is None else over_all(function, matrices)
        seconds = interleaved({"copy": copied, name: run}, runs)
        elements, quickest = (
            len(matrices) * shape[0] * shape[1],
            summary(seconds["copy"])["median_s"],
        )
        of_copy = 2 * ELEMENT * elements / quickest
        taken = summary(seconds[name])
        rate = moved * elements / taken["median_s"]
        found.append(
            {
                "kernel": name,
                "shape": shape,
                "bytes_an_element": moved,
                "bytes_per_second": rate,
                "share_of_copy": rate / of_copy,
                "least_share_of_copy": least * elements / taken["median_s"] / of_copy,
                "call_us": None if function is None else call_microseconds(function, matrices[0]),
                **taken,
            }
        )
        del run
    return found


def main() -> None:
    arguments, on = options(__doc__, runs=11), device()
    torch.manual_seed(0)
    by_kernels = triton_gate.usable(torch.empty(1, device=on))
    print(f"through {'Triton kernels' if by_kernels else 'PyTorch operations'} on {on}")
    found = [row for shape in SHAPES[on] for row in measured(shape, on, arguments.runs)]
    question = "bandwidth of the kernels that quantize"
    printed("kernels", write_json(arguments, question, by_kernels=by_kernels, kernels=found))


if __name__ == "__main__":
    main()
