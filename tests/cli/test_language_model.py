"""What a model of each kind is trained to do, and which of its gradients are judged."""

from __future__ import annotations

import json

import pytest
import torch
from cli.comparing import checks_by_name, compared, planted, tiny_settings
from torch.nn import functional
from transformers import (
    AlbertConfig,
    BartConfig,
    BertConfig,
    CLIPConfig,
    LlamaConfig,
    OPTConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
)

from fp8_backends.cli.compare.summary import checks
from fp8_backends.cli.compare.workload import CAUSAL, MASKED, build_model, inputs, task
from fp8_backends.cli.main import main
from fp8_backends.errors import FP8BackendError

GRADIENTS = "gradients at the initial weights point where bf16's do"
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
BERT = {**SIZES, "intermediate_size": 64}
MODELS = {
    "bert": (BertConfig(**BERT), "bert.encoder.layer.*.attention.self.key.bias (×2)"),
    "opt": (
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
        "model.decoder.layers.*.self_attn.k_proj.bias (×2)",
    ),
}
"""Configurations, and the parameters whose gradient is zero in theory: softmax is blind to a shift of all keys."""


@pytest.fixture
def settings(tmp_path):
    """Settings for a configuration that is saved as transformers does it."""

    def made(config, **changes):
        config.save_pretrained(tmp_path / "model")
        return tiny_settings(tmp_path, model=str(tmp_path / "model"), **changes)

    return made


@pytest.mark.parametrize("reference", ["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_that_is_zero_in_theory_is_named_and_not_judged(tmp_path, name, reference):
    config, blind = MODELS[name]
    config.save_pretrained(tmp_path / "model")
    model = {"model": str(tmp_path / "model"), "reference": reference, "steps": 2, "seeds": 1}
    comparison = compared(tmp_path, "native:dynamic", **model)
    check = next(check for check in checks(comparison.results)["native:dynamic"] if "gradients" in check.name)
    assert check.passed and check.detail.endswith(f"turns it: {blind}") and not comparison.failed
    cosines = comparison.results["backends"]["native:dynamic"]["inspection"]["first_gradient_cosines"]
    assert min(cosines.values()) < 0.9  # it would have failed
    assert comparison.results["task"] == {"bert": MASKED, "opt": CAUSAL}[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_flipped_gradient_fails_beside_one_that_is_not_judged(tmp_path, name):
    config, blind = MODELS[name]
    config.save_pretrained(tmp_path / "model")
    model = {"model": str(tmp_path / "model"), "steps": 1, "seeds": 1}
    comparison = planted("flipped-wgrad", tmp_path, "native:dynamic", **model)
    assert checks_by_name(comparison, "native:dynamic")[GRADIENTS] is False and comparison.failed
    verdict = json.loads((comparison.output / "results.json").read_text())["summary"]["verdict"]
    assert verdict["mood"] == "bad" and verdict["details"][0].startswith(f"Failed: native:dynamic: {GRADIENTS}")
    assert blind in verdict["details"][0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**SIZES, intermediate_size=64), CAUSAL),
        (LlamaConfig(**SIZES, intermediate_size=64, architectures=["LlamaForSequenceClassification"]), CAUSAL),
        (BertConfig(**BERT), MASKED),
        (BertConfig(**BERT, is_decoder=True), CAUSAL),
        (BertConfig(**BERT, architectures=["BertLMHeadModel"]), CAUSAL),
        (BertConfig(**BERT, is_decoder=True, architectures=["BertForMaskedLM"]), MASKED),
        (RobertaConfig(**BERT), MASKED),
        (AlbertConfig(**BERT, embedding_size=32, is_decoder=True), MASKED),
    ],
)
def test_a_model_is_trained_for_what_its_configuration_names_or_its_kind_is_made_for(settings, config, expected):
    found = settings(config)
    assert task(found) == expected
    model = build_model(found, vocab_size=256, seed=0).eval()
    values = inputs(torch.randint(256, (2, 32)), expected, 256, seed=0)
    logits = model(**values).logits.flatten(0, 1)
    labels = values["labels"]
    if expected == CAUSAL:
        labels = functional.pad(labels[:, 1:], (0, 1), value=-100)
    loss = functional.cross_entropy(logits, labels.flatten())
    torch.testing.assert_close(model(**values).loss, loss)


@pytest.mark.parametrize("config", [ViTConfig(), T5Config(), BartConfig(), CLIPConfig()])
def test_a_model_without_a_task_is_refused_in_words(settings, tmp_path, capsys, config):
    found = settings(config, sequence=8)
    with pytest.raises(FP8BackendError, match="neither a causal nor a masked language model"):
        task(found)
    assert main(["compare", "--model", found.model, "--sequence", "8", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"type {config.model_type}" in error and "Traceback" not in error and not (tmp_path / "out").exists()


def test_too_few_positions_are_an_error_before_anything_starts(settings):
    with pytest.raises(FP8BackendError, match="--sequence 65 exceeds the model's 64 positions"):
        task(settings(BertConfig(**BERT), sequence=65))


def test_masks_hide_the_same_number_of_tokens_in_every_window_and_depend_on_the_seed_alone():
    tokens = torch.randint(256, (4, 40))
    values = inputs(tokens, MASKED, 256, seed=3)
    hidden = values["input_ids"] == 256
    assert hidden.sum(dim=1).tolist() == [6] * 4  # 15 % of 40
    assert torch.equal(values["labels"], tokens.masked_fill(~hidden, -100))
    assert torch.equal(values["input_ids"][~hidden], tokens[~hidden])
    assert torch.equal(inputs(tokens, MASKED, 256, seed=3)["labels"], values["labels"])
    assert not torch.equal(inputs(tokens, MASKED, 256, seed=4)["labels"], values["labels"])
    assert (inputs(tokens[:, :2], MASKED, 256, seed=0)["labels"] >= 0).sum(dim=1).tolist() == [1] * 4


def test_nothing_is_dropped_since_two_passes_would_drop_different_values(settings):
    model = build_model(settings(BertConfig(**BERT)), vocab_size=256, seed=0).train()
    values = inputs(torch.randint(256, (2, 32)), MASKED, 256, seed=0)
    assert model(**values).loss == model(**values).loss
