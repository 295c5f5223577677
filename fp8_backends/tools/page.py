"""Draw the HTML page of a command, one self-contained file. Horizontal positions are percentages of
the screen."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .terminal import Verdict, with_minus_signs

COLORS = 7
"""Number of colours in the style sheet: `--c1`, `--c2`, …"""


def page(
    title: str,
    facts: Iterable[str],
    verdict: Verdict,
    sections: Mapping[str, str],
    badge: str = "",
) -> str:
    """Return a page: facts, the verdict, and non-empty HTML sections by title."""
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    parts = [
        f"<header>\n<h1>{escape(title)}</h1>",
        f'<p class="machine">{" · ".join(escape(fact) for fact in facts if fact)}</p>',
        (badge and f'<p class="badge">{escape(badge)}</p>') + "</header>",
        f'<div class="verdict {verdict.mood}"><p>{escape(verdict.headline)}</p>',
        (bullets(map(signed, verdict.details)) if verdict.details else "") + "</div>",
        *(
            f"<section>\n<h2>{escape(name)}</h2>\n{html}\n</section>"
            for name, html in sections.items()
            if html
        ),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Draw a table of HTML cells; the first column names the rows, and the first `texts` columns
    are no numbers."""
    classes = ["name", *["text"] * (texts - 1), *[""] * (len(headings) - texts)]
    head = "".join(
        f'<th class="{css}">{escape(heading).replace("/", "/<wbr>")}</th>'
        for css, heading in zip(classes, headings, strict=True)
    )
    lines = []
    for row in rows:
        cells = (
            f'<td class="{"muted" if cell in ("emulated", "–") else css}" '
            f'data-label="{escape(heading)}">{cell}</td>'
            for css, heading, cell in zip(classes, headings, row, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def aside(text: str) -> str:
    return f'<p class="aside">{escape(text, quote=False)}</p>'


def bullets(items: Iterable[str], css: str = "") -> str:
    return f'<ul class="{css}">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def details(summary: str, html: str) -> str:
    return f"<details><summary>{summary}</summary>{html}</details>"


def cards(bodies: Mapping[str, str]) -> str:
    """Put HTML side by side, each below its title."""
    html = "".join(
        f'<div class="card"><h3>{escape(title)}</h3>{body}</div>'
        for title, body in bodies.items()
        if body
    )
    return html and f'<div class="cards">{html}</div>'


def chip(name: str, color: str) -> str:
    return f'<span class="chip" style="background:{color}"></span>{escape(name).replace("+", "+<wbr>")}'


def signed(text: str) -> str:
    """Escape a text and replace the hyphen before a number by a minus sign."""
    return escape(with_minus_signs(text))


# Charts


@dataclass
class Series:
    """One line by step, with its band; values that are not finite leave a gap."""

    name: str
    color: str
    """A CSS colour, such as `var(--c1)`."""
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Scale:
    """Map values to positions (percent of the width, pixels of the height), with round ticks."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low = low
        self.high = high if high > low else low + 1
        self.start = start
        self.end = end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, count: int = 5) -> list[float]:
        raw = (self.high - self.low) / count
        power = 10 ** math.floor(math.log10(raw))
        step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def curves(
    series: Sequence[Series],
    steps: Sequence[int],
    title: str,
    y_label: str,
    zero_line: bool = False,
    height: int = 320,
    legend: bool = False,
) -> str:
    """Draw lines over training steps; return "" if no value is finite."""
    names = bullets((chip(line.name, line.color) for line in series), "legend") if legend else ""
    series = [line for line in series if any(map(math.isfinite, line.values))]
    if not series:
        return ""
    values = [
        v for line in series for v in (*line.values, *line.low, *line.high) if math.isfinite(v)
    ]
    values += [0.0] if zero_line else []
    low = min(values)
    high = max(values)
    pad = (high - low) * 0.05 or 0.05
    x = Scale(steps[0], max(steps[0] + 1, steps[-1]), 0, 100)
    y = Scale(low - pad, high + pad, height - 40, 28)
    parts = [text(0, 10, y_label, shift=-44)]
    for tick in y.ticks():
        parts += [
            line("grid", 0, y(tick), 100, y(tick)),
            text(0, y(tick) + 4, _number(tick), "tick", "end", shift=-8),
        ]
    for tick in sorted({steps[0], *(int(tick) for tick in x.ticks(6) if tick >= steps[0])}):
        if tick == steps[0] or x(tick) > 6:
            parts.append(text(x(tick), height - 22, str(tick), "tick", "middle"))
    parts.append(text(50, height - 4, "training step", anchor="middle"))
    parts += [line("zero", 0, y(0), 100, y(0))] if zero_line else []
    parts.append(
        f'<svg class="stretched" viewBox="0 0 100 {height}" height="{height}" '
        'preserveAspectRatio="none">'
    )
    for band in series:
        high, low = (
            [
                f"{x(step)} {y(value)}"
                for step, value in zip(steps, edge, strict=False)
                if math.isfinite(value)
            ]
            for edge in (band.high, band.low)
        )
        if high:
            parts.append(
                f'<path class="band" d="M{"L".join([*high, *reversed(low)])}Z" '
                f'fill="{band.color}"/>'
            )
    for curve in series:
        points = list(zip(steps, curve.values, strict=False))
        for is_finite, run in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
            if is_finite:
                path = "L".join(f"{x(step)} {y(value)}" for step, value in run)
                title_of_curve = f"<title>{escape(curve.name)}</title>"
                parts.append(
                    f'<path class="curve" stroke="{curve.color}" '
                    f'd="M{path}">{title_of_curve}</path>'
                )
    chart = drawing(height, title, [*parts, "</svg>"])
    return f'{names}<div class="chart with-y-axis">{chart}</div>'


@dataclass
class Interval:
    name: str
    color: str
    mean: float
    low: float | None
    high: float | None
    points: Sequence[float]
    label: str


def intervals(
    rows: Sequence[Interval], bound: float, spread: float, title: str, x_label: str
) -> str:
    """Draw each row's mean, interval and points over the bound and the spread around zero."""
    if not rows:
        return ""
    row_height = 58
    top = 4
    bottom = top + row_height * len(rows)
    values = [
        v for row in rows for v in (row.mean, row.low, row.high, *row.points) if v is not None
    ]
    values = [0.0, bound * 1.25, -bound * 0.6, *filter(math.isfinite, values)]
    pad = (max(values) - min(values)) * 0.06
    x = Scale(min(values) - pad, max(values) + pad, 0, 100)
    left = max(x(-spread), 0)
    right = min(x(spread), 100)
    parts = [text(x(tick), bottom + 18, _number(tick), "tick", "middle") for tick in x.ticks(4)]
    parts.append(text(50, bottom + 38, x_label, anchor="middle"))
    for start, row in zip(range(top, bottom, row_height), rows, strict=True):
        parts += [
            text(0, start + 18, row.name, "row-label"),
            text(100, start + 18, row.label, "value", "end"),
        ]
        high, low = start + 26, start + row_height - 4  # no line crosses a label
        parts.append(
            f'<rect class="spread" x="{left}%" y="{high}" width="{right - left:.2f}%" '
            f'height="{low - high}"/>'
        )
        lines = [*(("grid", tick) for tick in x.ticks(4)), ("zero", 0), ("bound", bound)]
        parts += [line(css, x(place), high, x(place), low) for css, place in lines]
        if not math.isfinite(row.mean):
            continue
        middle = start + 40
        stroke = f' stroke="{row.color}"'
        dots = [("seed", point, 3) for point in row.points if math.isfinite(point)]
        if row.low is not None and row.high is not None:
            parts.append(line("interval", x(row.low), middle, x(row.high), middle, stroke))
            parts += [
                line("interval", x(end), middle - 7, x(end), middle + 7, stroke)
                for end in (row.low, row.high)
            ]
        for css, value, radius in (*dots, ("mean", row.mean, 5.5)):
            parts.append(
                f'<circle class="{css}" cx="{x(value)}%" cy="{middle}" r="{radius}" '
                f'fill="{row.color}"/>'
            )
    return f'<div class="chart">{drawing(bottom + 46, title, parts)}</div>'


def bars(rows: Sequence[tuple[str, str, float, str]], title: str) -> str:
    """Draw a horizontal bar from zero for each (name, colour, value, label)."""
    if not rows:
        return ""
    largest = max(value for _, _, value, _ in rows) or 1
    parts = [
        f'<div class="bar"><span class="row-label">{escape(name)}</span><span '
        f'class="value">{escape(label)}</span><div class="track"><div '
        f'style="width:{100 * value / largest:.2f}%;background:{color}"></div></div></div>'
        for name, color, value, label in rows
    ]
    return f'<div class="chart" role="group" aria-label="{escape(title)}">{"".join(parts)}</div>'


def drawing(height: float, title: str, parts: Sequence[str]) -> str:
    """Return a drawing that fills the width of the page; its texts keep their size."""
    body = "\n".join(parts)
    name = escape(title)
    return f'<svg height="{height}" role="img" aria-label="{name}">\n<title>{name}</title>\n{body}\n</svg>'


def line(css: str, x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
    return f'<line class="{css}" x1="{x1}%" y1="{y1}" x2="{x2}%" y2="{y2}"{more}/>'


def text(
    x: float, y: float, words: str, css: str = "axis-label", anchor: str = "start", shift: int = 0
) -> str:
    moved = f' dx="{shift}"' if shift else ""
    return f'<text class="{css}" x="{x}%" y="{y:.1f}" text-anchor="{anchor}"{moved}>{escape(words)}</text>'


def _number(value: float) -> str:
    written = f"{value:.6f}".rstrip("0").rstrip(".")
    return "0" if written in ("-0", "") else written.replace("-", "−")
