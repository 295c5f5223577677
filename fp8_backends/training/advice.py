"""The mildest change of a recipe that halves its error, found by trying: `fp8_backends.advise`.

Trials go from mild to strong: single layers stay in high precision, then another scaling rule, then both. Which layers
is a search by halves: the error of a group is measured with that group alone in FP8, and the group that errs most is
looked at more closely, for as long as so few layers could still explain the error.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..compute import registry
from ..errors import BackendUnavailableError, FP8BackendError, RecipeError
from ..notebooks import as_html
from ..recipes.fields import NAMING
from ..recipes.handlers import Recipe, Spec, resolve
from ..recipes.strings import canonical_name
from ..words import finite, first_line, listed, share
from . import conversion
from .gradient_gap import GradientGap, LossFunction, Measurement, precision_around
from .validators import validate
from .weight_products import FP8

GIVEN = "as given"
"""The words for a trial that changes nothing."""
TARGET = 0.5
"""A change helps when its gap is at most so many times that of the recipe as given."""
GROUPS = 12
"""Layers are first grouped by their names where these make at most so many groups."""
BROKEN = 0.5
"""A gap beyond which gradients are more error than FP8's rounding makes: healthy models have a tenth."""
_FAILURES = (FP8BackendError, RuntimeError)
"""What keeps a trial from being measured: a recipe that is refused, or an operator that fails, such as for memory."""
SHOWN = 5
"""Layers of which a report says how much they err alone."""
TIGHTER = 0.7
"""A set of layers that was to explain enough and did not is searched for again with a target so many times as low."""


@dataclass(frozen=True)
class Trial:
    """One recipe that was tried."""

    change: str
    """What it changes of the recipe as given, in words."""
    recipe: Recipe
    flops_share: float
    """FLOPs of weight products in FP8, of all in these batches, 0 to 1."""
    kept: float
    """FLOPs in FP8, of those that the recipe as given has there."""
    measured: Measurement | None = None
    why_not: str | None = None
    """Why nothing was measured."""

    @property
    def gap(self) -> float:
        """Infinite where nothing was measured, or where a gradient was not finite."""
        return math.inf if self.measured is None else self.measured.gap


class Alone(NamedTuple):
    """Layers, and the gap with these layers alone in FP8."""

    names: tuple[str, ...]
    scaling: str
    gap: float

    def parts(self) -> list[tuple[str, ...]]:
        """Split these layers by names that differ in more than a number, where those are few; else in halves."""
        by_pattern: dict[str, list[str]] = {}
        for name in self.names:
            by_pattern.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
        if 1 < len(by_pattern) <= GROUPS:
            return [tuple(names) for names in by_pattern.values()]
        middle = len(self.names) // 2
        return [self.names[:middle], self.names[middle:]]


@dataclass
class Advice:
    """What was tried, and the mildest change that helps."""

    given: Trial
    chosen: Trial | None
    """The mildest change that halves the gap; None where none was found."""
    trials: list[Trial]
    """Every recipe that could be the answer, in the order in which it was tried, the recipe as given first."""
    alone: list[Alone]
    """What the search for layers followed."""
    around: str
    """What runs around FP8, "bf16" or "fp32"."""
    floor: Measurement
    """The same without any FP8."""
    not_counted: list[str]
    """Parameters whose gradient that precision alone turns too far (`gradient_gap.NOISE`)."""
    min_flops_share: float
    passes: int = 0
    """Forwards with their backwards that it took."""

    @property
    def recipe(self) -> Recipe:
        """The recipe to train with: as advised, or as given where nothing milder than doing without FP8 helps."""
        return (self.chosen or self.given).recipe

    @property
    def best(self) -> Trial:
        """The trial with the smallest gap of those that keep enough in FP8."""
        return min((each for each in self.trials if each.kept >= self.min_flops_share), key=lambda each: each.gap)

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        if self.chosen is not None:
            return (
                f"{self.chosen.change}: {self._ratio(self.chosen)} of the gap, with {share(self.chosen.kept)} of the "
                "FLOPs in FP8 kept there"
            )
        if self.floor.gap > TARGET * self.given.gap:
            return f"keep the recipe: more than half of the gap is {self.around}'s own, and stays without any FP8"
        keep = f"train in {self.around}" if self.given.gap > BROKEN else "keep the recipe"
        if self.best is self.given:
            return f"{keep}: none of the changes that were tried makes the gap smaller"
        return (
            f"{keep}: no change halves the gap with {share(self.min_flops_share)} of the FLOPs kept in FP8; the best "
            f"found is: {self.best.change} ({self._ratio(self.best)} of the gap)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; what is not finite as None."""
        return {
            "verdict": self.verdict,
            "advised": self.chosen is not None,
            "recipe": self.recipe.to_dict(),
            "around": self.around,
            "floor": finite(asdict(self.floor)),
            "not_counted": self.not_counted,
            "min_flops_share": self.min_flops_share,
            "passes": self.passes,
            "trials": [
                {
                    "change": each.change,
                    "backend": each.recipe.name,
                    "exclude": list(each.recipe.exclude or ()),
                    "flops_share": each.flops_share,
                    "kept": each.kept,
                    **(finite(asdict(each.measured)) if each.measured else {"why_not": each.why_not}),
                }
                for each in self.trials
            ],
            "alone": [{**each._asdict(), "gap": finite(each.gap)} for each in self.alone],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """The table of trials: headings, then a row for each."""
        rows = [("trial", "recipe", "FP8", "kept", "gap", "of given", "loss error")]
        rows.append((f"{self.around}, no FP8", "", "0 %", "0 %", *self._figures(self.floor)))
        for each in self.trials:
            figures = ("not run", "", "") if each.measured is None else self._figures(each.measured)
            rows.append((each.change, each.recipe.name, share(each.flops_share), share(each.kept), *figures))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, self.verdict, str(self.recipe), *self.further_lines()])

    def _repr_html_(self) -> str:
        return as_html("; ".join([self.verdict, *self.further_lines()]), self.rows())

    def further_lines(self) -> list[str]:
        """What else was measured, and why a trial was not."""
        lines = [f"{each.change}: not run, {each.why_not}" for each in self.trials if each.why_not]
        scaling = self.given.recipe.scaling
        singles = [each for each in self.alone if len(each.names) == 1 and each.scaling == scaling]
        worst = sorted(singles, key=lambda each: -each.gap)[:SHOWN]
        if worst:
            gaps = ", ".join(f"{each.names[0]} {each.gap:.3g}" for each in worst)
            lines.append(f"gap of one layer alone in FP8: {gaps}")
        if self.not_counted:
            lines.append(f"not counted, since {self.around} alone turns their gradients: {listed(self.not_counted)}")
        return lines

    def _ratio(self, trial: Trial) -> str:
        return f"{trial.gap / self.given.gap:.2f}" if 0 < self.given.gap < math.inf else f"{trial.gap:.3g}"

    def _figures(self, measured: Measurement) -> tuple[str, str, str]:
        ratio = measured.gap / self.given.gap if 0 < self.given.gap < math.inf else math.nan
        return f"{measured.gap:.4f}", "" if math.isnan(ratio) else f"{ratio:.2f}", f"{measured.loss_error:.2g}"


@torch.enable_grad()
def advise(
    model: nn.Module,
    batches: Iterable[Any],
    spec: Spec = None,
    *,
    loss: LossFunction | None = None,
    min_flops_share: float = 0.95,
    max_trials: int = 40,
    progress: Callable[[str], None] = lambda trial: None,
) -> Advice:
    """Find the mildest change of a recipe that halves its gap, by measuring on batches of your own.

    The gap is the relative error of the gradients against FP32 (`training.gradient_gap.GradientGap`). The model is only
    read: everything runs on copies, one at a time, with random numbers of their own. Hooks of the model run on the
    copies too.

    Args:
        model: any `nn.Module` on one device, prepared or not, with the weights that matter: those in mid-training.
        batches: about four batches as training has them. On fewer, the best of many trials may owe its gap to chance.
        spec: the recipe as given, what `resolve` takes; None: the one that the model is prepared with, else what this
            machine would choose.
        loss: a function (model, batch) -> scalar tensor; by default the `loss` that the model returns.
        min_flops_share: what an answer keeps at least, of the FLOPs that the recipe as given has in FP8.
        max_trials: recipes to measure at most; each takes a forward and a backward of every batch, and delayed scaling
            `gradient_gap.WARM_UP` more.
        progress: called with the words of each trial as it begins.

    Raises:
        RecipeError: the recipe cannot be honoured, or asks for FP16 around FP8.
        BackendUnavailableError: the backend cannot run on this machine.
        FP8BackendError: nothing can be measured of this model or these batches, as `GradientGap` says; or an argument
            is out of its range.
    """
    if not 0 < min_flops_share <= 1:
        raise FP8BackendError(f"min_flops_share={min_flops_share}: a share above 0 and up to 1 is wanted, such as 0.95")
    if max_trials < 1:
        raise FP8BackendError(f"max_trials={max_trials}: at least 1, the recipe as given")
    conversion.check_is_module(model)
    roots = conversion.prepared_roots(model)
    recipe = roots[0][2].recipe if spec is None and roots else resolve(spec)
    registry.check_available(recipe)
    progress("FP32")
    around = precision_around(recipe, next(model.parameters(), torch.empty(0)).device)
    return _Search(GradientGap(model, batches, around, loss), recipe, min_flops_share, max_trials, progress).advice()


# The search


class _Search:
    """Measures recipes, and remembers what it found."""

    def __init__(
        self,
        gap: GradientGap,
        recipe: Recipe,
        least: float,
        max_trials: int,
        progress: Callable[[str], None],
    ) -> None:
        self.gap, self.least, self.left, self.progress = gap, least, max_trials, progress
        work, prepared = gap.prepared(recipe)
        flops = gap.flops(work, prepared)
        if not flops.in_fp8:
            raise FP8BackendError(
                f"{recipe.name}: no product of a weight ran in FP8 in these batches: {prepared.report}"
            )
        self.given_flops = flops.in_fp8
        self.layers = {
            product.name: gap.work[product.name].flops if product.name in gap.work else product.flops
            for product in prepared.report.products
            if product.state == FP8 and product.name
        }
        self.given = self._measured(GIVEN, recipe, work, prepared)
        self.trials: list[Trial] = [self.given]
        self.alone: list[Alone] = []

    def advice(self) -> Advice:
        gap = self.gap
        chosen = self._chosen() if gap.floor.gap <= TARGET * self.given.gap else None
        found = (self.given, chosen, self.trials, self.alone, gap.around, gap.floor, gap.not_counted, self.least)
        return Advice(*found, passes=gap.passes)

    def _chosen(self) -> Trial | None:
        """The mildest change that helps: layers, then a scaling rule, then layers with the best of these rules."""
        if (found := self._without_layers(self.given)) is not None:
            return found
        scalings = []
        for trial in self._scalings():
            if self._helps(trial):
                return trial
            scalings.append(trial)
        best = min(scalings, key=lambda each: each.gap, default=self.given)
        return self._without_layers(best) if best.gap < self.given.gap else None

    def _helps(self, trial: Trial) -> bool:
        """Tell whether a trial halves the gap and keeps enough in FP8."""
        return trial.gap <= TARGET * self.given.gap and trial.kept >= self.least and trial.gap < math.inf

    # trials

    def _try(self, change: str, recipe: Recipe) -> Trial:
        """Measure a recipe that could be the answer. One that cannot run, or keeps too little in FP8, is only noted."""
        try:
            trial = self._measured(change, recipe, *self.gap.prepared(recipe))
        except _FAILURES as error:
            trial = Trial(change, recipe, 0.0, 0.0, why_not=first_line(error))
        self.trials.append(trial)
        return trial

    def _measured(self, change: str, recipe: Recipe, work: nn.Module, prepared: conversion.Prepared) -> Trial:
        flops = self.gap.flops(work, prepared)
        kept = flops.in_fp8 / self.given_flops
        if kept < self.least:
            return Trial(change, recipe, flops.in_fp8 / flops.needed, kept, why_not="it keeps too little in FP8")
        self.left -= 1
        self.progress(change)
        return Trial(change, recipe, flops.in_fp8 / flops.needed, kept, self.gap.of(work, prepared))

    def _scalings(self) -> Iterator[Trial]:
        """The other scaling rules of the backend that run here, as long as trials are left."""
        given = self.given.recipe
        known = {finding.rule for finding in validate(given)}
        for scaling in registry.scalings_of(given.compute):
            if scaling == given.scaling or not self.left:
                continue
            try:
                recipe = with_scaling(given, scaling)
                registry.check_available(recipe)
            except (RecipeError, BackendUnavailableError):
                continue
            new = [each for each in validate(recipe) if each.rule not in known]
            if not any(each.severity == "error" or each.rule == "emulated_here" for each in new):
                yield self._try(f"scaling {scaling}", recipe)

    # layers

    def _without_layers(self, base: Trial) -> Trial | None:
        """The fewest layers that must stay in high precision, under the scaling of `base`, for the gap to be halved.

        Squares of gaps add up, as those of independent errors do. So the gap that stays when some layers are left out
        is foretold from the gaps of the others alone, and where even the best choice of so few layers would leave too
        much, the search ends.
        """
        budget = (1 - self.least) * sum(self.layers.values())
        target = TARGET * self.given.gap
        if min(self.layers.values(), default=math.inf) > budget:
            return None
        groups, tried = [Alone(tuple(self.layers), base.recipe.scaling, base.gap)], []
        while self.left:
            wanted = self._most_erring(groups, budget, target)
            if wanted is None:
                return None
            coarse = [group for group in wanted if len(group.names) > 1]
            if coarse:
                groups.remove(coarse[0])
                groups += [self._alone(part, base.recipe) for part in coarse[0].parts()]
                continue
            names = [group.names[0] for group in wanted]
            if names == tried:  # what is foretold does not hold for this model
                return None
            tried = names
            scaling = "" if base is self.given else f"{base.change}, "
            trial = self._try(f"{scaling}{together(names)} kept out", without(base.recipe, names))
            if self._helps(trial):
                return trial
            target *= TIGHTER
        return None

    def _most_erring(self, groups: list[Alone], budget: float, target: float) -> list[Alone] | None:
        """The fewest groups without which the gap is foretold to be at most `target`, those that err most first. Of a
        group of several layers, its smallest may be all that errs. None where they would exceed the budget."""
        stays = self.gap.floor.gap**2 + sum(map(self._error, groups))
        wanted = []
        for group in sorted(groups, key=lambda group: -group.gap):
            if stays <= target**2:
                break
            size = min(self.layers[name] for name in group.names)
            if size <= budget:
                budget -= size
                stays -= self._error(group)
                wanted.append(group)
        return wanted if wanted and stays <= target**2 else None

    def _error(self, group: Alone) -> float:
        """The square of what a group errs by itself, above what no FP8 errs."""
        return max(0.0, min(group.gap, 1.0) ** 2 - self.gap.floor.gap**2)

    def _alone(self, names: tuple[str, ...], recipe: Recipe) -> Alone:
        """Measure these layers alone in FP8. The gap is 0 where the recipe has none of them there, where that cannot
        run, or where no trial is left."""
        found = Alone(names, recipe.scaling, 0.0)
        if self.left:
            try:
                alone = self.gap.prepared(without(recipe, sorted(self.layers.keys() - set(names))))
                self.left -= 1
                self.progress(f"{listed(names)} alone in FP8")
                found = found._replace(gap=self.gap.of(*alone).gap)
            except _FAILURES:
                return found
            self.alone.append(found)
        return found


# Recipes with a change


def without(recipe: Recipe, names: Sequence[str]) -> Recipe:
    """The recipe with these layers in high precision too."""
    return resolve({**_fields(recipe), "backend": recipe.name, "exclude": [*(recipe.exclude or ()), *names]})


def with_scaling(recipe: Recipe, scaling: str) -> Recipe:
    """The recipe with another scaling rule, without the fields that this rule does not read. Raises `RecipeError`."""
    names_level = recipe.level != "O0" or "level" in recipe.given
    kept = {"backend": canonical_name(recipe.compute, scaling, recipe.level if names_level else None)}
    changed = resolve(kept)
    for name, value in _fields(recipe).items():
        try:
            changed = resolve({**kept, name: value})
        except RecipeError:
            continue
        kept[name] = value
    return changed


def together(names: Sequence[str]) -> str:
    """Names of layers with what they begin with written once: `layers.1.attn.(q_proj, k_proj)`."""
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names).rpartition(".")[0]
    parts = ", ".join(name[len(common) :].lstrip(".") for name in names)
    return f"{common}.({parts})" if common else parts


def _fields(recipe: Recipe) -> dict[str, Any]:
    """The fields that were given beside those that make the backend's name."""
    return {name: value for name, value in recipe.to_kwargs().items() if name not in NAMING}
