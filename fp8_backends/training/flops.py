"""The FLOPs that training spends on products with weights, and how many of them are in FP8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from ..compute.counts import DGRAD, FPROP, KINDS, WGRAD, ProductCounts
from .observed import Work, trainable_by_name
from .weight_products import CONVOLUTION, FP8, WeightProduct

if TYPE_CHECKING:
    from .conversion import Prepared


@dataclass
class Flops:
    """Of one prepared root: those of the first step, or per token where it was compiled."""

    in_fp8: float = 0.0
    needed: float = 0.0
    """Over the products that training needs."""
    uncounted: list[str] = field(default_factory=list)
    """Convolutions of which nobody knows the FLOPs."""


def count_flops(root: nn.Module, prepared: Prepared, counts: dict[str, ProductCounts], tokens: float = 1) -> Flops:
    """FLOPs of every kind of product that each weight needs, and of those that ran in FP8.

    Gradients are needed where a gradient of the output arrived: that of the weight where it trains, that of the input
    where some input needs one. A weight that was not seen in the first step is counted as if every token had passed it,
    unless it is known to have taken no part; whether its input needs a gradient, its products tell. `tokens`: how many
    there were at least.
    """
    work = prepared.observed.work
    idle = prepared.observed.idle
    high = prepared.compute.high_precision_products(prepared.recipe)
    trains = trainable_by_name(root)

    def done_and_needed(product: WeightProduct, kind: str) -> tuple[bool, bool]:
        ran = counts.get(product.name) if product.state == FP8 else None
        done = ran is not None and getattr(ran, kind) > 0
        needed = _is_needed(kind, trains.get(product.name, True), work.get(product.name), ran, high)
        return done, done or (needed and product.name not in idle)

    return _measure_flops(prepared, work, done_and_needed, tokens)


def expected_flops(root: nn.Module, prepared: Prepared, work: dict[str, Work]) -> Flops:
    """`count_flops` of a step in which every converted layer does all that training needs of it in FP8."""
    high = prepared.compute.high_precision_products(prepared.recipe)
    trains = trainable_by_name(root)

    def done_and_needed(product: WeightProduct, kind: str) -> tuple[bool, bool]:
        needed = _is_needed(kind, trains.get(product.name, True), work.get(product.name), None, high)
        return needed and product.state == FP8 and kind not in high, needed

    return _measure_flops(prepared, work, done_and_needed)


def _measure_flops(
    prepared: Prepared,
    work: dict[str, Work],
    done_and_needed: Callable[[WeightProduct, str], tuple[bool, bool]],
    tokens: float = 1,
) -> Flops:
    """Sum up the FLOPs of the products of a report, by whether each kind of each is done in FP8, and needed."""
    tokens = max(tokens, tokens_of(prepared, work))
    flops = Flops()
    for product in prepared.report.products:
        seen = work.get(product.name)
        answers = [done_and_needed(product, kind) for kind in KINDS]
        if seen is None and product.kind == CONVOLUTION:
            flops.uncounted += [product.name] * any(needed for _, needed in answers)
            continue
        size = product.flops * tokens if seen is None else seen.flops
        for done, needed in answers:
            flops.needed += size * needed
            flops.in_fp8 += size * done
    return flops


def tokens_of(prepared: Prepared, work: dict[str, Work]) -> float:
    """The rows of the layer that most passed, as those of a layer that was not seen: 1 where none was."""
    positions = {product.name for product in prepared.report.products if product.kind == CONVOLUTION}
    return max((seen.rows for name, seen in work.items() if name not in positions), default=1)


def _is_needed(kind: str, trains: bool, seen: Work | None, ran: ProductCounts | None, high: tuple[str, ...]) -> bool:
    """Whether training needs a product that did not run in FP8."""
    if kind == FPROP:
        return True
    if seen is not None and not seen.backward:
        return False
    if kind == WGRAD:
        return trains
    return seen.input_gradient if seen is not None else ran is None or ran.wgrad == 0 or DGRAD in high
