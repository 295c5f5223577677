"""Seconds of matrix products and casts by shape and chip, and every constant of the time model with
its source.

Calibrated on this project's records of one H200 in `benchmarks/results`; other chips by their
published limits.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from .chips import H200, Rates

BF16_PRODUCT, FAST, FP8_PRODUCT, FP32_RESULT, ROW_SCALED_PRODUCT = PRODUCT_KINDS = (
    "bf16",
    "FP8, fast accumulation",
    "FP8",
    "FP8, FP32 result",
    "FP8, a scale for each row",
)
CURVES = {
    BF16_PRODUCT: (1.5044e-15, 0.0, 1.0860e-13, 0.0),
    FAST: (7.5870e-16, 2.7115e-14, 1.7699e-13, 1.6297e-14),
    FP8_PRODUCT: (7.2431e-16, 4.0339e-14, 3.2049e-13, 8.7515e-14),
    FP32_RESULT: (7.3375e-16, 3.2876e-14, 4.8715e-13, 1.2860e-13),
    ROW_SCALED_PRODUCT: (6.6934e-16, 7.1109e-14, 2.9389e-13, 4.0101e-14),
}
"""Seconds of a FLOP of [m, k] x [k, n], 1 / rate = c0 + c1 / m + c2 / k + c3 / n, under a sustained
load of an H200: fitted to the 22 shapes of `limits_gpu.json` by `benchmarks/ahead/rates.py` (median
error below 4 %)."""


class Constant(NamedTuple):
    value: float
    source: str


_STEPS = (
    "fitted to 18 steps of step_1b_gpu.json and step_8b_gpu.json (`benchmarks/ahead/fit_step.py`)"
)
_INDUCTOR = "bytes in Inductor's code over the bytes of separate kernels, ahead_H200_rates.json"
_HOST_STEP = (
    "seconds an element of the C++ step in the host, measured on a core of an AMD EPYC, AVX2"
)
CONSTANTS = {
    "memory": Constant(
        0.77, "bandwidth of a kernel over the data sheet's: quantize_gpu.json, delayed"
    ),
    "bf16 in a step": Constant(1.20, f"rate over the sustained load's (a cooler chip): {_STEPS}"),
    "FP8 in a step": Constant(1.03, f"the same for FP8: {_STEPS}"),
    "attention": Constant(0.50, f"FLOP/s over the bf16 limit, forward and backward: {_STEPS}"),
    "compiled bytes": Constant(
        0.45, f"bytes of a compiled block's other kernels over the eager ones: {_STEPS}"
    ),
    "launch": Constant(13e-6, f"seconds from one small kernel to the next in eager code: {_STEPS}"),
    "compiled launches": Constant(
        0.4, "kernels of a compiled layer over an eager one's, ahead_H200_rates.json"
    ),
    "compiled dynamic": Constant(0.54, _INDUCTOR),
    "compiled delayed": Constant(0.37, _INDUCTOR),
    "compiled rowwise": Constant(0.66, _INDUCTOR),
    "compiled ao": Constant(0.80, _INDUCTOR),
    "eager ao": Constant(
        111, "bytes an element of a cast, linear_eager_gpu.json at 8192 x 8192 x 8192"
    ),
    "rowwise kernel": Constant(0.75, "bandwidth of a cast over that of delayed, quantize_gpu.json"),
    "blockwise kernel": Constant(
        0.62, "bandwidth of a cast over that of delayed, quantize_gpu.json"
    ),
    "mxfp8 kernel": Constant(0.43, "bandwidth of a cast over that of delayed, quantize_gpu.json"),
    "fused head": Constant(
        0.53, "bytes outside the layers with a fused head over without, ahead_H200_rates.json"
    ),
    "host bf16": Constant(
        160e-6, "seconds of an eager Linear's step on the host, linear_eager_gpu.json, least"
    ),
    "host native": Constant(980e-6, "the same, native:dynamic"),
    "host te": Constant(1150e-6, "the same, te"),
    "host ao": Constant(2100e-6, "the same, ao"),
    "optimizer O0": Constant(
        9.17e-12, "seconds an element on an H200 (28 bytes), optimizer_gpu.json"
    ),
    "optimizer O1": Constant(7.60e-12, "the same; at levels also 9 bytes to cast the gradient"),
    "optimizer O2": Constant(6.40e-12, "the same"),
    "optimizer O3": Constant(7.20e-12, "the same"),
    "optimizer O4": Constant(10.24e-12, "the same"),
    "host step O1": Constant(3.0e-9, _HOST_STEP),
    "host step O2": Constant(3.8e-9, _HOST_STEP),
    "host step O3": Constant(4.2e-9, _HOST_STEP),
    "host step O4": Constant(5.3e-9, _HOST_STEP),
    "busy host": Constant(2.0, "the same on a core shared with other work, over the least time"),
    "PCIe": Constant(
        25e9, "bytes a second of PCIe 4.0 x16, one way, as copies reach them: assumed"
    ),
    "in backward": Constant(2 / 3, "share of a device's work, without recomputation: assumed"),
    "wire": Constant(0.7, "bandwidth of a collective over the link's: assumed"),
    "exposed": Constant(
        0.15, "share of the wire outside the computation (first gather, last bucket): assumed"
    ),
    "spread of seconds": Constant(
        0.07, "the largest logarithm of predicted over measured in the 18 steps"
    ),
    "spread of ratios": Constant(0.08, "the same for the FP8 steps over bf16's"),
    "spread by roofline": Constant(
        0.25, "added in quadrature on other chips (a third of it on ratios): assumed"
    ),
}


def constant(name: str) -> float:
    return CONSTANTS[name].value


def rate(kind: str, m: float, k: float, n: float, chip: Rates = H200) -> float:
    """Return FLOP/s of [m, k] x [k, n] under a sustained load."""
    limit = (H200.bf16 / chip.bf16) if kind == BF16_PRODUCT else (H200.fp8 / chip.fp8)
    by_flop, *by_size = CURVES[kind]
    traffic = sum(each / size for each, size in zip(by_size, (m, k, n), strict=True))
    return 1 / (by_flop * limit + traffic * max(limit, H200.memory / chip.memory))


def product_seconds(
    kind: str, m: float, k: float, n: float, chip: Rates = H200, sustained: bool = False
) -> float:
    """Return the seconds of a product in a training step, or under a load of products only."""
    in_a_step = 1.0
    if not sustained:
        in_a_step = constant("bf16 in a step" if kind == BF16_PRODUCT else "FP8 in a step")
    return 2 * m * k * n / rate(kind, m, k, n, chip) / in_a_step


def memory_seconds(bytes_: float, chip: Rates) -> float:
    return bytes_ / (constant("memory") * chip.memory)


class Casts(NamedTuple):
    """Kernels around the products of a backend: bytes an element of a bf16 operand, and kernels a
    Linear."""

    bytes: float
    reads: float
    """Reads of an operand: a weight in FP32 takes 2 more bytes each."""
    launches: int


def casts_of(compute: str, scaling: str, compiled: bool) -> Casts:
    """Return the casts of both layouts of an operand."""
    reads = 1 if scaling in ("delayed", "window", "blockwise", "mxfp8") else 2
    bytes_ = 2.0 * reads + 2
    if scaling in ("blockwise", "mxfp8") or scaling.startswith("rowwise"):
        bytes_ /= constant(f"{scaling.partition('_')[0]} kernel")
    if compute == "ao":
        bytes_ = bytes_ * constant("compiled ao") if compiled else constant("eager ao")
    elif compiled and compute == "native" and scaling not in ("blockwise", "mxfp8"):
        bytes_ *= constant(
            f"compiled {'delayed' if reads == 1 else 'rowwise' if 'row' in scaling else 'dynamic'}"
        )
    return Casts(bytes_, reads, 3 * reads)


def kinds_of(compute: str, scaling: str) -> dict[str, str]:
    """Return the kind of product of fprop, dgrad and wgrad in FP8."""
    if scaling.startswith("rowwise"):
        return dict.fromkeys(("fprop", "dgrad", "wgrad"), ROW_SCALED_PRODUCT)
    return {
        "fprop": FAST,
        "dgrad": FP8_PRODUCT,
        "wgrad": FP32_RESULT if compute == "native" else FP8_PRODUCT,
    }


def shape_of(product: str, m: float, k: float, n: float) -> tuple[float, float, float]:
    """Return (m, k, n) of fprop, dgrad or wgrad of a Linear from k to n features with m rows."""
    return {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (k, m, n)}[product]


TOKENS = 8192
"""Tokens at a time, where a step is unknown."""


class Seconds(NamedTuple):
    """Of a compiled Linear, forward and backward, its weight's update left out."""

    bf16: float
    fp8: float

    @property
    def fp8_gains(self) -> bool:
        return self.fp8 < self.bf16


def linear_seconds(
    size: tuple[int, int], compute: str, scaling: str, chip: Rates, tokens: float = TOKENS
) -> Seconds:
    """Return the seconds of a Linear, (in, out), in bf16, and in FP8 with its casts."""
    k, n = size
    casts = casts_of(compute, scaling, True)
    kinds = kinds_of(compute, scaling)
    shapes = {product: shape_of(product, tokens, k, n) for product in kinds}
    bf16 = memory_seconds(12 * k * n, chip)
    bf16 += sum(product_seconds(BF16_PRODUCT, *shape, chip) for shape in shapes.values())
    fp8 = memory_seconds(casts.bytes * (tokens * (k + n) + 2 * k * n), chip)
    fp8 += sum(product_seconds(kinds[product], *shape, chip) for product, shape in shapes.items())
    fp8 += casts.launches * constant("compiled launches") * constant("launch")
    return Seconds(bf16, fp8)


def linear_gain(
    sizes: Iterable[tuple[int, int]],
    compute: str,
    scaling: str,
    chip: Rates,
    tokens: float = TOKENS,
) -> float:
    """Return the speed of compiled Linears, (in, out) each, in FP8 over bf16, forward and
    backward."""
    seconds = [linear_seconds(size, compute, scaling, chip, tokens) for size in sizes]
    return sum(each.bf16 for each in seconds) / sum(each.fp8 for each in seconds)


def pays_from(compute: str, scaling: str, chip: Rates, tokens: int = TOKENS) -> str:
    """Name the least width, in steps of 64, of square Linears that FP8 makes faster."""
    widths = range(64, 65_536 + 1, 64)
    first = bisect.bisect(
        widths, False, key=lambda n: linear_gain([(n, n)], compute, scaling, chip, tokens) > 1
    )
    if first == len(widths):
        return f"no Linear is predicted to be faster in FP8 at {tokens:,} tokens"
    width = widths[first]
    return f"compiled Linears are predicted to gain from {width:,} x {width:,} at {tokens:,} tokens"
