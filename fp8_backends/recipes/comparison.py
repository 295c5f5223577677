"""How two recipes differ, one of which may have been saved with a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .fields import SETTINGS
from .handlers import Recipe

_ONLY_WATCH = {name for name, field in SETTINGS.items() if field.only_watches}


def as_json(recipe: Recipe) -> dict[str, Any]:
    """Every field of a recipe as JSON gives it back. A function or another object is a text, the same in every
    process."""
    return json.loads(json.dumps(recipe.to_dict(), default=lambda value: re.sub(r" at 0x\w+", "", repr(value))))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each field that both descriptions have (`Recipe.to_dict`, or both from `as_json`), with other values: name to
    both values. `name` is not among them, nor what only says how a training is watched."""
    return {
        name: (before[name], value)
        for name, value in after.items()
        if name != "name" and name not in _ONLY_WATCH and name in before and before[name] != value
    }
