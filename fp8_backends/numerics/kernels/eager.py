"""Tells whether a tensor is plain memory that fast forms may work on, and not something that is traced; and copies
numbers to a device without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import FP8BackendError

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


def on_device(numbers: Sequence, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Copy numbers to a device without waiting. Raise while a CUDA graph records: its replays would read memory of the
    host that is freed by then."""
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda and torch.cuda.is_current_stream_capturing():
        raise FP8BackendError(
            "a CUDA graph cannot record an optimizer step at a level, nor the reduction of gradients in FP8: replays "
            "would read freed memory of the host. Run them outside of the graph"
        )
    return torch.tensor(numbers, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)
