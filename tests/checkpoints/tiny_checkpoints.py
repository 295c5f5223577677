"""A tiny Llama trained for a few steps, and the contents of its FP8 checkpoint."""

from __future__ import annotations

import json

import torch
from conversion_steps import take_steps
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

import fp8_backends

LAYERS = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
"""Seven in each of the two blocks."""
SCALES = {"finegrained_fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}


def llama(hidden: int = 256, inner: int = 384, tied: bool = True) -> nn.Module:
    """Build from seed 0, by default with multiples of 128 as sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).train()


IDS = torch.arange(64).reshape(2, 32) * 5 % 128


def train(model: nn.Module, spec, steps: int = 2) -> list[float]:
    """Prepare and train a model. Return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    fp8_backends.prepare(model, optimizer, spec)
    return take_steps(lambda: loss_of(model), optimizer, steps)


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = IDS % model.config.vocab_size
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


def with_lora(model: nn.Module, **given) -> nn.Module:
    """Put adapters over all Linears, unless given others."""
    torch.manual_seed(1)
    options = {"r": 8, "target_modules": "all-linear", "init_lora_weights": False, **given}
    return get_peft_model(model, LoraConfig(**options)).train()


def trained(spec, **sizes) -> nn.Module:
    model = llama(**sizes)
    train(model, spec)
    return model


def stored(folder) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint in one file."""
    return load_file(folder / "model.safetensors")


def codes_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the FP8 codes by the layer's name."""
    fp8 = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    return {name.removesuffix(".weight"): tensor for name, tensor in fp8.items()}


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize codes [out, in] with one scale, one a row or one for 128 x 128. FP32."""
    rows, columns = codes.shape
    if scales.numel() > 1 and scales.shape != (rows, 1):
        scales = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return codes.float() * scales


def values_of(tensors: dict[str, torch.Tensor], scale: str) -> dict[str, torch.Tensor]:
    """Return every weight of a checkpoint as plain values."""
    fp8 = codes_of(tensors)
    plain = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in fp8}
    return plain | {
        f"{name}.weight": values(codes, tensors[f"{name}.{scale}"]) for name, codes in fp8.items()
    }


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def load(folder, format: str | None = "finegrained_fp8") -> nn.Module:
    """Load with stock transformers, as plain weights; without a format, as its configuration
    says."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    configs = {
        "finegrained_fp8": FineGrainedFP8Config,
        "compressed-tensors": CompressedTensorsConfig,
    }
    options = {"quantization_config": configs[format](dequantize=True)} if format else {}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )
