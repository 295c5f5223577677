"""`transformers.Trainer`, unchanged, with TransformerEngine under a level."""

from __future__ import annotations

import torch
import transformer_engine.pytorch  # noqa: F401, before it is asked about the device
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8_backends


def sequences() -> list[dict[str, torch.Tensor]]:
    """The next token is the last plus three."""
    ids = [(start + 3 * torch.arange(17)) % 64 for start in range(64)]
    return [{"input_ids": each, "labels": each} for each in ids]


def test_trainer_accumulates_recomputes_saves_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te:delayed+msamp:O2")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=3e-3,
        max_steps=8,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=sequences())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    products = fp8_backends.audit(model, trainer.optimizer).products
    assert len(products) == 7 and all(
        count["recomputed"] and count["wgrad"] for count in products.values()
    )

    again = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-8")
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name

    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    resumed = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert resumed == losses
