"""Parts that the pages of several commands have in common. A page is one file without outside references."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from .words import with_minus_signs


def document(title: str, body: str) -> str:
    """Return the whole page of a body of HTML."""
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def titled(sections: Mapping[str, str]) -> list[str]:
    """Make sections of HTML by title; those that are empty are left out."""
    return [f"<section>\n<h2>{escape(title)}</h2>\n{html}\n</section>" for title, html in sections.items() if html]


def tiles_of(figures: Iterable[tuple[str, str]]) -> str:
    """Show figures large, each a label and a value."""
    html = "".join(
        f'<div class="tile"><div class="value">{signed(value)}</div><div class="label">{escape(label)}</div></div>'
        for label, value in figures
    )
    return html and f'<div class="tiles">{html}</div>'


def aside(text: str) -> str:
    """Write a remark below a table or chart."""
    return f'<p class="aside">{escape(text, quote=False)}</p>'


def bullets(items: Iterable[str], css: str = "") -> str:
    """Make a list of items that are HTML."""
    start = f'<ul class="{css}">' if css else "<ul>"
    return f"{start}{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def signed(text: str) -> str:
    """Write a minus sign for the hyphen before a number, as HTML."""
    return escape(with_minus_signs(text))
