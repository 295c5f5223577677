"""Keep the PTX instructions `min.NaN` and `max.NaN` out of Inductor's kernels with one-byte
results.

Inductor of torch 2.14 emits them for clamps, maxima and amaxes. Next to them, Triton 3.8 may write
garbage to a transposed store of FP8, in silence (triton-lang/triton#11111). `tl.where` gives the
same bits, also for NaN.
"""

import functools
import inspect
import re
from typing import Any

import torch

from ..errors import FP8BackendError

_BYTES = re.compile(r"'\w+': '\*(?:fp8\w*|[iu]8)'")
"""A pointer to one-byte elements in the signature of a kernel."""
_ELEMENTWISE = re.compile(r"\btl\.(minimum|maximum)\(([^()]*), tl\.PropagateNan\.ALL\)")
_REDUCTION = re.compile(r"\btriton_helpers\.(min|max)2(?:_strict)?\(")
_LEFT = re.compile(r"PropagateNan|triton_helpers\.online_softmax")
FUNCTIONS = """\
@triton.jit
def where_minimum(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def where_maximum(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def where_min2(a, dim):
    return tl.reduce(a, dim, where_minimum)


@triton.jit
def where_max2(a, dim):
    return tl.reduce(a, dim, where_maximum)


"""
"""Inserted into rewritten kernels."""


def guard_byte_stores() -> None:
    """Rewrite the kernels with one-byte results in all later compilations of this process.
    Repeating it does nothing.

    Raises:
        FP8BackendError: this version of torch defines kernels in another way.
    """
    if torch.__version__ < (2, 14):
        return
    # seconds to import, and older versions need nothing
    from torch._inductor.codegen.triton import TritonScheduling

    define_kernel = TritonScheduling.define_kernel
    if hasattr(define_kernel, "__wrapped__"):
        return
    if list(inspect.signature(define_kernel).parameters)[:2] != ["self", "src_code"]:
        raise FP8BackendError(
            f"torch {torch.__version__} has another TritonScheduling.define_kernel, so that "
            "kernels with FP8 results cannot be kept from triton-lang/triton#11111: install torch "
            "2.13"
        )

    @functools.wraps(define_kernel)
    def rewritten(self: Any, src_code: str, *arguments: Any, **keywords: Any) -> Any:
        return define_kernel(self, without_nan_instructions(src_code), *arguments, **keywords)

    TritonScheduling.define_kernel = rewritten


def without_nan_instructions(source: str) -> str:
    """Return the source of a Triton kernel by Inductor with `tl.where` for its minima and maxima,
    if it has one-byte elements; other sources unchanged.

    Raises:
        FP8BackendError: the kernel has a minimum or maximum of another form.
    """
    if not _BYTES.search(source):
        return source
    rewritten = _ELEMENTWISE.sub(r"where_\1(\2)", source)
    rewritten = _REDUCTION.sub(r"where_\g<1>2(", rewritten)
    if left := _LEFT.search(rewritten):
        raise FP8BackendError(
            f"torch {torch.__version__} compiled a kernel with FP8 results and {left[0]}: Triton "
            "may write garbage there (triton-lang/triton#11111). Set "
            "torch._inductor.config.online_softmax = False, train without torch.compile, or "
            "install torch 2.13"
        )
    if rewritten == source:
        return source
    return rewritten.replace("@triton_heuristics.", f"{FUNCTIONS}@triton_heuristics.", 1)
