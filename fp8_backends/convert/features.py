"""Import an optional feature for a recipe with its field, and for no other:

if guard := features.wanted("guard", recipe):
    guard.after_backward(accelerator, loss)
"""

import importlib
import sys
from types import ModuleType

from ..recipes.fields import SETTINGS
from ..recipes.handlers import Recipe

MODULES = {
    "fused_head": "fp8_backends.convert.fused_head",
    "small_layers": "fp8_backends.convert.small_layers",
    "saved_activations": "fp8_backends.convert.saved_activations",
    "schedule": "fp8_backends.watch.schedule",
    "guard": "fp8_backends.watch.guard",
    "offload": "fp8_backends.states.offload",
    "monitor_every": "fp8_backends.watch.monitor",
}
"""Recipe field -> the module that only its users import and run."""


def wanted(field: str, recipe: Recipe) -> ModuleType | None:
    """Return the module of a feature if the recipe sets its field."""
    if getattr(recipe, field) == SETTINGS[field].default:
        return None
    return importlib.import_module(MODULES[field])


def loaded(field: str) -> ModuleType | None:
    """Return the module of a feature if this process has used it: objects may have its hooks."""
    return sys.modules.get(MODULES[field])
