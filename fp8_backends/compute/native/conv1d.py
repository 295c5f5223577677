"""The layer of `native` for transformers' `Conv1D`, of which GPT-2 is made. Imports transformers, so it is imported
only when such a layer is converted or unpickled."""

from __future__ import annotations

from transformers.pytorch_utils import Conv1D

from ..conv1d import Conv1DForm
from .linear import FP8Products


class FP8Conv1D(Conv1DForm, FP8Products, Conv1D):
    """transformers' `Conv1D`, whose weight lies as [in, out], with the products of `FP8Linear`, to the bit."""

    def __repr__(self) -> str:
        return f"FP8Conv1D(nf={self.nf}, nx={self.nx}, {self.fp8_rule!r})"
