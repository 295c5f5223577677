"""A monitor's file, read: its samples, and its tensors from the worst to the best."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import FP8BackendError
from ...numerics.formats import BF16, E4M3, E5M2, FP16, FP32, ROOT8
from ...training.watching.monitor import STORED, is_finite, tensors_of
from ...words import share, shortened

FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, FP16, BF16, FP32, ROOT8)}
_EXPONENTS, _LARGEST = 2048, 1e300
"""What no exponent and no number of a tensor comes near."""


@dataclass
class Tensor:
    """One tensor of one layer, in every sample that has it."""

    layer: str
    name: str
    """`input`, `weight`, `grad_output`, or what a level stores."""
    steps: list[int] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.layer or '(root)'} {self.name}"

    @property
    def last(self) -> dict[str, Any]:
        return self.entries[-1]

    @property
    def is_stored(self) -> bool:
        return self.name in STORED

    @property
    def lost_db(self) -> float | None:
        """By how much the last sample's error is larger than the format's usual one, dB. None where there is no error
        in dB, as for values that are not finite."""
        return lost_db(self.last)

    @property
    def most_lost(self) -> tuple[float, int]:
        """The largest `lost_db` of any sample, and its step."""
        lost = zip(map(lost_db, self.entries), self.steps, strict=True)
        return max(((decibels, step) for decibels, step in lost if decibels is not None), default=(0.0, 0))

    @property
    def badness(self) -> tuple:
        """The larger, the more the last sample loses: values that are not finite first."""
        entry = self.last
        shares = (entry["at_max"], entry["zeros"]) if self.is_stored else (entry["saturated"], entry["flushed"])
        if not is_finite(entry):
            return (True,)
        return (False, sum(shares)) if self.is_stored else (False, self.lost_db or 0.0, *shares)


def lost_db(entry: dict[str, Any]) -> float | None:
    """By how much the error of one cast is larger than the format's usual one."""
    sqnr = entry.get("sqnr_db")
    return None if sqnr is None else usual_db(entry["format"]) - sqnr


def usual_db(fmt: str) -> float:
    """The SQNR of a cast whose values all lie in the normal range of the format: E4M3 31.6 dB, E5M2 25.5 dB. Six dB a
    bit, for a mantissa that is spread as that of a bell curve's values is."""
    return 13.5 + 6.02 * FORMATS[fmt].mantissa_bits


@dataclass
class Samples:
    """What a file holds."""

    path: Path
    records: list[dict[str, Any]]
    """In the order of their steps; of a step that was trained twice, after a resume, the later one."""
    unreadable: int
    """Lines that are no records, such as one that a power cut has cut."""
    tensors: list[Tensor]
    """The worst of the last sample first: those of casts, then what a level stores."""

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.records]

    @property
    def last(self) -> dict[str, Any]:
        return self.records[-1]

    @property
    def not_finite(self) -> dict[int, list[str]]:
        """Steps of the samples with an inf or a NaN, and its tensors, the likely origin first."""
        by_step = {r["step"]: [label for label, _, e in tensors_of(r) if not is_finite(e)] for r in self.records}
        return {step: labels for step, labels in by_step.items() if labels}

    @property
    def casts(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if not tensor.is_stored]

    @property
    def stored(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.is_stored]


def read_samples(path: str | Path) -> Samples:
    """Read a file that `monitor_every` has written, also while it grows.

    Raises:
        FP8BackendError: there is no such file, or it holds no sample.
    """
    path, by_step, unreadable = Path(path), {}, 0
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device may never end
            raise ValueError("it is no file")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FP8BackendError(
            f"{shortened(str(path))} cannot be read ({reason}): name the file of a training with monitor_every"
        ) from None
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if _is_record(record):
            by_step[record["step"]] = record
        else:
            unreadable += 1
    if not by_step:
        name = shortened(str(path))
        raise FP8BackendError(f"{name} holds no sample yet: a training with monitor_every=N adds one every N steps")
    records = [by_step[step] for step in sorted(by_step)]
    found: dict[tuple[str, str], Tensor] = {}
    for record in records:
        for layer, tensors in record["tensors"].items():
            for name, entry in tensors.items():
                tensor = found.setdefault((layer, name), Tensor(layer, name))
                tensor.steps.append(record["step"])
                tensor.entries.append(entry)
    worst_first = sorted(found.values(), key=lambda tensor: (not tensor.is_stored, *tensor.badness), reverse=True)
    return Samples(path, records, unreadable, worst_first)


def _is_record(found: Any) -> bool:
    """Whether a line holds what the monitor writes: then nothing that reads it need look again."""
    try:
        texts = [found["recipe"], found["casts"], *found["not_seen"], *found["tensors"]]
        tensors = [each for tensors in found["tensors"].values() for each in tensors.items()]
        return (
            _is_count(found["step"])
            and isinstance(found["not_seen"], list)
            and all(isinstance(text, str) and text.isprintable() for text in (*texts, *(name for name, _ in tensors)))
            and all(_is_entry(entry, name in STORED) for name, entry in tensors)
        )
    except (LookupError, TypeError, AttributeError):
        return False


def _is_entry(entry: dict[str, Any], is_stored: bool) -> bool:
    scale = entry["scale"] if isinstance(entry["scale"], list) else [entry["scale"]] * 2
    shares = [entry[key] for key in (("zeros", "at_max") if is_stored else ("saturated", "flushed"))]
    numbers = [entry["amax"], *scale, *([] if is_stored else [entry["sqnr_db"]])]
    (first, last), binades = entry["exponents"], entry["binades"]
    return (
        entry["format"] in FORMATS
        and len(scale) == 2
        and all(number is None or _is_number(number) for number in numbers)
        and all(share is None or (_is_number(share) and 0 <= share <= 1) for share in shares)
        and all(type(exponent) is int and abs(exponent) < _EXPONENTS for exponent in (first, last))
        and isinstance(binades, list)
        and all(map(_is_count, binades))
        and len(binades) == (last - first + 1 if any(binades) else 0)
    )


def _is_number(found: Any) -> bool:
    return type(found) in (int, float) and abs(found) <= _LARGEST


def _is_count(found: Any) -> bool:
    return type(found) is int and 0 <= found <= _LARGEST


# Cells of tables

CAST_COLUMNS = (*("layer", "tensor", "format", "SQNR, dB", "lost", "most lost", "clipped", "flushed", "amax", "scale"),)
STORED_COLUMNS = ("layer", "tensor", "format", "zeros", "at the maximum", "amax", "scale")


def cells(tensor: Tensor) -> list[str]:
    """A row of `CAST_COLUMNS`, or of `STORED_COLUMNS`."""
    entry, name = tensor.last, tensor.layer or "(root)"
    low, high = entry["scale"] if isinstance(entry["scale"], list) else [entry["scale"]] * 2
    scale = _number(high) if low == high else f"{_number(low)} to {_number(high)}"
    numbers = [_number(entry["amax"]), "–" if low is None and high is None else scale]
    keys = ("zeros", "at_max") if tensor.is_stored else ("saturated", "flushed")
    shares = [share(entry[key]) if is_finite(entry) else "NaN" for key in keys]
    if tensor.is_stored:
        return [name, tensor.name, entry["format"], *shares, *numbers]
    missing = "–" if is_finite(entry) else "NaN"
    decibels = [entry["sqnr_db"], tensor.lost_db, tensor.most_lost[0]]
    texts = [missing if each is None else f"{each:.1f}".replace("-0.0", "0.0") for each in decibels]
    return [name, tensor.name, entry["format"], *texts, *shares, *numbers]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
