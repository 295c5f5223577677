"""Read the properties of a tensor's device, and copy numbers to a device."""

from __future__ import annotations

import contextlib
import functools
import os

import torch

from ..errors import FP8BackendError

_FP8_CASTS = (8, 9)
"""First CUDA capability with FP8 conversion instructions."""
_NO_CHANGE = contextlib.nullcontext()
_properties = functools.cache(torch.cuda.get_device_properties)


def has_fp8_casts(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's device converts FP32 to FP8 in hardware. Elsewhere kernels round
    on the bits."""
    return tensor.is_cuda and _casts_in_hardware(tensor.get_device())


def multiprocessors(tensor: torch.Tensor) -> int:
    """Count the multiprocessors of the tensor's device; 1 for a CPU."""
    return _properties(tensor.get_device()).multi_processor_count if tensor.is_cuda else 1


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's device current, as Triton launches on the current device. Free if it
    already is."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.get_device())
    return _NO_CHANGE


def stream_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's current stream. None during CUDA graph capture: replays run again on the
    same memory."""
    if not tensor.is_cuda:
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())


def on_device(numbers: list, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Copy numbers to a device without waiting. Raises `FP8BackendError` during CUDA graph capture:
    replays would read freed host memory."""
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda and torch.cuda.is_current_stream_capturing():
        raise FP8BackendError(
            "a CUDA graph cannot record an optimizer step at a level, nor the reduction of "
            "gradients in FP8: replays would read freed memory of the host. Run them outside of "
            "the graph"
        )
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=is_cuda).to(
        device, non_blocking=True
    )


def memory_limit() -> float:
    """Return the bytes of memory that this machine or container has."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as limit:
                memory = min(memory, float(limit.read()))
        except (OSError, ValueError):
            continue  # another version of control groups, or no limit ("max")
    return memory


def free_memory() -> float:
    """Return the bytes of memory that new tensors of the host may take."""
    free = memory_limit()
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                free = min(free, 1024 * float(amount.split()[0]))
    return free


def interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _casts_in_hardware(device: int) -> bool:
    return not interprets() and torch.cuda.get_device_capability(device) >= _FP8_CASTS
