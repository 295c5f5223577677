"""Define the workload of `compare` and `advise`: settings, training text, and a language model with
random weights."""

import contextlib
import hashlib
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compute import hardware
from ...errors import FP8BackendError
from ...words import counted, readable_bytes

BASELINES = ("bf16", "fp32", "fp16")
REFERENCES = ("bf16", "fp32")
"""Precisions to compare backends with, and to compute in around FP8."""


@dataclass(kw_only=True)
class Settings:
    """Configure a comparison; the report shows every field."""

    backends: tuple[str, ...] = ("native:dynamic", "native:delayed", "ao:tensorwise", "msamp:O2")
    """Canonical backend strings and baselines, without the reference."""
    reference: str
    text: str | None = None
    limit_mb: float = 8.0
    model: str | None = None
    """A transformers configuration; None: a Llama of `shape`."""
    shape: dict[str, int]
    steps: int
    seeds: int
    batch: int
    sequence: int
    lr: float
    warmup_share: float = 0.5
    weight_decay: float = 0.1
    clip: float = 1.0
    held_out_share: float = 0.2
    minutes: float | None = None
    compile: bool
    features: dict[str, Any] = field(default_factory=dict)
    """Recipe fields of every FP8 backend."""
    loss_gap_bound: float
    device: str
    nproc: int = 1

    @property
    def held_out_windows(self) -> int:
        """Windows for evaluation; a short text has fewer."""
        return max(self.batch, round(self.held_out_share * self.steps * self.batch))

    @property
    def trained(self) -> list[str]:
        """List the reference and the backends."""
        return [self.reference, *self.backends]


FIRST_STEPS = -1
"""Turn of a worker in place of a seed."""
PERMIT = b"%8d%8d"
"""Backend, as its place in `Settings.trained`, and seed: bytes of a fixed number, since ranks read
from one pipe."""
PERMIT_BYTES = 16

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
"""0.7 M parameters at 256 tokens: five seeds of five backends train in minutes on two cores."""

ONE_BILLION = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
"""The shape of Llama 3.2 1B: smaller models are slower in FP8 than in bf16 on every chip."""


def defaults(fast_fp8: bool) -> dict[str, Any]:
    """Return defaults of the options, for a chip with or without FP8 products."""
    if fast_fp8:
        return {
            "shape": ONE_BILLION, "steps": 60, "seeds": 3, "batch": 2, "sequence": 4096, "lr": 3e-4, "compile": True,
        }  # fmt: skip
    return {
        "shape": SMALL,
        "steps": 80,
        "seeds": 5,
        "batch": 8,
        "sequence": 128,
        "lr": 1e-3,
        "compile": False,
    }


def fast_fp8(device: str) -> bool:
    """Return True if a run on this device can measure the speed of FP8."""
    return device == "cuda" and hardware.fp8_products()


# Text

HELD_OUT_EVERY = 10
"""Hold out the last of every ten files, or the last tenth of fewer files."""
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "node_modules",
}
_BOUNDARY = b"\0"  # between two files; the reader skips binary files, so no text contains it


@dataclass
class TrainingText:
    train: torch.Tensor
    """1-D, uint8 for bytes; another dtype for the tokens of a model's own tokenizer."""
    held_out: torch.Tensor
    vocab_size: int
    description: str
    sha256: str
    """Hash of the raw text: training part, then held-out part."""

    def batches(self, steps: int, batch: int, sequence: int, seed: int) -> torch.Tensor:
        """Draw the start of each training window, [steps, batch], from the seed."""
        _check_length(self.train, sequence, "training")
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(len(self.train) - sequence, (steps, batch), generator=generator)

    def windows(self, starts: torch.Tensor, sequence: int) -> torch.Tensor:
        """Return training tokens [batch, sequence], int64, from these starts [batch]."""
        return self.train[starts[:, None] + torch.arange(sequence)].long()

    def held_out_windows(self, count: int, sequence: int) -> torch.Tensor:
        """Return evenly spaced held-out tokens [count, sequence], int64; fewer from a short
        text."""
        _check_length(self.held_out, sequence, "held-out")
        count = min(count, len(self.held_out) // sequence)
        starts = torch.linspace(0, len(self.held_out) - sequence, count).long()
        return self.held_out[starts[:, None] + torch.arange(sequence)].long()


def _check_length(tokens: torch.Tensor, sequence: int, part: str) -> None:
    if len(tokens) <= sequence:
        raise FP8BackendError(
            f"the {part} part of the text has {counted(len(tokens), 'token')}, too few for "
            f"--sequence {sequence}: give more text or shorter sequences"
        )


def load_text(path: str | Path | None = None, limit_mb: float = 8.0) -> TrainingText:
    """Read the training text, one token a byte, at most `limit_mb` megabytes in the order of the
    paths.

    Raises `FP8BackendError` without text. Without a path: the Python sources of the standard
    library.
    """
    files, description = _files(path)
    parts = []
    remaining = int(limit_mb * 1e6)
    for file in files:
        if remaining <= 0:
            break
        with contextlib.suppress(OSError):
            data = file.read_bytes()[:remaining]
            if data and _BOUNDARY not in data:
                parts.append(data)
                remaining -= len(data)
    if not parts:
        raise FP8BackendError(
            f"no text found in {path}: --text takes a text file or a folder of text files"
        )
    if (count := len(parts)) < HELD_OUT_EVERY:
        whole = _BOUNDARY.join(parts)
        cut = len(whole) - len(whole) // HELD_OUT_EVERY
        train = whole[:cut]
        held_out = whole[cut:]
        split = "the last tenth held out"
    else:
        held_out = _BOUNDARY.join(parts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        del parts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train = _BOUNDARY.join(parts)
        split = f"every {HELD_OUT_EVERY}th file held out"
    size = readable_bytes(len(train) + len(held_out))
    description = f"{description}, {counted(count, 'file')}, {size}, {split}, one token a byte"
    tokens = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)]
    return TrainingText(*tokens, 256, description, hashlib.sha256(train + held_out).hexdigest())


def _files(path: str | Path | None) -> tuple[list[Path], str]:
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        pattern = "*.py"
        description = f"Python {sysconfig.get_python_version()} standard library sources"
    else:
        root = Path(path)
        pattern = "*"
        description = Path(path).name
        if root.is_file():
            return [root], description
        if not root.is_dir():
            raise FP8BackendError(f"--text {path}: there is no such file or folder")
    files = {file.relative_to(root): file for file in root.rglob(pattern) if file.is_file()}
    kept = [
        (relative.as_posix(), file)
        for relative, file in files.items()
        if not any(part in _SKIPPED_FOLDERS or part.startswith(".") for part in relative.parts)
    ]
    return [file for _, file in sorted(kept)], description


# Model

CAUSAL = "causal language model"
MASKED = "masked language model"
"""Tasks: predict a token from the tokens before it, or from all others."""
MASKED_SHARE = 0.15
"""Share of masked tokens in a window, as in BERT."""
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def task(settings: Settings) -> str:
    """Return the task of the model. Raises as `build_model` does."""
    return CAUSAL if settings.model is None else _task(_config(settings))


def build_model(settings: Settings, vocab_size: int, seed: int) -> nn.Module:
    """Build a language model of `transformers` with random weights. Raises `FP8BackendError` for
    other models."""
    # takes seconds
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig

    if settings.model is None:
        kind = CAUSAL
        sizes = {
            **settings.shape,
            "vocab_size": vocab_size,
            "max_position_embeddings": settings.sequence,
        }
        config = LlamaConfig(
            **sizes, tie_word_embeddings=False, use_cache=False, **dict.fromkeys(_SPECIAL_TOKENS)
        )
    else:
        config = _config(settings)
        kind = _task(config)
        masked = kind == MASKED
        # a multiple of 16 above the text's tokens has room for the mask, and lets an output head
        # fit FP8
        config.vocab_size = max(config.vocab_size, vocab_size + 16 * masked)
        # ids of the model's own tokenizer mean other tokens here, but RoBERTa counts positions from
        # its padding id
        for name in _SPECIAL_TOKENS[: 2 if masked else 3]:
            setattr(config, name, None)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                # dropout would differ between two passes, as if their products did
                setattr(config, name, 0.0)
    auto = {CAUSAL: AutoModelForCausalLM, MASKED: AutoModelForMaskedLM}[kind]
    torch.manual_seed(seed)
    with torch.device(settings.device):
        return auto.from_config(config, dtype=torch.float32)


def inputs(tokens: torch.Tensor, task: str, vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `labels` of a model's forward, shaped as the tokens [batch, sequence],
    int64.

    The seed selects masked tokens, equally many in every window; they have the id `vocab_size`, and
    all other labels are -100, ignored by the loss. A causal model shifts its labels itself.
    """
    if task == CAUSAL:
        return {"input_ids": tokens, "labels": tokens}
    order = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)).argsort(dim=-1)
    masked = order < max(1, round(MASKED_SHARE * tokens.shape[-1]))
    return {
        "input_ids": tokens.masked_fill(masked, vocab_size),
        "labels": tokens.masked_fill(~masked, -100),
    }


def _task(config) -> str:
    """Return the task named by a configuration, else the usual task of its model type."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind = type(config)
    named = config.architectures or ()
    mappings = {MASKED: MODEL_FOR_MASKED_LM_MAPPING, CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING}
    classes = {}
    if not config.is_encoder_decoder:
        classes = {task: of[kind] for task, of in mappings.items() if kind in of}
    if not classes or not hasattr(config, "vocab_size"):
        raise FP8BackendError(
            f"--model: a configuration of type {config.model_type} makes neither a causal nor a "
            "masked language model of text alone, and this command trains nothing else: give the "
            "configuration of one"
        )
    usual = CAUSAL if getattr(config, "is_decoder", False) else MASKED
    by_name = (task for task, model_class in classes.items() if model_class.__name__ in named)
    return next(by_name, usual if usual in classes else next(iter(classes)))


def _config(settings: Settings) -> Any:
    from ..estimate.model_shapes import ModelShape, read_config  # takes seconds

    config = read_config(settings.model)
    ModelShape(settings.model, config).check_sequence(settings.sequence)
    return config
