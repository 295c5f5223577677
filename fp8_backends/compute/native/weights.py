"""Find the kind of a layer's weight: the codes that fprop and dgrad read, and what backward saves.

A weight may change its kind under a prepared layer: FSDP2 puts gathered codes in its place, a level
or `fp8_params` swaps it. Every forward therefore looks the kind up.
"""

from __future__ import annotations

import torch
from torch import nn

from ...tensors.gathered_codes import FPROP
from .layer_rule import PlainWeight, Stored

PLAIN = PlainWeight()


def kind_of(weight: torch.Tensor) -> PlainWeight:
    """Return the kind of a weight, whole or one rank's part."""
    if type(weight) in (nn.Parameter, torch.Tensor):
        return PLAIN
    from .stored_weights import kind_of_codes  # only for weights in codes

    return kind_of_codes(weight) or PLAIN  # fake tensors, and others without codes


def read(weight: torch.Tensor, product: str = FPROP) -> Stored:
    """Return a weight as stored in memory; of FSDP2's gathered codes, the ones for this product."""
    return kind_of(weight).read(weight, product)
