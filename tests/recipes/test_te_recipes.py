"""Test recipe fields of TransformerEngine only, and NeMo's names for the same fields. Its recipe
objects are in te/inside/test_recipe_objects.py."""

from __future__ import annotations

import pytest

from fp8_backends import (
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    RecipeError,
    TERecipeKwargs,
    resolve,
)
from fp8_backends.recipes.handlers import from_environment

# fp8_params, fp8_dpa, fp8_mha


def test_te_keeps_fp8_weights_only_on_request():
    assert resolve("te").fp8_params is False
    assert TERecipeKwargs(fp8_params="true").fp8_params is True
    assert resolve({"backend": "te:blockwise", "fp8_params": True}).name == "te:blockwise"
    assert TERecipeKwargs(fp8_params=True) != TERecipeKwargs()
    assert (
        from_environment(
            {"ACCELERATE_FP8_BACKEND": "te", "ACCELERATE_FP8_PARAMS": "yes"}
        ).fp8_params
        is True
    )
    assert resolve({"backend": "native:delayed", "fp8_params": False}) == resolve("native:delayed")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"backend": "ao", "fp8_params": True},
            "fp8_params is not read by ao:tensorwise, only by native, te",
        ),
        (
            {"backend": "msamp", "fp8_params": True},
            "only with weights that no level stores.*or use native$",
        ),
        (
            {"backend": "te+msamp:O2", "fp8_params": True},
            "only with weights that no level stores.*or use te$",
        ),
        ({"backend": "te", "fp8_params": "perhaps"}, "must be True or False"),
        (
            {"backend": "te", "rounding": "nearest"},
            r"only with a level O1 to O4.* use te\+msamp:O2",
        ),
        ({"backend": "te", "shard_states": True}, r"only with a level O1 to O4.* use te\+msamp:O2"),
    ],
)
def test_fields_contradicting_the_backend_are_refused_with_fix(fields, said):
    with pytest.raises(RecipeError, match=said):
        resolve(fields)


@pytest.mark.parametrize("name", ["fp8_dpa", "fp8_mha"])
def test_fp8_attention_is_refused_with_reason_and_fix(name):
    for backend in ("te", "native:delayed", "ao", "msamp"):
        assert resolve({"backend": backend, name: False}) == resolve(backend)
        with pytest.raises(
            RecipeError,
            match=rf"{name}=True cannot be honoured: .*Linear layers.*DotProductAttention",
        ):
            resolve({"backend": backend, name: True})
    with pytest.raises(RecipeError, match="DotProductAttention"):
        TERecipeKwargs(**{name: True})


# NeMo's and Megatron's names


def test_nemos_names_map_one_to_one():
    nemo = {
        "fp8": "hybrid",
        "fp8_margin": 2,
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "max",
        "fp8_params": True,
    }
    ours = TERecipeKwargs(
        fp8_format="HYBRID", margin=2, amax_history_len=16, amax_compute_algo="max", fp8_params=True
    )
    assert resolve(nemo) == resolve({"backend": "te", **nemo}) == TERecipeKwargs(**nemo) == ours
    assert resolve({"fp8": "e4m3"}) == TERecipeKwargs(fp8_format="E4M3")
    twin = resolve({**nemo, "backend": "native:delayed", "fp8_params": False})
    assert (twin.name, twin.margin, twin.amax_history_len) == ("native:delayed", 2, 16)
    assert NativeRecipeKwargs(scaling="delayed", fp8_margin=3).margin == 3
    assert FP8RecipeKwargs("native:delayed", fp8_margin=3).name == "native:delayed"


def test_megatrons_additional_names_map_one_to_one():
    assert resolve({"fp8": "e4m3", "fp8_recipe": "tensorwise"}).name == "te:dynamic"
    assert (
        resolve({"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True}).fp8_params
        is True
    )
    assert resolve({"fp8": "hybrid", "fp8_wgrad": False}).override_linear_precision == (
        False,
        False,
        True,
    )
    assert resolve({"fp8": "hybrid", "fp8_wgrad": True}) == TERecipeKwargs()
    assert resolve({"fp8": "hybrid", "fp8_margin": None}).given == {"backend", "fp8_format"}
    assert (
        resolve({"fp8": "hybrid", "fp8_dot_product_attention": False, "fp8_interval": 1})
        == TERecipeKwargs()
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fp8": None, "fp8_margin": 1}, "fp8=None turns FP8 off in NeMo: train in bf16"),
        ({"fp8": False}, "fp8=False turns FP8 off"),
        ({"fp8": "e5m2"}, "fp8='e5m2': fp8_format='e5m2'.*no GPU"),
        (
            {"fp8": "hybrid", "fp8_amax_compute_algo": "mean"},
            "fp8_amax_compute_algo='mean': amax_compute_algo='mean'",
        ),
        ({"fp8_margin": 1, "margin": 2}, "fp8_margin=1 disagrees with margin=2"),
        ({"fp8": "hybrid", "fp8_interval": 4}, "interval=4"),
        (
            {"fp8": "hybrid", "fp8_wgrad": "perhaps"},
            "fp8_wgrad='perhaps': fp8_wgrad must be True or False",
        ),
        (
            {"fp8": "hybrid", "fp8_multi_head_attention": True},
            "fp8_multi_head_attention=True.*Linear layers",
        ),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, "te has no scaling 'custom'"),
        ({"fp8": "hybrid", "fp8_wgrat": True}, "fp8_wgrat is not a field"),
    ],
)
def test_unsupported_nemo_value_is_refused_by_nemos_name(fields, said):
    with pytest.raises(RecipeError, match=said):
        resolve(fields)


DELAYED_AS_NEMO = {
    "backend": "te:delayed",
    "fp8_format": "HYBRID",
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # as on Megatron's command line, and as its configuration has them
        ({"--fp8-format": "hybrid", "--fp8-margin": 2}, {"backend": "te", "margin": 2}),
        ({"--fp8-format": "e4m3"}, {"backend": "te", "fp8_format": "E4M3"}),
        ({"fp8-recipe": "mxfp8"}, {"backend": "te:mxfp8"}),
        (
            {"fp8": "hybrid", "no-fp8-wgrad": True},
            {"backend": "te", "override_linear_precision": (False, False, True)},
        ),
        (
            {"fp8": "hybrid", "tp_only_amax_red": False, "fp8_quantizer_factory": None},
            {"backend": "te"},
        ),
        (
            {"fp8": "hybrid", "first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 1},
            {"backend": "te"},
        ),
        ({"fp8": "hybrid", "fp8_param": True}, {"backend": "te", "fp8_params": True}),
        (
            {"fp8": "hybrid", "first_last_layers_bf16": True},
            {"backend": "te", "layers": {"first": 1, "last": 1}},
        ),
        (
            {"fp8": "hybrid", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0},
            {"backend": "te", "layers": "last=1"},
        ),
        # precision plug-ins
        (
            {"precision": "bf16_with_fp8_current_scaling_mixed"},
            {"backend": "te:dynamic", "fp8_format": "HYBRID", "layers": {"first": 1, "last": 1}},
        ),
        ({"precision": "bf16_with_fp8_mixed"}, DELAYED_AS_NEMO),
        ({"backend": "bf16-with-fp8-mixed"}, DELAYED_AS_NEMO),
        (
            {"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed", "fp8_margin": 1},
            {**DELAYED_AS_NEMO, "margin": 1},
        ),
        (
            {"precision": "bf16_with_fp8_mixed", "fp8_amax_history_len": 4},
            {**DELAYED_AS_NEMO, "amax_history_len": 4},
        ),
        ({"precision": "fp16_with_fp8_mixed"}, {**DELAYED_AS_NEMO, "autocast_dtype": "fp16"}),
        ({"precision": "bf16_with_mxfp8_mixed"}, {"backend": "te:mxfp8"}),
        (
            {"precision": "bf16_with_fp8_subchannel_scaling_mixed"},
            {"backend": "te:blockwise", "fp8_format": "HYBRID"},
        ),
    ],
)
def test_megatrons_spellings_and_precision_plugins(theirs, ours):
    assert resolve(theirs) == resolve(ours)


def test_plugin_accepts_backend_string():
    assert resolve("bf16_with_fp8_mixed") == resolve(DELAYED_AS_NEMO)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"fp8": "hybrid", "first_last_layers_bf16": True, "layers": {"a": "bf16"}},
            "both name layers",
        ),
        (
            {"fp8": "hybrid", "num_layers_at_end_in_bf16": 2},
            "only with first_last_layers_bf16=True",
        ),
        ({"fp8": "hybrid", "tp_only_amax_red": True}, "tp_only_amax_red=True.*all ranks share"),
        (
            {"fp8": "hybrid", "fp8_quantizer_factory": "mine.make"},
            "fp8_quantizer_factory='mine.make'.*register",
        ),
        (
            {"fp8": "hybrid", "reuse_grad_buf_for_mxfp8_param_ag": True},
            "reuse_grad_buf_for_mxfp8_param_ag=True",
        ),
        (
            {"fp8": "hybrid", "fp4": "nvfp4"},
            "fp4='nvfp4' cannot be honoured: this package trains in 8 bits.*native:mxfp8",
        ),
        ({"precision": "bf16_with_fp8_mixt"}, "did you mean 'bf16_with_fp8_mixed'"),
        ({"precision": "bf16_mixed"}, "precision='bf16_mixed' is no FP8 precision"),
        ({"precision": "bf16_with_fp8_mixed", "mixed_precision": "x"}, "name a precision both"),
        ({"precision": "bf16_with_fp8_mixed", "backend": "te:dynamic"}, "delayed"),
        ({"--fp8-margn": 1}, "fp8_margn is not a field"),
        (
            {"fp8": "hybrid", "no_fp8_wgrad": True, "fp8_wgrad": True},
            "fp8_wgrad=True disagrees with no_fp8_wgrad=True",
        ),
    ],
)
def test_unsupported_megatron_arguments_are_refused_by_name(fields, said):
    with pytest.raises(RecipeError, match=said):
        resolve(fields)


def test_levels_refuse_te_names():
    with pytest.raises(RecipeError, match="margin is not a field of MSAMPRecipeKwargs"):
        MSAMPRecipeKwargs(fp8_margin=1)
