"""`fp8_backends.checkpoints.rollout_weights`: the codes of training, for inference engines, from
memory."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_checkpoints import (
    IDS,
    SCALES,
    codes_of,
    config_of,
    llama,
    loss_of,
    same_bits,
    stored,
    train,
    trained,
    values,
)

import fp8_backends
from fp8_backends import FP8BackendError, RecipeError
from fp8_backends.checkpoints import rollout_weights


def engine_of(model, weights, **config):
    """Load with stock transformers, and compressed-tensors for its format, from memory."""
    from transformers import LlamaForCausalLM

    described = copy.deepcopy(model.config)
    described.quantization_config = weights.quantization_config
    return LlamaForCausalLM.from_pretrained(
        None, config=described, state_dict=dict(weights), dtype=torch.float32, **config
    )


@pytest.mark.parametrize(
    ("spec", "format"),
    [
        ("native:blockwise", "finegrained_fp8"),
        ("native:mxfp8", "compressed-tensors"),
        ("msamp:O4", "finegrained_fp8"),
    ],
)
def test_engine_of_stock_loaders_has_logits_of_trainer(spec, format):
    """Load plain values with the real reader, and multiply them by the trainer's recipe: equal to
    the bit."""
    from transformers import CompressedTensorsConfig, FineGrainedFP8Config

    model = trained(spec)
    reader = {
        "finegrained_fp8": FineGrainedFP8Config,
        "compressed-tensors": CompressedTensorsConfig,
    }[format]
    engine = engine_of(
        model, rollout_weights(model, format), quantization_config=reader(dequantize=True)
    )
    fp8_backends.prepare(engine, None, spec)
    with torch.no_grad():
        expected = model.train()(IDS).logits
        assert torch.equal(engine.train()(IDS).logits, expected)
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        assert not torch.equal(model(IDS).logits, expected), "codes matter"


def test_compressed_tensors_multiplies_yielded_codes():
    """Its own layers, with its own quantization of activations."""
    model = trained("native:rowwise")
    weights = rollout_weights(model, "compressed-tensors")
    engine = engine_of(model, weights)
    with torch.no_grad():
        logits, expected = engine(IDS).logits, model.train()(IDS).logits
    assert engine.model.layers[0].mlp.up_proj.quantization_scheme.weights.strategy == "channel"
    tensors = dict(weights)
    for name, codes in codes_of(tensors).items():
        assert torch.equal(
            engine.get_submodule(name).weight, values(codes, tensors[f"{name}.weight_scale"])
        ), name
    assert (logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("spec", "format"), [("msamp:O2", "finegrained_fp8"), ("native:mxfp8", "compressed-tensors")]
)
def test_rollout_equals_exported_file(spec, format, tmp_path):
    model = trained(spec)
    weights = rollout_weights(model, format)
    result = fp8_backends.checkpoints.export(model, tmp_path, format)
    assert len(result.exact) == 14
    yielded, file = dict(weights), stored(tmp_path)
    assert yielded.keys() == file.keys() and all(
        same_bits(yielded[name], file[name]) for name in file
    )
    assert config_of(tmp_path)["quantization_config"] == weights.quantization_config
    assert weights.high_precision == result.high_precision and list(result.high_precision) == [
        "lm_head"
    ]


def test_each_iteration_yields_present_codes(capsys):
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    fp8_backends.prepare(model, optimizer, "native:blockwise")
    weights = rollout_weights(model)
    assert (
        "14 weights as the FP8 codes that training uses; lm_head in high precision"
        in capsys.readouterr().err
    )
    before = {name: tensor.clone() for name, tensor in weights}
    loss_of(model).backward()
    optimizer.step()
    after = dict(weights)
    assert list(after) == list(before) and "lm_head.weight" not in after, "tied weights come once"
    pairs = [name for name in after if name.endswith(SCALES["finegrained_fp8"])]
    assert len(pairs) == 14 and all(
        after[name].shape and after[name].is_contiguous() for name in pairs
    )
    assert all(
        not same_bits(after[f"{name}.weight"], before[f"{name}.weight"]) for name in codes_of(after)
    )


def test_bare_modules_have_rollout_weights():
    layers = torch.nn.Sequential(
        torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128)
    )
    fp8_backends.prepare(
        layers, None, fp8_backends.NativeRecipeKwargs(scaling="blockwise", exclude=["2"])
    )
    shapes = {
        name: (tuple(tensor.shape), tensor.dtype)
        for name, tensor in rollout_weights(torch.compile(layers))
    }
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    assert shapes == {
        "0.weight": ((256, 128), fp8),
        "0.weight_scale_inv": ((2, 1), fp32),
        "0.bias": ((256,), fp32),
        "2.weight": ((128, 256), fp32),
        "2.bias": ((128,), fp32),
    }
    assert list(dict(rollout_weights(layers[0]))) == ["weight", "weight_scale_inv", "bias"]


def test_inexact_rollouts_are_refused_with_a_fix():
    def refused(model, *args, match):
        with pytest.raises(FP8BackendError, match=match):
            dict(rollout_weights(model, *args))

    refused(llama(), match="comes first")
    rowwise = llama()
    fp8_backends.prepare(rowwise, None, "native:rowwise")
    refused(
        rowwise,
        match=r"q_proj: format='finegrained_fp8' cannot hold .* one scale for a row.* Use another "
        r"format",
    )
    with pytest.raises(RecipeError, match="finegrained_fp8, compressed-tensors"):
        rollout_weights(rowwise, "fp8")
    by_torchao = llama()
    fp8_backends.prepare(by_torchao, None, "ao")
    refused(by_torchao, match="its backend does not tell its codes.*native:blockwise")
    broken = llama()
    train(broken, "native:blockwise", 1)
    weights = rollout_weights(broken)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    with pytest.raises(
        FP8BackendError, match="model.layers.1.mlp.up_proj: its weight is not finite"
    ):
        dict(weights)
    fp8_backends.restore(broken)
    with pytest.raises(FP8BackendError, match="it was restored since"):
        dict(weights)
