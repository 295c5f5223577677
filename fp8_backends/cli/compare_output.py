"""What `compare` shows in the terminal: progress while it runs, then the table and the checks."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import summary
from .comparison import PAGE, RESULTS, Comparison


@contextmanager
def progress_display(comparison: Comparison) -> Iterator[LineProgress | BarProgress]:
    """Bars on a terminal, one line a run elsewhere."""
    settings, names = comparison.settings, list(comparison.results["backends"])
    ranks = summary.ranks_text(comparison.results)
    on_ranks = f" by {ranks}" if ranks else ""
    print(
        f"{', '.join(names)}: {settings.seeds} seeds of {settings.steps} steps each, {settings.batch} × "
        f"{settings.sequence} tokens a step{on_ranks}, on {comparison.text.description}",
        flush=True,
    )
    if not sys.stdout.isatty():
        yield LineProgress()
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description:<52}")
    columns = (text, BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bars:
        yield BarProgress(bars, settings.seeds, settings.steps, len(names))


class LineProgress:
    """For logs: says when something has finished."""

    def backend_started(self, backend: str) -> None:
        self.began = time.monotonic()

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        pass

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        seconds = time.monotonic() - self.began
        print(
            f"{backend} seed {run['seed']}: held-out loss {_loss(run['held_out_loss'])} ({seconds:.0f} s)", flush=True
        )

    def backend_ended(self, backend: str, status: str, message: str) -> None:
        if message:
            print(f"{backend} {status}: {message}", flush=True)


class BarProgress:
    """For terminals: one bar over everything, one for the run at work."""

    def __init__(self, bars, seeds: int, steps: int, backends: int) -> None:
        self.bars, self.seeds, self.steps = bars, seeds, steps
        self.whole = bars.add_task("all backends", total=backends * seeds * steps)
        self.current = bars.add_task("", total=seeds * steps)
        self.finished_backends = 0

    def backend_started(self, backend: str) -> None:
        self.bars.reset(self.current, description=f"{backend}: starting, first steps observed")
        self.runs = 0

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        self._show(self.runs * self.steps + step, f"{backend} seed {seed + 1}/{self.seeds}, loss {_loss(loss, 3)}")

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        self.runs += 1
        self._show(self.runs * self.steps, f"{backend} seed {self.runs}/{self.seeds} finished")
        held_out = _loss(run["held_out_loss"])
        self.bars.console.print(f"{backend} seed {run['seed']}: held-out loss {held_out}", highlight=False)

    def backend_ended(self, backend: str, status: str, message: str) -> None:
        self.finished_backends += 1
        self._show(self.seeds * self.steps, f"{backend} {status}", before=self.finished_backends - 1)
        if message:
            self.bars.console.print(f"{backend} {status}: {message}", highlight=False, markup=False)

    def _show(self, steps: int, text: str, before: int | None = None) -> None:
        before = self.finished_backends if before is None else before
        self.bars.update(self.current, completed=steps, description=text)
        self.bars.update(self.whole, completed=before * self.seeds * self.steps + steps)


def conclude(comparison: Comparison) -> None:
    """The table, bf16's own spread, the checks that failed, and where everything lies."""
    results = comparison.results
    print()
    _print_table(results)
    print(f"\n{summary.spread_line(results)}")
    if any(row.emulated for row in summary.rows(results)):
        print("emulated: this chip has no FP8 products, so FP8's speed cannot be measured; losses and memory are real")
    print()
    for backend, done in comparison.checks().items():
        print(f"{backend}:")
        for check in done:
            print(f"  {'ok  ' if check.passed else 'FAIL'} {check.name} ({check.detail})")
    if results["status"] != "finished":
        print(f"\n{results['status']} early: what had finished is saved")
    print(f"\n{comparison.output / RESULTS}\n{comparison.output / PAGE}", flush=True)


def _print_table(results: dict[str, Any]) -> None:
    columns = summary.columns(results)
    rows = [[heading for _, heading in columns]]
    rows += [[summary.cell(row, key) for key, _ in columns] for row in summary.rows(results)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n\n".join("\n".join(aligned(block)) for block in blocks(rows, width)))


def blocks(rows: list[list[str]], width: int | None) -> list[list[list[str]]]:
    """The table in as many parts as fit the width, each beginning with the first column."""
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))]
    parts: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        taken = widths[0] + sum(widths[each] for each in parts[-1])
        if width is not None and parts[-1] and taken + widths[column] > width:
            parts.append([])
        parts[-1].append(column)
    return [[[row[column] for column in (0, *part)] for row in rows] for part in parts]


def aligned(rows: list[list[str]]) -> list[str]:
    """Plain text: the first column and notes to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {0, *(column for column, heading in enumerate(rows[0]) if heading in ("note", "transient"))}
    lines = []
    for row in rows:
        cells = [c.ljust(w) if n in left else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _loss(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"
