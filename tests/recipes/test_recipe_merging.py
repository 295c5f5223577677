"""Merge code, flags, a YAML file and the environment into recipe fields."""

from __future__ import annotations

import dataclasses

import accelerate.utils
import pytest

import fp8_backends
from fp8_backends.accelerate_plugin.plugin import asked_recipe
from fp8_backends.errors import RecipeError
from fp8_backends.recipes.fields import VARIABLES
from fp8_backends.recipes.handlers import FP8RecipeKwargs, code_over_launch
from fp8_backends.recipes.merging import merged
from fp8_backends.recipes.sources import Source, config_source

FILE = "default_config.yaml"
TE_QUESTIONS = {
    "backend": "TE",
    "use_autocast_during_eval": False,
    "margin": 0,
    "interval": 1,
    "fp8_format": "HYBRID",
    "amax_history_length": 1024,
    "amax_compute_algorithm": "max",
    "override_linear_precision": [False, False, False],
}
"""Answers of `accelerate config` for TransformerEngine when the user only presses Enter."""
AO_QUESTIONS = {"backend": "AO", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}
MSAMP_QUESTIONS = {"backend": "MSAMP", "optimization_level": "O2"}


def flags(**fields) -> Source:
    return Source(fields, {name: f"--fp8_{name}" for name in fields})


def recipe(*sources: Source) -> FP8RecipeKwargs:
    return FP8RecipeKwargs(**merged(sources))


# The fp8_config block


def accelerate_fields(block, file: str) -> dict:
    return merged([config_source(block, file)])


@pytest.mark.parametrize(
    ("block", "name", "fields"),
    [
        (TE_QUESTIONS, "te:delayed", {"amax_history_len": 1024, "amax_compute_algo": "max"}),
        (AO_QUESTIONS, "ao:tensorwise", {"enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}),
        (MSAMP_QUESTIONS, "msamp:O2", {}),
        (MSAMP_QUESTIONS | {"optimization_level": "O1"}, "msamp:O1", {}),
        ({"backend": "TE", "override_linear_precision": "(false, false, true)"}, "te:delayed", {}),
        ({"fp8_backend": "native:delayed", "fp8_margin": 2}, "native:delayed", {"margin": 2}),
        ({"backend": "te", "format": "e4m3"}, "te:delayed", {"fp8_format": "E4M3"}),
        ({"backend": "te", "use_mxfp8_block_scaling": True, "margin": 0}, "te:mxfp8", {}),
        ({"backend": "te+msamp:O3", "shard_states": False, "rounding": "nearest"}, "te:delayed+msamp:O3", {}),
        ({"scaling": "rowwise", "include": ["a", "b.*"]}, "auto", {"include": ("a", "b.*")}),
        ({"backend": "msamp", "opt_level": "o3"}, "msamp:O3", {}),
        ({"backend": "NO", "margin": None}, "auto", {}),
        ({}, "auto", {}),
    ],
)  # fmt: skip
def test_keys_of_accelerate_its_wizard_and_ours_are_read(block, name, fields):
    found = FP8RecipeKwargs(**accelerate_fields(block, FILE))
    assert found.name == name
    assert fields.items() <= {**found.to_dict()}.items()
    assert accelerate_fields(None, FILE) == {}


@pytest.mark.parametrize(
    "backend", ["native:dynamic", "native:mxfp8", "ao", "msamp:O3", "te:blockwise", "auto"]
)
@pytest.mark.parametrize("block", [TE_QUESTIONS, AO_QUESTIONS, MSAMP_QUESTIONS])
def test_defaults_of_unread_fields_count_as_not_given(block, backend):
    found = accelerate_fields({**block, "backend": backend}, FILE)
    assert FP8RecipeKwargs(**found).name == FP8RecipeKwargs(backend=backend).name
    dropped = {"margin", "interval", "amax_history_len", "amax_compute_algo"}
    assert not dropped & found.keys()


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"backend": "native:dynamic", "margin": 2}, r"fp8_config\.margin=2: margin is not read by "
                                                     r"native:dynamic"),
        ({"backend": "ao", "amax_history_length": 16}, "amax_history_length=16: amax_history_len "
                                                       "is not read"),
        ({"bakend": "AO"}, r"fp8_config\.bakend is not known \(did you mean 'backend'\?\)"),
        ({"amax_history": 3}, "did you mean 'amax_history_len'"),
        ({"fp8_parms": True}, "did you mean 'params'"),
        ({"optimisation_level": "O1"}, "did you mean 'optimization_level'"),
        ({"module_filter_func": "f"}, r"takes a Python "
                                      r"object.*FP8RecipeKwargs\(module_filter_func="),
        ({"config": {}}, "takes a Python object"),
        ({"backend": "natve"}, r"fp8_config\.backend='natve': unknown backend .*did you mean "
                               r"'native'"),
        ({"scaling": "rowise"}, r"fp8_config\.scaling='rowise': .*did you mean 'rowwise'"),
        ({"backend": "te", "use_mxfp8_block_scaling": True, "scaling": "delayed"}, "disagrees "
                                                                                   "with"),
        ({"fp8_margin": 1, "margin": 2}, r"margin=2 disagrees with .*fp8_margin=1"),
        ({"backend": 3}, "backend must be a word"),
        (["te"], "must be a block of keys"),
    ],
)  # fmt: skip
def test_invalid_file_setting_names_key_and_file(block, said):
    with pytest.raises(RecipeError, match=said) as caught:
        accelerate_fields(block, FILE)
    assert str(caught.value).startswith(FILE)


def test_every_textual_field_has_a_key():
    objects = {"module_filter_func", "config"}
    fields = {each.name for each in dataclasses.fields(FP8RecipeKwargs)}
    assert {field.name for field, _ in VARIABLES.values()} == fields - objects


# Places over one another


def test_higher_priority_source_wins_per_field():
    in_file = config_source({"backend": "native:delayed", "margin": 1, "interval": 2}, FILE)
    environment = Source({"margin": 9, "interval": 9, "amax_history_len": 9}, {})
    found = recipe(flags(margin=3), in_file, environment)
    assert (found.name, found.margin, found.interval, found.amax_history_len) == (
        "native:delayed",
        3,
        2,
        9,
    )


def test_explicit_default_still_wins():
    in_file = config_source({"backend": "native:delayed", "margin": 2, "opt_level": "O2"}, FILE)
    assert recipe(flags(margin=0), in_file).margin == 0


@pytest.mark.parametrize(
    ("strong", "weak", "name"),
    [
        ({"scaling": "rowwise"}, {"backend": "native:delayed"}, "native:rowwise"),
        ({"scaling": "dynamic"}, {"backend": "msamp:O1"}, "native:dynamic+msamp:O1"),
        ({"opt_level": "O3"}, {"backend": "msamp:O1"}, "msamp:O3"),
        ({"opt_level": "O3"}, {"backend": "te"}, "te:delayed+msamp:O3"),
        ({"opt_level": "O1"}, {"backend": "msamp", "optimization_level": "O2"}, "msamp:O1"),
        ({"backend": "te"}, {"backend": "native:rowwise"}, "te:delayed"),
        ({"backend": "msamp:O3"}, {"optimization_level": "O1"}, "msamp:O3"),
        ({"backend": "msamp"}, {"backend": "MSAMP", "optimization_level": "O1"}, "msamp:O1"),
        ({"backend": "native:delayed"}, {"scaling": "rowwise"}, "native:delayed"),
        ({"backend": "native"}, {"scaling": "rowwise"}, "native:rowwise"),
        ({"backend": "te:mxfp8"}, {"use_mxfp8_block_scaling": False}, "te:mxfp8"),
        ({"backend": "te"}, {"use_mxfp8_block_scaling": True}, "te:mxfp8"),
    ],
)
def test_parts_of_a_backends_name_are_fields_too(strong, weak, name):
    assert recipe(flags(**strong), config_source(weak, FILE)).name == name


def test_lower_priority_fields_must_suit_the_chosen_backend():
    in_file = config_source(TE_QUESTIONS | {"amax_history_length": 16}, FILE)
    with pytest.raises(
        RecipeError, match=rf"{FILE}: fp8_config\.amax_history_length=16: .*native:rowwise"
    ):
        recipe(flags(backend="native:rowwise"), in_file)
    with pytest.raises(
        RecipeError, match=rf"{FILE}: fp8_config\.scaling='rowwise': .*te has no scaling"
    ):
        recipe(
            flags(backend="te"), config_source({"backend": "native", "scaling": "rowwise"}, FILE)
        )


def test_auto_accepts_fields_of_any_candidate():
    assert merged([flags(scaling="rowwise", include=("a",))]) == {
        "scaling": "rowwise",
        "include": ("a",),
    }
    with pytest.raises(RecipeError, match="--fp8_pad_inner_dim: pad_inner_dim is not read by"):
        merged([flags(pad_inner_dim=True)])


# Code over launch

LAUNCHED = {"backend": "native:delayed", "margin": 1, "interval": 2}


def launch(fields: dict) -> Source:
    return Source(fields, {name: f"{name} of fp8-backends launch" for name in fields})


def test_code_overrides_launch_per_field_with_one_warning():
    handler = fp8_backends.FP8RecipeKwargs(margin=3, amax_history_len=8)
    recipe, warning = code_over_launch(handler, launch(LAUNCHED))
    assert (recipe.name, recipe.margin, recipe.interval, recipe.amax_history_len) == (
        "native:delayed",
        3,
        2,
        8,
    )
    assert "FP8RecipeKwargs in the script says margin=3" in warning and "margin=1" in warning
    assert "interval" not in warning and "\n" not in warning


@pytest.mark.parametrize("margin", [1, None])
def test_agreeing_code_does_not_warn(margin):
    handler = fp8_backends.FP8RecipeKwargs(margin=margin, include="a")
    recipe, warning = code_over_launch(handler, launch(LAUNCHED))
    assert warning is None and recipe == FP8RecipeKwargs(**LAUNCHED, include="a")


@pytest.mark.parametrize(
    "handler",
    [
        fp8_backends.AORecipeKwargs(),
        fp8_backends.NativeRecipeKwargs(scaling="rowwise"),
        fp8_backends.MSAMPRecipeKwargs(),
        fp8_backends.FP8RecipeKwargs(backend="native"),
        fp8_backends.TERecipeKwargs(margin=4),
    ],
)
def test_code_naming_another_backend_ignores_launch(handler):
    recipe, warning = code_over_launch(handler, launch(LAUNCHED))
    assert recipe == handler
    assert handler.name in warning and "backend='native:delayed', margin=1" in warning


@pytest.mark.parametrize(
    ("handler", "launched", "name", "warns"),
    [
        (
            fp8_backends.TERecipeKwargs(margin=2),
            {"backend": "te+msamp:O3"},
            "te:delayed+msamp:O3",
            False,
        ),
        (
            fp8_backends.MSAMPRecipeKwargs(rounding="nearest"),
            {"backend": "msamp:O3"},
            "msamp:O3",
            False,
        ),
        (fp8_backends.MSAMPRecipeKwargs(opt_level="O1"), {"backend": "msamp:O3"}, "msamp:O1", True),
        (fp8_backends.TERecipeKwargs(margin=2), {}, "te:delayed", False),
        (fp8_backends.FP8RecipeKwargs(opt_level="O1"), {"backend": "native"}, "msamp:O1", False),
        (accelerate.utils.MSAMPRecipeKwargs(), {"backend": "msamp:O3"}, "msamp:O3", False),
        (
            accelerate.utils.MSAMPRecipeKwargs(opt_level="O1"),
            {"backend": "msamp:O3"},
            "msamp:O1",
            True,
        ),
        (
            accelerate.utils.AORecipeKwargs(),
            {"backend": "ao:rowwise", "pad_inner_dim": False},
            "ao:rowwise",
            False,
        ),
        (accelerate.utils.AORecipeKwargs(), {"backend": "native"}, "ao:tensorwise", True),
    ],
)
def test_handler_without_other_backend_completes_launch(handler, launched, name, warns):
    recipe, warning = code_over_launch(handler, launch(launched))
    assert recipe.name == name and (warning is not None) == warns


def test_launch_field_unread_by_script_backend_is_named():
    with pytest.raises(
        RecipeError, match="margin of fp8-backends launch: margin is not read by native:dynamic"
    ):
        code_over_launch(
            fp8_backends.FP8RecipeKwargs(backend="native:dynamic"), launch({"margin": 2})
        )


def test_variables_set_by_script_under_launch_are_named(monkeypatch, caplog):
    monkeypatch.setenv("FP8_BACKENDS_RECIPE", '{"backend": "native:delayed"}')
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "7")
    recipe = asked_recipe({"mixed_precision": "fp8"})
    assert (recipe.name, recipe.margin) == ("native:delayed", 0)
    assert "ACCELERATE_FP8_MARGIN, set by the script, has no effect" in caplog.text


def test_handler_over_invalid_launch_is_named(monkeypatch):
    monkeypatch.setenv("FP8_BACKENDS_RECIPE", "te")
    arguments = {"mixed_precision": "fp8", "kwargs_handlers": [fp8_backends.NativeRecipeKwargs()]}
    with pytest.raises(
        RecipeError, match="NativeRecipeKwargs in the script, with FP8_BACKENDS_RECIPE"
    ):
        asked_recipe(arguments)


# Code over the environment


@pytest.mark.parametrize(
    ("handler", "variables", "name", "fields", "warning"),
    [
        (
            fp8_backends.TERecipeKwargs(margin=2),
            {"BACKEND": "te", "AMAX_HISTORY_LEN": "16"},
            "te:delayed",
            (2, 16),
            "",
        ),
        (
            fp8_backends.TERecipeKwargs(margin=2),
            {"MARGIN": "3"},
            "te:delayed",
            (2, 1024),
            "margin=2, ACCELERATE_FP8_",
        ),
        (
            fp8_backends.NativeRecipeKwargs(),
            {"BACKEND": "ao"},
            "native:dynamic",
            (0, 1024),
            "said backend='ao'",
        ),
        (
            accelerate.utils.AORecipeKwargs(),
            {"BACKEND": "native"},
            "ao:tensorwise",
            (0, 1024),
            "said backend='native'",
        ),
        (
            accelerate.utils.AORecipeKwargs(),
            {"BACKEND": "AO", "MARGIN": "1"},
            "ao:tensorwise",
            (0, 1024),
            "",
        ),
        (
            fp8_backends.FP8RecipeKwargs(margin=1),
            {"BACKEND": "native:delayed"},
            "native:delayed",
            (1, 1024),
            "",
        ),
        (
            fp8_backends.FP8RecipeKwargs("native:dynamic"),
            {"SCALING": "current"},
            "native:dynamic",
            (0, 1024),
            "",
        ),
        (fp8_backends.MSAMPRecipeKwargs(), {"OPT_LEVEL": "O1"}, "msamp:O1", (0, 1024), ""),
    ],
)
def test_handler_overrides_environment_with_warning(
    handler, variables, name, fields, warning, monkeypatch, caplog
):
    for variable, text in variables.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_{variable}", text)
    recipe = asked_recipe({"mixed_precision": "fp8", "kwargs_handlers": [handler]})
    assert (recipe.name, (recipe.margin, recipe.amax_history_len)) == (name, fields)
    said = "\n".join(message for message in caplog.messages if "in the script" in message)
    assert warning in said and bool(warning) == bool(said)


@pytest.mark.parametrize(
    ("handler", "variables", "said"),
    [
        (
            fp8_backends.AORecipeKwargs(),
            {"MARGIN": "3"},
            "AORecipeKwargs in the script.*margin is not read by ao",
        ),
        (
            fp8_backends.TERecipeKwargs(),
            {"OPT_LEVEL": "O1"},
            "ACCELERATE_FP8_OPT_LEVEL=O1: O1 selects no level by itself",
        ),
    ],
)
def test_variables_conflicting_with_handler_are_refused(handler, variables, said, monkeypatch):
    for variable, text in variables.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_{variable}", text)
    with pytest.raises(RecipeError, match=said):
        asked_recipe({"mixed_precision": "fp8", "kwargs_handlers": [handler]})
