"""The product of operands with block scales: TransformerEngine's sum over parts of the contraction,
on every engine."""

import math

import pytest
import reference
import torch
from gpu_rules import BLOCK_SCALED_MM, GPURules, block_product
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from widths import nightly

from fp8_backends import FP8RecipeKwargs, prepare
from fp8_backends.compute import hardware, products
from fp8_backends.compute.native.layer_rule import Stored
from fp8_backends.compute.products import EMULATED, block_scaled_product, swizzled
from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.formats.scaling import MX, SQUARES, VECTORS, Quantized
from fp8_backends.tensors.scaled_tensor import quantize

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PAIRS = {"fprop and dgrad": (VECTORS, SQUARES), "wgrad": (VECTORS, VECTORS), "mx": (MX, MX)}
HALF_A_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SIZES = [(256, 272, 300), (17, 5, 33), (1, 1, 1)]


def operands(sizes, blocks, formats=(E4M3, E4M3)):
    """Rows, and parts of the contraction, of very different sizes."""
    m, n, k = sizes
    generator = torch.Generator().manual_seed(k)
    made = []
    for rows, block, fmt in zip((m, n), blocks, formats, strict=True):
        size = torch.exp2(torch.randint(-9, 3, (rows, k), generator=generator))
        made.append(block.quantize(torch.randn(rows, k, generator=generator) * size, fmt))
    return made


def part_after_part(a, a_blocks, b, b_blocks):
    """Follow TransformerEngine's reference: y = fma(product of one part's codes * a's scale, b's
    scale, y) in FP32."""

    def scales_of(q, blocks):
        scale_inv = (
            2.0 ** (q.scale_inv.double() - 127)
            if q.scale_inv.dtype == torch.uint8
            else q.scale_inv.double()
        )
        return scale_inv.repeat_interleave(blocks.rows, 0)[: len(q.codes)]

    y, width = torch.zeros(len(a.codes), len(b.codes)), a_blocks.columns
    for part, (s, t) in enumerate(
        zip(scales_of(a, a_blocks).t(), scales_of(b, b_blocks).t(), strict=True)
    ):
        inside = slice(part * width, (part + 1) * width)
        partial = (a.codes[:, inside].float() @ b.codes[:, inside].float().t()).double()
        # FP64 holds product and sum: one rounding, as an fma
        y = (y.double() + partial * s[:, None] * t).float()
    return y


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("blocks", PAIRS.values(), ids=PAIRS)
def test_every_engine_matches_sum_over_parts(blocks, formats, monkeypatch):
    for sizes in SIZES:
        a, b = operands(sizes, blocks, formats)
        expected = part_after_part(a, blocks[0], b, blocks[1]).double()
        x, w = (
            block.dequantize(q, torch.float32).double()
            for block, q in zip(blocks, (a, b), strict=True)
        )
        # sums of k products in FP32 in two orders, each with at most k roundings to half a step of
        # the largest sum
        summation = 2 * sizes[2] * 2.0**-24 * (x.abs() @ w.abs().t())
        for out_dtype in DTYPES:
            found = []
            for has_bf16 in (True, False):
                monkeypatch.setattr(hardware, "cpu_bf16", lambda answer=has_bf16: answer)
                found.append(block_scaled_product(a, blocks[0], b, blocks[1], out_dtype))
            with GPURules(monkeypatch):
                found.append(block_scaled_product(a, blocks[0], b, blocks[1], out_dtype))
            monkeypatch.undo()
            for out in found:
                assert out.shape == expected.shape and out.dtype == out_dtype
                # fp16 ends at 2**-24: half of it is the rounding of a subnormal result
                rounding = HALF_A_STEP[out_dtype] * expected.abs() + 2.0**-25 * (
                    out_dtype == torch.float16
                )
                assert ((out.double() - expected).abs() <= 1.01 * rounding + summation).all()


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("blocks", PAIRS.values(), ids=PAIRS)
def test_gpu_accepts_every_layout_and_size(blocks, out_dtype):
    """Fake CUDA tensors run torch's own checks of `scaled_mm`: shapes, strides and order of the
    scales."""

    def empty(rows, k, block):
        codes = torch.empty(rows, k, device="cuda", dtype=torch.float8_e4m3fn)
        shape = math.ceil(rows / block.rows), math.ceil(k / block.columns)
        dtype = torch.uint8 if block is MX else torch.float32
        return Quantized(codes, torch.empty(shape, device="cuda", dtype=dtype))

    with FakeTensorMode():
        for m, n, k in [*SIZES, (128, 128, 128), (256, 512, 640)]:
            a, b = empty(m, k, blocks[0]), empty(n, k, blocks[1])
            out = block_scaled_product(a, blocks[0], b, blocks[1], out_dtype)
            assert out.shape == (m, n) and out.dtype == out_dtype and out.device.type == "cuda"


def test_mx_scales_have_cublas_layout():
    """cuBLAS: tiles of 128 rows and 4 blocks, in a tile (row % 32) * 16 + (row // 32) * 4 +
    block."""
    scales = torch.arange(130 * 6, dtype=torch.int32).remainder(251).to(torch.uint8).reshape(130, 6)
    flat = swizzled(scales).view(torch.uint8)
    assert flat.numel() == 256 * 8
    for row in range(130):
        for block in range(6):
            tile = row // 128 * 2 + block // 4
            place = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert flat[tile * 512 + place] == scales[row, block]


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [nightly("native:blockwise"), "native:mxfp8"])
def test_compiled_code_passes_operands_in_gpu_layout(spec, monkeypatch):
    torch._dynamo.reset()
    rules = GPURules(monkeypatch)

    def multiply(*args):
        rules._replay(BLOCK_SCALED_MM, args, {})
        return block_product(*args)

    monkeypatch.setattr(products, "_SCALED_MM", multiply)
    model, _ = prepare(nn.Sequential(nn.Linear(160, 96, bias=False)), None, spec)
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        y = forward(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, model[0].weight])])
    for ours, eager in zip(results[1], results[0], strict=True):
        assert torch.equal(ours, eager) and ours.stride() == eager.stride()
    assert len(rules.products) == 6 and rules.products[:3] == rules.products[3:]


def test_e5m2_times_e5m2_is_refused_on_every_device():
    a, b = operands((16, 16, 32), (MX, MX), (E5M2, E5M2))
    with pytest.raises(AssertionError, match="E5M2"):
        block_scaled_product(a, MX, b, MX, torch.bfloat16)


@pytest.mark.parametrize("blocks", [SQUARES, MX])
def test_e4m3_weight_keeps_codes_and_repeats_its_scale(blocks):
    weight = quantize(
        torch.randn(200, 150, generator=torch.Generator().manual_seed(0)), torch.float8_e4m3fn
    )
    q = Stored(weight.codes, weight.scale_inv).in_blocks(blocks, E4M3)
    assert q.codes is weight.codes
    assert torch.equal(blocks.dequantize(q, torch.float32), weight.dequantize(torch.float32))
    values = reference.dequantize_blocks(*q, blocks.rows, blocks.columns)
    assert torch.equal(values, weight.dequantize(torch.float32))


def test_notice_names_emulated_rule(monkeypatch, caplog):
    def engine_for(device, out_dtype, scaling="dynamic", has_e5m2=False):
        return EMULATED if scaling == "mxfp8" else products.engine_for(device, out_dtype)

    monkeypatch.setattr("fp8_backends.compute.native.scaling_states.engine_for", engine_for)
    with caplog.at_level("WARNING", logger="fp8_backends"):
        prepare(nn.Sequential(nn.Linear(16, 16)), None, "native:mxfp8")
        prepare(nn.Sequential(nn.Linear(16, 16)), None, "native:dynamic")
    assert [
        "native:mxfp8 are emulated on cpu" in record.getMessage() for record in caplog.records
    ] == [True]


def test_e5m2_in_blocks_of_128_is_emulated_on_a_gpu(monkeypatch, caplog):
    """An H200 with torch 2.11 refuses it; without a driver a CUDA device stands for an FP8 GPU."""
    on_a_gpu, gpu = products.engine_for, torch.device("cuda")
    engine_for = "fp8_backends.compute.native.scaling_states.engine_for"
    monkeypatch.setattr(engine_for, lambda _, *arguments: on_a_gpu(gpu, *arguments))
    notices = []
    for fp8_format in ("E4M3", "HYBRID"):
        caplog.clear()
        recipe = FP8RecipeKwargs(backend="native:blockwise", fp8_format=fp8_format)
        prepare(nn.Sequential(nn.Linear(16, 16)), None, recipe)
        notices.append("native:blockwise are emulated" in caplog.text)
    assert notices == [False, True]
