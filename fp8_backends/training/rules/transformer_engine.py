"""What TransformerEngine cannot do here."""

from __future__ import annotations

from collections.abc import Callable

from .chips import before_fp8
from .setup import Rule, Setup

TWIN = "use the native rule of the same name, such as native:delayed for te:delayed: same fields, codes and scales"


def _te(*scalings: str) -> Callable[[Setup], bool]:
    """Whether TransformerEngine makes the products, by one of these rules (none: by any)."""
    return lambda s: s.recipe.compute == "te" and (not scalings or s.recipe.scaling in scalings)


_te_any, _te_blockwise, _te_mxfp8 = _te(), _te("blockwise"), _te("mxfp8")


def _older(cuda: tuple[int, int] | None, wanted: tuple[int, int]) -> bool:
    return cuda is not None and cuda < wanted


TE_RULES = (
    Rule(
        "te_without_nvidia_gpu",
        "error",
        lambda s: _te_any(s) and s.capability is None,
        "TransformerEngine runs on NVIDIA GPUs, and there is none here",
        TWIN,
    ),
    Rule(
        "te_before_fp8",
        "error",
        lambda s: _te_any(s) and before_fp8(s),
        "TransformerEngine multiplies FP8 matrices from compute capability 8.9 on",
        f"train in bf16, or {TWIN}",
    ),
    Rule(
        "te_ada_libraries",
        "error",
        lambda s: _te_any(s) and s.capability == (8, 9) and _older(s.cuda, (12, 1)),
        "on Ada TransformerEngine wants CUDA 12.1 and cuBLASLt 12.1.3, or newer",
        "install a PyTorch for a newer CUDA",
    ),
    Rule(
        "te_block_chip",
        "error",
        lambda s: _te_blockwise(s) and s.capability is not None and (8, 9) <= s.capability < (9, 0),
        "block scales need compute capability 9.0 or higher",
        "use te:dynamic, or native:blockwise, which emulates them",
    ),
    Rule(
        "te_block_cuda",
        "error",
        lambda s: _te_blockwise(s) and s.capability is not None and _older(s.cuda, (12, 9)),
        "cuBLAS multiplies with block scales from CUDA 12.9 on, and this PyTorch was built for an older one",
        "install a PyTorch for CUDA 12.9 or newer, or use te:dynamic",
    ),
    Rule(
        "te_mxfp8_chip",
        "error",
        lambda s: _te_mxfp8(s) and s.capability is not None and not (10, 0) <= s.capability < (12, 0),
        "TransformerEngine has MXFP8 on compute capability 10 and 11 only (B200, B300, Thor)",
        "use te:dynamic or te:blockwise, or native:mxfp8, which emulates it",
    ),
    Rule(
        "te_backward_in_high_precision",
        "error",
        lambda s: _te_any(s) and bool(s.backward_override),
        "NVTE_BACKWARD_OVERRIDE in the environment takes TransformerEngine's backward products out of FP8, or, with "
        "delayed scaling, stops it",
        "unset NVTE_BACKWARD_OVERRIDE",
    ),
)
