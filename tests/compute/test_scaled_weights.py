"""Test FP8 layers with a ScaledTensor weight: FP16 (levels O1, O2) is cast from its exact values,
E4M3 (O3) is used directly. Such a layer does everything a layer with a plain weight does."""

import contextlib
import copy
import itertools

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from widths import nightly, one_each

from fp8_backends.compute.native import layer_rule
from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.compute.native.linear import FP8Linear
from fp8_backends.convert.conversion import convert
from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.formats.scaling import WEIGHT
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.tensors.scaled_tensor import ScaledTensor, quantize
from fp8_backends.tensors.statistics import read, statistics_of

COMPUTE = NativeCompute()
SCALINGS = ["window", "dynamic", "delayed", "rowwise", "blockwise", "mxfp8"]
STORED = {"FP16": torch.float16, "E4M3": torch.float8_e4m3fn}
DTYPES = [torch.float32, torch.bfloat16]
AUTOCASTS = [torch.bfloat16, None, torch.float16]
LAYERS = pytest.mark.parametrize("scaling, stored", one_each(SCALINGS, ["plain", *STORED]))


def store(model, storage):
    """Make the weight of every FP8 layer a ScaledTensor, inside the same Parameter."""
    for layer in model.modules():
        if isinstance(layer, FP8Linear):
            new = nn.Parameter(
                quantize(layer.weight, storage), requires_grad=layer.weight.requires_grad
            )
            torch.utils.swap_tensors(layer.weight, new)
    return model


def prepared(model, scaling, storage=None, **fields):
    convert(model, FP8RecipeKwargs(backend=f"native:{scaling}", **fields))
    return model if storage is None else store(model, storage)


def layer(sizes=(33, 48), dtype=torch.float32, spread=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*sizes, dtype=dtype))
    nn.init.normal_(model[0].weight, std=spread)
    return model


def values_of(weight):
    return weight.dequantize() if isinstance(weight, ScaledTensor) else weight.detach()


def pair(scaling, storage, sizes=(33, 48), dtype=torch.float32, spread=1.0, **fields):
    """A layer with a scaled weight, and one with the same values in a plain FP32 weight."""
    scaled = prepared(layer(sizes, dtype, spread), scaling, storage, **fields)
    # FP32, not rounded
    values = ScaledTensor(scaled[0].weight.codes, scaled[0].weight.scale_inv).dequantize()
    plain = nn.Sequential(nn.Linear(*sizes, dtype=dtype))
    plain[0].weight, plain[0].bias = (
        nn.Parameter(values),
        nn.Parameter(scaled[0].bias.detach().clone()),
    )
    return scaled, prepared(plain, scaling, **fields)


def autocast(dtype):
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def run(model, x, dy, autocast_dtype=None):
    """y, dx, dw, db of one training step."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with autocast(autocast_dtype):
        y = model(x)
    y.backward(dy.to(y.dtype))
    COMPUTE.after_optimizer_step(model)
    return y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad


def same(a, b):
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("scaling", SCALINGS)
@settings(max_examples=15)
@given(
    exponent=st.integers(-40, 40),
    n_in=st.integers(1, 40),
    n_out=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_fp16_weights_match_fp32_values_bitwise(scaling, exponent, n_in, n_out, seed):
    scaled, plain = pair(scaling, torch.float16, (n_in, n_out), spread=2.0**exponent)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        x, dy = (
            torch.randn(9, n_in, generator=generator),
            torch.randn(9, n_out, generator=generator),
        )
        assert same(run(scaled, x, dy), run(plain, x, dy))
    if scaling in ("window", "delayed"):
        assert torch.equal(scaled[0].fp8_scaling, plain[0].fp8_scaling)


@pytest.mark.parametrize("dtype, autocast_dtype", one_each(DTYPES, AUTOCASTS))
@pytest.mark.parametrize("scaling", SCALINGS)
def test_autocast_and_bf16_models_match_fp32_weights(scaling, dtype, autocast_dtype):
    """Match a plain FP32 weight bitwise: bf16 weights lose nothing before the cast."""
    scaled, plain = pair(scaling, torch.float16, dtype=dtype)
    for seed in range(2):
        x = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)).to(dtype)
        ours, expected = (
            run(scaled, x, torch.ones(7, 48), autocast_dtype),
            run(plain, x, torch.ones(7, 48), autocast_dtype),
        )
        y, dx, dw, db = ours
        assert y.dtype == (autocast_dtype or dtype) and dx.dtype == dw.dtype == db.dtype == dtype
        assert same(ours, [expected[0], expected[1], expected[2].to(dtype), expected[3]])


@pytest.mark.parametrize("rowwise", [False, True])
def test_e4m3_weights_are_multiplied_without_recast(rowwise):
    """A new cast of the values would have another scale, and rows several."""
    scaled, _ = pair("rowwise" if rowwise else "window", torch.float8_e4m3fn)
    weight = scaled[0].weight.detach()
    x, dy = torch.randn(16, 33), torch.randn(16, 48)
    y, dx, _, _ = run(scaled, x, dy)
    gradient = E4M3 if rowwise else E5M2
    values, w = (
        weight.dequantize().double(),
        2.0 ** torch.floor(torch.log2(448 / weight.dequantize().abs().max())),
    )
    assert torch.equal(weight.scale_inv, 1 / w)

    def quantized(values, fmt):
        if rowwise:
            return reference.dequantize(*reference.quantize(values, fmt, True)).double()
        s = 2.0 ** torch.floor(torch.log2(fmt.max / values.abs().max()))
        return (reference.cast(values * s, fmt).float() / s).double()

    # FP32 sums in another order; rowwise products are rounded to bf16, y once more with its bias
    bound = 2**-7 if rowwise else 2**-19
    exact = quantized(x, E4M3) @ values.t() + scaled[0].bias.detach()
    assert (y - exact).abs().max() <= bound * exact.abs().max()
    exact = quantized(dy, gradient) @ values
    assert (dx - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize("scaling", ["window", "dynamic", "delayed"])
def test_e4m3_codes_and_scale_reach_the_product_untouched(scaling, monkeypatch):
    seen = []
    original = layer_rule.scaled_product

    def watched(a, b, *rest, **named):
        seen.append(b)
        return original(a, b, *rest, **named)

    monkeypatch.setattr(layer_rule, "scaled_product", watched)
    scaled, _ = pair(scaling, torch.float8_e4m3fn)
    weight = scaled[0].weight
    run(scaled, torch.randn(16, 33), torch.randn(16, 48))
    fprop, dgrad = seen[0], seen[1]
    assert fprop.codes is weight.codes and fprop.scale_inv is weight.scale_inv
    assert torch.equal(dgrad.codes.t().float(), weight.codes.float()) and torch.equal(
        dgrad.scale_inv, weight.scale_inv
    )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_ignore_the_residual(scaling):
    alone, _ = pair(scaling, torch.float8_e4m3fn)
    both = copy.deepcopy(alone)
    weight = both[0].weight
    # anything between the codes' neighbours has these codes
    weight.rest = torch.randint(
        -128, 128, weight.shape, generator=torch.Generator().manual_seed(0)
    ).to(torch.int8)
    exact, x, dy = weight.exact(), torch.randn(16, 33), torch.randn(16, 48)
    assert same(run(alone, x, dy), run(both, x, dy))
    assert torch.equal(
        alone.eval()(x), nn.functional.linear(x, alone[0].weight.dequantize(), alone[0].bias)
    )
    assert torch.equal(both.eval()(x), nn.functional.linear(x, exact, both[0].bias))
    # the monitor's statistics of both
    alone.train(), both.train()
    assert COMPUTE.cast_of(alone[0], WEIGHT, alone[0].weight) is None
    (numbers,) = read([statistics_of(COMPUTE.cast_of(both[0], WEIGHT, weight))])
    noise = (exact.double() - weight.dequantize().double()).square().sum().item()
    assert numbers.noise == pytest.approx(noise, rel=1e-6) and 25 < numbers.sqnr_db < 35


# high precision


@pytest.mark.parametrize("autocast_dtype", AUTOCASTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
def test_evaluation_matches_plain_layer_and_is_differentiable(stored, dtype, autocast_dtype):
    scaled, _ = pair("window", STORED[stored], dtype=dtype)
    weight = scaled[0].weight
    plain = nn.Linear(33, 48, dtype=dtype)
    plain.load_state_dict({"weight": weight.dequantize(), "bias": scaled[0].bias.detach()})
    scaled.eval()
    before = scaled[0].fp8_scaling.clone()
    x = torch.randn(2, 7, 33, dtype=dtype)
    gradients = []
    for module in (scaled, plain):
        inputs = x.clone().requires_grad_()
        with autocast(autocast_dtype):
            y = module(inputs)
        y.float().pow(2).sum().backward()
        gradients.append((y.detach(), inputs.grad))
    assert same(*gradients)
    assert type(weight.grad) is torch.Tensor and weight.grad.dtype == dtype
    assert torch.equal(weight.grad, plain.weight.grad) and torch.equal(
        scaled[0].bias.grad, plain.bias.grad
    )
    with torch.no_grad(), autocast(autocast_dtype):
        assert torch.equal(scaled(x), gradients[0][0])
    assert torch.equal(scaled[0].fp8_scaling, before) and not scaled[0].fp8_products.any()


@pytest.mark.parametrize("stored", STORED)
def test_an_empty_batch_gives_a_zero_gradient(stored):
    scaled, _ = pair("window", STORED[stored])
    scaled(torch.zeros(0, 33)).sum().backward()
    assert type(scaled[0].weight.grad) is torch.Tensor and not scaled[0].weight.grad.any()


@pytest.mark.parametrize(
    "override", [case for case in itertools.product((False, True), repeat=3) if not all(case)]
)
@LAYERS
def test_override_linear_precision_applies_per_product(scaling, stored, override):
    model = prepared(
        layer(spread=0.1), scaling, STORED.get(stored), override_linear_precision=override
    )
    plain = nn.Linear(33, 48)
    plain.load_state_dict({"weight": values_of(model[0].weight), "bias": model[0].bias.detach()})
    x, dy = torch.randn(16, 33, requires_grad=True), torch.randn(16, 48)
    plain(x).backward(dy)
    y, dx, dw, _ = run(model, x, dy)
    exact = ((plain(x), y), (x.grad, dx), (plain.weight.grad, dw))
    for high, (expected, ours) in zip(override, exact, strict=True):
        assert torch.allclose(expected, ours, rtol=1e-5, atol=1e-5) == high
    assert model[0].fp8_products[:3].tolist() == [int(not high) for high in override]
    assert COMPUTE.transient_bytes_per_element(model[0]) == float(
        stored != "E4M3" and scaling in ("window", "dynamic", "delayed") and not override[1]
    )


# memory


@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("override", [None, (True, True, False)])
@pytest.mark.parametrize("scaling, stored", one_each(SCALINGS, STORED))
def test_only_fp8_codes_of_weight_are_saved(scaling, stored, override, autocast_dtype):
    fields = {} if override is None else {"override_linear_precision": override}
    scaled, _ = pair(scaling, STORED[stored], (64, 512), **fields)
    weight, kept = scaled[0].weight, {}

    def keep(tensor):
        assert not isinstance(tensor, ScaledTensor)
        if tensor.untyped_storage().data_ptr() != weight.codes.untyped_storage().data_ptr():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(4, 64, requires_grad=True)  # negligible next to the weight
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), autocast(autocast_dtype):
        y = scaled(x)
    transient = sum(
        t.untyped_storage().nbytes() for t in kept.values() if t.numel() >= weight.numel()
    )
    assert transient == COMPUTE.transient_bytes_per_element(scaled[0]) * weight.numel()
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) - transient <= 3 * x.numel() * 4
    y.float().sum().backward()
    assert weight.grad.shape == weight.shape


@pytest.mark.nightly
@pytest.mark.parametrize("scaling,stored", [("window", "E4M3"), nightly("delayed", "FP16")])
def test_inductor_computes_same_codes(scaling, stored):
    """Match bitwise for one layer in FP32, without reordered sums. (Inductor skips the bf16
    rounding of rowwise results.)"""
    torch._dynamo.reset()
    scaled, _ = pair(scaling, STORED[stored])
    compiled = copy.deepcopy(scaled)
    compiled[0].compile(fullgraph=True)
    for seed in range(2):
        x = torch.randn(16, 33, generator=torch.Generator().manual_seed(seed))
        assert same(run(scaled, x, torch.ones(16, 48)), run(compiled, x, torch.ones(16, 48)))
    assert torch.equal(scaled[0].fp8_products, compiled[0].fp8_products)


@pytest.mark.nightly
@pytest.mark.parametrize("stored, training", one_each(STORED, [False, True]))
def test_compiled_evaluation_and_frozen_weights_match_eager(stored, training):
    torch._dynamo.reset()
    scaled, _ = pair("window", STORED[stored])
    # trained around frozen weights, or evaluated
    scaled.requires_grad_(not training).train(training)
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    found = []
    for forward in (scaled, compiled):
        scaled.zero_grad()
        x = torch.ones(4, 33, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = forward(x)
        y.float().pow(2).sum().backward()
        found.append(
            (y.detach(), x.grad) if training else (y.detach(), x.grad, scaled[0].weight.grad)
        )
    assert same(*found)


def test_moving_a_layer_keeps_hooks_and_attributes_of_its_weight():
    scaled, _ = pair("window", torch.float16)
    weight, calls = scaled[0].weight, []
    weight.tag = "mine"
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter))
    scaled.to(torch.bfloat16)
    assert scaled[0].weight is weight and weight.tag == "mine" and weight.dtype == torch.bfloat16
    scaled(torch.randn(4, 33, dtype=torch.bfloat16)).sum().backward()
    assert len(calls) == 1 and calls[0] is weight and weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_non_finite_weight_propagates(scaling, stored):
    scaled, _ = pair(scaling, STORED[stored])
    bad = scaled[0].weight.dequantize()
    bad[0, 0] = float("inf")
    with torch.no_grad():
        scaled[0].weight.copy_(bad)
    y, dx, dw, _ = run(scaled, torch.randn(16, 33), torch.randn(16, 48))
    assert torch.isnan(y).all() and torch.isnan(dx).all() and torch.isfinite(dw).all()
