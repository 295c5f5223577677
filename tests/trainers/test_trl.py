"""Run TRL's trainers, with bf16=True by default, and FP8 only from the environment."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_trainers import (
    LAYERS,
    arguments,
    kept_frozen,
    llama,
    losses_of,
    moved,
    tokenizer,
    trainable,
    values_of,
    words,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import fp8_backends

LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture(autouse=True)
def no_files_of_datasets(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("datasets.utils.tqdm._tqdm_disabled", True, raising=False)


def sft(folder, model, peft_config=None, **given):
    texts = Dataset.from_dict({"text": [words(start, 12) for start in range(32)]})
    args = arguments(folder, SFTConfig, max_length=16, **given)
    return SFTTrainer(
        model, args=args, train_dataset=texts, processing_class=tokenizer(), peft_config=peft_config
    )


def dpo(folder, model, reference=None, peft_config=None, **given):
    """Counting on is preferred to any other word."""
    starts = range(32)
    pairs = {
        "prompt": [words(start, 4) for start in starts],
        "chosen": [" " + words(start + 4, 4) for start in starts],
        "rejected": [" " + words(start * 7 + 30, 4) for start in starts],
    }
    return DPOTrainer(
        model,
        reference,
        args=arguments(folder, DPOConfig, max_length=16, **given),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def products_of(model) -> list[dict]:
    products = fp8_backends.audit(model).products
    assert len(products) == LAYERS
    return list(products.values())


@pytest.mark.parametrize("backend", ["native:delayed", "msamp:O2"])
def test_sft_trains_in_fp8_over_trl_bf16(backend, launched, capsys, tmp_path):
    launched(backend)
    model = llama()
    trainer = sft(tmp_path, model)
    assert trainer.args.bf16 and trainer.accelerator.mixed_precision == "fp8"
    before = values_of(model)
    trainer.train()
    assert losses_of(trainer)[-1] < 0.9 * losses_of(trainer)[0]
    assert kept_frozen(model, before) and len(trainable(model)) == len(before)
    assert all(
        min(counts["fprop"], counts["dgrad"], counts["wgrad"]) == 6 for counts in products_of(model)
    )
    assert capsys.readouterr().err.count("weight FLOPs in FP8") == 1


@pytest.mark.parametrize(("backend", "training"), [("native:delayed", True), ("msamp:O2", False)])
def test_dpo_keeps_its_reference_model(backend, training, launched, capsys, tmp_path):
    """The reference is converted, is not trained, needs no proof, and its scales do not move."""
    launched(backend)
    model, reference = llama(), llama().train(training)
    trainer = dpo(tmp_path, model, reference)
    before, of_reference = values_of(model), values_of(reference)
    trainer.train()
    assert kept_frozen(model, before) and not moved(reference, of_reference)
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert all(min(counts["dgrad"], counts["wgrad"]) == 6 for counts in products_of(model))
    # evaluation is in high precision unless the recipe says otherwise
    expected = 6 if reference.training else 0
    assert all(
        counts["fprop"] == expected and not counts["wgrad"] for counts in products_of(reference)
    )
    assert losses_of(trainer)[0] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=0.01)
    assert all(map(torch.isfinite, map(torch.tensor, losses_of(trainer))))
    assert capsys.readouterr().err.count("weight FLOPs in FP8") == 1


def test_dpo_with_two_fp8_models_starts_at_log_2(launched, tmp_path):
    """`use_autocast_during_eval`: policy and reference run the same products, so the first loss is
    log 2."""
    launched("native", use_autocast_during_eval="true")
    trainer = dpo(tmp_path, llama(), llama().eval(), max_steps=1)
    trainer.train()
    assert losses_of(trainer)[0] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-6)


def test_dpo_with_lora_uses_frozen_base_as_reference(launched, tmp_path):
    launched("native", params="true")
    trainer = dpo(tmp_path, llama(), peft_config=LoraConfig(**LORA), learning_rate=2e-2)
    before = values_of(trainer.model)
    trainer.train()
    changed = moved(trainer.model, before)
    assert changed == trainable(trainer.model) and len(changed) == 2 * LAYERS
    assert all("lora_" in name for name in changed)
    assert all(counts["fprop"] > 6 and not counts["wgrad"] for counts in products_of(trainer.model))
