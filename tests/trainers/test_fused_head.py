"""Imitate Liger's kernels: norms and activations swapped on the instance, and a loss that reads the
head's weight.

Liger needs Triton. Here PyTorch makes the same changes: the model's forward is replaced on the
instance, and the fused loss multiplies by `lm_head.weight`, past the module.
"""

from __future__ import annotations

import logging
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from tiny_trainers import LAYERS, kept_frozen, llama, losses_of, trainer_for, values_of
from transformers.modeling_outputs import CausalLMOutputWithPast
from widths import nightly

import fp8_backends


def fused_forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
    """The loss from hidden states and the head's weight; no logits, no call of the head."""
    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    logits = F.linear(hidden[:, :-1].flatten(0, 1), self.lm_head.weight)
    return CausalLMOutputWithPast(loss=F.cross_entropy(logits.float(), labels[:, 1:].flatten()))


def norm_forward(self, x):
    return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.variance_epsilon)


def with_kernels() -> torch.nn.Module:
    model = llama()
    model.forward = MethodType(fused_forward, model)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(norm_forward, module)
    return model


@pytest.mark.parametrize("backend", ["native", "ao"])
def test_layers_count_flops_and_fused_head_does_not(backend, launched, tmp_path):
    launched(backend)
    model = with_kernels()
    trainer = trainer_for(tmp_path, model, bf16=True)
    before = values_of(model)
    trainer.train()
    assert kept_frozen(model, before) and losses_of(trainer)[-1] < 0.9 * losses_of(trainer)[0]
    audit = fp8_backends.audit(model)
    assert len(audit.products) == LAYERS and "lm_head" in audit.high_precision
    products = fp8_backends.convert.conversion.weight_products(model)
    layers = sum(product.flops for product in products if product.name != "lm_head")
    # the first layer's q, k and v owe the embedding a gradient, so every product counts thrice
    assert audit.flops_share == pytest.approx(layers / sum(product.flops for product in products))


def test_bypassed_head_is_reported_and_not_counted(launched, caplog, tmp_path):
    launched("native", include="*_proj,lm_head")
    model = with_kernels()
    with caplog.at_level(logging.WARNING, logger="fp8_backends"):
        trainer_for(tmp_path, model, bf16=True, max_steps=2).train()
    assert "native:dynamic: layers without products: lm_head" in caplog.messages
    audit = fp8_backends.audit(model)
    assert audit.products["lm_head"] == dict(fprop=0, dgrad=0, wgrad=0, recomputed=0)
    assert audit.flops_share < 0.95


@pytest.mark.parametrize("backend", ["msamp:O2", nightly("msamp:O3")])
def test_scaled_head_weight_is_read_as_plain_values(backend, launched, tmp_path):
    """Level weights are ScaledTensors: products outside their layer get the values."""
    launched(backend, include="*_proj,lm_head")
    model = with_kernels()
    trainer = trainer_for(tmp_path, model, bf16=True)
    before = values_of(model)
    trainer.train()
    assert kept_frozen(model, before) and losses_of(trainer)[-1] < 0.9 * losses_of(trainer)[0]
