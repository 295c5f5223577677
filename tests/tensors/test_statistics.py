"""Statistics of casts against element-by-element NumPy in FP64."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_backends.formats.formats import E4M3, E5M2, FP16, ROOT8
from fp8_backends.formats.scaling import MX, ROWS, SQUARES, VECTORS, scale_from_amax, tensor_amax
from fp8_backends.tensors import statistics
from fp8_backends.tensors.scaled_tensor import quantize
from fp8_backends.tensors.statistics import BINADES, SAMPLED, Cast, in_blocks, read, statistics_of

FORMATS = [E4M3, E5M2, FP16]


@pytest.mark.parametrize("scale", [1.0, math.nan, 0.0])
@pytest.mark.parametrize("value", [1.0, 0.0, math.nan, math.inf, -math.inf])
def test_non_finite_values_or_scales_are_reported(value, scale):
    values = torch.ones(4, 8)
    values[2, 3] = value
    (found,) = read([statistics_of(Cast(values, E4M3, tensor_amax(values), torch.tensor(scale)))])
    assert found.is_finite is (math.isfinite(value) and scale == 1.0)
    assert found.sqnr_db is None  # nor without an error


@pytest.mark.parametrize("blocks", [ROWS, SQUARES, VECTORS, MX])
def test_blocks_of_zeros_are_finite(blocks):
    values = torch.zeros(128, 256)
    values[:, 128:] = torch.randn(128, 128)
    for each in (values, values[:, :128]):
        assert read([statistics_of(in_blocks(each, E4M3, blocks))])[0].is_finite


@functools.cache
def grid(fmt):
    """Every magnitude of a format, from its definition."""
    steps = 2**fmt.mantissa_bits
    values = [mantissa * fmt.smallest for mantissa in range(steps)]
    exponent = fmt.min_exponent
    while values[-1] < fmt.max:
        values += [(1 + mantissa / steps) * 2.0**exponent for mantissa in range(steps)]
        exponent += 1
    return [value for value in values if value <= fmt.max]


def naive(x, scale, fmt):
    """Count element by element."""
    values, found = (
        grid(fmt),
        dict.fromkeys(("nonzero", "flushed", "saturated", "signal", "noise"), 0),
    )
    binades = [0] * BINADES
    top = math.frexp(fmt.max)[1] - 1
    for value, of_element in zip(x.flat, scale.flat, strict=True):
        scaled = abs(float(np.float32(value) * np.float32(of_element)))
        place = np.searchsorted(values, scaled)
        near = [index for index in (place - 1, place) if 0 <= index < len(values)]
        index = min(near, key=lambda each: (abs(values[each] - scaled), each % 2))
        found["nonzero"] += value != 0
        found["flushed"] += value != 0 and index == 0
        found["saturated"] += scaled > values[-1] + (values[-1] - values[-2]) / 2
        found["signal"] += float(value) ** 2
        found["noise"] += (abs(float(value)) - values[index] / float(of_element)) ** 2
        if value:
            binades[min(max(top + 2 - math.frexp(scaled)[1], 0), BINADES - 1)] += 1
    return found, binades


def agrees(cast, scale):
    (ours,), (found, binades) = (
        read([statistics_of(cast)]),
        naive(cast.values.double().numpy(), scale, cast.fmt),
    )
    assert (ours.nonzero, ours.flushed, ours.saturated) == tuple(
        found[n] for n in ("nonzero", "flushed", "saturated")
    )
    assert ours.binades == binades and ours.amax == cast.values.abs().max()
    assert ours.signal == pytest.approx(found["signal"], rel=1e-6)
    # rounded FP32 numbers: the inverse of the scale, the value after the cast and its distance, to
    # 2**-24
    rounding = 2.0**-22 * math.sqrt(found["signal"])
    assert abs(math.sqrt(ours.noise) - math.sqrt(found["noise"])) <= rounding


def values(seed, rows, columns, spread, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(spread * torch.randn(rows, columns, generator=generator))
    return x.masked_fill_(torch.rand(rows, columns, generator=generator) < 0.1, 0.0).to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    shape=st.tuples(st.integers(1, 7), st.integers(1, 9)),
    spread=st.sampled_from([0, 4, 12]),
    exponent=st.integers(-12, 20),
    fmt=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_counts_match_numpy(seed, shape, spread, exponent, fmt, dtype):
    """Include fitting, clipping and flushing scales, and powers of two with exact ties."""
    x = values(seed, *shape, spread, dtype)
    amax = tensor_amax(x)
    for scale in (scale_from_amax(amax, fmt), torch.tensor(2.0**exponent)):
        agrees(Cast(x, fmt, amax, scale), scale.expand(x.shape).numpy())


@pytest.mark.parametrize(
    "blocks", [ROWS, VECTORS, SQUARES, MX], ids=["rows", "vectors", "squares", "mx"]
)
def test_each_block_has_its_own_scale(blocks):
    x = values(1, 5, 140, 2)
    x[3] = 0
    scales = blocks.scale(blocks.amax(x), E4M3)
    of_elements = scales.repeat_interleave(blocks.rows, 0).repeat_interleave(
        blocks.columns or 140, 1
    )[:5, :140]
    agrees(in_blocks(x, E4M3, blocks), of_elements.numpy())
    (counted,) = read([statistics_of(in_blocks(x, E4M3, blocks))])
    held = scales[blocks.amax(x) > 0]
    assert (counted.lowest_scale, counted.highest_scale) == (held.min(), held.max())


@pytest.mark.parametrize("blocks, columns", [(None, 512), (VECTORS, 512), (SQUARES, 300)])
def test_large_tensor_is_sampled_except_its_amax(blocks, columns):
    x = torch.randn(1100, columns, generator=torch.Generator().manual_seed(0))
    x[1, 1] = 100.0
    cast = (
        Cast(x, E5M2, tensor_amax(x), torch.tensor(2.0))
        if blocks is None
        else in_blocks(x, E5M2, blocks)
    )
    (found,) = read([statistics_of(cast)])
    assert found.elements == x.numel() and found.amax == 100.0
    assert SAMPLED // 2 < found.counted <= SAMPLED and sum(found.binades) == found.counted
    whole = statistics_of(cast._replace(values=x.clone()))
    assert whole.counted == found.counted  # the same rows each time


def test_sampled_rows_do_not_align_with_sequences():
    """One in 64 of 4096 tokens is the first of its sequence; a plain stride of 64 rows would see no
    others."""
    position = torch.arange(4096).remainder(64).float().unsqueeze(1).expand(-1, 1024)
    chosen = statistics._sampled(position, 1)[:, 0]
    assert len(chosen) == 64 and (chosen == 0).sum() <= 2 and len(chosen.unique()) > 32


def test_statistics_of_two_batches_combine():
    x, y = values(3, 4, 8, 4), values(4, 6, 8, 4)
    both, scale = torch.cat([x, y]), torch.tensor(3.0)
    parts = [statistics_of(Cast(each, E4M3, tensor_amax(each), scale)) for each in (x, y, both)]
    (merged, together) = read([parts[0].merged(parts[1]), parts[2]])
    assert merged._replace(signal=0, noise=0) == together._replace(signal=0, noise=0)
    assert merged.noise == pytest.approx(together.noise, rel=1e-9)


def test_stored_codes_count_zeros_and_largest_values():
    codes = torch.tensor([[0.0, 448.0, -448.0, 1.0], [0.0, 0.0, 2.0**-9, 3.0]]).to(E4M3.dtype)
    (found,) = read(
        [statistics.statistics_of_codes(codes, torch.tensor(0.5), torch.tensor(224.0), E4M3)]
    )
    assert (found.flushed_share, found.saturated_share) == (3 / 8, 2 / 8)
    assert found.sqnr_db is None and (found.lowest_scale, found.highest_scale) == (2.0, 2.0)
    exponents = {
        found.fmt.max_exponent + 1 - i: count for i, count in enumerate(found.binades) if count
    }
    assert exponents == {8: 2, 1: 1, 0: 1, -9: 1}


def test_statistics_of_stored_roots_describe_roots():
    roots = torch.tensor([0.0, 0.0, 3.0, 0.25, 1.5, 1.0, 0.5, 0.75]) * 2.0**-12
    stored = quantize(roots.square(), ROOT8.dtype, block_size=4)
    counted = statistics.statistics_of_codes(stored.codes, stored.scale_inv, roots.max(), ROOT8)
    (found,) = read([counted])
    assert (found.flushed, found.saturated, found.amax) == (2, 0, 3 * 2.0**-12)
    assert torch.equal(
        torch.tensor([found.lowest_scale, found.highest_scale]), torch.tensor([2.0**19, 2.0**20])
    )
    exponents = {
        found.fmt.max_exponent + 1 - i: count for i, count in enumerate(found.binades) if count
    }
    assert exponents == {8: 3, 7: 2, 5: 1}
