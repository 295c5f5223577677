"""Adapters on attention over frozen FP8 experts of transformers, and their refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_checkpoints import same_bits, train, with_lora
from torch import nn
from transformers import (
    FineGrainedFP8Config,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations import finegrained_fp8

import fp8_backends
from fp8_backends import RecipeError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
FAMILIES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(num_local_experts=4, **SIZES)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(num_experts=4, moe_intermediate_size=128, **SIZES),
    ),
}
BLOCKWISE = {"backend": "native:blockwise", "fp8_params": True}


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of codes [..., out, in] with a scale for 128 x 128, in bf16."""
    scales = scales.repeat_interleave(128, -2)[..., : codes.shape[-2], :]
    scales = scales.repeat_interleave(128, -1)[..., : codes.shape[-1]]
    return (codes.float() * scales).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def products_on_the_cpu(monkeypatch):
    """Multiply as on a GPU without transformers' kernels: by the dequantized weight."""

    def fp8_linear(x, weight, scale, block_size=None, bias=None, *others):
        return nn.functional.linear(x, dequantized(weight, scale).to(x.dtype), bias)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)


def loaded(family: str) -> tuple[nn.Module, nn.Module]:
    """Return a frozen model as transformers loads its FP8 checkpoint, and one with its values."""
    torch.manual_seed(0)
    cls, config = FAMILIES[family]
    plain = cls(copy.deepcopy(config)).bfloat16().requires_grad_(False).train()
    model = copy.deepcopy(plain)
    finegrained_fp8.replace_with_fp8_linear(model, ["lm_head", "gate"], FineGrainedFP8Config())
    model.requires_grad_(False)
    values = dict(plain.named_parameters())
    for name, module in model.named_modules():
        for key in [key for key in module._parameters if f"{key}_scale_inv" in module._parameters]:
            weight, value = f"{name}.{key}", values[f"{name}.{key}"]
            scales = torch.rand(module._parameters[f"{key}_scale_inv"].shape) * 1e-4 + 2e-4
            codes = torch.randn(value.shape).mul_(60).to(torch.float8_e4m3fn)
            module._parameters[key] = nn.Parameter(codes, requires_grad=False)
            module._parameters[f"{key}_scale_inv"] = nn.Parameter(scales, requires_grad=False)
            assert weight in values
            value.data.copy_(dequantized(codes, scales))
    return model.to("cpu"), plain


def experts_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if ".experts." in name
    }


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_adapters_train_through_frozen_fp8_experts(family):
    """Attention and experts multiply their codes here, with losses near the dequantized base's."""
    model, plain = loaded(family)
    model, plain = (with_lora(each, target_modules=ATTENTION) for each in (model, plain))
    before = experts_of(model)
    losses = train(model, BLOCKWISE, 6)
    expected = train(plain, "native:blockwise", 6)
    assert losses == pytest.approx(expected, rel=2e-2) and losses[-1] < losses[0]
    after = dict(model.named_parameters())
    assert len(before) == 8
    for name, value in before.items():
        codes, scales = after[name.removesuffix("_scale_inv")].parts
        assert same_bits(scales if name.endswith("_scale_inv") else codes, value), name
    audit = fp8_backends.audit(model)
    assert audit.products.keys() == fp8_backends.audit(plain).products.keys()
    assert sum("experts" in name for name in audit.products) == 4 and not audit.foreign_fp8
    assert all(counts["dgrad"] >= 1 for counts in list(audit.products.values())[6:])


def test_other_recipes_leave_experts_to_transformers():
    """Its own products pass gradients through, and its codes stay."""
    model, _ = loaded("qwen3_moe")
    model.model.layers[1].self_attn.o_proj = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    model = with_lora(model.requires_grad_(False), target_modules=ATTENTION)
    before = experts_of(model)
    losses = train(model, "native:dynamic", 5)
    assert losses[-1] < losses[0]
    assert all(same_bits(value, before[name]) for name, value in experts_of(model).items())
    audit = fp8_backends.audit(model)
    assert len(audit.products) == 1 and sum("experts" in name for name in audit.foreign_fp8) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_codes_of_experts_are_refused_by_name(family):
    """PEFT would add to the codes, and leave their scales out."""
    model, _ = loaded(family)
    config = LoraConfig(r=4, target_parameters=["experts.down_proj"])
    model = get_peft_model(model, config)
    wanted = (
        r"experts: PEFT's target_parameters .*freeze_codes\(model\) before PEFT.*dequantize=True"
    )
    with pytest.raises(RecipeError, match=wanted):
        fp8_backends.prepare(model, None, BLOCKWISE)


def test_trainable_experts_are_refused_by_name():
    model, _ = loaded("mixtral")
    model.model.layers[1].mlp.experts.down_proj.requires_grad_()
    with pytest.raises(RecipeError, match=r"layers.1.mlp.experts: .*would never train"):
        fp8_backends.prepare(model, None, BLOCKWISE)
