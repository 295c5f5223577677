"""Compare casting kernels with the eager reference, bitwise: codes, transposed codes, scales and
amaxes."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from fp8_backends.formats import scaling
from fp8_backends.formats.formats import E4M3, E5M2, saturating_cast
from fp8_backends.formats.scaling import (
    DYNAMIC,
    JUST_IN_TIME,
    MX,
    POWER_OF_TWO,
    ROWS,
    SQUARES,
    VECTORS,
)
from fp8_backends.kernels import devices, triton_blocks, triton_matrix
from fp8_backends.kernels.layouts import Layouts

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
BLOCKS = pytest.mark.parametrize(
    "blocks", [ROWS, VECTORS, SQUARES, MX], ids=["rows", "vectors", "squares", "mx"]
)


def matrix(
    rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, low: int = -6, high: int = 2
) -> torch.Tensor:
    """Magnitudes from 10**low on the left to 10**high on the right, NaN of both signs, a row and a
    column of zeros."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(low, high, columns)
    x[rows // 2], x[:, columns // 2], x[0, 0], x[-1, 0] = 0, -0.0, torch.nan, -torch.nan
    return x.to(dtype)


def expected_of(
    x: torch.Tensor, fmt, scale=None, how: str = DYNAMIC, state: torch.Tensor | None = None
) -> Layouts:
    """Return the result of plain PyTorch operations."""
    amax = scaling.tensor_amax(scaling.without_nan(x) if how == DYNAMIC else x)
    if scale is None:
        scale = {
            DYNAMIC: lambda: scaling.scale_from_amax(amax, fmt),
            POWER_OF_TWO: lambda: scaling.power_of_two_scale(amax, fmt),
            JUST_IN_TIME: lambda: scaling.window_scale(state.unsqueeze(0), 0, amax, fmt),
        }[how]()
    codes, scale_inv = saturating_cast(x.float() * scale, fmt), scaling.scale_inv_of(scale, amax)
    return Layouts(codes, scale_inv, codes.t().contiguous(), scale_inv, amax)


def in_blocks(x: torch.Tensor, blocks: scaling.Blocks, fmt) -> Layouts:
    return Layouts(*blocks.quantize(x, fmt), *blocks.quantize(x.t(), fmt))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Any NaN of a scale or an amax is as good as another."""
    if tensor.dtype == torch.float32:
        return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32)
    return tensor.view(torch.uint8)


def assert_same(found: Layouts, expected: Layouts) -> None:
    for name, ours, theirs in zip(Layouts._fields, found, expected, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
            assert ours.is_contiguous() and torch.equal(bits(ours), bits(theirs)), name


@FORMATS
@DTYPES
def test_dynamic_cast_matches_reference(fmt, dtype):
    x = matrix(70, 140, dtype)
    assert_same(triton_matrix.quantize(x, fmt), expected_of(x, fmt))


def test_given_scale_takes_one_pass(monkeypatch):
    monkeypatch.setattr(triton_matrix, "amax_kernel", None)
    x, scale = matrix(70, 140), torch.tensor(3.7)
    found = triton_matrix.quantize(x, E5M2, scale)
    assert_same(found, expected_of(x, E5M2, scale))
    assert (found.codes.float().abs().nan_to_num() < E5M2.max).all()
    # saturates
    assert_same(triton_matrix.quantize(x * 1000, E4M3, scale), expected_of(x * 1000, E4M3, scale))


@pytest.mark.parametrize("scale", [None, torch.tensor(0.5)], ids=["dynamic", "given"])
def test_one_inf_propagates_to_the_scale(scale):
    """Place it in any tile, the last of four included."""
    x = matrix(70, 140)
    x[-1, -1] = -torch.inf
    found = triton_matrix.quantize(x, E4M3, scale)
    assert_same(found, expected_of(x, E4M3, scale))
    assert (
        found.scale_inv.isnan() and found.codes[-1, -1] == -448 and found.transposed[-1, -1] == -448
    )


@pytest.mark.parametrize("rule", [POWER_OF_TWO, JUST_IN_TIME])
@pytest.mark.parametrize("with_nan", [False, True])
def test_level_rules_match_reference(rule, with_nan):
    """Use powers of two, and the window's own scale while it is warm. NaN counts."""
    x = matrix(70, 140) if with_nan else matrix(70, 140).nan_to_num()
    state = scaling.new_window_state()[0]
    state.view(torch.float32)[scaling.SCALE] = 64.0
    for rolls in (scaling.WINDOW - 1, scaling.WINDOW):
        state[scaling.ROLLS] = rolls
        before = state.clone()
        found = triton_matrix.quantize(x, E4M3, how=rule, window_state=state)
        assert_same(found, expected_of(x, E4M3, how=rule, state=state))
        assert found.amax.isnan() == found.scale_inv.isnan() == with_nan and torch.equal(
            state, before
        )


@pytest.mark.parametrize("rule", ["given", DYNAMIC, POWER_OF_TWO])
def test_cast_records_the_amax(rule):
    """Record over a hundred programs, in place, without another launch. The rule ignores or keeps
    NaN."""
    scale = torch.tensor(4.0) if rule == "given" else None
    named = {"how": DYNAMIC if rule == "given" else rule}
    state, plain = scaling.new_delayed_state(3), scaling.new_delayed_state(3)
    keep_nan = rule == POWER_OF_TWO
    for factor, odd in (
        (2.0, 1.0),
        (1.0, torch.nan),
        (8.0, 1.0),
        (1.0, torch.inf),
        (1.0, torch.nan),
    ):
        x = matrix(70, 140).nan_to_num() * factor
        x[1, 1] = odd
        newest = state.select(0, scaling.WEIGHT).select(0, scaling.HISTORY)
        found = triton_matrix.quantize(x, E4M3, scale, **named, record=newest)
        assert_same(found, expected_of(x, E4M3, scale, **named))
        scaling.record_amax(plain, scaling.WEIGHT, found.amax, keep_nan)
        assert torch.equal(bits(state.view(torch.float32)), bits(plain.view(torch.float32))), odd


def test_result_buffers_are_zeroed_in_batches(monkeypatch):
    """Use each result once, in any autograd mode."""
    made, zeroed = [], triton_matrix._zeroed_results
    monkeypatch.setattr(
        triton_matrix, "_zeroed_results", lambda *of: made.append(of) or zeroed(*of)
    )
    monkeypatch.setattr(triton_matrix, "_thread", threading.local())
    monkeypatch.setattr(triton_matrix, "_RESULTS", 8)
    x, one = matrix(2, 3).nan_to_num(), torch.ones(())
    with torch.inference_mode():
        found = [triton_matrix.quantize(x, E4M3, one)]
    found += [triton_matrix.quantize(x * i, E4M3, one) for i in range(2, 14)]
    assert len(made) == 2 and not any(each.scale_inv.is_inference() for each in found)
    assert [each.amax.item() for each in found] == [
        (x * i).abs().max().item() for i in range(1, 14)
    ]
    found[0].scale_inv.mul_(1.0)
    # of another result waiting for backward
    assert [each.scale_inv._version for each in found[:2]] == [1, 0]
    assert all(each.scale_inv == 1 and each.scale_inv.data_ptr() % 16 == 0 for each in found)
    # a CUDA graph, which would use them again
    monkeypatch.setattr(devices, "stream_of", lambda tensor: None)
    triton_matrix.quantize(x, E4M3, one)
    assert len(made) == 3 and made[-1][1] == 1


def test_scaled_fp16_weight_is_cast():
    """Take scale and amax of the values."""
    stored = torch.tensor(2.0**-9)
    data = matrix(70, 140, torch.float16)
    values = data.float() * stored
    for rule, scale in ((DYNAMIC, None), (DYNAMIC, torch.tensor(96.0)), (POWER_OF_TWO, None)):
        found = triton_matrix.quantize(data, E4M3, scale, how=rule, stored_scale_inv=stored)
        assert_same(found, expected_of(values, E4M3, scale, rule))
        # as the optimizer's step leaves it
        amax = expected_of(values, E4M3, scale, rule).amax / stored
        found = triton_matrix.quantize(
            data, E4M3, scale, how=rule, stored_scale_inv=stored, amax=amax
        )
        assert_same(found, expected_of(values, E4M3, scale, rule))
    for blocks in (ROWS, VECTORS, SQUARES, MX):
        found = triton_blocks.quantize_blocks(data, blocks, E4M3, stored_scale_inv=stored)
        assert_same(found, in_blocks(values, blocks, E4M3))
    found = triton_blocks.quantize_blocks(data, ROWS, E4M3, columns=False, stored_scale_inv=stored)
    assert_same(found, Layouts(*ROWS.quantize(values, E4M3)))


@pytest.mark.parametrize("rows, columns", [(True, False), (False, True)])
@pytest.mark.parametrize("x", [matrix(70, 140), matrix(140, 70).t()], ids=["by rows", "by columns"])
def test_single_layout_is_written(x, rows, columns):
    kept = slice(0, 2) if rows else slice(2, 4)

    def alone(made: Layouts) -> Layouts:
        fields = [None] * 4
        fields[kept] = made[kept]
        return Layouts(*fields, made.amax)

    assert_same(triton_matrix.quantize(x, E4M3, None, rows, columns), alone(expected_of(x, E4M3)))
    for blocks in (ROWS, VECTORS, SQUARES, MX):
        found = triton_blocks.quantize_blocks(x, blocks, E4M3, rows, columns)
        assert_same(found, alone(in_blocks(x, blocks, E4M3)))


STRIDES = {
    "transposed": lambda x: x.t(),
    "gaps between the rows": lambda x: x[:, 5:60],
    "gaps in the rows": lambda x: x[::3, ::2],
    "one row for all": lambda x: x[1:2].expand(40, -1),
    "a column": lambda x: x[:, 3:4],
    "a row": lambda x: x[3:4],
}


@pytest.mark.parametrize("view", STRIDES)
def test_strided_operands_are_cast(view):
    x = STRIDES[view](matrix(50, 70))
    assert_same(triton_matrix.quantize(x, E4M3), expected_of(x, E4M3))
    assert_same(triton_blocks.quantize_blocks(x, ROWS, E4M3), in_blocks(x, ROWS, E4M3))
    assert_same(triton_blocks.quantize_blocks(x, MX, E4M3), in_blocks(x, MX, E4M3))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
def test_empty_operand_is_cast(shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    for scale in (None, torch.tensor(4.0)):
        found = triton_matrix.quantize(x, E4M3, scale)
        assert found.codes.shape == shape and found.transposed.shape == shape[::-1]
        assert found.amax == 0 and found.scale_inv == (1.0 if scale is None else 0.25)
    for blocks in (VECTORS, SQUARES, MX):
        assert_same(triton_blocks.quantize_blocks(x, blocks, E4M3), in_blocks(x, blocks, E4M3))
    found = triton_blocks.quantize_blocks(x, ROWS, E4M3)
    assert found.scale_inv.shape == (shape[0], 1) and found.transposed_scale_inv.shape == (
        shape[1],
        1,
    )
    assert (found.scale_inv == 1).all() and (found.transposed_scale_inv == 1).all()


@pytest.mark.parametrize("keep_nan", [False, True])
def test_amax_of_many_tiles(keep_nan, monkeypatch):
    """Use more tiles than programs: each program takes every second one. With and without gaps
    between the rows."""
    monkeypatch.setattr(triton_matrix, "AMAX_PROGRAMS", 2)
    for x in (torch.randn(5, 8192, dtype=torch.bfloat16), torch.randn(40, 1025)[:, 1:]):
        for i, j in ((0, 0), (x.shape[0] // 2, 700), (-1, -1)):
            x[i, j] = 3.0 * x.abs().max()
            assert torch.equal(triton_matrix.amax(x, keep_nan), x.abs().max().float())
        x[-1, 0] = torch.nan
        found = triton_matrix.amax(x, keep_nan)
        assert found.isnan() if keep_nan else found == scaling.without_nan(x).abs().max()


@BLOCKS
@pytest.mark.parametrize(
    "fmt, dtype",
    [(E4M3, torch.bfloat16), (E4M3, torch.float16), (E5M2, torch.float32)],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_block_casts_match_reference(blocks, fmt, dtype):
    """Cut squares at the edges; use amaxes from the smallest numbers to inf."""
    x = matrix(130, 150, dtype, low=-44, high=38)
    x[3, 3] = torch.inf
    x[7, :32] = fmt.max * 2.0**-127  # mxfp8's smallest scale, without anything to round up
    assert_same(triton_blocks.quantize_blocks(x, blocks, fmt), in_blocks(x, blocks, fmt))


PARTS = {
    "numbers": [1.0, -3.0],
    "zeros": [0.0, -0.0],
    "NaN": [torch.nan, -torch.nan],
    "numbers and NaN": [2.0, -torch.nan, torch.nan],
    "inf and NaN": [-torch.inf, torch.nan],
    "zeros and NaN": [-0.0, torch.nan],
    "subnormal numbers and NaN": [1e-40, -torch.nan],
}


@settings(max_examples=15)
@given(some.lists(some.sampled_from(sorted(PARTS)), min_size=6, max_size=6))
def test_maxima_leave_nan_out(parts):
    """Fill two by three parts of a matrix, some whole blocks and rows, others cut."""
    x, names = torch.empty(64, 140), iter(parts)
    for rows in (slice(0, 32), slice(32, 64)):
        for columns in (slice(0, 32), slice(32, 128), slice(128, 140)):
            part, values = x[rows, columns], torch.tensor(PARTS[next(names)])
            part.copy_(values.repeat(-(-part.numel() // len(values)))[: part.numel()].view_as(part))
    for blocks in (ROWS, VECTORS, SQUARES, MX):
        found = triton_blocks.quantize_blocks(x, blocks, E4M3)
        assert_same(found, in_blocks(x, blocks, E4M3))
    found = triton_blocks.quantize_blocks(x, ROWS, E4M3, columns=False)
    assert_same(found, Layouts(*ROWS.quantize(x, E4M3)))
    for scale in (None, torch.tensor(2.0)):
        expected = expected_of(x, E4M3, scale)
        expected = expected._replace(amax=expected.amax.abs())  # `aminmax` of zeros is -0.0
        assert_same(triton_matrix.quantize(x, E4M3, scale), expected)


def test_rows_of_more_than_one_tile():
    """One program reads them twice, if columns are not requested."""
    x = matrix(5, 5000).flip(1)  # the largest first
    found = triton_blocks.quantize_blocks(x, ROWS, E4M3, columns=False)
    assert_same(found, Layouts(*ROWS.quantize(x, E4M3)))


def test_rows_and_columns_of_more_than_one_strip():
    x = matrix(70, 1100).flip(1)
    assert_same(triton_blocks.quantize_blocks(x, ROWS, E4M3), in_blocks(x, ROWS, E4M3))
    found = triton_blocks.quantize_blocks(x, ROWS, E4M3, rows=False)
    assert_same(found, Layouts(None, None, *ROWS.quantize(x.t(), E4M3)))
