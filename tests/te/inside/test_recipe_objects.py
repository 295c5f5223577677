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


@pytest.mark.parametrize(
    "name", ["fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"]
)
def test_custom_quantization_of_recipe_object_is_refused(name):
    spec = te_recipes.Float8CurrentScaling()
    setattr(spec, name, te_recipes.QParams(amax_epsilon=1e-3))
    with pytest.raises(RecipeError, match=name):
        resolve(spec)


def test_recipes_of_other_formats_are_refused():
    for spec in (te_recipes.NVFP4BlockScaling(), te_recipes.CustomRecipe(qfactory=len)):
        with pytest.raises(RecipeError, match=f"{type(spec).__name__} is no FP8 recipe"):
            resolve(spec)
