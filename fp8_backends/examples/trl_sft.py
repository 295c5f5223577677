"""Fine-tune with TRL's SFTTrainer. TRL sets bf16=True automatically, here FP8 over bf16.

    python trl_sft.py --backend native:dynamic

Without the two lines that set the environment: fp8-backends launch --fp8_backend native:dynamic
trl_sft.py
"""

import argparse
import os
import tempfile

import fp8_backends  # noqa: F401 (the import connects it)
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = "<pad> <eos> one two three four five six seven eight nine ten".split()
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; yours comes from a checkpoint."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def main(backend: str) -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    os.environ["ACCELERATE_FP8_BACKEND"] = backend
    numbers = WORDS[2:] * 3
    texts = [" ".join(numbers[start : start + 16]) for start in range(10)]
    args = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=10,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        max_length=32,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),  # else TRL's bf16=True is refused without a GPU
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, pad_token_id=0, eos_token_id=1, **SIZES))
    dataset = Dataset.from_dict({"text": texts * 8})
    SFTTrainer(model, args=args, train_dataset=dataset, processing_class=word_tokenizer()).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native:dynamic")
    main(parser.parse_args().backend)
