"""A quantized matrix in the layouts that products want, and the names of rules by which its scale is chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...scaling import Quantized

DYNAMIC, POWER_OF_TWO, WINDOW = "dynamic", "power_of_two", "window"
"""How a scale follows from an amax: `scale_from_amax`, `power_of_two_scale`, `window_scale`."""


class Layouts(NamedTuple):
    """A quantized matrix [rows, columns], as both products that read it want it."""

    codes: torch.Tensor | None = None
    """FP8, [rows, columns], row-major; None: not asked for."""
    scale_inv: torch.Tensor | None = None
    """The scale of `codes`, as in `Quantized`."""
    transposed: torch.Tensor | None = None
    """FP8, [columns, rows], row-major; None: not asked for, or a view of `codes` serves as well."""
    transposed_scale_inv: torch.Tensor | None = None
    """The scale of `transposed`: the same tensor where there is one scale, else those of the blocks of x.t()."""
    amax: torch.Tensor | None = None
    """max |x| in FP32, 0-dimensional; None where each block has its own."""

    def along_columns(self) -> Quantized:
        """The operand of a product that contracts the columns."""
        return Quantized(self.codes, self.scale_inv)

    def along_rows(self) -> Quantized:
        """The operand of a product that contracts the rows, [columns, rows]."""
        if self.transposed is None:
            return Quantized(self.codes.t(), self.scale_inv)
        return Quantized(self.transposed, self.transposed_scale_inv)
