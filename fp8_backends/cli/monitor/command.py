"""`fp8-backends monitor`: which layers lose most by FP8, from the file of a training with `monitor_every`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...errors import FP8BackendError
from ...training.watching.monitor import NAMES, NOT_FINITE, NOTABLE, is_finite, summary, tensors_of
from ...words import counted, listed, share, shortened
from .. import page
from ..page import aside, bullets, signed
from ..terminal import Verdict, paragraphs, table
from .samples import CAST_COLUMNS, FORMATS, STORED_COLUMNS, Samples, Tensor, cells, lost_db, read_samples

MUCH_LOST_DB = 3.0
"""Decibels below the format's usual SQNR from which on a tensor is named: its error has twice the energy."""
_NAMED = NOTABLE | {
    f"over {MUCH_LOST_DB:g} dB more error than the format must have": lambda entry: (
        (lost_db(entry) or 0.0) > MUCH_LOST_DB
    )
}
_CURVES, _HISTOGRAMS, _ROWS = 7, 9, 20
"""How many tensors a chart has lines for, how many histograms there are, and rows of a table that is not opened."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads the statistics that a training with monitor_every=N adds to a file, also while it runs: which layers "
        "lose most by their casts to FP8, in the last sample and over the run."
    )
    parser.add_argument("file", nargs="?", default="fp8_monitor.jsonl", help="what to read (./fp8_monitor.jsonl)")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write a page for a browser too, such as monitor.html")
    parser.add_argument("--json", action="store_true", help="print JSON: every sample's summary, and all tensors")
    parser.add_argument("--worst", type=int, default=12, metavar="N", help="how many tensors the tables show (12)")


def run(args: argparse.Namespace) -> int:
    samples = read_samples(args.file)
    print(json.dumps(as_json(samples), indent=1) if args.json else in_words(samples, max(args.worst, 1)))
    if args.out is not None:
        try:
            args.out.write_text(render(samples), encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FP8BackendError(f"--out {shortened(str(args.out))} cannot be written: {reason}") from None
        print(f"\n{args.out}", file=sys.stderr if args.json else sys.stdout)
    return 0


def as_json(samples: Samples) -> dict[str, Any]:
    """Return the findings, the summary of each sample and the last entry of each tensor; None for NaN."""
    summaries = [{"step": record["step"], **summary(record)} for record in samples.records]
    tensors = [{"layer": each.layer, "tensor": each.name, "lost_db": each.lost_db} for each in samples.tensors]
    return {
        "file": str(samples.path),
        "recipe": samples.last["recipe"],
        "steps": samples.steps,
        **findings(samples)._asdict(),
        "not_finite": [{"step": step, "tensors": labels} for step, labels in samples.not_finite.items()],
        "samples": [{key: None if number != number else number for key, number in each.items()} for each in summaries],
        "tensors": [each | tensor.last for each, tensor in zip(tensors, samples.tensors, strict=True)],
        "not_seen": samples.last["not_seen"],
        "unreadable_lines": samples.unreadable,
    }


def in_words(samples: Samples, worst: int) -> str:
    """Show findings, the worst tensors and remarks."""
    first, last = samples.steps[0], samples.steps[-1]
    head = f"{samples.last['recipe']}: {counted(len(samples.records), 'sample')}, steps {first} to {last}"
    parts = [head, str(findings(samples))]
    for columns, tensors in ((CAST_COLUMNS, samples.casts), (STORED_COLUMNS, samples.stored)):
        if tensors:
            rows = [list(columns), *map(cells, tensors[:worst])]
            parts.append(table([row[:-2] for row in rows]))  # amaxes and scales are on the page
        if len(tensors) > worst:
            parts.append(f"the worst {worst} of {len(tensors)}")
    return "\n\n".join([*parts, paragraphs(remarks(samples))])


def findings(samples: Samples) -> Verdict:
    """Judge the last sample, and name the first that was not finite."""
    casts, step = samples.casts, samples.last["step"]
    tensors = tensors_of(samples.last)
    named = {what: [label for label, _, entry in tensors if is_named(entry)] for what, is_named in _NAMED.items()}
    details = [f"{what}: {listed(labels)}" for what, labels in named.items() if labels]
    if not casts:
        return Verdict("open", f"no cast was seen at step {step}", [])
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
    worst = max(casts, key=lambda tensor: tensor.most_lost[0])
    lost, earlier = worst.most_lost
    if lost > MUCH_LOST_DB and earlier != step:
        details.append(f"most was lost at step {earlier}: {worst.label}, {lost:.1f} dB")
    return Verdict(mood, headline, details)


def remarks(samples: Samples) -> list[tuple[str, str]]:
    """Explain the numbers, each remark with its label."""
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


# The page


def render(samples: Samples) -> str:
    """Return the whole page."""
    first, last = samples.steps[0], samples.steps[-1]
    facts = [
        *(samples.last["recipe"], counted(len(samples.records), "sample"), f"steps {first} to {last}"),
        counted(len(samples.last["tensors"]), "layer"),
    ]
    sections = {
        "Where most is lost": _table(CAST_COLUMNS, samples.casts),
        "Over the run": _over_the_run(samples),
        "Where the values lie": _histograms(samples.casts),
        "What the level stores": _table(STORED_COLUMNS, samples.stored),
        "How to read this": _reading(samples),
    }
    return page.page("FP8 monitor", facts, findings(samples), _figures(samples), sections)


def _figures(samples: Samples) -> list[tuple[str, str]]:
    casts, spoiled = samples.casts, sum(not is_finite(tensor.last) for tensor in samples.tensors)
    if spoiled:
        return [("hold an inf or a NaN", f"{spoiled} of {counted(len(samples.tensors), 'tensor')}")]
    lost = [tensor.lost_db for tensor in casts if tensor.lost_db is not None]
    figures = [("most lost below the format's usual SQNR", f"{max(lost):.1f} dB")] if lost else []
    for key, label in (("saturated", "largest share clipped"), ("flushed", "largest share flushed to zero")):
        figures += [(label, share(max(tensor.last[key] for tensor in casts)))] if casts else []
    return figures


def _table(columns: Sequence[str], tensors: list[Tensor]) -> str:
    if not tensors:
        return ""
    rows = [list(map(signed, cells(tensor))) for tensor in tensors]
    html = page.table(columns, rows[:_ROWS])
    if rest := rows[_ROWS:]:
        html += f"<details><summary>{len(rest)} more</summary>{page.table(columns, rest)}</details>"
    return html


def _over_the_run(samples: Samples) -> str:
    """Draw the error of the worst tensors, and the largest shares of each kind of tensor."""
    if len(samples.records) < 2:
        return ""
    worst = sorted(samples.casts, key=lambda tensor: tensor.most_lost[0], reverse=True)[:_CURVES]
    lines = {}
    for tensor in worst:
        by_step = dict(zip(tensor.steps, map(lost_db, tensor.entries), strict=True))
        lines[tensor.label] = [math.nan if by_step.get(step) is None else by_step[step] for step in samples.steps]
    html = _chart(samples, lines, "Error of the worst tensors", "dB below the format's usual SQNR")
    html += aside("The tensors that lose most at any time of the run.") if html else ""
    for key, title in (("saturated", "Clipped"), ("flushed", "Flushed to zero")):
        lines = {name: _largest_by_step(samples, name, key) for name in NAMES.values()}
        if any(value > 0 for values in lines.values() for value in values):
            chart = _chart(samples, lines, f"{title}: the largest share of any layer", "% of the values")
            html += f"<h3>{title}</h3>{chart}"
    return html


def _chart(samples: Samples, lines: dict[str, list[float]], title: str, label: str) -> str:
    series = [page.Series(name, f"var(--c{number})", lines[name]) for number, name in enumerate(lines, 1)]
    chart = page.curves(series, samples.steps, title, label, zero_line=True, height=260)
    return chart and bullets((page.chip(each.name, each.color) for each in series), "legend") + chart


def _largest_by_step(samples: Samples, name: str, key: str) -> list[float]:
    """Return percents."""
    values = []
    for record in samples.records:
        entries = [tensors[name] for tensors in record["tensors"].values() if name in tensors]
        known = bool(entries) and all(map(is_finite, entries))
        values.append(100 * max(entry[key] for entry in entries) if known else math.nan)
    return values


def _histograms(tensors: list[Tensor]) -> str:
    shown = [tensor for tensor in tensors if tensor.last["binades"]][:_HISTOGRAMS]
    if not shown:
        return ""
    return page.cards({tensor.label: _histogram(tensor) for tensor in shown}) + aside(
        "Scaled values by power of two, of the tensors that lose most. Between the lines lie the format's normal "
        "numbers; to the left of them are those that lose bits and at last become zero, to the right those that are "
        "clipped."
    )


def _histogram(tensor: Tensor) -> str:
    """Draw how many scaled values lie in each binade; the format's normal numbers lie between two lines."""
    entry, height, base = tensor.last, 120, 96
    fmt = FORMATS[entry["format"]]
    first, last = entry["exponents"]
    low, high = min(first, fmt.min_exponent - fmt.mantissa_bits) - 1, max(last, fmt.max_exponent) + 1
    width, largest = 100 / (high - low + 1), max(entry["binades"])
    parts = []
    for exponent, count in zip(range(first, last + 1), entry["binades"], strict=True):
        inside = fmt.min_exponent <= exponent <= fmt.max_exponent
        bar = max(round(base * 0.92 * count / largest, 1), 0.8 if count else 0)
        parts.append(
            f'<rect x="{(exponent - low) * width:.2f}%" y="{base - bar}" width="{width * 0.86:.2f}%" height="{bar}" '
            f'fill="var({"--c1" if inside else "--c2"})"><title>2^{exponent}: {count}</title></rect>'
        )
    for exponent, past, anchor in ((fmt.min_exponent, 0, "start"), (fmt.max_exponent, 1, "end")):
        place, power = round((exponent + past - low) * width, 2), str(exponent).translate(_SUPERSCRIPTS)
        parts.append(page.line("bound", place, 0, place, base))
        parts.append(page.text(place, base + 16, f"2{power}", "tick", anchor))
    return page.drawing(height, f"exponents of {tensor.label}", parts)


def _reading(samples: Samples) -> str:
    points = [f"<b>{escape(label)}</b>: {escape(text, quote=False)}." for label, text in remarks(samples)]
    points += [
        "<b>Clipped</b>: beyond what rounds to the format's largest number. With scales by the tensor's own amax "
        "nothing is clipped; with delayed scales a tensor that has grown since is.",
        "<b>Flushed</b>: not zero before the cast, and zero after it: below half of the format's smallest number. A "
        "few large values of a tensor with one scale push the others there; finer scales (rowwise, blockwise, mxfp8) "
        "help.",
        "<b>A level's states</b> are read after the step, as codes: how many are zero and how many lie at the largest "
        "number. What they were made of is gone, and so no error is known.",
    ]
    return bullets(points, "reading")
