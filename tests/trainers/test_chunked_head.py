"""`fused_head` under Trainer: its loss, its accumulation over microbatches, its label smoothing,
its evaluation."""

from __future__ import annotations

import pytest
import torch
from tiny_trainers import llama, losses_of, trainer_for

from fp8_backends.convert.fused_head.deferred_logits import DeferredLogits

OPTIONS = {
    "plain": ({}, True),
    "accumulation": ({"gradient_accumulation_steps": 2}, True),
    "label smoothing": ({"label_smoothing_factor": 0.1}, False),
}
"""Options of Trainer, and True if its loss needs no logits: its label smoother takes their
logarithms itself."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_match_ordinary_head(name, launched, tmp_path, monkeypatch):
    options, is_fused = OPTIONS[name]
    read = []
    values = DeferredLogits.values
    monkeypatch.setattr(
        DeferredLogits, "values", lambda logits: read.append(logits.shape) or values(logits)
    )
    losses = {}
    for fused in ("true", "false"):
        launched("native", fused_head=fused, include="+lm_head")
        trainer = trainer_for(tmp_path / fused, llama(), max_steps=3, **options)
        trainer.train()
        losses[fused] = [*losses_of(trainer), trainer.evaluate()["eval_loss"]]
    assert bool(read) != is_fused
    # a chunk of 128 tokens scales its own hidden states and gradients
    assert losses["true"] == pytest.approx(losses["false"], abs=0.005)
    assert losses["true"][-1] < losses["true"][0] - 0.2


def test_a_subclass_may_read_the_logits(launched, tmp_path):
    from transformers import Trainer

    class Watching(Trainer):
        right = 0

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            right = outputs.logits[..., :-1, :].argmax(-1) == inputs["labels"][..., 1:]
            self.right = right.float().mean().item()
            return (loss, outputs) if return_outputs else loss

    launched("native", fused_head="true")
    trainer = trainer_for(tmp_path, llama(), Watching, max_steps=20)
    trainer.train()
    assert trainer.right > 0.5 and torch.isfinite(torch.tensor(losses_of(trainer))).all()
