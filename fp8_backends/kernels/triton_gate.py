"""Decide which tensors Triton kernels process, and copy numbers to a device. Does not import Triton: it takes a second.

Environment variable `FP8_BACKENDS_TRITON`: `0`, set before a GPU's first tensor, keeps all work on PyTorch operations;
`interpret`, with Triton's own `TRITON_INTERPRET=1`, runs the kernels on CPU tensors, slowly, for tests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import FP8BackendError

VARIABLE = "FP8_BACKENDS_TRITON"

_KINDS = (torch.Tensor, torch.nn.Parameter)
"""Exact types: a subclass may stand for other memory (fake, sharded or traced tensors)."""
PLAIN = (*_KINDS, FakeTensor)
"""Exact types of plain tensors, fake ones included."""

_OLDEST = (8, 0)
"""CUDA capability. Older GPUs lack bf16 and Triton's support."""
_FP8_CASTS = (8, 9)
"""First CUDA capability with FP8 conversion instructions."""

_NO_CHANGE = contextlib.nullcontext()

logger = logging.getLogger(__name__)


def is_eager(tensor: torch.Tensor) -> bool:
    """Return True if an operation on this tensor runs now, on its own memory: not traced, not fake, no subclass."""
    if torch.compiler.is_compiling():  # first: Dynamo folds this to a constant and traces nothing below
        return False
    return type(tensor) in _KINDS and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


def usable(tensor: torch.Tensor) -> bool:
    """Return True if Triton kernels can process this tensor: eager, on an NVIDIA GPU, with Triton installed.

    False under `torch.compile` (Inductor generates its own kernels), and for fake and meta tensors.
    """
    if not is_eager(tensor):  # first: nothing below may be traced
        return False
    if tensor.is_cuda:
        return _runs_on(tensor.get_device())
    return os.environ.get(VARIABLE) == "interpret" and _interprets() and tensor.device.type == "cpu"


def has_fp8_casts(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's device converts FP32 to FP8 in hardware. Elsewhere kernels round on the bits."""
    return tensor.is_cuda and _casts_in_hardware(tensor.get_device())


def multiprocessors(tensor: torch.Tensor) -> int:
    """Count the multiprocessors of the tensor's device; 1 for a CPU."""
    return _properties(tensor.get_device()).multi_processor_count if tensor.is_cuda else 1


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's device current, as Triton launches on the current device. Free if it already is."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.get_device())
    return _NO_CHANGE


def stream_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's current stream. None during CUDA graph capture: replays run again on the same memory."""
    if not tensor.is_cuda:
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())


def on_device(numbers: list, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Copy numbers to a device without waiting.

    Raises:
        FP8BackendError: during CUDA graph capture, as replays would read freed host memory.
    """
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda and torch.cuda.is_current_stream_capturing():
        raise FP8BackendError(
            "a CUDA graph cannot record an optimizer step at a level, nor the reduction of gradients in FP8: replays "
            "would read freed memory of the host. Run them outside of the graph"
        )
    return torch.tensor(numbers, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _runs_on(device: int) -> bool:
    """Read the environment once per device, as each launch asks."""
    if os.environ.get(VARIABLE) == "0" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST and has_triton() and _passes_trial(device)


@functools.cache
def _casts_in_hardware(device: int) -> bool:
    return not _interprets() and torch.cuda.get_device_capability(device) >= _FP8_CASTS


_properties = functools.cache(torch.cuda.get_device_properties)


@functools.cache
def has_triton() -> bool:
    """Return True if Triton can be imported, else warn once."""
    try:
        import triton  # noqa: F401  (optional)
    except ImportError as error:
        logger.warning(
            "Triton cannot be imported (%s): FP8 casts, optimizer steps and messages run as plain PyTorch operations, "
            "several times slower. `pip install triton` helps.",
            error,
        )
        return False
    return True


def _passes_trial(device: int) -> bool:
    from . import triton_common  # Triton takes a second to load

    try:
        obstacle = triton_common.obstacle(torch.device("cuda", device), _casts_in_hardware(device))
    except Exception as error:  # compilers and drivers share no base class
        obstacle = f"{type(error).__name__}: {error}"
    if obstacle is not None:
        logger.warning(
            "Triton's kernels are not used on cuda:%d (%s): FP8 casts, optimizer steps and messages run as plain "
            "PyTorch operations, several times slower. Triton needs a C compiler at run time: gcc, or what CC names.",
            device,
            obstacle,
        )
    return obstacle is None
