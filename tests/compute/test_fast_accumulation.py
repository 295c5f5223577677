"""The recipe field `fast_accumulation`: off, on, or off for named layers."""

import pytest
import torch
from expert_families import make_experts, routed
from torch import nn

import fp8_backends
from fp8_backends.compute import products
from fp8_backends.compute.native import layer_rule
from fp8_backends.errors import RecipeError


@pytest.fixture
def seen(monkeypatch):
    """The fast accumulation of every product."""
    calls, original = [], products.scaled_product

    def spy(a, b, out_dtype, fast_accumulation=False):
        calls.append(fast_accumulation)
        return original(a, b, out_dtype, fast_accumulation)

    monkeypatch.setattr(layer_rule, "scaled_product", spy)
    return calls


def model_of_two():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256))
    return model


def test_an_fp32_weight_has_its_gradient_rounded_once_on_a_gpu():
    def dtype(blocks, device):
        return products.wgrad_dtype(blocks, torch.device(device), torch.float32, torch.bfloat16)

    # a meta tensor stands for a GPU's
    assert dtype(False, "meta") == torch.float32
    assert dtype(False, "cpu") == dtype(True, "meta") == torch.bfloat16


@pytest.mark.parametrize(
    "backend", ["native:dynamic", "native:rowwise", "msamp:O2", "ao:tensorwise", "ao:rowwise"]
)
@pytest.mark.parametrize(
    ("given", "fast"),
    [(True, [1, 1]), (False, [0, 0]), ("2", [1, 0]), (["0", "2"], [0, 0]), ("false", [0, 0])],
)
def test_fast_accumulation_is_on_off_or_off_for_named_layers(backend, given, fast, monkeypatch):
    model = model_of_two()
    fp8_backends.prepare(model, None, {"backend": backend, "fast_accumulation": given})
    flags = []

    def scaled_mm(
        a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
    ):
        flags.append(use_fast_accum)
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(products, "engine_for", lambda *_: products.SCALED_MM)
    model(torch.rand(16, 512, requires_grad=True)).sum().backward()
    assert flags[:2] == [bool(flag) for flag in fast] and not any(flags[2:]) and len(flags) == 6
    shown = [part for part in repr(model).split("\n") if "native" in part]
    assert all(
        ("fast accumulation off" in part) != flag for part, flag in zip(shown, fast, strict=False)
    )
    assert sum(p.grad is not None for p in model.parameters()) == 4


def test_fast_accumulation_is_off_for_experts_by_name(seen):
    root = make_experts("mixtral")
    fields = {"fp8_format": "E4M3", "fast_accumulation": "down_proj"}
    fp8_backends.prepare(root, None, {"backend": "native:dynamic", **fields})
    hidden, chosen, weights = routed(20)
    root.experts(hidden, chosen, weights)
    used = len(chosen.unique())
    assert seen.count(True) == seen.count(False) == used


def test_a_layer_added_later_follows_the_name_too():
    model = model_of_two()
    recipe = fp8_backends.resolve({"backend": "native", "fast_accumulation": ["0"]})
    fp8_backends.prepare(model, None, recipe)
    model.append(nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 64)))
    fp8_backends.prepare(model, None, recipe)
    layers = [model[0], model[2], model[3][0], model[3][1]]
    assert [layer.fp8_rule.fast_accumulation for layer in layers] == [False, True, False, True]


def test_fast_accumulation_that_cannot_be_is_refused_by_name():
    for backend in ("native:blockwise", "native:mxfp8", "te:blockwise", "te:mxfp8"):
        with pytest.raises(RecipeError, match="fast_accumulation is not read by"):
            fp8_backends.resolve({"backend": backend, "fast_accumulation": False})
        assert fp8_backends.resolve({"backend": backend, "fast_accumulation": True})
    for pattern, said in (
        ("q_proj", "no weight of this model matches 'q_proj'"),
        ("2", "only layers in high precision"),
    ):
        with pytest.raises(RecipeError, match=said):
            fields = {"backend": "native", "fast_accumulation": pattern, "exclude": "2"}
            fp8_backends.prepare(model_of_two(), None, fields)
    with pytest.raises(RecipeError, match="fast_accumulation"):
        fp8_backends.resolve({"backend": "native", "fast_accumulation": 7})
    from torchao.float8 import Float8LinearConfig

    with pytest.raises(RecipeError, match="gemm_config_output"):
        fp8_backends.resolve(
            {"backend": "ao", "config": Float8LinearConfig(), "fast_accumulation": False}
        )
