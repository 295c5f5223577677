"""The product of operands that have a scale for each block along the contraction, and the engines it can use.

TransformerEngine adds one part of the contraction after the other in FP32,

    y = y + (a.codes @ b.codes.T of the part) * a.scale_inv * b.scale_inv

The scales are powers of two, so they round nothing: multiplied into the codes first, they give the same products of
pairs, and one product of matrices adds them up. That is what every engine without block scales does, so all engines
agree up to the order of the FP32 sums and one rounding to the result's dtype. In bf16, which ends at 2**-133, that
holds where the largest value of a block is at least 2**-115 (E5M2, which reaches further below it: 2**-101).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...numerics.kernels.quantize import dequantize_blocks
from ...numerics.scaling import MX, SQUARES, Blocks, Quantized
from ..products import ALIGNMENT, SCALED_MM, VALUES, engine_for, pad, row_major

_SCALINGS = {128: "blockwise", 32: "mxfp8"}
"""Which rule shares a scale between so many elements of the contraction."""

_SCALED_MM = torch.ops.aten._scaled_mm_v2
"""What lies behind `torch.nn.functional.scaled_mm`, a function that the compiler of torch 2.11 cannot trace."""


def block_engine_for(device: torch.device, out_dtype: torch.dtype, length: int) -> str:
    """Which engine multiplies FP8 operands with a scale for so many elements of the contraction, 128 or 32.

    - `scaled_mm`: `torch.nn.functional.scaled_mm`'s operator: 128 on Hopper, 32 (MXFP8) on Blackwell.
    - `bf16-exact`, `fp32-exact`: codes times scales in that dtype, on a CPU as `products.engine_for` chooses.
    - `emulated`: the same in FP32, everywhere else.
    """
    return engine_for(device, out_dtype, _SCALINGS[length])


def block_scaled_product(
    a: Quantized, a_blocks: Blocks, b: Quantized, b_blocks: Blocks, out_dtype: torch.dtype
) -> torch.Tensor:
    """The values of a [m, k] @ the values of b [n, k].T with FP32 accumulation.

    Args:
        a: cut into VECTORS or MX.
        b: cut into VECTORS or SQUARES, or MX as well.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        [m, n] of out_dtype.
    """
    assert a.codes.shape[1] == b.codes.shape[1]
    assert not (a.codes.dtype == b.codes.dtype == torch.float8_e5m2), "no GPU multiplies E5M2 by E5M2"
    product_dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32  # fp16 by way of FP32
    engine = block_engine_for(a.codes.device, product_dtype, a_blocks.columns)
    if engine == SCALED_MM:
        multiply = _mx_scaled_mm if a_blocks is MX else _vector_scaled_mm
        product = multiply(a, b, b_blocks, product_dtype)
        return product.narrow(0, 0, a.codes.shape[0]).narrow(1, 0, b.codes.shape[0]).to(out_dtype)
    with torch.autocast(a.codes.device.type, enabled=False):  # autocast would round FP32 operands to bf16
        values = dequantize_blocks(a, a_blocks, VALUES[engine]), dequantize_blocks(b, b_blocks, VALUES[engine])
        product = torch.mm(values[0], values[1].t())
    return product.to(out_dtype)


def _vector_scaled_mm(a: Quantized, b: Quantized, b_blocks: Blocks, out_dtype: torch.dtype) -> torch.Tensor:
    # on Hopper: the contraction in multiples of 128. Scales of VECTORS are stored column after column, those of SQUARES
    # row after row, with a multiple of four in a row
    in_squares, kinds = b_blocks is SQUARES, F.ScalingType
    return _scaled_mm(
        row_major(pad(a.codes, ALIGNMENT, 128)),
        row_major(pad(b.codes, 128 if in_squares else ALIGNMENT, 128)),
        _by_columns(a.scale_inv),
        kinds.BlockWise1x128.value,
        row_major(pad(b.scale_inv, 1, 4)) if in_squares else _by_columns(b.scale_inv),
        (kinds.BlockWise128x128 if in_squares else kinds.BlockWise1x128).value,
        out_dtype,
    )


def _by_columns(scale_inv: torch.Tensor) -> torch.Tensor:
    """Scales transposed, as memory of their own."""
    return pad(scale_inv, ALIGNMENT, 1).t().clone(memory_format=torch.contiguous_format)


def _mx_scaled_mm(a: Quantized, b: Quantized, b_blocks: Blocks, out_dtype: torch.dtype) -> torch.Tensor:
    """On Blackwell: all sizes in multiples of 32, the scales in the order in which the hardware reads them."""
    (a, a_scale_inv), (b, b_scale_inv) = ((row_major(pad(q.codes, 32, 32)), swizzled(q.scale_inv)) for q in (a, b))
    kind = F.ScalingType.BlockWise1x32.value
    return _scaled_mm(a, b, a_scale_inv, kind, b_scale_inv, kind, out_dtype)


def _scaled_mm(a, b, a_scale_inv, a_kind, b_scale_inv, b_kind, out_dtype) -> torch.Tensor:
    """Compiled code multiplies inside an operator of this package: Inductor of torch 2.13 makes the older `_scaled_mm`
    of PyTorch's, which takes scales of other layouts."""
    multiply = block_scaled_mm if torch.compiler.is_compiling() else _multiply
    return multiply(a, b, a_scale_inv, a_kind, b_scale_inv, b_kind, out_dtype)


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_kind: int,
    b_scale_inv: torch.Tensor,
    b_kind: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [m, k] @ b [n, k].T; all operands row-major. Scales of vectors and squares are stored transposed; those of
    mxfp8 are flat, and swizzled: uint8, since Inductor has no code for E8M0."""
    mx = F.ScalingType.BlockWise1x32.value
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4.value] if a_kind == mx else []
    a_part, b_part = (
        ([scale_inv.view(torch.float8_e8m0fnu) if kind == mx else scale_inv.t()], [kind], swizzles)
        for scale_inv, kind in ((a_scale_inv, a_kind), (b_scale_inv, b_kind))
    )
    return _SCALED_MM(a, b.t(), *a_part, *b_part, None, out_dtype)


block_scaled_mm = torch.library.custom_op("fp8_backends::block_scaled_mm", _multiply, mutates_args=())
"""`_multiply`, into which a compiler does not look."""


@block_scaled_mm.register_fake
def _(a, b, a_scale_inv, a_kind, b_scale_inv, b_kind, out_dtype) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, blocks in a row], uint8, as cuBLAS reads them: flat. Tiles of 128 x 4 one after the other; in
    a tile row 32 i + j comes at place 4 j + i, so that each thread finds its four rows side by side."""
    scales = pad(scales, 128, 4)
    tiles = scales.view(scales.shape[0] // 128, 4, 32, scales.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
