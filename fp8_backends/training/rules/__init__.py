"""What is known to go wrong or slow, as rows of data, one module a theme; `validators` is the loop over them."""

from collections.abc import Iterable

from ...errors import RecipeError
from .chips import CHIP_RULES, TE_RULES
from .choices import COMPILATION_RULES, OPTIMIZER_RULES, RECIPE_RULES, RELEASE_RULES
from .engines import ENGINE_RULES, TENSOR_PARALLEL_RULES
from .models import MODEL_RULES
from .setup import Compiled, Machine, Parallel, Rule, Setup, Severity

THEMES = {
    "Chips and libraries": CHIP_RULES,
    "TransformerEngine": TE_RULES,
    "Engines and ranks": ENGINE_RULES,
    "torch.compile, checkpointing, attention": COMPILATION_RULES,
    "Models and sizes": MODEL_RULES,
    "Optimizers": OPTIMIZER_RULES,
    "Recipes": RECIPE_RULES,
    "Gradient release": RELEASE_RULES,
}
RULES = {rule.name: rule for rules in THEMES.values() for rule in rules}

__all__ = [
    "RELEASE_RULES",
    "RULES",
    "TENSOR_PARALLEL_RULES",
    "THEMES",
    "Compiled",
    "Machine",
    "Parallel",
    "Rule",
    "Setup",
    "Severity",
    "error",
    "refuse",
]


def refuse(setup: Setup, rules: Iterable[Rule] = tuple(RULES.values())) -> None:
    """Raise `RecipeError` for the first of these rules that applies to this setup and is raised, and not only
    reported."""
    for rule in rules:
        if rule.applies(setup) and rule.is_raised(setup):
            raise error(rule.name, setup)


def error(name: str, setup: Setup) -> RecipeError:
    """The error that says a rule's reason, what of this setup made it apply, and the fix."""
    rule = RULES[name]
    return RecipeError(f"{setup.recipe.name}: {rule.reason_in(setup)}. Fix: {rule.fix}")
