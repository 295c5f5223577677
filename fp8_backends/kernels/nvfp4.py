"""Round to nearest in four bits, as checkpoints store them: E2M1 codes, and NVFP4's two levels of
scales, an E4M3 scale for 16 values of a row and an FP32 scale for the tensor.

Codes and scales equal TransformerEngine's reference (custom_recipes/reference_nvfp4.py) and
TorchAO's (nvfp4_training/nvfp4_reference.py) to the bit.
"""

import torch
import torch.nn.functional as F

from ..formats.formats import E2M1, E4M3, FP32
from ..formats.scaling import NVFP4
from .rounding import codes_of, decoded


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize x [rows, columns] in blocks of 16 values of a row.

    As in TransformerEngine's core_nvfp4.cuh, a block scale of 0 flushes its block.

    Returns:
        codes: uint8 [rows, columns / 2], see `packed`, padded with zeros to whole blocks.
        block scales: E4M3 [rows, blocks].
        tensor scale: FP32 [1], the factor into the range of E4M3 times E2M1, `448 * 6 / amax`, at
            most the largest FP32; 1 for an amax of 0 or inf. A value is `code * block scale /
            tensor scale`.
    """
    tiles = NVFP4.tiles(x).contiguous()  # [rows, 1, blocks, 16]
    amaxes = tiles.abs().amax((1, 3)).float()
    amax = amaxes.amax()
    scale = (torch.full_like(amax, E4M3.max * E2M1.max) / amax).clamp(max=FP32.max)
    scale = torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)
    block_scales = amaxes * (scale * torch.full_like(scale, 1 / E2M1.max))
    block_scales = block_scales.clamp(max=E4M3.max).to(E4M3.dtype)
    factors = (block_scales.float() * scale.reciprocal()).reciprocal().clamp(max=FP32.max)
    values = tiles.float() * factors.unsqueeze(1).unsqueeze(3)
    return packed(cast(values.view(len(x), -1))), block_scales, scale.reshape(1)


def cast(values: torch.Tensor) -> torch.Tensor:
    """Round scaled FP32 values to nearest, ties to even, saturating: codes in the four low bits,
    uint8. NaN becomes 7, as in NVIDIA's cuda_fp4.hpp."""
    codes = codes_of(values, E2M1)[0]
    return (codes & 7) | torch.where(values == values, codes >> 4 & 8, torch.zeros_like(codes))


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes in the four low bits, uint8 [rows, even columns], two to a byte, the first in the
    low bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of packed codes, FP32 [rows, 2 * columns], signs of zeros included."""
    pairs = torch.arange(256, device=codes.device).to(torch.uint8)
    pairs = torch.stack([pairs & 15, pairs >> 4], -1)
    return F.embedding(codes.int(), decoded((pairs & 7) | (pairs & 8) << 4, E2M1)).flatten(1)
