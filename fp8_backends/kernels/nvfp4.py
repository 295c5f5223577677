"""NVFP4, experimental: E2M1 codes with an E4M3 scale for each block and an FP32 scale for the
tensor.

Codes, scales and transform equal TransformerEngine's reference (custom_recipes/reference_nvfp4.py)
and TorchAO's (nvfp4_training/nvfp4_reference.py) to the bit. NVIDIA, "Pretraining Large Language
Models with NVFP4", arXiv:2509.25149: weights in squares of 16, everything else in blocks of 16
along the contraction; a random Hadamard transform of both operands of wgrad; stochastic rounding of
gradients.
"""

import torch
import torch.nn.functional as F

from ..formats.formats import E2M1, E4M3, FP32
from ..formats.scaling import (
    GRAD_OUTPUT,
    NVFP4,
    NVFP4_SQUARES,
    WEIGHT,
    Blocks,
    Quantized,
    scale_inv_of,
)
from .layouts import Layouts
from .rounding import codes_of, decoded, mixed, random_bits

BLOCK = 16
HEADER = 16
"""Bytes before the block scales: the tensor scale and padding, so that GPUs find the scales
aligned."""
NEGATIVE = 0b1101_0111_1110_1000
"""The rows of the transform with a negative sign, the first in the lowest bit: drawn once by
TransformerEngine, for all layers and steps, so that recomputation sees the same."""
RANDOM_BITS = (32 - E2M1.dropped_bits, E2M1.dropped_bits)


def quantize(x: torch.Tensor, tensor: int, rows: bool = True, columns: bool = True) -> Layouts:
    """Quantize a matrix for the products that contract its columns (`rows`) and its rows
    (`columns`).

    Each backward draws one random key from PyTorch's generator of the device.

    Args:
        x: [rows, columns], bf16, fp16 or FP32, any strides.
        tensor: INPUT, WEIGHT or GRAD_OUTPUT.
    """
    height, keys = BLOCK if tensor == WEIGHT else 1, (None, None)
    if tensor == GRAD_OUTPUT:
        keys = torch.randint(-(2**31), 2**31, (2,), device=x.device).to(torch.int32).unbind()
    along_columns = quantized(x, height, keys[0]) if rows else (None, None)
    if not columns:
        return Layouts(*along_columns)
    return Layouts(
        *along_columns,
        *quantized(x.t() if tensor == WEIGHT else transformed(x.t()), height, keys[1]),
    )


def quantized(x: torch.Tensor, height: int = 1, key: torch.Tensor | None = None) -> Quantized:
    """Quantize x [rows, columns] in blocks of `height` rows and BLOCK columns.

    Returns codes, uint8 [rows, columns / 2], two to a byte, the first in the low bits, padded with
    zeros to whole blocks; and scale_inv, uint8 [HEADER + rows * blocks]: the FP32 tensor scale,
    then E4M3 scales row after row, those of squares repeated for each row. The tensor scale is NaN
    if an element is not finite.

    Args:
        key: int32, 0-dim, from which the bits for stochastic rounding are hashed. None: to nearest,
        ties to even.
    """
    tiles = (NVFP4 if height == 1 else NVFP4_SQUARES).tiles(x)
    amaxes = tiles.abs().amax((1, 3)).float()
    amax = amaxes.amax()
    scales, encode = block_scales(amaxes, amax)
    values = (
        (tiles.float() * encode.unsqueeze(1).unsqueeze(3))
        .flatten(2)
        .flatten(0, 1)[: x.shape[0]]
        .contiguous()
    )
    random = None
    # ranks with the same seed round other values by other bits, so that their mean gains
    if key is not None:
        random = random_bits(mixed(key ^ amax.view(torch.int32)), 0, values.numel()).view_as(values)
    repeated = scales.view(torch.uint8).repeat_interleave(height, 0)[: x.shape[0]].flatten()
    header = F.pad(
        scale_inv_of(tensor_scale(amax), amax).reshape(1).view(torch.uint8), (0, HEADER - 4)
    )
    return Quantized(packed(cast(values, random)), torch.cat([header, repeated]))


def cast(values: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """Round scaled FP32 values, saturating, to codes in the four low bits: uint8. NaN becomes 7, as
    in NVIDIA's cuda_fp4.hpp. random: int32, the random bits of each value; None: to nearest, ties
    to even."""
    codes = codes_of(values, E2M1, random, RANDOM_BITS)[0]
    return (codes & 7) | torch.where(values == values, codes >> 4 & 8, torch.zeros_like(codes))


def blocks_of(amax: torch.Tensor, height: int) -> Blocks:
    """Return the blocks of a tensor with this amax, for statistics."""
    return Blocks(
        height,
        BLOCK,
        lambda amaxes, fmt: block_scales(amaxes, amax)[1],
        lambda scale, _: scale.reciprocal(),
    )


def tensor_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return the factor into the range of E4M3 times E2M1: `448 * 6 / amax`, at most the largest
    FP32; 1 for an amax of 0 or inf. FP32, 0-dim."""
    scale = (torch.full_like(amax, E4M3.max * E2M1.max) / amax).clamp(max=FP32.max)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def block_scales(amaxes: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored scales of blocks, E4M3, and the factors of their values, FP32, from FP32
    amaxes of blocks and of the tensor. As in TransformerEngine's core_nvfp4.cuh, a scale of 0
    flushes its block."""
    scale = tensor_scale(amax)
    stored = (
        (amaxes * (scale * torch.full_like(scale, 1 / E2M1.max))).clamp(max=E4M3.max).to(E4M3.dtype)
    )
    return stored, (stored.float() * scale.reciprocal()).reciprocal().clamp(max=FP32.max)


def transformed(x: torch.Tensor) -> torch.Tensor:
    """Multiply each BLOCK columns of x [rows, columns] by the orthogonal matrix `diag(signs) @
    Hadamard / 4` in FP32; a bf16 x gives numbers of bf16, rounded once. Pads columns with zeros.
    Returns FP32."""
    x = F.pad(x, (0, -x.shape[1] % BLOCK))
    index = torch.arange(BLOCK, device=x.device)
    common = index.unsqueeze(1) & index  # Sylvester's matrix has -1 at odd numbers of common bits
    odd = common ^ common >> 1 ^ common >> 2 ^ common >> 3
    negative = (odd ^ (torch.full_like(index, NEGATIVE) >> index).unsqueeze(1)) & 1
    matrix = 0.25 - 0.5 * negative.float()
    with torch.autocast(x.device.type, enabled=False):
        product = torch.mm(x.reshape(-1, BLOCK).float(), matrix).view(x.shape)
    if x.dtype != torch.bfloat16:
        return product
    bits = product.view(torch.int32)  # on bits: Inductor leaves out a cast to bf16 and back
    return (bits + (0x7FFF + (bits >> 16 & 1)) & -0x10000).view(torch.float32)


def dequantized(q: Quantized, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes times block scales, exact in bf16 and FP32: [rows, columns] of dtype; and the
    tensor scale, FP32, 0-dim."""
    scale, blocks = parts_of(q)
    return (unpacked(q.codes).unflatten(1, (-1, BLOCK)) * blocks.float().unsqueeze(2)).flatten(
        1
    ).to(dtype), scale


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes in the four low bits, uint8 [rows, even columns], two to a byte, the first in the
    low bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of packed codes, FP32 [rows, 2 * columns], signs of zeros included."""
    pairs = torch.arange(256, device=codes.device).to(torch.uint8)
    pairs = torch.stack([pairs & 15, pairs >> 4], -1)
    return F.embedding(codes.int(), decoded((pairs & 7) | (pairs & 8) << 4, E2M1)).flatten(1)


def parts_of(q: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor scale, FP32, 0-dim, and the scales of blocks, E4M3 [rows, blocks]."""
    tensor_scale, scales = split(q.scale_inv)
    return tensor_scale.squeeze(0), scales.view(len(q.codes), -1)


def split(scale_inv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor scale, FP32 [1], and the scales of blocks, E4M3, flat, from the bytes of
    scale_inv."""
    scales = scale_inv.narrow(0, HEADER, scale_inv.numel() - HEADER).view(E4M3.dtype)
    return scale_inv.narrow(0, 0, 4).view(torch.float32), scales
