"""Tells whether a tensor's work goes to the Triton kernels. Imports nothing of Triton, which takes a second to load.

Environment variable `FP8_BACKENDS_TRITON`: `0`, before a GPU's first tensor, keeps all on plain PyTorch operations;
`interpret`, with Triton's own `TRITON_INTERPRET=1`, sends tensors on the CPU through the kernels, slowly, for tests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os

import torch

from .eager import is_eager

VARIABLE = "FP8_BACKENDS_TRITON"

_OLDEST = (8, 0)
"""CUDA capability; older GPUs have no bf16, and Triton does not support them."""
_FP8_CASTS = (8, 9)
"""The first CUDA capability that converts to FP8 in one instruction."""

_NO_CHANGE = contextlib.nullcontext()

logger = logging.getLogger(__name__)


def usable(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels can work on this tensor: real memory of an NVIDIA GPU, eager mode, Triton installed.

    False under `torch.compile`, whose Inductor makes kernels of its own, and for fake and meta tensors.
    """
    if not is_eager(tensor):  # first: under a compiler nothing below may be traced
        return False
    if tensor.is_cuda:
        return _runs_on(tensor.get_device())
    return os.environ.get(VARIABLE) == "interpret" and _interprets() and tensor.device.type == "cpu"


def has_fp8_casts(tensor: torch.Tensor) -> bool:
    """Whether the tensor's device converts FP32 to FP8 in hardware. Kernels round on the bits elsewhere."""
    return tensor.is_cuda and _casts_in_hardware(tensor.get_device())


def multiprocessors(tensor: torch.Tensor) -> int:
    """How many multiprocessors the tensor's device has; 1 for a CPU."""
    return _properties(tensor.get_device()).multi_processor_count if tensor.is_cuda else 1


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """The context in which a kernel that works on this tensor is launched: Triton takes the current device."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.get_device())
    return _NO_CHANGE


def stream_of(tensor: torch.Tensor) -> int | None:
    """The stream on which a kernel that works on this tensor is launched; None while a CUDA graph records it, which
    may run its launches again on the same memory."""
    if not tensor.is_cuda:
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())


def _interprets() -> bool:
    """Whether Triton's interpreter takes the place of its compiler."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _runs_on(device: int) -> bool:
    """The environment is read once for a device: each launch asks."""
    if os.environ.get(VARIABLE) == "0" or torch.version.hip is not None:
        return False
    return _capability(device) >= _OLDEST and _triton_is_there() and _passes_trial(device)


@functools.cache
def _casts_in_hardware(device: int) -> bool:
    return not _interprets() and _capability(device) >= _FP8_CASTS


@functools.cache
def _properties(device: int):
    return torch.cuda.get_device_properties(device)


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _triton_is_there() -> bool:
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
        obstacle = triton_common.obstacle(torch.device("cuda", device), _capability(device) >= _FP8_CASTS)
    except Exception as error:  # compilers and drivers have no error in common
        obstacle = f"{type(error).__name__}: {error}"
    if obstacle is not None:
        logger.warning(
            "Triton's kernels are not used on cuda:%d (%s): FP8 casts, optimizer steps and messages run as plain "
            "PyTorch operations, several times slower. Triton needs a C compiler at run time: gcc, or what CC names.",
            device,
            obstacle,
        )
    return obstacle is None
