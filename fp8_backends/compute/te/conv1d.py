"""The layer of `te` for transformers' `Conv1D`, of which GPT-2 is made. Imports TransformerEngine and transformers, so
it is imported only when such a layer is converted or unpickled."""

from __future__ import annotations

from transformers.pytorch_utils import Conv1D

from ..conv1d import Conv1DForm
from .linear import TEProducts


class TEConv1D(Conv1DForm, TEProducts, Conv1D):
    """transformers' `Conv1D`, whose weight lies as [in, out], with the products of `TELinear`, to the bit."""

    def __repr__(self) -> str:
        return f"TEConv1D(nf={self.nf}, nx={self.nx}, {self.rule_in_words})"
