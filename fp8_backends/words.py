"""Numbers, names and values in sentences and records, the same in every report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any


def counted(number: int, noun: str) -> str:
    """A number with its noun, which takes an s where the number is not one: `1 layer`, `2 layers`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def share(part: float) -> str:
    """A share, 0 to 1, in percent: `94 %`. It is neither `0 %` nor `100 %` where it only is close to that: `99.7 %`,
    `under 0.1 %`."""
    percent = 100 * part
    if not 0 < part < 1:
        return f"{percent:.0f} %"
    for text in (f"{percent:.0f}", f"{percent:.1f}"):
        if 0 < float(text) < 100:
            return f"{text} %"
    return "under 0.1 %" if percent < 50 else "over 99.9 %"


def readable_bytes(count: float) -> str:
    """Bytes in GB, MB or kB, powers of ten: `53.0 GB`."""
    unit, size = next((each for each in (("GB", 1e9), ("MB", 1e6)) if count >= each[1]), ("kB", 1e3))
    return f"{count / size:.1f} {unit}"


def shortened(text: str, most: int = 200) -> str:
    """A text of at most so many characters, without its middle where it is longer."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} … {text[3 - most // 3 :]}"


def first_line(error: Exception) -> str:
    """The first line of an error's text, which in other libraries goes on for pages, and can itself be long."""
    return shortened(str(error).strip().partition("\n")[0], 600)


def shown(value: object) -> str:
    """A value that a user gave, as Python writes it and shortened; its type, where that cannot be written."""
    try:
        return shortened(repr(value))
    except Exception:  # whatever a class raises, a list too deep, an integer of 4,301 digits
        return f"<{type(value).__name__}>"


def listed(names: Iterable[str], shown: int = 6) -> str:
    """Names in one line, with layers that differ in their number only drawn together: `layers.*.q_proj (×24)`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    texts = [
        f"{pattern} (×{len(group)})" if len(group) > 1 else group[0] or "(root)" for pattern, group in groups.items()
    ]
    return ", ".join(texts[:shown]) + (f" and {len(texts) - shown} more" if len(texts) > shown else "")


def finite(value: Any) -> Any:
    """Return plain values as JSON can hold them: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
