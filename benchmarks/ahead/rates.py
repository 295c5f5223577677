"""Rates of products by shape, interpolated from the shapes measured on an H200, and their errors.

    rates.py

prints two kinds of errors: of each measured shape, left out of the fit, and of figures published by
others, never in it.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
from measuring import table  # noqa: E402

from fp8_backends.compute.rates import (  # noqa: E402, F401
    BF16_PRODUCT,
    FAST,
    FP8_PRODUCT,
    FP32_RESULT,
    PRODUCT_KINDS,
    ROW_SCALED_PRODUCT,
)

"""Products of `gpu/limits.py` have the names of the package's curves. The last one accumulates
fast."""
Shape = tuple[int, int, int]
"""(m, k, n) of [m, k] x [k, n]."""
RECORD = Path(__file__).resolve().parents[1] / "results" / "limits_gpu.json"


@functools.cache
def measured() -> dict[str, dict[Shape, float]]:
    """Return FLOP per second by kind and shape."""
    found: dict[str, dict[Shape, float]] = {kind: {} for kind in PRODUCT_KINDS}
    for each in json.loads(RECORD.read_text())["products"]:
        found[each["product"]][tuple(each["size"])] = each["flops_per_second"]
    return found


def curve(points: dict[Shape, float]) -> list[float]:
    """Fit 1 / rate = c0 + c1 / m + c2 / k + c3 / n, with the least squares of relative errors.

    An operation costs c0 in tensor cores; the second operand, the result and the first operand have
    1 / m, 1 / k and 1 / n of an element per multiplication. Coefficients below zero are left out,
    one by one.
    """
    rates = torch.tensor(list(points.values()), dtype=torch.float64)[:, None]
    shapes = torch.tensor(list(points), dtype=torch.float64)
    terms = rates * torch.cat([torch.ones_like(rates), 1 / shapes], 1)
    coefficients, used = (
        torch.full((4,), -1.0, dtype=torch.float64),
        torch.ones(4, dtype=torch.bool),
    )
    while (coefficients < 0).any():
        coefficients = torch.zeros(4, dtype=torch.float64)
        coefficients[used] = torch.linalg.lstsq(terms[:, used], torch.ones_like(rates)).solution[
            :, 0
        ]
        used[coefficients.argmin()] &= coefficients.min() >= 0
    return coefficients.tolist()


@functools.cache
def curves() -> dict[str, list[float]]:
    return {kind: curve(points) for kind, points in measured().items()}


def rate(kind: str, m: int, k: int, n: int, fitted: list[float] | None = None) -> float:
    """Return FLOP per second of a product, by the curve of its kind or another fitted one."""
    flop, by_m, by_k, by_n = fitted or curves()[kind]
    return 1 / (flop + by_m / m + by_k / k + by_n / n)


def seconds(kind: str, m: int, k: int, n: int) -> float:
    return 2 * m * k * n / rate(kind, m, k, n)


def left_out(kind: str) -> dict[Shape, float]:
    """Return relative errors of each measured shape's rate by the curve of all other shapes."""
    points = measured()[kind]
    others = {
        shape: {each: value for each, value in points.items() if each != shape} for shape in points
    }
    return {shape: rate(kind, *shape, curve(others[shape])) / points[shape] - 1 for shape in points}


class Published(NamedTuple):
    source: str
    what: str
    products: list[tuple[str, Shape]]
    """Kind and shape of the products in this figure."""
    flops_per_second: float

    @property
    def error(self) -> float:
        flops = sum(2 * m * k * n for _, (m, k, n) in self.products)
        return (
            flops
            / sum(seconds(kind, *shape) for kind, shape in self.products)
            / self.flops_per_second
            - 1
        )


def _of_a_layer() -> list[Published]:
    """Return the sums of a layer's four products in TransformerEngine's `gemm_profiling.rst`,
    operands in FP8 before the clock starts: milliseconds of forward, dgrad and wgrad."""
    tokens, layers = 15_872, [(4096, 12_288), (4096, 4096), (4096, 16_384), (16_384, 4096)]
    shapes = {
        "forward": [(tokens, k, n) for k, n in layers],
        "dgrad": [(tokens, n, k) for k, n in layers],
        "wgrad": [(n, tokens, k) for k, n in layers],
    }
    flops = sum(2 * tokens * k * n for k, n in layers)
    found = {"bf16": (10.632, 10.747, 10.530), "FP8": (5.577, 5.661, 5.547)}
    return [
        Published(
            "TransformerEngine, H200 NVL",
            f"{name} {product}",
            [
                (
                    BF16_PRODUCT
                    if name == "bf16"
                    else FAST
                    if product == "forward"
                    else FP8_PRODUCT,
                    shape,
                )
                for shape in shapes[product]
            ],
            flops / (milliseconds * 1e-3),
        )
        for name, times in found.items()
        for product, milliseconds in zip(shapes, times, strict=True)
    ]


def published() -> list[Published]:
    """Return figures measured by others on Hopper GPUs."""
    trace, tilelang = "modded-nanogpt, trace of an H100", "tilelang, H800, fast"
    head = [(FAST, (16_384, 768, 50_304), 1185), (FP8_PRODUCT, (16_384, 50_304, 768), 1537)]
    head.append((FP32_RESULT, (768, 16_384, 50_304), 1542))
    by_k = {256: 569, 512: 858, 1024: 1129, 2048: 1343, 4096: 1467, 8192: 1507, 16_384: 1541}
    return [
        *(
            Published(trace, f"{kind}, K = {shape[1]:,}", [(kind, shape)], 1e12 * found)
            for kind, shape, found in head
        ),
        *(
            Published(tilelang, f"K = {k:,}", [(FAST, (8192, k, 8192))], 1e12 * found)
            for k, found in by_k.items()
        ),
        *_of_a_layer(),
    ]


def printed() -> str:
    rows = []
    for kind in PRODUCT_KINDS:
        errors = left_out(kind)
        worst = max(errors, key=lambda shape: abs(errors[shape]))
        at = "x".join(map(str, worst))
        rows.append(
            [kind, len(errors), f"{median(errors.values()):.1%}", f"{errors[worst]:+.1%}", at]
        )
    parts = [
        table(
            ["product, a shape left out", "shapes", "median error", "worst", "at m x k x n"], rows
        )
    ]
    rows = [
        [each.source, each.what, each.flops_per_second / 1e12, f"{each.error:+.1%}"]
        for each in published()
    ]
    rows.append(["all", "median", "-", f"{median(each.error for each in published()):.1%}"])
    return "\n\n".join(
        [*parts, table(["published, not fitted", "product", "TFLOP/s", "error"], rows)]
    )


def median(errors) -> float:
    return statistics.median(map(abs, errors))


if __name__ == "__main__":
    print(printed())
