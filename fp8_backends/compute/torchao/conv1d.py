"""The layer of `ao` for transformers' `Conv1D`, of which GPT-2 is made. Imports TorchAO and transformers, so it is
imported only when such a layer is converted or unpickled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, LinearMMConfig
from transformers.pytorch_utils import Conv1D

from ..conv1d import Conv1DForm
from .linear import AOLinear, AOProducts


class AOConv1D(Conv1DForm, AOProducts, Conv1D):
    """transformers' `Conv1D`, whose weight lies as [in, out], with the products of `AOLinear`, to the bit."""

    @classmethod
    def around(cls, conv: nn.Module, config: Float8LinearConfig) -> AOConv1D:
        """A layer that holds the Parameter objects of a `Conv1D`."""
        with torch.device("meta"):
            linear = AOLinear(conv.nx, conv.nf, bias=False, config=config)
        layer = cls.__new__(cls)
        layer.__dict__.update(linear.__dict__, nx=conv.nx, nf=conv.nf)
        layer.weight, layer.bias = conv.weight, conv.bias
        return layer

    def _products(self, input: torch.Tensor) -> torch.Tensor:
        linear = _AsLinear(self.weight.t(), self.bias, self.linear_mm_config, self.config)
        return Float8Linear.forward(linear, input)

    def __repr__(self) -> str:
        return f"AOConv1D(nf={self.nf}, nx={self.nx}, ao)"


class _AsLinear(NamedTuple):
    """What TorchAO's forward reads of its layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    linear_mm_config: LinearMMConfig
    config: Float8LinearConfig
