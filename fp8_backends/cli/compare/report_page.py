"""`report.html`: one file without outside references that shows a comparison, finished or not."""

from __future__ import annotations

import math
import statistics
from html import escape
from typing import Any

from . import charts, summary
from .report_style import STYLE
from .settings import BASELINES

_COLORS = ("var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)")


def render(results: dict[str, Any]) -> str:
    """The whole page from what `results.json` holds."""
    sections = [
        _header(results),
        _verdict(results),
        _section("Measured", _table(results) + f'<p class="aside">{escape(summary.spread_line(results))}.</p>'),
        _section(f"Held-out loss against {summary.reference_of(results)}", _gap_chart(results)),
        _section("Training loss", _loss_charts(results)),
        _section("Peak memory of a training step", _memory_chart(results)),
        _section("Checks", _checks(results)),
        _section("What ran", _what_ran(results)),
        _section("How to read this", _reading(results)),
        _section("Settings", _settings(results)),
    ]
    body = "\n".join(filter(None, sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>FP8 backends compared</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _header(results: dict) -> str:
    machine, versions = results["machine"], results["versions"]
    chip = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    status = {"running": "still running", "terminated": "terminated early: what had finished is shown"}
    notes = filter(None, (status.get(results["status"]), results["note"]))
    ranks, settings = summary.ranks_text(results), results["settings"]
    parts = [
        chip,
        *([ranks] if ranks else []),
        f"{results['around_fp8']} around FP8",
        summary.runs_text(settings["seeds"], settings["steps"]),
        summary.held_out_text(results),
        f"torch {versions.get('torch', '?')}",
        results["date"].replace("T", " ").replace("+00:00", " UTC"),
    ]
    line = " · ".join(escape(part) for part in parts)
    badges = "".join(f'<p class="badge">{escape(note)}</p>' for note in notes)
    return f"<header>\n<h1>FP8 backends compared</h1>\n<p class='machine'>{line}</p>\n{badges}</header>"


def _verdict(results: dict) -> str:
    """The answer in three short figures."""
    failed = [(b, c) for b, done in summary.all_checks(results).items() for c in done if not c.passed]
    count = sum(len(done) for done in summary.all_checks(results).values())
    gaps = [row.gap for row in summary.rows(results) if row.gap is not None and row.backend not in BASELINES]
    reference, tiles = summary.reference_of(results), []
    if count:
        tiles.append(_tile("checks passed", f"{count - len(failed)} of {count}", "bad" if failed else "good"))
    if gaps and all(math.isfinite(gap.mean) for gap in gaps):
        worst = max(gaps, key=lambda gap: gap.mean)
        tiles.append(_tile(f"largest loss gap to {reference}, nats", str(worst)))
    fast, ratios = results["fast_fp8"], summary.rows(results)
    if fast and (speeds := [row.speed_ratio for row in ratios if row.speed_ratio and row.backend not in BASELINES]):
        tiles.append(_tile(f"best speed against {reference}", f"{(max(speeds) - 1) * 100:+.1f} %"))
    else:
        memory = [row.memory_ratio for row in ratios if row.memory_ratio and row.backend not in BASELINES]
        if memory:
            tiles.append(_tile(f"best peak memory against {reference}", f"{(min(memory) - 1) * 100:+.0f} %"))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _tile(label: str, value: str, mood: str = "") -> str:
    value = value.replace("-", "−")
    inner = f'<div class="value">{escape(value)}</div><div class="label">{escape(label)}</div>'
    return f'<div class="tile {mood}">{inner}</div>'


def _table(results: dict) -> str:
    columns = summary.columns(results)[:-1]  # the note stands below the backend's name
    breaking = {key: escape(heading).replace("/", "/<wbr>") for key, heading in columns}
    head = "".join(f'<th class="{key}">{heading}</th>' for key, heading in breaking.items())
    lines = []
    for row in summary.rows(results):
        cells = []
        for key, _ in columns:
            text = summary.cell(row, key)
            content = escape(text.replace("-", "−"))
            if key == "backend":
                chip = f'<span class="chip" style="background:{_color(results, row.backend)}"></span>'
                content = f"{chip}{escape(text)}<small>{escape(row.note)}</small>"
            muted = " muted" if text in ("emulated", "–") else ""
            cells.append(f'<td class="{key}{muted}">{content}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _color(results: dict, backend: str) -> str:
    reference = summary.reference_of(results)
    if backend == reference:
        return "var(--reference)"
    others = [name for name in results["backends"] if name != reference]
    return _COLORS[others.index(backend) % len(_COLORS)]


def _gap_chart(results: dict) -> str:
    reference, rows = summary.reference_of(results), []
    expected = summary.held_out_losses(results, reference)
    for row in summary.rows(results):
        if row.gap is None:
            continue
        losses = summary.held_out_losses(results, row.backend)
        points = [losses[seed] - expected[seed] for seed in losses.keys() & expected.keys()]
        color = _color(results, row.backend)
        rows.append(
            charts.Interval(
                row.backend, color, row.gap.mean, row.gap.low, row.gap.high, points, summary.cell(row, "gap")
            )
        )
    found = summary.reference_spread(results)
    spread = found and found["standard_deviation"]
    bound = results["settings"]["loss_gap_bound"]
    chart = charts.intervals(rows, bound, spread, reference)
    if not chart:
        return ""
    band = f" The grey band is {reference}'s own standard deviation from seed to seed." if spread else ""
    return chart + (
        f'<p class="aside">Large dot: mean of the paired differences; bar: its 95 % confidence interval; small dots: '
        f"single seeds; dashed line: the bound of {bound} nats.{band}</p>"
    )


def _loss_charts(results: dict) -> str:
    reference = summary.reference_of(results)
    found = {name: summary.train_losses(results, name) for name in results["backends"]}
    found = {name: losses for name, losses in found.items() if losses}
    if not found:
        return ""
    steps = max(len(values) for losses in found.values() for values in losses.values())
    window = max(1, steps // 20) | 1
    curves, differences = [], []
    for name, losses in found.items():
        runs, color = list(losses.values()), _color(results, name)
        mean = charts.over_seeds(runs, statistics.fmean)
        low, high = charts.over_seeds(runs, min), charts.over_seeds(runs, max)
        curves.append(charts.Series(name, color, mean, low, high))
        pairs = losses.keys() & found.get(reference, {}).keys()
        if name != reference and pairs:
            gaps = [[a - b for a, b in zip(losses[s], found[reference][s], strict=False)] for s in sorted(pairs)]
            smooth = charts.moving_average(charts.over_seeds(gaps, statistics.fmean), window)
            differences.append(charts.Series(name, color, smooth))
    legend = "".join(
        f'<li><span class="chip" style="background:{_color(results, name)}"></span>{escape(name)}</li>'
        for name in found
    )
    difference = charts.curves(differences, "Paired difference of the training loss", "difference, nats", True, 240)
    text = "Mean over seeds; the band reaches from the lowest to the highest seed."
    html = f'<ul class="legend">{legend}</ul>{charts.curves(curves, "Training loss by step", "loss, nats a token")}'
    html += f'<p class="aside">{text}</p>'
    if difference:
        html += f"<h3>Difference to {reference} while training</h3>{difference}"
        html += (
            f'<p class="aside">Same seed, same weights, same batches; mean over seeds, moving average of {window} '
            f"steps. Above zero: higher loss than {reference}.</p>"
        )
    return html


def _memory_chart(results: dict) -> str:
    rows = []
    for row in summary.rows(results):
        if row.peak_memory_bytes:
            label = summary.cell(row, "peak_memory_bytes").replace("-", "−")
            rows.append((row.backend, _color(results, row.backend), float(row.peak_memory_bytes), label))
    chart = charts.bars(rows, "Peak memory by backend")
    where = "allocated by PyTorch on the GPU" if results["machine"]["device"] == "cuda" else "allocated by PyTorch"
    text = (
        f"Tensor bytes {where} at the highest point of one training step: weights, optimizer states, gradients, "
        "what is saved for backward, and scratch. Of the first run's fourth step."
    )
    return chart and f'{chart}<p class="aside">{text}</p>'


def _checks(results: dict) -> str:
    blocks = []
    for backend, done in summary.all_checks(results).items():
        items = "".join(
            f'<li class="{"pass" if check.passed else "fail"}"><span class="mark">{"✓" if check.passed else "✗"}</span>'
            f"<span>{escape(check.name)}<small>{escape(check.detail)}</small></span></li>"
            for check in done
        )
        if items:
            blocks.append(f'<div class="card"><h3>{escape(backend)}</h3><ul class="checks">{items}</ul></div>')
    return f'<div class="cards">{"".join(blocks)}</div>' if blocks else ""


def _what_ran(results: dict) -> str:
    """The proof line of each backend, and what stayed in high precision."""
    blocks = []
    for backend, found in results["backends"].items():
        if backend in BASELINES or not found.get("inspection"):
            continue
        lines = "".join(f"<li>{escape(line)}</li>" for line in found["inspection"]["messages"])
        kept = found["inspection"]["audit"]["high_precision"]
        reasons = "".join(f"<li><code>{escape(name)}</code>: {escape(reason)}</li>" for name, reason in kept.items())
        high = f"<details><summary>{len(kept)} in high precision</summary><ul>{reasons}</ul></details>" if kept else ""
        blocks.append(f'<div class="ran"><h3>{escape(backend)}</h3><ul>{lines}</ul>{high}</div>')
    return "".join(blocks)


def _reading(results: dict) -> str:
    reference = summary.reference_of(results)
    points = [
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
    if results["settings"].get("nproc", 1) > 1:
        points.insert(
            0,
            "<b>Sent a step</b>: bytes that each rank hands to the others in one training step, counted at the "
            "collectives, a sum as a ring sends it. Every rank trains on its part of each batch; memory is that of "
            "the first rank.",
        )
    if not results["fast_fp8"]:
        points.insert(
            0,
            "<b>Emulated</b>: this chip has no FP8 products. Numbers are those of FP8, time is not, so no speed is "
            "given. Loss and memory are real.",
        )
    return "<ul class='reading'>" + "".join(f"<li>{point}</li>" for point in points) + "</ul>"


def _settings(results: dict) -> str:
    settings, rows = results["settings"], []
    groups = {
        "text": results["text"]["description"],
        "text sha256": results["text"]["sha256"],
        "held-out windows": results["held_out_windows"],
        "around FP8": results["around_fp8"],
        **{
            key: value
            for key, value in settings.items()
            if key not in ("text", "backends", "shape") and value is not None
        },
    }
    if settings["model"] is None:
        groups["model"] = "Llama, " + ", ".join(f"{key} {value}" for key, value in settings["shape"].items())
    inspection = results["backends"][summary.reference_of(results)].get("inspection")
    if inspection:
        groups["parameters"] = f"{inspection['parameters']:,}"
    groups |= {f"asked: {name}": value for name, value in results["asked"].items()}
    groups |= {f"version: {name}": version for name, version in results["versions"].items()}
    groups |= {f"machine: {name}": value for name, value in results["machine"].items()}
    for name, value in groups.items():
        rows.append(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>")
    return f"<dl>{''.join(rows)}</dl>"
