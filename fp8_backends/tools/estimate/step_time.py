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
    BF16_PRODUCT,
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

TIMED = ("products", "casts", "attention", "other", "optimizer", "wire", "offload", "host")
"""`other`: norms, activations, embedding and loss. `offload`: waiting for PCIe and steps in the
host. `host`: waiting for Python in eager code."""
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
    microbatches: int = 1
    linked: float = 0.0
    """Bytes over PCIe in the direction with more of them, with offload."""
    cores: int = 1
    """Of the host, for steps there."""
    largest: float = 0.0
    """Elements of the largest scaled weight."""


def step_time(
    work: StepWork, plain: StepWork, recipe: Recipe | None, chip: Rates, compiled: bool
) -> tuple[StepTime, tuple[float, float, float]]:
    """Sum the parts of a step, and return its low, predicted and high speed over the plain work in
    bf16. The interval is the spread of the calibrating steps, from rates of a short run to rates
    under a sustained load of products."""
    parts, hot_parts = (
        parts_of(work, recipe, chip, compiled, sustained) for sustained in (False, True)
    )
    seconds = sum(parts.values())
    hot_seconds = sum(hot_parts.values())
    spread = math.exp(spread_of(chip))
    time = StepTime(parts, seconds / spread, hot_seconds * spread, chip.source)
    cool = sum(parts_of(plain, None, chip, compiled, False).values()) / seconds
    hot = sum(parts_of(plain, None, chip, compiled, True).values()) / hot_seconds
    spread = math.exp(spread_of(chip, ratios=True)) if recipe is not None else 1.0
    return time, (min(cool, hot) / spread, cool, max(cool, hot) * spread)


def parts_of(
    work: StepWork, recipe: Recipe | None, chip: Rates, compiled: bool, sustained: bool
) -> dict[str, float]:
    """Return the seconds of each part: products by curves, casts and optimizer by bytes and
    launches, attention by FLOPs, wire by bytes with overlap."""
    compute = ""
    scaling = ""
    level = "O0"
    fused = launched = inside = 1.0
    if recipe is not None:
        compute = recipe.compute
        scaling = recipe.scaling
        level = recipe.level
        if recipe.fused_head:
            fused = constant("fused head")
    if compiled:
        launched = constant("compiled launches")
        inside = constant("compiled bytes")
    kinds = kinds_of(compute, scaling)
    casts = casts_of(compute, scaling, compiled)
    flows = work.flows
    launch = constant("launch")
    seconds = dict.fromkeys(TIMED, 0.0)
    linears = {False: 0.0, True: 0.0}
    cast_bytes = 0.0
    for (product, rows, k, n, in_fp8), count in work.products.items():
        m = rows * work.batch
        kind = kinds[product] if in_fp8 else BF16_PRODUCT
        shape = shape_of(product, m, k, n)
        seconds["products"] += count * product_seconds(kind, *shape, chip, sustained)
        if product == "fprop":
            linears[in_fp8] += count
        if in_fp8:
            weight = 0.0
            if product == "fprop":
                weight = k * n * (casts.bytes + casts.reads * (work.weight_bytes - 2))
            width = {"fprop": k, "dgrad": n, "wgrad": 0}[product]
            cast_bytes += count * (weight + casts.bytes * m * width)
        elif work.weight_bytes == 4 and product != "dgrad":
            cast_bytes += count * 6 * k * n  # autocast's cast of the weight, or of its gradient
    cast_launches = linears[True] * casts.launches * launched
    seconds["casts"] = (
        memory_seconds(cast_bytes + 6 * work.packed, chip) + cast_launches * launch / 2
    )
    attention = work.batch * (flows["attention"] + flows["attention_backward"])
    seconds["attention"] = attention / (constant("attention") * chip.bf16)
    moved = work.batch * (inside * flows["moved"] + fused * flows["moved_outside"])
    seconds["other"] = memory_seconds(moved, chip) + flows["calls"] * launched * launch
    for part in ("casts", "products", "attention", "other"):
        seconds[part] *= work.microbatches
    by_element = constant("optimizer O0") * (work.trained - work.scaled) * work.trained_bytes / 4
    if not work.linked:
        by_element += constant(f"optimizer {level}") * work.scaled
    seconds["optimizer"] = by_element * H200.memory / chip.memory
    if level != "O0":
        seconds["optimizer"] += work.microbatches * memory_seconds(9 * work.scaled, chip)
    computing = sum(seconds.values())
    if work.linked:
        hidden = 0.0
        if recipe.gradient_release:
            hidden = constant("in backward") * computing
        link = work.linked / constant("PCIe")
        step = host_seconds(work, level, sustained)
        # copies down, steps and copies up overlap, but for those of the last weight
        last = (2 * link + step) * work.largest / work.scaled
        seconds["offload"] = last + max(0.0, link - hidden, step - hidden)
    wire = wire_seconds(work.sent, work.devices, chip)
    exposed = max(constant("exposed") * wire, wire - computing)
    seconds["wire"] = exposed + wire_seconds(work.waits, 1, chip)
    if not compiled:
        host = flows["calls"] * launch / 2 + linears[False] * constant("host bf16")
        if compute in ("native", "te", "ao"):
            host += linears[True] * constant(f"host {compute}")
        seconds["host"] = max(0.0, host * work.microbatches - sum(seconds.values()))
    return seconds


def host_seconds(work: StepWork, level: str, sustained: bool = False) -> float:
    """Return the seconds of the C++ step in the host, with offload."""
    seconds = constant(f"host step {level}") * work.scaled / work.cores
    if sustained:
        seconds *= constant("busy host")
    return seconds


def spread_of(chip: Rates, ratios: bool = False) -> float:
    """Return the half width of the interval of log seconds, or of the log of FP8 / bf16."""
    roofline = 0.0 if chip is H200 else constant("spread by roofline")
    if ratios:
        return math.hypot(constant("spread of ratios"), roofline / 3)
    return math.hypot(constant("spread of seconds"), roofline)


def wire_seconds(sent: float, devices: int, chip: Rates) -> float:
    """Return the seconds of a device's messages in rings, which use the networks of all devices of
    a machine."""
    if devices > DEVICES_OF_A_MACHINE:
        network = min(chip.link, DEVICES_OF_A_MACHINE * chip.network)
    else:
        network = chip.link
    return sent / (constant("wire") * network)
