"""Seconds on a chip: of a kernel from its bytes and instructions, of a product from its
operations."""

from __future__ import annotations

import rates
from inductor import Attention, Kernel, Product
from machine import Chip
from machine_code import NOTHING, Analysis, Work, configurations, of_inductor

OF_A_COPY = 0.9
"""Share of a copy's bandwidth reached by kernels with more than two tensors. Assumed."""
BETWEEN_KERNELS = 1.5e-6
"""Seconds from the end of a kernel to the work of the next one. Assumed."""
LANES, ISSUED = 128, 0.85
"""Instructions per cycle and multiprocessor, and the issued share. The latter is assumed."""
ATTENTION = {"forward": 593e12, "backward": 435e12}
"""FLOP per second of fused attention. Assumed."""
SMALL = 32_000_000
"""Bytes below which a kernel's machine code is ignored: it takes some microseconds."""


def of_kernel(bytes_: float, work: Work, chip: Chip) -> float:
    """Return the longest time: of memory, of instruction issue, or of a unit missing in some
    lanes."""
    cycles = chip.multiprocessors * chip.clock * ISSUED
    lanes = (LANES, LANES / 2, LANES / 8)
    return max(
        bytes_ / (OF_A_COPY * chip.copy),
        *(n / (cycles * lane) for n, lane in zip(work, lanes, strict=True)),
    )


def of_bytes(bytes_: float, chip: Chip) -> float:
    """Time a kernel without known instructions."""
    return of_kernel(bytes_, NOTHING, chip) + BETWEEN_KERNELS


def of_generated(kernel: Kernel, chip: Chip, machine_code: bool = True) -> float:
    if kernel.bytes < SMALL or not machine_code:
        return of_bytes(kernel.bytes, chip)
    return best(kernel, chip)[0] + BETWEEN_KERNELS


def best(kernel: Kernel, chip: Chip) -> tuple[float, Analysis]:
    """Return the seconds of the fastest configuration. Try further ones if instructions take longer
    than memory."""
    of = kernel.name, kernel.source
    found = of_inductor(*of)
    seconds = of_kernel(kernel.bytes, found.work, chip)
    if seconds > of_kernel(kernel.bytes, NOTHING, chip):
        for number in range(1, configurations(*of)):
            other = of_inductor(*of, number)
            seconds, found = min(
                (seconds, found), (of_kernel(kernel.bytes, other.work, chip), other)
            )
    return seconds, found


def of_product(product: Product) -> float:
    """Time a product on an H200 or H100. Rows' scales are timed with fast accumulation, their only
    measurement."""
    shape = product.m, product.k, product.n
    if "float8" not in product.dtype:
        slower = {"bfloat16": 1, "float16": 1, "float32": 16}[product.dtype]
        return slower * rates.seconds(rates.BF16_PRODUCT, *shape) + BETWEEN_KERNELS
    kind = (
        rates.ROW_SCALED_PRODUCT
        if product.rowwise
        else rates.FAST
        if product.fast_accumulation
        else rates.FP8_PRODUCT
    )
    seconds = rates.seconds(kind, *shape)
    if product.out_dtype == "float32":
        seconds += rates.seconds(rates.FP32_RESULT, *shape) - rates.seconds(
            rates.FP8_PRODUCT, *shape
        )
    return seconds + BETWEEN_KERNELS


def of_attention(attention: Attention) -> float:
    backward = "backward" in attention.operator
    flops = (
        4.0
        * attention.batch
        * attention.heads
        * attention.queries
        * attention.keys
        * attention.width
    )
    flops *= (2.5 if backward else 1) * (0.5 if attention.causal else 1)
    return flops / ATTENTION["backward" if backward else "forward"]
