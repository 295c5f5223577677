"""Text for a terminal: paragraphs under their labels."""

from __future__ import annotations

import textwrap

WIDTH = 100


def paragraph(label: str, text: str, label_width: int = 9) -> list[str]:
    """The lines of one paragraph, none wider than WIDTH. A command may be longer than a line: it is not broken."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{label:<{label_width}} ",
        subsequent_indent=" " * (label_width + 3),
        break_long_words=False,
        break_on_hyphens=False,
    )
