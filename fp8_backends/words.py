"""Write numbers, names, values and tables the same way in every report."""

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Literal


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: `1 layer`, `2 layers`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def share(part: float) -> str:
    """Write a share, 0 to 1, in percent, only exact 0 and 1 as `0 %` and `100 %`: `99.7 %`, `under
    0.1 %`."""
    percent = 100 * part
    if not 0 < part < 1:
        return f"{percent:.0f} %"
    for text in (f"{percent:.0f}", f"{percent:.1f}"):
        if 0 < float(text) < 100:
            return f"{text} %"
    return "under 0.1 %" if percent < 50 else "over 99.9 %"


def readable_bytes(count: float) -> str:
    """Write bytes in GB, MB or kB, powers of ten: `53.0 GB`."""
    unit, size = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6) if count >= 1e6 else ("kB", 1e3)
    return f"{count / size:.1f} {unit}"


def shortened(text: str, most: int = 200) -> str:
    """Cut the middle out of a text longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[5 - most // 3 :]}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, shortened: other libraries write pages."""
    return shortened(str(error).strip().partition("\n")[0], 600)


def shown(value: object) -> str:
    """Write a user's value as Python does, shortened; its type if `repr` fails."""
    try:
        return shortened(repr(value))
    except Exception:  # whatever a class raises, a list too deep, an integer of 4,301 digits
        return f"<{type(value).__name__}>"


def listed(names: Iterable[str], shown: int = 6) -> str:
    """Write names in one line, and join layers that differ only in a number: `layers.*.q_proj
    (x24)`."""
    groups = by_pattern(names).items()
    texts = [
        f"{pattern} (x{len(group)})" if len(group) > 1 else group[0] or "(root)"
        for pattern, group in groups
    ]
    return ", ".join(texts[:shown]) + (
        f" and {len(texts) - shown} more" if len(texts) > shown else ""
    )


def by_reason(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Collect (reason, names) from pairs of (name, reason)."""
    groups: dict[str, list[str]] = {}
    for name, reason in pairs:
        groups.setdefault(reason, []).append(name)
    return list(groups.items())


def finite(value: Any) -> Any:
    """Convert plain values for JSON: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Rows = Sequence[Sequence[str]]
"""A row of headings, and rows of cells."""


def in_columns(rows: Rows, gap: int = 2, justify: Literal["left", "right"] = "left") -> str:
    """Write rows in columns, `gap` spaces apart. The first column is always left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, *[str.rjust if justify == "right" else str.ljust] * (len(widths) - 1)]
    lines = (map(lambda side, cell, size: side(cell, size), sides, row, widths) for row in rows)
    return "\n".join((" " * gap).join(cells).rstrip() for cells in lines)


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Collect names that differ only in a number: `layers.*.q_proj`."""
    return dict(by_reason((name, re.sub(r"\b\d+\b", "*", name)) for name in names))


def as_html(title: str, *tables: Rows) -> str:
    """Write a line of text above tables for a notebook, in its own theme. Columns of numbers are
    right-aligned; all text is escaped."""
    return "".join([f"<p>{escape(title)}</p>", *map(_table, tables)])


def _table(rows: Rows) -> str:
    headings, *body = rows
    number = re.compile(r"[?-]|[0-9.]+( %)?")
    numbers = [all(map(number.fullmatch, column)) for column in zip(*body, strict=True)] or [
        False
    ] * len(headings)

    def row(tag: str, cells: Sequence[str]) -> str:
        style = "vertical-align: top; padding: 0.1em 0.6em" + (
            "; border-bottom: 1px solid" if tag == "th" else ""
        )
        sides = ["right" if is_number else "left" for is_number in numbers]
        row_cells = zip(cells, sides, strict=True)
        texts = (
            f'<{tag} style="text-align: {side}; {style}">{escape(cell)}</{tag}>'
            for cell, side in row_cells
        )
        return f"<tr>{''.join(texts)}</tr>"

    style = "border-collapse: collapse; margin: 0.5em 0"
    body_rows = "".join(row("td", cells) for cells in body)
    return f'<table style="{style}"><thead>{row("th", headings)}</thead><tbody>{body_rows}</tbody></table>'
