"""Tells whether a tensor is plain memory that fast forms may work on, and not something that is traced."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

_KINDS = (torch.Tensor, torch.nn.Parameter)
"""Exact types. A subclass may stand for other memory than its own: fake, sharded, or traced tensors."""
PLAIN = (*_KINDS, FakeTensor)
"""Exact types of plain tensors, also where nothing is computed."""


def is_eager(tensor: torch.Tensor) -> bool:
    """Whether an operation on this tensor would run now, on memory of its own. False under `torch.compile` and under
    `FakeTensorMode`."""
    if torch.compiler.is_compiling():  # first: the compiler takes it as a constant, and traces nothing below
        return False
    return type(tensor) in _KINDS and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
