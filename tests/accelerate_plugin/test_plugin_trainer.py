"""Hugging Face `Trainer`, unchanged, with FP8 from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fp8_backends


class Tokens(torch.utils.data.Dataset):
    """Sequences that count upwards: a pattern that a tiny model learns."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = (torch.arange(32) + i) % 50
        return {"input_ids": ids, "labels": ids}


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def trainer_for(folder, **arguments):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **({"max_steps": 8, "save_strategy": "no"} | arguments),
    )
    return Trainer(model=tiny_llama(), args=args, train_dataset=Tokens(), eval_dataset=Tokens())


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def fp8_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "native")


def test_trainer_trains_in_fp8(fp8_environment, tmp_path):
    trainer = trainer_for(tmp_path, gradient_accumulation_steps=2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    losses = losses_of(trainer)
    assert losses[-1] < 0.8 * losses[0]
    assert not [name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])]
    products = fp8_backends.audit(trainer.model).products
    assert len(products) == 14
    assert all(counts["fprop"] == counts["wgrad"] == counts["dgrad"] == 16 for counts in products.values())


@pytest.mark.parametrize("backend", ["native", "msamp:O2", "msamp:O3"])
def test_trainer_evaluates_and_saves_a_model_that_stock_transformers_loads(
    backend, fp8_environment, monkeypatch, tmp_path
):
    from transformers import LlamaForCausalLM

    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    trainer = trainer_for(tmp_path)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(tmp_path / "export"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "export")
    trained = trainer.model.state_dict()
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_parameters())
    batch = torch.stack([Tokens()[i]["input_ids"] for i in range(64)])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert abs(loaded(input_ids=batch, labels=batch).loss.item() - loss) < 0.02


def test_trainer_evaluates_without_training(fp8_environment, tmp_path):
    assert trainer_for(tmp_path).evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O4"])
def test_trainer_resumes_bit_for_bit(backend, fp8_environment, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    unbroken = trainer_for(tmp_path / "a", max_steps=6)
    unbroken.train()
    first = trainer_for(tmp_path / "b", max_steps=6, save_strategy="steps", save_steps=3)
    first.train()
    assert fp8_backends.checkpoints.newest_checkpoint(tmp_path / "b") == str(tmp_path / "b" / "checkpoint-6")
    (tmp_path / "b" / "checkpoint-6" / "scheduler.pt").unlink()
    resumed = trainer_for(tmp_path / "b", max_steps=6)
    resumed.train(resume_from_checkpoint=(found := fp8_backends.checkpoints.newest_checkpoint(tmp_path / "b")))
    assert Path(found).name == "checkpoint-3"
    assert losses_of(resumed) == losses_of(unbroken)
    other = unbroken.model.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in resumed.model.state_dict().items())


def test_trainers_bf16_flag_wins_over_the_backend_variable(monkeypatch, tmp_path):
    """Without mixed precision fp8 the variable has no effect, and training is bf16's."""
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    trainer = trainer_for(tmp_path, bf16=True, max_steps=3)
    trainer.train()
    assert len(losses_of(trainer)) == 3
    assert all(type(m) is torch.nn.Linear for m in trainer.model.modules() if isinstance(m, torch.nn.Linear))
