"""Which layers the user wants converted: `include`, `exclude` and `module_filter_func` of a recipe."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..errors import RecipeError
from .weight_products import Found

if TYPE_CHECKING:
    from ..recipes.handlers import Recipe


class Named(Protocol):
    """A layer under all its names in a model."""

    @property
    def names(self) -> tuple[str, ...]: ...


class LayerFilter:
    """The user's choice of layers. `exclude` wins over all; then a layer must be named in `include` and accepted by
    `module_filter_func`, where these are given. By default heads, routers and adapters are left out that no pattern of
    `include` with `+` names.

    Patterns are fnmatch patterns over a layer's full name (any of its names, if shared). One without a dot also
    matches a layer when it matches any one segment of the name.
    """

    def __init__(self, recipe: Recipe) -> None:
        patterns = recipe.include or ()
        self.include = [NamePattern(text) for text in patterns if not text.startswith("+")]
        self.added = [NamePattern(text[1:]) for text in patterns if text.startswith("+")]
        self.exclude = [NamePattern(text) for text in recipe.exclude or ()]
        self.accepts = recipe.module_filter_func

    def check(self, found: list[Found], norms: Sequence[Named]) -> None:
        """Raise `RecipeError` for a pattern that matches no weight of a model, or one of `include`
        that matches none that can be converted. `norms` are those that the backend would swap: `exclude` may name them
        too."""
        for pattern in (*self.include, *self.added):
            _check_pattern("include", pattern, found)
        for pattern in self.exclude:
            if not any(map(pattern.matches, norms)):
                _check_pattern("exclude", pattern, found)

    def exclusion(self, each: Found) -> str | None:
        """Why this layer is left out, or None."""
        product = each.product
        if reason := excluded(product, self.exclude):
            return reason
        if self.include and not _any_matches(self.include, product):
            return "not named in include"
        if self.accepts is not None and not self.accepts(each.module, product.name):
            return "left out by module_filter_func"
        chosen = self.include or self.accepts is not None
        return None if chosen or _any_matches(self.added, product) else each.default_exclusion


def excluded(layer: Named, exclude: list[NamePattern]) -> str | None:
    """Why a layer of any kind is left out by one of these patterns, or None."""
    excluding = next((pattern for pattern in exclude if pattern.matches(layer)), None)
    return None if excluding is None else f"left out by exclude={excluding.text!r}"


class NamePattern:
    """One pattern of `include` or `exclude`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._match = re.compile(fnmatch.translate(text)).match

    def matches(self, layer: Named) -> bool:
        segments = [] if "." in self.text else [segment for name in layer.names for segment in name.split(".")]
        return any(map(self._match, (*layer.names, *segments)))


def _any_matches(patterns: list[NamePattern], layer: Named) -> bool:
    return any(pattern.matches(layer) for pattern in patterns)


def _check_pattern(field_name: str, pattern: NamePattern, found: list[Found]) -> None:
    matched = [each for each in found if pattern.matches(each.product)]
    if not matched:
        names = [each.product.name for each in found]
        words = {*names, *(part for name in names for part in name.split("."))}
        near = difflib.get_close_matches(pattern.text, sorted(words), n=3) or names[:3]
        raise RecipeError(
            f"{field_name}: no weight of this model matches {pattern.text!r}; names are such as "
            f"{', '.join(map(repr, near))}. A pattern without a dot matches any one part of a name; "
            "'a.b.*' matches all inside a.b"
        )
    if field_name != "exclude" and all(each.obstacle for each in matched):
        first = matched[0]
        raise RecipeError(
            f"{field_name}: {pattern.text!r} matches only weights that cannot be converted, such as "
            f"{first.product.name}: {first.obstacle}"
        )
