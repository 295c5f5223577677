"""Casts, scales and the delayed rule against their plain references, over generated values."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_backends.formats import scaling
from fp8_backends.formats.formats import E4M3, E5M2, saturating_cast
from fp8_backends.formats.formats import FORMATS as TABLE
from fp8_backends.kernels.quantize import quantize

FORMATS = [E4M3, E5M2]
QUANTIZERS = {
    "one scale": lambda x, fmt: quantize(x, fmt).along_columns(),
    "rowwise": scaling.ROWS.quantize,
}
FP32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def bits(x):
    return x.view(torch.uint8)


def test_format_table_matches_pytorch():
    """Except roots, plain bytes in PyTorch."""
    roots = TABLE[torch.uint8]
    assert (roots.max, roots.smallest_normal, roots.smallest) == (496.0, 2.0**-6, 2.0**-10)
    for dtype, fmt in TABLE.items():
        if fmt is roots:
            continue
        info = torch.finfo(dtype)
        assert (fmt.max, fmt.smallest_normal) == (info.max, info.smallest_normal)
        assert (
            2.0**-fmt.mantissa_bits == info.eps and fmt.smallest == info.smallest_normal * info.eps
        )
        assert fmt.max_bits == torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32)


@pytest.mark.parametrize("fmt", FORMATS)
@given(values=st.lists(FP32, min_size=1, max_size=64))
@settings(max_examples=150)
def test_cast_rounds_to_nearest_even_and_saturates(fmt, values):
    values = torch.tensor(values, dtype=torch.float32)
    ours, expected = saturating_cast(values, fmt), reference.cast(values, fmt)
    nan = torch.isnan(values)
    assert torch.equal(torch.isnan(ours.float()), nan)
    assert torch.equal(bits(ours)[~nan], bits(expected)[~nan])


@pytest.mark.parametrize("fmt", FORMATS)
def test_cast_rounds_every_midpoint_to_even(fmt):
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(fmt.dtype).float()
    table = codes[torch.isfinite(codes) & (codes <= fmt.max)]
    midpoints = (table[1:] + table[:-1]) / 2
    assert torch.equal(bits(saturating_cast(midpoints, fmt)), bits(reference.cast(midpoints, fmt)))
    assert (bits(saturating_cast(midpoints, fmt)) % 2 == 0).all()


@pytest.mark.parametrize("fmt", FORMATS)
@given(
    amax=st.one_of(
        FINITE.map(abs), st.sampled_from([0.0, math.inf, math.nan, 1e-45, 1e-38, 3.4e38])
    )
)
@settings(max_examples=200)
def test_scale_matches_reference_bitwise(fmt, amax):
    ours = scaling.scale_from_amax(torch.tensor(amax), fmt)
    assert ours.item() == reference.scale(torch.tensor(amax).item(), fmt).item()
    assert math.isfinite(ours.item()) and ours.item() > 0


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("fmt", FORMATS)
@given(data=st.data())
@settings(max_examples=60)
def test_quantize_matches_reference_bitwise(fmt, kind, data):
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    values = data.draw(st.lists(FINITE, min_size=rows * columns, max_size=rows * columns))
    x = torch.tensor(values, dtype=torch.float32).reshape(rows, columns)
    codes, scale_inv = QUANTIZERS[kind](x, fmt)
    expected_codes, expected_scale_inv = reference.quantize(x, fmt, rowwise=kind == "rowwise")
    assert torch.equal(bits(codes), bits(expected_codes)) and torch.equal(
        scale_inv, expected_scale_inv
    )
    assert codes.is_contiguous() and scale_inv.shape == ((rows, 1) if kind == "rowwise" else ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_values_of_two_bytes_are_scaled_in_fp32(fmt, dtype):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, expected = quantize(x, fmt), reference.quantize(x.float(), fmt)
    assert torch.equal(bits(ours.codes), bits(expected[0]))
    assert torch.equal(ours.scale_inv, expected[1])


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_inf_propagates_and_leaves_scale_finite(bad):
    x = torch.ones(4, 4)
    x[1, 2] = bad
    q = quantize(x, E4M3)
    # so every product with it is NaN: a loss scaler sees the overflow
    assert math.isnan(q.scale_inv.item())
    row = scaling.ROWS.quantize(x, E4M3)
    assert torch.isnan(row.scale_inv).flatten().tolist() == [False, True, False, False]
    assert torch.isfinite(scaling.scale_from_amax(scaling.tensor_amax(x), E4M3))


@pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)
def test_nan_keeps_its_code_and_is_excluded_from_amax(quantize):
    """TransformerEngine's maxima skip NaN, too."""
    x = torch.ones(4, 4)
    x[1, 2] = math.nan
    codes, scale_inv = quantize(x, E4M3)
    assert torch.isnan(codes.float()).nonzero().tolist() == [[1, 2]]
    assert (scale_inv == quantize(torch.ones(4, 4), E4M3).scale_inv).all()


# delayed

AMAX = st.one_of(
    st.floats(min_value=2.0**-60, max_value=2.0**60, width=32),
    st.sampled_from([0.0, math.inf, math.nan]),
)


@given(
    amaxes=st.lists(st.tuples(AMAX, AMAX, AMAX), min_size=1, max_size=40),
    length=st.integers(1, 9),
    margin=st.integers(-2, 4),
    algorithm=st.sampled_from(["max", "most_recent"]),
)
@settings(max_examples=150)
def test_delayed_states_match_reference_bitwise(amaxes, length, margin, algorithm):
    formats = (E4M3, E4M3, E5M2)
    format_max = torch.tensor([f.max for f in formats])
    state = scaling.new_delayed_state(length)
    expected = [(1.0, [0.0] * length) for _ in formats]
    for step in amaxes:
        for tensor, amax in enumerate(step):
            scaling.record_amax(state, tensor, torch.tensor(amax))
            if not math.isnan(amax):
                expected[tensor][1][0] = max(expected[tensor][1][0], torch.tensor(amax).item())
        state = scaling.rolled_delayed_states(state.unsqueeze(0), format_max, margin, algorithm, 1)[
            0
        ]
        expected = [
            reference.delayed_update(s, h, f, margin, algorithm)
            for (s, h), f in zip(expected, formats, strict=True)
        ]
    for tensor, (s, history) in enumerate(expected):
        assert scaling.delayed_scale(state, tensor).item() == s
        assert state.view(torch.float32)[tensor, scaling.HISTORY :].tolist() == history


def test_interval_recomputes_scale_on_every_nth_roll():
    state, scales = scaling.new_delayed_state(8), []
    for step in range(7):
        scaling.record_amax(state, scaling.INPUT, torch.tensor(float(step + 1)))
        state = scaling.rolled_delayed_states(
            state.unsqueeze(0), torch.tensor(448.0), 0, "most_recent", 3
        )[0]
        scales.append(448 / scaling.delayed_scale(state, scaling.INPUT).item())
    assert scales == [1, 1, 1, 4, 4, 4, 7]
    assert state.view(torch.float32)[0, scaling.HISTORY :].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


# window


WINDOW_FORMATS = (E4M3, E4M3, E5M2)


@pytest.mark.parametrize("fmt,expected", [(E4M3, (32.0, 1 / 32)), (E5M2, (4096.0, 4.0))])
def test_power_of_two_scale_keeps_amax_in_range(fmt, expected):
    scales = [scaling.power_of_two_scale(torch.tensor(amax), fmt).item() for amax in (10.0, 1e4)]
    assert tuple(scales) == expected
    for amax in (0.0, math.inf, math.nan):
        assert scaling.power_of_two_scale(torch.tensor(amax), fmt).item() == 1.0
    for amax in (1e-45, 1e-38, 1e-30):
        scale = scaling.power_of_two_scale(torch.tensor(amax), fmt)
        assert (
            torch.isfinite(scale)
            and torch.isfinite(scale.reciprocal())
            and scale.reciprocal() > 2.0**-127
        )


@pytest.mark.nightly
@given(
    amaxes=st.lists(st.tuples(AMAX, AMAX, AMAX), min_size=1, max_size=60),
    microbatches=st.integers(1, 3),
)
@settings(max_examples=150)
def test_window_states_match_reference_bitwise(amaxes, microbatches):
    state = scaling.new_window_state()
    expected = [(1.0, 0, [0.0] * scaling.WINDOW) for _ in WINDOW_FORMATS]
    for i, step in enumerate(amaxes):
        for tensor, amax in enumerate(step):
            for part in range(1, microbatches + 1):
                scaling.record_amax(state, tensor, torch.tensor(amax / part), keep_nan=True)
            before, recorded = expected[tensor][2][0], torch.tensor(amax).item()  # FP32
            expected[tensor][2][0] = math.nan if math.isnan(before) else max(recorded, before)
        if i % 7 == 3:
            # a step skipped by the loss scaler: its amax stays, and the next step adds to it
            continue
        state = scaling.rolled_window_states(state.unsqueeze(0), WINDOW_FORMATS)[0]
        expected = [
            reference.window_update(*row, fmt)
            for row, fmt in zip(expected, WINDOW_FORMATS, strict=True)
        ]
        for tensor, (s, counter, history) in enumerate(expected):
            assert scaling.delayed_scale(state, tensor).item() == s
            assert state[tensor, scaling.ROLLS].item() == counter
            assert state.view(torch.float32)[tensor, scaling.HISTORY :].tolist() == history


def test_batched_window_roll_matches_single_rolls():
    generator = torch.Generator().manual_seed(0)
    states = torch.stack([scaling.new_window_state() for _ in range(5)])
    bits = states.view(torch.float32)
    bits[:, :, scaling.HISTORY :] = torch.rand(5, 3, scaling.WINDOW, generator=generator)
    bits[1, 0, scaling.HISTORY], bits[2, 2, scaling.HISTORY], bits[3, :, scaling.HISTORY] = (
        math.inf,
        math.nan,
        0.0,
    )
    states[:, :, scaling.ROLLS] = 20
    rolled = scaling.rolled_window_states(states, WINDOW_FORMATS)
    for state, after in zip(states, rolled, strict=True):
        assert torch.equal(
            scaling.rolled_window_states(state.unsqueeze(0), WINDOW_FORMATS)[0], after
        )
    assert rolled[:, 0, scaling.ROLLS].tolist() == [21, 0, 21, 20, 21]
    assert torch.equal(rolled[3], states[3]) and rolled.dtype == torch.int32
