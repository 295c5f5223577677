"""Known problems as rows of data, one module a theme; `validate` is the loop over them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..errors import RecipeError
from .chips import CHIP_RULES, TE_RULES
from .engines import (
    COMPILATION_RULES,
    ENGINE_RULES,
    OPTIMIZER_RULES,
    RELEASE_RULES,
    TENSOR_PARALLEL_RULES,
)
from .models import MODEL_RULES
from .setup import Compiled, Machine, Parallel, Rule, Setup, Severity

THEMES = {
    "Chips and libraries": CHIP_RULES,
    "TransformerEngine": TE_RULES,
    "Engines and ranks": ENGINE_RULES,
    "torch.compile, checkpointing, attention": COMPILATION_RULES,
    "Models and sizes": MODEL_RULES,
    "Optimizers": OPTIMIZER_RULES,
    "Gradient release": RELEASE_RULES,
}
BY_NAME = {rule.name: rule for rules in THEMES.values() for rule in rules}

__all__ = ["TENSOR_PARALLEL_RULES", "Compiled", "Machine", "Parallel", "Rule", "Setup", "Severity"]


def refuse(setup: Setup, rules: Iterable[Rule] = tuple(BY_NAME.values())) -> None:
    """Raise `RecipeError` for the first applying rule that is not only reported."""
    for rule, each in applying(setup, rules):
        if rule.is_raised(each):
            raise refusal(rule.name, each)


def applying(
    setup: Setup, rules: Iterable[Rule] = tuple(BY_NAME.values())
) -> Iterator[tuple[Rule, Setup]]:
    """Yield each rule that applies, with the setup, or the same with another recipe of `layers`."""
    others = [
        replace(setup, recipe=recipe, linear_sizes=(), expected=None)
        for recipe in setup.recipe.recipes[1:]
    ]
    for rule in rules:
        if (each := next(filter(rule.applies, (setup, *others)), None)) is not None:
            yield rule, each


def refusal(name: str, setup: Setup) -> RecipeError:
    """Return the error of a rule: its reason with the detail of this setup, and the fix."""
    rule = BY_NAME[name]
    return RecipeError(f"{setup.recipe.name}: {rule.reason_in(setup)}. Fix: {rule.fix}")
