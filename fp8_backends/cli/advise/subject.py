"""What `advise` measures: a language model with its weights, and batches of text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compute import hardware
from ...errors import FP8BackendError
from ...words import counted, first_line, shortened
from ..compare.language_model import CAUSAL, build_model, inputs, task
from ..compare.settings import Settings, defaults
from ..compare.training_text import TrainingText, load_text

_WEIGHTS = ("*.safetensors", "*.bin")
TEXT_MB = 1.0
"""Text that is read: the batches take far less, and a tokenizer is not to be waited for."""


@dataclass
class Subject:
    """A model, and what it is measured on."""

    title: str
    model: nn.Module
    batches: list[Any]
    held_out: list[Any]
    train_on: list[Any]
    text: str
    """What the batches are from."""
    notes: list[str] = field(default_factory=list)


def load(model: str | None, text: str | None, batches: int, batch: int, sequence: int, steps: int = 0) -> Subject:
    """Load a model and batches of text: for the search, as many to check with, and one for each training step.

    Args:
        model: a `config.json` of transformers, its folder, or the name of a cached model; None: the small Llama of
            `compare`. Nothing is fetched. Weights beside the configuration are loaded; else they are random.
        text: a file or folder; None: the Python standard library.

    Raises:
        FP8BackendError: no such model or text, or a model that is no language model of text alone.
    """
    device = "cuda" if hardware.has_gpu() else "cpu"
    folder = None if model is None else _folder(model)
    sizes = defaults(fast_fp8=False) | {"batch": batch, "sequence": sequence}
    path = None if folder is None else str(folder)
    settings = Settings(reference="bf16", model=path, loss_gap_bound=0.0, device=device, **sizes)
    kind, data, mask, notes = task(settings), load_text(text, TEXT_MB), None, []
    if folder is None or not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        made = build_model(settings, data.vocab_size, seed=0)
        notes.append("the weights are random: a model in mid-training errs in other places, so give --model its folder")
    else:
        made = _with_weights(folder, kind).to(device)
        data, mask, note = _in_tokens_of(folder, data)
        notes += [note] if note else []

    def made_of(tokens: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
        return inputs(tokens, kind, data.vocab_size if mask is None else mask, seed)

    starts = data.batches(batches + steps, batch, sequence, seed=0)
    drawn = [made_of(data.windows(each, sequence), seed) for seed, each in enumerate(starts)]
    windows = data.held_out_windows(batches * batch, sequence).split(batch)
    count = sum(parameter.numel() for parameter in made.parameters())
    title = f"{model or 'a small Llama'}: {kind}, {counted(count, 'parameter')}"
    held_out = [made_of(each, -1) for each in windows]
    return Subject(title, made, drawn[:batches], held_out, drawn[batches:], data.description, notes)


def _folder(name: str) -> Path:
    """The folder of a configuration. Raises `FP8BackendError`."""
    from transformers.utils import cached_file

    path = Path(name)
    try:
        if path.exists():
            return path if path.is_dir() else path.parent
        return Path(cached_file(name, "config.json", local_files_only=True)).parent
    except (OSError, ValueError) as error:
        raise FP8BackendError(
            f"--model {shortened(name)}: no such config.json or folder, and no model of this name in the cache of "
            "transformers. Nothing is fetched: download it and name its folder"
        ) from error


def _with_weights(folder: Path, kind: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM  # takes seconds

    auto = AutoModelForCausalLM if kind == CAUSAL else AutoModelForMaskedLM
    try:
        model = auto.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise FP8BackendError(f"--model {folder.name}: transformers cannot load its weights: {error}") from error
    model.config.use_cache = False
    return model


def _in_tokens_of(folder: Path, data: TrainingText) -> tuple[TrainingText, int | None, str | None]:
    """The text in the tokens of a model's own tokenizer, the id of its mask, and a note where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        note = f"the folder has no tokenizer, so each byte is a token ({first_line(error)})"
        return data, None, note

    def tokens(text: torch.Tensor) -> torch.Tensor:
        words = bytes(text.tolist()).decode("utf-8", errors="replace")
        return torch.tensor(tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int32)

    description = data.description.replace("one token a byte", "the model's own tokenizer")
    train, held_out = tokens(data.train), tokens(data.held_out)
    return replace(data, train=train, held_out=held_out, description=description), tokenizer.mask_token_id, None
