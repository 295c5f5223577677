"""What `compare` shows in the terminal: progress while it runs, then the table and the checks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import fill
from typing import Any

from ...words import counted
from ..terminal import WIDTH, paragraphs, table, width
from . import summary
from .checks import verdict
from .comparison import PAGE, RESULTS, Comparison, Progress
from .settings import Settings
from .words import duration


def announce(settings: Settings) -> None:
    """Print what is known before anything is loaded."""
    backends = ", ".join(name for name in settings.backends if name != settings.reference)
    limit = "" if settings.minutes is None else f", or what of it fits into {settings.minutes:g} min"
    text = (
        f"fp8-backends compare: {backends or 'no backend'} against {settings.reference} on "
        f"{'a GPU' if settings.device == 'cuda' else 'the CPU'}; {settings.reference} around FP8; "
        f"{summary.runs_text(settings.seeds, settings.steps)} of {settings.batch} × {settings.sequence} tokens{limit}"
    )
    print(_wrapped(text), flush=True)


@contextmanager
def progress_display(comparison: Comparison) -> Iterator[LineProgress]:
    """Show bars on a terminal, one line a run elsewhere."""
    results = comparison.results
    parts = (f"{results['task']} on {results['text']['description']}", summary.held_out_text(results))
    print(_wrapped("; ".join(filter(None, (*parts, summary.ranks_text(results))))))
    print(f"starting {counted(len(results['backends']), 'worker')}", flush=True)
    if not sys.stdout.isatty():
        yield LineProgress()
        return
    from rich import progress as rich

    # as markup, `:O2:` would be an emoji
    description = rich.TextColumn("{task.description:<44}", markup=False)
    remaining = rich.TextColumn("{task.fields[left]}")
    columns = (rich.BarColumn(bar_width=None), rich.TaskProgressColumn(), rich.TimeElapsedColumn())
    with rich.Progress(description, *columns, remaining) as bars:
        yield BarProgress(bars)


class LineProgress(Progress):
    """For logs: says when something has finished, and in long runs now and then how far they are."""

    def inspected(self, backend: str, step_seconds: float) -> None:
        self.say(f"{backend}: first steps observed; {step_seconds:.2g} s a step")

    def planned(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.say(plan_text(comparison))

    def run_started(self, backend: str, seed: int) -> None:
        self.began = time.monotonic()

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        if time.monotonic() - self.last_line > 30:
            steps = self.comparison.settings.steps
            self.say(f"{backend} seed {seed}: step {step} of {steps}, loss {_loss(loss, 3)}")

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        seconds = time.monotonic() - self.began
        self.say(f"{backend} seed {run['seed']}: held-out loss {_loss(run['held_out_loss'])} ({seconds:.1f} s)")

    def failed(self, backend: str, message: str) -> None:
        self.say(f"{backend} failed: {message}")

    def say(self, line: str) -> None:
        self.last_line = time.monotonic()
        print(line, flush=True)


class BarProgress(LineProgress):
    """For terminals: one bar over everything, by seconds, and one for the run at work, by steps."""

    def __init__(self, bars) -> None:
        self.bars = bars
        self.whole = bars.add_task("all backends", total=None, left="")
        self.current = bars.add_task("loading libraries", total=None, left="")

    def inspecting(self, backend: str) -> None:
        self.bars.update(self.current, description=f"{backend}: first steps observed")

    def run_started(self, backend: str, seed: int) -> None:
        super().run_started(backend, seed)
        self.bars.reset(self.current, total=self.comparison.settings.steps)
        self.step(backend, seed, 0, None)

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        loss_text = f", loss {_loss(loss, 3)}" if step else ""
        description = f"{backend} seed {seed + 1}/{self.comparison.settings.seeds}{loss_text}"
        self.bars.update(self.current, completed=step, description=description)
        self._show_remaining(backend, step)

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        self._show_remaining()
        super().run_finished(backend, run)

    def _show_remaining(self, *at_work) -> None:
        elapsed, seconds = self.comparison.elapsed, self.comparison.seconds_left(*at_work)
        self.bars.update(self.whole, completed=elapsed, total=elapsed + seconds, left=f"{duration(seconds)} left")

    def say(self, line: str) -> None:
        self.bars.console.print(line, highlight=False, markup=False, emoji=False)


def plan_text(comparison: Comparison) -> str:
    """Say how long the rest will take, and what of the wish was given up for a limit of minutes."""
    settings, asked = comparison.settings, comparison.results["asked"]
    given_up = ""
    if asked != {"steps": settings.steps, "seeds": settings.seeds}:
        given_up = f" ({asked['seeds']} of {asked['steps']} do not fit into {settings.minutes:g} min)"
    return (
        f"about {duration(comparison.seconds_left())} more: {summary.runs_text(settings.seeds, settings.steps)}"
        f"{given_up} with {counted(len(comparison.workers), 'backend')}, by the steps just timed"
    )


def conclude(comparison: Comparison) -> None:
    """Print the verdict, the table, the reference's own spread, the checks, and where everything lies."""
    results = comparison.results
    found = verdict(results)
    headings, rows = summary.columns(results), summary.rows(results)
    cells = [[summary.cell(row, key) for key in headings] for row in rows]
    notes = [(row.backend, row.note) for row in rows]
    if any(row.emulated for row in rows):
        about = "this chip has no FP8 products, so FP8's speed cannot be measured; losses and memory are real"
        notes.append(("emulated", about))
    parts = ["\n".join(map(_wrapped, (found.headline, *found.details)))]
    parts += [table([list(headings.values()), *cells]), paragraphs(notes), _wrapped(summary.spread_line(results))]
    for backend, checks in comparison.checks().items():
        lines = [(_MARKS[check.outcome], f"{check.name} ({check.detail})") for check in checks]
        if lines:
            parts.append(f"{backend}:\n{paragraphs(lines, 4)}")
    if results["status"] == "finished" and results["note"]:
        parts.append(_wrapped(results["note"]))
    places = f"{comparison.output / RESULTS}\n{comparison.output / PAGE}"
    parts.append(f"took {duration(results['seconds'])}\n{places}")
    print("\n" + "\n\n".join(parts), flush=True)


_MARKS = {"passed": "ok", "failed": "FAIL", "not resolved": "?"}


def _wrapped(text: str) -> str:
    return fill(text, min(WIDTH, width()), break_long_words=False, break_on_hyphens=False)


def _loss(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"
