"""Find the mildest change of a recipe that halves its gradient error: `fp8_backends.advise`
(docs/numerics.rst)."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import nn

from ..compute import hardware, registry
from ..convert import conversion
from ..convert.conversion import Prepared
from ..convert.weight_products import FP8
from ..errors import BackendUnavailableError, FP8BackendError, RecipeError
from ..evidence.proof import count_flops
from ..recipes.fields import KEPT_IN_BF16, ONE_SCALE, settings_of
from ..recipes.handlers import Recipe, Spec, resolve
from ..recipes.strings import canonical_name
from ..rules.validate import validate
from ..words import as_html, by_pattern, finite, first_line, in_columns, listed, share
from .gap import GradientGap, LossFunction, Measurement

TARGET = 0.5
"""Largest gap of a successful change, relative to the given recipe's."""
GROUPS = 12
"""Largest number of groups by layer names; more are bisected."""
BROKEN = 0.5
"""Gap beyond FP8's rounding: healthy models have a tenth."""
SHOWN = 5
_FAILURES = (FP8BackendError, RuntimeError)
"""Failures of one trial: a refused recipe, or an operator, such as for memory."""


@dataclass(frozen=True)
class Trial:
    change: str
    recipe: Recipe
    flops_share: float
    """FLOPs in FP8 relative to all weight products in these batches, 0 to 1."""
    kept: float
    """FLOPs in FP8 relative to the given recipe's."""
    measured: Measurement = Measurement(math.inf, math.inf)
    why_not: str | None = None

    @property
    def gap(self) -> float:
        return self.measured.gap


class Alone(NamedTuple):
    """The gap with only these layers in FP8."""

    names: tuple[str, ...]
    gap: float

    def parts(self) -> list[tuple[str, ...]]:
        """Split the layers by names without numbers if this gives few groups, otherwise in
        halves."""
        groups = by_pattern(self.names)
        if 1 < len(groups) <= GROUPS:
            return list(map(tuple, groups.values()))
        middle = len(self.names) // 2
        return [self.names[:middle], self.names[middle:]]


@dataclass
class Advice:
    """The trials, and the mildest change that halves the gap."""

    given: Trial
    chosen: Trial | None
    trials: list[Trial]
    """Every candidate in the order of trial, the given recipe first."""
    alone: list[Alone]
    around: str
    """Precision around FP8, "bf16" or "fp32"."""
    floor: Measurement
    """The measurement without FP8."""
    not_counted: list[str]
    min_flops_share: float
    passes: int = 0

    @property
    def recipe(self) -> Recipe:
        """The recipe to train with: as advised, or as given if no change helps."""
        return (self.chosen or self.given).recipe

    @property
    def best(self) -> Trial:
        """The trial with the smallest gap among those with enough FP8."""
        return min(
            (trial for trial in self.trials if trial.kept >= self.min_flops_share),
            key=lambda trial: trial.gap,
        )

    @property
    def verdict(self) -> str:
        if self.chosen is not None:
            return (
                f"{self.chosen.change}: {self._ratio(self.chosen)} of the gap, with "
                f"{share(self.chosen.kept)} of the FLOPs in FP8 kept there"
            )
        if self.floor.gap > TARGET * self.given.gap:
            return f"keep the recipe: more than half of the gap is {self.around}'s own, and stays without any FP8"
        keep = f"train in {self.around}" if self.given.gap > BROKEN else "keep the recipe"
        if self.best is self.given:
            return f"{keep}: none of the changes that were tried makes the gap smaller"
        return (
            f"{keep}: no change halves the gap with {share(self.min_flops_share)} of the FLOPs "
            f"kept in FP8; the best found is: {self.best.change} ({self._ratio(self.best)} of the "
            "gap)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, non-finite numbers as None."""
        return {
            "verdict": self.verdict,
            "advised": self.chosen is not None,
            "recipe": self.recipe.to_dict(),
            "around": self.around,
            "floor": finite(self.floor._asdict()),
            "not_counted": self.not_counted,
            "min_flops_share": self.min_flops_share,
            "passes": self.passes,
            "trials": [
                {
                    "change": trial.change,
                    "backend": trial.recipe.name,
                    "layers": dict(trial.recipe.layers or {}),
                    "flops_share": trial.flops_share,
                    "kept": trial.kept,
                    **(
                        {"why_not": trial.why_not}
                        if trial.why_not
                        else finite(trial.measured._asdict())
                    ),
                }
                for trial in self.trials
            ],
            "alone": [{**group._asdict(), "gap": finite(group.gap)} for group in self.alone],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `recipe` as a recipe file (docs/launching.rst), with the measurements as comments.

        Raises `FP8BackendError` for another ending than .yaml, a field with a Python object, and a
        path that cannot be written.
        """
        recipe = self.recipe
        path = check_recipe_path(path)
        if objects := [
            name for name in recipe.given_settings if settings_of(recipe.compute)[name].is_object
        ]:
            raise FP8BackendError(
                f"{path}: no file can hold the Python object of {objects[0]}: pass the recipe"
            )
        measured = self.chosen or self.given
        gaps = f"gap {measured.gap:.4f}; as given ({self.given.recipe.name}) {self.given.gap:.4f}; "
        gaps += f"{self.around} without FP8 {self.floor.gap:.4f}; {share(measured.flops_share)} of weight FLOPs in FP8"
        comments = [f"fp8-backends advise: {self.verdict}", gaps, *self.further_lines()]
        fields = {"backend": recipe.name, **recipe.given_settings}
        plain = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
        }
        text = "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(plain, sort_keys=False)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise FP8BackendError(f"{path} cannot be written: {error.strerror or error}") from None

    def rows(self) -> list[tuple[str, ...]]:
        rows = [("trial", "recipe", "FP8", "kept", "gap", "of given", "loss error")]
        rows.append((f"{self.around}, no FP8", "", "0 %", "0 %", *self._figures(self.floor)))
        for trial in self.trials:
            figures = ("not run", "", "") if trial.why_not else self._figures(trial.measured)
            rows.append(
                (
                    trial.change,
                    trial.recipe.name,
                    share(trial.flops_share),
                    share(trial.kept),
                    *figures,
                )
            )
        return rows

    def __str__(self) -> str:
        return "\n".join(
            [in_columns(self.rows()), self.verdict, str(self.recipe), *self.further_lines()]
        )

    def _repr_html_(self) -> str:
        return as_html("; ".join([self.verdict, *self.further_lines()]), self.rows())

    def further_lines(self) -> list[str]:
        """Return the worst single layers, and the reasons for missing measurements."""
        lines = [
            f"{trial.change}: not run, {trial.why_not}" for trial in self.trials if trial.why_not
        ]
        singles = sorted(
            (group for group in self.alone if len(group.names) == 1), key=lambda group: -group.gap
        )
        if singles:
            gaps = ", ".join(f"{group.names[0]} {group.gap:.3g}" for group in singles[:SHOWN])
            lines.append(f"gap of one layer alone in FP8: {gaps}")
        if self.not_counted:
            lines.append(
                f"not counted, since {self.around} alone turns their gradients: "
                f"{listed(self.not_counted)}"
            )
        return lines

    def _ratio(self, trial: Trial) -> str:
        if 0 < self.given.gap < math.inf:
            return f"{trial.gap / self.given.gap:.2f}"
        return f"{trial.gap:.3g}"

    def _figures(self, measured: Measurement) -> tuple[str, str, str]:
        ratio = measured.gap / self.given.gap if 0 < self.given.gap < math.inf else math.nan
        return (
            f"{measured.gap:.4f}",
            "" if math.isnan(ratio) else f"{ratio:.2f}",
            f"{measured.loss_error:.2g}",
        )


def check_recipe_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a recipe file to write. Raises `FP8BackendError` for another ending than
    .yaml."""
    if Path(path).suffix not in (".yaml", ".yml"):
        raise FP8BackendError(f"{path}: a recipe file with comments ends in .yaml")
    return Path(path)


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
    """Find the mildest change of a recipe that halves its gap, measured on your own batches.

    The gap is the relative error of the gradients against FP32 (`advice.gap.GradientGap`). The
    model is only read: everything runs on copies, one at a time, with random numbers of their own.
    Hooks of the model run on copies too.

    Args:
        model: any `nn.Module` on one device, prepared or not, best with weights from mid-training.
        batches: about four batches as in training. With fewer, the best of many trials may owe its
            gap to chance.
        spec: the given recipe, as for `resolve`; None: the prepared model's, otherwise this
            machine's choice.
        loss: a function (model, batch) -> scalar tensor; default: the `loss` returned by the model.
        min_flops_share: FLOPs in FP8 kept by an answer, relative to the given recipe's.
        max_trials: recipes to measure at most. Each takes a forward and a backward of every batch,
            and delayed scaling two more passes.
        progress: called with the description of each trial at its start.

    Raises:
        RecipeError: the recipe is invalid, or has FP16 around FP8.
        BackendUnavailableError: the backend cannot run on this machine.
        FP8BackendError: `GradientGap` refuses the model or the batches, or an argument is out of
        range.
    """
    if not 0 < min_flops_share <= 1:
        raise FP8BackendError(
            f"min_flops_share={min_flops_share}: a share above 0 and up to 1 is wanted, such as "
            "0.95"
        )
    if max_trials < 1:
        raise FP8BackendError(f"max_trials={max_trials}: at least 1, the recipe as given")
    conversion.check_is_module(model)
    roots = conversion.prepared_roots(model)
    recipe = roots[0].prepared.recipe if spec is None and roots else resolve(spec)
    registry.check_available(recipe)
    progress("FP32")
    device = next(model.parameters(), torch.empty(0, device="cpu")).device
    if "autocast_dtype" in recipe.given:
        around = recipe.autocast_dtype
    else:
        around = hardware.fast_precision(device)
    if around == "fp16":
        raise RecipeError(
            "autocast_dtype='fp16': gradients are measured with bf16 or fp32 around FP8; say one "
            "of them"
        )
    return _Search(
        GradientGap(model, batches, around, loss), recipe, min_flops_share, max_trials, progress
    ).advice()


# The search


class _Search:
    def __init__(
        self,
        gap: GradientGap,
        recipe: Recipe,
        least: float,
        max_trials: int,
        progress: Callable[[str], None],
    ) -> None:
        self.gap = gap
        self.least = least
        self.remaining = max_trials
        self.progress = progress
        work, prepared = gap.prepared(recipe)
        flops = count_flops(work, prepared, None, gap.work)
        if not flops.in_fp8:
            raise FP8BackendError(
                f"{recipe.name}: no product of a weight ran in FP8 in the batches: "
                f"{prepared.report}"
            )
        self.given_flops = flops.in_fp8
        self.layers = {
            product.name: gap.work[product.name].flops
            if product.name in gap.work
            else product.flops
            for product in prepared.report.products
            if product.state == FP8 and product.name
        }
        self.given = self._measured("as given", recipe, work, prepared)
        self.trials: list[Trial] = [self.given]
        self.alone: list[Alone] = []

    def advice(self) -> Advice:
        gap = self.gap
        chosen = None
        if gap.floor.gap <= TARGET * self.given.gap:
            scalings = (self._try(f"scaling {r.scaling}", r) for r in self._other_scalings())
            chosen = self._changed_layers() or next(filter(self._helps, scalings), None)
        return Advice(
            self.given,
            chosen,
            self.trials,
            self.alone,
            gap.around,
            gap.floor,
            gap.not_counted,
            self.least,
            gap.passes,
        )

    def _helps(self, trial: Trial) -> bool:
        return (
            trial.gap <= TARGET * self.given.gap
            and trial.kept >= self.least
            and trial.gap < math.inf
        )

    def _try(self, change: str, recipe: Recipe) -> Trial:
        """Measure a candidate. One that cannot run, or keeps too little in FP8, is only
        recorded."""
        try:
            trial = self._measured(change, recipe, *self.gap.prepared(recipe))
        except _FAILURES as error:
            trial = Trial(change, recipe, 0.0, 0.0, why_not=first_line(error))
        self.trials.append(trial)
        return trial

    def _measured(self, change: str, recipe: Recipe, work: nn.Module, prepared: Prepared) -> Trial:
        flops = count_flops(work, prepared, None, self.gap.work)
        kept = flops.in_fp8 / self.given_flops
        if kept < self.least:
            return Trial(change, recipe, flops.share, kept, why_not="it keeps too little in FP8")
        self.remaining -= 1
        self.progress(change)
        return Trial(change, recipe, flops.share, kept, self.gap.of(work, prepared))

    def _other_scalings(self) -> Iterator[Recipe]:
        """Yield the recipe in each other scaling rule of the backend that runs here, not
        emulated."""
        given = self.given.recipe
        findings_before = {finding.rule for finding in validate(given)}
        for scaling in registry.get_compute(given.compute).scalings:
            if scaling == given.scaling or not self.remaining:
                continue
            try:
                recipe = with_scaling(given, scaling)
                registry.check_available(recipe)
            except (RecipeError, BackendUnavailableError):
                continue
            new = [finding for finding in validate(recipe) if finding.rule not in findings_before]
            if not any(
                finding.severity == "error" or finding.rule == "emulated_here" for finding in new
            ):
                yield recipe

    def _worst_layers(self) -> list[str]:
        """Find the fewest layers that halve the gap in high precision, the worst first; none if so
        few cannot.

        Squares of gaps add up, as for independent errors, so gaps of groups predict the gap without
        some layers. Split the worst group, until single layers explain enough.
        """
        budget = (1 - self.least) * sum(self.layers.values())
        if min(self.layers.values(), default=math.inf) > budget:
            return []
        groups = [Alone(tuple(self.layers), self.given.gap)]
        while self.remaining and (worst := self._most_erring(groups, budget)):
            coarse = next((group for group in worst if len(group.names) > 1), None)
            if coarse is None:
                return [group.names[0] for group in worst]
            groups.remove(coarse)
            groups += map(self._alone, coarse.parts())
        return []

    def _changed_layers(self) -> Trial | None:
        """Try the worst layers in each other scaling rule, then in high precision. From there each
        layer goes back to the best of these rules if the others are enough."""
        names = self._worst_layers()
        best = self.given
        for recipe in self._other_scalings() if names else ():
            if recipe.scaling in ONE_SCALE:
                continue
            with contextlib.suppress(RecipeError):  # not every rule goes with every other
                trial = self._try_layers(dict.fromkeys(names, f"{recipe.compute}:{recipe.scaling}"))
                # otherwise the rule does not fit a layer
                if self._helps(trial) and trial.kept == 1:
                    return trial
                best = min(best, trial, key=lambda trial: (trial.kept < 1, trial.gap))
        if not names or not self.remaining:
            return None
        layers = dict.fromkeys(names, KEPT_IN_BF16)
        chosen = self._try_layers(layers)
        if not self._helps(chosen):
            return None
        for name in reversed(names) if best is not self.given else ():
            fewer = {**layers, name: best.recipe.layers[name]}
            if KEPT_IN_BF16 not in fewer.values():
                break  # tried above
            if self.remaining and self._helps(trial := self._try_layers(fewer)):
                layers = fewer
                chosen = trial
        return chosen

    def _try_layers(self, layers: Mapping[str, str]) -> Trial:
        recipe = with_layers(self.given.recipe, layers)
        names_by_word = {}
        for name, word in layers.items():
            names_by_word.setdefault(
                self.gap.around if word == KEPT_IN_BF16 else word.rpartition(":")[2], []
            ).append(name)
        change = ", ".join(f"{together(names)} in {word}" for word, names in names_by_word.items())
        return self._try(change, recipe)

    def _most_erring(self, groups: list[Alone], budget: float) -> list[Alone]:
        """Return the fewest groups without which the predicted gap is small enough; none if they
        exceed the budget."""
        target = (TARGET * self.given.gap) ** 2
        remaining_error = self.gap.floor.gap**2 + sum(map(self._error, groups))
        worst = []
        for group in sorted(groups, key=lambda group: -group.gap):
            if remaining_error <= target:
                break
            size = min(self.layers[name] for name in group.names)
            if size <= budget:
                budget -= size
                remaining_error -= self._error(group)
                worst.append(group)
        return worst if remaining_error <= target else []

    def _error(self, group: Alone) -> float:
        return max(0.0, min(group.gap, 1.0) ** 2 - self.gap.floor.gap**2)

    def _alone(self, names: tuple[str, ...]) -> Alone:
        """Measure these layers alone in FP8. The gap is 0 if the trial fails, or without a
        remaining trial."""
        group = Alone(names, 0.0)
        if self.remaining:
            with contextlib.suppress(*_FAILURES):
                others = dict.fromkeys(sorted(self.layers.keys() - set(names)), KEPT_IN_BF16)
                alone = self.gap.prepared(with_layers(self.given.recipe, others))
                self.remaining -= 1
                self.progress(f"{listed(names)} alone in FP8")
                group = group._replace(gap=self.gap.of(*alone).gap)
                self.alone.append(group)
        return group


# Recipes with a change


def with_layers(recipe: Recipe, layers: Mapping[str, str]) -> Recipe:
    """Return the recipe with these layers in other backends, or in high precision (`BF16`)."""
    others = {name: word for name, word in (recipe.layers or {}).items() if name not in layers}
    fields = {**recipe.given_settings, "backend": recipe.name, "layers": {**layers, **others}}
    # a pattern must match a layer in FP8
    if not isinstance(slow := recipe.fast_accumulation, bool):
        fields["fast_accumulation"] = [
            pattern for pattern in slow if layers.get(pattern) != KEPT_IN_BF16
        ] or True
    return resolve(fields)


def with_scaling(recipe: Recipe, scaling: str) -> Recipe:
    """Return the recipe with another scaling rule, without fields unknown to this rule. Raises
    `RecipeError`."""
    names_level = recipe.level != "O0" or "level" in recipe.given
    fields = {
        "backend": canonical_name(recipe.compute, scaling, recipe.level if names_level else None)
    }
    changed = resolve(fields)
    for name, value in recipe.given_settings.items():
        with contextlib.suppress(RecipeError):
            changed = resolve({**fields, name: value})
            fields[name] = value
    return changed


def together(names: Sequence[str]) -> str:
    """Join layer names with their common prefix written once: `layers.1.attn.(q_proj, k_proj)`."""
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names).rpartition(".")[0]
    parts = ", ".join(name[len(common) :].lstrip(".") for name in names)
    return f"{common}.({parts})" if common else parts
