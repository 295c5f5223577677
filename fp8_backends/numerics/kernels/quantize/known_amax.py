"""The amax of a matrix that the kernel which made it has found along the way: it is quantized in one pass, not two."""

from __future__ import annotations

from typing import NamedTuple

import torch

_NOTE = "_fp8_known_amax"


class KnownAmax(NamedTuple):
    """Noted on a tensor."""

    partials: torch.Tensor
    """int32, at most `triton_quantize.AMAX_PROGRAMS`: the bits of the maxima of parts of the tensor."""
    keep_nan: bool
    """Whether NaN counts, as in `dispatch.amax_of`."""
    version: int
    """The tensor's when this was noted: a later change makes it void."""


def note(x: torch.Tensor, partials: torch.Tensor, keep_nan: bool) -> None:
    """Note on a tensor the maxima of its parts. It holds them for as long as it lives."""
    if not x.is_inference():  # such a tensor does not tell of changes
        setattr(x, _NOTE, KnownAmax(partials, keep_nan, x._version))


def as_matrix(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x, without a graph, as [rows, columns] with what was noted on it."""
    matrix = x.detach().reshape(-1, columns)
    if not torch.compiler.is_compiling() and (known := getattr(x, _NOTE, None)) is not None:
        setattr(matrix, _NOTE, known)
    return matrix


def known_partials(x: torch.Tensor, keep_nan: bool) -> torch.Tensor | None:
    """The maxima that were noted on x, where x is as it was then and they count NaN as asked; else None."""
    known: KnownAmax | None = getattr(x, _NOTE, None)
    return known.partials if known and (known.keep_nan, known.version) == (keep_nan, x._version) else None
