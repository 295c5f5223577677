"""Build a Llama of two layers, a vocabulary of 64 words, and Trainers over them, all in memory."""

from __future__ import annotations

import functools

import torch
from torch import nn

from fp8_backends.tensors.scaled_tensor import ScaledTensor, quantize

VOCABULARY, LENGTH = 64, 16
LAYERS = 14
"""Linear layers below the head."""


class Counting(torch.utils.data.Dataset):
    """Yield sequences that count upwards: a pattern for a tiny model."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        ids = 4 + (torch.arange(LENGTH) + i) % (VOCABULARY - 4)
        return {"input_ids": ids, "labels": ids}


def counting_batch() -> torch.Tensor:
    """All sequences, int64 [32, LENGTH]."""
    return torch.stack([Counting()[i]["input_ids"] for i in range(len(Counting()))])


def llama(seed: int = 0, **fields):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=fields.pop("num_hidden_layers", 2),
        num_attention_heads=2,
        max_position_embeddings=LENGTH * 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **fields,
    )
    return LlamaForCausalLM(config)


@functools.cache
def tokenizer():
    """Make one token per word: w0, w1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 4))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def words(start: int, count: int) -> str:
    return " ".join(f"w{i % (VOCABULARY - 4)}" for i in range(start, start + count))


def arguments(folder, cls=None, **given):
    """Return TrainingArguments, or TRL's: 6 steps of 8 sequences, nothing reported."""
    from transformers import TrainingArguments

    common = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return (cls or TrainingArguments)(**(common | given))


def trainer_for(folder, model=None, trainer_class=None, **given):
    """A stock Trainer, or a subclass."""
    from transformers import Trainer

    model = llama() if model is None else model
    args = arguments(folder, **given)
    return (trainer_class or Trainer)(
        model=model, args=args, train_dataset=Counting(), eval_dataset=Counting()
    )


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters' values, by name."""
    return {name: plain(parameter) for name, parameter in model.named_parameters()}


def plain(parameter: torch.Tensor) -> torch.Tensor:
    stored = parameter.detach()
    return stored.exact() if isinstance(stored, ScaledTensor) else stored.clone()


def moved(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of changed parameters, relative to the earlier value, or to its FP8 value if
    stored so."""
    return {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(plain(parameter), _as_stored(before[name], parameter))
    }


def _as_stored(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    stored = parameter.detach()
    if not isinstance(stored, ScaledTensor):
        return value
    if stored.residual is not None:
        return quantize(value, torch.int8).exact()
    with_all_precision = stored if stored.master is None else stored.master
    return quantize(value, with_all_precision.codes.dtype, value.dtype).dequantize()


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def kept_frozen(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    """Tell if exactly the trainable parameters moved, and there are frozen ones."""
    return moved(model, before) == trainable(model) != set()


def loss_in_bf16(model: nn.Module) -> float:
    """Return the loss of a model without FP8, in evaluation, as Trainer evaluates it."""
    batch = counting_batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model.eval()(input_ids=batch, labels=batch).loss.item()
