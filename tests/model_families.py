"""Build tiny transformers of five families, each with a batch and a loss.

    model = build("llama")                       # same seed, same weights
    loss = loss_of(model, batch("llama"))        # a scalar with a graph

`transformers` is imported when a model is built. Dropout is off, so that runs repeat.
"""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 128, 32, 2, 2, 16

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# family -> (configuration class, model class, configuration)
_FAMILIES = {
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**SIZES, "intermediate_size": 2 * WIDTH},
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **SIZES,
            "intermediate_size": 2 * WIDTH,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {**SIZES, **_NO_DROPOUT, "intermediate_size": 2 * WIDTH},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": LENGTH,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            **SIZES,
            "intermediate_size": 2 * WIDTH,
            "num_key_value_heads": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
    ),
}

FAMILIES = tuple(_FAMILIES)
"""Names accepted by `build`. BERT and GPT-2 tie the output head to the embedding, the others do
not."""


def build(family: str, seed: int = 0, **config) -> nn.Module:
    """A model in training mode with FP32 weights. Further keywords override its configuration."""
    import transformers

    config_class, model_class, fields = _FAMILIES[family]
    torch.manual_seed(seed)
    made = getattr(transformers, config_class)(**{**fields, "pad_token_id": 0, **config})
    return getattr(transformers, model_class)(made).train()


def batch(family: str = "llama", rows: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `labels`, int64 [rows, LENGTH]. Counting sequences, so that
    a loss falls."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(1, VOCABULARY, (rows, 1), generator=generator)
    ids = 1 + (start + torch.arange(LENGTH)) % (VOCABULARY - 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def loss_of(
    model: nn.Module, batch: dict[str, torch.Tensor], autocast: torch.dtype | None = torch.bfloat16
):
    """Return the model's own loss as an FP32 scalar, under autocast unless None."""
    device = batch["input_ids"].device.type
    with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        return model(**batch).loss.float()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, family: str = "llama", steps: int = 8
) -> list[float]:
    """The losses of `steps` optimizer steps on one batch: they fall when the model learns."""
    data, losses = batch(family), []
    for _ in range(steps):
        loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluate_after_forward(model: nn.Module) -> None:
    """Call `eval()` between each forward in training and its backward."""

    def before(model: nn.Module, _) -> None:
        model.train()

    def after(model: nn.Module, *_) -> None:
        model.eval()

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after)
