"""Test the native FP8 linear layer in isolation: numbers, shapes, memory, robustness and
refusals."""

import copy

import pytest
import reference
import torch
import torch.nn.functional as F
from gpu_rules import GPURules
from torch import nn
from widths import nightly, nightly_but

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.formats.formats import RECIPE_FORMATS
from fp8_backends.recipes.handlers import FP8RecipeKwargs, resolve

SCALINGS = ["dynamic", "delayed", "rowwise", "blockwise", "mxfp8"]
ALONG_CONTRACTION = SCALINGS[2:]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def fp8_linear(linear, scaling="dynamic", **fields):
    """A native FP8 layer with the Parameters of `linear`."""
    compute, recipe = (
        NativeCompute(),
        resolve(FP8RecipeKwargs(backend=f"native:{scaling}", **fields)),
    )
    return compute.build(linear, recipe, compute.new_shared(linear, recipe)).train(linear.training)


def roll(layer, **fields):
    recipe = resolve(FP8RecipeKwargs(backend="native:delayed", **fields))
    NativeCompute().attach(layer, recipe, layer.fp8_shared)


def warmed_up(layer, x, dy):
    """Show the data to delayed scaling once, since its first step has scale 1."""
    if layer.fp8_rule.scaling == "delayed":
        roll(layer)
        layer(x).backward(dy)
        layer.zero_grad()
        x.grad = None
    return layer


def sqnr(exact, values):
    return (20 * torch.log10(exact.norm() / (exact.double() - values.double()).norm())).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_accuracy_against_fp32(scaling, dtype):
    """256 -> 512, 256 tokens, normal data: at least 28 dB out, 24 dB gradients; below 32 dB, or it
    was not FP8.

    An E4M3 operand has 31 to 32 dB (1/8 between its numbers), E5M2 6 dB less; two operands' errors
    add up.
    """
    torch.manual_seed(0)
    linear = nn.Linear(256, 512).to(dtype)
    x, dy = torch.randn(4, 64, 256).to(dtype).requires_grad_(), torch.randn(4, 64, 512).to(dtype)
    x32 = x.detach().float().requires_grad_()
    exact = copy.deepcopy(linear).float()
    y32 = exact(x32)
    y32.backward(dy.float())
    layer = warmed_up(fp8_linear(linear, scaling), x, dy)
    y = layer(x)
    y.backward(dy)
    assert 28 <= sqnr(y32.double(), y) < 32
    assert 24 <= sqnr(x32.grad.double(), x.grad) < 32
    assert 24 <= sqnr(exact.weight.grad.double(), layer.weight.grad) < 32
    plain = F.linear(
        x.detach(), linear.weight.detach(), bias := linear.bias.detach().clone().requires_grad_()
    )
    plain.backward(dy)
    assert torch.equal(layer.bias.grad, bias.grad)
    assert (layer.fp8_products[:3] > 0).all()


@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
@pytest.mark.parametrize(
    "tokens,n_in,n_out",
    [nightly(32, 64, 48), (17, 33, 5), (1, 16, 16), nightly(50, 1, 3), (130, 303, 272)],
)
@pytest.mark.parametrize("scaling", ["dynamic", *ALONG_CONTRACTION])
def test_all_three_products_match_reference(scaling, tokens, n_in, n_out, fp8_format):
    torch.manual_seed(tokens)
    layer = fp8_linear(nn.Linear(n_in, n_out, bias=False), scaling, fp8_format=fp8_format)
    x, dy = torch.randn(tokens, n_in, requires_grad=True), torch.randn(tokens, n_out)
    y = layer(x)
    y.backward(dy)
    expected = reference.linear(
        x.detach(), layer.weight.detach(), dy, *RECIPE_FORMATS[fp8_format], scaling
    )
    # fp32 results differ by the order of summation; rowwise products are rounded to bf16 (here
    # twice), as on a GPU
    bound = 2**-7 if scaling == "rowwise" else 2**-19
    for ours, exact in zip((y, x.grad, layer.weight.grad), expected, strict=True):
        assert (ours - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize("scaling", ["dynamic", *ALONG_CONTRACTION])
def test_small_values_underflow_only_within_a_shared_scale(scaling):
    """One scale casts 2**-20 next to 1 to zero. Tokens share a scale only per tensor; rows of a
    weight per tensor and per square; each product has scales along its own contraction."""
    layer = fp8_linear(nn.Linear(256, 2, bias=False), scaling)
    small = torch.tensor([1.0, 2.0**-20])
    layer.weight.data.copy_(small[:, None].expand(2, 256))
    x, dy = small[:, None].repeat(1, 256).requires_grad_(), torch.eye(2) * small
    y = layer(x)
    y.backward(dy)
    tokens, rows = scaling != "dynamic", scaling in ("rowwise", "mxfp8")
    assert (y != 0).tolist() == [[True, rows], [tokens, tokens and rows]]
    assert (x.grad != 0).all(1).tolist() == [True, False], "dgrad contracts the rows of the weight"
    assert (layer.weight.grad != 0).all(1).tolist() == [True, False], "wgrad contracts the tokens"


@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16, torch.float32], DTYPES))
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (2, 1, 3, 5), (0,), (2, 0)])
def test_any_leading_dimensions_and_dtype(leading, scaling, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(24, 40).to(dtype)
    layer = fp8_linear(copy.deepcopy(linear), scaling)
    x = torch.randn(*leading, 24, dtype=dtype, requires_grad=True)
    y, plain = layer(x), linear(x.detach())
    assert y.shape == plain.shape and y.dtype == dtype
    y.sum().backward()
    assert x.grad.shape == x.shape and x.grad.dtype == dtype and layer.weight.grad.dtype == dtype
    assert torch.isfinite(layer.weight.grad).all()
    if y.numel():
        assert (y - plain).abs().max() < 0.2 * plain.abs().max() + 0.1


def test_fp32_input_is_quantized_from_fp32_under_autocast():
    """TransformerEngine's rule: the cast to FP8 reads the original tensor, not its bf16 copy."""
    layer = fp8_linear(nn.Linear(16, 16, bias=False))
    x = torch.full((16, 16), 1.0)
    x[0, 0] = 1 + 2**-12  # the amax; bf16 would round it to 1, and the scale with it
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    codes, scale_inv = reference.quantize(x, RECIPE_FORMATS["HYBRID"][0])
    w = reference.dequantize(
        *reference.quantize(layer.weight.detach(), RECIPE_FORMATS["HYBRID"][0])
    )
    exact = reference.dequantize(codes, scale_inv) @ w.t()
    assert torch.allclose(y.float(), exact, rtol=2**-7, atol=1e-6)


# memory


def saved_bytes(run, *parameters):
    """Bytes of distinct storages saved by autograd during run(), without the parameters."""
    storages, alive = {}, []
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            alive.append(tensor)
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive.append(run())
    return sum(storages.values())


def test_layer_saves_input_in_half_the_bytes_of_bf16():
    x = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
    linear = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    plain = saved_bytes(lambda: linear(x * 1), linear.weight)
    for scaling in SCALINGS:
        layer = fp8_linear(linear, scaling)
        ours = saved_bytes(lambda layer=layer: layer(x * 1), linear.weight)
        weight_codes = 0 if scaling in ALONG_CONTRACTION else linear.weight.numel()
        scales = {"blockwise": 4 * x.numel() // 128, "mxfp8": x.numel() // 32}.get(
            scaling, 4 * (256 + 1)
        )
        assert plain == x.numel() * 2 and ours <= x.numel() + weight_codes + scales


@pytest.mark.parametrize("scaling", [*SCALINGS, "window"])
def test_layers_with_same_input_share_one_copy(scaling):
    compute, recipe = NativeCompute(), resolve(f"native:{scaling}")
    shared = compute.new_shared(None, recipe)
    q, k, v = (
        compute.build(nn.Linear(128, 16, bias=False), recipe, shared).train() for _ in range(3)
    )
    x = torch.randn(1024, 128, dtype=torch.bfloat16, requires_grad=True)

    def block():
        h = x * 1
        return q(h) + k(h) + v(h)

    assert (
        saved_bytes(block, q.weight, k.weight, v.weight)
        <= x.numel() + 3 * (16 * 128) + 4 * 2 * 1024
    )


def test_changed_input_is_quantized_again():
    """Share codes only among readers of equal values: not after an in-place change, and never for a
    leaf."""
    compute, recipe = NativeCompute(), resolve("native")
    shared = compute.new_shared(None, recipe)
    first, second = (
        compute.build(nn.Linear(16, 16, bias=False), recipe, shared).train() for _ in range(2)
    )
    second.weight = first.weight
    base = torch.randn(16, 16, requires_grad=True)
    h = base * 1
    before = first(h)
    h.mul_(3)
    assert torch.allclose(second(h), 3 * before, rtol=1e-4, atol=1e-5)
    memory = torch.randn(16, 16)
    leaf = torch.from_numpy(memory.numpy())
    before = first(leaf)
    memory.numpy()[:] *= 5
    assert torch.allclose(second(leaf), 5 * before, rtol=1e-4, atol=1e-5)


# non-finite values


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_non_finite_values_propagate_but_spare_the_next_step(scaling, where, bad):
    torch.manual_seed(0)
    layer = fp8_linear(nn.Linear(32, 16), scaling)
    roll(layer) if scaling == "delayed" else None
    x, dy = torch.randn(16, 32), torch.randn(16, 16)

    def step(x, dy):
        layer.zero_grad()
        x = x.clone().requires_grad_()
        y = layer(x)
        y.backward(dy)
        return y.detach(), x.grad, layer.weight.grad

    step(x, dy)
    clean = step(x, dy)
    weight = layer.weight.detach().clone()
    bad_x, bad_dy = x.clone(), dy.clone()
    {"input": bad_x, "weight": layer.weight.data, "gradient": bad_dy}[where][0, 0] = bad
    y, dx, dw = step(bad_x, bad_dy)
    shows = {"input": (y, dw), "weight": (y, dx), "gradient": (dx, dw)}[where]
    assert all(not torch.isfinite(t).all() for t in shows)
    layer.weight.data.copy_(weight)
    for _ in range(2):
        after = step(x, dy)
    for ours, expected in zip(after, clean, strict=True):
        assert torch.isfinite(ours).all() and torch.allclose(ours, expected, rtol=0.2, atol=0.3)


# allowed by the recipe


def test_margin_leaves_headroom():
    scales = []
    for margin in (0, 2):
        layer = fp8_linear(nn.Linear(16, 16), "delayed", margin=margin)
        roll(layer, margin=margin)
        torch.manual_seed(0)
        x = torch.randn(16, 16)
        layer(x).sum().backward()
        layer(x)
        scales.append(
            NativeCompute().scaling_state(layer)[".fp8_scaling"].view(torch.float32)[0, 0].item()
        )
    assert scales[0] == 4 * scales[1]


# modes


@pytest.mark.parametrize("scaling", SCALINGS)
def test_eval_runs_in_high_precision_and_changes_nothing(scaling):
    linear = nn.Linear(32, 32)
    layer = fp8_linear(copy.deepcopy(linear), scaling)
    roll(layer) if scaling == "delayed" else None
    x = torch.randn(8, 32)
    layer(x).sum().backward()
    products, states = layer.fp8_products, NativeCompute().scaling_state(layer)
    layer.eval()
    assert torch.equal(layer(x), linear(x))
    with torch.no_grad():
        layer(x)
    assert torch.equal(layer.fp8_products, products)
    after = NativeCompute().scaling_state(layer)
    assert all(torch.equal(after[name], state) for name, state in states.items())


def test_eval_in_fp8_on_request_keeps_the_scaling_state():
    layer = fp8_linear(nn.Linear(32, 32), "delayed", use_autocast_during_eval=True)
    roll(layer)
    x = torch.randn(8, 32)
    for _ in range(2):
        layer(x).sum().backward()
    state = layer.fp8_scaling.clone()
    layer.eval()
    with torch.no_grad():
        y = layer(x * 100)
    assert layer.fp8_products[0] == 3 and torch.equal(state, layer.fp8_scaling)
    assert not torch.equal(y, F.linear(x * 100, layer.weight, layer.bias))


def test_input_may_be_a_keyword_argument():
    layer, x = fp8_linear(nn.Linear(32, 16)), torch.randn(8, 32)
    assert torch.equal(layer(input=x), layer(x))


def test_frozen_weight_runs_no_wgrad_and_saves_no_input():
    layer = fp8_linear(nn.Linear(64, 32, bias=False))
    layer.weight.requires_grad_(False)
    x = torch.randn(128, 64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert layer.fp8_products.tolist() == [1, 1, 0, 0] and layer.weight.grad is None
    assert saved_bytes(lambda: layer(x * 1), layer.weight) <= layer.weight.numel() + 8


def test_input_without_gradient_runs_no_dgrad():
    layer = fp8_linear(nn.Linear(64, 32))
    layer(torch.randn(4, 64)).sum().backward()
    assert layer.fp8_products.tolist() == [1, 0, 1, 0]


def test_state_is_not_in_the_state_dict_and_survives_a_cast():
    layer = fp8_linear(nn.Linear(16, 16), "delayed")
    assert sorted(layer.state_dict()) == ["bias", "weight"]
    layer(torch.randn(4, 16)).sum().backward()
    state = layer.fp8_scaling.clone()
    layer.bfloat16()
    assert torch.equal(layer.fp8_scaling, state) and layer.weight.dtype == torch.bfloat16


def test_layer_prepared_on_meta_starts_fresh_with_assigned_weights():
    layer = fp8_linear(nn.Linear(16, 16, device="meta"), "delayed")
    roll(layer)
    layer.load_state_dict(nn.Linear(16, 16).state_dict(), assign=True)
    x = torch.randn(4, 16)
    for _ in range(3):
        y = layer(x)
        y.sum().backward()
    assert layer.fp8_products.tolist() == [3, 0, 3, 0]
    assert sqnr(F.linear(x, layer.weight, layer.bias).double(), y) > 24


def test_wrong_last_dimension_is_named():
    with pytest.raises(ValueError, match=r"64 input features got an input of shape \(2, 32\)"):
        fp8_linear(nn.Linear(64, 16))(torch.randn(2, 32))


def test_integer_input_fails_as_in_plain_layer():
    with pytest.raises(RuntimeError, match="dtype"):
        fp8_linear(nn.Linear(16, 16))(torch.ones(2, 16, dtype=torch.int64))


@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16, torch.float32], DTYPES))
@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("tokens,n_in,n_out", [nightly(32, 64, 48), (17, 33, 5), (131, 303, 272)])
def test_all_three_products_are_valid_on_a_gpu(
    scaling, fp8_format, dtype, tokens, n_in, n_out, monkeypatch
):
    layer = fp8_linear(nn.Linear(n_in, n_out, dtype=dtype), scaling, fp8_format=fp8_format)
    x = torch.randn(tokens, n_in, dtype=dtype, requires_grad=True)
    here = layer(x)
    with GPURules(monkeypatch) as gpu:
        y = layer(x)
        y.sum().backward()
    # emulated: no GPU multiplies E5M2 in blocks of 128
    in_e5m2 = scaling == "blockwise" and fp8_format == "HYBRID"
    assert len(gpu.products) == (1 if in_e5m2 else 3)
    # as by the CPU's own engine: each of two roundings to bf16, of the product and of its sum with
    # the bias, may fall to the other side if the order of summation differs
    assert (y - here).abs().max() <= 2 * 2**-7 * here.abs().max()


@pytest.mark.parametrize(
    "scaling,in_fp32", [("dynamic", True), ("delayed", True), ("rowwise", False)]
)
def test_gpu_writes_fp32_wgrad_for_tensorwise_scales(scaling, in_fp32, monkeypatch):
    layer = fp8_linear(nn.Linear(64, 48), scaling)
    with GPURules(monkeypatch), torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
        y.sum().backward()
    gradient = layer.weight.grad
    assert gradient.dtype == torch.float32 and y.dtype == torch.bfloat16
    assert torch.equal(gradient, gradient.bfloat16().float()) is not in_fp32
