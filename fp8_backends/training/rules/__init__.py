"""What is known to go wrong or slow, as rows of data, one module a theme; `validators` is the loop over them."""

from .chips import CHIP_RULES
from .compilation import COMPILATION_RULES
from .engines import ENGINE_RULES
from .models import MODEL_RULES
from .optimizers import OPTIMIZER_RULES
from .recipes import RECIPE_RULES
from .setup import Compiled, Parallel, Rule, Setup, Severity
from .transformer_engine import TE_RULES

THEMES = {
    "Chips and libraries": CHIP_RULES,
    "TransformerEngine": TE_RULES,
    "Engines and ranks": ENGINE_RULES,
    "torch.compile, checkpointing, attention": COMPILATION_RULES,
    "Models and sizes": MODEL_RULES,
    "Optimizers": OPTIMIZER_RULES,
    "Recipes": RECIPE_RULES,
}
RULES = tuple(rule for rules in THEMES.values() for rule in rules)

__all__ = ["RULES", "THEMES", "Compiled", "Parallel", "Rule", "Setup", "Severity"]
