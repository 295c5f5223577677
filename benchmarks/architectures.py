"""Build fifteen widely trained architectures, each with a batch and a loss, from configurations
without a download.

    model = build("whisper")                             # transformers' class, weights of a fixed seed
    loss = loss_of(model, batch("whisper"))

`size` is "tiny" (seconds, for tests) or "small" (some ten million parameters, for measurements of
memory). Dropout is off, so runs repeat. transformers and diffusers are imported when a model is
built.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

SIZES = ("tiny", "small")


@dataclass
class Architecture:
    """Describe a model's construction, inputs and scalar output."""

    library: str
    model_class: str
    config_class: str | None
    """None: the keywords go to the model itself."""
    sizes: dict[str, dict[str, Any]]
    """Keywords of the configuration, by size."""
    inputs: str
    """Kind of a batch: `tokens`, `masked`, `pairs` (encoder and decoder), `images`, `audio`,
    `latents`, `sentences`."""
    rows: dict[str, int]
    """Sequences, images or clips in a batch, by size."""


def _decoder(
    width: int, layers: int, heads: int, inner: int, vocabulary: int, length: int, **more
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
    } | more


_TINY, _SMALL = (32, 2, 2, 64, 256, 32), (384, 6, 6, 1536, 4096, 128)
_GROUPED = {"num_key_value_heads": 2, "tie_word_embeddings": False}
_NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_UNTIED = {"tie_word_embeddings": False}


def _decoders(
    model_class: str, config_class: str, tiny: dict[str, Any], small: dict[str, Any]
) -> Architecture:
    sizes = {"tiny": _decoder(*_TINY, **tiny), "small": _decoder(*_SMALL, **small)}
    return Architecture(
        "transformers", model_class, config_class, sizes, "tokens", {"tiny": 4, "small": 8}
    )


def _gpt2(
    width: int, layers: int, heads: int, _inner: int, vocabulary: int, length: int
) -> dict[str, Any]:
    sizes = {
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": length,
    }
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return {**sizes, **special, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _opt(
    width: int, layers: int, heads: int, inner: int, vocabulary: int, length: int
) -> dict[str, Any]:
    sizes = _decoder(width, layers, heads, inner, vocabulary, length)
    return {
        **sizes,
        "ffn_dim": sizes.pop("intermediate_size"),
        "dropout": 0.0,
        "word_embed_proj_dim": width,
    }


def _t5(
    width: int, layers: int, heads: int, inner: int, vocabulary: int, _length: int
) -> dict[str, Any]:
    sizes = {
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
    }
    return {**sizes, "vocab_size": vocabulary, "dropout_rate": 0.0, "decoder_start_token_id": 0}


def _whisper(
    width: int, layers: int, heads: int, inner: int, vocabulary: int, length: int
) -> dict[str, Any]:
    halves = {"layers": layers, "attention_heads": heads, "ffn_dim": inner}
    sides = {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in halves.items()
    }
    lengths = {
        "max_source_positions": length,
        "max_target_positions": length // 2,
        "num_mel_bins": 16,
    }
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    return {**sides, **lengths, **special, "d_model": width, "vocab_size": vocabulary}


def _vit(width: int, layers: int, heads: int, inner: int, image: int, patch: int) -> dict[str, Any]:
    sizes = _decoder(
        width, layers, heads, inner, 0, 0, image_size=image, patch_size=patch, num_labels=16
    )
    del sizes["vocab_size"], sizes["max_position_embeddings"]
    return {**sizes, **_NO_BERT_DROPOUT}


def _unet(image: int, *channels: int) -> dict[str, Any]:
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    blocks |= {
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": channels,
    }
    norms = {"norm_num_groups": 8, "attention_head_dim": 16, "layers_per_block": 1}
    return {
        **blocks,
        **norms,
        "sample_size": image,
        "cross_attention_dim": channels[0],
        "in_channels": 4,
    }


_BERT = {
    "tiny": _decoder(*_TINY, **_NO_BERT_DROPOUT),
    "small": _decoder(*_SMALL, **_NO_BERT_DROPOUT),
}
_TEXT_ROWS = {"tiny": 4, "small": 8}
_LLAMA = ({**_GROUPED, "pad_token_id": 0},) * 2
_LLAMA_2 = ({**_UNTIED, "intermediate_size": 96}, {**_UNTIED, "intermediate_size": 1024})
_NEOX = (_UNTIED,) * 2
_QWEN3 = ({**_GROUPED, "head_dim": 16}, {**_GROUPED, "head_dim": 64})
_MIXTRAL = ({**_GROUPED, **_MIXTURE}, {**_GROUPED, **_MIXTURE, "intermediate_size": 768})
_LARGER = {**_UNTIED, **_MIXTURE, "num_key_value_heads": 1}
_MIXTRAL_LARGER = (
    {**_LARGER, "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 128},
    {**_LARGER, "num_hidden_layers": 7, "intermediate_size": 1024},
)

ARCHITECTURES = {
    "llama": _decoders("LlamaForCausalLM", "LlamaConfig", *_LLAMA),
    "llama 2": _decoders("LlamaForCausalLM", "LlamaConfig", *_LLAMA_2),
    "qwen3": _decoders("Qwen3ForCausalLM", "Qwen3Config", *_QWEN3),
    "mixtral 8x7b": _decoders("MixtralForCausalLM", "MixtralConfig", *_MIXTRAL),
    "mixtral 8x22b": _decoders("MixtralForCausalLM", "MixtralConfig", *_MIXTRAL_LARGER),
    "gpt-neox": _decoders("GPTNeoXForCausalLM", "GPTNeoXConfig", *_NEOX),
    "gpt2": Architecture(
        "transformers",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"tiny": _gpt2(*_TINY), "small": _gpt2(*_SMALL)},
        "tokens",
        _TEXT_ROWS,
    ),
    "bert": Architecture(
        "transformers", "BertForMaskedLM", "BertConfig", _BERT, "masked", _TEXT_ROWS
    ),
    "t5": Architecture(
        "transformers",
        "T5ForConditionalGeneration",
        "T5Config",
        {"tiny": _t5(*_TINY), "small": _t5(*_SMALL)},
        "pairs",
        _TEXT_ROWS,
    ),
    "vit": Architecture(
        "transformers",
        "ViTForImageClassification",
        "ViTConfig",
        {"tiny": _vit(32, 2, 2, 64, 32, 8), "small": _vit(384, 6, 6, 1536, 128, 16)},
        "images",
        {"tiny": 4, "small": 16},
    ),
    "whisper": Architecture(
        "transformers",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"tiny": _whisper(*_TINY), "small": _whisper(*_SMALL)},
        "audio",
        _TEXT_ROWS,
    ),
    "opt": Architecture(
        "transformers",
        "OPTForCausalLM",
        "OPTConfig",
        {"tiny": _opt(*_TINY), "small": _opt(*_SMALL)},
        "tokens",
        _TEXT_ROWS,
    ),
    "unet": Architecture(
        "diffusers",
        "UNet2DConditionModel",
        None,
        {"tiny": _unet(8, 32, 64), "small": _unet(32, 192, 384)},
        "latents",
        {"tiny": 2, "small": 8},
    ),
    "resnet": Architecture(
        "transformers",
        "ResNetForImageClassification",
        "ResNetConfig",
        {
            "tiny": {
                "embedding_size": 16,
                "hidden_sizes": [16, 32],
                "depths": [1, 1],
                "num_labels": 16,
            },
            "small": {
                "embedding_size": 64,
                "hidden_sizes": [256, 512, 1024],
                "depths": [2, 2, 4],
                "num_labels": 1024,
            },
        },
        "images",
        {"tiny": 4, "small": 8},
    ),
    "minilm": Architecture(
        "transformers", "BertModel", "BertConfig", _BERT, "sentences", _TEXT_ROWS
    ),
}
"""`unet` is the conditional UNet of diffusers, `resnet` the convnet, and `minilm` the encoder of
sentence-transformers' MiniLM (a `BertModel`), trained as there: means of the last states, in pairs
to bring together."""


def build(name: str, size: str = "tiny", seed: int = 0) -> nn.Module:
    """A model in training mode with FP32 weights."""
    architecture = ARCHITECTURES[name]
    library = importlib.import_module(architecture.library)
    torch.manual_seed(seed)
    model_class, keywords = getattr(library, architecture.model_class), architecture.sizes[size]
    if architecture.config_class is None:
        return model_class(**keywords).train()
    return model_class(getattr(library, architecture.config_class)(**keywords)).train()


def batch(
    name: str, size: str = "tiny", rows: int | None = None, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Random inputs and labels, by the names of the forward's arguments."""
    architecture = ARCHITECTURES[name]
    keywords, rows = architecture.sizes[size], rows or architecture.rows[size]
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=generator)

    def numbers(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(1, below, (rows, *shape), generator=generator)

    if architecture.inputs == "images":
        image = keywords.get("image_size", {"tiny": 32, "small": 128}[size])
        return {"pixel_values": noise(3, image, image), "labels": numbers(keywords["num_labels"])}
    if architecture.inputs == "latents":
        image, width = keywords["sample_size"], keywords["cross_attention_dim"]
        states = {"encoder_hidden_states": noise(7, width), "timestep": numbers(1000)}
        return {"sample": noise(4, image, image), **states, "labels": noise(4, image, image)}
    length, vocabulary = {"tiny": 32, "small": 128}[size], keywords["vocab_size"]
    if architecture.inputs == "audio":
        features = noise(keywords["num_mel_bins"], 2 * keywords["max_source_positions"])
        return {"input_features": features, "labels": numbers(vocabulary, length // 2)}
    ids = numbers(vocabulary, length)
    if architecture.inputs == "sentences":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if architecture.inputs == "pairs":
        return {"input_ids": ids, "labels": numbers(vocabulary, length // 2)}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def outputs(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the model's predictions: scores, a denoised sample, or sentence embeddings."""
    if "sample" in inputs:
        inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    output = model(**inputs)
    if "logits" in output:
        return output.logits
    return (
        output.sample
        if "sample" in output
        else F.normalize(output.last_hidden_state.mean(dim=1), dim=-1)
    )


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a scalar with a graph: transformers' own loss if there is one."""
    labels = inputs.get("labels")
    if "sample" in inputs:
        return F.mse_loss(outputs(model, inputs).float(), labels)
    if labels is None:
        first, second = outputs(model, inputs).float().chunk(2)  # each pair against all others
        return F.cross_entropy(20 * first @ second.T, torch.arange(len(first), device=first.device))
    return model(**inputs).loss.float()


class WithLoss(nn.Module):
    """Return only the loss from forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, inputs)


# FLOPs by PyTorch's counter

_ATTENTION = ("bmm", "baddbmm", "scaled_dot_product")


def flops_share(name: str, layers: Iterable[str], size: str = "tiny") -> float:
    """Return these layers' share, 0 to 1, of a plain training step's FLOPs in products with
    weights, by `torch.utils.flop_counter`: the part that vanishes without them. Products of two
    activations, as in attention, do not count."""
    model, inputs = build(name, size), batch(name, size)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the counter does not know grouped products
    whole = _weight_flops(model, inputs)
    for layer in layers:
        owner = (
            layer.rpartition(".")[0] if layer.endswith("_proj") and ".experts." in layer else layer
        )
        module = model.get_submodule(owner)
        module.forward = functools.partial(_without_product, module)
    return 1 - _weight_flops(model, inputs) / whole


def _weight_flops(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        loss_of(model, inputs).backward()
    by_operator = counter.get_flop_counts()["Global"].items()
    return sum(
        flops
        for operator, flops in by_operator
        if not any(part in str(operator) for part in _ATTENTION)
    )


def _without_product(module: nn.Module, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return a result of the layer's shape from its inputs and Parameters, without a product."""
    # experts: rows of their input
    features = getattr(module, "out_features", getattr(module, "nf", x.shape[-1]))
    return x[..., :1].expand(*x.shape[:-1], features) + sum(
        each.sum() for each in (*others, *module.parameters())
    )
