"""Decide which tensors Triton kernels process. Imports Triton only for a GPU's first tensor: it
takes a second.

Environment variable `FP8_BACKENDS_TRITON`: `0`, set before a GPU's first tensor, keeps all work on
PyTorch operations; `interpret`, with Triton's own `TRITON_INTERPRET=1`, runs the kernels on CPU
tensors, slowly, for tests.
"""

import functools
import logging
import os

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import devices

VARIABLE = "FP8_BACKENDS_TRITON"

_KINDS = (torch.Tensor, torch.nn.Parameter)
"""Exact types: a subclass may stand for other memory (fake, sharded or traced tensors)."""
PLAIN_TYPES = (*_KINDS, FakeTensor)
"""Exact types of plain tensors, fake ones included."""

_OLDEST = (8, 0)
"""CUDA capability. Older GPUs lack bf16 and Triton's support."""
logger = logging.getLogger(__name__)


def is_eager(tensor: torch.Tensor) -> bool:
    """Return True if an operation on this tensor runs now, on its own memory: not traced, not fake,
    no subclass."""
    # first: Dynamo folds this to a constant and traces nothing below
    if torch.compiler.is_compiling():
        return False
    return (
        type(tensor) in _KINDS
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
    )


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True for a fake tensor outside of a compiler: its operations only tell shapes."""
    no_graph = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
    return type(tensor) is FakeTensor and no_graph and not torch.compiler.is_compiling()


def usable(tensor: torch.Tensor) -> bool:
    """Return True if Triton kernels can process this tensor: eager, on an NVIDIA GPU, with Triton
    installed.

    False under `torch.compile` (Inductor generates its own kernels), and for fake and meta tensors.
    """
    # first: nothing below may be traced
    if torch.compiler.is_compiling():
        return False
    if tensor.is_cuda:
        return is_eager(tensor) and _runs_on(tensor.get_device())
    return (
        os.environ.get(VARIABLE) == "interpret"
        and is_eager(tensor)
        and devices.interprets()
        and tensor.device.type == "cpu"
    )


@functools.cache
def _runs_on(device: int) -> bool:
    """Read the environment once per device, as each launch asks."""
    if os.environ.get(VARIABLE) == "0" or torch.version.hip is not None:
        return False
    return (
        torch.cuda.get_device_capability(device) >= _OLDEST
        and has_triton()
        and _passes_trial(device)
    )


@functools.cache
def has_triton() -> bool:
    """Return True if Triton can be imported, else warn once."""
    try:
        import triton  # noqa: F401  (optional)
    except ImportError as error:
        logger.warning(
            "Triton cannot be imported (%s): FP8 casts, optimizer steps and messages run as plain "
            "PyTorch operations, several times slower. `pip install triton` helps.",
            error,
        )
        return False
    return True


def _passes_trial(device: int) -> bool:
    from . import triton_matrix  # Triton takes a second to load

    try:
        obstacle = triton_matrix.obstacle(torch.device("cuda", device))
    except Exception as error:  # compilers and drivers share no base class
        obstacle = f"{type(error).__name__}: {error}"
    if obstacle is not None:
        logger.warning(
            "Triton's kernels are not used on cuda:%d (%s): FP8 casts, optimizer steps and "
            "messages run as plain PyTorch operations, several times slower. Triton needs a C "
            "compiler at run time: gcc, or what CC names.",
            device,
            obstacle,
        )
    return obstacle is None
