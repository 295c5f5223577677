"""`report.html`: one file without outside references that shows a comparison, finished or not."""

from __future__ import annotations

import math
import statistics
from html import escape

from ...words import counted
from . import charts, summary
from .checks import checks, verdict
from .page_parts import aside, bullets, document, signed, tiles_of, titled
from .settings import BASELINES
from .summary import Results, Row
from .words import change, with_minus_signs

_MARKS = {"passed": ("pass", "✓"), "failed": ("fail", "✗"), "not resolved": ("open", "?")}
"""The class of the style sheet and the mark of each outcome of a check."""
_COLORS = 7
"""Colours `--c1`, `--c2`, … of the style sheet."""


def render(results: Results) -> str:
    """Return the whole page from what `results.json` holds."""
    rows = summary.rows(results)
    reference = summary.reference_of(results)
    sections = {
        "Measured": _table(results, rows) + aside(f"{summary.spread_line(results)}."),
        f"Held-out loss against {reference}": _gap_chart(results, rows),
        "Training loss": _loss_charts(results),
        "Peak memory of a training step": _memory_chart(results, rows),
        "Checks": _checks(results),
        "What ran": _what_ran(results),
        "How to read this": _reading(results),
        "Settings": _settings(results),
    }
    body = "\n".join([_header(results), _verdict(results), _tiles(results, rows), *titled(sections)])
    return document("FP8 backends compared", body)


def _header(results: Results) -> str:
    machine, settings = results["machine"], results["settings"]
    parts = [
        machine.get("gpu") or f"{machine['processor']}, {counted(machine['cores'], 'core')}",
        summary.ranks_text(results),
        f"{results['around_fp8']} around FP8",
        summary.runs_text(settings["seeds"], settings["steps"]),
        summary.held_out_text(results),
        f"torch {results['versions'].get('torch', '?')}",
        results["date"].replace("T", " ").replace("+00:00", " UTC"),
    ]
    line = " · ".join(escape(part) for part in parts if part)
    shown = results["note"] if results["status"] == "finished" else ""  # else the verdict says it
    badge = shown and f'<p class="badge">{escape(shown)}</p>'
    return f'<header>\n<h1>FP8 backends compared</h1>\n<p class="machine">{line}</p>\n{badge}</header>'


def _verdict(results: Results) -> str:
    found = verdict(results)
    details = bullets(map(signed, found.details)) if found.details else ""
    return f'<div class="verdict {found.mood}"><p>{escape(found.headline)}</p>{details}</div>'


def _tiles(results: Results, rows: list[Row]) -> str:
    """Give the measurements in two short figures."""
    fp8, reference, tiles = [row for row in rows if row.backend not in BASELINES], summary.reference_of(results), []
    gaps = [row.gap for row in fp8 if row.gap is not None]
    if gaps and all(math.isfinite(gap.mean) for gap in gaps):
        worst = max(gaps, key=lambda gap: gap.mean)
        tiles.append((f"largest loss gap to {reference}, nats", str(worst)))
    speeds = [row.speed_ratio for row in fp8 if row.speed_ratio] if results["fast_fp8"] else []
    memory = [row.memory_ratio for row in fp8 if row.memory_ratio]
    if speeds:
        tiles.append((f"best speed against {reference}", change(max(speeds))))
    elif memory:
        tiles.append((f"best peak memory against {reference}", change(min(memory))))
    return tiles_of(tiles)


def _table(results: Results, rows: list[Row]) -> str:
    columns = summary.columns(results)
    head = "".join(f'<th class="{key}">{escape(each).replace("/", "/<wbr>")}</th>' for key, each in columns.items())
    body = []
    for row in rows:
        cells = []
        for key, heading in columns.items():
            text = summary.cell(row, key)
            content = signed(text)
            if key == "backend":
                content = f"{_named(results, text)}<small>{escape(row.note)}</small>"
            muted = " muted" if text in ("emulated", "–") else ""
            cells.append(f'<td class="{key}{muted}" data-label="{escape(heading)}">{content}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    lines = "\n".join(body)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table></div>'


def _named(results: Results, backend: str) -> str:
    """Write a backend's name behind a chip of its colour."""
    return f'<span class="chip" style="background:{_color(results, backend)}"></span>{escape(backend)}'


def _color(results: Results, backend: str) -> str:
    reference = summary.reference_of(results)
    if backend == reference:
        return "var(--reference)"
    others = [name for name in results["backends"] if name != reference]
    return f"var(--c{others.index(backend) % _COLORS + 1})"


def _gap_chart(results: Results, rows: list[Row]) -> str:
    reference, intervals = summary.reference_of(results), []
    expected = summary.held_out_losses(results, reference)
    for row in rows:
        if (gap := row.gap) is not None:
            losses = summary.held_out_losses(results, row.backend)
            points = [losses[seed] - expected[seed] for seed in losses.keys() & expected.keys()]
            color, label = _color(results, row.backend), with_minus_signs(summary.cell(row, "gap"))
            intervals.append(charts.Interval(row.backend, color, gap.mean, gap.low, gap.high, points, label))
    found = summary.reference_spread(results)
    spread, bound = found and found["standard_deviation"], results["settings"]["loss_gap_bound"]
    chart = charts.intervals(intervals, bound, spread, reference)
    band = f" The grey band is {reference}'s own standard deviation from seed to seed." if spread else ""
    return chart and chart + aside(
        "Large dot: mean of the paired differences; bar: its 95 % confidence interval; small dots: single seeds; "
        f"dashed line: the bound of {bound} nats.{band}"
    )


def _loss_charts(results: Results) -> str:
    reference = summary.reference_of(results)
    by_backend = {name: summary.train_losses(results, name) for name in results["backends"]}
    by_backend = {name: losses for name, losses in by_backend.items() if losses}
    if not by_backend:
        return ""
    steps = max(len(values) for losses in by_backend.values() for values in losses.values())
    window = max(1, steps // 20) | 1
    curves, differences = [], []
    for name, losses in by_backend.items():
        color = _color(results, name)
        bands = (charts.over_seeds(list(losses.values()), pick) for pick in (statistics.fmean, min, max))
        curves.append(charts.Series(name, color, *bands))
        expected = by_backend.get(reference, {})
        seeds = sorted(losses.keys() & expected.keys())
        if name != reference and seeds:
            gaps = [[a - b for a, b in zip(losses[seed], expected[seed], strict=False)] for seed in seeds]
            smooth = charts.moving_average(charts.over_seeds(gaps, statistics.fmean), window)
            differences.append(charts.Series(name, color, smooth))
    html = bullets((_named(results, name) for name in by_backend), "legend")
    html += charts.curves(curves, "Training loss by step", "loss, nats a token")
    html += aside("Mean over seeds; the band reaches from the lowest to the highest seed.")
    title = "Paired difference of the training loss"
    if difference := charts.curves(differences, title, "difference, nats", zero_line=True, height=240):
        html += f"<h3>Difference to {reference} while training</h3>{difference}" + aside(
            "Same seed, same weights, same batches; mean over seeds, moving average of "
            f"{counted(window, 'step')}. Above zero: higher loss than {reference}."
        )
    return html


def _memory_chart(results: Results, rows: list[Row]) -> str:
    bars = []
    for row in rows:
        if row.peak_memory_bytes:
            label = with_minus_signs(summary.cell(row, "peak_memory_bytes"))
            bars.append((row.backend, _color(results, row.backend), float(row.peak_memory_bytes), label))
    chart = charts.bars(bars, "Peak memory by backend")
    where = "allocated by PyTorch on the GPU" if results["machine"]["device"] == "cuda" else "allocated by PyTorch"
    return chart and chart + aside(
        f"Tensor bytes {where} at the highest point of one training step: weights, optimizer states, gradients, what "
        "is saved for backward, and scratch. Measured in the first run's fourth step."
    )


def _checks(results: Results) -> str:
    cards = []
    for backend, done in checks(results).items():
        items = "".join(
            f'<li class="{css}"><span class="mark" aria-label="{check.outcome}">{mark}</span>'
            f"<span>{escape(check.name)}<small>{signed(check.detail)}</small></span></li>"
            for check in done
            for css, mark in [_MARKS[check.outcome]]
        )
        if items:
            cards.append(f'<div class="card"><h3>{escape(backend)}</h3><ul class="checks">{items}</ul></div>')
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _what_ran(results: Results) -> str:
    """Show the proof line of each backend, and what stayed in high precision."""
    blocks = []
    for backend, found in results["backends"].items():
        if backend in BASELINES or not found.get("inspection"):
            continue
        lines = bullets(map(escape, found["inspection"]["messages"]))
        reasons = found["inspection"]["audit"]["high_precision"]
        if reasons:
            items = bullets(f"<code>{escape(name)}</code>: {escape(reason)}" for name, reason in reasons.items())
            lines += f"<details><summary>{len(reasons)} in high precision</summary>{items}</details>"
        blocks.append(f'<div class="ran"><h3>{escape(backend)}</h3>{lines}</div>')
    return "".join(blocks)


def _reading(results: Results) -> str:
    reference, points = summary.reference_of(results), []
    if not results["fast_fp8"]:
        points.append(
            "<b>Emulated</b>: this chip has no FP8 products. Numbers are those of FP8, time is not, so no speed is "
            "given. Loss and memory are real."
        )
    if results["settings"].get("nproc", 1) > 1:
        points.append(
            "<b>Sent a step</b>: bytes that each rank hands to the others in one training step, counted at the "
            "collectives, a sum as a ring sends it. Every rank trains on its part of each batch; memory is that of "
            "the first rank."
        )
    points += [
        f"<b>Gap to {reference}</b>: held-out loss minus {reference}'s, of runs with the same seed, initial weights "
        "and data; the mean over seeds and the 95 % interval of that mean (Student's t). An interval that holds zero "
        "means that no difference was seen, not that there is none.",
        f"<b>Spread of {reference}</b>: how much {reference} itself varies with the seed. A gap far below it is "
        "smaller than what a different seed does.",
        "<b>FLOPs in FP8</b>: of all matrix products with weights that training does, the share counted in FP8. The "
        "output head stays in high precision, so it is below 100 %.",
        "<b>Bytes per parameter</b>: weights, gradients and optimizer states of the whole model, and copies of "
        "weights that last from forward to backward (FP8's, or autocast's), read from live tensors.",
        "<b>A short run of a small model</b> finds broken FP8 (a layer that does not train, a wrong sign, a lost "
        "scale). It does not show that months of training of a large one stay equal.",
    ]
    return bullets(points, "reading")


def _settings(results: Results) -> str:
    settings = results["settings"]
    elsewhere = ("text", "backends", "shape")
    values = {
        "task": results["task"],
        "text": results["text"]["description"],
        "text sha256": results["text"]["sha256"],
        "held-out windows": results["held_out_windows"],
        "around FP8": results["around_fp8"],
        **{key: value for key, value in settings.items() if key not in elsewhere and value is not None},
    }
    if settings["model"] is None:
        values["model"] = "Llama, " + ", ".join(f"{key} {value}" for key, value in settings["shape"].items())
    if inspection := results["backends"][summary.reference_of(results)].get("inspection"):
        values["parameters"] = f"{inspection['parameters']:,}"
    for kind, group in (("asked", "asked"), ("version", "versions"), ("machine", "machine")):
        values |= {f"{kind}: {name}": value for name, value in results[group].items()}
    pairs = ((escape(name.replace("_", " ")), escape(str(value))) for name, value in values.items())
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in pairs)}</dl>"
