"""Whether a loss is a spike, by the losses before it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

WINDOW = 100
"""Losses that a new one is compared with."""
WARM_UP = 50
"""Losses that are needed before one is judged: fewer say little of their spread."""
SPREADS = 10.0
"""A spike lies this many spreads above the median. Of normal numbers 6 would do (once in 1e9); losses of small batches
have longer tails."""
RANGES, PLAIN_RANGES = 2.0, 10.0
"""And it lies this many times as far above the median as the largest loss of the window, by logarithms and by plain
numbers, whose tails are longer: where batches of two kinds take turns, the spread is that of one kind."""
LEAST_FACTOR = 1.5
"""And it is this many times the median: the spread of a loss that hardly moves says nothing."""
LEAST_SHARE = 0.05
"""And it is this share of the first losses: below, a model that has learned its data by heart jumps about."""
MOST = 3
"""So many among WINDOW losses are no spikes but the new usual, and the window begins again."""


class Spike(NamedTuple):
    """A loss far above those before it."""

    loss: float
    median: float
    threshold: float


class LossWindow:
    """The last losses of a run, by whose median and median absolute deviation the next one is judged.

    Where all are positive their logarithms are compared, of which even small batches have no long tails. A spike does
    not enter the window.
    """

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.first: float | None = None
        """The median of the first losses."""
        self.number = 0
        """Losses seen so far."""
        self.spikes: deque[int] = deque(maxlen=MOST)
        """The numbers of the last spikes."""

    def see(self, loss: float) -> Spike | None:
        """Take the finite loss of a step in, and say whether it was a spike."""
        self.number += 1
        spike = self._judged(loss) if len(self.losses) >= WARM_UP else None
        if spike is None:
            self.losses.append(loss)
            return None
        self.spikes.append(self.number)
        if len(self.spikes) == MOST and self.number - self.spikes[0] < WINDOW:
            self.losses.clear()
            self.spikes.clear()
        return spike

    def _judged(self, loss: float) -> Spike | None:
        median = statistics.median(self.losses)
        if self.first is None:
            self.first = abs(median)
        positive = min(self.losses) > 0
        if positive and (loss < LEAST_FACTOR * median or loss < LEAST_SHARE * self.first):
            return None
        values = [math.log(each) for each in self.losses] if positive else list(self.losses)
        middle = statistics.median(values)
        # of normal numbers, 1.4826 median absolute deviations are one standard deviation
        spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
        ranges = RANGES if positive else PLAIN_RANGES
        threshold = middle + max(SPREADS * spread, ranges * (max(values) - middle))
        if spread == 0 or (math.log(loss) if positive else loss) <= threshold:
            return None
        return Spike(loss, median, math.exp(threshold) if positive else threshold)
