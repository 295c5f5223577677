"""The Adam step as PyTorch's operations: rounding and step against their reference."""

import hypothesis.strategies as st
import pytest
import reference
import torch
from adam_cases import CASES, bits, numbers, slot, slots, step, value
from hypothesis import given, settings

from fp8_backends.formats.formats import BF16, E4M3, E5M2, FP16, FP32, ROOT8
from fp8_backends.kernels import rounding
from fp8_backends.kernels.adam import ROUNDINGS, Slot, adam_hyper, adam_hypers
from fp8_backends.kernels.adam_table import exact_update
from fp8_backends.tensors.scaled_tensor import quantize

EVERY_FORMAT = pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=lambda fmt: fmt.name)
FIELDS = {
    "weight": rounding.WEIGHT_BITS,
    "exp_avg": rounding.EXP_AVG_BITS,
    "exp_avg_sq": rounding.EXP_AVG_SQ_BITS,
}


def rounded(values, fmt, random=None, field=rounding.WEIGHT_BITS, **options):
    """Round and decode."""
    return rounding.decoded(rounding.codes_of(values, fmt, random, field, **options)[0], fmt)


def spread(fmt, count, seed=0):
    """Values of every binade of the format, its subnormals and less, both signs, and some beyond
    its maximum."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(fmt.dtype)
    lowest, highest = (
        torch.tensor([info.smallest_normal / 2**12, fmt.max]).clamp(min=2.0**-125).log2() + 0.1
    )
    exponents = lowest + (highest - lowest) * torch.rand(count, generator=generator)
    return 2.0**exponents * (torch.randint(2, (count,), generator=generator) * 2 - 1)


def random_tensor(count, seed=0):
    return torch.randint(
        -(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed)
    ).to(torch.int32)


# Rounding


@EVERY_FORMAT
@pytest.mark.parametrize("field", FIELDS.values(), ids=list(FIELDS))
def test_stochastic_rounding_matches_reference_bitwise(fmt, field):
    values, random = spread(fmt, 100_000), random_tensor(100_000)
    low, bits = field
    expected = reference.stochastic_round(values, fmt, (random.long() >> low) & (2**bits - 1), bits)
    ours = rounded(values, fmt, random, field)
    assert torch.equal(ours.double(), expected)
    nearest = values.clamp(-fmt.max, fmt.max).to(fmt.dtype).float()
    # it is not rounding to nearest under another name
    assert 0.2 < (ours != nearest).float().mean() < 0.6


@EVERY_FORMAT
@given(st.floats(width=32, allow_nan=False), st.integers(0, 2**20))
@settings(max_examples=60)
def test_stochastic_rounding_returns_a_neighbour(fmt, value, seed):
    values = torch.full((64,), value)
    ours = rounded(values, fmt, random_tensor(64, seed))
    assert torch.equal(ours.to(fmt.dtype).float(), ours)  # representable
    assert ours.abs().max() <= fmt.max and not (ours * values < 0).any()
    clamped = values.double().clamp(-fmt.max, fmt.max)
    distance = (ours.double() - clamped).abs()
    info = torch.finfo(fmt.dtype)
    assert (
        distance
        < torch.maximum(clamped.abs() * info.eps, torch.tensor(info.smallest_normal * info.eps))
    ).all()
    exact = clamped.to(fmt.dtype).double() == clamped
    assert (distance[exact] == 0).all()


@EVERY_FORMAT
@pytest.mark.parametrize("exponent", ["normal", "subnormal"])
@pytest.mark.parametrize("name", list(FIELDS))
def test_stochastic_rounding_is_unbiased(fmt, exponent, name):
    """200,000 draws of each fraction: the mean is within five standard errors, and half of the
    field's resolution."""
    info = torch.finfo(fmt.dtype)
    if fmt is BF16:  # its subnormals are FP32's own
        exponent = "normal"
    quantum = 1.0 * info.eps if exponent == "normal" else info.smallest_normal * info.eps
    base = 1.0 if exponent == "normal" else 0.0
    random = torch.tensor(reference.random_bits(1000, 3, 1)).to(torch.int32)
    random = torch.cat([rounding.mixed(random ^ i) for i in range(200)])
    for fraction in (0.03, 0.25, 0.5, 0.9):
        value = torch.full((len(random),), base + fraction * quantum)
        true = (value[0].double() - base) / quantum
        mean = ((rounded(value, fmt, random, FIELDS[name]).double() - base) / quantum).mean()
        error = 5 * (true * (1 - true) / len(random)).sqrt()
        assert (mean - true).abs() < error + 2.0 ** -(FIELDS[name][1] + 1)


@EVERY_FORMAT
def test_nearest_rounding_matches_cast(fmt):
    values = spread(fmt, 100_000)
    codes = torch.arange(2**15 if fmt.dtype.itemsize == 2 else 2**7).to(
        torch.int16 if fmt.dtype.itemsize == 2 else torch.uint8
    )
    table = codes.view(fmt.dtype).float()
    table = table[torch.isfinite(table)]
    values = torch.cat([values, table, -table, (table[1:] + table[:-1]) / 2])  # and every tie
    if fmt is BF16:
        values = values[values.abs() >= 2.0**-125]
    expected = values.clamp(-fmt.max, fmt.max).to(fmt.dtype).float()
    ours = rounded(values, fmt)
    assert torch.equal(ours, expected) and torch.equal(torch.signbit(ours), torch.signbit(expected))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_code_decodes_to_its_value(fmt):
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(fmt.dtype).float()
    finite = torch.isfinite(values)
    assert torch.equal(rounding.decoded(codes, fmt)[finite], values[finite])


@EVERY_FORMAT
def test_positive_second_moment_never_becomes_zero(fmt):
    values = torch.tensor([0.0, 2.0**-125, torch.finfo(fmt.dtype).smallest_normal * 2.0**-12, 1.0])
    smallest = torch.finfo(fmt.dtype).smallest_normal * torch.finfo(fmt.dtype).eps
    for random in (
        None,
        torch.zeros(4, dtype=torch.int32),
        torch.full((4,), -1, dtype=torch.int32),
    ):
        ours = rounded(values, fmt, random, above_zero=True)
        assert ours[0] == 0 and (ours[1:] >= smallest).all() and ours[3] == 1


def test_random_bits_depend_only_on_seed_step_and_index():
    key = rounding.random_key(12345, torch.tensor(7.0))
    ours = [rounding.random_bits(key, start, 100) for start in (0, 50)]
    assert [x % 2**32 for x in ours[0].tolist()] == reference.random_bits(100, 12345, 7)
    assert torch.equal(ours[0][50:], ours[1][:50])
    others = [
        reference.random_bits(1000, seed, step)
        for seed, step in ((0, 1), (1, 1), (0, 2), (2**20, 1))
    ]
    assert len({bits for each in others for bits in each}) > 3990  # no two streams agree
    every = torch.tensor(reference.random_bits(20_000, 1, 1))
    ones = torch.stack([(every >> bit) & 1 for bit in range(32)]).double().mean(1)
    assert (ones - 0.5).abs().max() < 5 * 0.5 / 20_000**0.5


# The step

STEP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 3}


def stored_by_the_reference(values, like, rounding, field, above_zero):
    """Values, FP64, as the slot `like` stores them after step 3 of the parameter with the seed 5:
    (values of the data, scale_inv)."""
    fmt, scale = like.format, torch.ones(())
    values = reference.to_fp32(values.sqrt()) if fmt is ROOT8 else values
    if like.scale_inv is not None:
        blocks = torch.nn.functional.pad(
            values, (0, -len(values) % (like.block_size or len(values)))
        )
        amax = (
            blocks.view(-1, like.block_size or len(values))
            .abs()
            .amax(1)
            .clamp(min=fmt.max * 2.0**-126)
        )
        scale = 2.0 ** torch.log2(fmt.max / amax).floor()
        values = reference.to_fp32(
            values * scale.repeat_interleave(like.block_size or len(values))[: len(values)]
        )
    if fmt is FP32:
        return values, None
    if rounding == "nearest":
        data = (
            reference.cast(values, fmt).double()
            if fmt in (E4M3, E5M2)
            else reference.nearest_round(values, fmt)
        )
    else:
        random, (low, bits) = torch.tensor(reference.random_bits(len(values), 5, 3)), field
        data = reference.stochastic_round(values, fmt, (random >> low) & (2**bits - 1), bits)
    if above_zero:
        data = torch.where(values > 0, data.clamp(min=fmt.smallest), data)
    return data, None if like.scale_inv is None else (1 / scale).float().view(like.scale_inv.shape)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("decoupled,maximize", [(True, False), (False, True)])
def test_step_matches_reference_bitwise(case, rounding, decoupled, maximize):
    parts = slots(case, 1000)
    options = {"decoupled": decoupled, "maximize": maximize}
    new = reference.adam_step(
        *(value(part) for part in parts), **STEP, **options, rounded=reference.to_fp32
    )
    grad, before = bits([parts[1]]), bits([parts[0], *parts[2:]])
    step(parts, 3, rounding, **options)
    assert bits([parts[1]]) == grad and bits([parts[0], *parts[2:]]) != before
    for ours, values, (name, field) in zip(
        (parts[0], *parts[2:]), new, FIELDS.items(), strict=True
    ):
        data, scale_inv = stored_by_the_reference(
            values, ours, rounding, field, above_zero=name == "exp_avg_sq"
        )
        found = numbers(ours)
        if ours.residual is not None:
            codes, residual = reference.split(data)
            assert torch.equal(ours.data.view(torch.uint8), codes) and torch.equal(
                ours.residual, residual
            )
        assert torch.equal(found, data) and torch.equal(torch.signbit(found), torch.signbit(data))
        assert scale_inv is None or torch.equal(ours.scale_inv, scale_inv)


def test_exact_update_matches_step_with_constant_moments():
    """Use a gradient equal to exp_avg, and its square as exp_avg_sq."""
    weight, moment = (
        torch.randn(100, dtype=torch.float64),
        torch.rand(100, dtype=torch.float64) + 0.1,
    )
    for decoupled in (True, False):
        options = {**STEP, "decoupled": decoupled, "weight_decay": 0.1 if decoupled else 0.0}
        after, m, v = reference.adam_step(
            weight, moment, moment, moment**2, **options, maximize=False
        )
        update = exact_update(weight, m, v, **options)
        torch.testing.assert_close(update, after - weight, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(m, moment, rtol=1e-12, atol=0)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_plain_fp32_matches_torch_to_1e_6(decoupled, maximize, weight_decay):
    parts = slots("fp32", 2000)
    parts[2].data.zero_(), parts[3].data.zero_()
    weight = torch.nn.Parameter(parts[0].data.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    stock = kind([weight], lr=1e-3, weight_decay=weight_decay, maximize=maximize, foreach=False)
    for t in range(1, 11):
        parts[1].data.copy_(torch.randn(2000, generator=torch.Generator().manual_seed(t)))
        weight.grad = parts[1].data.clone()
        stock.step()
        step(parts, t, decoupled=decoupled, maximize=maximize, weight_decay=weight_decay)
    assert (weight - parts[0].data).abs().max() <= 1e-6
    assert (stock.state[weight]["exp_avg"] - parts[2].data).abs().max() <= 1e-6
    assert (stock.state[weight]["exp_avg_sq"] - parts[3].data).abs().max() <= 1e-6


def test_master_copy_is_rounded_to_nearest():
    """At O3, cast E4M3 from the stored FP16 weight, bitwise as quantizing it."""
    for seed in range(20):
        parts = slots("O2", 500, seed)
        copy = Slot(torch.zeros(500, dtype=torch.float8_e4m3fn), torch.ones(()))
        step(parts, seed + 1, copy=copy)
        expected = quantize(value(parts[0]), torch.float8_e4m3fn)
        assert bits([copy]) == bits([Slot(expected.codes, expected.scale_inv)])


@pytest.mark.parametrize("case", ["fp32", "O1", "O2", "O2 blocks", "bf16 weight and gradient"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradient_counts_as_zero(case, bad):
    parts, zero = slots(case, 300), slots(case, 300)
    values = value(parts[1])
    values[17] = bad
    parts[1] = slot(values, CASES[case][1])
    zero[1] = slot(torch.zeros(300), CASES[case][1])
    before = bits([parts[0]])
    step(parts), step(zero)
    assert bits([parts[0], *parts[2:]]) == bits([zero[0], *zero[2:]]) and before != bits([parts[0]])
    assert all(torch.isfinite(value(part)).all() for part in (parts[0], *parts[2:]))


def test_huge_and_tiny_gradients_keep_states_finite():
    for size in (1e30, 3e38, 1e18, 1e-38, 1e-44):
        parts = slots("O2", 300)
        parts[1] = Slot(torch.full((300,), size))
        for t in range(1, 4):
            step(parts, t)
        assert all(torch.isfinite(value(part)).all() for part in parts), size


def test_learning_rate_and_betas_may_be_tensors():
    step_ = torch.tensor(3.0)
    numbers = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.1, step_, "cpu")
    tensors = adam_hyper(
        torch.tensor(1e-3), (torch.tensor(0.9), torch.tensor(0.999)), 1e-8, 0.1, step_, "cpu"
    )
    assert numbers.dtype == tensors.dtype == torch.float32 and numbers.shape == tensors.shape
    # 1 - beta2 of an FP32 0.999 has a relative error of 2**-25 / 0.001
    assert torch.allclose(numbers, tensors, rtol=3e-5, atol=0)
    meta = adam_hyper(
        torch.tensor(1e-3, device="meta"), (0.9, 0.999), 1e-8, 0.1, step_.to("meta"), "meta"
    )
    assert meta.shape == numbers.shape  # a device without readable values: nothing waited for one


def test_batched_hyperparameters_match_single_ones():
    counts = [torch.tensor(float(t)) for t in (1, 7, 7, 1000)]
    options = (1e-3, (0.9, 0.999), 1e-8, 0.1)
    each = torch.stack([adam_hyper(*options, count, "cpu") for count in counts])
    assert torch.equal(adam_hypers(*options, counts, "cpu"), each)
    rates = (torch.tensor(1e-3, dtype=torch.float64, device="meta"), *options[1:])
    assert adam_hypers(*rates, [count.to("meta") for count in counts], "meta").shape == each.shape


def test_wrong_arguments_are_refused():
    parts = slots("O2", 64)
    with pytest.raises(ValueError, match="stochastic, nearest"):
        step(parts, rounding="up")
    with pytest.raises(ValueError, match="contiguous"):
        step([Slot(torch.zeros(8, 8).t()), *parts[1:]])
    with pytest.raises(ValueError, match="block size"):
        step([*slots("all blocks", 64)[:2], slot(torch.zeros(64), "e4m3 16"), parts[3]])
    step([Slot(torch.zeros(0)) for _ in range(4)])  # an empty parameter is nothing to do
