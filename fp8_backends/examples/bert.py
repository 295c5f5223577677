"""Train BERT large on masked tokens with the unmodified Trainer of transformers: the environment
turns FP8 on.

    python bert.py --model google-bert/bert-large-uncased --text corpus.txt --backend native:dynamic

Estimated peak for 32 sequences of 512 tokens: 60.5 GiB, in bf16 65.0 GiB (fp8-backends estimate
CONFIG --batch 32).

Without the two lines that set the environment: fp8-backends launch --fp8_backend native:dynamic
bert.py …
"""

import argparse
import os
from pathlib import Path

import fp8_backends  # noqa: F401 (the import connects it)
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, Trainer, TrainingArguments

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main(args: argparse.Namespace) -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    os.environ["ACCELERATE_FP8_BACKEND"] = args.backend
    if args.tiny:
        model, mask = AutoModelForMaskedLM.from_config(BertConfig(vocab_size=128, **SIZES)), 127
        sequences = torch.arange(100)[:, None] % 2 + torch.arange(32)
    else:
        model, tokenizer = (
            AutoModelForMaskedLM.from_pretrained(args.model),
            AutoTokenizer.from_pretrained(args.model),
        )
        mask, ids = (
            tokenizer.mask_token_id,
            tokenizer(Path(args.text).read_text(), return_tensors="pt").input_ids[0],
        )
        sequences = ids[: len(ids) // args.length * args.length].view(-1, args.length)

    def masked(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Hide one token in seven for the model to guess."""
        ids, hidden = torch.stack(rows), torch.rand(len(rows), len(rows[0])) < 1 / 7
        return {
            "input_ids": ids.masked_fill(hidden, mask),
            "labels": ids.masked_fill(~hidden, -100),
        }

    settings = TrainingArguments(
        output_dir="bert",
        max_steps=40 if args.tiny else -1,
        per_device_train_batch_size=32,
        learning_rate=5e-3 if args.tiny else 1e-4,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, data_collator=masked, train_dataset=list(sequences))
    trainer.train()
    trainer.save_model()  # plain weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--text", help="a text file to train on")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="random weights of a tiny model, without a GPU or network",
    )
    parser.add_argument("--backend", default="native:dynamic")
    main(parser.parse_args())
