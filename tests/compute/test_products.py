"""`products`: a format or rule for fprop, dgrad or wgrad. The oracle is a layer with one rule for
all products."""

import itertools

import pytest
import torch
import torch.utils.checkpoint
from conv1d_twins import conv_twin
from gpu_rules import GPURules
from torch import nn

import fp8_backends
from fp8_backends import resolve
from fp8_backends.errors import RecipeError

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


@pytest.mark.parametrize("base", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_product_equals_the_product_of_its_own_rule(base, dtype):
    alone = {rule: gradients(f"native:{rule}", dtype=dtype) for rule in RULES}
    for dgrad, wgrad in itertools.product(RULES, RULES):
        mixed = gradients(
            {"backend": f"native:{base}", "products": {"dgrad": dgrad, "wgrad": wgrad}}, dtype=dtype
        )
        wanted = alone[base][0], alone[dgrad][1], alone[wgrad][2]
        assert all(map(torch.equal, mixed, wanted)), (dgrad, wgrad)
    for fprop in RULES:
        mixed = gradients({"backend": f"native:{base}", "products": {"fprop": fprop}}, dtype=dtype)
        assert all(map(torch.equal, mixed, (alone[fprop][0], *alone[base][1:]))), fprop


@pytest.mark.parametrize("level", ["O2", "O3", "O4"])
def test_products_read_the_weights_of_a_level(level):
    alone = {rule: gradients(f"native:{rule}", level) for rule in ("dynamic", "rowwise", "mxfp8")}
    for base, fprop, dgrad in itertools.product(alone, alone, alone):
        products = {"fprop": fprop, "dgrad": dgrad, "wgrad": "bf16"}
        y, dx, _ = gradients({"backend": f"native:{base}", "products": products}, level)
        assert torch.equal(y, alone[fprop][0]) and torch.equal(dx, alone[dgrad][1]), (
            base,
            fprop,
            dgrad,
        )


@pytest.mark.parametrize("base", ["mxfp8", "rowwise", "dynamic"])
def test_formats_of_gradients(base):
    """E4M3 in one product of the gradient and E5M2 in the other equal the products of recipes with
    one format."""
    both = {
        name: gradients({"backend": f"native:{base}", "fp8_format": name})
        for name in ("E4M3", "HYBRID")
    }
    mixed = gradients({"backend": f"native:{base}", "products": {"dgrad": "e5m2", "wgrad": "e4m3"}})
    assert torch.equal(mixed[1], both["HYBRID"][1]) and torch.equal(mixed[2], both["E4M3"][2])
    assert not torch.equal(both["HYBRID"][1], both["E4M3"][1])


@pytest.mark.parametrize(
    "products",
    [{"dgrad": "mxfp8"}, {"wgrad": "rowwise"}, {"fprop": "blockwise", "dgrad": "dynamic"}],
)
@pytest.mark.parametrize("base", ["delayed", "mxfp8"])
def test_compiled_and_recomputed_products_are_the_eager_ones(base, products):
    fields = {"backend": f"native:{base}", "products": products}
    eager = gradients(fields)
    assert all(map(torch.equal, gradients(fields, compiled=True), eager))
    assert all(map(torch.equal, gradients(fields, checkpointed=True), eager))


def test_delayed_scales_follow_the_products_of_their_own_rule():
    """The rule's own products record amaxes; a gradient without one leaves its scale alone."""
    layers = {}
    choices = {
        "own": None,
        "wgrad": {"wgrad": "mxfp8"},
        "no gradient": {"dgrad": "mxfp8", "wgrad": "rowwise"},
    }
    for name, products in choices.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32))
        fp8_backends.prepare(model, None, {"backend": "native:delayed", "products": products})
        for _ in range(3):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
            model(x).square().sum().backward()
        layers[name] = model[0].fp8_scaling
    assert torch.equal(layers["own"], layers["wgrad"])
    assert (
        torch.equal(layers["own"][:2], layers["no gradient"][:2])
        and not layers["no gradient"][2, 2:].any()
    )


def test_conv1d_takes_products():
    linear = nn.Linear(32, 48)
    conv = conv_twin(linear)
    fields = {"backend": "native:dynamic", "products": {"dgrad": "mxfp8", "wgrad": "rowwise"}}
    results = []
    for layer in (linear, conv):
        fp8_backends.prepare(nn.Sequential(layer), None, fields)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        layer(x).square().sum().backward()
        results.append((x.grad, layer.weight.grad if layer is linear else layer.weight.grad.t()))
    assert all(map(torch.equal, *results))


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
        ({"products": {"wgrad": "mxfp"}}, "native has no scaling 'mxfp' .did you mean 'mxfp8'"),
        ({"products": {"wgrad": "delayed"}}, "delayed keeps scales from step to step"),
        (
            {"backend": "native:delayed", "products": {"wgrad": "e4m3"}},
            "one scale for a gradient: give fp8_format",
        ),
        ({"backend": "ao", "products": {"wgrad": "bf16"}}, "products is not read by ao"),
        ({"backend": "te", "products": {"dgrad": "bf16"}}, "with te only wgrad"),
        ({"backend": "te", "products": {"wgrad": "mxfp8"}}, "with te only wgrad"),
        (
            {"products": {"wgrad": "mxfp8"}, "fused_head": True},
            "products by several rules and fused_head do not go",
        ),
        (
            {"products": {"wgrad": "bf16"}, "override_linear_precision": (True, False, False)},
            "disagree",
        ),
    ],
)
def test_contradictory_products_are_refused_by_name(fields, said):
    with pytest.raises(RecipeError, match=said):
        resolve({"backend": "native", **fields})


@pytest.mark.parametrize("base", ["dynamic", "delayed", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize(
    "products", ["dgrad=mxfp8", "wgrad=rowwise", "fprop=blockwise,dgrad=dynamic", "wgrad=dynamic"]
)
def test_a_gpu_accepts_the_operands_of_all_rules(base, products, monkeypatch):
    wanted = gradients(f"native:{base}", dtype=torch.bfloat16)
    with GPURules(monkeypatch) as rules:
        found = gradients({"backend": f"native:{base}", "products": products}, dtype=torch.bfloat16)
    assert len(rules.products) == 3
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.1 * theirs.float().norm()
