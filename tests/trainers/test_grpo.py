"""TRL's GRPO with rollouts of another model: the policy gap, its bound, and the guard."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from datasets import Dataset
from tiny_trainers import arguments, llama, moved, tokenizer, values_of, words
from trl import GRPOConfig, GRPOTrainer

import fp8_backends
from fp8_backends.errors import FP8BackendError
from fp8_backends.trl import PolicyGapCallback
from fp8_backends.watch.guard import faults

ANSWER = 4


@pytest.fixture(autouse=True)
def no_files_of_datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("datasets.utils.tqdm._tqdm_disabled", True, raising=False)


def reward(completion_ids, **kwargs):
    return [sum(word % 2 for word in answer) / len(answer) for answer in completion_ids]


def grpo(folder, rollout_func=None, bound=None, **given):
    prompts = Dataset.from_dict({"prompt": [words(start, 4) for start in range(16)]})
    common = {
        "max_steps": 2,
        "num_generations": 4,
        "max_completion_length": ANSWER,
        "gradient_checkpointing": False,
    }
    args = arguments(folder, GRPOConfig, **common | given)
    trainer = GRPOTrainer(
        llama(), reward, args, prompts, processing_class=tokenizer(), rollout_func=rollout_func
    )
    callback = PolicyGapCallback(trainer, bound)
    trainer.add_callback(callback)
    return trainer, callback


def engine_rollouts(shift: float = 0.0, recipe=None, synchronize=None):
    """Draw answers at random; the logprobs are those of an engine's prefill, shifted."""
    engines = []

    def rollout(prompts, trainer):
        if not engines:
            engines.append(llama())
            if recipe is not None:
                fp8_backends.prepare(engines[0], None, recipe)
        synchronize(trainer.model, engines[0])
        ids = torch.tensor(trainer.processing_class(prompts)["input_ids"])
        answers = torch.randint(4, 60, (len(ids), ANSWER))
        whole = torch.cat([ids, answers], dim=1)
        with torch.no_grad(), trainer.accelerator.autocast():
            logits = engines[0](input_ids=whole, attention_mask=torch.ones_like(whole)).logits[
                :, -ANSWER - 1 : -1
            ]
        logprobs = (
            logits.float().log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1) + shift
        )
        return {
            "prompt_ids": ids.tolist(),
            "completion_ids": answers.tolist(),
            "logprobs": logprobs.tolist(),
        }

    return rollout


def plain_values(model, engine):
    engine.load_state_dict(
        copy.deepcopy({name: value.detach() for name, value in model.state_dict().items()})
    )


def codes(model, engine):
    """Send the trainer's codes; the engine of 128 x 128 blocks finds them again in their values."""
    weights = dict(fp8_backends.checkpoints.rollout_weights(model, "compressed-tensors"))
    scales = {name: weights.pop(name) for name in list(weights) if name.endswith("_scale")}
    for name, scale in scales.items():
        weight = name.removesuffix("_scale")
        weights[weight] = weights[weight].float() * scale
    engine.load_state_dict(weights, strict=False)


@pytest.mark.parametrize(
    ("backend", "recipe", "synchronize", "is_equal"),
    [
        ("native:rowwise", "native:rowwise", codes, True),
        ("native:rowwise", "native:rowwise", plain_values, True),
        ("bf16", "native:rowwise", plain_values, False),
    ],
)
def test_policy_gap_of_equal_products_is_rounding(
    backend, recipe, synchronize, is_equal, monkeypatch, launched, tmp_path
):
    launched(backend)
    if backend == "bf16":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        monkeypatch.delenv("ACCELERATE_FP8_BACKEND")
    trainer, callback = grpo(tmp_path, engine_rollouts(recipe=recipe, synchronize=synchronize))
    trainer.train()
    assert len(callback.gaps) == 2 and all(gap.tokens == 8 * ANSWER for gap in callback.gaps)
    logged = [
        entry["policy_gap/mean"]
        for entry in trainer.state.log_history
        if "policy_gap/mean" in entry
    ]
    assert logged == [gap.mean for gap in callback.gaps]
    for gap in callback.gaps:
        # of logprobs near 4, in FP32
        assert gap.largest < 2e-6 if is_equal else 1e-4 < gap.mean < 0.1, gap
        assert 1 <= gap.mult_prob_error and 0.99 < gap.effective_share <= 1 + 1e-9


def test_guard_acts_on_gap_above_bound(launched, tmp_path):
    launched("native:rowwise", guard="skip")
    rollout = engine_rollouts(0.2, "native:rowwise", plain_values)
    trainer, callback = grpo(tmp_path / "skip", rollout, bound=1.05)
    before = values_of(trainer.model)
    trainer.train()
    assert not moved(trainer.model, before)
    assert [(fault.step, fault.kind, fault.done) for fault in faults(trainer.optimizer)] == [
        (1, "policy_gap", "the step was left out"),
        (2, "policy_gap", "the step was left out"),
    ]
    assert callback.gaps[0].mult_prob_error == pytest.approx(2.718281828**0.2, rel=1e-4)


def test_guard_stops_and_keeps_silent_below_bound(launched, tmp_path):
    launched("native:rowwise", guard="stop")
    trainer, _ = grpo(
        tmp_path / "fine", engine_rollouts(0.02, "native:rowwise", plain_values), bound=1.05
    )
    trainer.train()
    assert not faults(trainer.optimizer)
    trainer, _ = grpo(
        tmp_path / "far", engine_rollouts(0.2, "native:rowwise", plain_values), bound=1.05
    )
    with pytest.raises(
        FP8BackendError, match="policy_gap: a multiplicative error of 1.221, and the bound is 1.05"
    ):
        trainer.train()


def test_bound_without_guard_and_rollout_without_logprobs_are_refused(launched, tmp_path):
    launched("native:rowwise")
    trainer, _ = grpo(tmp_path / "guard", engine_rollouts(0.0, None, plain_values), bound=1.05)
    with pytest.raises(FP8BackendError, match="set guard to warn, skip or stop"):
        trainer.train()
    trainer, _ = grpo(tmp_path / "trl")
    with pytest.raises(
        FP8BackendError, match="TRL's rollout has no logprobs: use vLLM, or a rollout_func"
    ):
        trainer.train()


def test_trl_sends_what_its_named_hook_yields():
    """The guide's line replaces the source of `sync_weights`; vLLM itself is not installed."""
    from trl.generation.vllm_generation import VLLMGeneration

    assert list(inspect.signature(VLLMGeneration._iter_named_params).parameters) == ["self"]
    assert "self._iter_named_params()" in inspect.getsource(VLLMGeneration.sync_weights)
