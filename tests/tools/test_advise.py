"""Test `fp8-backends advise`: from a model and a text to the table and the recipe to paste."""

from __future__ import annotations

import json
import shlex

import pytest

import fp8_backends
from fp8_backends.accelerate_plugin.launch import parse, recipe_flags
from fp8_backends.recipes.merging import merged
from fp8_backends.tools import advise
from fp8_backends.tools.config import read
from fp8_backends.tools.main import main

RECIPES = [
    {"backend": "native:rowwise"},
    {
        "backend": "native:delayed",
        "exclude": ["model.layers.0.mlp.up_proj", "lm_head"],
        "margin": 2,
    },
    {
        "backend": "msamp:O2",
        "exclude": ["a.b"],
        "rounding": "nearest",
        "use_autocast_during_eval": True,
    },
    {"backend": "native:dynamic+msamp:O1", "override_linear_precision": (False, False, True)},
    {"backend": "native:dynamic", "layers": {"a.b": "native:mxfp8", "lm_head": "bf16", "last": 1}},
]


@pytest.mark.parametrize("fields", RECIPES)
def test_a_recipe_is_the_same_in_code_flags_and_yaml(fields, tmp_path):
    recipe = fp8_backends.resolve(fields)
    assert eval(advise.code(recipe), {"FP8RecipeKwargs": fp8_backends.FP8RecipeKwargs}) == recipe
    words = shlex.split(advise.flags(recipe))
    assert words[:2] == ["fp8-backends", "launch"] and words[-1] == "SCRIPT"
    assert fp8_backends.resolve(merged([recipe_flags(parse([*words[2:-1], "train.py"]))])) == recipe
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: 'NO'\n" + advise.yaml_block(recipe))
    assert read(str(file)).recipe == recipe


SMALL = ["--batches", "1", "--batch", "2", "--sequence", "32"]


@pytest.fixture
def folder(tmp_path):
    """A model as transformers saves it, and the same without its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
    model.save_pretrained(tmp_path / "model")
    model.config.save_pretrained(tmp_path / "config")
    return tmp_path


def test_a_saved_model_keeps_its_weights(folder, capsys):
    arguments = ["advise", "--model", str(folder / "model"), "--backend", "native:delayed", *SMALL]
    file = folder / "recipe.yaml"
    assert main([*arguments, "--max_trials", "2", "--json", "--recipe", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        fp8_backends.resolve(file).to_dict()
        == fp8_backends.resolve(found["recipe"]["name"]).to_dict()
    )
    again = [*arguments[:3], "--backend", str(file), *SMALL, "--max_trials", "1"]
    assert main([*again, "--recipe", str(file)]) == 0
    assert f"fp8-backends launch --fp8_backend {file}" in capsys.readouterr().out
    assert found["trials"][0]["backend"] == "native:delayed" and 0 < found["trials"][0]["gap"] < 0.5
    assert len(found["notes"]) == 1 and "no tokenizer" in found["notes"][0]
    assert found["paste"]["code"].startswith("FP8RecipeKwargs(backend='native:")


def test_a_configuration_without_weights_gets_random_ones(folder, capsys):
    config = folder / "accelerate.yaml"
    config.write_text(
        "distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config: {backend: native, exclude: "
        "'*o_proj'}"
    )
    arguments = [
        "--model",
        str(folder / "config" / "config.json"),
        "--config_file",
        str(config),
        *SMALL,
    ]
    assert main(["advise", *arguments, "--max_trials", "1", "--min_flops_share", "0.9"]) == 0
    printed = capsys.readouterr().out
    assert "random" in printed and "as given" in printed and "native:dynamic" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nothing/here"], "nothing/here"),
        (["--backend", "native:dealyed"], "did you mean 'delayed'"),
        (["--backend", "native", "--config_file", "a.yaml"], "give one of them"),
        (["--text", "nothing/here"], "--text nothing/here"),
        (["--recipe", "recipe.txt"], "recipe.txt: a recipe file"),
    ],
)
def test_invalid_arguments_exit_with_2_and_one_line(arguments, message, capsys):
    assert main(["advise", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
