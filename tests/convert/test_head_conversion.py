"""`fused_head`: its layer, its warnings without one, and everything else of a model unchanged."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from pathlib import Path

import model_families
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8_backends
from fp8_backends.convert.fused_head.deferred_logits import DeferredLogits
from fp8_backends.errors import FP8BackendError

sys.path.insert(0, str(Path(__file__).parent.parent / "trainers"))
from tiny_trainers import counting_batch, llama  # noqa: E402

FP8_HEAD = {"include": ["+lm_head"]}


def prepared(model=None, backend="native:dynamic", **fields):
    model = llama() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return fp8_backends.prepare(model, optimizer, {"backend": backend, **fields})


def step(model, optimizer):
    """(loss, logits) of one step."""
    batch = counting_batch()[:8]
    output = model(input_ids=batch, labels=batch, use_cache=False)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return output.loss.item(), output.logits


@pytest.mark.parametrize(
    ("tied", "fields", "backend"),
    [
        (False, FP8_HEAD, "native:dynamic"),
        (True, {}, "msamp:O2"),
        (True, FP8_HEAD, "msamp:O3"),
    ],
)
def test_fused_head_trains_like_ordinary_head(tied, fields, backend, capfd):
    proofs, losses = [], []
    for fused in (True, False):
        model, optimizer = prepared(
            llama(tie_word_embeddings=tied), backend, fused_head=fused, **fields
        )
        results = [step(model, optimizer) for _ in range(4)]
        assert all(isinstance(logits, DeferredLogits) == fused for _, logits in results)
        assert all(logits.pending.output is None for _, logits in results if fused)
        if fused:
            with pytest.raises(FP8BackendError, match="the head's weight or its input has changed"):
                results[0][1].sum()
        losses.append([loss for loss, _ in results])
        proofs.append((capfd.readouterr().err, fp8_backends.audit(model).flops_share))
    assert losses[0] == pytest.approx(losses[1], abs=0.01) and losses[0][-1] < losses[0][0] - 0.2
    assert proofs[0] == proofs[1]  # the head still counts
    assert ("15/15 Linear, 100 %" in proofs[0][0]) == bool(fields)


def test_evaluation_and_generation_stay_unchanged():
    model, optimizer = prepared(fused_head=True)
    step(model, optimizer)
    plain = llama()
    plain.load_state_dict(model.state_dict())
    batch = counting_batch()[:2]
    for each in (model, plain):
        each.eval()
    assert torch.equal(model(input_ids=batch).logits, plain(input_ids=batch).logits)
    generated = [each.generate(batch[:1, :4], max_new_tokens=3) for each in (model, plain)]
    assert torch.equal(*generated)


@pytest.mark.parametrize("fields", [{}, FP8_HEAD], ids=["high precision", "FP8"])
def test_restore_copies_and_pickles(fields):
    model, optimizer = prepared(fused_head=True, **fields)
    step(model, optimizer)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(step(*prepared(copied, fused_head=True, **fields))[1], DeferredLogits)
    fp8_backends.restore(model)
    assert (
        type(model.lm_head) is nn.Linear
        and model.lm_head.__dict__.keys() == llama().lm_head.__dict__.keys()
    )
    assert type(step(model, optimizer)[1]) is torch.Tensor


def test_activation_checkpointing_and_kept_weight_casts():
    model, optimizer = prepared(fused_head=True, **FP8_HEAD)
    fp8_backends.convert.stored_weights.keep_weight_casts(model)
    step(model, optimizer)
    batch = counting_batch()[:8]
    gradients = []
    for _ in range(2):
        checkpoint(
            lambda x: model(input_ids=x, labels=x, use_cache=False).loss, batch, use_reentrant=False
        ).backward()
        gradients.append(model.lm_head.weight.grad.clone())
    assert torch.allclose(gradients[1], 2 * gradients[0])
    model.gradient_checkpointing_enable()
    optimizer.zero_grad()
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    assert torch.allclose(model.lm_head.weight.grad, gradients[0])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(8, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)))


@pytest.mark.parametrize("regional", [True, False])
def test_whole_compile_uses_ordinary_head_and_regional_compile_fused(regional):
    model, _ = prepared(Small(), fused_head=True)
    (model.block if regional else model).compile(backend="eager", fullgraph=True)
    logits = model(torch.arange(8))
    assert isinstance(logits, DeferredLogits) == regional
    assert regional or type(logits) is torch.Tensor


def tiny(kind: str, **fields):
    """A tiny model of a family with scaled or capped logits."""
    import transformers

    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, num_key_value_heads=2)
    config = getattr(transformers, f"{kind}Config")(**sizes, **tokens, **fields)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


FAMILIES = {
    "gpt2, tied": lambda: model_families.build("gpt2"),
    "bert, tied, with a bias": lambda: model_families.build("bert"),
    "mixtral, with a loss of its routers": lambda: model_families.build("mixtral"),
    "gemma2, with a softcap": lambda: tiny("Gemma2", head_dim=16),
    "cohere, with a factor": lambda: tiny("Cohere", logit_scale=0.25),
    "granite, with a divisor": lambda: tiny("Granite", logits_scaling=8.0),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_losses_need_no_logits(name):
    batch, results = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0)), []
    for fused in (True, False):
        torch.manual_seed(0)
        model, _ = prepared(FAMILIES[name](), fused_head=fused)
        output = model(input_ids=batch, labels=batch)
        output.loss.backward()
        assert isinstance(output.logits, DeferredLogits) == fused
        assert not fused or output.logits.pending.output is None
        results.append((output.loss.item(), model.get_output_embeddings().weight.grad))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


def with_lora_on_its_head():
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "lm_head"]))


def with_custom_head():
    model = llama()
    model.lm_head.forward = lambda x: torch.nn.functional.linear(x, model.lm_head.weight)
    return model


ORDINARY = {
    "no head": (
        lambda: nn.Sequential(nn.Linear(32, 32)),
        "the output head {}: no get_output_embeddings of the model",
    ),
    "LoRA": (
        with_lora_on_its_head,
        "the output head {}: it is no plain Linear, but peft.tuners.lora.layer.Linear",
    ),
    "another forward": (with_custom_head, "lm_head {}: its forward was replaced on the instance"),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_unsupported_head_warns_once_and_runs_ordinarily(name, caplog):
    build, reason = ORDINARY[name]
    with caplog.at_level(logging.WARNING, logger="fp8_backends"):
        fp8_backends.prepare(
            *prepared(build(), fused_head=True), {"backend": "native:dynamic", "fused_head": True}
        )
    said = [message for message in caplog.messages if "fused_head" in message]
    assert len(said) == 1
    assert said[0].startswith(
        f"native:dynamic: fused_head: {reason.format('runs as an ordinary layer')}"
    )


@pytest.mark.parametrize("stored", [False, True])
def test_frozen_head_returns_input_gradient(stored):
    model = llama()
    model.lm_head.weight.requires_grad_(False)
    include = {"include": ["lm_head"], "fp8_params": True} if stored else FP8_HEAD
    model, optimizer = prepared(model, fused_head=True, **include)
    assert isinstance(step(model, optimizer)[1], DeferredLogits)
    assert fp8_backends.audit(model).products["lm_head"] == dict(
        fprop=1, dgrad=1, wgrad=0, recomputed=0
    )
