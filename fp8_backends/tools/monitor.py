"""`fp8-backends monitor`: show the layers that lose most by FP8, from the file of a training with
`monitor_every`."""

import argparse
import itertools
import json
import math
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from ..errors import FP8BackendError
from ..formats.formats import BF16, E4M3, E5M2, FP16, FP32, ROOT8
from ..watch.monitor import (
    FIGURES,
    NOT_FINITE,
    NOTABLE,
    OPERAND_NAMES,
    SAMPLED_STATES,
    is_finite,
    summary,
    tensors_of,
)
from ..words import counted, finite, listed, share, shortened
from . import page
from .page import aside, bullets, signed
from .terminal import Verdict, paragraphs, positive_int, table, write_text

FORMATS_BY_NAME = {fmt.name: fmt for fmt in (E4M3, E5M2, FP16, BF16, FP32, ROOT8)}
MUCH_LOST_DB = 3.0
"""Name a tensor this many decibels below the format's usual SQNR: its error has twice the
energy."""
_NAMED = NOTABLE | {
    f"over {MUCH_LOST_DB:g} dB more error than the format must have": lambda entry: (
        (lost_db(entry) or 0) > MUCH_LOST_DB
    )
}
_CURVES = 7
_HISTOGRAMS = 9
_ROWS = 20
"""Lines of a chart, histograms, and rows of a folded table."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads the statistics that a training with monitor_every=N adds to a file, also while it "
        "runs: which layers lose most by their casts to FP8, in the last sample and over the run."
    )
    parser.add_argument(
        "file", nargs="?", default="fp8_monitor.jsonl", help="what to read (./fp8_monitor.jsonl)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PAGE",
        help="write a page for a browser too, such as monitor.html",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON: every sample's summary, and all tensors"
    )
    parser.add_argument(
        "--worst",
        type=positive_int,
        default=12,
        metavar="N",
        help="how many tensors the tables show (12)",
    )


def run(args: argparse.Namespace) -> int:
    samples = read_samples(args.file)
    print(json.dumps(as_json(samples), indent=1) if args.json else in_words(samples, args.worst))
    if args.out is not None:
        write_text(args.out, render(samples))
        print(f"\n{args.out}", file=sys.stderr if args.json else sys.stdout)
    return 0


@dataclass
class Tensor:
    layer: str
    name: str
    """`input`, `weight`, `grad_output`, or a stored state of a level."""
    steps: list[int] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.layer or '(root)'} {self.name}"

    @property
    def last(self) -> dict[str, Any]:
        return self.entries[-1]

    @property
    def is_stored(self) -> bool:
        return self.name in SAMPLED_STATES

    @property
    def shares(self) -> list[float]:
        """Shares of the last sample: zeros and maxima of a stored state, saturated and flushed
        values of a cast."""
        return [self.last[key] for key in _SHARES[self.is_stored]]

    @property
    def most_lost(self) -> tuple[float, int]:
        """The largest `lost_db` of all samples, and its step."""
        lost = zip(map(lost_db, self.entries), self.steps, strict=True)
        return max(
            ((decibels, step) for decibels, step in lost if decibels is not None), default=(0.0, 0)
        )

    @property
    def badness(self) -> tuple:
        """Sort key by the loss in the last sample; values that are not finite are the worst."""
        if not is_finite(self.last):
            return (True,)
        if self.is_stored:
            return (False, sum(self.shares))
        named = any(applies(self.last) for applies in _NAMED.values())
        return (False, named, lost_db(self.last) or 0.0, *self.shares)


_SHARES = {True: ("zeros", "at_max"), False: ("saturated", "flushed")}


def lost_db(entry: dict[str, Any]) -> float | None:
    """Return the decibels by which a cast's error exceeds the format's usual one; None without an
    error in dB."""
    sqnr = entry.get("sqnr_db")
    return None if sqnr is None else usual_db(entry["format"]) - sqnr


def usual_db(fmt: str) -> float:
    """Return the SQNR of normally distributed values in the normal range: E4M3 31.6 dB, E5M2 25.5
    dB, 6 dB a bit."""
    return 13.5 + 6.02 * FORMATS_BY_NAME[fmt].mantissa_bits


@dataclass
class Samples:
    path: Path
    records: list[dict[str, Any]]
    """In the order of their steps; the later record of a step trained again after a resume."""
    unreadable: int
    """Lines that are no records, such as one cut short by a power failure."""
    tensors: list[Tensor]
    """Casts, then stored states, each with the worst of the last sample first."""

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.records]

    @property
    def last(self) -> dict[str, Any]:
        return self.records[-1]

    @property
    def title(self) -> list[str]:
        steps = f"steps {self.steps[0]} to {self.steps[-1]}"
        return [self.last["recipe"], counted(len(self.records), "sample"), steps]

    @property
    def not_finite(self) -> dict[int, list[str]]:
        """Tensors with an inf or a NaN by step, the likely origin first."""
        by_step = {
            r["step"]: [label for label, _, e in tensors_of(r) if not is_finite(e)]
            for r in self.records
        }
        return {step: labels for step, labels in by_step.items() if labels}

    @property
    def casts(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if not tensor.is_stored]

    @property
    def stored(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.is_stored]


def read_samples(path: str | Path) -> Samples:
    """Read a file of `monitor_every`, also while it grows. Raises `FP8BackendError` without a file
    or sample."""
    path = Path(path)
    by_step = {}
    unreadable = 0
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device may never end
            raise ValueError("it is no file")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FP8BackendError(
            f"{shortened(str(path))} cannot be read ({reason}): name the file of a training with "
            "monitor_every"
        ) from None
    for line in filter(str.strip, lines):
        if (record := _record(line)) is None:
            unreadable += 1
        else:
            by_step[record["step"]] = record
    if not by_step:
        name = shortened(str(path))
        raise FP8BackendError(
            f"{name} holds no sample yet: a training with monitor_every=N adds one every N steps"
        )
    records = [by_step[step] for step in sorted(by_step)]
    by_name: dict[tuple[str, str], Tensor] = {}
    for record in records:
        for layer, tensors in record["tensors"].items():
            for name, entry in tensors.items():
                tensor = by_name.setdefault((layer, name), Tensor(layer, name))
                tensor.steps.append(record["step"])
                tensor.entries.append(entry)
    worst_first = sorted(
        by_name.values(), key=lambda tensor: (not tensor.is_stored, *tensor.badness), reverse=True
    )
    return Samples(path, records, unreadable, worst_first)


def _record(line: str) -> dict[str, Any] | None:
    """Return the record on a line; None for anything that no monitor wrote, so that later code need
    not check."""
    try:
        record = json.loads(line)
        tensors = [item for tensors in record["tensors"].values() for item in tensors.items()]
        texts = [
            record["recipe"],
            record["casts"],
            *record["not_seen"],
            *record["tensors"],
            *dict(tensors),
        ]
        is_record = (
            type(record["step"]) is int
            and 0 <= record["step"] < 1e300
            and isinstance(record["not_seen"], list)
            and all(text.isprintable() for text in texts)
            and all(number is None or abs(number) < 1e300 for number in map(record.get, FIGURES))
            and all(_is_entry(name, entry) for name, entry in tensors)
        )
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return record if is_record else None


def _is_entry(name: str, entry: dict[str, Any]) -> bool:
    scales = entry["scale"] if isinstance(entry["scale"], list) else [entry["scale"]] * 2
    numbers = [entry["amax"], *scales, *(entry[key] for key in _SHARES[name in SAMPLED_STATES])]
    numbers.append(entry.get("sqnr_db"))
    (first, last), binades = entry["exponents"], entry["binades"]
    return (
        entry["format"] in FORMATS_BY_NAME
        and (name in SAMPLED_STATES or "sqnr_db" in entry)
        and len(scales) == 2
        and all(number is None or abs(number) < 1e300 for number in numbers)
        and all(count >= 0 for count in binades)
        and len(binades) == (last - first + 1 if any(binades) else 0)
    )


def as_json(samples: Samples) -> dict[str, Any]:
    """Return the findings, the summary of each sample and the last entry of each tensor; None for
    NaN."""
    summaries = [{"step": record["step"], **summary(record)} for record in samples.records]
    return {
        "file": str(samples.path),
        "recipe": samples.last["recipe"],
        "steps": samples.steps,
        **findings(samples)._asdict(),
        "not_finite": [
            {"step": step, "tensors": labels} for step, labels in samples.not_finite.items()
        ],
        "samples": finite(summaries),
        "tensors": [
            {"layer": each.layer, "tensor": each.name, "lost_db": lost_db(each.last), **each.last}
            for each in samples.tensors
        ],
        "not_seen": samples.last["not_seen"],
        "unreadable_lines": samples.unreadable,
    }


def in_words(samples: Samples, worst: int) -> str:
    recipe, *counts = samples.title
    parts = [f"{recipe}: {', '.join(counts)}", str(findings(samples))]
    for columns, tensors in ((CAST_COLUMNS, samples.casts), (STORED_COLUMNS, samples.stored)):
        if tensors:
            rows = [list(columns), *map(cells, tensors[:worst])]
            # the page has amaxes and scales
            parts.append(table([row[:-2] for row in rows]))
        if len(tensors) > worst:
            parts.append(f"the worst {worst} of {len(tensors)}")
    return "\n\n".join([*parts, paragraphs(remarks(samples))])


_LOST = ("SQNR, dB", "lost", "most lost", "clipped", "flushed")
CAST_COLUMNS = ("layer", "tensor", "format", *_LOST, "amax", "scale")
STORED_COLUMNS = ("layer", "tensor", "format", "zeros", "at the maximum", "amax", "scale")


def cells(tensor: Tensor) -> list[str]:
    """Return a row of `CAST_COLUMNS`, or of `STORED_COLUMNS`."""
    entry = tensor.last
    finite = is_finite(tensor.last)
    low, high = entry["scale"] if isinstance(entry["scale"], list) else [entry["scale"]] * 2
    scale = _number(high) if low == high else f"{_number(low)} to {_number(high)}"
    texts = [] if tensor.is_stored else [entry["sqnr_db"], lost_db(entry), tensor.most_lost[0]]
    missing = "–" if finite else "NaN"
    return [
        *(tensor.layer or "(root)", tensor.name, entry["format"]),
        *(missing if each is None else f"{each:.1f}".replace("-0.0", "0.0") for each in texts),
        *(share(each) if finite else "NaN" for each in tensor.shares),
        *(_number(entry["amax"]), "–" if low is None and high is None else scale),
    ]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def findings(samples: Samples) -> Verdict:
    """Judge the last sample, and name the first that was not finite."""
    casts = samples.casts
    step = samples.last["step"]
    tensors = tensors_of(samples.last)
    named = {
        title: [label for label, _, entry in tensors if applies(entry)]
        for title, applies in _NAMED.items()
    }
    details = [f"{title}: {listed(labels)}" for title, labels in named.items() if labels]
    if not casts:
        return Verdict("open", f"no cast was seen at step {step}", [])
    headline = f"step {step}: every cast loses what its format must lose, and no more"
    if spoiled := named[NOT_FINITE]:
        headline = (
            f"step {step}: {len(spoiled)} of {counted(len(tensors), 'tensor')} hold an inf or a NaN"
        )
    elif details:
        losing = len(set().union(*named.values()))
        headline = (
            f"step {step}: {losing} of {counted(len(casts), 'cast')} lose more than they must"
        )
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
    last = samples.last
    sqnr = "energy of the values over that of the error; lost: decibels below what the format usually has, "
    rows = [
        (
            "casts",
            f"by {last['casts']}; of rank 0, all microbatches of the step, of a weight the first",
        ),
        ("SQNR", f"{sqnr}in the last sample and at most in any"),
        (
            "shares",
            "of values that are not zero; of a tensor of more than 65,536 elements, of some of its "
            "rows",
        ),
    ]
    if not_seen := last["not_seen"]:
        rows.append(("not seen", listed(not_seen)))
    if samples.unreadable:
        rows.append(
            ("unread", f"{counted(samples.unreadable, 'line')} of {samples.path} could not be read")
        )
    return rows


# Page


def render(samples: Samples) -> str:
    facts = [*samples.title, counted(len(samples.last["tensors"]), "layer")]
    sections = {
        "Where most is lost": _table(CAST_COLUMNS, samples.casts),
        "Over the run": _over_the_run(samples),
        "Where the values lie": _histograms(samples.casts),
        "What the level stores": _table(STORED_COLUMNS, samples.stored),
        "How to read this": _reading(samples),
    }
    return page.page("FP8 monitor", facts, findings(samples), sections)


def _table(columns: Sequence[str], tensors: list[Tensor]) -> str:
    rows = [list(map(signed, cells(tensor))) for tensor in tensors]
    html = page.table(columns, rows[:_ROWS], texts=3) if rows else ""
    rest = rows[_ROWS:]
    if rest:
        return html + page.details(f"{len(rest)} more", page.table(columns, rest, texts=3))
    return html


def _over_the_run(samples: Samples) -> str:
    if len(samples.records) < 2:
        return ""
    worst = sorted(samples.casts, key=lambda tensor: tensor.most_lost[0], reverse=True)[:_CURVES]
    lines = {}
    for tensor in worst:
        by_step = dict(zip(tensor.steps, map(lost_db, tensor.entries), strict=True))
        lines[tensor.label] = [
            math.nan if by_step.get(step) is None else by_step[step] for step in samples.steps
        ]
    html = _chart(samples, lines, "Error of the worst tensors", "dB below the format's usual SQNR")
    html += aside("The tensors that lose most at any time of the run.") if html else ""
    for key, title in (("saturated", "Clipped"), ("flushed", "Flushed to zero")):
        lines = {name: [] for name in OPERAND_NAMES.values()}
        for name, record in itertools.product(lines, samples.records):
            entries = [tensors[name] for tensors in record["tensors"].values() if name in tensors]
            known = bool(entries) and all(map(is_finite, entries))
            lines[name].append(100 * max(entry[key] for entry in entries) if known else math.nan)
        if any(percent > 0 for percents in lines.values() for percent in percents):
            chart = _chart(
                samples, lines, f"{title}: the largest share of any layer", "% of the values"
            )
            html += f"<h3>{title}</h3>{chart}"
    return html


def _chart(samples: Samples, lines: dict[str, list[float]], title: str, label: str) -> str:
    series = [
        page.Series(name, f"var(--c{number})", lines[name]) for number, name in enumerate(lines, 1)
    ]
    return page.curves(series, samples.steps, title, label, zero_line=True, height=260, legend=True)


def _histograms(tensors: list[Tensor]) -> str:
    shown = [tensor for tensor in tensors if tensor.last["binades"]][:_HISTOGRAMS]
    if not shown:
        return ""
    return page.cards({tensor.label: _histogram(tensor) for tensor in shown}) + aside(
        "Scaled values by power of two, of the tensors that lose most. Between the lines lie the "
        "format's normal numbers; to the left of them are those that lose bits and at last become "
        "zero, to the right those that are clipped."
    )


def _histogram(tensor: Tensor) -> str:
    """Draw the scaled values of each binade, and two lines around the format's normal numbers."""
    entry = tensor.last
    height = 120
    base = 96
    fmt = FORMATS_BY_NAME[entry["format"]]
    first, last = entry["exponents"]
    low = min(first, fmt.min_exponent - fmt.mantissa_bits) - 1
    high = max(last, fmt.max_exponent) + 1
    width = 100 / (high - low + 1)
    largest = max(entry["binades"])
    parts = []
    for exponent, count in zip(range(first, last + 1), entry["binades"], strict=True):
        inside = fmt.min_exponent <= exponent <= fmt.max_exponent
        bar = max(round(base * 0.92 * count / largest, 1), 0.8 if count else 0)
        parts.append(
            f'<rect x="{(exponent - low) * width:.2f}%" y="{base - bar}" '
            f'width="{width * 0.86:.2f}%" height="{bar}" '
            f'fill="var({"--c1" if inside else "--c2"})"><title>2^{exponent}: '
            f"{count}</title></rect>"
        )
    for exponent, past, anchor in ((fmt.min_exponent, 0, "start"), (fmt.max_exponent, 1, "end")):
        place = round((exponent + past - low) * width, 2)
        power = str(exponent).translate(_SUPERSCRIPTS)
        parts.append(page.line("bound", place, 0, place, base))
        parts.append(page.text(place, base + 16, f"2{power}", "tick", anchor))
    return page.drawing(height, f"exponents of {tensor.label}", parts)


def _reading(samples: Samples) -> str:
    points = [
        f"<b>{escape(label)}</b>: {escape(text, quote=False)}." for label, text in remarks(samples)
    ]
    points += [
        "<b>Clipped</b>: beyond what rounds to the format's largest number. With scales by the "
        "tensor's own amax nothing is clipped; with delayed scales a tensor that has grown since "
        "is.",
        "<b>Flushed</b>: not zero before the cast, and zero after it: below half of the format's "
        "smallest number. A few large values of a tensor with one scale push the others there; "
        "finer scales (rowwise, blockwise, mxfp8) help.",
        "<b>A level's states</b> are read after the step, as codes: how many are zero and how many "
        "lie at the largest number. What they were made of is gone, and so no error is known.",
    ]
    return bullets(points, "reading")
