"""Predict the seconds of a training step: a sum of parts, each a formula over traced shapes and
bytes.

`compute.rates` has every constant with its source; docs/speed.rst compares predictions with
published runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...compute.rates import (
    BF16,
    H200,
    Rates,
    casts_of,
    constant,
    kinds_of,
    memory_seconds,
    product_seconds,
    shape_of,
)
from ...recipes.handlers import Recipe

PARTS = ("products", "casts", "attention", "other", "optimizer", "wire", "host")
"""`other`: norms, activations, embedding and loss. `host`: waiting for Python in eager code."""
DEVICES_OF_A_MACHINE = 8


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step, with the interval of `step_time`."""

    parts: Mapping[str, float]
    """Seconds by name of PARTS; their sum is `seconds`."""
    low: float
    high: float
    source: str
    """Origin of the chip's rates."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepWork:
    """The work of one device in one step."""

    products: Mapping[tuple, float]
    """As `StepTrace.products`."""
    flows: Mapping[str, float]
    """`step_trace.FLOWS` of the same model in bf16."""
    batch: float
    trained: float
    """Elements that this device's optimizer steps; `scaled` of them are stored at a level."""
    scaled: float
    weight_bytes: int = 4
    """Bytes of an element of the weights that products read."""
    sent: float = 0.0
    waits: float = 0.0
    """Bytes sent while the device waits for them (tensor parallelism), besides `sent`."""
    devices: int = 1
    packed: float = 0.0
    """Elements of activations that are packed in FP8."""
    trained_bytes: int = 4
    """Bytes of an element of the weights that the optimizer steps, without a level."""


def step_time(work: StepWork, recipe: Recipe | None, chip: Rates, compiled: bool) -> StepTime:
    """Sum the parts of a step. The interval is the spread of the calibrating steps, from rates of a
    short run to rates under a sustained load of products."""
    parts, hot = (parts_of(work, recipe, chip, compiled, sustained) for sustained in (False, True))
    spread = math.exp(spread_of(chip))
    return StepTime(parts, sum(parts.values()) / spread, sum(hot.values()) * spread, chip.source)


def speedup(
    one: StepWork, recipe: Recipe | None, plain: StepWork, chip: Rates, compiled: bool
) -> tuple[float, ...]:
    """Return the low, predicted and high speed of a recipe over the plain work in bf16."""
    cool, hot = (
        sum(parts_of(plain, None, chip, compiled, sustained).values())
        / sum(parts_of(one, recipe, chip, compiled, sustained).values())
        for sustained in (False, True)
    )
    spread = math.exp(spread_of(chip, ratios=True)) if recipe is not None else 1.0
    return min(cool, hot) / spread, cool, max(cool, hot) * spread


def parts_of(
    work: StepWork, recipe: Recipe | None, chip: Rates, compiled: bool, sustained: bool
) -> dict[str, float]:
    """Return the seconds of each part: products by curves, casts and optimizer by bytes and
    launches, attention by FLOPs, wire by bytes with overlap."""
    compute, scaling = ("", "") if recipe is None else (recipe.compute, recipe.scaling)
    kinds, casts = kinds_of(compute, scaling), casts_of(compute, scaling, compiled)
    seconds = dict.fromkeys(PARTS, 0.0)
    launches, linears = work.flows["calls"], {False: 0.0, True: 0.0}
    cast_bytes = 0.0
    for (product, rows, k, n, in_fp8), count in work.products.items():
        m = rows * work.batch
        kind = kinds[product] if in_fp8 else BF16
        seconds["products"] += count * product_seconds(
            kind, *shape_of(product, m, k, n), chip, sustained
        )
        if product == "fprop":
            linears[in_fp8] += count
        if in_fp8:
            weight = (
                k * n * (casts.bytes + casts.reads * (work.weight_bytes - 2))
                if product == "fprop"
                else 0
            )
            cast_bytes += count * (
                weight + casts.bytes * m * {"fprop": k, "dgrad": n, "wgrad": 0}[product]
            )
        elif work.weight_bytes == 4 and product != "dgrad":
            cast_bytes += count * 6 * k * n  # autocast's cast of the weight, or of its gradient
    launches = launches * (constant("compiled launches") if compiled else 1)
    cast_launches = (
        linears[True] * casts.launches * (constant("compiled launches") if compiled else 1)
    )
    seconds["casts"] = (
        memory_seconds(cast_bytes + 6 * work.packed, chip) + cast_launches * constant("launch") / 2
    )
    attention = work.batch * (work.flows["attention"] + work.flows["attention_backward"])
    seconds["attention"] = attention / (constant("attention") * chip.bf16)
    fused = constant("fused head") if getattr(recipe, "fused_head", False) else 1
    inside = work.flows["moved"] * (constant("compiled bytes") if compiled else 1)
    moved = work.batch * (inside + fused * work.flows["moved_outside"])
    seconds["other"] = memory_seconds(moved, chip) + launches * constant("launch")
    level = "O0" if recipe is None else recipe.level
    by_element = constant("optimizer O0") * (work.trained - work.scaled) * work.trained_bytes / 4
    by_element += constant(f"optimizer {level}") * work.scaled
    seconds["optimizer"] = by_element * H200.memory / chip.memory
    seconds["optimizer"] += memory_seconds(9 * work.scaled, chip) if level != "O0" else 0
    computing = sum(seconds.values())
    wire = wire_seconds(work.sent, work.devices, chip)
    seconds["wire"] = max(constant("exposed") * wire, wire - computing) + wire_seconds(
        work.waits, 1, chip
    )
    if not compiled:
        host = work.flows["calls"] * constant("launch") / 2 + linears[False] * constant("host bf16")
        host += (
            linears[True] * constant(f"host {compute}") if compute in ("native", "te", "ao") else 0
        )
        seconds["host"] = max(0.0, host - sum(seconds.values()))
    return seconds


def spread_of(chip: Rates, ratios: bool = False) -> float:
    """Return the half width of the interval of log seconds, or of the log of FP8 / bf16."""
    measured = constant("spread of ratios" if ratios else "spread of seconds")
    return math.hypot(
        measured, 0 if chip is H200 else constant("spread by roofline") / (3 if ratios else 1)
    )


def wire_seconds(sent: float, devices: int, chip: Rates) -> float:
    """Return the seconds of a device's messages in rings, which use the networks of all devices of
    a machine."""
    network = (
        min(chip.link, DEVICES_OF_A_MACHINE * chip.network)
        if devices > DEVICES_OF_A_MACHINE
        else chip.link
    )
    return sent / (constant("wire") * network)
