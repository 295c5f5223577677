"""What a person should know of the last sample, in sentences: for the terminal and for the page."""

from __future__ import annotations

from typing import NamedTuple

from ...training.watching.monitor import NOT_FINITE, NOTABLE, tensors_of
from ...words import counted, listed
from .samples import Samples, Tensor, lost_db

MUCH_LOST_DB = 3.0
"""Decibels below the format's usual SQNR from which on a tensor is named: its error has twice the energy."""
_NAMED = NOTABLE | {
    f"over {MUCH_LOST_DB:g} dB more error than the format must have": lambda entry: (
        (lost_db(entry) or 0.0) > MUCH_LOST_DB
    )
}


class Findings(NamedTuple):
    """What stands at the top."""

    mood: str
    """`good`, `open` or `bad`, as the style sheet has it."""
    headline: str
    details: list[str]


def findings(samples: Samples) -> Findings:
    """Judge the last sample, and name the first that was not finite."""
    casts, step = samples.casts, samples.last["step"]
    tensors = tensors_of(samples.last)
    named = {what: [label for label, _, entry in tensors if is_named(entry)] for what, is_named in _NAMED.items()}
    details = [f"{what}: {listed(labels)}" for what, labels in named.items() if labels]
    if not casts:
        return Findings("open", f"no cast was seen at step {step}", [])
    headline = f"step {step}: every cast loses what its format must lose, and no more"
    if spoiled := named[NOT_FINITE]:
        headline = f"step {step}: {len(spoiled)} of {counted(len(tensors), 'tensor')} hold an inf or a NaN"
    elif details:
        losing = len(set().union(*named.values()))
        headline = f"step {step}: {losing} of {counted(len(casts), 'cast')} lose more than they must"
        details.append("fp8-backends advise tries changes of the recipe")
    mood = "open" if details else "good"
    if not_finite := samples.not_finite:
        mood, (first, (origin, *_)) = "bad", next(iter(not_finite.items()))
        share_of_samples = f"in {len(not_finite)} of {counted(len(samples.records), 'sample')}"
        details.insert(0, f"{NOT_FINITE} {share_of_samples}, first at step {first} in {origin}")
    return Findings(mood, headline, [*details, *_most_lost_earlier(casts, step)])


def _most_lost_earlier(casts: list[Tensor], last_step: int) -> list[str]:
    """Name the cast that lost most before the last sample, where that was much."""
    worst = max(casts, key=lambda tensor: tensor.most_lost[0])
    lost, step = worst.most_lost
    if lost <= MUCH_LOST_DB or step == last_step:
        return []
    return [f"most was lost at step {step}: {worst.label}, {lost:.1f} dB"]


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
