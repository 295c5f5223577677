"""What a guard sees before a step. On the device: gradients that are not finite, and scaling states that clip or are
stuck. On the host: losses that spike."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ...numerics import scaling
from ...numerics.formats import RECIPE_FORMATS
from ...numerics.modules import plain_name
from ...numerics.scaled_tensor import stored_parts
from ...numerics.scaling import HISTORY, ROLLS, WINDOW
from ...numerics.sharded_tensor import local_part

if TYPE_CHECKING:
    from ...recipes.handlers import Recipe
    from ..conversion import Prepared

FROZEN = 16
"""Optimizer steps after which a history that records and does not move on is stuck."""
OPERANDS = ("input", "weight", "output's gradient")
"""The rows of a scaling state, in words."""

COMPARED = 100
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
"""So many among COMPARED losses are no spikes but the new usual, and the window begins again."""

Roots = list[tuple[nn.Module, "Prepared"]]


class Look(NamedTuple):
    """What was seen before one step."""

    step: int
    totals: torch.Tensor
    """FP32 [6], summed over the ranks: the sum of the finite losses, how many these are, how many are not finite; and
    how many gradients are not finite, how many operands clip, how many are stuck."""
    gradients: torch.Tensor | None
    """What `spoiled` says of the parameters on this rank; None where a loss scaler has looked."""
    after_backward: torch.Tensor | None
    """The same as backward left it, before gradients were clipped."""
    overshoot: torch.Tensor | None
    """FP32 [states, 3], as `scaling.overshoot` has it."""
    stuck: torch.Tensor | None
    """Bool [states, 3]."""


def on_its_way(look: Look) -> tuple[Look, torch.cuda.Event]:
    """The look with totals that are being copied to the host, and the event that says that they are there."""
    totals = torch.empty(look.totals.shape, dtype=look.totals.dtype, pin_memory=True)
    totals.copy_(look.totals, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return look._replace(totals=totals), arrived


def spoiled(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Whether the gradient of each parameter holds an inf or a NaN on this rank: 1 where it does, else 0, FP32
    [parameters]. Waits for nothing."""
    gradients = [[] if p.grad is None else [p.grad] for p in parameters]
    return (~torch.isfinite(largest_of(gradients, parameters[0].device))).float()


def largest_of(held: Sequence[Sequence[torch.Tensor]], device: torch.device) -> torch.Tensor:
    """The largest magnitude in some tensors each, FP32 [held]: inf or NaN where they hold one on this rank. A few
    launches for the tensors of one dtype."""
    alike: dict[tuple, list[tuple[int, torch.Tensor]]] = {}
    for i, tensors in enumerate(held):
        for part in (part for tensor in tensors for part in _numbers_of(tensor)):
            alike.setdefault((part.device, part.dtype), []).append((i, part))
    zero = torch.zeros((), dtype=torch.float32, device=device)
    largest = [zero] * len(held)
    for members in alike.values():
        norms = torch.stack(torch._foreach_norm([part for _, part in members], float("inf"))).to(zero).unbind()
        for (i, _), norm in zip(members, norms, strict=True):
            largest[i] = norm if largest[i] is zero else torch.maximum(largest[i], norm)
    return torch.stack(largest)


def _numbers_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of a tensor that show what is not finite. Of FP8 codes the scale does."""
    local = local_part(tensor.detach())
    for part in (local._values(),) if local.is_sparse else stored_parts(local, exact=True):
        if part.element_size() > 1 and part.numel() and (part.is_floating_point() or part.is_complex()):
            yield torch.view_as_real(part) if part.is_complex() else part


class ScalingLooks:
    """Looks at the scaling states of prepared roots, and remembers since when each has not moved on. A state is one
    [3, 2 + history length]: a layer has one, and experts have one each."""

    def __init__(self) -> None:
        self._rolls: torch.Tensor | None = None
        self._unmoved: torch.Tensor | None = None

    def look(self, roots: Roots) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The overshoot of all states, FP32 [states, 3], and whether each is stuck, bool [states, 3]; None without
        any."""
        over, stuck, rolls, records = [], [], [], []
        for root, prepared in roots:
            if not (buffers := prepared.compute.scaling_buffers(root)):
                continue
            recipe = prepared.recipe
            states = torch.cat([rows.to(buffers[0].device) for rows in map(_rows, buffers)])
            reads_history = recipe.scaling == "window" or recipe.amax_compute_algo == "max"
            warm_from = WINDOW if recipe.scaling == "window" else 1
            over.append(scaling.overshoot(states, _format_max(recipe, states), warm_from))
            stuck.append(scaling.is_invalid(states, reads_history))
            rolls.append(states[..., ROLLS])
            records.append(states[..., HISTORY] != 0)
        if not over:
            return None, None
        return torch.cat(over), torch.cat(stuck) | self._is_frozen(torch.cat(rolls), torch.cat(records))

    def _is_frozen(self, rolls: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """Whether a state records and has not moved on in FROZEN steps. It counts anew then."""
        if self._rolls is None or self._rolls.shape != rolls.shape:
            self._unmoved = torch.zeros_like(rolls)
        else:
            self._unmoved = torch.where(records & (rolls == self._rolls), self._unmoved + 1, 0)
        self._rolls, frozen = rolls, self._unmoved >= FROZEN
        self._unmoved.masked_fill_(frozen, 0)
        return frozen

    def named_states(self, roots: Roots) -> list[tuple[str, torch.Tensor]]:
        """Live states by the names of their layers, those of experts as one tensor."""
        named = []
        for root, prepared in roots:
            if buffers := prepared.compute.scaling_buffers(root):
                names = [plain_name(name.rpartition(".")[0]) for name in prepared.compute.scaling_state(root)]
                named += zip(names, buffers, strict=True)
        return named

    def places(self, roots: Roots, at: torch.Tensor) -> tuple[str, ...]:
        """The layers and operands that a bool [states, 3] marks, such as `mlp.down_proj (input)`."""
        names = [name for name, state in self.named_states(roots) for _ in range(len(_rows(state)))]
        return tuple(f"{names[state]} ({OPERANDS[operand]})" for state, operand in at.nonzero().tolist())

    def renew(self, roots: Roots, at_fault: torch.Tensor) -> int:
        """Make the states anew that a bool [states, 3] marks, from the amaxes of this step. Returns how many layers
        and experts have such."""
        begin = 0
        for root, prepared in roots:
            recipe = prepared.recipe
            for state in prepared.compute.scaling_buffers(root):
                rows = _rows(state)
                marked = at_fault[begin : begin + len(rows)].unsqueeze(-1).to(rows.device)
                new = scaling.anew(rows, _format_max(recipe, rows), recipe.margin)
                state.copy_(torch.where(marked, new, rows).view(state.shape))
                begin += len(rows)
        return int(at_fault.any(-1).sum())


def _rows(state: torch.Tensor) -> torch.Tensor:
    """The states that a live tensor holds: int32 [states, 3, 2 + history length]."""
    return state.reshape(-1, *state.shape[-2:])


def _format_max(recipe: Recipe, like: torch.Tensor) -> torch.Tensor:
    """The largest code of each operand's format: FP32 [3], on the device of `like`."""
    forward, gradient = RECIPE_FORMATS[recipe.fp8_format]
    return scaling.on_device((forward.max, forward.max, gradient.max), like.device)


# Losses


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
        self.losses: deque[float] = deque(maxlen=COMPARED)
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
        if len(self.spikes) == MOST and self.number - self.spikes[0] < COMPARED:
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
