"""Paragraphs and tables of plain characters, laid out by rich, which is imported only when something is printed."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Sequence
from textwrap import TextWrapper
from typing import Literal

WIDTH = 100
"""The width where none is known, such as in a file. No paragraph is wider."""


def width() -> int:
    """The columns of the terminal, or what `COLUMNS` in the environment says."""
    return shutil.get_terminal_size((WIDTH, 0)).columns


def paragraphs(rows: Iterable[tuple[str, str]], label_width: int = 9) -> str:
    """Texts beside their labels. A label may be empty. Long words, such as addresses of pages, stay whole."""
    rows = list(rows)
    start = max([label_width, *(len(label) for label, _ in rows)]) + 1
    lines = []
    for label, text in rows:
        wrap = TextWrapper(max(1, min(WIDTH, width()) - start), break_long_words=False, break_on_hyphens=False)
        parts = [part for line in text.splitlines() for part in wrap.wrap(line) or [""]] or [""]
        lines += [f"{label if i == 0 else '':{start}}{part}".rstrip() for i, part in enumerate(parts)]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]], justify: Literal["left", "right"] = "right") -> str:
    """Headings, then cells, in as many parts as the width asks for; each part begins with the first column, which
    stands to the left."""
    from rich.table import Table

    columns = width()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    space = 1 if sum(widths) + len(widths) <= columns + 1 < sum(widths) + 2 * len(widths) else 2
    parts = [[0]]
    for column in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(widths[each] + space for each in (*parts[-1], column)) > columns + space:
            parts.append([0])
        parts[-1].append(column)
    texts = []
    for part in parts:
        shown = Table(box=None, pad_edge=False, padding=(0, space, 0, 0))
        for column in part:
            shown.add_column(rows[0][column], justify=justify if column else "left", no_wrap=True)
        for row in rows[1:]:
            shown.add_row(*(row[column] for column in part))
        texts.append(_plain(shown, sum(widths[each] + space for each in part)))
    return "\n\n".join(texts)


class Progress:
    """Says on standard error what takes its time: one line, and on a terminal its steps and seconds as they pass.

    Used in a `with` statement; called with the name of each step as it begins. Before the first one it says nothing.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.has_begun = False
        self.bar = None

    def __enter__(self) -> Progress:
        return self

    def __call__(self, step: str) -> None:
        if not self.has_begun:
            self._begin()
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], description=f"{self.text}: {step}", refresh=True)

    def _begin(self) -> None:
        self.has_begun = True
        if not sys.stderr.isatty():
            print(f"{self.text} …", file=sys.stderr, flush=True)
            return
        from rich import progress
        from rich.console import Console

        text = progress.TextColumn("{task.description}", markup=False)  # as markup, `:O2:` would be an emoji
        columns = (progress.SpinnerColumn(), text, progress.TimeElapsedColumn())
        self.bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
        self.bar.add_task(self.text)
        self.bar.start()

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _plain(renderable: object, width: int) -> str:
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
