"""`products`: bf16 or the gradient's format for a product. The oracle is a layer with one format for
all products."""

import pytest
import torch
import torch.utils.checkpoint
from conv1d_twins import conv_twin
from gpu_rules import GPURules
from torch import nn
from widths import nightly

import fp8_backends
from fp8_backends import resolve
from fp8_backends.compute import hardware
from fp8_backends.compute import products as engines
from fp8_backends.errors import RecipeError
from fp8_backends.formats.formats import E4M3
from fp8_backends.formats.scaling import INPUT, Rule

RULES = ("dynamic", "rowwise", "blockwise", "mxfp8")
SIZES = 40, 64, 48


def gradients(
    spec,
    level: str = "O0",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    checkpointed=False,
):
    """Return output, input gradient and weight gradient of a layer for fixed operands."""
    tokens, inner, outer = SIZES
    torch.manual_seed(0)
    layer, x = (
        nn.Linear(inner, outer).to(dtype),
        torch.randn(tokens, inner, dtype=dtype, requires_grad=True),
    )
    dy = torch.randn(tokens, outer, dtype=dtype)
    fields = {"backend": spec} if isinstance(spec, str) else dict(spec)
    fields["backend"] += "" if level == "O0" else f"+msamp:{level}"
    model = fp8_backends.prepare(nn.Sequential(layer), None, fields)[0]
    torch._dynamo.reset()  # other tests of the process count for its limit of recompilations
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
    y.backward(dy)
    gradient = layer.weight.grad
    return y.detach(), x.grad, gradient.to(torch.float32) if level == "O0" else gradient.float()


@pytest.mark.parametrize(
    ("level", "dtype"),
    [("O0", torch.float32), ("O0", torch.bfloat16), ("O2", torch.float32), ("O4", torch.float32)],
)
@pytest.mark.parametrize("base", RULES)
def test_formats_of_gradients(base, level, dtype):
    """E4M3 in one product of the gradient and E5M2 in the other equal the products of recipes with
    one format."""
    fields = {"backend": f"native:{base}"}
    e4m3, e5m2 = (
        gradients(fields | {"fp8_format": name}, level, dtype) for name in ("E4M3", "HYBRID")
    )
    assert not torch.equal(e4m3[1], e5m2[1]) and not torch.equal(e4m3[2], e5m2[2])
    for fp8_format, products in (
        ("HYBRID", {"wgrad": "e4m3"}),
        ("E4M3", {"dgrad": "e5m2"}),
        ("HYBRID", {"dgrad": "e5m2", "wgrad": "e4m3"}),
    ):
        mixed = gradients(fields | {"fp8_format": fp8_format, "products": products}, level, dtype)
        assert all(map(torch.equal, mixed, (e4m3[0], e5m2[1], e4m3[2]))), products
    mixed = gradients(fields | {"products": {"dgrad": "e4m3", "wgrad": "e5m2"}}, level, dtype)
    assert all(map(torch.equal, mixed, (e4m3[0], e4m3[1], e5m2[2])))


@pytest.mark.parametrize("base", ["dynamic", "mxfp8"])
def test_a_format_stays_beside_a_product_in_high_precision(base):
    fields = {"backend": f"native:{base}", "fp8_format": "HYBRID"}
    for kind, other in (("dgrad", "wgrad"), ("wgrad", "dgrad")):
        mixed = gradients(fields | {"products": {kind: "e4m3", other: "bf16"}})
        wanted = gradients(fields | {"fp8_format": "E4M3", "products": {other: "bf16"}})
        assert all(map(torch.equal, mixed, wanted)), kind


@pytest.mark.parametrize("products", [{"dgrad": "e4m3"}, {"wgrad": "e4m3"}])
@pytest.mark.parametrize("base", ["dynamic", nightly("mxfp8")])
def test_compiled_and_recomputed_products_are_the_eager_ones(base, products):
    fields = {"backend": f"native:{base}", "products": products}
    eager = gradients(fields)
    assert all(map(torch.equal, gradients(fields, compiled=True), eager))
    assert all(map(torch.equal, gradients(fields, checkpointed=True), eager))


def test_conv1d_takes_products():
    linear = nn.Linear(32, 48)
    conv = conv_twin(linear)
    fields = {"backend": "native:dynamic", "products": {"dgrad": "e4m3"}}
    results = []
    for layer in (linear, conv):
        fp8_backends.prepare(nn.Sequential(layer), None, fields)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        layer(x).square().sum().backward()
        results.append((x.grad, layer.weight.grad if layer is linear else layer.weight.grad.t()))
    assert all(map(torch.equal, *results))


def test_a_layer_shows_the_format_of_wgrad():
    model = nn.Sequential(nn.Linear(32, 32))
    fp8_backends.prepare(model, None, {"backend": "native", "products": {"wgrad": "e4m3"}})
    assert "go:e5m2,wgrad go:e4m3" in repr(model)


def test_products_and_override_linear_precision_are_one_choice():
    recipe = resolve({"backend": "native", "products": "wgrad=bf16"})
    assert recipe == resolve(
        {"backend": "native", "override_linear_precision": (False, False, True)}
    )
    assert recipe.override_linear_precision == (False, False, True) and recipe.products == {
        "wgrad": "bf16"
    }
    assert resolve({"backend": "te", "products": {"wgrad": "bf16"}}).override_linear_precision == (
        False,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"products": {"forward": "bf16"}}, "must map fprop, dgrad or wgrad"),
        ({"products": {"fprop": "e5m2"}}, "activations and weights are E4M3"),
        (
            {"products": {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}},
            "leave one product in FP8",
        ),
        ({"products": {"wgrad": "rowwise"}}, "must map .* to bf16, e4m3 or e5m2"),
        ({"products": {"wgrad": 8}}, "must map .* to bf16, e4m3 or e5m2"),
        (
            {"backend": "native:delayed", "products": {"wgrad": "e4m3"}},
            "one scale for a gradient, so one format: give fp8_format",
        ),
        ({"backend": "ao", "products": {"wgrad": "bf16"}}, "products is not read by ao"),
        ({"backend": "te", "products": {"dgrad": "bf16"}}, "with te only wgrad"),
        ({"backend": "te", "products": {"wgrad": "e4m3"}}, "with te only wgrad"),
        (
            {"products": {"wgrad": "bf16"}, "override_linear_precision": (True, False, False)},
            "disagree",
        ),
    ],
)
def test_contradictory_products_are_refused_by_name(fields, said):
    with pytest.raises(RecipeError, match=said):
        resolve({"backend": "native", **fields})


@pytest.mark.parametrize("base", RULES)
@pytest.mark.parametrize("products", ["dgrad=e4m3", "wgrad=e4m3"])
def test_a_gpu_accepts_the_operands_of_both_formats(base, products, monkeypatch):
    wanted = gradients(f"native:{base}", dtype=torch.bfloat16)
    with GPURules(monkeypatch) as rules:
        found = gradients({"backend": f"native:{base}", "products": products}, dtype=torch.bfloat16)
    assert len(rules.products) == 3
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.1 * theirs.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaling", RULES)
def test_the_proof_names_the_engine_that_multiplies(scaling, dtype, monkeypatch):
    """On a CPU with bf16 products: rowwise results are computed in bf16 whatever their dtype."""
    read = []

    class Engines(dict):
        def __getitem__(self, engine):
            read.append(engine)
            return super().__getitem__(engine)

    monkeypatch.setattr(hardware, "cpu_bf16", lambda: True)
    monkeypatch.setattr(engines, "VALUES", Engines(engines.VALUES))
    model = nn.Sequential(nn.Linear(32, 32))
    fp8_backends.prepare(model, None, f"native:{scaling}")
    model.to(dtype)(torch.randn(32, 32, dtype=dtype))
    assert {*read} == {model[0].fp8_engine}


def test_a_rule_that_says_too_little_is_an_error():
    class Cube(Rule):
        name = "cube"

        def from_amax(self, tensor):
            return "cube root"

    amax, states = torch.tensor(2.0), torch.zeros(1, 3, 4, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="'cube root'"):
        Cube().scale(amax, E4M3, INPUT, None)
    for roll in (
        lambda: Cube().rolled(states, (E4M3, E4M3, E4M3)),
        lambda: Cube().rolled_in_forward(states, amax, 0, "max", 1),
    ):
        with pytest.raises(NotImplementedError, match="cube does not say"):
            roll()
