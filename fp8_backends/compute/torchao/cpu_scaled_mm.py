"""`torch._scaled_mm` for CPUs on which PyTorch's own is of no use.

On a CPU with AMX PyTorch hands products of codes with one scale to oneDNN, which has a fast form of them for AMX-FP16
alone: on other chips it runs a reference loop, in which 1024 x 2048 x 2048 takes 75 s, and in FP32 0.025 s. TorchAO
calls the operator by itself, so the operator is what must be mended: where `ao` prepares a model on such a CPU, its
kernel for CPUs is swapped by `torch.library`, for this process, until `restore`. Elsewhere nothing is touched. Other
ways were tried: TorchAO's `emulate` leaves no FP8 product in compiled code for the proof to find, and
`torch.backends.mkldnn.enabled = False` slows down what oneDNN is good at.
"""

from __future__ import annotations

import functools
import threading
import warnings

import torch

from .. import hardware
from ..products import exact_product

_lock = threading.Lock()


def mend() -> None:
    """Swap the kernel, where the CPU calls for it. Repeating it does nothing."""
    if not hardware.cpu_scaled_mm():
        with _lock:
            _swapped()


def restore() -> None:
    """Give the operator PyTorch's own kernel again."""
    if _swapped.cache_info().currsize:
        _swapped()._destroy()
        _swapped.cache_clear()


@functools.cache
def _swapped() -> torch.library.Library:
    """The library that holds our kernels: they go with it."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # of overriding, which is meant
        library.impl("_scaled_mm", scaled_mm, "CPU", allow_override=True)
        library.impl("_scaled_mm.out", _scaled_mm_out, "CPU", allow_override=True)
    return library


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`torch._scaled_mm` of a [m, k] and b [k, n] in FP8, as PyTorch defines it for other CPUs: an FP32 product.

    Scales are of one element, or [m, 1] and [1, n].
    """
    if scale_a.numel() == scale_b.numel() == 1:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    product = exact_product(a, scale_a, b.t(), scale_b.t(), torch.float32, torch.float32)
    if bias is not None:
        product += bias
    out_dtype = a.dtype if out_dtype is None else out_dtype
    if scale_result is not None and out_dtype.itemsize == 1:
        product /= scale_result
    return product.to(out_dtype)


def _scaled_mm_out(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False, *, out):
    result = scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype or out.dtype)
    return out.resize_(result.shape).copy_(result)
