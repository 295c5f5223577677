"""Compare the bandwidth of kernels that quantize a matrix with the memory's.

Each kernel of the native compute against a copy in the same run: bytes read plus written, over the
time, as a share of the copy's. `dynamic` and `rowwise` read the matrix twice, since the scales
follow from all of it; `least` counts every matrix once. Launches are replayed from a CUDA graph, to
time kernels without Python; `call_us` includes Python. Inputs rotate to miss the cache. First of
all, every kernel's results are compared with the eager reference on the same device, to the bit:
exits with 1 if one differs.

    python benchmarks/gpu/quantize.py [--tiles] [--json FILE]

--tiles: other tiles of the same kernels too, each compiled first. Without a GPU the front's
functions run on a CPU (in Triton's interpreter, with TRITON_INTERPRET=1 and
FP8_BACKENDS_TRITON=interpret), as a rehearsal.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import interleaved, summary, synchronize, table, write_json  # noqa: E402

from fp8_backends.formats import scaling  # noqa: F401
from fp8_backends.formats.formats import E4M3, E5M2, saturating_cast  # noqa: F401
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


def differences(device: str) -> list[str]:
    """Return the kernels with results unlike the eager reference on this device."""
    x = (
        torch.randn(200, 336, device=device) * torch.logspace(-6, 3, 336, device=device)
    ).bfloat16()
    x[3, 5], x[70] = float("nan"), 0
    with_inf, wrong = x.clone(), []
    with_inf[130, 300] = float("inf")
    for matrix, fmt in itertools.product((x, with_inf), (E4M3, E5M2)):
        largest = scaling.tensor_amax(scaling.without_nan(matrix))
        for name, given in (("dynamic", None), ("delayed", torch.tensor(3.7, device=device))):
            scale = scaling.scale_from_amax(largest, fmt) if given is None else given
            codes = saturating_cast(matrix.float() * scale, fmt)
            expected = scaling.Quantized(codes, scaling.scale_inv_of(scale, largest))
            found = quantization.quantize(matrix, fmt, given)
            transposed = expected._replace(codes=expected.codes.t())
            if not (same(found.along_columns(), expected) and same(found.along_rows(), transposed)):
                wrong.append(f"{name}, {fmt.name}")
        for name, kind in (
            ("rowwise", ROWS),
            ("1 x 128", VECTORS),
            ("128 x 128", SQUARES),
            ("mxfp8", MX),
        ):
            found = quantization.quantize_blocks(matrix, kind, fmt)
            expected, transposed = kind.quantize(matrix, fmt), kind.quantize(matrix.t(), fmt)
            if not (same(found.along_columns(), expected) and same(found.along_rows(), transposed)):
                wrong.append(f"{name}, {fmt.name}")
    return wrong


def same(found, expected) -> bool:
    """Codes to the bit; scales too, any NaN being as good as another."""
    (codes, scale), (expected_codes, expected_scale) = found, expected
    equal_codes = torch.equal(
        codes.contiguous().view(torch.uint8), expected_codes.contiguous().view(torch.uint8)
    )
    return equal_codes and torch.allclose(
        scale.float(), expected_scale.float(), rtol=0, atol=0, equal_nan=True
    )


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


def measured(shape: tuple[int, int], device: str, runs: int, kernels: dict) -> list[dict]:
    """Measure one shape: the copy first."""
    matrices = inputs(shape, device)
    target, found = torch.empty_like(matrices[0]), []
    copied = over_all(lambda x: target.copy_(x), matrices)
    for name, (function, moved, least) in {
        "copy": (None, 2 * ELEMENT, 2 * ELEMENT),
        **kernels,
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


def other_tiles() -> dict:
    """Return the same kernels with other tiles; KERNELS has the default."""
    from fp8_backends.kernels import triton_blocks, triton_matrix
    from fp8_backends.kernels.triton_matrix import Tile

    def cast(tile: Tile) -> Callable:
        return lambda x: triton_matrix.quantize(x, E4M3, one(x), tile=tile)

    def in_blocks(kind: scaling.Blocks, tile: Tile) -> Callable:
        return lambda x: triton_blocks.quantize_blocks(x, kind, E4M3, tile=tile)

    def amax_by(tile: Tile) -> Callable:
        return lambda x: triton_matrix.amax(x, tile=tile)

    both = ELEMENT + 2 * CODE, ELEMENT + 2 * CODE
    found = {}
    for tile in (
        Tile(64, 64, 4),
        Tile(128, 64, 4),
        Tile(64, 128, 8),
        Tile(128, 128, 8),
        Tile(32, 128, 4),
    ):
        found[f"delayed, both layouts {tuple(tile)}"] = (cast(tile), *both)
    for tile in (Tile(1, 4096, 4), Tile(1, 4096, 8), Tile(1, 16384, 8)):
        found[f"amax {tuple(tile)}"] = (amax_by(tile), ELEMENT, ELEMENT)
    for tile in (Tile(64, 128, 8), Tile(128, 64, 4), Tile(64, 64, 4)):
        found[f"rowwise, both {tuple(tile)}"] = (
            in_blocks(ROWS, tile),
            2 * ELEMENT + 2 * CODE,
            both[1],
        )
    for tile in (Tile(32, 128, 4, 96), Tile(16, 128, 4), Tile(64, 128, 8, 96), Tile(128, 128, 8)):
        found[f"blockwise 1 x 128, both {tuple(tile)}"] = (in_blocks(VECTORS, tile), *both)
    for tile in (Tile(64, 64, 4), Tile(32, 64, 4, 64), Tile(32, 128, 4, 96), Tile(64, 128, 4)):
        found[f"mxfp8, both {tuple(tile)}"] = (in_blocks(MX, tile), *both)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    by_kernels = triton_gate.usable(torch.empty(1, device=device))
    print(f"through {'Triton kernels' if by_kernels else 'PyTorch operations'} on {device}")
    wrong, kernels, found = differences(device), dict(KERNELS), []
    if arguments.tiles:
        kernels |= other_tiles()
    for shape in SHAPES[device]:
        found += measured(shape, device, arguments.runs, kernels)
    rows = [
        [
            each["kernel"],
            "x".join(map(str, each["shape"])),
            f"{each['bytes_per_second'] / 1e9:.0f}",
            each["share_of_copy"],
            each["least_share_of_copy"],
            "" if each["call_us"] is None else f"{each['call_us']:.0f}",
        ]
        for each in found
    ]
    print(table(["kernel", "shape", "GB/s", "of the copy's", "least", "one call, us"], rows))
    print(
        "different from the eager reference: " + ", ".join(wrong)
        if wrong
        else "equal to the eager reference"
    )
    record = {"question": "bandwidth of the kernels that quantize", "by_kernels": by_kernels}
    write_json(arguments.json, record | {"different_from_reference": wrong, "kernels": found})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
