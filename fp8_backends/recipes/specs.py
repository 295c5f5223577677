"""What may be given wherever a recipe is asked for, as a type: `resolve` understands all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias


class RecipeHandler(Protocol):
    """A recipe of this package or of Accelerate."""

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that were given."""


class TransformerEngineRecipe(Protocol):
    """A recipe object of TransformerEngine, such as `DelayedScaling`."""

    @property
    def fp8_format(self) -> Any:
        """Its `Format`."""


Spec: TypeAlias = str | Mapping[str, Any] | RecipeHandler | TransformerEngineRecipe | None
"""A backend string, a dictionary `{"backend": …, field: value}`, a recipe; None picks for this machine."""
