"""The charts of the report, as wide as the screen, coloured by the page's CSS variables so that they follow light and
dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass
class Series:
    """One line with its band."""

    name: str
    color: str
    """A CSS colour, such as `var(--c1)`."""
    values: Sequence[float]
    """Values by step, from step 1."""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass
class Interval:
    """One row of an interval plot."""

    name: str
    color: str
    mean: float
    low: float | None
    high: float | None
    points: Sequence[float]
    label: str


class Scale:
    """Values to places (percent of the width, pixels of the height), with round ticks."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high if high > low else low + 1, start, end

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
    title: str,
    y_label: str,
    zero_line: bool = False,
    height: int = 320,
    steps: Sequence[int] | None = None,
) -> str:
    """Draw lines over training steps. Values that are not finite leave a gap in their line.

    Args:
        steps: those that the values are of; by default every one from the first.
    """
    shown = [each for each in series if any(map(math.isfinite, each.values))]
    if not shown:
        return ""
    values = [v for each in shown for v in (*each.values, *(each.low or ()), *(each.high or ())) if math.isfinite(v)]
    values += [0.0] if zero_line else []
    low, high = min(values), max(values)
    pad = (high - low) * 0.05 or 0.05
    steps = steps or range(1, 1 + max(len(each.values) for each in shown))
    x = Scale(steps[0], max(steps[0] + 1, steps[-1]), 0, 100)
    y = Scale(low - pad, high + pad, height - 40, 28)
    parts = [_text(0, 10, y_label, "axis-label", shift=-44)]
    for tick in y.ticks():
        parts.append(_line("grid", 0, y(tick), 100, y(tick)))
        parts.append(_text(0, y(tick) + 4, _plain(tick), "tick", anchor="end", shift=-8))
    for tick in sorted({steps[0], *(int(tick) for tick in x.ticks(6) if tick >= steps[0])}):
        if tick == steps[0] or x(tick) > 6:
            parts.append(_text(x(tick), height - 22, str(tick), "tick", anchor="middle"))
    parts.append(_text(50, height - 4, "training step", "axis-label", anchor="middle"))
    if zero_line:
        parts.append(_line("zero", 0, y(0), 100, y(0)))
    places = [x(step) for step in steps]
    lines = [_band(each, places, y) for each in shown if each.low is not None and each.high is not None]
    for each in shown:
        line = f'class="curve" stroke="{each.color}"'
        for path in _paths(each.values, places, y):
            lines.append(f'<path {line} d="{path}"><title>{escape(each.name)}</title></path>')
    stretched = f'<svg class="stretched" viewBox="0 0 100 {height}" height="{height}" preserveAspectRatio="none">'
    parts += [stretched, *lines, "</svg>"]
    return _svg(height, title, parts, "with-y-axis")


def intervals(rows: Sequence[Interval], bound: float, spread: float | None, reference: str) -> str:
    """Draw mean and 95 % interval of each row, its seeds, the bound, and the reference's own spread as a band."""
    if not rows:
        return ""
    row_height, top = 58, 4
    height = top + row_height * len(rows) + 46
    bottom = height - 46
    values = [0.0, bound * 1.25]
    for row in rows:
        values += [v for v in (row.mean, row.low, row.high, *row.points) if v is not None and math.isfinite(v)]
    low, high = min(*values, -bound * 0.6), max(values)
    pad = (high - low) * 0.06
    x = Scale(low - pad, high + pad, 0, 100)
    parts = []
    if spread is not None:
        a, b = max(x(-spread), 0), min(x(spread), 100)
        parts.append(f'<rect class="spread" x="{a}%" y="{top}" width="{max(0, b - a):.2f}%" height="{bottom - top}"/>')
    for tick in x.ticks(4):
        parts.append(_line("grid", x(tick), top, x(tick), bottom))
        parts.append(_text(x(tick), bottom + 18, _plain(tick), "tick", anchor="middle"))
    parts.append(_line("zero", x(0), top, x(0), bottom))
    parts.append(_line("bound", x(bound), top, x(bound), bottom))
    label = f"nats above {reference}, held-out loss"
    parts.append(_text(50, bottom + 38, label, "axis-label", "middle"))
    for index, row in enumerate(rows):
        parts += _interval_row(row, x, top + row_height * index)
    return _svg(height, f"Paired gap of the held-out loss to {reference}", parts)


def _interval_row(row: Interval, x: Scale, top: float) -> list[str]:
    """Draw a row's name and figure, and its marks below them."""
    parts = [_text(0, top + 20, row.name, "row-label"), _text(100, top + 20, row.label, "value", anchor="end")]
    if not math.isfinite(row.mean):
        return parts
    middle = top + 40
    for point in filter(math.isfinite, row.points):
        parts.append(f'<circle class="seed" cx="{x(point)}%" cy="{middle}" r="3" fill="{row.color}"/>')
    if row.low is not None and row.high is not None:
        stroke = f' stroke="{row.color}"'
        parts.append(_line("interval", x(row.low), middle, x(row.high), middle, stroke))
        parts += [_line("interval", x(end), middle - 7, x(end), middle + 7, stroke) for end in (row.low, row.high)]
    dot = f'<circle class="mean" cx="{x(row.mean)}%" cy="{middle}" r="5.5" fill="{row.color}">'
    return [*parts, f"{dot}<title>{escape(row.name)}: {escape(row.label)}</title></circle>"]


def bars(rows: Sequence[tuple[str, str, float, str]], title: str) -> str:
    """Draw horizontal bars from zero: (name, colour, value, label)."""
    if not rows:
        return ""
    largest = max(value for _, _, value, _ in rows) or 1
    parts = [
        f'<div class="bar"><span class="row-label">{escape(name)}</span><span class="value">{escape(label)}</span>'
        f'<div class="track"><div style="width:{100 * value / largest:.2f}%;background:{color}"></div></div></div>'
        for name, color, value, label in rows
    ]
    return f'<div class="chart" role="group" aria-label="{escape(title)}">{"".join(parts)}</div>'


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the centred mean over up to `window` values; shorter at the ends."""
    half = window // 2
    smooth = []
    for index in range(len(values)):
        near = [v for v in values[max(0, index - half) : index + half + 1] if math.isfinite(v)]
        smooth.append(sum(near) / len(near) if near else math.nan)
    return smooth


def over_seeds(runs: Sequence[Sequence[float]], pick: Callable[[list[float]], float]) -> list[float]:
    """Merge runs by `pick` (a mean, min, max) at each step; NaN where any of them is not finite."""
    steps = zip(*runs, strict=False)
    return [pick(list(values)) if all(map(math.isfinite, values)) else math.nan for values in steps]


def _band(series: Series, places: Sequence[float], y: Scale) -> str:
    edges = [
        [f"{place} {y(value)}" for place, value in zip(places, values, strict=False) if value == value]
        for values in (series.high, series.low)
    ]
    return f'<path class="band" d="M{"L".join([*edges[0], *reversed(edges[1])])}Z" fill="{series.color}"/>'


def _paths(values: Sequence[float], places: Sequence[float], y: Scale) -> list[str]:
    paths, points = [], []
    for place, value in zip([*places[: len(values)], None], [*values, math.nan], strict=True):
        if math.isfinite(value):
            points.append(f"{place} {y(value)}")
        elif points:
            paths.append("M" + "L".join(points))
            points = []
    return paths


def _line(css: str, x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
    return f'<line class="{css}" x1="{x1}%" y1="{y1}" x2="{x2}%" y2="{y2}"{more}/>'


def _text(x: float, y: float, text: str, css: str, anchor: str = "start", shift: int = 0) -> str:
    moved = f' dx="{shift}"' if shift else ""
    return f'<text class="{css}" x="{x}%" y="{y:.1f}" text-anchor="{anchor}"{moved}>{escape(text)}</text>'


def _plain(value: float) -> str:
    text = f"{value:.6f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text.replace("-", "−")


def _svg(height: float, title: str, parts: Sequence[str], css: str = "") -> str:
    """Return a drawing as wide as the page has room for. Its texts keep their size: across, places are percentages."""
    body = "\n".join(parts)
    return (
        f'<div class="chart {css}"><svg height="{height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>\n{body}\n</svg></div>"
    )
