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
from .settings import Settings
from .timing import duration


def announce(settings: Settings) -> None:
    """What is known before anything is loaded."""
    backends = ", ".join(name for name in settings.backends if name != settings.reference)
    limit = "" if settings.minutes is None else f", or what of it fits into {settings.minutes:g} min"
    print(
        f"fp8-backends compare: {backends or 'no backend'} against {settings.reference} on "
        f"{'a GPU' if settings.device == 'cuda' else 'the CPU'}; {settings.reference} around FP8; "
        f"{summary.runs_text(settings.seeds, settings.steps)} of {settings.batch} × {settings.sequence} tokens{limit}",
        flush=True,
    )


@contextmanager
def progress_display(comparison: Comparison) -> Iterator[LineProgress | BarProgress]:
    """Bars on a terminal, one line a run elsewhere."""
    results = comparison.results
    ranks = summary.ranks_text(results)
    print(f"on {results['text']['description']}; {summary.held_out_text(results)}{ranks and f'; {ranks}'}")
    print(f"starting {len(results['backends'])} workers", flush=True)
    if not sys.stdout.isatty():
        yield LineProgress()
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    text, left = TextColumn("{task.description:<52}"), TextColumn("{task.fields[left]}")
    with Progress(text, BarColumn(bar_width=None), TaskProgressColumn(), TimeElapsedColumn(), left) as bars:
        yield BarProgress(bars)


class LineProgress:
    """For logs: says when something has finished, and in long runs now and then how far they are."""

    def inspecting(self, backend: str) -> None:
        pass

    def inspected(self, backend: str, step_seconds: float) -> None:
        self._say(_inspected(backend, step_seconds))

    def planned(self, comparison: Comparison) -> None:
        self.steps = comparison.settings.steps
        self._say(plan_text(comparison))

    def run_started(self, backend: str, seed: int) -> None:
        self.began = time.monotonic()

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        if time.monotonic() - self.last_said > 30:
            self._say(f"{backend} seed {seed}: step {step} of {self.steps}, loss {_loss(loss, 3)}")

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        seconds = time.monotonic() - self.began
        self._say(f"{backend} seed {run['seed']}: held-out loss {_loss(run['held_out_loss'])} ({seconds:.1f} s)")

    def failed(self, backend: str, message: str) -> None:
        self._say(f"{backend} failed: {message}")

    def _say(self, line: str) -> None:
        self.last_said = time.monotonic()
        print(line, flush=True)


class BarProgress:
    """For terminals: one bar over everything, by seconds, and one for the run at work, by steps."""

    def __init__(self, bars) -> None:
        self.bars, self.comparison = bars, None
        self.whole = bars.add_task("all backends", total=None, left="")
        self.current = bars.add_task("loading libraries", total=None, left="")

    def inspecting(self, backend: str) -> None:
        self.bars.update(self.current, description=f"{backend}: first steps observed")

    def inspected(self, backend: str, step_seconds: float) -> None:
        self._say(_inspected(backend, step_seconds))

    def planned(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self._say(plan_text(comparison))

    def run_started(self, backend: str, seed: int) -> None:
        self.bars.reset(self.current, total=self.comparison.settings.steps)
        self.step(backend, seed, 0, None)

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        at = f", loss {_loss(loss, 3)}" if step else ""
        description = f"{backend} seed {seed + 1}/{self.comparison.settings.seeds}{at}"
        self.bars.update(self.current, completed=step, description=description)
        self._show_left(backend, step)

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        self._show_left()
        self._say(f"{backend} seed {run['seed']}: held-out loss {_loss(run['held_out_loss'])}")

    def failed(self, backend: str, message: str) -> None:
        self._say(f"{backend} failed: {message}")

    def _show_left(self, *at_work) -> None:
        done, left = self.comparison.elapsed, self.comparison.seconds_left(*at_work)
        self.bars.update(self.whole, completed=done, total=done + left, left=f"{duration(left)} left")

    def _say(self, line: str) -> None:
        self.bars.console.print(line, highlight=False, markup=False)


def plan_text(comparison: Comparison) -> str:
    """How long the rest will take, and what of the wish was given up for a limit of minutes."""
    settings, asked = comparison.settings, comparison.results["asked"]
    given_up = ""
    if asked != {"steps": settings.steps, "seeds": settings.seeds}:
        given_up = f" ({asked['seeds']} of {asked['steps']} do not fit into {settings.minutes:g} min)"
    return (
        f"about {duration(comparison.seconds_left())} more: {summary.runs_text(settings.seeds, settings.steps)}"
        f"{given_up} with {len(comparison.workers)} backends, by the steps just timed"
    )


def _inspected(backend: str, step_seconds: float) -> str:
    return f"{backend}: first steps observed; {step_seconds:.2g} s a step"


def conclude(comparison: Comparison) -> None:
    """The table, the reference's own spread, the checks that failed, and where everything lies."""
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
    if results["note"]:
        print(f"\n{results['note']}")
    print(
        f"\ntook {duration(results['seconds'])}\n{comparison.output / RESULTS}\n{comparison.output / PAGE}", flush=True
    )


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
