"""Casts and products with a scale for each block: Float8 block scaling, and MXFP8 (on a device of
capability 10.x).

Block scaling (transformer_engine/common/transpose/quantize_transpose_*_blockwise.cu): blocks of
1x128 along the last dimension, or of 128x128; FP32 scales, by default powers of two; an overflowing
scale becomes the largest finite value of the input's dtype. The columnwise copy is the transpose,
cast anew from the high-precision values where blocks are 1x128. MXFP8 (common/cast/mxfp8): blocks
of 32 with an exponent of 8 bits, rounded up, for rows and columns apart; the columnwise copy is not
transposed. Scales are kept in rows of TransformerEngine's padded shapes. A GPU also swizzles those
of MXFP8; here they stay in order, whatever the tensor's flag says, and products read them so.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from . import casts

BLOCK, MX_BLOCK = 128, 32


def is_block_quantizer(quantizer) -> bool:
    return type(quantizer).__name__ in ("Float8BlockQuantizer", "MXFP8Quantizer")


def is_block_tensor(tensor) -> bool:
    return hasattr(tensor, "_rowwise_scale_inv")


def create(quantizer, shape: torch.Size, dtype: torch.dtype, device):
    """Return an empty tensor of TransformerEngine's class for this quantizer, with its usages."""
    is_mx = _is_mx(quantizer)
    if is_mx and (shape[-1] % MX_BLOCK or math.prod(shape[:-1]) % MX_BLOCK):
        raise RuntimeError(
            f"MXFP8 requires tensor dims that are divisible by {MX_BLOCK} (got "
            f"shape={tuple(shape)})"
        )
    parts = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    parts |= {"with_gemm_swizzled_scales": quantizer.optimize_for_gemm} if is_mx else {}
    parts |= {} if is_mx else {"is_2D_scaled": quantizer.block_scaling_dim == 2}
    for usage, wanted in (
        ("rowwise", quantizer.rowwise_usage),
        ("columnwise", quantizer.columnwise_usage),
    ):
        size = shape if is_mx or usage == "rowwise" else (*shape[-1:], *shape[:-1])
        scales = quantizer.get_scale_shape(shape, usage == "columnwise") if wanted else ()
        scale_dtype = torch.uint8 if is_mx else torch.float32
        parts[f"{usage}_data"] = (
            torch.empty(size, dtype=torch.uint8, device=device) if wanted else None
        )
        parts[f"{usage}_scale_inv"] = (
            torch.zeros(scales, dtype=scale_dtype, device=device) if wanted else None
        )
    storage, tensor = _classes(is_mx)
    if quantizer.internal:
        return storage(**parts, fake_dtype=dtype)
    return tensor(shape=shape, dtype=dtype, device=device, **parts)


def cast_into(x: torch.Tensor, quantizer, output) -> None:
    """Write codes and scales of x for each usage of the quantizer into the tensor's buffers."""
    matrix = x.reshape(-1, x.shape[-1])
    fresh = create(quantizer, x.shape, x.dtype, x.device)
    for usage, wanted in (
        ("rowwise", quantizer.rowwise_usage),
        ("columnwise", quantizer.columnwise_usage),
    ):
        names = f"_{usage}_data", f"_{usage}_scale_inv"
        for name in names:
            if not wanted or getattr(output, name) is None:
                setattr(output, name, getattr(fresh, name))
        if wanted:
            rows = matrix if usage == "rowwise" else matrix.T
            codes, scales = (
                _cast_mx(rows, quantizer) if _is_mx(quantizer) else _cast_blocks(rows, quantizer)
            )
            if _is_mx(quantizer) and usage == "columnwise":
                codes, scales = codes.T, scales.T
            elif not _is_mx(quantizer) and quantizer.block_scaling_dim == 1:
                scales = scales.T
            data, scale_inv = (getattr(output, name) for name in names)
            data.copy_(codes.reshape(data.shape))
            scale_inv[: scales.shape[0], : scales.shape[1]] = scales  # the rest is padding
    output._fp8_dtype = quantizer.dtype


def dequantize(tensor) -> torch.Tensor:
    """Return the values of an MXFP8 tensor in FP32 (TransformerEngine's Python handles block
    scaling)."""
    usage = "rowwise" if tensor._rowwise_data is not None else "columnwise"
    values = _mx_values(tensor, rowwise=usage == "rowwise")
    return (values if usage == "rowwise" else values.T).reshape(tensor.size())


def swizzle_scales_for_gemm_(arg0) -> None:
    """Scales stay in order here (see above)."""


def product(A, transA: bool, B, transB: bool) -> torch.Tensor:
    """`B @ A.T`, FP32, [n, m]."""
    if _is_mx(A._quantizer) != _is_mx(B._quantizer):
        raise RuntimeError("Inputs A and B to GEMM need to have compatible scaling modes")
    if _is_mx(A._quantizer):
        return _mx_values(B, rowwise=not transB) @ _mx_values(A, rowwise=transA).T
    if A._is_2D_scaled and B._is_2D_scaled:
        raise RuntimeError("Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling GEMM is supported")
    a, a_scale_inv = _block_operand("A", A, rowwise=transA)  # [m, k], [m, k / 128]
    b, b_scale_inv = _block_operand("B", B, rowwise=not transB)  # [n, k], [n, k / 128]
    if a.shape[0] % 8:
        raise RuntimeError(
            "Outer dimension requirement on A for NVTE_BLOCK_SCALING GEMM. Caller must pad."
        )
    if b.shape[0] % 8 and not B._is_2D_scaled:
        raise RuntimeError(
            "Outer dimension requirement on B for NVTE_BLOCK_SCALING GEMM. Caller must pad."
        )
    return scaled_blocks(a, a_scale_inv, b, b_scale_inv, a_first=not A._is_2D_scaled)


def scaled_blocks(a, a_scale_inv, b, b_scale_inv, a_first: bool) -> torch.Tensor:
    """Multiply one block of the contraction after the other, codes in FP32 [m, k] and [n, k]. FP32,
    [n, m]."""
    out = torch.zeros(b.shape[0], a.shape[0])
    for block, (a_codes, b_codes) in enumerate(
        zip(a.split(BLOCK, 1), b.split(BLOCK, 1), strict=True)
    ):
        partial = b_codes @ a_codes.T
        first, then = a_scale_inv[:, block].unsqueeze(0), b_scale_inv[:, block].unsqueeze(1)
        if not a_first:
            first, then = then, first  # the scales of 1x128 blocks come first
        # a fused multiply-add: FP64 holds the product exactly
        out = (out.double() + (partial * first).double() * then.double()).float()
    return out


def _cast_blocks(rows: torch.Tensor, quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes [m, k], and scale_inv in FP32: [m, k / 128], or [m / 128, k / 128] for square
    blocks; rounded up."""
    height = BLOCK if quantizer.block_scaling_dim == 2 else 1
    m, k = rows.shape
    padded = F.pad(rows.float(), (0, -k % BLOCK, 0, -m % height))
    blocks = padded.reshape(-1, height, padded.shape[1] // BLOCK, BLOCK).transpose(1, 2)
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax((-1, -2))
    fp8_dtype = casts.FP8_DTYPES[int(quantizer.dtype)]
    limits = torch.finfo(fp8_dtype).max, torch.finfo(rows.dtype).max
    scale = casts.scale_from_amax(
        amax, limits[0], quantizer.amax_epsilon, quantizer.force_pow_2_scales, limits[1]
    )
    codes = casts.codes_of(blocks * scale[..., None, None], fp8_dtype)
    return codes.transpose(1, 2).reshape(padded.shape)[:m, :k], scale.reciprocal()


def _cast_mx(rows: torch.Tensor, quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes [m, k] and biased exponents, uint8 [m, k / 32]."""
    fp8_dtype = casts.FP8_DTYPES[int(quantizer.dtype)]
    blocks = rows.float().reshape(rows.shape[0], -1, MX_BLOCK)
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1)
    if quantizer.with_2d_quantization:
        amax = amax.reshape(-1, MX_BLOCK, amax.shape[1]).amax(1).repeat_interleave(MX_BLOCK, 0)
    exponent = _exponent_rounded_up(amax * torch.tensor(1 / torch.finfo(fp8_dtype).max))
    scaled = blocks * _power_of_two(127 - exponent.int()).unsqueeze(-1)
    return casts.codes_of(scaled, fp8_dtype).reshape(rows.shape), exponent.to(torch.uint8)


def _exponent_rounded_up(value: torch.Tensor) -> torch.Tensor:
    """Compute `float_to_e8m0` of common/util/ptx_arch_spec.cuh for values without NaN."""
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return torch.where(torch.isinf(value), torch.full_like(exponent, 0xFE), exponent + up.int())


def _block_operand(name: str, tensor, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in FP32, [rows, k], with the contraction last, and scale_inv [rows, k / 128]."""
    codes = tensor._rowwise_data if rowwise else tensor._columnwise_data
    if codes is None:
        raise RuntimeError(f"Input {name} is missing {'row' if rowwise else 'column'}-wise usage")
    matrix = codes.reshape(-1, codes.shape[-1]) if rowwise else codes.reshape(codes.shape[0], -1)
    rows, k = matrix.shape
    if k % 16:
        raise RuntimeError(
            f"Leading dimension requirement on {name} for NVTE_BLOCK_SCALING GEMM. Caller must pad."
        )
    scale_inv = tensor._rowwise_scale_inv if rowwise else tensor._columnwise_scale_inv
    scale_inv = scale_inv.repeat_interleave(BLOCK, 0) if tensor._is_2D_scaled else scale_inv.T
    values = matrix.contiguous().view(casts.FP8_DTYPES[int(tensor._fp8_dtype)]).float()
    return values, scale_inv[:rows, : math.ceil(k / BLOCK)]


def _mx_values(tensor, rowwise: bool) -> torch.Tensor:
    """Codes times scales in FP32 with the contraction last: [rows, k] rowwise, [columns, rows]
    columnwise."""
    codes = tensor._rowwise_data if rowwise else tensor._columnwise_data
    exponents = tensor._rowwise_scale_inv if rowwise else tensor._columnwise_scale_inv
    if codes is None:
        raise RuntimeError(f"an operand is missing {'row' if rowwise else 'column'}-wise usage")
    values = (
        codes.view(casts.FP8_DTYPES[int(tensor._fp8_dtype)]).float().reshape(-1, codes.shape[-1])
    )
    if not rowwise:
        values, exponents = values.T, exponents.T
    exponents = exponents[: values.shape[0], : values.shape[1] // MX_BLOCK]
    scale_inv = _power_of_two(exponents.int() - 127)
    return values * scale_inv.repeat_interleave(MX_BLOCK, 1)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(exponent.shape), exponent)


def _is_mx(quantizer) -> bool:
    return type(quantizer).__name__ == "MXFP8Quantizer"


def _classes(is_mx: bool):
    """(storage, tensor) of TransformerEngine."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    if is_mx:
        return MXFP8TensorStorage, MXFP8Tensor
    return Float8BlockwiseQTensorStorage, Float8BlockwiseQTensor
