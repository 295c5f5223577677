"""Refuse, dequantize, freeze and save models from an FP8 checkpoint."""

from __future__ import annotations

import copy

import pytest
import reference
import torch
from tiny_checkpoints import (
    config_of,
    llama,
    load,
    logits,
    same_bits,
    stored,
    train,
    trained,
    values,
    values_of,
    with_lora,
)
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError, RecipeError
from fp8_backends.convert.conversion import prepared_roots, restore
from fp8_backends.evidence import proof
from fp8_backends.formats.formats import E4M3


def with_fp8_linear(model: nn.Module, block=(128, 128)) -> nn.Module:
    """A copy as transformers loads it on a GPU: its Linear layers are `FP8Linear`, with random
    scales."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

    quantized = copy.deepcopy(model)
    config = FineGrainedFP8Config(weight_block_size=block)
    replace_with_fp8_linear(quantized, ["lm_head"], config, pre_quantized=True)
    for name, layer in quantized.named_modules():
        if isinstance(layer, FP8Linear):
            weight = model.get_submodule(name).weight.detach()
            layer.weight = nn.Parameter((weight * 1000).clamp(-448, 448).to(torch.float8_e4m3fn))
            scales = torch.rand(layer.weight_scale_inv.shape) * 1e-3
            layer.weight_scale_inv = nn.Parameter(scales.to(layer.weight_scale_inv.dtype))
    return quantized


@pytest.mark.parametrize("block", [(128, 128), None])
def test_fp8_linear_becomes_plain_and_trains(block):
    quantized = with_fp8_linear(llama(hidden=192, inner=320), block)
    layer = quantized.model.layers[1].mlp.up_proj
    held = {
        "weight": layer.weight,
        "codes": layer.weight.detach().clone(),
        "scales": layer.weight_scale_inv.detach(),
    }
    with pytest.raises(
        RecipeError,
        match=r"0.self_attn.q_proj and 13 more: .* would never train.*dequantize\(model\)",
    ):
        fp8_backends.prepare(quantized, None, "native:dynamic")
    names = fp8_backends.checkpoints.dequantize(quantized)
    assert len(names) == 14 and "model.layers.1.mlp.up_proj" in names
    assert quantized.model.layers[1].mlp.up_proj is layer and layer.weight is held["weight"]
    assert type(layer) is nn.Linear and layer.__dict__.keys() == nn.Linear(1, 1).__dict__.keys()
    assert (
        torch.equal(layer.weight, values(held["codes"], held["scales"]))
        and layer.weight.dtype == torch.float32
    )
    assert [name for name, _ in quantized.named_parameters()] == [
        name for name, _ in llama().named_parameters()
    ]
    assert fp8_backends.checkpoints.dequantize(quantized) == []
    losses = train(quantized, "msamp:O3", 3)
    assert losses[2] < losses[0] and len(fp8_backends.audit(quantized).products) == 14


def test_plain_weights_take_model_dtype_or_argument():
    for given, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        quantized = with_fp8_linear(llama())
        for parameter in (quantized.model.embed_tokens.weight, *quantized.model.norm.parameters()):
            parameter.data = parameter.data.bfloat16()
        fp8_backends.checkpoints.dequantize(quantized, given)
        assert quantized.model.layers[0].mlp.up_proj.weight.dtype == expected


def test_frozen_fp8_linear_is_reported_as_foreign():
    """Keep it under adapters: foreign FP8, neither high precision nor proven here."""
    quantized = with_fp8_linear(llama())
    for name, parameter in quantized.named_parameters():
        parameter.requires_grad_("_proj" not in name)
    recipe = fp8_backends.NativeRecipeKwargs(include=["lm_head"])
    fp8_backends.prepare(quantized, None, recipe)
    audit = fp8_backends.audit(quantized)
    assert (
        len(audit.foreign_fp8) == 14
        and not audit.high_precision
        and list(audit.products) == ["lm_head"]
    )
    assert all(
        reason.startswith("FP8Linear of transformers") for reason in audit.foreign_fp8.values()
    )
    assert "in FP8 of others" in str(audit) and "in high precision" not in str(audit)
    ((_, root, prepared),) = prepared_roots(quantized)
    found = proof.read_proof(root, prepared)
    assert not found.layers and found.of == {"Linear": 1, "FP8Linear of transformers": 14}
    assert (
        not fp8_backends.audit(with_fp8_linear(llama())).high_precision.keys()
        & audit.foreign_fp8.keys()
    )


FROZEN = {"scaling": "blockwise", "fp8_params": True}


def codes_in(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales of the frozen layers below adapters, by the name without them."""
    layers = (
        (name, layer) for name, layer in model.named_modules() if name.endswith(".base_layer")
    )
    weights = {name.removesuffix(".base_layer"): layer.weight for name, layer in layers}
    assert all(type(weight).__name__ == "BlockCodes" for weight in weights.values())
    return {name: (weight.codes, weight.scale_inv) for name, weight in weights.items()}


@pytest.mark.parametrize("sizes", [(256, 384), (192, 320)])
def test_adapters_train_over_bit_identical_codes(sizes):
    quantized = with_fp8_linear(llama(*sizes))
    before = {
        f"base_model.model.{name}": (
            layer.weight.detach().clone(),
            layer.weight_scale_inv.detach().clone(),
        )
        for name, layer in quantized.named_modules()
        if type(layer).__name__ == "FP8Linear"
    }
    model = with_lora(quantized, lora_alpha=64, init_lora_weights=True)
    losses = train(model, fp8_backends.NativeRecipeKwargs(**FROZEN), 4)
    assert losses[3] < losses[0]
    audit = fp8_backends.audit(model)
    assert len(audit.products) == 14 and not audit.foreign_fp8
    assert all(count["fprop"] == 4 and count["wgrad"] == 0 for count in audit.products.values())
    assert audit.bytes_per_element["weight"] == pytest.approx(1, abs=0.001)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    found = codes_in(model)
    assert found.keys() == before.keys()
    assert all(
        same_bits(a, b) for name in before for a, b in zip(found[name], before[name], strict=True)
    )
    state, plain = model.state_dict(), logits(model)
    assert {type(value) for value in state.values()} == {torch.Tensor}
    with pytest.raises(FP8BackendError, match=r"restore\(model\) makes weights plain, to merge"):
        model.merge_and_unload()
    restore(model)
    assert torch.equal(logits(model), plain) and len(state) == len(model.state_dict())
    assert (logits(model.merge_and_unload()) - plain).abs().max() < 1e-4


def test_products_of_codes_match_products_of_values():
    """Compare with FP64 over reference codes: equal up to FP32 sums, and one bf16 rounding for bf16
    products."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    torch.manual_seed(0)
    layer = FP8Linear(300, 200, block_size=(128, 128))
    layer.weight.data.copy_(torch.randn(200, 300) * 50)
    layer.weight_scale_inv.data.uniform_(1e-3, 2e-3)
    weight = values(layer.weight.detach(), layer.weight_scale_inv.detach()).double()
    model = nn.Sequential(layer).requires_grad_(False)
    fp8_backends.prepare(model, None, fp8_backends.NativeRecipeKwargs(**FROZEN))
    for dtype, bound in ((torch.float32, 2**-20), (torch.bfloat16, 2**-7)):
        x, dy = (
            torch.randn(5, 300, dtype=dtype, requires_grad=True),
            torch.randn(5, 200, dtype=dtype),
        )
        y = model(x)
        y.backward(dy)
        x8, dy8 = (
            reference.dequantize_blocks(
                *reference.quantize_blocks(each.detach(), E4M3, 1, 128), 1, 128
            ).double()
            for each in (x, dy)
        )
        assert ((y - x8 @ weight.t()).abs() <= bound * (x8.abs() @ weight.abs().t())).all()
        assert ((x.grad - dy8 @ weight).abs() <= bound * (dy8.abs() @ weight.abs())).all()


def test_compressed_tensors_codes_stay(tmp_path):
    fp8_backends.checkpoints.export(trained("native:blockwise"), tmp_path, "compressed-tensors")
    model = with_lora(load(tmp_path, None), lora_alpha=64, init_lora_weights=True)
    losses = train(model.train(), fp8_backends.NativeRecipeKwargs(**FROZEN), 3)
    tensors = stored(tmp_path)
    found = codes_in(model)
    assert losses[2] < losses[0] and len(found) == 14
    for name, (codes, scales) in found.items():
        own = name.removeprefix("base_model.model.")
        assert same_bits(codes, tensors[f"{own}.weight"]) and torch.equal(
            scales, tensors[f"{own}.weight_scale"]
        )


def test_unsupported_code_layers_are_refused_with_fix():
    from transformers.integrations.finegrained_fp8 import FP8Experts

    quantized = with_fp8_linear(llama())
    quantized.model.layers[0].mlp.up_proj.weight_scale_inv = nn.Parameter(torch.ones(5, 5))
    with pytest.raises(
        FP8BackendError, match=r"up_proj, FP8Linear.*\(5, 5\) hold no weight.*FineGrainedFP8Config"
    ):
        fp8_backends.checkpoints.dequantize(quantized)
    assert type(quantized.model.layers[0].self_attn.q_proj).__name__ == "FP8Linear", (
        "nothing has changed"
    )
    quantized.model.layers[0].mlp.up_proj.weight_scale_inv = nn.Parameter(
        torch.full((3, 2), torch.nan)
    )
    with pytest.raises(FP8BackendError, match="up_proj, FP8Linear.*scales are damaged"):
        fp8_backends.prepare(quantized.requires_grad_(False), None, {"backend": "native", **FROZEN})
    experts = FP8Experts.__new__(FP8Experts)
    nn.Module.__init__(experts)
    experts.gate_up_proj = nn.Parameter(
        torch.zeros(2, 4, 4).to(torch.float8_e4m3fn), requires_grad=False
    )
    with pytest.raises(FP8BackendError, match="FP8Experts of transformers.*dequantize=True"):
        fp8_backends.checkpoints.dequantize(nn.Sequential(experts))
    with pytest.raises(
        FP8BackendError, match=r"call\s+fp8_backends.checkpoints.dequantize\(model\) before prepare"
    ):
        fp8_backends.checkpoints.export(quantized, "nowhere")


def test_models_dequantized_by_transformers_are_saved_plain(tmp_path):
    """Without a GPU it dequantizes while loading, and `save_pretrained` would write unannounced
    codes."""
    fp8_backends.checkpoints.export(trained("native:blockwise"), tmp_path / "fp8")
    for name, made_plain in (
        ("prepared", lambda model: fp8_backends.prepare(model, None, "native:dynamic")),
        ("dequantized", fp8_backends.checkpoints.dequantize),
    ):
        model = load(tmp_path / "fp8")
        made_plain(model)
        model.save_pretrained(tmp_path / name)
        assert {tensor.dtype for tensor in stored(tmp_path / name).values()} == {torch.float32}
        assert "quantization_config" not in config_of(tmp_path / name)
        again = type(model).from_pretrained(tmp_path / name)
        assert all(
            torch.equal(again.state_dict()[key], value) for key, value in model.state_dict().items()
        )


@pytest.fixture
def loads_codes(monkeypatch):
    """Pretend a GPU with FP8 products: transformers needs one to load `FP8Linear`."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(
        FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None
    )


@pytest.mark.parametrize(
    ("spec", "sizes"), [("native:blockwise", (256, 384)), ("msamp:O3", (192, 320))]
)
def test_gpu_loads_identical_codes_and_values(spec, sizes, loads_codes, tmp_path):
    hidden, inner = sizes
    result = fp8_backends.checkpoints.export(trained(spec, hidden=hidden, inner=inner), tmp_path)
    model, report = type(llama()).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    layers = {
        name: layer for name, layer in model.named_modules() if type(layer).__name__ == "FP8Linear"
    }
    assert list(layers) == result.exact and type(model.lm_head) is nn.Linear
    tensors = stored(tmp_path)
    for name, layer in layers.items():
        assert same_bits(layer.weight.detach(), tensors[f"{name}.weight"])
        assert torch.equal(layer.weight_scale_inv, tensors[f"{name}.weight_scale_inv"])
    assert fp8_backends.checkpoints.dequantize(model) == result.exact and not model.is_quantized
    expected = values_of(tensors, "weight_scale_inv")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    model.save_pretrained(tmp_path / "plain")
    assert {tensor.dtype for tensor in stored(tmp_path / "plain").values()} == {torch.float32}
    assert "quantization_config" not in config_of(tmp_path / "plain")
    assert len(train(model.train(), spec, 1)) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("spec", ["native:blockwise", "native:rowwise", "msamp:O3"])
def test_layers_of_compressed_tensors_become_plain_and_train(spec, tmp_path):
    result = fp8_backends.checkpoints.export(trained(spec), tmp_path, "compressed-tensors")
    plain, model = load(tmp_path, "compressed-tensors"), load(tmp_path, None)
    with pytest.raises(RecipeError, match="13 more: .* would never train"):
        fp8_backends.prepare(model, None, "native:dynamic")
    assert fp8_backends.checkpoints.dequantize(model) == result.exact
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert torch.equal(logits(model), logits(plain)), "its activations are not rounded any more"
    losses = train(model.train(), spec, 3)
    assert losses[2] < losses[0] and not model.is_quantized
    model.save_pretrained(tmp_path / "plain")
    assert {tensor.dtype for tensor in stored(tmp_path / "plain").values()} == {torch.float32}


def test_layers_decompressed_by_compressed_tensors_stay(tmp_path):
    """The first forward of such a model turns codes into frozen weights and wraps every module."""
    fp8_backends.checkpoints.export(trained("msamp:O3"), tmp_path, "compressed-tensors")
    model = load(tmp_path, None)
    logits(model)
    with pytest.raises(
        FP8BackendError,
        match="decompressed it in a forward, and frozen it; load the checkpoint with",
    ):
        fp8_backends.checkpoints.dequantize(model)
