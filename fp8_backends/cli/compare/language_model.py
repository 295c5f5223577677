"""The model that `compare` trains, and what it is trained to do: tell the next token, or tokens that were masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import FP8BackendError
from ...words import first_line
from .settings import Settings

CAUSAL, MASKED = "causal language model", "masked language model"
"""The tasks: a token is told from those before it, or from all others."""

MASKED_SHARE = 0.15
"""Tokens of a window that a masked language model has to tell, as in BERT."""

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def task(settings: Settings) -> str:
    """Return the task of the model that these settings name.

    Raises:
        FP8BackendError: there is no such configuration, or no task for it, or it has too few positions.
    """
    return CAUSAL if settings.model is None else _task(_read(settings))


def build_model(settings: Settings, vocab_size: int, seed: int) -> nn.Module:
    """Make a language model of `transformers` for its task, with random weights that depend on the seed alone.

    Raises:
        FP8BackendError: there is no such configuration, or no task for it, or it has too few positions.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig  # takes seconds

    auto = {CAUSAL: AutoModelForCausalLM, MASKED: AutoModelForMaskedLM}[task(settings)]
    if settings.model is None:
        sizes = {**settings.shape, "vocab_size": vocab_size, "max_position_embeddings": settings.sequence}
        config = LlamaConfig(**sizes, tie_word_embeddings=False, use_cache=False, **dict.fromkeys(_SPECIAL_TOKENS))
    else:
        config = _read(settings)
        masked = _task(config) == MASKED
        # a multiple of 16 above the text's tokens has room for the mask, and lets an output head fit FP8
        config.vocab_size = max(config.vocab_size, vocab_size + 16 * masked)
        config.use_cache = False
        for name in _SPECIAL_TOKENS[: 2 if masked else 3]:  # ids of the model's own tokenizer mean other things here
            setattr(config, name, None)  # but RoBERTa counts positions from that of its padding
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)  # what it drops differs between two passes, as if their products did
    torch.manual_seed(seed)
    with torch.device(settings.device):
        return auto.from_config(config, dtype=torch.float32)


def inputs(tokens: torch.Tensor, task: str, vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return what a model takes for its task.

    Args:
        tokens: [batch, sequence], int64, below `vocab_size`.
        seed: of the choice of masked tokens, as many in every window.

    Returns:
        `input_ids` and `labels`, both as `tokens`. A masked token has the id `vocab_size`, and every other the label
        -100, which no loss counts. A causal model shifts its labels itself.
    """
    if task == CAUSAL:
        return {"input_ids": tokens, "labels": tokens}
    order = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)).argsort(dim=-1)
    masked = order < max(1, round(MASKED_SHARE * tokens.shape[-1]))
    return {"input_ids": tokens.masked_fill(masked, vocab_size), "labels": tokens.masked_fill(~masked, -100)}


def _task(config) -> str:
    """Return the task that a configuration names, or the one that its kind of model has."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind, named = type(config), config.architectures or ()
    mappings = {MASKED: MODEL_FOR_MASKED_LM_MAPPING, CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING}
    classes = {} if config.is_encoder_decoder else {task: of[kind] for task, of in mappings.items() if kind in of}
    if not classes or not hasattr(config, "vocab_size"):
        raise FP8BackendError(
            f"--model: a configuration of type {config.model_type} makes neither a causal nor a masked language model "
            "of text alone, and this command trains nothing else: give the configuration of one"
        )
    for each, model_class in classes.items():
        if model_class.__name__ in named:
            return each
    usual = CAUSAL if getattr(config, "is_decoder", False) else MASKED
    return usual if usual in classes else next(iter(classes))


def _read(settings: Settings) -> Any:
    from transformers import AutoConfig

    path = Path(settings.model)
    if not path.exists():
        raise FP8BackendError(f"--model {path}: there is no such config.json or folder")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever the file makes of transformers
        what = f"not a configuration that transformers reads ({first_line(error)})"
        raise FP8BackendError(f"--model {path}: {what}") from error
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < settings.sequence:
        raise FP8BackendError(f"--sequence {settings.sequence} exceeds the model's {longest} positions")
    return config
