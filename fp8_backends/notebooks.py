"""What a report shows in a notebook: tables in HTML, in the colours and fonts of the notebook's own theme."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

Rows = Sequence[Sequence[str]]
"""A row of headings, and rows of cells."""

_NUMBER = re.compile(r"[?–]|[0-9.]+( %)?")


def as_html(title: str, *tables: Rows) -> str:
    """A line of text above tables. Columns of numbers stand to the right; everything is escaped."""
    return "".join([f"<p>{escape(title)}</p>", *map(_table, tables)])


def _table(rows: Rows) -> str:
    headings, *body = rows
    numbers = [all(map(_NUMBER.fullmatch, column)) for column in zip(*body, strict=True)] or [False] * len(headings)
    sides = ["right" if is_number else "left" for is_number in numbers]
    cells = "".join(_row("td", row, sides) for row in body)
    style = "border-collapse: collapse; margin: 0.5em 0"
    return f'<table style="{style}"><thead>{_row("th", headings, sides)}</thead><tbody>{cells}</tbody></table>'


def _row(tag: str, cells: Sequence[str], sides: Iterable[str]) -> str:
    line = "; border-bottom: 1px solid" if tag == "th" else ""
    row = (
        f'<{tag} style="text-align: {side}; vertical-align: top; padding: 0.1em 0.6em{line}">{escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(row)}</tr>"
