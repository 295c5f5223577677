"""Test the one function behind every FP8 product: numbers, layouts, and a GPU's rules."""

import pytest
import reference
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from widths import nightly_but

from fp8_backends.compute import hardware, products
from fp8_backends.compute.products import engine_for, plain_product, scaled_product
from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.formats.scaling import ROWS, Quantized
from fp8_backends.kernels.quantize import quantize

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def operands(m, n, k, rowwise, a_format=E4M3):
    generator = torch.Generator().manual_seed(m * 7 + n * 3 + k)
    a, b = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    if rowwise:
        return ROWS.quantize(a, a_format), ROWS.quantize(b, E4M3)
    return quantize(a, a_format).along_columns(), quantize(b, E4M3).along_columns()


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("m,n,k", [(32, 48, 64), (1, 16, 16), (17, 5, 33), (3, 1, 1), (48, 130, 250)])
def test_product_of_codes_is_exact_up_to_the_output_rounding(m, n, k, out_dtype, rowwise, either_cpu):
    a, b = operands(m, n, k, rowwise)
    exact = reference.dequantize(*a).double() @ reference.dequantize(*b).double().t()
    out = scaled_product(a, b, out_dtype)
    assert out.shape == (m, n) and out.dtype == out_dtype
    views = (Quantized(q.codes.t().contiguous().t(), q.scale_inv) for q in (a, b))
    assert torch.equal(scaled_product(*views, out_dtype), out)
    # bf16 has 8 significant bits (rounded twice on the bf16-exact path), fp16 11; fp32 leaves the order of summation
    bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-19}[
        torch.bfloat16 if rowwise else out_dtype
    ]
    assert (out.double() - exact).abs().max() <= bound * exact.abs().max()


ROUNDINGS_TO_BF16 = {products.SCALED_MM: 1, products.EMULATED: 1, products.FP32_EXACT: 1, products.BF16_EXACT: 2}


@pytest.mark.parametrize("engine", ROUNDINGS_TO_BF16)
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("a_format", [E4M3, E5M2])
def test_every_engine_matches_exact_product_up_to_rounding(a_format, rowwise, engine, monkeypatch):
    monkeypatch.setattr(products, "engine_for", lambda device, out_dtype: engine)
    a, b = operands(64, 32, 96, rowwise, a_format)
    x, w = reference.dequantize(*a).double(), reference.dequantize(*b).double()
    out = scaled_product(a, b, torch.bfloat16)
    half_unit = 2.0**-8  # relative, of bf16's eight significant bits
    summation = 96 * 2.0**-23 * (x.abs() @ w.abs().t())
    exact = x @ w.t()
    bound = ROUNDINGS_TO_BF16[engine] * half_unit * 1.01 * exact.abs() + summation
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("rowwise", [False, True])
def test_small_scales_do_not_underflow_when_combined(rowwise):
    """2**-76 each: FP32 has no 2**-152, and bf16 has the result."""
    codes = torch.full((16, 64), 448.0).to(torch.float8_e4m3fn)
    small = Quantized(codes, torch.full((16, 1) if rowwise else (), 2.0**-76))
    exact = 64 * 448.0**2 * 2.0**-152
    assert (scaled_product(small, small, torch.bfloat16).double() - exact).abs().max() <= 2.0**-133


@pytest.mark.parametrize("size", [16, 128], ids=["small", "in parts"])
@pytest.mark.parametrize("rowwise", [False, True])
def test_fp16_autocast_does_not_touch_code_products(rowwise, size):
    """The codes' own product reaches 64 * 448**2, far beyond fp16, before the scales make it small."""
    a, b = operands(size, size, 64, rowwise)
    plain = scaled_product(a, b, torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(scaled_product(a, b, torch.bfloat16), plain)


@pytest.mark.parametrize("scaling", ["dynamic", "blockwise", "mxfp8"])
def test_cpu_uses_bf16_product_for_bf16_results(scaling, either_cpu):
    cpu = torch.device("cpu")
    assert engine_for(cpu, torch.bfloat16, scaling) == (products.BF16_EXACT if either_cpu else products.FP32_EXACT)
    assert engine_for(cpu, torch.float32, scaling) == engine_for(cpu, torch.float16, scaling) == products.FP32_EXACT


@pytest.mark.parametrize("rowwise", [False, True])
def test_fp32_product_is_rounded_once(rowwise, monkeypatch):
    """A product of one pair, and powers of two as scales, are exact in FP32."""
    monkeypatch.setattr(hardware, "cpu_bf16", lambda: False)
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randn(40, 1, generator=generator).to(E4M3.dtype) for _ in range(2)]
    scales = [torch.tensor(0.25), torch.tensor(2.0**-7)]
    if rowwise:
        scales = [scale * torch.exp2(torch.arange(-20.0, 20.0)[:, None]) for scale in scales]
    exact = (codes[0].double() @ codes[1].double().t()) * scales[0].double() * scales[1].double().t()
    for out_dtype in (torch.bfloat16, *([] if rowwise else DTYPES)):
        a, b = (Quantized(c, s) for c, s in zip(codes, scales, strict=True))
        assert torch.equal(scaled_product(a, b, out_dtype), exact.to(out_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_high_precision_product_matches_plain_one(dtype, either_cpu):
    """Match to half a unit of the dtype."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 96, generator=generator).to(dtype) for rows in (40, 24))
    exact = a.double() @ b.double().t()
    summation = 96 * 2.0**-23 * (a.double().abs() @ b.double().abs().t())
    for x, y in ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
        out = plain_product(x, y)
        assert out.dtype == dtype
        assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * 1.01 * exact.abs() + summation).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_every_code_is_a_bf16_value(fmt):
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(fmt.dtype)
    finite = codes[torch.isfinite(codes.float())]
    assert torch.equal(finite.bfloat16().float(), finite.float())


def test_e5m2_times_e5m2_is_refused_on_every_device():
    a = b = operands(16, 16, 16, False, E5M2)[0]
    with pytest.raises(AssertionError, match="E5M2"):
        scaled_product(a, b, torch.bfloat16)


def test_mixed_granularity_is_refused():
    a, _ = operands(16, 16, 16, True)
    _, b = operands(16, 16, 16, False)
    with pytest.raises((AssertionError, IndexError)):
        scaled_product(a, b, torch.bfloat16)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("out_dtype", nightly_but([torch.bfloat16, torch.float32], DTYPES))
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m,n,k", [(32, 48, 64), (17, 5, 33), (1, 1, 1), (1, 48, 64), (32, 1, 64), (1, 16, 16)])
def test_gpu_accepts_every_layout_and_size(m, n, k, transposed, out_dtype, rowwise):
    """Fake CUDA tensors run torch's own checks of `_scaled_mm`: layouts, multiples of 16, dtypes of scales."""
    with FakeTensorMode():

        def quantized(rows):
            size = (k, rows) if transposed else (rows, k)
            codes = torch.empty(size, device="cuda", dtype=torch.float8_e4m3fn)
            codes = codes.t() if transposed else codes
            return Quantized(codes, torch.empty((rows, 1) if rowwise else (), device="cuda"))

        out = scaled_product(quantized(m), quantized(n), out_dtype, fast_accumulation=True)
    assert out.shape == (m, n) and out.dtype == out_dtype and out.device.type == "cuda"


def test_gpu_rejects_operands_that_fail_the_checks():
    with FakeTensorMode(), pytest.raises(RuntimeError, match="col_major"):
        matrix = torch.empty(32, 32, device="cuda", dtype=torch.float8_e4m3fn)
        one = torch.empty((), device="cuda")
        torch._scaled_mm(matrix, matrix, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
