"""FP8 layers whose weight is a ScaledTensor: FP16 (levels O1, O2) is cast from its exact values, E4M3 (O3) is used as
it is. Everything that a layer with a plain weight does, it does."""

import contextlib
import copy
import pickle

import pytest
import reference
import torch
from gpu_rules import GPURules
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.compute.native.linear import FP8Linear
from fp8_backends.numerics.formats import E4M3, E5M2
from fp8_backends.numerics.scaled_tensor import ScaledTensor, quantize
from fp8_backends.numerics.scaling import WEIGHT
from fp8_backends.numerics.statistics import read, statistics_of
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.training.conversion import convert

COMPUTE = NativeCompute()
SCALINGS = ["window", "dynamic", "delayed", "rowwise", "blockwise", "mxfp8"]
STORED = {"FP16": torch.float16, "E4M3": torch.float8_e4m3fn}
DTYPES = [torch.float32, torch.bfloat16]


def store(model, storage):
    """Let the weight of every FP8 layer be a ScaledTensor, inside the same Parameter."""
    for layer in model.modules():
        if isinstance(layer, FP8Linear):
            new = nn.Parameter(quantize(layer.weight, storage), requires_grad=layer.weight.requires_grad)
            torch.utils.swap_tensors(layer.weight, new)
    return model


def prepared(model, scaling, storage=None, **fields):
    convert(model, FP8RecipeKwargs(backend=f"native:{scaling}", **fields), COMPUTE)
    return model if storage is None else store(model, storage)


def pair(scaling, storage, sizes=(33, 48), dtype=torch.float32, spread=1.0, **fields):
    """A layer with a scaled weight, and one with the same values in a plain FP32 weight."""
    torch.manual_seed(0)
    scaled = nn.Sequential(nn.Linear(*sizes, dtype=dtype))
    nn.init.normal_(scaled[0].weight, std=spread)
    prepared(scaled, scaling, storage, **fields)
    values = ScaledTensor(scaled[0].weight._data, scaled[0].weight._scale_inv).dequantize()  # FP32, not rounded
    plain = nn.Sequential(nn.Linear(*sizes, dtype=dtype))
    plain[0].weight, plain[0].bias = nn.Parameter(values), nn.Parameter(scaled[0].bias.detach().clone())
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


@pytest.mark.parametrize("scaling", SCALINGS)
@settings(max_examples=15)
@given(exponent=st.integers(-40, 40), n_in=st.integers(1, 40), n_out=st.integers(1, 40), seed=st.integers(0, 99))
def test_fp16_weights_give_what_their_values_in_fp32_give_to_the_bit(scaling, exponent, n_in, n_out, seed):
    scaled, plain = pair(scaling, torch.float16, (n_in, n_out), spread=2.0**exponent)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        x, dy = torch.randn(9, n_in, generator=generator), torch.randn(9, n_out, generator=generator)
        assert same(run(scaled, x, dy), run(plain, x, dy))
    if scaling in ("window", "delayed"):
        assert torch.equal(scaled[0].fp8_scaling, plain[0].fp8_scaling)


@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_autocast_and_bf16_models_are_served(scaling, dtype, autocast_dtype):
    """To the bit as a plain FP32 weight of the same values: one that stands for bf16 loses nothing before the cast."""
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
def test_e4m3_weights_are_multiplied_as_they_are(rowwise):
    """The products of the stored codes; quantizing their values anew would use another scale, and rows several."""
    scaled, _ = pair("rowwise" if rowwise else "window", torch.float8_e4m3fn)
    weight = scaled[0].weight.detach()
    x, dy = torch.randn(16, 33), torch.randn(16, 48)
    y, dx, _, _ = run(scaled, x, dy)
    gradient = E4M3 if rowwise else E5M2
    values, w = weight.dequantize().double(), 2.0 ** torch.floor(torch.log2(448 / weight.dequantize().abs().max()))
    assert torch.equal(weight._scale_inv, 1 / w)

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
    from fp8_backends.compute.native import linear as linear_function

    seen = []
    original = linear_function.scaled_product

    def watched(a, b, *rest, **named):
        seen.append(b)
        return original(a, b, *rest, **named)

    monkeypatch.setattr(linear_function, "scaled_product", watched)
    scaled, _ = pair(scaling, torch.float8_e4m3fn)
    weight = scaled[0].weight
    run(scaled, torch.randn(16, 33), torch.randn(16, 48))
    fprop, dgrad = seen[0], seen[1]
    assert fprop.codes is weight._data and fprop.scale_inv is weight._scale_inv
    assert torch.equal(dgrad.codes.t().float(), weight._data.float()) and torch.equal(
        dgrad.scale_inv, weight._scale_inv
    )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_of_codes_with_a_residual_products_read_the_codes_alone(scaling):
    alone, _ = pair(scaling, torch.float8_e4m3fn)
    both = copy.deepcopy(alone)
    weight = both[0].weight
    # anything between the codes' neighbours has these codes
    weight.residual = torch.randint(-128, 128, weight.shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)
    exact, x, dy = weight.exact(), torch.randn(16, 33), torch.randn(16, 48)
    assert same(run(alone, x, dy), run(both, x, dy))
    assert torch.equal(alone.eval()(x), nn.functional.linear(x, alone[0].weight.dequantize(), alone[0].bias))
    assert torch.equal(both.eval()(x), nn.functional.linear(x, exact, both[0].bias))
    # what the monitor says of both
    alone.train(), both.train()
    assert COMPUTE.cast_of(alone[0], WEIGHT, alone[0].weight) is None
    (numbers,) = read([statistics_of(COMPUTE.cast_of(both[0], WEIGHT, weight))])
    noise = (exact.double() - weight.dequantize().double()).square().sum().item()
    assert numbers.noise == pytest.approx(noise, rel=1e-6) and 25 < numbers.sqnr_db < 35


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_accuracy_against_fp32(scaling, stored):
    """SQNR of outputs and gradients against the exact products of the stored values: FP8's, 24 to 40 dB."""
    scaled, _ = pair(scaling, STORED[stored], (256, 512), spread=0.02)
    values = scaled[0].weight.dequantize().double()
    for seed in range(2):  # delayed: the first step at scale 1
        generator = torch.Generator().manual_seed(seed)
        x, dy = torch.randn(64, 256, generator=generator), torch.randn(64, 512, generator=generator)
        y, dx, dw, db = run(scaled, x, dy)
        if scaling == "delayed":
            scaled[0].fp8_scaling.view(torch.float32)[:, 0] = torch.tensor([64.0, 2.0**12, 2.0**10])
    exact = (x.double() @ values.t() + scaled[0].bias.detach(), dy.double() @ values, dy.double().t() @ x.double())
    for ours, wanted in zip((y, dx, dw), exact, strict=True):
        noise = (wanted.norm() / (wanted - ours).norm()).log10() * 20
        assert 24 <= noise < 40
    assert torch.equal(db, dy.sum(0))


# high precision


@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
def test_evaluation_is_a_plain_layers_and_differentiable(stored, dtype, autocast_dtype):
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
    assert torch.equal(weight.grad, plain.weight.grad) and torch.equal(scaled[0].bias.grad, plain.bias.grad)
    with torch.no_grad(), autocast(autocast_dtype):
        assert torch.equal(scaled(x), gradients[0][0])
    assert torch.equal(scaled[0].fp8_scaling, before) and not scaled[0].fp8_products.any()


@pytest.mark.parametrize("stored", STORED)
def test_an_empty_batch_gives_a_zero_gradient(stored):
    scaled, _ = pair("window", STORED[stored])
    scaled(torch.zeros(0, 33)).sum().backward()
    assert type(scaled[0].weight.grad) is torch.Tensor and not scaled[0].weight.grad.any()


@pytest.mark.parametrize("override", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1) if 0 < a + b + c < 3])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_override_linear_precision_is_honoured_product_by_product(scaling, stored, override):
    override = tuple(map(bool, override))
    scaled, _ = pair(scaling, STORED[stored], spread=0.1, override_linear_precision=override)
    plain = nn.Linear(33, 48)
    plain.load_state_dict({"weight": scaled[0].weight.dequantize(), "bias": scaled[0].bias.detach()})
    x, dy = torch.randn(16, 33, requires_grad=True), torch.randn(16, 48)
    plain(x).backward(dy)
    y, dx, dw, _ = run(scaled, x, dy)
    exact = ((plain(x), y), (x.grad, dx), (plain.weight.grad, dw))
    for high, (expected, ours) in zip(override, exact, strict=True):
        assert torch.allclose(expected, ours, rtol=1e-5, atol=1e-5) == high
    assert scaled[0].fp8_products[:3].tolist() == [int(not high) for high in override]
    assert COMPUTE.transient_bytes_per_element(scaled[0]) == float(
        stored == "FP16" and scaling in ("window", "dynamic", "delayed") and not override[1]
    )


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_frozen_weight_needs_dgrad_alone(scaling, stored):
    scaled, _ = pair(scaling, STORED[stored])
    weight = scaled[0].weight.requires_grad_(False)
    before = weight._data.clone()
    x = torch.randn(16, 33, requires_grad=True)
    scaled(x).sum().backward()
    assert scaled[0].fp8_products.tolist() == [1, 1, 0, 0] and weight.grad is None and x.grad is not None
    assert torch.equal(weight._data.view(torch.uint8), before.view(torch.uint8)) and not weight.requires_grad


# memory


@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("override", [None, (True, True, False)])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_copy_of_the_weight_but_fp8_codes_is_kept(scaling, stored, override, autocast_dtype):
    fields = {} if override is None else {"override_linear_precision": override}
    scaled, _ = pair(scaling, STORED[stored], (64, 512), **fields)
    weight, kept = scaled[0].weight, {}

    def keep(tensor):
        assert not isinstance(tensor, ScaledTensor)
        if tensor.untyped_storage().data_ptr() != weight._data.untyped_storage().data_ptr():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(4, 64, requires_grad=True)  # next to nothing beside the weight
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), autocast(autocast_dtype):
        y = scaled(x)
    transient = sum(t.untyped_storage().nbytes() for t in kept.values() if t.numel() >= weight.numel())
    assert transient == COMPUTE.transient_bytes_per_element(scaled[0]) * weight.numel()
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) - transient <= 3 * x.numel() * 4
    y.float().sum().backward()
    assert weight.grad.shape == weight.shape


# whole models


class Block(nn.Module):
    def __init__(self, use_reentrant=None):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.up, self.side, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def inner(self, x):
        h = x * 1
        return x + self.down(torch.relu(self.up(h)) * self.side(h))

    def forward(self, x):
        if self.use_reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Gate(nn.Module):
    """The layers of a block that read the same input."""

    def __init__(self):
        super().__init__()
        self.up, self.side = nn.Linear(32, 48), nn.Linear(32, 48)

    def forward(self, x):
        h = x * 1
        return torch.relu(self.up(h)) * self.side(h)


def trained(scaling, storage, use_reentrant=None, compiler=None, steps=5, model=None):
    """Losses and gradient norms of steps that write new values into the weights; the counters; graphs by step."""
    torch.manual_seed(0)
    model = prepared(Block(use_reentrant), scaling, storage) if model is None else model
    layers = [layer for layer in model.modules() if isinstance(layer, FP8Linear)]
    graphs, compiled, numbers = [], [], []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, backend=count) if compiler else model
    for i in range(steps):
        x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(i)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(x).float().pow(2).mean()
        loss.backward()
        numbers += [loss.item(), x.grad.norm().item()]
        with torch.no_grad():
            for layer in layers:
                assert type(layer.weight.grad) is torch.Tensor and layer.weight.grad.dtype == torch.float32
                numbers.append(layer.weight.grad.norm().item())
                values = layer.weight.detach()
                values = values.dequantize() if isinstance(values, ScaledTensor) else values
                layer.weight.copy_(values - 0.1 * layer.weight.grad)
        model.zero_grad()
        COMPUTE.after_optimizer_step(model)
        compiled.append(len(graphs))
    return numbers, [layer.fp8_products.tolist() for layer in layers], compiled


@pytest.mark.parametrize(
    "scaling,stored",
    [
        ("window", "FP16"),
        ("rowwise", "E4M3"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("dynamic", "FP16"), ("delayed", "E4M3"), ("blockwise", "FP16"), ("mxfp8", "E4M3"))
        ),
    ],
)
def test_compiled_training_equals_eagers(scaling, stored):
    """Three rules with layers that read the same input, the others with one layer: tracing takes most of the time."""
    torch.manual_seed(0)
    layers = 2 if scaling in ("dynamic", "window", "rowwise") else 1
    model = prepared(Gate() if layers == 2 else nn.Sequential(nn.Linear(32, 48)), scaling, STORED[stored])
    numbers, counts, _ = trained(scaling, STORED[stored], model=copy.deepcopy(model))
    compiled_numbers, compiled_counts, compiled = trained(scaling, STORED[stored], compiler="aot_eager", model=model)
    assert compiled_numbers == numbers and compiled_counts == counts == [[5, 5, 5, 0]] * layers
    assert compiled[1] == compiled[-1], "compiled again as steps went by"


@pytest.mark.slow
@pytest.mark.parametrize("scaling,stored", [("window", "E4M3"), ("delayed", "FP16")])
def test_inductor_makes_the_same_codes(scaling, stored):
    """One layer in FP32: to the bit, since nothing is summed in another order. (Rowwise results pass through bf16,
    which Inductor's fused code skips.)"""
    torch._dynamo.reset()
    scaled, _ = pair(scaling, STORED[stored])
    compiled = copy.deepcopy(scaled)
    compiled[0].compile(fullgraph=True)
    for seed in range(2):
        x = torch.randn(16, 33, generator=torch.Generator().manual_seed(seed))
        assert same(run(scaled, x, torch.ones(16, 48)), run(compiled, x, torch.ones(16, 48)))
    assert torch.equal(scaled[0].fp8_products, compiled[0].fp8_products)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_compiled_evaluation_and_frozen_weights_equal_eagers(stored, training):
    torch._dynamo.reset()
    scaled, _ = pair("window", STORED[stored])
    scaled.requires_grad_(not training).train(training)  # trained around frozen weights, or evaluated
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    found = []
    for forward in (scaled, compiled):
        scaled.zero_grad()
        x = torch.ones(4, 33, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = forward(x)
        y.float().pow(2).sum().backward()
        found.append((y.detach(), x.grad) if training else (y.detach(), x.grad, scaled[0].weight.grad))
    assert same(*found)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_checkpointing_recomputes_the_same(scaling, stored, use_reentrant):
    numbers, counts, _ = trained(scaling, STORED[stored])
    again, again_counts, _ = trained(scaling, STORED[stored], use_reentrant)
    assert again == numbers
    assert all(other[:3] == one[:3] and other[3] > 0 for one, other in zip(counts, again_counts, strict=True))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_train_on_their_own(copied, scaling, stored):
    torch.manual_seed(0)
    model = prepared(Block(), scaling, STORED[stored])
    other = copied(model)
    before = model.up.weight.dequantize()
    numbers, counts, _ = trained(scaling, None, model=other)
    assert torch.equal(model.up.weight.dequantize(), before) and not model.up.fp8_products.any()
    assert numbers == trained(scaling, STORED[stored])[0] and counts == [[5, 5, 5, 0]] * 3


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_model_on_meta_keeps_its_scaled_weights_and_starts_afresh(scaling, stored):
    torch.manual_seed(0)
    weights = Block().state_dict()
    with torch.device("meta"):
        model = Block()
    prepared(model, scaling, STORED[stored])
    assert all(layer.weight.is_meta for layer in (model.up, model.side, model.down))
    model.to_empty(device="cpu").load_state_dict(weights)
    assert isinstance(model.up.weight, ScaledTensor) and model.up.weight._data.dtype == STORED[stored]
    numbers, counts, _ = trained(scaling, None, model=model)
    assert numbers == trained(scaling, STORED[stored])[0] and counts == [[5, 5, 5, 0]] * 3


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
def test_a_weight_that_was_not_finite_shows(scaling, stored):
    scaled, _ = pair(scaling, STORED[stored])
    bad = scaled[0].weight.dequantize()
    bad[0, 0] = float("inf")
    with torch.no_grad():
        scaled[0].weight.copy_(bad)
    y, dx, dw, _ = run(scaled, torch.randn(16, 33), torch.randn(16, 48))
    assert torch.isnan(y).all() and torch.isnan(dx).all() and torch.isfinite(dw).all()


@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_whole_training_steps_are_valid_on_a_gpu(scaling, stored, dtype, autocast_dtype, monkeypatch):
    model = prepared(Block(use_reentrant=False).to(dtype), scaling, STORED[stored])
    with GPURules(monkeypatch) as gpu:
        for _ in range(2):
            x = torch.randn(3, 7, 32, dtype=dtype, requires_grad=True)  # 21 tokens: padded for wgrad
            with autocast(autocast_dtype):
                y = model(x)
            y.float().sum().backward()
            assert all(type(p.grad) is torch.Tensor and p.grad.dtype == dtype for p in model.parameters())
            model.zero_grad()
    # two steps of three layers: fprop, dgrad, wgrad, and fprop recomputed (the last layer's is not needed again)
    assert len(gpu.products) >= 2 * (3 * 3 + 2)
