"""Test backend strings, recipe objects, and other sources of a recipe."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle

import accelerate.utils
import pytest
import torch
from accelerate.utils import KwargsHandler
from hypothesis import given
from hypothesis import strategies as st

from fp8_backends import (
    AORecipeKwargs,
    FP8BackendError,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    RecipeError,
    TERecipeKwargs,
    resolve,
)
from fp8_backends.compute import chips
from fp8_backends.compute.fields import Field
from fp8_backends.recipes.fields import FIELDS, help_of
from fp8_backends.recipes.handlers import HANDLERS, Recipe, from_environment
from fp8_backends.words import shown

LAUNCHER_DEFAULTS = {
    # exports of `accelerate launch --mixed_precision fp8`, for any backend
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "False",
    "ACCELERATE_FP8_MARGIN": "0",
    "ACCELERATE_FP8_INTERVAL": "1",
    "ACCELERATE_FP8_FORMAT": "HYBRID",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "most_recent",
    "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
    "ACCELERATE_FP8_OVERRIDE_DGRAD": "False",
    "ACCELERATE_FP8_OVERRIDE_WGRAD": "False",
    "ACCELERATE_FP8_OPT_LEVEL": "O2",
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "True",
    "ACCELERATE_FP8_PAD_INNER_DIM": "True",
}


def only_keep_this(module, name):
    return name == "this"


# Backend strings

CANONICAL = {
    "native": "native:dynamic",
    "Native:Current": "native:dynamic",
    "native:tensorwise": "native:dynamic",
    "native:delayed": "native:delayed",
    "native:rowwise": "native:rowwise",
    "native:blockwise": "native:blockwise",
    "native:mxfp8": "native:mxfp8",
    "native:window": "native:window",
    "te": "te:delayed",
    "TE:tensorwise": "te:dynamic",
    "te:blockwise": "te:blockwise",
    "transformer_engine:mxfp8": "te:mxfp8",
    "Transformer-Engine": "te:delayed",
    "ao": "ao:tensorwise",
    "AO:dynamic": "ao:tensorwise",
    "torchao:CURRENT": "ao:tensorwise",
    "ao:rowwise": "ao:rowwise",
    "TorchAO:Rowwise_With_GW_HP": "ao:rowwise_with_gw_hp",
    "msamp": "msamp:O2",
    "MS-AMP": "msamp:O2",
    "msamp:o1": "msamp:O1",
    "msamp:O0": "msamp:O0",
    "native+msamp": "msamp:O2",
    "native:window+msamp:O3": "msamp:O3",
    "native:rowwise+msamp:O3": "native:rowwise+msamp:O3",
    "native+msamp:O0": "native:dynamic+msamp:O0",
    "te+ms-amp": "te:delayed+msamp:O2",
    " te:dynamic+MSAMP:o1 ": "te:dynamic+msamp:O1",
}


@pytest.mark.parametrize("text", CANONICAL)
def test_string_resolves_to_its_canonical_name(text):
    assert resolve(text).name == CANONICAL[text]


@given(st.sampled_from(sorted(CANONICAL)), st.integers(min_value=0))
def test_strings_ignore_case_and_canonical_names_are_fixed_points(text, bits):
    mixed = "".join(c.upper() if bits >> i & 1 else c.lower() for i, c in enumerate(text))
    recipe = resolve(mixed)
    assert recipe == resolve(text) == resolve(recipe.name)
    assert resolve(recipe.name).name == recipe.name


@pytest.mark.nightly
@given(st.text(max_size=30))
def test_any_other_text_raises_only_recipe_error(text):
    try:
        assert resolve(text).compute in ("native", "te", "ao")
    except RecipeError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "nativ",
            [
                "did you mean 'native'",
                "native[:dynamic|delayed|rowwise|",
                "te[:",
                "ao[:tensorwise|",
                "msamp[",
            ],
        ),
        ("transformerengine", ["did you mean 'transformer_engine'"]),
        (
            "bf16",
            ["backend 'bf16' names no FP8", 'Accelerator(mixed_precision="bf16")', "no FP8 recipe"],
        ),
        ("Off", ["backend 'Off' names no FP8"]),
        ("native:rowwize", ["did you mean 'rowwise'", "dynamic (default)"]),
        (
            "ao:delayed",
            ["ao has no scaling 'delayed'", "tensorwise (default), rowwise, rowwise_with_gw_hp"],
        ),
        ("native:rowwise_with_gw_hp", ["native has no scaling"]),
        ("te:rowwise", ["te has no scaling", "delayed (default)"]),
        ("ao:custom", ["pass config="]),
        ("native:", ["no scaling ''"]),
        ("msamp:O5", ["unknown level 'o5'", "O0, O1, O2, O3, O4 (default O2)"]),
        ("msamp:", ["unknown level ''"]),
        ("te+msamp:O2x", ["unknown level"]),
        ("te+fsdp", ["'+msamp[:LEVEL]'", "not '+fsdp'"]),
        ("msamp:O1+msamp:O2", ["no second '+msamp'"]),
        ("ao+msamp", ["ao goes with O0 only", "native, te"]),
        ("ao:rowwise+msamp:O1", ["ao goes with O0 only"]),
        ("auto:delayed", ["auto stands alone"]),
        ("", ["unknown backend ''"]),
    ],
)
def test_impossible_string_lists_valid_ones(text, said):
    with pytest.raises(RecipeError) as caught:
        resolve(text)
    assert isinstance(caught.value, FP8BackendError) and isinstance(caught.value, ValueError)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("spec", [3, 1.5, object(), ["native"], torch.nn.Linear(2, 2)])
def test_spec_of_another_type_is_named(spec):
    with pytest.raises(RecipeError, match=f"cannot be read from {type(spec).__name__}"):
        resolve(spec)


def test_auto_is_native_without_te_and_recommends_bf16(monkeypatch, caplog):
    monkeypatch.setattr("fp8_backends.compute.hardware.fp8_products", lambda: False)
    for spec in (None, "auto", FP8RecipeKwargs(), FP8RecipeKwargs(backend="AUTO"), {}):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fp8_backends"):
            assert resolve(spec).name == "native:dynamic"
        assert "bf16" in caplog.text


@pytest.mark.parametrize(
    "gpu, name",
    [((9, 0), "native:dynamic"), ((8, 9), "native:dynamic"), ((10, 0), "ao:tensorwise")],
)
def test_auto_reports_its_choice_on_a_gpu_in_one_line(gpu, name, monkeypatch, caplog):
    chip = chips.chip_of(gpu)
    monkeypatch.setattr("fp8_backends.compute.hardware.chip", lambda: chip)
    with caplog.at_level(logging.INFO, "fp8_backends"):
        assert resolve().name == name
    (record,) = caplog.records
    assert (
        record.levelno == logging.INFO
        and f"backend auto: {name} (" in record.message
        and chip.examples in record.message
    )


def test_auto_chooses_a_compute_reading_the_fields(monkeypatch):
    """Fields that the recommended backend does not read select the other one."""
    monkeypatch.setattr("fp8_backends.compute.hardware.chip", lambda: chips.chip_of((9, 0)))
    assert resolve(FP8RecipeKwargs(scaling="rowwise")).name == "native:rowwise"
    assert resolve(FP8RecipeKwargs(scaling="rowwise_with_gw_hp")).name == "ao:rowwise_with_gw_hp"
    monkeypatch.setattr("fp8_backends.compute.hardware.chip", lambda: chips.chip_of((10, 0)))
    assert resolve(FP8RecipeKwargs(scaling="rowwise")).name == "ao:rowwise"
    recipe = resolve(FP8RecipeKwargs(scaling="delayed", margin=2, exclude="head"))
    assert (recipe.name, recipe.margin, recipe.exclude) == ("native:delayed", 2, ("head",))
    assert resolve(FP8RecipeKwargs(opt_level="O1")).name == "msamp:O1"
    with pytest.raises(
        RecipeError, match="margin is not read by ao:tensorwise, only by native:delayed"
    ):
        resolve(FP8RecipeKwargs(margin=2))


# Recipe objects


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (TERecipeKwargs(), "te:delayed"),
        (TERecipeKwargs(scaling="current"), "te:dynamic"),
        (TERecipeKwargs(use_mxfp8_block_scaling=True), "te:mxfp8"),
        (AORecipeKwargs(), "ao:tensorwise"),
        (AORecipeKwargs(scaling="rowwise"), "ao:rowwise"),
        (MSAMPRecipeKwargs(), "msamp:O2"),
        (MSAMPRecipeKwargs("o1"), "msamp:O1"),
        (MSAMPRecipeKwargs(opt_level="O0"), "msamp:O0"),
        (NativeRecipeKwargs(), "native:dynamic"),
        (NativeRecipeKwargs(scaling="DELAYED"), "native:delayed"),
        (FP8RecipeKwargs(backend="te+msamp:O2"), "te:delayed+msamp:O2"),
        (FP8RecipeKwargs("native", opt_level="O3"), "msamp:O3"),
        (FP8RecipeKwargs(backend="msamp", opt_level="O1"), "msamp:O1"),
        (FP8RecipeKwargs(backend="native", scaling="tensorwise"), "native:dynamic"),
        (FP8RecipeKwargs(backend="native:current", scaling="dynamic"), "native:dynamic"),
    ],
)
def test_recipe_object_has_its_name_and_resolves_to_itself(recipe, name):
    assert recipe.name == name
    assert resolve(recipe) == recipe and type(resolve(recipe)) is FP8RecipeKwargs
    assert isinstance(recipe, KwargsHandler) and isinstance(recipe, Recipe)


def test_defaults_match_accelerates_handlers():
    """A script changes only its import."""
    for recipe in (resolve("te"), resolve("native:delayed"), resolve("ao")):
        assert recipe.fp8_format == "HYBRID"
        assert (recipe.margin, recipe.interval) == (0, 1)
        assert recipe.amax_history_len == 1024
        assert recipe.amax_compute_algo == "max"  # TransformerEngine's; Accelerate's is most_recent
        assert recipe.override_linear_precision == (False, False, False)
        assert recipe.use_autocast_during_eval is False
        assert recipe.config is recipe.pad_inner_dim is recipe.enable_fsdp_float8_all_gather is None
        assert (recipe.autocast_dtype, recipe.on_unproven, recipe.gradient_comm) == (
            "bf16",
            "raise",
            None,
        )
        assert recipe.include is recipe.exclude is recipe.module_filter_func is None
        assert recipe.level == "O0"
    assert resolve("te:mxfp8").fp8_format == resolve("te:blockwise").fp8_format == "E4M3"


def test_given_lists_fields_set_by_user():
    assert resolve("native").given == {"backend"}
    assert resolve("native:delayed").given == {"backend", "scaling"}
    assert TERecipeKwargs(margin=0).given == {"margin"}
    assert NativeRecipeKwargs(margin=None).given == frozenset()


def test_equality_ignores_spelling():
    assert (
        resolve("native:current")
        == NativeRecipeKwargs()
        == FP8RecipeKwargs(backend="native", margin=None)
    )
    assert hash(resolve("native:current")) == hash(NativeRecipeKwargs())
    assert NativeRecipeKwargs(scaling="delayed", margin=0) == resolve("native:delayed")
    assert NativeRecipeKwargs(scaling="delayed", margin=1) != resolve("native:delayed")
    assert resolve("msamp:O2") == MSAMPRecipeKwargs(opt_level="O2")
    assert resolve("native") != "native"


RECIPES = [
    TERecipeKwargs(margin=1, amax_compute_algo="MAX"),
    AORecipeKwargs(scaling="rowwise", pad_inner_dim=False, module_filter_func=only_keep_this),
    MSAMPRecipeKwargs(opt_level="O1"),
    NativeRecipeKwargs(scaling="delayed", amax_history_len=16, exclude=["head", "*.gate"]),
    FP8RecipeKwargs(backend="native:rowwise", fp8_format="e4m3"),
    FP8RecipeKwargs(backend="te+msamp", margin=3),
    FP8RecipeKwargs(on_unproven="warn"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_survives_pickle_deepcopy_and_to_kwargs(recipe):
    for other in (
        pickle.loads(pickle.dumps(recipe)),
        copy.deepcopy(recipe),
        copy.copy(recipe),
        type(recipe)(**recipe.to_kwargs()),
    ):
        assert other == recipe and type(other) is type(recipe)
        assert other.given == recipe.given and repr(other) == repr(recipe)
    assert type(recipe)().to_kwargs() == {}


def test_to_kwargs_keeps_explicit_defaults():
    """Accelerate's drops them."""
    assert TERecipeKwargs(amax_compute_algo="max").to_kwargs() == {"amax_compute_algo": "max"}


def test_either_form_of_products_is_replaced_alone():
    recipe = NativeRecipeKwargs(products={"dgrad": "bf16"})
    other = recipe.replace(products={"wgrad": "bf16"})
    assert other.override_linear_precision == (False, False, True)
    assert other.to_kwargs() == {"products": {"wgrad": "bf16"}}


def test_repr_shows_backend_and_given_fields():
    assert repr(resolve("msamp:o1")) == "FP8RecipeKwargs(msamp:O1)"
    assert repr(TERecipeKwargs(margin=2)) == "TERecipeKwargs(te:delayed, margin=2)"
    assert repr(FP8RecipeKwargs()) == "FP8RecipeKwargs(auto)"


def test_recipe_is_immutable():
    recipe = NativeRecipeKwargs()
    with pytest.raises(RecipeError, match=r"margin: a recipe is fixed.*NativeRecipeKwargs\("):
        recipe.margin = 3
    assert recipe == NativeRecipeKwargs()


# A value given is a value used


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: TERecipeKwargs(amax_history=16),
            ["amax_history is not a field", "did you mean 'amax_history_len'"],
        ),
        (
            lambda: TERecipeKwargs(pad_inner_dim=True),
            ["of AORecipeKwargs", "FP8RecipeKwargs(backend="],
        ),
        (lambda: TERecipeKwargs(opt_level="O2"), ["of MSAMPRecipeKwargs"]),
        (lambda: AORecipeKwargs(margin=1), ["of TERecipeKwargs and NativeRecipeKwargs"]),
        (lambda: MSAMPRecipeKwargs(optimization_level="O2"), ["did you mean 'opt_level'"]),
        (lambda: FP8RecipeKwargs(kwarg_handlers=[]), ["not a field of FP8RecipeKwargs"]),
        (lambda: resolve({"backend": "te", "amax_len": 3}), ["amax_len is not a field"]),
        (lambda: resolve({"backnd": "te"}), ["did you mean 'backend'"]),
        (lambda: resolve({"backend": 3}), ["backend=3"]),
        (
            lambda: FP8RecipeKwargs(backend="ao", margin=1),
            ["margin is not read by ao:tensorwise", "native:delayed"],
        ),
        (
            lambda: FP8RecipeKwargs(backend="ao", fp8_format="E4M3"),
            ["fp8_format is not read by ao:tensorwise"],
        ),
        (
            lambda: FP8RecipeKwargs(backend="native", pad_inner_dim=True),
            ["pad_inner_dim is not read by", "by ao"],
        ),
        (
            lambda: FP8RecipeKwargs(backend="ao:rowwise", enable_fsdp_float8_all_gather=True),
            ["enable_fsdp_float8_all_gather is not read by ao:rowwise", "ao:tensorwise"],
        ),
        (
            lambda: NativeRecipeKwargs(margin=1),
            ["margin is not read by native:dynamic", "native:delayed"],
        ),
        (
            lambda: NativeRecipeKwargs(scaling="rowwise", interval=2),
            ["interval is not read by native:rowwise"],
        ),
        (
            lambda: TERecipeKwargs(scaling="dynamic", amax_history_len=4),
            ["amax_history_len is not read by te:dynamic"],
        ),
        (
            lambda: FP8RecipeKwargs(backend="msamp", amax_compute_algo="max"),
            ["not read by msamp:O2"],
        ),
        (lambda: TERecipeKwargs(interval=2), ["interval=2", "since version 2.4", "native:delayed"]),
        (
            lambda: TERecipeKwargs(override_linear_precision=(True, False, False)),
            ["since version 2.1"],
        ),
    ],
)
def test_unread_field_is_refused_by_name(make, said):
    with pytest.raises(RecipeError) as caught:
        make()
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: FP8RecipeKwargs(backend="native:dynamic", scaling="delayed"),
            "says dynamic and scaling says delayed",
        ),
        (
            lambda: FP8RecipeKwargs(backend="msamp:O1", opt_level="O2"),
            "says O1 and opt_level says O2",
        ),
        (
            lambda: FP8RecipeKwargs(backend="te:dynamic", use_mxfp8_block_scaling=True),
            "use_mxfp8_block_scaling",
        ),
        (lambda: FP8RecipeKwargs(backend="te:mxfp8", use_mxfp8_block_scaling=False), "disagree"),
        (
            lambda: FP8RecipeKwargs(backend="ao", use_mxfp8_block_scaling=True),
            "ao has no scaling 'mxfp8'",
        ),
        (lambda: FP8RecipeKwargs(backend="ao", opt_level="O2"), "ao goes with O0 only"),
        (
            lambda: FP8RecipeKwargs(backend="msamp", opt_level="--1"),
            "opt_level=.--1.: unknown level",
        ),
    ],
)
def test_string_contradicting_a_field_is_an_error(make, said):
    with pytest.raises(RecipeError, match=said):
        make()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("margin", 1.5, "whole number"),
        ("margin", True, "whole number"),
        ("margin", "two", "whole number"),
        ("margin", "--1", "margin='--1': margin must be a whole number from -64 to 64"),
        ("margin", "9" * 5000, "whole number"),
        ("margin", 65, "from -64 to 64"),
        ("amax_history_len", 0, "from 1 to 1000000"),
        ("amax_history_len", 10**20, "from 1 to 1000000"),
        ("interval", 0, "from 1 to 1000000"),
        ("interval", -1, "from 1 to 1000000"),
        ("scaling", "--1", "scaling='--1': native has no scaling"),
        ("amax_compute_algo", "mean", "one of max, most_recent"),
        ("amax_compute_algo", max, "one of max, most_recent"),
        ("fp8_format", "E5M2", "no GPU"),
        ("fp8_format", "e5m2", "no GPU"),
        ("fp8_format", "E3M4", "one of HYBRID, E4M3"),
        ("fp8_format", 8, "one of HYBRID, E4M3"),
        ("override_linear_precision", (True, False), "three bools"),
        ("override_linear_precision", "(no, idea, really)", "three bools"),
        ("override_linear_precision", True, "three bools"),
        ("override_linear_precision", (True, True, True), "leave one product in FP8"),
        ("use_autocast_during_eval", "perhaps", "True or False"),
        ("scaling", 3, "name of a scaling rule"),
        ("autocast_dtype", "fp8", "one of bf16, fp16, fp32"),
        ("include", 3, "name patterns"),
        ("include", "", "name patterns"),
        ("include", "+lm_head,up", "+ before each pattern, which adds"),
        ("include", "+", "+ before each pattern, which adds"),
        ("exclude", [], "name patterns"),
        ("exclude", ["a", 1], "name patterns"),
        ("module_filter_func", "lm_head", "function of (module, name)"),
        ("gradient_comm", "fp16", "one of fp8, plain"),
        ("gradient_comm", "bf16", "one of fp8, plain"),
        ("on_unproven", "ignore", "one of raise, warn"),
    ],
)
def test_wrong_type_or_range_is_refused_at_construction(field, value, said):
    values = {"scaling": "delayed"} | {field: value}
    with pytest.raises(RecipeError) as caught:
        NativeRecipeKwargs(**values)
    assert said in str(caught.value) and f"{field}={shown(value)}" in str(caught.value)


@pytest.mark.parametrize("value", ["--1", None])
def test_error_of_builtin_parser_names_the_field(value):
    with pytest.raises(
        RecipeError, match=rf"^headroom={value!r}: headroom must be another value \("
    ):
        Field("headroom", 0, int, "A field of a backend of one's own.").parsed(value)


@pytest.mark.parametrize(
    "value", ["(false, false, true)", "False,False,True", [False, False, True], ("no", 0 == 1, "1")]
)
def test_override_linear_precision_accepts_documented_forms(value):
    assert NativeRecipeKwargs(override_linear_precision=value).override_linear_precision == (
        False,
        False,
        True,
    )


def test_values_ignore_case():
    recipe = NativeRecipeKwargs(
        scaling="Delayed", fp8_format="e4m3", amax_compute_algo="MAX", autocast_dtype="FP16"
    )
    assert (recipe.fp8_format, recipe.amax_compute_algo, recipe.autocast_dtype) == (
        "E4M3",
        "max",
        "fp16",
    )


def test_include_and_exclude_take_one_pattern_or_several():
    assert NativeRecipeKwargs(include="*.mlp.*").include == ("*.mlp.*",)
    assert NativeRecipeKwargs(include="q_proj, k_proj", exclude=("head",)).include == (
        "q_proj",
        "k_proj",
    )


def test_include_conflicts_with_filter_function():
    assert NativeRecipeKwargs(include="+lm_head, +gate").include == ("+lm_head", "+gate")
    with pytest.raises(
        RecipeError,
        match="adds to the layers that are converted by default.*leave one of the two out",
    ):
        FP8RecipeKwargs(include="+lm_head", module_filter_func=callable)


def test_ao_takes_a_config_and_names_its_scaling():
    from torchao.float8 import Float8LinearConfig

    rowwise = Float8LinearConfig.from_recipe_name("rowwise")
    recipe = AORecipeKwargs(rowwise)
    assert recipe.name == "ao:rowwise" and recipe.config is rowwise
    assert copy.deepcopy(recipe) == pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(RecipeError, match="disagree"):
        AORecipeKwargs(config=rowwise, scaling="tensorwise")
    with pytest.raises(RecipeError, match="disagree"):
        AORecipeKwargs(config=rowwise, pad_inner_dim=True)
    with pytest.raises(RecipeError, match="must be a torchao.float8.Float8LinearConfig"):
        AORecipeKwargs(config={"pad_inner_dim": True})


# Accelerate's own handlers


def stock_te(cls=accelerate.utils.TERecipeKwargs, **fields):
    """Return Accelerate's handler after `__init__`, which raises without TransformerEngine."""
    handler = object.__new__(cls)
    filled = {
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "override_linear_precision": (False, False, False),
        "use_mxfp8_block_scaling": False,
    }
    handler.__dict__.update(filled | fields)
    return handler


def test_accelerates_te_handler_is_equivalent():
    """Its default `most_recent`, which it fills in, counts as not given."""
    assert resolve(stock_te()) == TERecipeKwargs()
    assert resolve(stock_te(margin=2, amax_compute_algo="max")) == TERecipeKwargs(
        margin=2, amax_compute_algo="max"
    )
    assert resolve(stock_te(use_mxfp8_block_scaling=True)).name == "te:mxfp8"
    assert resolve(stock_te(use_mxfp8_block_scaling=True)).fp8_format == "E4M3"
    with pytest.raises(RecipeError, match="no GPU"):
        resolve(stock_te(fp8_format="E5M2"))
    with pytest.raises(RecipeError, match="interval=4"):
        resolve(stock_te(interval=4))


def test_constructed_te_handler_is_equivalent(monkeypatch):
    monkeypatch.setattr(
        "accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True
    )
    stock = accelerate.utils.TERecipeKwargs(fp8_format="e4m3", amax_history_len=16)
    assert resolve(stock) == TERecipeKwargs(fp8_format="E4M3", amax_history_len=16)


def test_accelerates_msamp_handler_is_equivalent():
    assert resolve(accelerate.utils.MSAMPRecipeKwargs()) == MSAMPRecipeKwargs()
    assert resolve(accelerate.utils.MSAMPRecipeKwargs(opt_level="O1")) == MSAMPRecipeKwargs(
        opt_level="O1"
    )


def test_accelerates_deprecated_fp8_handler_is_equivalent():
    """Its MS-AMP form needs no TransformerEngine here, and its level is O2 in place of stock's
    None."""
    stock = accelerate.utils.FP8RecipeKwargs
    assert resolve(stock_te(stock, backend="MSAMP", opt_level=None)).name == "msamp:O2"
    assert resolve(stock_te(stock, backend="MSAMP", opt_level="O1")).name == "msamp:O1"
    assert resolve(stock_te(stock, backend="TE", opt_level=None, margin=1)) == TERecipeKwargs(
        margin=1
    )
    with pytest.raises(RecipeError, match="margin is not read by msamp:O2"):
        resolve(stock_te(stock, backend="MSAMP", opt_level=None, margin=1))


def test_accelerates_ao_handler_is_equivalent():
    from torchao.float8 import Float8LinearConfig

    stock = accelerate.utils.AORecipeKwargs
    assert resolve(stock()) == AORecipeKwargs()
    assert "enable_fsdp_float8_all_gather" not in resolve(stock()).given
    assert resolve(stock(pad_inner_dim=False)) == AORecipeKwargs(pad_inner_dim=False)
    assert resolve(stock(module_filter_func=only_keep_this)) == AORecipeKwargs(
        module_filter_func=only_keep_this
    )
    config = Float8LinearConfig(pad_inner_dim=True)
    assert resolve(stock(config=config)) == AORecipeKwargs(config=config)


def test_a_subclass_of_accelerates_handler_is_accepted():
    class Mine(accelerate.utils.MSAMPRecipeKwargs):
        pass

    assert resolve(Mine(opt_level="O1")).level == "O1"


# The environment


def environment(**extra):
    return LAUNCHER_DEFAULTS | {f"ACCELERATE_FP8_{name}": value for name, value in extra.items()}


def test_environment_without_fp8_gives_no_recipe():
    assert from_environment({}) is None
    assert from_environment({"PATH": "/bin", "ACCELERATE_MIXED_PRECISION": "fp8"}) is None
    assert from_environment(LAUNCHER_DEFAULTS) is None
    assert from_environment(environment(BACKEND="NO")) is None


@pytest.mark.parametrize(
    "text", ["ao", "TE", "msamp", "native", "native:delayed", "ao:rowwise", "te+msamp:O1"]
)
def test_launcher_defaults_count_as_not_given(text):
    """The launcher exports every option whatever the backend: `ao` with MARGIN=0 is no error, `te`
    with O2 no level."""
    assert from_environment(environment(BACKEND=text)) == resolve(text)
    assert from_environment(environment(BACKEND=text)).given <= {"backend", "scaling", "level"}


def test_environment_is_read_in_any_case():
    recipe = from_environment(
        {"accelerate_fp8_backend": "NATIVE:Delayed", "Accelerate_FP8_Margin": "2"}
    )
    assert (recipe.name, recipe.margin) == ("native:delayed", 2)


def test_every_environment_value_reaches_its_field():
    recipe = from_environment(
        environment(
            BACKEND="native:delayed",
            MARGIN="1",
            INTERVAL="4",
            FORMAT="E4M3",
            AMAX_HISTORY_LEN="16",
            AMAX_COMPUTE_ALGO="max",
            OVERRIDE_WGRAD="True",
            USE_AUTOCAST_DURING_EVAL="true",
            EXCLUDE="head,*.gate",
            AUTOCAST_DTYPE="fp16",
            ON_UNPROVEN="warn",
        )
    )
    assert recipe == NativeRecipeKwargs(
        scaling="delayed",
        margin=1,
        interval=4,
        fp8_format="E4M3",
        amax_history_len=16,
        amax_compute_algo="max",
        override_linear_precision=(False, False, True),
        use_autocast_during_eval=True,
        exclude=["head", "*.gate"],
        autocast_dtype="fp16",
        on_unproven="warn",
    )
    assert from_environment(environment(BACKEND="ao", PAD_INNER_DIM="False")).pad_inner_dim is False
    assert (
        from_environment(environment(BACKEND="te", USE_MXFP8_BLOCK_SCALING="true")).name
        == "te:mxfp8"
    )
    assert from_environment(environment(BACKEND="msamp", OPT_LEVEL="O1")).level == "O1"
    assert from_environment(environment(BACKEND="msamp:O1")).level == "O1"


def test_file_written_by_accelerate_config_is_read():
    """Stock Accelerate never reads these three keys."""
    recipe = from_environment(
        environment(BACKEND="TE", AMAX_HISTORY_LENGTH="32", AMAX_COMPUTE_ALGORITHM="max")
    )
    assert (recipe.amax_history_len, recipe.amax_compute_algo) == (32, "max")
    assert from_environment(environment(BACKEND="MSAMP", OPTIMIZATION_LEVEL="O1")).level == "O1"


def test_documented_override_string_works_and_split_form_is_explained():
    text = "(false, false, true)"
    whole = from_environment(
        {"ACCELERATE_FP8_BACKEND": "native", "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION": text}
    )
    assert whole.override_linear_precision == (False, False, True)
    # stock `accelerate launch` makes this of the same string in YAML: its first three letters
    with pytest.raises(RecipeError, match=r"OVERRIDE_FPROP=\(.*write a list"):
        from_environment(
            environment(
                BACKEND="native", OVERRIDE_FPROP="(", OVERRIDE_DGRAD="f", OVERRIDE_WGRAD="a"
            )
        )


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"BACKEND": "ao", "MARGIN": "2"}, "margin is not read by ao:tensorwise"),
        ({"MARGIN": "2"}, "margin is not read by native:dynamic"),
        ({"BACKEND": "te", "OPT_LEVEL": "O1"}, "OPT_LEVEL=O1: O1 selects no level by itself"),
        ({"OPT_LEVEL": "O1"}, "OPT_LEVEL=O1: O1 selects no level by itself"),
        ({"BACKEND": "msamp:O2", "OPT_LEVEL": "O1"}, "says O2 and opt_level says O1"),
        ({"BACKEND": "te", "MARGIN": "many"}, "margin='many'"),
        ({"BACKEND": "te", "AMAX_HISTORY": "3"}, "ACCELERATE_FP8_AMAX_HISTORY is not known"),
        ({"BACKEND": "te", "AMAX_HISTORY_LEN": "8", "AMAX_HISTORY_LENGTH": "16"}, "disagrees"),
    ],
)
def test_invalid_environment_value_names_its_source(variables, said):
    with pytest.raises(RecipeError) as caught:
        resolve(from_environment(environment(**variables)))
    assert said in str(caught.value)
    if "BACKEND" in variables:
        assert "ACCELERATE_FP8_" in str(caught.value)


# Fields


@pytest.mark.parametrize("cls", [*HANDLERS, FP8RecipeKwargs])
def test_every_handler_field_is_documented_and_declared_once(cls):
    assert all(help_of(FIELDS[field.name]).endswith(".") for field in dataclasses.fields(cls))
    assert {field.name for field in dataclasses.fields(cls)} <= FIELDS.keys()
    assert len(FIELDS) <= 36


def test_defaults_of_scaling_rules_are_documented():
    assert FIELDS["fp8_format"].values_and_default == (
        "HYBRID, E4M3; default 'HYBRID'; 'E4M3' with rowwise, blockwise, mxfp8"
    )
