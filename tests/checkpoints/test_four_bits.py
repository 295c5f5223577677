"""Frozen bases in 4 bits: NVFP4 and MXFP4 of compressed-tensors, NVFP4 of ModelOpt, and FP8 with
one scale."""

from __future__ import annotations

import copy
import io
import itertools
import json

import accelerate
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny_checkpoints import IDS, config_of, llama, load, logits, same_bits, stored, with_lora
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError, RecipeError, checkpoints
from fp8_backends.compute.native import NativeCompute
from fp8_backends.tensors.block_codes import PACKED_MXFP4, PACKED_NVFP4, BlockCodes

BYTES = {"NVFP4": 0.5625, "MXFP4": 0.53125}


def write(folder, kind: str, preset: str | None = None, **sizes) -> None:
    """Quantize a tiny bf16 Llama by compressed-tensors itself."""
    model, scheme = (
        llama(**sizes).bfloat16(),
        preset_name_to_scheme(preset or f"{kind}A16", ["Linear"]),
    )
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for layer in (module for module in model.modules() if hasattr(module, "quantization_scheme")):
        weight = layer.weight.detach().float()
        amax = weight.unflatten(1, (-1, scheme.weights.group_size)).abs().amax(-1)
        if kind == "NVFP4":
            scale = 448 * 6 / weight.abs().max()
            layer.weight_global_scale.data.fill_(scale)
            layer.weight_scale.data.copy_((amax * scale / 6).to(torch.float8_e4m3fn))
        else:
            layer.weight_scale.data.copy_(2 ** (amax.log2().floor() - 2))
        layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.fixture(scope="module", params=BYTES)
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / request.param
    write(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvfp4")
    write(folder, "NVFP4")
    return folder


def frozen(folder) -> nn.Module:
    model = load(folder, None).train()
    assert len(checkpoints.freeze_codes(model)) == 14
    return model


def gradients(model: nn.Module, spec: str, steps: int = 2) -> dict[str, torch.Tensor]:
    """Prepare and train adapters; return the loss and gradients of the last step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    fp8_backends.prepare(model, optimizer, spec)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
    return {
        "loss": loss,
        **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


def written_codes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return codes and scales in memory under their names in a checkpoint."""
    weights = {
        name.replace("base_model.model.", "").replace("base_layer.", ""): parameter
        for name, parameter in model.named_parameters()
        if isinstance(parameter, BlockCodes)
    }
    return {
        f"{name.removesuffix('weight')}{part}": tensor
        for name, weight in weights.items()
        for part, tensor in zip(weight.code_layout.parts, weight.parts, strict=True)
    }


def is_whole(found: dict[str, torch.Tensor], folder) -> bool:
    expected = {name: tensor for name, tensor in stored(folder).items() if "proj" in name}
    return found.keys() == expected.keys() and all(
        same_bits(found[name], expected[name]) for name in found
    )


def test_values_equal_the_decode_of_compressed_tensors(base):
    model, plain, reference = frozen(base), load(base, None), load(base, "compressed-tensors")
    assert len(checkpoints.dequantize(plain)) == 14 and all(
        p.requires_grad for p in plain.parameters()
    )
    assert plain.state_dict().keys() == reference.state_dict().keys()
    for name, expected in reference.state_dict().items():
        assert torch.equal(model.get_parameter(name) + 0, expected) and torch.equal(
            plain.state_dict()[name], expected
        )
    assert torch.equal(logits(model), logits(reference)), (
        "also without prepare, in no products of ours"
    )
    assert checkpoints.dequantize(model) and torch.equal(logits(model), logits(reference))
    assert type(model.model.layers[0].mlp.up_proj.weight) is nn.Parameter


@pytest.mark.parametrize("kind", BYTES)
def test_every_code_and_scale_decodes_as_in_compressed_tensors(kind):
    """All bytes of codes under all finite scales; E8M0's 255 is NaN by its standard, and inf
    there."""
    scheme = preset_name_to_scheme(f"{kind}A16", ["Linear"])
    scales = (
        torch.arange(255, dtype=torch.uint8)
        .unsqueeze(1)
        .repeat(1, 512 // scheme.weights.group_size)
    )
    tensors = {
        "weight_packed": torch.arange(256, dtype=torch.uint8).repeat(255, 1),
        "weight_scale": scales if kind == "MXFP4" else scales.view(torch.float8_e4m3fn),
        **({"weight_global_scale": torch.tensor([1234.5])} if kind == "NVFP4" else {}),
    }
    compressor = BaseCompressor.get_value_from_registry(f"{kind.lower()}-pack-quantized")
    expected = compressor.decompress(tensors, scheme)["weight"]
    layout = PACKED_NVFP4 if kind == "NVFP4" else PACKED_MXFP4
    # `+ 0` would lose signs of zeros
    found = BlockCodes.of(tensors, torch.bfloat16, layout).exact()
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)) and torch.equal(
        found.signbit(), expected.signbit()
    )


@pytest.mark.parametrize(
    ("scaling", "base"),
    list(zip(NativeCompute.scalings, itertools.cycle(BYTES), strict=False)),
    indirect=["base"],
)
def test_adapters_train_over_codes_as_over_their_values(scaling, base):
    """Every rule casts the decoded values: equal to the bit, and the codes stay."""
    model = with_lora(frozen(base))
    found, expected = (
        gradients(each, f"native:{scaling}")
        for each in (model, with_lora(load(base, "compressed-tensors")))
    )
    assert found.keys() == expected.keys() and len(found) == 29
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert is_whole(written_codes(model), base)
    audit = fp8_backends.audit(model)
    assert (
        BYTES[base.name] <= audit.bytes_per_element["weight"] <= BYTES[base.name] + 4 / (128 * 256)
    )
    assert all(count["wgrad"] == 0 for count in audit.products.values())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert f"from {base.name}" in repr(
        model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    )


@pytest.mark.nightly
def test_compiled_gradients_equal_eager(nvfp4):
    block = nn.Sequential(frozen(nvfp4).model.layers[0].mlp.up_proj.float())
    fp8_backends.prepare(block, None, "native:rowwise")
    inputs = [
        torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for _ in range(2)
    ]
    for run, x in zip(
        (block, torch.compile(block, backend="aot_eager", fullgraph=True)), inputs, strict=True
    ):
        run(x).square().sum().backward()
    assert inputs[0].grad.any() and torch.equal(inputs[0].grad, inputs[1].grad)


def test_copies_and_saved_states_keep_codes(base):
    model = with_lora(frozen(base))
    fp8_backends.prepare(model, None, "native:rowwise")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert {type(tensor) for tensor in model.state_dict().values()} == {torch.Tensor}
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        assert is_whole(written_codes(model), base)
    again = copy.deepcopy(model)
    assert is_whole(written_codes(again), base)
    weight = again.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    for copied in (
        torch.load(file, weights_only=True),
        copy.deepcopy(weight),
        weight.to(torch.float32),
    ):
        assert torch.equal((copied + 0).to(weight.dtype), weight + 0), "with the same layout"
    with checkpoints.plain_weights(again):
        assert type(weight) is nn.Parameter
    assert is_whole(written_codes(again), base)
    name = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
    state[name][0, 0] += 1
    for assign in (False, True):
        with pytest.raises(
            (RuntimeError, FP8BackendError), match="cannot take other values without a loss"
        ):
            model.load_state_dict(state, assign=assign)
        assert is_whole(written_codes(model), base)


@pytest.mark.parametrize(
    ("spec", "base"),
    [("native:rowwise", "MXFP4"), ({"backend": "native", "layers": {"last": 1}}, "NVFP4")],
    indirect=["base"],
)
def test_training_and_export_write_the_same_file(spec, base, tmp_path):
    """Codes of layers in high precision, here the last block, are written all the same."""
    model = with_lora(frozen(base))
    gradients(model, spec)
    model = model.unload()
    result = checkpoints.export(model, tmp_path, f"{base.name.lower()}-pack-quantized")
    assert (
        len(result.exact) == 14
        and not result.rounded
        and list(result.high_precision) == ["lm_head"]
    )
    before, after = stored(base), stored(tmp_path)
    assert before.keys() == after.keys() and all(
        same_bits(before[name], after[name]) for name in before
    )
    schemes = [
        config_of(folder)["quantization_config"]["config_groups"]["group_0"]
        for folder in (base, tmp_path)
    ]
    assert schemes[0]["weights"] == schemes[1]["weights"]
    assert torch.equal(logits(load(tmp_path, None)), logits(load(base, None)))


def test_merged_adapters_are_rounded_and_unmerged_layers_stay(base, tmp_path):
    torch.manual_seed(1)
    config = LoraConfig(r=8, target_modules=["up_proj"], init_lora_weights=False)
    model = get_peft_model(frozen(base), config).train()
    fp8_backends.prepare(model, None, "native:rowwise")
    model(input_ids=IDS, labels=IDS).loss.backward()
    with pytest.raises(FP8BackendError, match=r"restore\(model\) makes weights plain, to merge"):
        model.merge_and_unload()
    fp8_backends.restore(model)
    merged = model.merge_and_unload()
    fp8_backends.prepare(merged, None, "native:rowwise")
    result = checkpoints.export(merged, tmp_path, f"{base.name.lower()}-pack-quantized")
    assert len(result.rounded) == 14 and f"rounded to {base.name}" in str(result)
    read = load(tmp_path, "compressed-tensors").state_dict()
    for name, weight in merged.state_dict().items():
        if (
            "up_proj" in name
            # half a step of E2M1 is at most a sixth of the block's largest value, scales round by
            # 1/16
        ):
            amax = (
                weight.float()
                .unflatten(1, (-1, 16 if base.name == "NVFP4" else 32))
                .abs()
                .amax(-1, keepdim=True)
            )
            bound = amax.expand(-1, -1, 16 if base.name == "NVFP4" else 32).flatten(1) * (
                1 / 6 + 1 / 16
            )
            assert ((read[name].float() - weight.float()).abs() <= bound).all()
        else:
            assert torch.equal(read[name], weight)


def test_unfrozen_codes_and_other_backends_are_refused_with_a_fix(nvfp4, tmp_path):
    with pytest.raises(
        RecipeError,
        match=r"q_proj and 13 more: .* never train.*freeze_codes\(model\)\s+before PEFT",
    ):
        fp8_backends.prepare(load(nvfp4, None), None, "native:dynamic")
    with pytest.raises(RecipeError, match="never train"):
        fp8_backends.prepare(load(nvfp4, None).requires_grad_(False), None, "native:dynamic")
    model = frozen(nvfp4)
    for spec in ("ao:rowwise", "msamp:O2"):
        with pytest.raises(
            RecipeError,
            match=r"q_proj.weight: .* does not multiply frozen NVFP4 codes.*use native:\.\.\.",
        ):
            fp8_backends.prepare(model, None, spec)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    with pytest.raises(
        RecipeError, match="codes of a checkpoint, leaves no weight in high precision"
    ):
        fp8_backends.prepare(model, None, "native:dynamic")
    write(tmp_path, "INT4", "W4A16")
    integers = load(tmp_path, None)
    for function in (checkpoints.freeze_codes, checkpoints.dequantize):
        with pytest.raises(
            FP8BackendError, match="neither NVFP4 nor MXFP4.*CompressedTensorsConfig"
        ):
            function(integers)


def test_experts_of_gpt_oss_are_refused_by_name():
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    sizes = {"num_local_experts": 2, "intermediate_size": 32, "hidden_size": 32}
    model = nn.ModuleDict(
        {"experts": Mxfp4GptOssExperts(GptOssConfig(**sizes)), "linear": nn.Linear(32, 32)}
    )
    with pytest.raises(
        RecipeError,
        match=r"experts: Mxfp4GptOssExperts .* no gradients.*Mxfp4Config\(dequantize=True\)",
    ):
        fp8_backends.prepare(model, None, "native:dynamic")


@pytest.fixture
def modelopt(nvfp4, tmp_path):
    """The checkpoint as ModelOpt writes it: tensor scales are inverse, activations have scales."""
    names = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}
    tensors = {}
    for name, tensor in stored(nvfp4).items():
        layer, _, part = name.rpartition(".")
        if part == "weight_packed":
            tensors[f"{layer}.input_scale"] = torch.tensor(0.01)
        tensors[f"{layer}.{names.get(part, part)}"] = (
            1 / tensor[0] if part == "weight_global_scale" else tensor
        )
    config = config_of(nvfp4) | {
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_modelopt_checkpoint_loads_trains_and_goes_out_as_nvfp4(modelopt, nvfp4, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(modelopt)
    with accelerate.init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert len(checkpoints.load_codes(model, modelopt)) == 14
    assert model.lm_head.weight is model.model.embed_tokens.weight and not hasattr(
        model.config, "quantization_config"
    )
    tensors = stored(modelopt)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            codes, scales, scale = (
                tensors[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")
            )
            assert same_bits(layer.weight.codes, codes) and same_bits(
                layer.weight.scale_inv, scales
            )
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
            numbers = table[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(1)
            values = numbers * (scales.float() * scale).repeat_interleave(16, 1)
            assert all(
                torch.equal(each.weight + 0, values.bfloat16())
                for each in (layer, copy.deepcopy(layer))
            )
    gradients(with_lora(copy.deepcopy(model)), "native:dynamic")
    fp8_backends.prepare(model, None, "native:rowwise")
    result = checkpoints.export(model, tmp_path / "out", "nvfp4-pack-quantized")
    written, before = stored(tmp_path / "out"), stored(nvfp4)
    assert len(result.exact) == 14
    assert all(same_bits(written[name], before[name]) for name in before if "global" not in name)


def test_fp8_of_comfyui_loads_and_trains():
    torch.manual_seed(0)
    weight, scale = torch.randn(96, 64), torch.tensor(0.013)
    tensors = {
        "net.0.weight": (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn),
        "net.0.scale_weight": scale,
        "net.0.scale_input": torch.ones(()),
        "net.0.bias": torch.randn(96),
        "net.1.weight": torch.randn(32, 96),
        "net.1.bias": torch.randn(32),
        "net.scaled_fp8": torch.empty(2, dtype=torch.float8_e4m3fn),
        "text_encoder.weight": torch.ones(3),
    }
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
    assert checkpoints.load_codes(model, tensors, prefix="net.") == ["0"]
    values = tensors["net.0.weight"].float() * scale
    assert torch.equal(model[0].weight + 0, values) and torch.equal(
        model[1].weight, tensors["net.1.weight"]
    )
    plain = copy.deepcopy(model)
    assert checkpoints.dequantize(plain) == ["0"] and type(plain[0].weight) is nn.Parameter
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    found = []
    for each in (model, plain):
        fp8_backends.prepare(each, None, "native:mxfp8")
        with torch.autocast("cpu", torch.bfloat16):
            each(x).square().mean().backward()
        found.append([p.grad for p in each.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and len(found[0]) == 3
    assert sum(part.nbytes for part in model[0].weight.parts) == weight.numel() + 4


def test_a_checkpoint_that_does_not_fit_is_refused_whole(modelopt):
    tensors = stored(modelopt)
    name = "model.layers.0.mlp.up_proj"
    wrong = {
        "norm.weight.*missing": {key: value for key, value in tensors.items() if "norm" not in key},
        "extra in the checkpoint: of another name": {**tensors, "extra": torch.ones(3)},
        "input_scale.* kind of codes": {
            key: value for key, value in tensors.items() if "scale_2" not in key
        },
        "other.* is no plain Linear": {
            **tensors,
            **{key.replace(name, "other"): tensors[key] for key in tensors},
        },
        "hold no weight of shape": {
            **tensors,
            f"{name}.weight_scale": tensors[f"{name}.weight_scale"][:, :8],
        },
        "up_proj: its scales are damaged": {
            **tensors,
            f"{name}.weight_scale_2": torch.full_like(tensors[f"{name}.weight_scale_2"], torch.inf),
        },
    }
    for message, broken in wrong.items():
        model = llama().bfloat16()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(FP8BackendError, match=message):
            checkpoints.load_codes(model, broken)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(FP8BackendError, match="neither a safetensors file nor a folder"):
        checkpoints.load_codes(llama(), modelopt / "absent.safetensors")
