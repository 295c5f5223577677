"""Render `report.html`, one self-contained file that shows a comparison, finished or not."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

from ...words import counted
from .. import page
from ..page import aside, bullets, signed
from ..terminal import with_minus_signs
from . import summary
from .summary import Results, Row
from .workload import BASELINES

_MARKS = {
    True: ("pass", "✓", "passed"),
    False: ("fail", "✗", "failed"),
    None: ("open", "?", "not resolved"),
}
"""Class of the style sheet, mark and word for `Check.passed`."""


def render(results: Results) -> str:
    rows = summary.rows(results)
    reference = summary.reference_of(results)
    machine = results["machine"]
    settings = results["settings"]
    facts = [
        machine.get("gpu") or f"{machine['processor']}, {counted(machine['cores'], 'core')}",
        summary.ranks_text(results),
        f"{reference} around FP8",
        summary.runs_text(settings["seeds"], settings["steps"]),
        summary.held_out_text(results),
        f"torch {results['versions'].get('torch', '?')}",
        results["date"]
        .replace("T", " ")
        .replace("+00:00", " UTC")
        .replace("-", "\N{NON-BREAKING HYPHEN}"),
    ]
    others = [name for name in results["backends"] if name != reference]
    colors = {name: f"var(--c{i % page.COLORS + 1})" for i, name in enumerate(others)}
    colors[reference] = "var(--reference)"
    sections = {
        "Measured": _table(results, rows, colors) + aside(f"{summary.spread_line(results)}."),
        f"Held-out loss against {reference}": _gap_chart(results, rows, colors),
        "Training loss": _loss_charts(results, colors),
        "Peak memory of a training step": _memory_chart(results, rows, colors),
        "Checks": _checks(results),
        "What ran": _what_ran(results),
        "How to read this": _reading(results),
        "Settings": _settings(results),
    }
    badge = results["note"] if results["status"] == "finished" else ""  # else the verdict says it
    verdict = summary.verdict(results)
    return page.page("FP8 backends compared", facts, verdict, sections, badge)


def _table(results: Results, rows: list[Row], colors: dict[str, str]) -> str:
    columns = summary.columns(results)
    lines = []
    for row in rows:
        name = f"{page.chip(row.backend, colors[row.backend])}<small>{escape(row.note)}</small>"
        lines.append([name, *(signed(summary.cell(row, key)) for key in list(columns)[1:])])
    return page.table([*columns.values()], lines)


def _gap_chart(results: Results, rows: list[Row], colors: dict[str, str]) -> str:
    reference = summary.reference_of(results)
    intervals = []
    expected = summary.held_out_losses(results, reference)
    for row in rows:
        if (gap := row.gap) is not None:
            losses = summary.held_out_losses(results, row.backend)
            points = [losses[seed] - expected[seed] for seed in losses.keys() & expected.keys()]
            label = with_minus_signs(summary.cell(row, "gap"))
            color = colors[row.backend]
            intervals.append(
                page.Interval(row.backend, color, gap.mean, gap.low, gap.high, points, label)
            )
    bound = results["settings"]["loss_gap_bound"]
    spread = (summary.reference_spread(results) or {}).get("standard_deviation", 0.0)
    title = f"Paired gap of the held-out loss to {reference}"
    x_label = f"nats above {reference}, held-out loss"
    chart = page.intervals(intervals, bound, spread, title, x_label)
    band = ""
    if spread:
        band = f" The grey band is {reference}'s own standard deviation from seed to seed."
    return chart and chart + aside(
        "Large dot: mean of the paired differences; bar: its 95 % confidence interval; small dots: "
        f"single seeds; dashed line: the bound of {bound} nats.{band}"
    )


def _loss_charts(results: Results, colors: dict[str, str]) -> str:
    reference = summary.reference_of(results)
    by_backend = {
        name: losses
        for name in results["backends"]
        if (losses := summary.train_losses(results, name))
    }
    if not by_backend:
        return ""
    count = max(len(values) for losses in by_backend.values() for values in losses.values())
    steps = range(1, 1 + count)
    window = max(1, count // 20) | 1
    curves = []
    differences = []
    expected = by_backend.get(reference, {})
    for name, losses in by_backend.items():
        bands = (over_seeds(list(losses.values()), pick) for pick in (statistics.fmean, min, max))
        curves.append(page.Series(name, colors[name], *bands))
        seeds = sorted(losses.keys() & expected.keys())
        if name != reference and seeds:
            gaps = [
                [a - b for a, b in zip(losses[seed], expected[seed], strict=False)]
                for seed in seeds
            ]
            smooth = moving_average(over_seeds(gaps, statistics.fmean), window)
            differences.append(page.Series(name, colors[name], smooth))
    html = page.curves(curves, steps, "Training loss by step", "loss, nats a token", legend=True)
    html += aside("Mean over seeds; the band reaches from the lowest to the highest seed.")
    title = "Paired difference of the training loss"
    if chart := page.curves(
        differences, steps, title, "difference, nats", zero_line=True, height=240
    ):
        html += f"<h3>Difference to {reference} while training</h3>{chart}" + aside(
            "Same seed, same weights, same batches; mean over seeds, moving average of "
            f"{counted(window, 'step')}. Above zero: higher loss than {reference}."
        )
    return html


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the centred mean over up to `window` finite values, fewer at the ends."""
    half = window // 2
    near = [
        list(filter(math.isfinite, values[max(0, i - half) : i + half + 1]))
        for i in range(len(values))
    ]
    return [sum(finite) / len(finite) if finite else math.nan for finite in near]


def over_seeds(
    runs: Sequence[Sequence[float]], pick: Callable[[list[float]], float]
) -> list[float]:
    """Merge runs by `pick` (a mean, min, max) at each step; NaN if any of them is not finite."""
    steps = zip(*runs, strict=False)
    return [pick(list(values)) if all(map(math.isfinite, values)) else math.nan for values in steps]


def _memory_chart(results: Results, rows: list[Row], colors: dict[str, str]) -> str:
    bars = []
    for row in rows:
        if row.peak_memory_bytes:
            label = with_minus_signs(summary.cell(row, "peak_memory_bytes"))
            bars.append((row.backend, colors[row.backend], row.peak_memory_bytes, label))
    chart = page.bars(bars, "Peak memory by backend")
    where = "allocated by PyTorch"
    if results["machine"]["device"] == "cuda":
        where = "allocated by PyTorch on the GPU"
    return chart and chart + aside(
        f"Tensor bytes {where} at the highest point of one training step: weights, optimizer "
        "states, gradients, what is saved for backward, and scratch. Measured in the first run's "
        "fourth step."
    )


def _checks(results: Results) -> str:
    lists = {}
    for backend, made in summary.checks(results).items():
        items = "".join(
            f'<li class="{css}"><span class="mark" aria-label="{outcome}">{mark}</span>'
            f"<span>{escape(check.name)}<small>{signed(check.detail)}</small></span></li>"
            for check in made
            for css, mark, outcome in [_MARKS[check.passed]]
        )
        lists[backend] = items and f'<ul class="checks">{items}</ul>'
    return page.cards(lists)


def _what_ran(results: Results) -> str:
    blocks = []
    for backend, report in results["backends"].items():
        if backend in BASELINES or not report["inspection"]:
            continue
        lines = bullets(map(escape, report["inspection"]["messages"]))
        if reasons := report["inspection"]["audit"]["high_precision"]:
            items = bullets(
                f"<code>{escape(name)}</code>: {escape(reason)}" for name, reason in reasons.items()
            )
            lines += page.details(f"{len(reasons)} in high precision", items)
        blocks.append(f'<div class="ran"><h3>{escape(backend)}</h3>{lines}</div>')
    return "".join(blocks)


def _reading(results: Results) -> str:
    reference = summary.reference_of(results)
    points = []
    if not results["fast_fp8"]:
        points.append(
            "<b>Emulated</b>: this chip has no FP8 products. Numbers are those of FP8, time is "
            "not, so no speed is given. Loss and memory are real."
        )
    if results["settings"]["nproc"] > 1:
        points.append(
            "<b>Sent a step</b>: bytes that each rank hands to the others in one training step, "
            "counted at the collectives, a sum as a ring sends it. Every rank trains on its part "
            "of each batch; memory is that of the first rank."
        )
    points += [
        f"<b>Gap to {reference}</b>: held-out loss minus {reference}'s, of runs with the same "
        "seed, initial weights and data; the mean over seeds and the 95 % interval of that mean "
        "(Student's t). An interval that holds zero means that no difference was seen, not that "
        "there is none.",
        f"<b>Spread of {reference}</b>: how much {reference} itself varies with the seed. A gap "
        "far below it is smaller than what a different seed does.",
        "<b>FLOPs in FP8</b>: of all matrix products with weights that training does, the share "
        "counted in FP8. The output head stays in high precision, so it is below 100 %.",
        "<b>Bytes per parameter</b>: weights, gradients and optimizer states of the whole model, "
        "and copies of weights that last from forward to backward (FP8's, or autocast's), read "
        "from live tensors.",
        "<b>A short run of a small model</b> finds broken FP8 (a layer that does not train, a "
        "wrong sign, a lost scale). It does not show that months of training of a large one stay "
        "equal.",
    ]
    return bullets(points, "reading")


def _settings(results: Results) -> str:
    shown = ("task", "text", "asked", "settings", "machine", "versions")
    text = json.dumps({name: results[name] for name in shown}, indent=1, ensure_ascii=False)
    return f"<pre>{escape(text)}</pre>"
