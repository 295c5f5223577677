"""What an optimizer knows of the tensors that its last step has stored, as long as nobody else writes to them.

A step of one pass needs the largest numbers of what is stored (`numerics/kernels/adam/bounds.py`), and leaves those of
what it stores. They are no part of a checkpoint: after loading, as after any other write, they are measured again,
which gives the same numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..numerics.kernels.adam.bounds import measured
from ..numerics.kernels.adam.dispatch import Slot


class _Record(NamedTuple):
    numbers: torch.Tensor
    """FP32 [4], as `measured` returns."""
    seen: list[tuple[weakref.ref, int]]
    """The tensors that they are of, and autograd's counts of writes to them."""


class Records:
    """Of an optimizer's parameters, by their `id`."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def take(self, key: int, slots: Sequence[Slot], parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The numbers of a weight, exp_avg and exp_avg_sq, for a step to use up. parts: the tensors that `slots` hold,
        or are views of."""
        record = self._records.pop(key, None)
        if record is None or not _unchanged(record, parts):
            return measured(*slots)
        return record.numbers

    def keep(self, key: int, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Keep what a step has left."""
        self._records[key] = _Record(numbers, [(weakref.ref(part), part._version) for part in parts])


def _unchanged(record: _Record, parts: Sequence[torch.Tensor]) -> bool:
    if len(record.seen) != len(parts):
        return False
    return all(
        seen() is part and version == part._version for (seen, version), part in zip(record.seen, parts, strict=True)
    )
