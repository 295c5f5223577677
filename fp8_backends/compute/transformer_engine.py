"""The `te` compute: NVIDIA's TransformerEngine. In this version its recipes are known and explained, not yet run.

`native:delayed` follows TransformerEngine's rule of delayed scaling on any device, with the same fields.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from torch import nn

from ..errors import BackendUnavailableError, RecipeError
from ..hardware import Availability
from . import TE_FIELDS, Compute

if TYPE_CHECKING:
    from ..recipes import Recipe


class TransformerEngineCompute(Compute):
    """`te.Linear`'s products, on the Parameters that the model already has."""

    name = "te"
    scalings = ("delayed", "dynamic", "blockwise", "mxfp8")
    default_scaling = "delayed"
    fields = TE_FIELDS

    def availability(self) -> Availability:
        if importlib.util.find_spec("transformer_engine") is None:
            return Availability(
                False,
                "TransformerEngine is not installed",
                "pip install fp8-backends[te] on an NVIDIA GPU of compute capability 8.9 or higher, "
                "or use native:delayed, which follows the same rule",
            )
        return Availability(
            False,
            "TransformerEngine is installed, but this version of fp8-backends does not run it yet",
            "use native:delayed, which follows the same rule",
        )

    def check(self, recipe: Recipe) -> None:
        """TransformerEngine accepts two fields of its older recipes and ignores them; here that is an error."""
        if recipe.interval != 1:
            raise RecipeError(
                f"interval={recipe.interval}: TransformerEngine reads it no more since version 2.4; "
                "leave it out, or use native:delayed, which honours it"
            )
        if any(recipe.override_linear_precision):
            raise RecipeError(
                f"override_linear_precision={recipe.override_linear_precision}: TransformerEngine reads it no more "
                "since version 2.1; leave it out, or use native:delayed, which honours it"
            )

    def build(self, linear: nn.Linear, recipe: Recipe, shared) -> nn.Module:
        availability = self.availability()
        raise BackendUnavailableError(f"{recipe.name}: {availability.reason}. Fix: {availability.fix}")

    def is_converted(self, module: nn.Module) -> bool:
        return False

    def engine(self, module: nn.Module) -> str:
        return "te"
