"""What can be wrong with the states of stateful scaling rules, found on the device, and how a state begins anew.

States are int32 [n, 3, 2 + history length] here, `n` of the form that `scaling` describes.
"""

from __future__ import annotations

import torch

from .formats import FP32
from .scaling import HISTORY, ROLLS, SCALE

MOST_CLIPPED = (64.0, 64.0, 4096.0)
"""For INPUT, WEIGHT and GRAD_OUTPUT: by how much an amax may exceed the largest number that its scale has codes for.

The amax of activations and weights is some ten times their root mean square, so beyond 64 most of a tensor lies outside
of the codes. Gradients have far longer tails, and their amax moves by a hundred times from step to step in ordinary
training: what little is clipped then does no harm.
"""

_INF = 0x7F800000
"""The bits of FP32's inf: those of NaN are larger, and those of negative numbers are negative."""


def overshoot(states: torch.Tensor, format_max: torch.Tensor, warm_from: int) -> torch.Tensor:
    """By how much the newest amax exceeds the largest number that the scale in force has codes for: FP32 [n, 3], 0
    where nothing was recorded.

    Args:
        format_max: the largest code of each of the three tensors' formats, FP32 [3].
        warm_from: the number of rolls from which on the state's scale is the one in force.
    """
    numbers = states.view(torch.float32)
    over = numbers[..., HISTORY] * numbers[..., SCALE] / format_max
    return torch.where(states[..., ROLLS] >= warm_from, over, torch.zeros_like(over))


def is_clipped(over: torch.Tensor) -> torch.Tensor:
    """Whether a tensor loses most of its values to clipping: bool [n, 3] of what `overshoot` returned. An amax that is
    not finite is not meant."""
    return (over > on_device(MOST_CLIPPED, over.device)) & torch.isfinite(over)


def on_device(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """FP32 numbers, filled in on the device: a copy from the host would wait for it."""
    return torch.stack([torch.full((), number, dtype=torch.float32, device=device) for number in numbers])


def is_invalid(states: torch.Tensor, reads_history: bool) -> torch.Tensor:
    """Whether a scale is not a positive number, or the history holds what no amax can be: bool [n, 3]. The newest
    amax, which the state has not taken in yet, is not looked at.

    Args:
        reads_history: whether the rule takes the largest of the history, where an inf stops the scale until it has left
            the history. Else an inf there is harmless, and usual where a loss scaler looks for its limit.
    """
    scale, past = states[..., SCALE], states[..., HISTORY + 1 :]
    invalid = (scale <= 0) | (scale >= _INF)
    return invalid | ((past < 0) | (past >= _INF if reads_history else past > _INF)).any(-1)


def anew(states: torch.Tensor, format_max: torch.Tensor, margin: int) -> torch.Tensor:
    """The states with the scales of the newest amaxes and otherwise empty histories: int32 [n, 3, 2 + history length].
    Where nothing was recorded, or no number, the scale is 1, as in a fresh state.

    A window state begins its just-in-time steps again, since its counter is 0.
    """
    amax = states.view(torch.float32)[..., HISTORY]
    scale = torch.clamp(format_max * 2.0**-margin / amax, max=FP32.max)
    scale = torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))
    new = torch.zeros_like(states)
    new[..., SCALE] = scale.view(torch.int32)
    return new
