"""Compare the arithmetic shared by all kernels with `scaling` and `formats`, bitwise."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from fp8_backends.formats import scaling
from fp8_backends.formats.formats import E4M3, E5M2, FP16, saturating_cast
from fp8_backends.kernels import triton_common as common
from fp8_backends.kernels import triton_matrix

BLOCK = 2**15


def any_numbers(count: int) -> torch.Tensor:
    """Return FP32 numbers of all exponents, near the formats' ranges, halfway between codes, and
    all special ones."""
    generator = torch.Generator().manual_seed(0)
    everywhere = (
        torch.randint(-(2**31), 2**31, (count,), generator=generator)
        .to(torch.int32)
        .view(torch.float32)
    )
    nearby = torch.randn(count, generator=generator) * torch.logspace(-9, 6, count)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    exact = torch.cat([codes.view(fmt.dtype).float() for fmt in (E4M3, E5M2)])
    ties = (exact[1:] + exact[:-1]) / 2
    special = torch.tensor(
        [0.0, -0.0, 448, 464, 465, 57344, 61440, 65504, 65520, 3.4e38, 1e-45, 2**-10, 2**-17]
    )
    ends = torch.tensor([float("inf"), float("nan")])
    return torch.cat([everywhere, nearby, exact, ties, special, -special, ends, -ends])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


@triton.jit
def _codes_kernel(x_ptr, codes_ptr, n, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        codes_ptr + at,
        common.to_codes(tl.load(x_ptr + at, mask=at < n), FORMAT, False),
        mask=at < n,
    )


@triton.jit
def _values_kernel(codes_ptr, x_ptr, FORMAT: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(x_ptr + at, common.from_codes(tl.load(codes_ptr + at), FORMAT))


@triton.jit
def _scales_kernel(amax_ptr, out_ptr, n, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < n, other=0.0)
    scale = common.scale_from_amax(amax, FORMAT_MAX)
    tl.store(out_ptr + at, scale, mask=at < n)
    tl.store(out_ptr + n + at, common.power_of_two_scale(amax, FORMAT_MAX, 126), mask=at < n)
    tl.store(out_ptr + 2 * n + at, common.power_of_two_scale(amax, FORMAT_MAX, 127), mask=at < n)
    tl.store(out_ptr + 3 * n + at, common.scale_inv_of(scale, amax), mask=at < n)


@triton.jit
def _conversions_kernel(x_ptr, fp32_ptr, magnitude_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = common.as_fp32(tl.load(x_ptr + at, mask=at < n))
    tl.store(fp32_ptr + at, x, mask=at < n)
    tl.store(magnitude_ptr + at, common.magnitude(x), mask=at < n)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=lambda fmt: fmt.name)
def test_codes_match_saturating_cast(fmt):
    x = any_numbers(BLOCK)
    codes = torch.empty(len(x), dtype=torch.float16 if fmt is FP16 else torch.uint8)
    _codes_kernel[(triton.cdiv(len(x), BLOCK),)](x, codes, len(x), fmt.name, BLOCK)
    expected = saturating_cast(x, fmt)
    if fmt is FP16:  # the payload of a NaN is nobody's business
        assert torch.equal(codes.isnan(), x.isnan())
        codes, expected = codes[~x.isnan()], expected[~x.isnan()]
    assert same_bits(codes.view(fmt.dtype), expected)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_finite_codes_decode_to_their_values(fmt):
    codes, x = torch.arange(256, dtype=torch.int32).to(torch.uint8), torch.empty(256)
    _values_kernel[(1,)](codes, x, fmt.name)
    expected = codes.view(fmt.dtype).float()
    finite = expected.isfinite()
    assert finite.sum() == (254 if fmt is E4M3 else 248) and same_bits(x[finite], expected[finite])


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=lambda fmt: fmt.name)
def test_scales_match_scaling_rules(fmt):
    amax = any_numbers(2**12).abs()
    near_powers = torch.tensor([fmt.max, 448, 1.75]).view(-1, 1) * 2.0 ** torch.arange(-130, 110, 7)
    amax = torch.cat(
        [
            amax,
            near_powers.flatten(),
            torch.nextafter(near_powers, torch.tensor(torch.inf)).flatten(),
        ]
    )
    found = torch.empty(4, len(amax))
    _scales_kernel[(1,)](amax, found, len(amax), fmt.max, triton.next_power_of_2(len(amax)))
    scale = scaling.scale_from_amax(amax, fmt)
    expected = [scale, scaling.power_of_two_scale(amax, fmt), scaling.block_scale(amax, fmt)]
    for each, reference in zip(found, [*expected, scaling.scale_inv_of(scale, amax)], strict=True):
        assert torch.equal(each.isnan(), reference.isnan())
        assert same_bits(each[~each.isnan()], reference[~each.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_converts_and_has_its_magnitude(dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    fp32, magnitude = torch.empty(2, len(x))
    _conversions_kernel[(2,)](x, fp32, magnitude, len(x), BLOCK)
    assert same_bits(fp32[~x.isnan()], x[~x.isnan()].float()) and fp32[x.isnan()].isnan().all()
    assert same_bits(magnitude, scaling.without_nan(x.float()).abs())


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.t()], ids=["codes", "transposed"])
def test_trial_of_a_device_finds_differing_casts(layout, monkeypatch):
    cpu, quantize = torch.device("cpu"), triton_matrix.quantize
    assert triton_matrix.obstacle(cpu) is None

    def wrong_in_one(x, fmt, scale):
        made = quantize(x, fmt, scale)
        codes = made.codes if layout(made.codes) is made.codes else made.transposed
        codes.view(torch.uint8)[1, 2] += 1
        return made

    monkeypatch.setattr(triton_matrix, "quantize", wrong_in_one)
    assert (
        triton_matrix.obstacle(cpu)
        == "1 of 65536 casts of torch.float32 to e4m3 differ from PyTorch's"
    )
