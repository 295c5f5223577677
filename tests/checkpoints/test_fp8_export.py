"""`fp8_backends.checkpoints.export`: the codes of training, in checkpoints for stock
transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from expert_families import build
from tiny_checkpoints import (
    IDS,
    LAYERS,
    SCALES,
    codes_of,
    config_of,
    llama,
    load,
    logits,
    loss_of,
    same_bits,
    stored,
    train,
    trained,
    values,
    values_of,
)
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError
from fp8_backends.checkpoints import exporting
from fp8_backends.compute.native import linear


@pytest.fixture
def multiplied(monkeypatch):
    """Return a function to run a training forward and collect each layer's codes in fprop: (codes,
    scale_inv)."""

    def run(model):
        found, running = {}, []
        multiply = linear.fp8_product

        def recorded(rule, x8, w8, *arguments, **how):
            found[running[-1]] = tuple(w8)
            return multiply(rule, x8, w8, *arguments, **how)

        monkeypatch.setattr(linear, "fp8_product", recorded)
        hooks = [
            layer.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            for name, layer in model.named_modules()
            if isinstance(layer, linear.FP8Linear)
        ]
        with torch.autocast("cpu", torch.bfloat16):
            model.train()(input_ids=IDS)
        for hook in hooks:
            hook.remove()
        return found

    return run


@pytest.mark.parametrize(
    ("spec", "format", "grid"),
    [
        ("native:blockwise", "finegrained_fp8", "block"),
        ("msamp:O3", "finegrained_fp8", "block"),
        ("msamp:O4", "compressed-tensors", "tensor"),
        ("native:delayed", "finegrained_fp8", "block"),
        ("native:rowwise", "compressed-tensors", "channel"),
    ],
)
def test_export_writes_codes_of_products(spec, format, grid, multiplied, tmp_path):
    model = trained(spec)
    used = multiplied(model)
    result = fp8_backends.checkpoints.export(model, tmp_path, format)
    assert result.exact == list(used) and len(used) == 14 and not result.rounded
    assert list(result.high_precision) == ["lm_head"] and result.grid == grid
    tensors = stored(tmp_path)
    for name, (codes, scale_inv) in used.items():
        scales = tensors[f"{name}.{SCALES[format]}"]
        assert same_bits(tensors[f"{name}.weight"], codes)
        assert scales.dtype == torch.float32 and torch.equal(scales, scale_inv.expand(scales.shape))


@pytest.mark.parametrize("format", SCALES)
def test_stock_transformers_computes_with_exported_values(format, tmp_path):
    model = trained("native:blockwise")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fp8_backends.checkpoints.export(model, tmp_path, format)
    loaded = load(tmp_path, format)
    written = values_of(stored(tmp_path), SCALES[format])
    assert (
        loaded.lm_head.weight is loaded.model.embed_tokens.weight
        and "lm_head.weight" not in written
    )
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in written.items())
    # our FP8 products and stock products of the same values differ by the activations' loss in E4M3
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        in_fp8 = model(IDS).logits.float()
    assert (logits(loaded) - in_fp8).norm() < 0.05 * in_fp8.norm()
    plain = llama()
    plain.load_state_dict(written | {"lm_head.weight": written["model.embed_tokens.weight"]})
    assert torch.equal(logits(loaded), logits(plain))
    # and the model continues unchanged
    assert not hasattr(model.config, "quantization_config")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("spec", "format"), list(zip(("msamp:O3", "native:blockwise"), SCALES, strict=True))
)
def test_loaded_checkpoint_trains_and_reexports_bitwise(spec, format, tmp_path):
    model = trained(spec)
    fp8_backends.checkpoints.export(model, tmp_path / "first", format)
    again = load(tmp_path / "first", format)
    assert all(parameter.requires_grad for parameter in again.parameters())
    fp8_backends.prepare(again, None, spec)
    fp8_backends.checkpoints.export(again, tmp_path / "second", format)
    first, second = stored(tmp_path / "first"), stored(tmp_path / "second")
    assert first.keys() == second.keys() and all(
        same_bits(first[name], second[name]) for name in first
    )
    assert config_of(tmp_path / "first") == config_of(tmp_path / "second")
    went_on = train(again.train(), spec, 3)
    assert went_on[0] == loss_of(model).item(), "equal codes multiply to equal bits"
    assert went_on[2] < went_on[0]


def test_block_with_largest_code_224_reexports_same_values(tmp_path):
    """Loaded, its largest value is 448 of half the scale: the next export has codes twice as
    large."""
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:128, :128].clamp_(-0.05, 0.05)[0, 0] = 225 / 4096
    fp8_backends.prepare(model, None, "native:blockwise")
    for folder in ("first", "second", "third"):
        fp8_backends.checkpoints.export(model, tmp_path / folder)
        model = load(tmp_path / folder)
        fp8_backends.prepare(model, None, "native:blockwise")
    first, second, third = (stored(tmp_path / folder) for folder in ("first", "second", "third"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert first[name][0, 0] == 224 and second[name][0, 0] == 448
    assert torch.equal(
        values_of(first, SCALES["finegrained_fp8"])[name],
        values_of(second, "weight_scale_inv")[name],
    )
    assert all(same_bits(second[each], third[each]) for each in second)


@pytest.mark.parametrize(
    ("spec", "format", "exact", "rounded"),
    [
        ("native:blockwise", "finegrained_fp8", {"q_proj", "k_proj", "v_proj", "o_proj"}, set()),
        ("native:blockwise", "compressed-tensors", set(), set(LAYERS)),
        ("msamp:O3", "compressed-tensors", set(LAYERS), set()),
    ],
)
def test_sizes_not_divisible_by_128_export(spec, format, exact, rounded, tmp_path):
    """Weights without an exact form in a format are rounded, or stay unchanged."""
    model = trained(spec, hidden=192, inner=320)
    result = fp8_backends.checkpoints.export(model, tmp_path, format)
    assert {name.rpartition(".")[2] for name in result.exact} == exact
    assert {name.rpartition(".")[2] for name in result.rounded} == rounded
    assert {name.rpartition(".")[2] for name in result.high_precision} == {
        *LAYERS,
        "lm_head",
    } - exact - rounded
    written = values_of(stored(tmp_path), SCALES[format])
    loaded = load(tmp_path, format).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in written.items())
    for name in result.high_precision.keys() - {"lm_head"}:
        assert torch.equal(written[f"{name}.weight"], model.state_dict()[f"{name}.weight"])


def test_a_layer_of_another_rule_is_rounded_to_the_groups_of_the_file(tmp_path):
    model = llama()
    layers = {"*.q_proj": "native:rowwise"}
    fp8_backends.prepare(model, None, {"backend": "native:mxfp8", "layers": layers})
    result = fp8_backends.checkpoints.export(model, tmp_path, "compressed-tensors")
    assert result.grid == "group" and len(result.exact) == 12 and len(result.rounded) == 2
    loaded = load(tmp_path, "compressed-tensors").state_dict()
    for name in result.rounded:
        weight = model.state_dict()[f"{name}.weight"]
        torch.testing.assert_close(
            loaded[f"{name}.weight"], weight, rtol=2**-4, atol=2**-16 * weight.abs().max().item()
        )


def test_unequal_scales_are_not_split_into_other_blocks(tmp_path):
    """transformers without a GPU would cut 192 rows into two blocks of 96."""
    model = llama(hidden=192, inner=384)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[128:] *= 64
    fp8_backends.prepare(model, None, "native:blockwise")
    result = fp8_backends.checkpoints.export(model, tmp_path)
    assert "no multiples of 128" in result.high_precision["model.layers.0.self_attn.q_proj"]
    assert "model.layers.1.self_attn.q_proj" in result.exact
    loaded = load(tmp_path).state_dict()
    written = values_of(stored(tmp_path), SCALES["finegrained_fp8"])
    assert all(torch.equal(loaded[name], value) for name, value in written.items())


@pytest.mark.nightly
@pytest.mark.parametrize("spec", ["ao", "native:mxfp8"])
def test_codes_of_other_rules_are_recast_with_notice(spec, tmp_path, capsys):
    model = trained(spec)
    result = fp8_backends.checkpoints.export(model, tmp_path)
    assert len(result.rounded) == 14 and not result.exact
    assert "14 rounded to FP8 (its" in capsys.readouterr().err
    written = values_of(stored(tmp_path), SCALES["finegrained_fp8"])
    for name in result.rounded:
        weight = model.state_dict()[f"{name}.weight"]
        # half a unit in the last of E4M3's three bits, or of its smallest numbers, 2**-10 of a
        # scale
        bound = weight.abs() / 16 + weight.abs().max() * 2**-17
        assert ((written[f"{name}.weight"] - weight).abs() <= bound).all()


def test_excluded_layers_stay_unchanged_and_large_files_are_split(tmp_path):
    model = llama(tied=False)
    recipe = fp8_backends.NativeRecipeKwargs(scaling="blockwise", exclude=["*.0.mlp.*"])
    fp8_backends.prepare(model, None, recipe)
    result = fp8_backends.checkpoints.export(model, tmp_path, max_shard_size="300KB")
    assert result.high_precision["model.layers.0.mlp.up_proj"].startswith("left out by exclude")
    assert (tmp_path / "model.safetensors.index.json").exists() and len(result.exact) == 11
    assert (
        "model.layers.0.mlp.up_proj"
        in config_of(tmp_path)["quantization_config"]["modules_to_not_convert"]
    )
    loaded = load(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(
        loaded.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight
    )


def test_weight_tied_to_embedding_stays_unchanged(tmp_path):
    model = llama()
    fp8_backends.prepare(
        model, None, fp8_backends.NativeRecipeKwargs(scaling="blockwise", include=["*"])
    )
    result = fp8_backends.checkpoints.export(model, tmp_path)
    assert result.high_precision == {
        "lm_head": "its weight is that of model.embed_tokens.weight too"
    }
    assert torch.equal(load(tmp_path).lm_head.weight, model.lm_head.weight)


def test_suffix_names_are_distinguished():
    from transformers.quantizers.quantizers_utils import should_convert_module

    config = exporting.CHECKPOINT_FORMATS["finegrained_fp8"].config(
        "block", ["proj", "head"], ["layers.0.up_proj"]
    )
    left = config["modules_to_not_convert"]
    assert not should_convert_module("proj", left) and not should_convert_module("head", left)
    assert should_convert_module("layers.0.up_proj", left)


def test_experts_stay_unchanged_and_load(tmp_path):
    model = build("mixtral")
    fp8_backends.prepare(model, None, "native:dynamic")
    result = fp8_backends.checkpoints.export(model, tmp_path)
    assert result.high_precision["model.layers.0.mlp.experts.down_proj"].startswith(
        "the weights of experts"
    )
    assert any(name.endswith("q_proj") for name in result.exact)
    assert (
        "model.layers.0.mlp.experts"
        in config_of(tmp_path)["quantization_config"]["modules_to_not_convert"]
    )
    loaded = load(tmp_path)
    assert torch.equal(
        loaded.state_dict()["model.layers.0.mlp.experts.down_proj"],
        model.state_dict()["model.layers.0.mlp.experts.down_proj"],
    )


def test_unsupported_models_are_refused_with_a_fix(tmp_path):
    def refused(model, *args):
        with pytest.raises(FP8BackendError) as error:
            fp8_backends.checkpoints.export(model, tmp_path, *args)
        assert not list(tmp_path.iterdir())
        return str(error.value)

    assert 'prepare(model, None, "native:blockwise") comes first' in refused(llama())
    plain = nn.Sequential(nn.Linear(128, 128))
    assert "Sequential is no transformers model" in refused(
        fp8_backends.prepare(plain, None, "native")[0]
    )
    model = llama()
    fp8_backends.prepare(model, None, "native:blockwise")
    assert "there are finegrained_fp8, compressed-tensors" in refused(model, "fp8")
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    assert "model.layers.1.mlp.up_proj: its weight is not finite" in refused(broken)
    odd = llama(hidden=136, inner=129)
    fp8_backends.prepare(
        odd, None, fp8_backends.NativeRecipeKwargs(scaling="blockwise", include=["up_proj"])
    )
    odd.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e3
    odd.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e3
    assert "can hold no weight of this model in FP8" in refused(odd)


def test_adapters_must_be_merged_first(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    fp8_backends.prepare(model, None, "native:blockwise")
    for each in (model, model.base_model.model):
        with pytest.raises(FP8BackendError, match="merge_and_unload"):
            fp8_backends.checkpoints.export(each, tmp_path)


def test_frozen_fp8_weights_are_written_unchanged(tmp_path):
    model = llama().requires_grad_(False)
    recipe = fp8_backends.NativeRecipeKwargs(fp8_params=True)
    fp8_backends.prepare(model, None, recipe)
    result = fp8_backends.checkpoints.export(model, tmp_path)
    assert len(result.exact) == 14
    tensors = stored(tmp_path)
    for name, codes in codes_of(tensors).items():
        scales = tensors[f"{name}.weight_scale_inv"]
        assert torch.equal(values(codes, scales), model.state_dict()[f"{name}.weight"])
