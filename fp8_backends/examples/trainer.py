"""Train with the unmodified Trainer of transformers: the environment turns FP8 on.

    python trainer.py --backend native:dynamic

Without the two lines that set the environment: fp8-backends launch --fp8_backend native:dynamic trainer.py
"""

import argparse
import os
import tempfile

import fp8_backends  # noqa: F401 (the import connects it)
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def counting(start: int) -> dict[str, torch.Tensor]:
    """A sequence that counts upwards, which a small model learns in a few steps."""
    ids = (start + torch.arange(32)) % 100
    return {"input_ids": ids, "labels": ids}


def main(backend: str) -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    os.environ["ACCELERATE_FP8_BACKEND"] = backend
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **SIZES))
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=10,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dataset = [counting(start) for start in range(100)]
    trainer = Trainer(model=model, args=args, train_dataset=dataset, eval_dataset=dataset[:16])
    trainer.train()
    trainer.evaluate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native:dynamic")
    main(parser.parse_args().backend)
