"""Test the text, the model and the task of a comparison."""

from __future__ import annotations

import json

import pytest
import torch
from tools.comparing import checks_by_name, compared, planted, tiny_settings, write_text
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
from widths import nightly

from fp8_backends.errors import FP8BackendError
from fp8_backends.tools.compare.summary import checks
from fp8_backends.tools.compare.workload import CAUSAL, MASKED, build_model, inputs, load_text, task
from fp8_backends.tools.main import main


def test_default_text_is_the_standard_library():
    first, again = load_text(limit_mb=0.3), load_text(limit_mb=0.3)
    assert first.sha256 == again.sha256 and torch.equal(first.train, again.train)
    assert "standard library" in first.description
    assert first.vocab_size == 256 and first.train.dtype == torch.uint8


def test_held_out_files_never_appear_in_the_training_part(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"<file {number:02}> " * 30)
    text = load_text(folder)
    train, held_out = bytes(text.train), bytes(text.held_out)
    in_train = {n for n in range(20) if f"<file {n:02}>".encode() in train}
    in_held_out = {n for n in range(20) if f"<file {n:02}>".encode() in held_out}
    assert in_held_out == {9, 19} and in_train == set(range(20)) - in_held_out


def test_a_single_file_holds_out_its_last_tenth(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(1, 101)) * 10)
    text = load_text(file)
    assert len(text.train) == 900 and len(text.held_out) == 100
    assert bytes(text.held_out) == bytes(range(1, 101))


def test_binary_files_are_left_out(tmp_path):
    write_text(tmp_path)
    plain = load_text(tmp_path)
    (tmp_path / "binary.bin").write_bytes(b"\0\1\2" * 100)
    assert load_text(tmp_path).sha256 == plain.sha256


def test_batches_depend_on_the_seed(tmp_path):
    text = load_text(write_text(tmp_path))
    starts = text.batches(steps=50, batch=4, sequence=32, seed=3)
    assert torch.equal(starts, text.batches(steps=50, batch=4, sequence=32, seed=3))
    assert not torch.equal(starts, text.batches(steps=50, batch=4, sequence=32, seed=4))
    windows = text.windows(starts[0], 32)
    assert windows.shape == (4, 32) and windows.dtype == torch.int64
    assert bytes(windows[0].to(torch.uint8)) in bytes(text.train)


@pytest.mark.parametrize("missing", ["nowhere", "empty"])
def test_missing_text_is_an_error_with_the_path(tmp_path, missing):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FP8BackendError, match=missing):
        load_text(tmp_path / missing)


def test_too_little_text_names_the_part(tmp_path):
    text = load_text(write_text(tmp_path, files=10))
    with pytest.raises(FP8BackendError, match="held-out part.*--sequence"):
        text.held_out_windows(4, 100_000)


GRADIENTS = "gradients at the initial weights point where bf16's do"
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {"vocab_size": 256, "hidden_size": 32, "max_position_embeddings": 64, **LAYERS}
BERT = {**SIZES, "intermediate_size": 64}
MODELS = {
    "bert": (BertConfig(**BERT), "bert.encoder.layer.*.attention.self.key.bias (x2)"),
    "opt": (
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
        "model.decoder.layers.*.self_attn.k_proj.bias (x2)",
    ),
}
"""Configurations, and their parameters with theoretically zero gradients: softmax ignores a shift
of all keys."""


@pytest.fixture
def settings(tmp_path):
    """Return settings for a configuration saved by transformers."""

    def made(config, **changes):
        config.save_pretrained(tmp_path / "model")
        return tiny_settings(tmp_path, model=str(tmp_path / "model"), **changes)

    return made


@pytest.mark.parametrize(("name", "reference"), [("bert", "bf16"), nightly("opt", "fp32")])
def test_analytically_zero_gradient_is_named_and_not_judged(tmp_path, name, reference):
    config, blind = MODELS[name]
    config.save_pretrained(tmp_path / "model")
    model = {"model": str(tmp_path / "model"), "reference": reference, "steps": 2, "seeds": 1}
    comparison = compared(tmp_path, "native:dynamic", **model)
    check = next(
        check for check in checks(comparison.results)["native:dynamic"] if "gradients" in check.name
    )
    assert check.passed and check.detail.endswith(f"turns it: {blind}") and not comparison.failed
    cosines = comparison.results["backends"]["native:dynamic"]["inspection"][
        "first_gradient_cosines"
    ]
    assert min(cosines.values()) < 0.9  # it would have failed
    assert comparison.results["task"] == {"bert": MASKED, "opt": CAUSAL}[name]


@pytest.mark.parametrize("name", [nightly("bert"), "opt"])
def test_flipped_gradient_fails_despite_an_unjudged_one(tmp_path, name):
    config, blind = MODELS[name]
    config.save_pretrained(tmp_path / "model")
    model = {"model": str(tmp_path / "model"), "steps": 1, "seeds": 1}
    comparison = planted("flipped-wgrad", tmp_path, "native:dynamic", **model)
    assert checks_by_name(comparison, "native:dynamic")[GRADIENTS] is False and comparison.failed
    verdict = json.loads((comparison.output / "results.json").read_text())["summary"]["verdict"]
    assert verdict["mood"] == "bad" and verdict["details"][0].startswith(
        f"Failed: native:dynamic: {GRADIENTS}"
    )
    assert blind in verdict["details"][0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**SIZES, intermediate_size=64), CAUSAL),
        (
            LlamaConfig(
                **SIZES, intermediate_size=64, architectures=["LlamaForSequenceClassification"]
            ),
            CAUSAL,
        ),
        (BertConfig(**BERT), MASKED),
        (BertConfig(**BERT, is_decoder=True), CAUSAL),
        (BertConfig(**BERT, architectures=["BertLMHeadModel"]), CAUSAL),
        (BertConfig(**BERT, is_decoder=True, architectures=["BertForMaskedLM"]), MASKED),
        (RobertaConfig(**BERT), MASKED),
        (AlbertConfig(**BERT, embedding_size=32, is_decoder=True), MASKED),
    ],
)
def test_the_task_follows_from_the_configuration(settings, config, expected):
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
def test_a_model_without_a_task_is_refused(settings, tmp_path, capsys, config):
    found = settings(config, sequence=8)
    with pytest.raises(FP8BackendError, match="neither a causal nor a masked language model"):
        task(found)
    arguments = ["--model", found.model, "--sequence", "8", "--output", str(tmp_path / "out")]
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert (
        f"type {config.model_type}" in error
        and "Traceback" not in error
        and not (tmp_path / "out").exists()
    )


def test_too_few_positions_are_an_error_before_anything_starts(settings):
    with pytest.raises(FP8BackendError, match="65 tokens exceeds the model's 64 positions"):
        task(settings(BertConfig(**BERT), sequence=65))


def test_masks_hide_equal_token_counts_and_depend_on_seed():
    tokens = torch.randint(256, (4, 40))
    values = inputs(tokens, MASKED, 256, seed=3)
    hidden = values["input_ids"] == 256
    assert hidden.sum(dim=1).tolist() == [6] * 4  # 15 % of 40
    assert torch.equal(values["labels"], tokens.masked_fill(~hidden, -100))
    assert torch.equal(values["input_ids"][~hidden], tokens[~hidden])
    assert torch.equal(inputs(tokens, MASKED, 256, seed=3)["labels"], values["labels"])
    assert not torch.equal(inputs(tokens, MASKED, 256, seed=4)["labels"], values["labels"])
    assert (inputs(tokens[:, :2], MASKED, 256, seed=0)["labels"] >= 0).sum(dim=1).tolist() == [
        1
    ] * 4


def test_dropout_is_off(settings):
    model = build_model(settings(BertConfig(**BERT)), vocab_size=256, seed=0).train()
    values = inputs(torch.randint(256, (2, 32)), MASKED, 256, seed=0)
    assert model(**values).loss == model(**values).loss
