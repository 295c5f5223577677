"""Print paragraphs, tables and progress for every command; rich is imported at the first step on a
terminal."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, Literal, NamedTuple

from ..errors import FP8BackendError
from ..recipes.fields import OF_FEATURES
from ..words import in_columns, shortened

WIDTH = 100
"""Default width, such as in a file, and maximum width of paragraphs."""

FEATURES = {name: field for name, field in OF_FEATURES.items() if not field.only_watches}
"""Features that change what a training computes or stores: commands that measure it have a flag for
each."""


def add_feature_flags(parser: argparse.ArgumentParser) -> None:
    for name, field in FEATURES.items():
        of_field = f"field of the FP8 backends: {field.values_and_default}"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=of_field)


def features_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe fields given by `add_feature_flags`. Raises `RecipeError`."""
    return {
        name: field.parsed(given)
        for name, field in FEATURES.items()
        if (given := getattr(args, name)) is not None
    }


def positive_number(text: str) -> float:
    """Read a number above zero, as a type of `argparse`."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above zero")
    return value


def positive_int(text: str) -> int:
    """Read a whole number above zero, as a type of `argparse`."""
    value = int(text)
    positive_number(text)
    return value


class Verdict(NamedTuple):
    """Top of a report, printed or on a page."""

    mood: str
    """`good`, `open` or `bad`: classes of the style sheet."""
    headline: str
    details: list[str]

    def __str__(self) -> str:
        return "\n".join(map(wrapped, (self.headline, *self.details)))


def width() -> int:
    return shutil.get_terminal_size((WIDTH, 0)).columns


def paragraphs(rows: Iterable[tuple[str, str]], label_width: int = 9) -> str:
    """Lay out (label, text) rows. Labels may be empty; long words, such as URLs, stay whole."""
    rows = list(rows)
    lines = []
    start = max([label_width, *(len(label) for label, _ in rows)]) + 1 if label_width else 0
    for label, text in rows:
        wrap = TextWrapper(
            max(1, min(WIDTH, width()) - start), break_long_words=False, break_on_hyphens=False
        )
        parts = [part for line in text.splitlines() for part in wrap.wrap(line) or [""]] or [""]
        lines += [
            f"{label if i == 0 else '':{start}}{part}".rstrip() for i, part in enumerate(parts)
        ]
    return "\n".join(lines)


def wrapped(text: str) -> str:
    return paragraphs([("", text)], label_width=0)


def change(ratio: float) -> str:
    """Write a ratio as a signed percentage, such as `+9.4 %`; only 1 is `±0 %`."""
    if ratio == 1:
        return "±0 %"
    difference = 100 * (ratio - 1)
    return f"{difference:+.1f} %" if abs(difference) >= 0.05 else f"{'+-'[difference < 0]}<0.1 %"


def with_minus_signs(text: str) -> str:
    """Replace each hyphen before a number by a minus sign."""
    return re.sub(r"(?<![\w-])-(?=[\d<])", "−", text)


def duration(seconds: float) -> str:
    """Write seconds as `40 s`, `4 min` or `2 h 5 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def table(rows: Sequence[Sequence[str]], justify: Literal["left", "right"] = "right") -> str:
    """Draw headings and cells, split into parts if too wide; each part begins with the first
    column, left-aligned."""
    columns = width()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    space = 1 if sum(widths) + len(widths) <= columns + 1 < sum(widths) + 2 * len(widths) else 2
    parts = [[0]]
    for column in range(1, len(widths)):
        if (
            len(parts[-1]) > 1
            and sum(widths[i] + space for i in (*parts[-1], column)) > columns + space
        ):
            parts.append([0])
        parts[-1].append(column)
    return "\n\n".join(
        in_columns([[row[i] for i in part] for row in rows], space, justify) for part in parts
    )


def environment_without(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the environment for a process that imports this package, without variables of these
    prefixes."""
    kept = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(prefixes)
    }
    path = (str(Path(__file__).resolve().parents[2]), kept.get("PYTHONPATH"))
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def write_text(path: str | Path, text: str) -> None:
    """Write a file that the user has named. Raises `FP8BackendError`."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FP8BackendError(f"{shortened(str(path))} cannot be written: {reason}") from None


class Progress:
    """Show work in progress on standard error, from the first call on: one line, on a terminal
    steps, bar and time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.has_begun = False
        self.bar = None

    def __enter__(self) -> Progress:
        return self

    def __call__(self, step: str, done: float | None = None) -> None:
        """Begin or update a step; `done` is the finished share, 0 to 1, of all steps, if known."""
        if not self.has_begun:
            self.has_begun = True
            if not sys.stderr.isatty():
                print(f"{self.text} …", file=sys.stderr, flush=True)
                return
            from rich import progress
            from rich.console import Console

            # as markup, `:O2:` would be an emoji
            text = progress.TextColumn("{task.description}", markup=False)
            columns = (
                progress.SpinnerColumn(),
                text,
                progress.BarColumn(20),
                progress.TimeElapsedColumn(),
            )
            self.bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.add_task(self.text)
            self.bar.start()
        if self.bar is not None:
            total = None if done is None else 1
            description = f"{self.text}: {step}"
            self.bar.update(
                self.bar.task_ids[0], description=description, completed=done or 0, total=total
            )
            self.bar.refresh()

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
