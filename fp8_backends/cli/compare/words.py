"""Numbers as a reader wants them: changes and times. Counts, shares and bytes are in `fp8_backends.words`."""

from __future__ import annotations

import re


def change(ratio: float) -> str:
    """Write what a ratio is more or less than one, such as `+9.4 %`; only one itself is no change."""
    if ratio == 1:
        return "±0 %"
    difference = 100 * (ratio - 1)
    return f"{difference:+.1f} %" if abs(difference) >= 0.05 else f"{'+-'[difference < 0]}<0.1 %"


def with_minus_signs(text: str) -> str:
    """Write a minus sign for each hyphen that stands before a number."""
    return re.sub(r"(?<![\w-])-(?=[\d<])", "−", text)


def duration(seconds: float) -> str:
    """Write seconds as `40 s`, `4 min` or `2 h 5 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
