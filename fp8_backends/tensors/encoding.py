"""Encode plain values as low-precision data with power-of-two scales, and decode them.

A pair (`formats.E4M11`) is E4M3 data with an int8 residual. `kernels.rounding` defines its bits; a
CPU encodes and decodes it in parts that fit its cache.
"""

from collections.abc import Iterator

import torch

from ..formats.formats import E4M3, E4M11, E5M2, FORMAT_OF, ROOT8, Format, saturating_cast
from ..formats.scaling import POWER_OF_TWO, power_of_two_scale, scale_inv_of, tensor_amax
from ..kernels import quantize as quantization
from ..kernels import rounding
from ..kernels.triton_gate import is_eager

ENCODED_AT_ONCE = 2**15
"""Elements of one part of a pair on a CPU."""


def encode(
    values: torch.Tensor,
    storage: torch.dtype,
    block_size: int = 0,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round values to nearest. Return data and scale_inv. Arguments as in
    `scaled_tensor.quantize`."""
    if storage not in FORMAT_OF:
        return values.to(storage).clone(), torch.ones((), device=values.device)
    fmt = FORMAT_OF[storage]
    if not block_size and amax is None and fmt in (E4M3, E5M2) and _has_fused_cast(values):
        return _fused_cast(values, fmt)
    if fmt is ROOT8:
        values = values.float().sqrt()
    if amax is None:
        amax = amax_of(values, block_size)
    scale = power_of_two_scale(amax, fmt)
    scaled = values.float() * (_spread(scale, block_size, values.shape) if block_size else scale)
    # no positive value becomes a root of 0
    is_root = fmt is ROOT8
    data = (
        rounding.codes_of(scaled, ROOT8, above_zero=True)[0]
        if is_root
        else saturating_cast(scaled, fmt)
    )
    return data, scale_inv_of(scale, amax)


def encode_sum(data: torch.Tensor, scale_inv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `data * scale_inv`, FP32, to E4M3. Return data and scale_inv. The old scale may be any
    number."""
    if not _has_fused_cast(data):
        return encode(data * scale_inv, E4M3.dtype)
    codes, new_scale_inv = _fused_cast(data, E4M3, scale_inv.abs())
    return codes, torch.copysign(new_scale_inv, scale_inv)


def encode_pair(
    values: torch.Tensor, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round contiguous values to nearest. Return codes (E4M3), residuals (int8) and scale_inv."""
    amax = amax_of(values) if amax is None else amax
    scale = power_of_two_scale(amax, E4M11)
    codes = torch.empty_like(values, dtype=torch.uint8)
    residual = torch.empty_like(values, dtype=torch.int8)
    for source, *targets in _parts(values, codes, residual):
        for target, rounded in zip(
            targets, rounding.codes_of(source.float() * scale, E4M11), strict=True
        ):
            target.copy_(rounded)
    return codes.view(E4M3.dtype), residual, scale_inv_of(scale, amax)


def decode(data: torch.Tensor, scale_inv: torch.Tensor, block_size: int = 0) -> torch.Tensor:
    """Return the FP32 values of data and scales."""
    if block_size:
        scale_inv = _spread(scale_inv, block_size, data.shape)
    if data.dtype == ROOT8.dtype:
        return (rounding.decoded(data, ROOT8) * scale_inv).square_()
    return data.float() * scale_inv


def decode_pair(
    codes: torch.Tensor, residual: torch.Tensor, scale_inv: torch.Tensor
) -> torch.Tensor:
    """Return the FP32 values of codes and residuals of one shape, contiguous."""
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for target, code, rest in _parts(
        values, codes.view(torch.uint8).contiguous(), residual.contiguous()
    ):
        torch.mul(rounding.decoded(code, E4M11, rest), scale_inv, out=target)
    return values


def amax_of(values: torch.Tensor, block_size: int = 0) -> torch.Tensor:
    """Return max |x|, FP32: 0-dimensional, or of each block of the flattened tensor. Accepts empty
    tensors."""
    if not block_size:
        return tensor_amax(values) if values.numel() else values.new_zeros((), dtype=torch.float32)
    flat = values.detach().float().abs().reshape(-1)
    missing = -flat.numel() % block_size
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(-1, block_size).amax(1)


def _has_fused_cast(values: torch.Tensor) -> bool:
    """Return True if the cast of FP8 products accepts these values."""
    return (
        values.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and values.dim() > 0
        and values.numel() > 0
    )


def _fused_cast(
    values: torch.Tensor, fmt: Format, stored_scale_inv: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scale_inv of `values`, or of `values * stored_scale_inv` (not negative): two
    passes over GPU memory. The new scale is a power of two, so the order of multiplications does
    not change the rounding."""
    matrix = values.reshape(-1, values.shape[-1])
    layouts = quantization.quantize(
        matrix, fmt, columns=False, how=POWER_OF_TWO, stored_scale_inv=stored_scale_inv
    )
    return layouts.codes.view(values.shape), layouts.scale_inv


def _spread(scales: torch.Tensor, block_size: int, shape: torch.Size) -> torch.Tensor:
    """Repeat block scales [blocks] over the elements of a tensor."""
    return scales.repeat_interleave(block_size)[: shape.numel()].view(shape)


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    flat = [tensor.view(-1) for tensor in tensors]
    in_parts = flat[0].device.type == "cpu" and is_eager(flat[0])
    return zip(
        *(tensor.split(ENCODED_AT_ONCE if in_parts else max(len(tensor), 1)) for tensor in flat),
        strict=True,
    )
