"""Numbers as a reader wants them: changes, bytes, times. Counts and shares are in `fp8_backends.words`."""

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


def readable_bytes(count: float) -> str:
    unit, size = next((each for each in (("GB", 1e9), ("MB", 1e6)) if count >= each[1]), ("kB", 1e3))
    return f"{count / size:.1f} {unit}"


def duration(seconds: float) -> str:
    """Write seconds as `40 s`, `4 min` or `2 h 5 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
