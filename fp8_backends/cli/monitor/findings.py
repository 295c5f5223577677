"""What a person should know of the last sample, in sentences: for the terminal and for the page."""

from __future__ import annotations

from typing import NamedTuple

from ...training.monitor import MANY_FLUSHED, MANY_SATURATED
from ...words import counted, listed, share
from .samples import Samples, Tensor

MUCH_LOST_DB = 3.0
"""Decibels below the format's usual SQNR from which on a tensor is named: its error has twice the energy."""


class Findings(NamedTuple):
    """What stands at the top."""

    mood: str
    """`good`, `open` or `bad`, as the style sheet has it."""
    headline: str
    details: list[str]


def findings(samples: Samples) -> Findings:
    """Judge the last sample."""
    casts, step = samples.casts, samples.last["step"]
    details = [
        f"{what}: {listed(names)}"
        for what, names in (
            ("inf or NaN", _names(casts, lambda t: t.last["amax"] is None)),
            (f"over {share(MANY_SATURATED)} clipped", _names(casts, lambda t: t.last["saturated"] > MANY_SATURATED)),
            (
                f"over {share(MANY_FLUSHED)} flushed to zero",
                _names(casts, lambda t: t.last["flushed"] > MANY_FLUSHED),
            ),
            (
                f"over {MUCH_LOST_DB:g} dB more error than the format must have",
                _names(casts, lambda t: (t.lost_db or 0.0) > MUCH_LOST_DB),
            ),
        )
        if names
    ]
    if not casts:
        return Findings("open", f"no cast was seen at step {step}", [])
    earlier = _most_lost_earlier(casts, step)
    if not details:
        return Findings("good", f"step {step}: every cast loses what its format must lose, and no more", earlier)
    mood = "bad" if any(tensor.last["amax"] is None for tensor in casts) else "open"
    named = sum(_is_notable(tensor) for tensor in casts)
    details += earlier
    details.append("fp8-backends advise tries changes of the recipe")
    return Findings(mood, f"step {step}: {named} of {counted(len(casts), 'cast')} lose more than they must", details)


def _most_lost_earlier(casts: list[Tensor], last_step: int) -> list[str]:
    """Name the cast that lost most before the last sample, where that was much."""
    worst = max(casts, key=lambda tensor: tensor.most_lost[0])
    lost, step = worst.most_lost
    if lost <= MUCH_LOST_DB or step == last_step:
        return []
    return [f"most was lost at step {step}: {worst.label}, {lost:.1f} dB"]


def _is_notable(tensor: Tensor) -> bool:
    entry = tensor.last
    loses = entry["saturated"] > MANY_SATURATED or entry["flushed"] > MANY_FLUSHED
    return entry["amax"] is None or loses or (tensor.lost_db or 0.0) > MUCH_LOST_DB


def _names(tensors, is_named) -> list[str]:
    return [tensor.label for tensor in tensors if is_named(tensor)]


def remarks(samples: Samples) -> list[tuple[str, str]]:
    """What the numbers are of, each with its label."""
    last = samples.last
    rows = [
        ("casts", f"by {last['casts']}; of rank 0, all microbatches of the step, of a weight the first"),
        (
            "SQNR",
            "energy of the values over that of the error; lost: decibels below what the format usually has, "
            "in the last sample and at most in any",
        ),
        ("shares", "of values that are not zero; of a tensor of more than 65,536 elements, of some of its rows"),
    ]
    if not_seen := last["not_seen"]:
        rows.append(("not seen", listed(not_seen)))
    if samples.unreadable:
        rows.append(("unread", f"{counted(samples.unreadable, 'line')} of {samples.path} could not be read"))
    return rows
