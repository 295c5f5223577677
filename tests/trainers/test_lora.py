"""Train PEFT's LoRA in Trainer: a frozen base in FP8, adapters in high precision."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import HRAConfig, IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftModel, get_peft_model
from tiny_trainers import (
    LAYERS,
    kept_frozen,
    llama,
    loss_in_bf16,
    losses_of,
    trainable,
    trainer_for,
    values_of,
)

import fp8_backends
from fp8_backends import RecipeError


def with_lora(model=None, rank: int = 8, **given):
    torch.manual_seed(1)
    config = LoraConfig(
        r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", **given
    )
    return get_peft_model(llama() if model is None else model, config)


def trained(folder, model=None, **given):
    trainer = trainer_for(
        folder, with_lora() if model is None else model, **({"learning_rate": 2e-2} | given)
    )
    trainer.train()
    return trainer


# bytes of an element of the base: unchanged; E4M3 codes; MS-AMP's levels, which keep trainable
# precision. The scale of the smallest weight, 32 x 32, adds 4 / 1024
BYTES = {
    "native": 4,
    "native fp8_params": 1,
    "msamp:O2": 2,
    "msamp:O3": 3,
    "msamp:O4": 2,
}


@pytest.mark.parametrize("backend", BYTES)
def test_base_stays_frozen_and_adapters_train(backend, launched, tmp_path):
    name, _, params = backend.partition(" ")
    launched(name, **({"params": "true"} if params else {}))
    model = with_lora(modules_to_save=["lm_head"])
    before = values_of(model)
    trainer = trained(tmp_path, model, bf16=True)
    assert kept_frozen(model, before) and len(trainable(model)) == 2 * LAYERS + 1
    assert losses_of(trainer)[-1] < 0.75 * losses_of(trainer)[0]
    audit = fp8_backends.audit(model)
    assert len(audit.products) == LAYERS and all(
        layer.endswith("base_layer") for layer in audit.products
    )
    assert all(counts["fprop"] == 6 and counts["wgrad"] == 0 for counts in audit.products.values())
    # below the first adapters nothing trains, so q, k and v of the first layer owe nobody a
    # gradient
    assert sorted(counts["dgrad"] for counts in audit.products.values()) == [0] * 3 + [6] * (
        LAYERS - 3
    )
    stored = audit.bytes_per_element
    assert stored["weight"] + stored["master"] == pytest.approx(BYTES[backend], abs=0.01)
    adapters = {name: reason for name, reason in audit.high_precision.items() if "lora_" in name}
    assert len(adapters) == 2 * LAYERS and all(
        reason.startswith("adapter:") for reason in adapters.values()
    )
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}


def test_adapters_in_bf16_stay_in_bf16(launched, tmp_path):
    launched("native", params="true")
    model = with_lora(llama().bfloat16()).bfloat16()
    before = values_of(model)
    trained(tmp_path, model, bf16=True)
    assert kept_frozen(model, before)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_named_adapters_are_converted(launched, tmp_path):
    """Use rank 16; adapters of rank 8 are padded, with a notice."""
    launched("native", include="*q_proj*")
    for rank, note in ((16, None), (8, "padded")):
        model = with_lora(rank=rank)
        trained(tmp_path, model, max_steps=2)
        products = fp8_backends.audit(model).products
        adapters = {name: counts for name, counts in products.items() if "lora_" in name}
        assert len(adapters) == 4 and all(
            min(c["fprop"], c["wgrad"]) == 2 for c in adapters.values()
        )
        report = fp8_backends.convert.conversion.prepared_roots(model)[0][2].report
        reasons = {each.reason for each in report.products if each.name in adapters}
        assert reasons == ({None} if note is None else {"sizes padded to multiples of 16"})


def test_trainable_adapter_is_not_stored_in_fp8(launched, tmp_path):
    launched("native", params="true", include="*q_proj*")
    with pytest.raises(RecipeError, match=r"32 -> 8 trains: .*use level O3.*adapters, in exclude"):
        trained(tmp_path)


@pytest.mark.parametrize("backend", ["native:delayed fp8_params", "msamp:O3"])
def test_adapters_resume_bitwise(backend, launched, tmp_path):
    name, _, params = backend.partition(" ")
    launched(name, **({"params": "true"} if params else {}))
    unbroken = trained(tmp_path / "a")
    trained(tmp_path / "b", save_strategy="steps", save_steps=3)
    resumed = trainer_for(tmp_path / "b", with_lora(), learning_rate=2e-2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert losses_of(resumed) == losses_of(unbroken)
    found, wanted = values_of(resumed.model), values_of(unbroken.model)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_saved_adapters_load_into_a_plain_model_and_merge(launched, tmp_path):
    launched("native", params="true")
    trainer = trained(tmp_path / "run", bf16=True)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(tmp_path / "adapters"))
    stock = PeftModel.from_pretrained(llama(), tmp_path / "adapters")
    # the base of the run was rounded to E4M3: half a step is 1/16 of a weight, and the losses of a
    # random model of this size are closer than one hundredth
    assert loss_in_bf16(stock) == pytest.approx(loss, abs=0.01)
    merged = trainer.model.merge_and_unload()
    fp8_backends.restore(merged)
    assert all(type(parameter) is torch.nn.Parameter for parameter in merged.parameters())
    # the same values by other products: x (w + B A) in bf16
    assert loss_in_bf16(merged) == pytest.approx(loss, abs=0.005)


PARTS = ["q_proj", "down_proj"]
ADAPTERS = {
    "LoRA": LoraConfig(target_modules=PARTS, init_lora_weights=False),
    "DoRA": LoraConfig(target_modules=PARTS, init_lora_weights=False, use_dora=True),
    "LoHa": LoHaConfig(target_modules=PARTS, init_weights=False),
    "OFT": OFTConfig(target_modules=PARTS, init_weights=False, oft_block_size=8),
    "HRA": HRAConfig(target_modules=PARTS, init_weights=False),
    "IA3": IA3Config(target_modules=PARTS, feedforward_modules=PARTS[1:], init_ia3_weights=False),
}


@pytest.mark.parametrize(
    "backend, kind",
    [*(("native", kind) for kind in ADAPTERS), ("msamp:O2", "LoRA"), ("msamp:O4", "DoRA")],
)
def test_merge_and_unmerge_equal_stock_to_the_bit(backend, kind, tmp_path):
    torch.manual_seed(0)
    safe_merge = backend == "native" and kind in list(ADAPTERS)[::2]
    model, stock = (
        get_peft_model(llama(num_hidden_layers=1), copy.deepcopy(ADAPTERS[kind])) for _ in range(2)
    )
    recipe = fp8_backends.FP8RecipeKwargs(
        backend=backend, **({"fp8_params": True} if backend == "native" else {})
    )
    fp8_backends.prepare(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), recipe
    )
    stock.load_state_dict(model.state_dict())  # the base as FP8 or a level holds it

    def assert_equal():
        found, wanted = model.state_dict(), stock.state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())

    for merged in (model, stock):
        merged.merge_adapter(safe_merge=safe_merge)
    assert_equal()
    for merged in (model, stock):
        merged.unmerge_adapter()
    assert_equal()
    model, stock = (merged.merge_and_unload(safe_merge=safe_merge) for merged in (model, stock))
    assert_equal()
    model.save_pretrained(tmp_path)
    fp8_backends.restore(model)
    assert_equal()
    model = type(stock).from_pretrained(tmp_path)
    assert_equal()


def test_checkpointing_with_inputs_that_require_gradients(launched, tmp_path):
    """PEFT's recipe for a frozen embedding; Trainer calls `enable_input_require_grads` too."""
    launched("native:delayed", params="true")
    plain = trained(tmp_path, max_steps=3)
    model = with_lora()
    model.enable_input_require_grads()
    kept = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    }
    trainer = trained(tmp_path, model, max_steps=3, **kept)
    assert losses_of(trainer) == losses_of(plain)
    products = fp8_backends.audit(model).products
    assert all(
        counts == dict(fprop=3, dgrad=3, wgrad=0, recomputed=3) for counts in products.values()
    )


def test_a_head_tied_to_the_embedding_stays_tied(launched, tmp_path):
    launched("native", params="true")
    model = with_lora(llama(tie_word_embeddings=True))
    trained(tmp_path, model, max_steps=2)
    base = model.get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight
    assert type(base.lm_head.weight) is torch.nn.Parameter
    launched("native", params="true", include="*base_layer,lm_head")
    with pytest.raises(
        fp8_backends.FP8BackendError, match="lm_head is that of .*embed_tokens too.*exclude"
    ):
        trained(tmp_path, with_lora(llama(tie_word_embeddings=True)), max_steps=2)
