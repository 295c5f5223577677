"""The one function that makes every FP8 product, and the engines it can use.

All three products of a linear layer are brought to one form, `A @ B.T` with A [m, k] and B [n, k] both row-major,
so that the contraction runs along contiguous memory in both operands: the only layout Hopper's FP8 units take.

    fprop   y  [tokens, out] = x  [tokens, in]  @ (w [out, in]).T
    dgrad   dx [tokens, in]  = dy [tokens, out] @ (w.T [in, out]).T
    wgrad   dw [out, in]     = dy.T [out, tokens] @ (x.T [in, tokens]).T

A GPU also wants k and n in multiples of 16, never two E5M2 operands, and a bf16 output where scales are per row.
These rules are held on every device, so that what passes on a laptop is valid on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import hardware
from ..scaling import Quantized

ALIGNMENT = 16
"""FP8 products take multiples of this in the contraction and in the columns of the result."""

SCALED_MM, BF16_EXACT, EMULATED = "scaled_mm", "bf16-exact", "emulated"


def engine_for(device: torch.device, out_dtype: torch.dtype) -> str:
    """Which engine multiplies FP8 operands on this device.

    - `scaled_mm`: `torch._scaled_mm`, the hardware's FP8 units (on a CPU: an exact software product).
    - `bf16-exact`: every E4M3 and E5M2 value is a bf16 value, so a bf16 product with FP32 accumulation of the codes
      is the same product. Taken on a CPU for bf16 results, where it is about three times as fast.
    - `emulated`: the codes in FP32, for devices that have no FP8 products, or products of other codes (MI300).
    """
    if device.type == "cuda":
        # a CUDA device without a driver is a fake tensor's: judge it as the FP8 GPU that it stands for
        return SCALED_MM if not hardware.has_gpu() or hardware.gpu_has_ocp_products(device) else EMULATED
    if device.type == "cpu":
        return BF16_EXACT if out_dtype == torch.bfloat16 else SCALED_MM
    return SCALED_MM if device.type == "meta" else EMULATED


engine_for = torch.compiler.assume_constant_result(engine_for)


def scaled_product(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast_accumulation: bool = False) -> torch.Tensor:
    """`(a.codes * a.scale_inv) @ (b.codes * b.scale_inv).T` with FP32 accumulation.

    Args:
        a: codes [m, k], scale_inv 0-dimensional or [m, 1].
        b: codes [n, k], scale_inv 0-dimensional or [n, 1]; both scales per tensor or both per row.
        out_dtype: bf16, fp16 or fp32. Per-row products are computed in bf16 and cast.
        fast_accumulation: let Hopper keep partial sums in fewer bits (`use_fast_accum`): for fprop only.

    Returns:
        [m, n] of out_dtype.
    """
    n = b.codes.shape[0]
    a_codes, b_codes = pad(a.codes, 1, ALIGNMENT), pad(b.codes, ALIGNMENT, ALIGNMENT)
    rowwise = a.scale_inv.dim() == 2
    b_scale_inv = pad(b.scale_inv, ALIGNMENT, 1) if rowwise else b.scale_inv
    _check(a_codes, a.scale_inv, b_codes, b_scale_inv)
    product_dtype = torch.bfloat16 if rowwise else out_dtype
    multiply = _ENGINES[engine_for(a_codes.device, product_dtype)]
    out = multiply(a_codes, a.scale_inv, b_codes, b_scale_inv, product_dtype, fast_accumulation)
    return out.narrow(1, 0, n).to(out_dtype)


def pad(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Zero rows and columns up to the next multiples (a zero code adds nothing to a product)."""
    missing = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    if not any(missing):
        return matrix
    widths = (0, missing[1], 0, missing[0])
    if matrix.dtype.itemsize > 1:
        return F.pad(matrix, widths)
    return F.pad(matrix.view(torch.uint8), widths).view(matrix.dtype)  # constant_pad has no float8 kernel


def _check(a: torch.Tensor, a_scale_inv: torch.Tensor, b: torch.Tensor, b_scale_inv: torch.Tensor) -> None:
    """What `torch._scaled_mm` demands on a GPU. A failure here is this package's fault, not the user's."""
    assert a.is_contiguous() and b.is_contiguous(), "both operands must be row-major in the contraction"
    assert a.shape[1] == b.shape[1] and a.shape[1] % ALIGNMENT == 0 and b.shape[0] % ALIGNMENT == 0
    assert not (a.dtype == b.dtype == torch.float8_e5m2), "no GPU multiplies E5M2 by E5M2"
    assert a_scale_inv.dtype == b_scale_inv.dtype == torch.float32
    if a_scale_inv.dim() == 2:
        assert a_scale_inv.shape == (a.shape[0], 1) and b_scale_inv.shape == (b.shape[0], 1)
    else:
        assert a_scale_inv.dim() == b_scale_inv.dim() == 0


def _scaled_mm(a, a_scale_inv, b, b_scale_inv, out_dtype, fast_accumulation):
    b_scale_inv = b_scale_inv.t() if b_scale_inv.dim() == 2 else b_scale_inv  # one scale a column of b.T
    return torch._scaled_mm(
        a,
        b.t(),  # column-major
        scale_a=a_scale_inv,
        scale_b=b_scale_inv,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )


def _bf16_exact(a, a_scale_inv, b, b_scale_inv, out_dtype, fast_accumulation):
    # the bf16 result of the codes is scaled in FP32 and rounded again: at most one more half unit in the last place
    return _apply_scales(torch.mm(a.bfloat16(), b.bfloat16().t()), a_scale_inv, b_scale_inv, out_dtype)


def _emulated(a, a_scale_inv, b, b_scale_inv, out_dtype, fast_accumulation):
    with torch.autocast(a.device.type, enabled=False):  # autocast would round the FP32 operands' product to bf16
        return _apply_scales(torch.mm(a.float(), b.float().t()), a_scale_inv, b_scale_inv, out_dtype)


def _apply_scales(product, a_scale_inv, b_scale_inv, out_dtype):
    b_scale_inv = b_scale_inv.t() if b_scale_inv.dim() == 2 else b_scale_inv
    # one factor at a time: the product of two small scales may underflow where each alone does not
    return (product.float() * a_scale_inv * b_scale_inv).to(out_dtype)


_ENGINES = {SCALED_MM: _scaled_mm, BF16_EXACT: _bf16_exact, EMULATED: _emulated}
