"""A recipe file stands where a backend string does, weaker than the fields besides it."""

from __future__ import annotations

import json

import pytest
from accelerate import Accelerator
from accelerate_state import fresh_accelerate  # noqa: F401

import fp8_backends
from fp8_backends.accelerate_plugin.launch import Configuration, parse, recipe_fields
from fp8_backends.errors import RecipeError
from fp8_backends.recipes.handlers import code_over_launch
from fp8_backends.recipes.merging import merged
from fp8_backends.recipes.sources import Source, config_source
from fp8_backends.tools.compare.command import backend_names
from fp8_backends.tools.config import read

TEXT = """\
# a comment
backend: native:delayed+msamp:O2
amax_history_len: 16
exclude: ["*.down", "1"]
layers: {"z.*": native:mxfp8, "a.*": native:rowwise, first: 1}
"""
LAYERS = "z.*=native:mxfp8, a.*=native:rowwise, first=1"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    return tmp_path


def same():
    fields = {
        "backend": "native:delayed+msamp:O2",
        "amax_history_len": 16,
        "exclude": ["*.down", "1"],
    }
    layers = {"z.*": "native:mxfp8", "a.*": "native:rowwise", "first": 1}
    return fp8_backends.FP8RecipeKwargs(**fields, layers=layers)


def test_file_equals_its_fields(folder):
    fields = {
        "fp8_backend": "native",
        "scaling": "delayed",
        "opt_level": "O2",
        "amax_history_len": "16",
    }
    (folder / "recipe.json").write_text(
        json.dumps({**fields, "exclude": "*.down,1", "layers": LAYERS})
    )
    for spec in (
        "recipe.yaml",
        folder / "recipe.yaml",
        {"backend": " recipe.yaml "},
        "recipe.json",
    ):
        assert fp8_backends.resolve(spec) == same()
        # the first match wins
        assert list(fp8_backends.resolve(spec).layers) == ["z.*", "a.*", "first"]
    assert fp8_backends.FP8RecipeKwargs("recipe.yaml").replace(exclude="0").exclude == ("0",)


def test_fields_override_the_file():
    given = {"backend": "recipe.yaml", "opt_level": "O3", "exclude": "0", "amax_history_len": None}
    recipe = fp8_backends.FP8RecipeKwargs(**given)
    assert (recipe.name, recipe.exclude, recipe.amax_history_len) == (
        "native:delayed+msamp:O3",
        ("0",),
        16,
    )
    with pytest.raises(
        RecipeError,
        match="recipe.yaml: amax_history_len=16: amax_history_len is not read by native:rowwise",
    ):
        fp8_backends.FP8RecipeKwargs(backend="recipe.yaml", scaling="rowwise")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "backend: native\nmargins: 1",
            r"recipe.yaml: margins is not known \(did you mean 'margin'\?\)",
        ),
        ("margin: 99", "recipe.yaml: margin=99: .*from -64 to 64"),
        ("backend: other.yaml", "recipe.yaml: backend='other.yaml': a recipe file names a backend"),
        (
            "backend: native:rowwise\nmargin: 3",
            "recipe.yaml: (margin=3: )?margin is not read by native:rowwise",
        ),
        ("config: 3", "recipe.yaml: config: config takes a Python object"),
        ("exclude: [*.down]", "recipe.yaml is no YAML that can be read: .*line 1"),
        ("margin: 1\nmargin: 2", "stands in a block twice"),
        ("", "recipe.yaml holds no keys: a recipe"),
        (None, "recipe.yaml: No such file or directory in /"),
    ],
)
def test_wrong_file_is_an_error_with_its_name(text, said, folder):
    (folder / "recipe.yaml").unlink() if text is None else (folder / "recipe.yaml").write_text(text)
    for spec in ("recipe.yaml", {"backend": "recipe.yaml", "monitor_every": 1}):
        with pytest.raises(RecipeError, match=said):
            fp8_backends.resolve(spec)
    with pytest.raises(RecipeError, match=said):
        fp8_backends.FP8RecipeKwargs(
            **merged([Source({"backend": "recipe.yaml"}, {"backend": "--fp8_backend"})])
        )


# Launch, configuration files, environment, Accelerator


def test_launch_takes_a_file(folder):
    for flag in ("--fp8_backend", "--mixed_precision"):
        args = parse([flag, "recipe.yaml", "--fp8_opt_level", "O3", "script.py"])
        fields = recipe_fields(args, Configuration())
        assert fp8_backends.FP8RecipeKwargs(**fields) == same().replace(
            backend="native:delayed", opt_level="O3"
        )
        assert "recipe.yaml" not in json.dumps(fields)  # a worker may run in another folder


def test_file_ranks_with_the_place_that_names_it():
    block = config_source({"backend": "recipe.yaml", "margin": 2}, "accelerate.yaml")
    flags = Source({"amax_history_len": 8}, {"amax_history_len": "--fp8_amax_history_len 8"})
    weak = Source(
        {"margin": 5, "interval": 3, "exclude": ("x",)},
        dict.fromkeys(("margin", "interval", "exclude"), "env"),
    )
    recipe = fp8_backends.FP8RecipeKwargs(**merged([flags, block, weak]))
    assert (recipe.amax_history_len, recipe.margin, recipe.interval, recipe.exclude) == (
        8,
        2,
        3,
        ("*.down", "1"),
    )
    assert recipe.name == "native:delayed+msamp:O2"
    backend = Source({"backend": "native:rowwise"}, {"backend": "--fp8_backend native:rowwise"})
    with pytest.raises(
        RecipeError, match="recipe.yaml: amax_history_len=16: amax_history_len is not read"
    ):
        merged([backend, config_source({"backend": "recipe.yaml"}, "accelerate.yaml")])


def test_accelerates_yaml_names_a_file(folder):
    values = "distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config: {backend: recipe.yaml, margin: 1}\n"
    (folder / "accelerate.yaml").write_text(values)
    config = read("accelerate.yaml")
    assert config.recipe == same().replace(margin=1)
    config.use("recipe.yaml")
    assert config.recipe == same().replace(margin=1) and not config.notes
    assert config.for_accelerate()["fp8_config"]["amax_history_len"] == 16


@pytest.mark.parametrize("how", ["handler", "precision", "environment"])
def test_accelerator_takes_a_file(how, monkeypatch):
    arguments = {}
    if how == "handler":
        handler = fp8_backends.FP8RecipeKwargs(backend="recipe.yaml")
        arguments = {"mixed_precision": "fp8", "kwargs_handlers": [handler]}
    elif how == "precision":
        arguments = {"mixed_precision": "recipe.yaml"}
    else:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "recipe.yaml")
    recipe = Accelerator(cpu=True, **arguments).fp8_recipe
    assert recipe == same()


def test_script_overrides_a_file_with_a_warning():
    handler = fp8_backends.FP8RecipeKwargs(amax_history_len=8)
    recipe, warning = code_over_launch(handler, Source({"backend": "recipe.yaml"}))
    assert recipe == same().replace(amax_history_len=8)
    assert "amax_history_len=8, fp8-backends launch said amax_history_len=16" in warning


def test_compare_keeps_a_file_whole(folder):
    assert backend_names(["recipe.yaml", "native", "native:dynamic"], "bf16") == (
        "recipe.yaml",
        "native:dynamic",
    )
    (folder / "other.yml").write_text("backend: native\nautocast_dtype: bf16\n")
    assert backend_names(["other.yml"], "bf16") == ("other.yml",)
    with pytest.raises(
        RecipeError, match="other.yml has autocast_dtype='bf16', and this comparison runs fp32"
    ):
        backend_names(["other.yml"], "fp32")
