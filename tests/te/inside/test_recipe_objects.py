"""TransformerEngine's real recipe classes as specs: every field of them is honoured or refused by
name."""

from __future__ import annotations

import dataclasses

import pytest
from transformer_engine.common import recipe as te_recipes

from fp8_backends import RecipeError, resolve

CLASSES = {
    te_recipes.DelayedScaling: "te:delayed",
    te_recipes.Float8CurrentScaling: "te:dynamic",
    te_recipes.Float8BlockScaling: "te:blockwise",
    te_recipes.MXFP8BlockScaling: "te:mxfp8",
}
ANOTHER = {
    "fp8_format": lambda default: (
        te_recipes.Format.E4M3 if default.name == "HYBRID" else te_recipes.Format.HYBRID
    ),
    "amax_compute_algo": lambda default: "most_recent",
    "scaling_factor_compute_algo": lambda default: len,
    "backward_override": lambda default: "high_precision",
}
"""A value other than the default, if it does not follow from the default's type."""


def another(field: dataclasses.Field):
    default = field.default
    if field.name in ANOTHER:
        return ANOTHER[field.name](default)
    if isinstance(default, te_recipes.MMParams):
        return te_recipes.MMParams(use_split_accumulator=not default.use_split_accumulator)
    return not default if isinstance(default, bool) else default + 1


@pytest.mark.parametrize(
    ("cls", "field"),
    [(cls, field) for cls in CLASSES for field in dataclasses.fields(cls)],
    ids=lambda value: value.name if isinstance(value, dataclasses.Field) else value.__name__,
)
def test_every_field_changes_the_recipe_or_is_refused_by_name(cls, field):
    spec = cls()
    setattr(spec, field.name, another(field))
    try:
        changed = resolve(spec)
    except RecipeError as error:
        assert field.name in str(error)
        return
    assert changed.name == CLASSES[cls] and changed != resolve(cls())


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_defaults_match_the_object(cls):
    recipe = resolve(cls())
    assert recipe.name == CLASSES[cls] and recipe.fp8_format == cls().fp8_format.name
    assert recipe == resolve(CLASSES[cls])


PARAMS = te_recipes.QParams(amax_epsilon=1e-3)


class OfTheUser(te_recipes.DelayedScaling):
    pass


def test_subclass_keeps_values_and_names_fields_that_its_class_lacks():
    spec = OfTheUser(margin=3, amax_history_len=4)
    recipe = resolve(spec)
    assert (recipe.name, recipe.margin, recipe.amax_history_len) == ("te:delayed", 3, 4)
    spec.mine = 1
    with pytest.raises(RecipeError, match=r"DelayedScaling.mine=1 .*: its class has no such field"):
        resolve(spec)


@pytest.mark.parametrize(
    ("cls", "field", "value", "said"),
    [
        ("DelayedScaling", "amax_compute_algo", len, "one of max, most_recent: with a function"),
        ("DelayedScaling", "scaling_factor_compute_algo", len, "=.* fused update"),
        ("DelayedScaling", "reduce_amax", False, "=False cannot be honoured: each rank .*leave it"),
        ("DelayedScaling", "fp8_dpa", True, "=True cannot be honoured.*DotProductAttention"),
        ("DelayedScaling", "fp8_format", te_recipes.Format.E5M2, "no GPU"),
        (
            "DelayedScaling",
            "backward_override",
            "dequantized",
            "override_linear_precision=.False, ",
        ),
        ("Float8CurrentScaling", "use_power_2_scales", True, "NVTE_FP8_CURRENT_SCALING_POWER_2"),
        ("Float8CurrentScaling", "fp8_quant_fwd_inp", PARAMS, "="),
        ("Float8CurrentScaling", "fp8_quant_fwd_weight", PARAMS, "="),
        ("Float8CurrentScaling", "fp8_quant_bwd_grad", PARAMS, "="),
        ("Float8BlockScaling", "x_block_scaling_dim", 2, "=2 .* has 1, and only that"),
        ("MXFP8BlockScaling", "margin", 2, "=2"),
    ],
)
def test_value_that_cannot_be_honoured_is_refused_by_name(cls, field, value, said):
    spec = getattr(te_recipes, cls)()
    object.__setattr__(spec, field, value)
    with pytest.raises(RecipeError, match=f"{field}.*{said}|{said}"):
        resolve(spec)


def test_default_of_the_class_changed_by_the_environment_is_refused(monkeypatch):
    """NVTE_BACKWARD_OVERRIDE changes the default of the class itself."""
    field = te_recipes.Float8CurrentScaling.__dataclass_fields__["backward_override"]
    monkeypatch.setattr(field, "default", "high_precision")
    spec = te_recipes.Float8CurrentScaling()
    spec.backward_override = "high_precision"
    with pytest.raises(RecipeError, match="backward_override='high_precision'"):
        resolve(spec)


def test_recipes_of_other_formats_are_refused():
    for spec in (te_recipes.NVFP4BlockScaling(), te_recipes.CustomRecipe(qfactory=len)):
        said = f"{type(spec).__name__} is no FP8 recipe.*native:mxfp8"
        with pytest.raises(RecipeError, match=said):
            resolve(spec)
