"""Reject numbers in a checkpoint that would break training."""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

import torch

from ..errors import FP8BackendError
from .formats import FP32


class Range(NamedTuple):
    """Allowed values of a stored number. No range includes NaN."""

    words: str
    least: float = -FP32.max
    most: float = FP32.max
    whole: bool = False


FINITE = Range("finite in FP32")
FINITE_IN_FP64 = Range("finite", -torch.finfo(torch.float64).max, torch.finfo(torch.float64).max)
NOT_NEGATIVE = Range("finite and not negative", least=0.0)
NOT_NEGATIVE_IN_FP64 = FINITE_IN_FP64._replace(words=NOT_NEGATIVE.words, least=0.0)
POSITIVE = Range("finite and positive", least=2.0**-149)
AMAX = Range("not negative", least=0.0, most=math.inf)
"""An overflow leaves an amax of inf; every rule skips it."""
COUNT = Range("whole and not negative", least=0.0, whole=True)


def check_values(values: torch.Tensor | Real, allowed: Range, name: str, advice: str) -> None:
    """Raise `FP8BackendError` for values out of range. Reads a tensor once.

    Args:
        values: a number, or a plain tensor of integers or of floating-point numbers of two bytes or more.
        name: name of the values in the error.
        advice: the way out, at the error's end.
    """
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=torch.float64)
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.numel():
        for number in torch.stack(torch.aminmax(values.detach())).tolist():
            if not allowed.least <= number <= allowed.most or (allowed.whole and number % 1):
                raise FP8BackendError(f"{name} holds {number:.4g}, and must be {allowed.words}. {advice}")
