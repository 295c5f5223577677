"""The statistics of `compare`: paired differences of runs that share seed, initial weights and data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

LOSS_GAP_BOUND = 0.01
"""Nats by which the mean held-out loss of an FP8 backend may lie above the reference's."""

# 97.5 % quantiles of Student's t for 1, 2, 3, … degrees of freedom
_T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """Mean paired difference to the reference, positive where this backend's loss is higher."""

    mean: float
    half_width: float | None
    """Of the 95 % confidence interval; None with a single pair."""
    pairs: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width

    def verdict(self, bound: float = LOSS_GAP_BOUND) -> str:
        """Where the whole interval lies: `within` the bound, `not within`, or `not resolved` by the interval."""
        if not math.isfinite(self.mean):
            return "not within"
        if self.half_width is None:
            return "not resolved"
        if self.high <= bound:
            return "within"
        return "not within" if self.low > bound else "not resolved"

    def __str__(self) -> str:
        interval = "" if self.half_width is None else f" ± {self.half_width:.4f}"
        return f"{self.mean:+.4f}{interval}"


def t_quantile(degrees: int) -> float:
    """The factor of a two-sided 95 % interval. Beyond 30 degrees the normal value with its first correction."""
    if degrees < 1:
        raise ValueError("an interval needs at least two values")
    return _T_975[degrees - 1] if degrees <= len(_T_975) else 1.95996 + 2.37227 / degrees


def paired_gap(losses: Mapping[int, float], reference: Mapping[int, float]) -> Gap | None:
    """Gap over the seeds that both have run; None without any."""
    differences = [losses[seed] - reference[seed] for seed in sorted(losses.keys() & reference.keys())]
    if not differences:
        return None
    mean = statistics.fmean(differences)
    if len(differences) == 1 or not all(map(math.isfinite, differences)):
        return Gap(mean, None, len(differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Gap(mean, t_quantile(len(differences) - 1) * error, len(differences))


def spread(losses: Mapping[int, float]) -> dict[str, float] | None:
    """Standard deviation and range over seeds; None with fewer than two."""
    values = list(losses.values())
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return {"standard_deviation": statistics.stdev(values), "range": max(values) - min(values)}
