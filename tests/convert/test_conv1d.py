"""Compare transformers' Conv1D, the layer of GPT-2, in FP8 with a Linear on the transposed weight,
bitwise."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from conv1d_twins import conv, gpt2, linear_twin, results_of_steps
from model_families import batch, loss_of, train
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

import fp8_backends
from fp8_backends.compute.native import NativeCompute
from fp8_backends.convert import conversion
from fp8_backends.errors import FP8BackendError
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.tensors.scaled_tensor import ScaledTensor

NATIVE = [f"native:{scaling}" for scaling in NativeCompute.scalings]
AO = ["ao:tensorwise", "ao:rowwise", "ao:rowwise_with_gw_hp"]
LEVELS = ["msamp:O1", "msamp:O2", "msamp:O3", "msamp:O4"]


def convert(model: nn.Module, spec: str = "native:dynamic", **fields) -> conversion.Prepared:
    recipe = FP8RecipeKwargs(backend=spec, **fields)
    return conversion.convert(model, recipe)


def prepared(model: nn.Module, spec: str = "native:dynamic", **fields):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    return fp8_backends.prepare(model, optimizer, FP8RecipeKwargs(backend=spec, **fields))


# One layer

HIGH_PRECISION = [(True, False, False), (False, True, False), (False, False, True)]


@pytest.mark.parametrize(
    ("sizes", "spec", "fields"),
    [
        *[((160, 256), spec, {}) for spec in (*NATIVE, *AO)],
        *[((20, 37), spec, {}) for spec in NATIVE],  # padded
        *[
            ((32, 48), spec, {"override_linear_precision": high})
            for spec in ("native:dynamic", "native:rowwise", "native:blockwise")
            for high in HIGH_PRECISION
        ],
    ],
)
def test_products_match_linear_bitwise(sizes, spec, fields):
    """The gradient has the layout of the Parameter."""
    torch.manual_seed(0)
    module = conv(*sizes)
    linear = linear_twin(module)
    convert(module, spec, **fields)
    convert(linear, spec, **fields)
    results = []
    for layer in (module, linear):
        results.append(list(results_of_steps(layer)))
    for of_conv, of_linear in zip(*results, strict=True):
        assert torch.equal(of_conv, of_linear)
    module(torch.randn(2, sizes[0])).sum().backward()
    assert module.weight.grad.shape == sizes and module.weight.grad.is_contiguous()


def test_layer_stays_a_conv1d_with_its_parameters():
    module = conv(32, 96)
    attributes, weight, bias = set(module.__dict__), module.weight, module.bias
    prepared_ = convert(module)
    assert isinstance(module, Conv1D) and not isinstance(module, nn.Linear)
    assert module.weight is weight and module.bias is bias and weight.shape == (32, 96)
    assert list(module.state_dict()) == ["weight", "bias"]
    (product,) = prepared_.report.products
    assert (product.kind, product.in_features, product.out_features) == ("Conv1D", 32, 96)
    assert (module.in_features, module.out_features) == (32, 96)
    assert repr(module) == "FP8Conv1D(nf=96, nx=32, native:dynamic i:e4m3,w:e4m3,go:e5m2)"
    conversion.restore(module)
    assert type(module) is Conv1D and set(module.__dict__) == attributes and module.weight is weight


def test_evaluation_empty_inputs_and_wrong_sizes_behave_as_plain():
    for spec in ("native:dynamic", "ao:tensorwise"):
        module, x = conv(32, 96), torch.randn(4, 32)
        plain = module(x)
        convert(module, spec)
        assert module(torch.empty(0, 32)).shape == (0, 96)
        with pytest.raises(ValueError, match="32 input features got an input of shape"):
            module(torch.randn(4, 96))
        assert torch.equal(module.eval()(x), plain) == (spec != "ao:tensorwise")


class Own(Conv1D):
    pass


def _replaced() -> Conv1D:
    module = conv(32, 32)
    module.forward = lambda x: x
    return module


def _without_parameter() -> Conv1D:
    module = conv(32, 32)
    weight = module.weight.detach()
    del module.weight
    module.weight = weight
    return module


OBSTACLES = {
    "parametrized": lambda: parametrizations.orthogonal(conv(32, 32)),
    "Own is a subclass of Conv1D": lambda: Own(32, 32),
    "forward was replaced": _replaced,
    "no Parameter": _without_parameter,
    "size zero": lambda: Conv1D(0, 32),
    "not a floating-point type": lambda: _with_weight(torch.zeros(32, 32, dtype=torch.int8)),
    "torch.float64 is not one of": lambda: conv(32, 32).double(),
}


def _with_weight(weight: torch.Tensor) -> Conv1D:
    module = conv(32, 32)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@pytest.mark.parametrize("reason", OBSTACLES)
def test_unconverted_conv1d_names_its_reason(reason):
    with pytest.raises(FP8BackendError, match=reason):
        convert(nn.Sequential(OBSTACLES[reason]()))


def test_layers_without_products_stay_in_high_precision(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(NativeCompute, "takes_transposed", False)
        report = convert(nn.Sequential(conv(32, 32), nn.Linear(32, 32))).report
    assert (
        report.converted == ["1"] and "native has no products for it" in report.high_precision["0"]
    )
    report = convert(nn.Sequential(conv(20, 32), conv(32, 32)), "ao").report
    assert report.converted == ["1"] and "not multiples of 16" in report.high_precision["0"]


def test_tied_layers_stay_tied():
    model = nn.Sequential(conv(32, 32), nn.ReLU(), conv(32, 32))
    model[2].weight = model[0].weight
    prepared(model, "msamp:O2")
    assert model[2].weight is model[0].weight and isinstance(model[0].weight, ScaledTensor)
    model(torch.randn(16, 32)).square().mean().backward()
    assert model[0].weight.grad.shape == (32, 32)


# GPT-2


def only_the_head_remains(model: nn.Module, optimizer) -> bool:
    audit = fp8_backends.audit(model, optimizer)
    ran = [
        counts
        for counts in audit.products.values()
        if counts["fprop"] and counts["dgrad"] and counts["wgrad"]
    ]
    return len(ran) == 8 and list(audit.high_precision) == ["lm_head"]


@pytest.mark.parametrize("spec", ["native:mxfp8", "ao:rowwise", "msamp:O2"])
def test_gpt2_matches_linear_layers_and_loads_into_stock(spec, tmp_path):
    """Match losses bitwise, with rounding to nearest at levels."""
    fields = {"rounding": "nearest"} if spec in LEVELS else {}
    model, optimizer = prepared(gpt2(), spec, **fields)
    losses = train(model, optimizer, "gpt2", steps=5)
    assert losses == train(*prepared(gpt2(of_linears=True), spec, **fields), "gpt2", steps=5)
    assert losses[-1] < losses[0] - 0.2
    assert only_the_head_remains(model, optimizer)
    model.save_pretrained(tmp_path)
    stock = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert type(stock.transformer.h[0].mlp.c_fc) is Conv1D
    conversion.restore(model)  # ao computes in FP8 in evaluation, too
    assert torch.equal(logits_of(stock), logits_of(model))


@pytest.mark.parametrize("level", LEVELS)
def test_level_stores_weights_and_gradients_in_conv1d_layout(level):
    model, optimizer = prepared(gpt2(), level)
    loss_of(model, batch("gpt2")).backward()
    weight = model.transformer.h[0].attn.c_attn.weight
    assert weight.codes.dtype == (
        torch.float8_e4m3fn if level in ("msamp:O3", "msamp:O4") else torch.float16
    )
    assert weight.grad.codes.dtype == torch.float8_e4m3fn
    assert weight.shape == weight.grad.shape == (32, 96) and weight.grad.codes.is_contiguous()


@pytest.mark.parametrize("spec", ["native:delayed", "ao:tensorwise"])
def test_copies_train_like_the_original(spec):
    model, optimizer = prepared(gpt2(), spec)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    losses = train(model, optimizer, "gpt2", steps=2)
    for copied in copies:
        own = torch.optim.AdamW(copied.parameters(), lr=3e-3)
        assert train(copied, own, "gpt2", steps=2) == losses


def test_recomputation_and_kept_weight_casts():
    losses = train(*prepared(gpt2()), "gpt2", steps=3)
    model, optimizer = prepared(gpt2())
    model.gradient_checkpointing_enable()
    fp8_backends.convert.stored_weights.keep_weight_casts(model)
    assert train(model, optimizer, "gpt2", steps=3) == losses
    assert all(
        counts["recomputed"] == 3
        for counts in fp8_backends.audit(model, optimizer).products.values()
    )


@pytest.mark.nightly
def test_compiled_without_a_graph_break():
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model, optimizer = prepared(nn.Sequential(nn.GELU(), conv(32, 64)), "msamp:O3")
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        for step in range(2):
            torch.manual_seed(step)  # levels round stochastically
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append((loss.item(), x.grad.norm().item()))
    assert results[:2] == results[2:]


# Adapters, frozen FP8 weights, and files of FP8 codes

LORA = {
    "r": 4,
    "target_modules": ["c_attn", "c_proj", "c_fc"],
    "fan_in_fan_out": True,
    "init_lora_weights": False,
}


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch("gpt2")).logits


@pytest.mark.parametrize("scaling", ["dynamic", "blockwise"])
def test_frozen_fp8_weights_under_merging_adapters(scaling):
    fields = {"scaling": scaling, "fp8_params": True}
    losses = []
    for of_linears in (False, True):
        lora, model = LoraConfig(**{**LORA, "fan_in_fan_out": not of_linears}), gpt2(of_linears)
        torch.manual_seed(0)
        model, optimizer = prepared(get_peft_model(model, lora), "native", **fields)
        losses.append(train(model, optimizer, "gpt2", steps=4))
        assert fp8_backends.audit(model, optimizer).bytes_per_element["weight"] < 1.01
        conversion.restore(model)
        trained = logits_of(model)
        assert torch.allclose(logits_of(model.merge_and_unload()), trained, atol=1e-5)
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_peft_after_prepare_sees_weight_layout():
    model, _ = prepared(gpt2())
    adapted = get_peft_model(model, LoraConfig(**LORA))
    assert adapted.base_model.model.transformer.h[0].attn.c_attn.fan_in_fan_out
    trained, untouched = logits_of(adapted), logits_of(gpt2())
    merged = logits_of(adapted.merge_and_unload())
    assert torch.allclose(merged, trained, atol=1e-5) and not torch.allclose(
        merged, untouched, atol=1e-2
    )


def test_export_skips_conv1d_with_reason(tmp_path):
    model, _ = prepared(gpt2(), "native:blockwise")
    with pytest.raises(FP8BackendError, match="codes of Linear layers alone, not of Conv1D"):
        fp8_backends.checkpoints.export(model, tmp_path)
    model = gpt2()
    model.transformer.h[0].mlp.c_fc = linear_twin(model.transformer.h[0].mlp.c_fc)
    prepared(model, "native:blockwise")
    result = fp8_backends.checkpoints.export(model, tmp_path)
    assert result.exact == ["transformer.h.0.mlp.c_fc"]
    assert "not of Conv1D" in result.high_precision["transformer.h.0.mlp.c_proj"]
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["transformer.h.0.mlp.c_fc.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(
        saved["transformer.h.0.mlp.c_proj.weight"], model.transformer.h[0].mlp.c_proj.weight
    )
