"""The page of `fp8-backends monitor`: one file without outside references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ...training.watching.monitor import NAMES, is_finite
from ...words import counted, share
from ..compare import charts
from ..compare.page_parts import aside, bullets, document, signed, tiles_of, titled
from .findings import findings, remarks
from .samples import CAST_COLUMNS, FORMATS, STORED_COLUMNS, Samples, Tensor, cells, lost_db

_CURVES, _HISTOGRAMS, _ROWS = 7, 9, 20
"""How many tensors a chart has lines for, how many histograms there are, and rows of a table that is not opened."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def render(samples: Samples) -> str:
    """Return the whole page."""
    sections = {
        "Where most is lost": _table(CAST_COLUMNS, samples.casts),
        "Over the run": _over_the_run(samples),
        "Where the values lie": _histograms(samples.casts),
        "What the level stores": _table(STORED_COLUMNS, samples.stored),
        "How to read this": _reading(samples),
    }
    return document("FP8 monitor", "\n".join([_header(samples), _verdict(samples), _tiles(samples), *titled(sections)]))


def _header(samples: Samples) -> str:
    first, last = samples.steps[0], samples.steps[-1]
    parts = [samples.last["recipe"], counted(len(samples.records), "sample"), f"steps {first} to {last}"]
    layers = counted(len(samples.last["tensors"]), "layer")
    line = " · ".join(map(escape, (*parts, layers)))
    return f'<header>\n<h1>FP8 monitor</h1>\n<p class="machine">{line}</p>\n</header>'


def _verdict(samples: Samples) -> str:
    found = findings(samples)
    details = bullets(map(signed, found.details)) if found.details else ""
    return f'<div class="verdict {found.mood}"><p>{escape(found.headline)}</p>{details}</div>'


def _tiles(samples: Samples) -> str:
    casts = samples.casts
    spoiled = sum(not is_finite(tensor.last) for tensor in samples.tensors)
    if spoiled:
        return tiles_of([("hold an inf or a NaN", f"{spoiled} of {counted(len(samples.tensors), 'tensor')}")])
    lost = [tensor.lost_db for tensor in casts if tensor.lost_db is not None]
    figures = [("most lost below the format's usual SQNR", f"{max(lost):.1f} dB")] if lost else []
    for key, label in (("saturated", "largest share clipped"), ("flushed", "largest share flushed to zero")):
        figures += [(label, share(max(tensor.last[key] for tensor in casts)))] if casts else []
    return tiles_of(figures)


def _table(columns: Sequence[str], tensors: list[Tensor]) -> str:
    if not tensors:
        return ""
    html = _rows(columns, tensors[:_ROWS])
    if rest := tensors[_ROWS:]:
        html += f"<details><summary>{len(rest)} more</summary>{_rows(columns, rest)}</details>"
    return html


def _rows(columns: Sequence[str], tensors: list[Tensor]) -> str:
    keys = ["backend", *[""] * (len(columns) - 1)]  # the style of a first column
    head = "".join(f'<th class="{key}">{escape(column)}</th>' for key, column in zip(keys, columns, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td class="{key}" data-label="{escape(column)}">{signed(text)}</td>'
            for key, column, text in zip(keys, columns, cells(tensor), strict=True)
        )
        + "</tr>"
        for tensor in tensors
    )
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _over_the_run(samples: Samples) -> str:
    """Draw the error of the worst tensors, and the largest shares of each kind of tensor."""
    if len(samples.records) < 2:
        return ""
    worst = sorted(samples.casts, key=lambda tensor: tensor.most_lost[0], reverse=True)[:_CURVES]
    lines = [
        charts.Series(tensor.label, f"var(--c{index})", _by_step(samples, tensor))
        for index, tensor in enumerate(worst, 1)
    ]
    html = _chart(samples, lines, "Error of the worst tensors", "dB below the format's usual SQNR")
    html += aside("The tensors that lose most at any time of the run.") if html else ""
    for key, title in (("saturated", "Clipped"), ("flushed", "Flushed to zero")):
        kinds = [
            charts.Series(name, f"var(--c{index})", _largest_by_step(samples, name, key))
            for index, name in enumerate(NAMES.values(), 1)
        ]
        if any(value > 0 for kind in kinds for value in kind.values):
            chart = _chart(samples, kinds, f"{title}: the largest share of any layer", "% of the values")
            html += f"<h3>{title}</h3>{chart}"
    return html


def _chart(samples: Samples, series: list[charts.Series], title: str, label: str) -> str:
    chart = charts.curves(series, title, label, zero_line=True, height=260, steps=samples.steps)
    names = (f'<span class="chip" style="background:{each.color}"></span>{escape(each.name)}' for each in series)
    return chart and bullets(names, "legend") + chart


def _by_step(samples: Samples, tensor: Tensor) -> list[float]:
    by_step = dict(zip(tensor.steps, map(lost_db, tensor.entries), strict=True))
    return [math.nan if by_step.get(step) is None else by_step[step] for step in samples.steps]


def _largest_by_step(samples: Samples, name: str, key: str) -> list[float]:
    """In percent."""
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
    cards = "".join(f'<div class="card"><h3>{escape(each.label)}</h3>{_histogram(each)}</div>' for each in shown)
    return f'<div class="cards">{cards}</div>' + aside(
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
        place = f"{(exponent + past - low) * width:.2f}%"
        parts.append(f'<line class="bound" x1="{place}" x2="{place}" y1="0" y2="{base}"/>')
        power = str(exponent).translate(_SUPERSCRIPTS)
        parts.append(f'<text class="tick" x="{place}" y="{base + 16}" text-anchor="{anchor}">2{power}</text>')
    label = f"exponents of {escape(tensor.label)}"
    return f'<svg width="100%" height="{height}" role="img" aria-label="{label}">\n' + "\n".join(parts) + "\n</svg>"


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
