"""Test quantization on a CPU: parts fit in cache, transposes are views, and numbers match the
reference."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from widths import nightly_but

from fp8_backends.compute import products
from fp8_backends.formats import scaling
from fp8_backends.formats.formats import E4M3, E5M2, saturating_cast
from fp8_backends.formats.scaling import (
    DYNAMIC,
    INPUT,
    JUST_IN_TIME,
    MX,
    POWER_OF_TWO,
    ROLLS,
    ROWS,
    SQUARES,
    VECTORS,
    Quantized,
    new_window_state,
    power_of_two_scale,
    scale_from_amax,
    scale_inv_of,
    tensor_amax,
    window_scale,
    without_nan,
)
from fp8_backends.kernels import cpu_casts
from fp8_backends.kernels import quantize as quantization

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(1, 1), (3, 85), (257, 300), (128, 256), (1, 700), (700, 1)]
VALUES = ["normal", "zero", "subnormal", "inf", "nan"]


@pytest.fixture(autouse=True)
def parts_of_a_thousand_elements(monkeypatch):
    """Split small matrices into several parts, and wide rows into one each."""
    monkeypatch.setattr(cpu_casts, "CAST_AT_ONCE", 1000)


def matrix(rows, columns, dtype, kind="normal"):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 9, x.shape, generator=generator).float())
    if kind in ("inf", "nan"):
        x.view(-1)[::97] = float(kind)
        x.view(-1)[1::97] = -float(kind)
    if kind == "subnormal":
        limits = torch.finfo(dtype)
        x = torch.randint(-5, 6, x.shape, generator=generator) * (
            limits.smallest_normal * limits.eps
        )
    return (x * 0 if kind == "zero" else x).to(dtype)


def layouts(x):
    """Equal matrices: row-major, column-major, with gaps between the rows."""
    return x, x.t().contiguous().t(), x.repeat(1, 2)[:, : x.shape[1]]


def same(ours, expected):
    """Compare bitwise, with every NaN equal: torch's casts keep or drop its sign by position in a
    vector register."""
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    if not expected.is_floating_point():
        return torch.equal(ours, expected)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.dtype.itemsize]
    nan = expected.float().isnan()
    bits = (t.contiguous().view(integer).masked_fill(nan, 0) for t in (ours, expected))
    return torch.equal(ours.float().isnan(), nan) and torch.equal(*bits)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16, torch.float32], DTYPES))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_casts_match_reference(fmt, size, dtype, kind):
    x = matrix(*size, dtype, kind)
    for factor in (
        torch.tensor(3.3),
        torch.rand(size[0], 1) * 9,
        torch.rand(1, size[1]),
        torch.tensor(float("nan")),
    ):
        for of_layout in layouts(x):
            assert same(
                cpu_casts.cast(of_layout, factor, fmt), saturating_cast(x.float() * factor, fmt)
            )


@pytest.mark.parametrize("size", [(16, 16), (3, 85), (85, 3), (257, 31), (0, 4), (4, 0), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_every_code_decodes_in_every_layout(fmt, dtype, size):
    """Odd sizes and an odd place in memory too: codes are read in pairs."""
    count = size[0] * size[1]
    memory = torch.arange(1 + count, dtype=torch.int32).to(torch.uint8).view(fmt.dtype)
    for codes in (
        memory[:count].view(size),
        memory[1:].view(size),
        memory[1:].view(size[::-1]).t(),
    ):
        values = cpu_casts.decoded(codes, dtype)
        assert same(values, codes.to(dtype)) and (values.stride() == codes.stride() or count < 2)
    assert same(cpu_casts.decoded(codes[:, ::2], dtype), codes[:, ::2].to(dtype))


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_scaled_one_factor_at_a_time(dtype, out_dtype):
    """Their product underflows. In place too."""
    x = matrix(257, 300, dtype)
    rows, columns = torch.rand(257, 1) * 2.0**-80, torch.rand(1, 300) * 2.0**-70
    for a, b in ((torch.tensor(2.0**-80), torch.tensor(2.0**-80)), (rows, columns)):
        product = (x.float() if dtype == torch.float16 else x.float() * 2.0**120).to(dtype)
        expected = (product.float() * a * b).to(out_dtype)
        out = product if dtype == out_dtype else torch.empty_like(product, dtype=out_dtype)
        cpu_casts.scale(product, (a, b), out)
        assert same(out, expected)


def rule_and_scale(rule, x, fmt):
    amax = tensor_amax(without_nan(x) if rule in (DYNAMIC, "given") else x)
    if rule == "given":
        return {"scale": torch.tensor(1.7)}, torch.tensor(1.7), amax
    if rule == DYNAMIC:
        return {}, scale_from_amax(amax, fmt), amax
    if rule == POWER_OF_TWO:
        return {"how": rule}, power_of_two_scale(amax, fmt), amax
    state = new_window_state()
    state[INPUT, ROLLS] = scaling.WINDOW - 1 + (x.shape[0] % 2)
    return (
        {"how": JUST_IN_TIME, "window_state": state[INPUT]},
        window_scale(state, INPUT, amax, fmt),
        amax,
    )


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16, torch.float32], DTYPES))
@pytest.mark.parametrize("rule", ["given", DYNAMIC, POWER_OF_TWO, JUST_IN_TIME])
def test_every_rule_computes_one_scale(rule, dtype, kind):
    for size, fmt in zip(SIZES, (E4M3, E5M2) * 3, strict=True):
        x = matrix(*size, dtype, kind)
        named, scale, amax = rule_and_scale(rule, x, fmt)
        expected = Quantized(saturating_cast(x.float() * scale, fmt), scale_inv_of(scale, amax))
        for of_layout in layouts(x):
            made = quantization.quantize(of_layout, fmt, **named)
            assert same(made.amax, amax) and same(made.scale_inv, expected.scale_inv)
            assert same(made.codes, expected.codes) and made.codes.is_contiguous()
            assert made.transposed is None and same(made.along_rows().codes, expected.codes.t())


@pytest.mark.parametrize("rule", [DYNAMIC, POWER_OF_TWO])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_cast_records_the_amax_in_a_state(compiled, rule):
    """The larger of both, in place; NaN by the rule."""
    quantize = quantization.quantize
    if compiled:
        torch._dynamo.reset()
        quantize = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    keep_nan = rule == POWER_OF_TWO
    state, expected = scaling.new_delayed_state(3), scaling.new_delayed_state(3)
    for kind in ("normal", "zero", "nan", "subnormal", "inf"):
        x = matrix(3, 85, torch.bfloat16, kind)
        made = quantize(x, E4M3, how=rule, record=state[INPUT, scaling.HISTORY])
        scaling.record_amax(expected, INPUT, made.amax, keep_nan)
        assert same(state.view(torch.float32), expected.view(torch.float32))
    assert (made.amax == torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_stored_data_are_cast_from_their_values(dtype):
    data, stored = matrix(257, 300, dtype), torch.tensor(2.0**-9)
    values = data.float() * stored
    amax = tensor_amax(values)
    for rule, scale in (
        (DYNAMIC, scale_from_amax(amax, E4M3)),
        (POWER_OF_TWO, power_of_two_scale(amax, E4M3)),
    ):
        made = quantization.quantize(data, E4M3, how=rule, stored_scale_inv=stored)
        expected = Quantized(saturating_cast(values * scale, E4M3), scale_inv_of(scale, amax))
        assert (
            same(made.amax, amax)
            and same(made.codes, expected.codes)
            and same(made.scale_inv, expected.scale_inv)
        )
        known = quantization.quantize(
            data, E4M3, how=rule, stored_scale_inv=stored, amax=tensor_amax(data)
        )
        assert same(known.codes, made.codes) and same(known.scale_inv, made.scale_inv)
    for blocks in (ROWS, VECTORS, SQUARES, MX):
        made = quantization.quantize_blocks(data, blocks, E4M3, stored_scale_inv=stored)
        for ours, expected in ((made.along_columns(), values), (made.along_rows(), values.t())):
            expected = blocks.quantize(expected, E4M3)
            assert same(ours.codes, expected.codes) and same(ours.scale_inv, expected.scale_inv)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16, torch.float32], DTYPES))
@pytest.mark.parametrize(
    "blocks", [ROWS, VECTORS, SQUARES, MX], ids=["rows", "vectors", "squares", "mx"]
)
def test_blocks_of_matrix_and_transpose(blocks, dtype, kind):
    for size, fmt in zip(SIZES, (E4M3, E5M2) * 3, strict=True):
        x = matrix(*size, dtype, kind)
        expected = [blocks.quantize(each, fmt) for each in (x, x.t())]
        restored = [
            [blocks.dequantize(each, into) for into in (torch.bfloat16, torch.float32)]
            for each in expected
        ]
        for of_layout in layouts(x):
            made = quantization.quantize_blocks(of_layout, blocks, fmt)
            for ours, wanted, values in zip(
                (made.along_columns(), made.along_rows()), expected, restored, strict=True
            ):
                assert same(ours.codes, wanted.codes) and same(ours.scale_inv, wanted.scale_inv)
                for each in values:
                    assert same(quantization.dequantize_blocks(ours, blocks, each.dtype), each)


BLOCKS = (ROWS, VECTORS, SQUARES, MX)


def codes_of_one(blocks, x):
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    return Quantized(codes, blocks.repeated(torch.ones((), device=x.device), x.shape))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_scales_on_the_host_equal_the_rules(fmt):
    """Draw amaxes of every exponent, and take the ends: 0, the smallest, the largest, inf, NaN."""
    exponents = torch.arange(255).repeat(4)
    mantissas = torch.randint(2**23, exponents.shape, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
    amaxes = torch.cat([exponents << 23 | mantissas, ends]).to(torch.int32).view(torch.float32)
    scales = scale_from_amax(amaxes, fmt)
    on_host = [cpu_casts.scale_from_amax(amax, fmt) for amax in amaxes]
    inverses = torch.stack(list(map(cpu_casts.scale_inv_of, on_host, amaxes)))
    assert torch.equal(torch.stack(on_host).view(torch.int32), scales.view(torch.int32))
    assert torch.equal(inverses.view(torch.int32), scale_inv_of(scales, amaxes).view(torch.int32))


def test_transpose_is_a_view_without_nan():
    made = quantization.quantize_blocks(matrix(300, 128, torch.bfloat16), VECTORS, E4M3)
    assert made.transposed.t().is_contiguous() and made.codes.is_contiguous()


@pytest.mark.nightly
@pytest.mark.parametrize("make", [
    lambda x: quantization.quantize(x, E4M3).codes,
    *(lambda x, blocks=blocks: quantization.quantize_blocks(x, blocks, E4M3).transposed for blocks in BLOCKS),
    *(lambda x, b=b: quantization.dequantize_blocks(codes_of_one(b, x), b, x.dtype) for b in BLOCKS),
    lambda x: products.scaled_product(*2 * [Quantized(quantization.quantize(x, E4M3).codes, x.new_ones(()))], x.dtype),
])  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_and_meta_tensors_use_reference(make, device, monkeypatch):
    """Cast in one piece: each part would add a node to a graph."""
    for name in ("cast", "decoded", "scale"):
        monkeypatch.setattr(cpu_casts, name, None)
    with FakeTensorMode():
        x = torch.empty(300, 256, device=device)
        assert make(x).device.type == device


def test_compiled_code_uses_reference(monkeypatch):
    for name in ("cast", "decoded", "scale"):
        monkeypatch.setattr(cpu_casts, name, None)
    x = matrix(30, 32, torch.bfloat16)

    @torch.compile(fullgraph=True, backend="eager")
    def product(x):
        a = quantization.quantize(x, E4M3).along_columns()
        return products.scaled_product(a, a, torch.bfloat16)

    compiled = product(x)
    monkeypatch.undo()
    a = quantization.quantize(x, E4M3).along_columns()
    assert torch.equal(compiled, products.scaled_product(a, a, torch.bfloat16))


@pytest.mark.parametrize("keep_nan", [False, True])
def test_compiled_code_computes_amax_in_one_reduction(keep_nan):
    """No second operation reads every element; eager code has two reductions, and the same
    numbers."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(
            [
                str(node.target)
                for node in graph.graph.nodes
                if node.op in ("call_function", "call_method")
            ]
        )
        return graph.forward

    torch._dynamo.reset()
    amax = torch.compile(
        lambda x: quantization.amax_of(x, keep_nan), fullgraph=True, dynamic=False, backend=keep
    )
    for dtype in DTYPES:
        for kind in VALUES:
            x = matrix(3, 85, dtype, kind)
            expected = tensor_amax(x if keep_nan else without_nan(x))
            assert same(amax(x), expected) and same(quantization.amax_of(x, keep_nan), expected)
    assert len(graphs) == len(DTYPES)
    for graph in graphs:
        assert graph.count("amax") == 1 and not any(
            "aminmax" in name or "nan_to_num" in name for name in graph
        ), graph


@pytest.mark.nightly
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("values_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("most", [0, 2**25])
def test_products_in_several_threads_share_no_memory(most, values_dtype, out_dtype, monkeypatch):
    """Include operands of different sizes."""
    monkeypatch.setattr(cpu_casts, "MOST_SCRATCH", most)
    matrices = [matrix(40 + i, 64, torch.bfloat16).to(torch.float8_e4m3fn) for i in range(8)]
    factors = torch.tensor(0.3), torch.tensor(1.7)

    def run(a):
        return [
            cpu_casts.product(a, b, *factors, values_dtype, out_dtype)
            for _ in range(20)
            for b in matrices
        ]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(run, matrices))
    for a, of_a in zip(matrices, found, strict=True):
        products = [torch.mm(a.to(values_dtype), b.to(values_dtype).t()).float() for b in matrices]
        expected = [(product * factors[0] * factors[1]).to(out_dtype) for product in products]
        assert all(same(ours, expected[i % 8]) for i, ours in enumerate(of_a))
