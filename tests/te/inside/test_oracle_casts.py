"""Codes and scales of rules without state: `fp8_backends.formats.scaling` against
TransformerEngine's quantizers.

The quantizers cast with the stand-in's kernels, transcribed from the source by another hand than
`scaling`.
"""

from __future__ import annotations

import math

import pytest
import torch
from standin import compute_capability
from transformer_engine.pytorch import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
)

from fp8_backends.formats import scaling
from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.kernels.quantize import quantize

TE_DTYPES = {E4M3: DType.kFloat8E4M3, E5M2: DType.kFloat8E5M2}


def codes(q: scaling.Quantized) -> torch.Tensor:
    return q.codes.view(torch.uint8)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_current_scaling_of_non_finite_values(special):
    """Codes are equal. An inf's scale_inv is 1 in TransformerEngine and NaN here, to make it
    visible."""
    x = torch.tensor([[1.0, special, -3.0, 0.5]])
    ours, kernel = (
        quantize(x, E5M2).along_columns(),
        Float8CurrentScalingQuantizer(DType.kFloat8E5M2, "cpu")(x),
    )
    assert torch.equal(codes(ours), kernel._data)
    if math.isnan(special):
        assert ours.scale_inv == kernel._scale_inv
    else:
        assert ours.scale_inv.isnan() and kernel._scale_inv == 1


def matrices(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Blocks of very different sizes; some hold zeros only, some overflow the scale, some hold the
    largest value."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10 ** torch.randint(
        -6, 6, (1, shape[1]), generator=generator
    )
    x[:, :32], x[:40], x[40:42, 200:] = 0.0, x[:40] * 1e-30, 1e-40
    x[50, 100], x[51, 101] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(256, 272), (303, 300)], ids=str)
@pytest.mark.parametrize("dimensions, blocks", [(1, scaling.VECTORS), (2, scaling.SQUARES)])
@pytest.mark.parametrize("fmt", TE_DTYPES, ids=lambda fmt: fmt.name)
def test_blocks_match_transformer_engine(fmt, dimensions, blocks, shape, dtype):
    x = matrices(shape, dtype)
    quantizer = Float8BlockQuantizer(
        TE_DTYPES[fmt], rowwise=True, columnwise=True, block_scaling_dim=dimensions
    )
    theirs = quantizer(x)
    for matrix, data, scale_inv in (
        (x, theirs._rowwise_data, theirs._rowwise_scale_inv),
        (x.T, theirs._columnwise_data, theirs._columnwise_scale_inv),
    ):
        ours = blocks.quantize(matrix, fmt)
        # kept in the order of the GPU's product, and padded
        scale_inv = scale_inv.T if dimensions == 1 else scale_inv
        assert torch.equal(codes(ours), data)
        assert torch.equal(
            ours.scale_inv, scale_inv[: ours.scale_inv.shape[0], : ours.scale_inv.shape[1]]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", TE_DTYPES, ids=lambda fmt: fmt.name)
def test_mxfp8_matches_transformer_engine(fmt, dtype):
    x = matrices((64, 288), dtype)
    with compute_capability(10, 0):
        theirs = MXFP8Quantizer(TE_DTYPES[fmt])(x)
    rows, columns = scaling.MX.quantize(x, fmt), scaling.MX.quantize(x.T, fmt)
    assert torch.equal(codes(rows), theirs._rowwise_data) and torch.equal(
        codes(columns).T, theirs._columnwise_data
    )
    assert torch.equal(rows.scale_inv, theirs._rowwise_scale_inv[:64, :9])
    assert torch.equal(columns.scale_inv.T, theirs._columnwise_scale_inv[:2, :288])
