"""Block scaling and MXFP8: codes and scales against a block-by-block reference in Python."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_backends.formats import scaling
from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.formats.scaling import MX, ROWS, SQUARES, VECTORS

FORMATS = [E4M3, E5M2]
BLOCKS = {"vectors": VECTORS, "squares": SQUARES, "mx": MX}
SHAPES = [(256, 272), (303, 300), (128, 128), (129, 31), (1, 1), (3, 257)]
"""The odd sizes of TransformerEngine's own tests, whole blocks, and edges of one row or column."""


def bits(x):
    return x.view(torch.uint8)


def spread(shape, dtype=torch.float32):
    """Return normal values with blocks of very different sizes: one of zeros, one with equal
    values, a few tiny ones."""
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator) * torch.exp(
        8 * torch.randn(shape[0], 1, generator=generator)
    )
    x[:, : shape[1] // 3] *= 2.0**-60
    x[: shape[0] // 2, : shape[1] // 2] = 0
    x[-1, :] = 3.5
    return x.to(dtype)


def assert_same(ours, expected):
    """The same bits, of codes and of scales; a NaN may have any."""
    for one, other in zip(ours, expected, strict=True):
        nan = torch.isnan(other.float())
        assert one.dtype == other.dtype and torch.equal(torch.isnan(one.float()), nan)
        assert torch.equal(one.float()[~nan], other.float()[~nan])
        assert torch.equal(torch.signbit(one.float())[~nan], torch.signbit(other.float())[~nan])


def equal_to_reference(x, blocks, fmt):
    ours = blocks.quantize(x, fmt)
    assert ours.codes.is_contiguous()
    assert_same(ours, reference.quantize_blocks(x, fmt, blocks.rows, blocks.columns))


@pytest.mark.nightly
@pytest.mark.parametrize("fmt, dtype", [(E4M3, torch.bfloat16), (E5M2, torch.float32)])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_codes_and_scales_match_reference_bitwise(blocks, fmt, dtype):
    for shape in SHAPES:
        x = spread(shape, dtype)
        equal_to_reference(x, blocks, fmt)
        # the columns, from high precision: no transpose of the codes
        equal_to_reference(x.t(), blocks, fmt)


EDGES = [
    0.0,
    math.inf,
    math.nan,
    2.0**-149,
    2.0**-127,
    2.0**-126,
    448.0,
    57344.0,
    3.5,
    1.75,
    1.7500001,
    3.4028234e38,
]
VALUE = st.one_of(
    st.floats(width=32), st.sampled_from([sign * edge for edge in EDGES for sign in (1, -1)])
)


@pytest.mark.nightly
@pytest.mark.parametrize("fmt", FORMATS)
@given(values=st.lists(VALUE, min_size=1, max_size=40))
@settings(max_examples=150)
def test_every_value_is_cast_like_reference(fmt, values):
    for blocks in BLOCKS.values():
        equal_to_reference(torch.tensor([values], dtype=torch.float32), blocks, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_scales_around_every_power_of_two(fmt):
    """An amax at, just below and just above every power of two, and the format's maximum times it,
    down to the smallest subnormal number."""
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    near = torch.cat([powers, powers * (fmt.max / 2.0 ** math.frexp(fmt.max)[1])]).float()
    amax = torch.cat(
        [near, near.nextafter(torch.tensor(math.inf)), near.nextafter(torch.tensor(0.0))]
    ).unsqueeze(1)
    scale = scaling.block_scale(amax, fmt)
    assert torch.equal(
        scale, torch.tensor([[reference.block_scale(a, fmt)[0]] for a in amax.flatten().tolist()])
    )
    exponents = torch.tensor(
        [[reference.mx_exponent(a, fmt)] for a in amax.flatten().tolist()], dtype=torch.uint8
    )
    scale = scaling.mx_scale(amax, fmt)
    stored = scaling.e8m0_bits(scale, amax)
    assert torch.equal(stored, exponents) and torch.equal(scaling.e8m0_values(stored), 1 / scale)


def test_e8m0_values_match_pytorch():
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    ours, torchs = scaling.e8m0_values(every), every.view(torch.float8_e8m0fnu).float()
    assert (
        torch.equal(ours[:255], torchs[:255]) and math.isnan(ours[255]) and math.isnan(torchs[255])
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_the_transpose_of_squares_is_exact(shape):
    x = spread(shape)
    q, transposed = SQUARES.quantize(x, E4M3), SQUARES.quantize(x.t(), E4M3)
    assert torch.equal(bits(q.codes.t().contiguous()), bits(transposed.codes))
    assert torch.equal(q.scale_inv.t(), transposed.scale_inv)


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_and_infs_in_a_block(fmt):
    x = torch.ones(2, 256)
    x[0, :128] = 0
    x[1, 3] = -math.inf
    codes, scale_inv = VECTORS.quantize(x, fmt)
    assert scale_inv[0, 0] == 1 and not codes[0, :128].float().any()
    assert codes[1, 3].float() == -fmt.max and codes[1, 4].float() == 1, (
        "cast with the scale 1, as TransformerEngine does"
    )
    assert torch.isnan(scale_inv).tolist() == [[False, False], [True, False]], (
        "but it shows, in this block alone"
    )
    codes, stored = MX.quantize(x, fmt)
    assert stored[0, 0] == 0 and stored[1, 0] == 254
    assert MX.dequantize(scaling.Quantized(codes, stored), torch.bfloat16)[1, 3] == -math.inf


def test_nan_stays_in_place_and_out_of_scales():
    x = torch.full((4, 256), 448.0)
    x[1, 2] = math.nan
    for blocks in (VECTORS, SQUARES, MX, ROWS):
        q = blocks.quantize(x, E4M3)
        assert torch.isnan(q.codes.float()).nonzero().tolist() == [[1, 2]]
        assert (blocks.dequantize(q, torch.float32)[~torch.isnan(x)] == 448).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_power_of_two_scales_are_exact_when_codes_restore_layer(blocks, fmt, dtype):
    x = spread((303, 300)).clamp(min=-(2.0**100), max=2.0**100)
    q = blocks.quantize(x, fmt)
    exact = reference.dequantize_blocks(*q, blocks.rows, blocks.columns)
    assert torch.equal(blocks.dequantize(q, dtype).float(), exact)


@pytest.mark.nightly
def test_compiled_codes_and_scales_match_eager():
    def everything(x):
        return [blocks.quantize(x, E4M3) for blocks in (ROWS, VECTORS, SQUARES, MX)]

    x = spread((131, 200), torch.bfloat16)
    x[5, 7], x[70, 150] = math.nan, math.inf
    for ours, eager in zip(
        torch.compile(everything, fullgraph=True)(x), everything(x), strict=True
    ):
        assert_same(ours, eager)
