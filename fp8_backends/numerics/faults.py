"""What is wrong with the numbers of a checkpoint: looked for where the tensors lie, and read once at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import NamedTuple

import torch

from .formats import FP32


class Range(NamedTuple):
    """What a stored number may be. NaN lies in no range."""

    words: str
    least: float = -FP32.max
    most: float = FP32.max
    whole: bool = False

    def holds(self, number: float) -> bool:
        return self.least <= number <= self.most and not (self.whole and number % 1)


FINITE = Range("finite in FP32")
FINITE_IN_FP64 = Range("finite", -torch.finfo(torch.float64).max, torch.finfo(torch.float64).max)
NOT_NEGATIVE = Range("finite and not negative", least=0.0)
NOT_NEGATIVE_IN_FP64 = FINITE_IN_FP64._replace(words=NOT_NEGATIVE.words, least=0.0)
POSITIVE = Range("finite and positive", least=2.0**-149)
AMAX = Range("not negative", least=0.0, most=math.inf)
"""An overflow leaves an amax of inf, of which no rule makes a scale."""
COUNT = Range("whole and not negative", least=0.0, whole=True)


class Faults:
    """Faults of numbers and tensors in the order in which they were looked for.

    Args:
        advice: what to do about numbers that lie outside of their range.
    """

    def __init__(self, advice: str) -> None:
        self.advice = advice
        self._found: list[str | tuple[torch.Tensor, torch.Tensor, Range, str]] = []

    def add(self, fault: str) -> None:
        """Note a fault that is plain already."""
        self._found.append(fault)

    def look_at(self, values: torch.Tensor | Real, allowed: Range, name: str) -> None:
        """Look whether all of these values lie in a range: one pass over a tensor, and no wait for its device.

        Args:
            values: a number, or a plain tensor of integers or of floating-point numbers of two bytes or more.
            name: what they are, for the sentence that says what is wrong.
        """
        if not isinstance(values, torch.Tensor):
            values = torch.tensor(values, dtype=torch.float64)
        if values.is_complex():
            values = torch.view_as_real(values)
        if values.numel():
            self._found.append((*torch.aminmax(values.detach()), allowed, name))

    def first(self) -> str | None:
        """The first fault; None where there is none. Waits for the devices of the tensors."""
        looked = [found for found in self._found if not isinstance(found, str)]
        extremes = iter(_read([extreme for low, high, *_ in looked for extreme in (low, high)]))
        for found in self._found:
            if isinstance(found, str):
                return found
            _, _, allowed, name = found
            wrong = [number for number in (next(extremes), next(extremes)) if not allowed.holds(number)]
            if wrong:
                return f"{name} holds {wrong[0]:.4g}, and must be {allowed.words}. {self.advice}"
        return None


def _read(numbers: list[torch.Tensor]) -> Iterable[float]:
    """The values of tensors with one element each, with one wait for each device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, number in enumerate(numbers):
        alike.setdefault((number.device, number.dtype), []).append(i)
    values = [0.0] * len(numbers)
    for members in alike.values():
        for i, value in zip(members, torch.stack([numbers[i] for i in members]).tolist(), strict=True):
            values[i] = value
    return values
