"""Find the mildest change of a recipe that halves its gradient error: `fp8_backends.advise` (docs/numerics.rst)."""

import contextlib
import copy
import math
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch import nn

from . import preparation
from .compute import hardware, registry
from .convert import conversion, features
from .convert.conversion import Prepared
from .convert.first_step import WorkMeter
from .convert.weight_products import FP8, find_weight_products
from .errors import BackendUnavailableError, FP8BackendError, RecipeError
from .evidence.auditing import count_flops
from .recipes.fields import NAMING
from .recipes.handlers import Recipe, Spec, resolve
from .recipes.strings import canonical_name
from .rules.validate import validate
from .tensors.sharded_tensor import is_distributed
from .words import as_html, by_pattern, finite, first_line, in_columns, listed, share

LossFunction = Callable[[nn.Module, Any], torch.Tensor]

TARGET = 0.5
"""Largest gap of a successful change, relative to the given recipe's."""
GROUPS = 12
"""Largest number of groups by layer names; more are bisected."""
BROKEN = 0.5
"""Gap beyond FP8's rounding: healthy models have a tenth."""
WARM_UP = 2
"""Passes of the first batch before a measurement, for scaling rules with a history."""
NOISE = 0.1
"""Largest mean error of a counted gradient without FP8. A key's bias has more: softmax is blind to it."""
SHOWN = 5
_FAILURES = (FP8BackendError, RuntimeError)
"""Failures of one trial: a refused recipe, or an operator, such as for memory."""


# Measuring


class Measurement(NamedTuple):
    """Errors of one recipe, means over the batches."""

    gap: float
    """Relative error of the gradients; infinite if a gradient is not finite, or without a measurement."""
    loss_error: float


class GradientGap:
    """Measure the gap of recipes to FP32, for one model on fixed batches.

    The gap of a batch is `sqrt(sum(n_p * min(1, r_p) ** 2) / sum(n_p))` over the trainable parameters p with n_p
    elements and a nonzero gradient: `r_p = ||g_p - g32_p|| / ||g32_p||`, with FP32 gradients g32. Parameters beyond
    `NOISE` without FP8 do not count. The model is only read: everything runs on copies, one at a time.

    Raises `FP8BackendError` without a batch or loss, for sharded weights, nothing that trains, a model without a copy,
    or a loss or gradient that is not finite in FP32.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], around: str, loss: LossFunction | None = None) -> None:
        conversion.check_is_module(model)
        self.around = around
        self.model = conversion.unwrapped(model)
        self.batches = list(batches)
        self.loss = loss or _loss_of_output
        self.passes = 0
        parameters = list(self.model.parameters())
        if not self.batches:
            raise FP8BackendError("no batch is given: batches must hold at least one, better four")
        if not any(parameter.requires_grad for parameter in parameters):
            raise FP8BackendError("no parameter of this model trains, so there is no gradient to measure")
        if any(is_distributed(p) or hasattr(p, "ds_id") or getattr(p, "shared_out", False) for p in parameters):
            raise FP8BackendError("weights are sharded: measure the model on one device, before it is shared out")
        self.device = parameters[0].device
        work = self._plain_copy()
        meter = WorkMeter(work, find_weight_products(work))
        self.reference = list(self._gradients(work.float(), "fp32", self.batches))
        meter.detach()
        self.work = meter.work
        if not all(
            math.isfinite(loss) and all(bool(gradient.isfinite().all()) for gradient in gradients.values())
            for loss, gradients in self.reference
        ):
            raise FP8BackendError("a loss or a gradient is not finite in FP32 already: no recipe can be measured by it")
        errors, loss_error = self._errors(self._plain_copy())
        by_name: dict[str, list[float]] = {}
        for name, error in (item for batch_errors in errors for item in batch_errors.items()):
            by_name.setdefault(name, []).append(error)
        noisy = [name for name, values in by_name.items() if _mean(values) > NOISE]
        self.not_counted = noisy if len(noisy) < len(by_name) else []  # otherwise the gap of nothing would be 0
        self.floor = Measurement(self._gap(errors), loss_error)
        """The measurement without FP8."""

    def _plain_copy(self) -> nn.Module:
        """Copy the model as before `prepare`; in training mode if it was in evaluation as a whole."""
        try:
            work = copy.deepcopy(self.model)
        except (RuntimeError, TypeError, ValueError) as error:
            raise FP8BackendError(f"the model cannot be copied, and recipes are measured on copies: {error}") from error
        conversion.restore(work)
        return work if work.training else work.train()

    def prepared(self, recipe: Recipe) -> tuple[nn.Module, Prepared]:
        """Return a copy prepared with a recipe. Raises as `fp8_backends.prepare` does."""
        if recipe.implementation == "original":
            raise RecipeError('implementation="original": only the levels of this package can be measured')
        work = self._plain_copy()
        with _same_draws(0, self.device):  # a level rounds weights
            preparation.prepare_model(work, recipe)
        return work, work.__dict__[conversion.PREPARED]

    def of(self, work: nn.Module, prepared: Prepared) -> Measurement:
        """Measure a prepared copy. Scaling rules with a history see the first batch `WARM_UP` times before."""
        warm_up = self.batches[:1] * WARM_UP if prepared.compute.scaling_state(work) else []
        for _ in self._gradients(work, self.around, warm_up):
            pass
        errors, loss_error = self._errors(work)
        return Measurement(self._gap(errors), loss_error)

    def _gradients(
        self, work: nn.Module, precision: str, batches: list[Any]
    ) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
        """Yield loss and gradients on the CPU for each batch, with the same random draws in every call."""
        trained = {name: parameter for name, parameter in work.named_parameters() if parameter.requires_grad}
        reads_16_bits = any(p.dtype != torch.float32 for p in work.parameters() if p.is_floating_point())
        for seed, batch in enumerate(batches):
            with contextlib.suppress(RuntimeError, TypeError, ValueError):  # such as a tensor with a grad_fn
                batch = copy.deepcopy(batch)  # the model may change it, and the next pass reads it again
            batch = send_to_device(batch, self.device)
            batch = batch if reads_16_bits else convert_to_fp32(batch)
            with _same_draws(seed, self.device):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16"):
                    loss = self.loss(work, batch)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise FP8BackendError("a batch's loss must be a tensor of one element that requires a gradient")
                loss.backward()
            prepared = work.__dict__.get(conversion.PREPARED)
            if prepared is not None:
                prepared.compute.after_optimizer_step(work)  # as a watched optimizer does
            self.passes += 1
            gradients = {
                name: parameter.grad.detach().to("cpu", torch.float32, copy=True)
                for name, parameter in trained.items()
                if parameter.grad is not None
            }
            yield loss.item(), gradients
            work.zero_grad(set_to_none=True)

    def _errors(self, work: nn.Module) -> tuple[list[dict[str, float]], float]:
        """Return each batch's relative errors of nonzero gradients, and the mean error of the loss."""
        errors, loss_errors = [], []
        measured = self._gradients(work, self.around, self.batches)
        for (loss, gradients), (expected_loss, expected) in zip(measured, self.reference, strict=True):
            norms = {name: _norm(gradient) for name, gradient in expected.items()}
            pairs = [(name, gradients.get(name), expected[name]) for name, norm in norms.items() if norm > 0]
            errors.append({name: math.inf if g is None else _norm(g - e) / norms[name] for name, g, e in pairs})
            loss_errors.append(abs(loss - expected_loss))
        return errors, _mean(loss_errors)

    def _gap(self, errors: list[dict[str, float]]) -> float:
        gaps = []
        for batch_errors, (_, expected) in zip(errors, self.reference, strict=True):
            counted = {name: error for name, error in batch_errors.items() if name not in self.not_counted}
            if not all(map(math.isfinite, counted.values())):
                return math.inf
            sizes = [expected[name].numel() for name in counted]
            total = sum(n * min(1.0, error) ** 2 for n, error in zip(sizes, counted.values(), strict=True))
            gaps.append(math.sqrt(total / max(1, sum(sizes))))
        return statistics.fmean(gaps)


def _loss_of_output(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the `loss` of a model's output, or the output if it is a single number."""
    arguments = batch if isinstance(batch, (tuple, list)) else [batch]
    output = model(**batch) if isinstance(batch, Mapping) else model(*arguments)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise FP8BackendError(
            f"{type(model).__name__} returns no loss for this batch: put labels into it, or give "
            "loss=function(model, batch)"
        )
    return loss


@contextlib.contextmanager
def _same_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch, NumPy and Python inside, and restore their states afterwards."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    on_gpu = device.type == "cuda"
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if on_gpu else []):
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor).item()


def _mean(values: list[float]) -> float:
    return statistics.fmean(value if math.isfinite(value) else math.inf for value in values)


# The answer


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
        """Split the layers by names without numbers if this gives few groups, otherwise in halves."""
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
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """`tensor_cores.sum_lost` with and without fast accumulation, of layers that lose more by it than by casts."""
    slow: Trial | None = None
    """These layers without fast accumulation: advised even if the gap stays, as on a machine without such sums."""

    @property
    def recipe(self) -> Recipe:
        """The recipe to train with: as advised, or as given if no change helps."""
        return (self.chosen or self.slow or self.given).recipe

    @property
    def best(self) -> Trial:
        """The trial with the smallest gap among those with enough FP8."""
        return min((trial for trial in self.trials if trial.kept >= self.min_flops_share), key=lambda trial: trial.gap)

    @property
    def verdict(self) -> str:
        if self.chosen is not None:
            changes = [self.chosen.change]
            if self.slow not in (None, self.chosen) and self.chosen.recipe.fast_accumulation is not True:
                changes.insert(0, self.slow.change)
            return (
                f"{'; '.join(changes)}: {self._ratio(self.chosen)} of the gap, with {share(self.chosen.kept)} of the "
                "FLOPs in FP8 kept there"
            )
        if self.slow is not None and self.slow.gap <= BROKEN:
            return f"{self.slow.change}: {self._ratio(self.slow)} of the gap; no further change halves it"
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
        """Return everything as plain values, non-finite numbers as None."""
        return {
            "verdict": self.verdict,
            "advised": (self.chosen or self.slow) is not None,
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
                    "exclude": list(trial.recipe.exclude or ()),
                    "flops_share": trial.flops_share,
                    "kept": trial.kept,
                    **({"why_not": trial.why_not} if trial.why_not else finite(trial.measured._asdict())),
                }
                for trial in self.trials
            ],
            "sums": {name: {"lost": lost, "without": without} for name, (lost, without) in self.sums.items()},
            "alone": [{**group._asdict(), "gap": finite(group.gap)} for group in self.alone],
        }

    def rows(self) -> list[tuple[str, ...]]:
        rows = [("trial", "recipe", "FP8", "kept", "gap", "of given", "loss error")]
        rows.append((f"{self.around}, no FP8", "", "0 %", "0 %", *self._figures(self.floor)))
        for trial in self.trials:
            figures = ("not run", "", "") if trial.why_not else self._figures(trial.measured)
            rows.append((trial.change, trial.recipe.name, share(trial.flops_share), share(trial.kept), *figures))
        return rows

    def __str__(self) -> str:
        return "\n".join([in_columns(self.rows()), self.verdict, str(self.recipe), *self.further_lines()])

    def _repr_html_(self) -> str:
        return as_html("; ".join([self.verdict, *self.further_lines()]), self.rows())

    def further_lines(self) -> list[str]:
        """Return the worst single layers, and the reasons for missing measurements."""
        lines = [f"{trial.change}: not run, {trial.why_not}" for trial in self.trials if trial.why_not]
        singles = sorted((group for group in self.alone if len(group.names) == 1), key=lambda group: -group.gap)
        if singles:
            gaps = ", ".join(f"{group.names[0]} {group.gap:.3g}" for group in singles[:SHOWN])
            lines.append(f"gap of one layer alone in FP8: {gaps}")
        for name, (lost, without) in list(self.sums.items())[:SHOWN]:
            lines.append(f"sums lost in {name}: {share(lost)}, without fast accumulation {share(max(0.0, without))}")
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
    """Find the mildest change of a recipe that halves its gap, measured on your own batches.

    The gap is the relative error of the gradients against FP32 (`training.advice.GradientGap`). The model is only read:
    everything runs on copies, one at a time, with random numbers of their own. Hooks of the model run on copies too.

    Args:
        model: any `nn.Module` on one device, prepared or not, best with weights from mid-training.
        batches: about four batches as in training. With fewer, the best of many trials may owe its gap to chance.
        spec: the given recipe, as for `resolve`; None: the prepared model's, otherwise this machine's choice.
        loss: a function (model, batch) -> scalar tensor; default: the `loss` returned by the model.
        min_flops_share: FLOPs in FP8 kept by an answer, relative to the given recipe's.
        max_trials: recipes to measure at most. Each takes a forward and a backward of every batch, and delayed scaling
            `WARM_UP` more.
        progress: called with the description of each trial at its start.

    Raises:
        RecipeError: the recipe is invalid, or has FP16 around FP8.
        BackendUnavailableError: the backend cannot run on this machine.
        FP8BackendError: `GradientGap` refuses the model or the batches, or an argument is out of range.
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
    device = next(model.parameters(), torch.empty(0)).device
    around = recipe.autocast_dtype if "autocast_dtype" in recipe.given else hardware.fast_precision(device)
    if around == "fp16":
        raise RecipeError("autocast_dtype='fp16': gradients are measured with bf16 or fp32 around FP8; say one of them")
    return _Search(GradientGap(model, batches, around, loss), recipe, min_flops_share, max_trials, progress).advice()


# The search


class _Search:
    def __init__(
        self, gap: GradientGap, recipe: Recipe, least: float, max_trials: int, progress: Callable[[str], None]
    ) -> None:
        self.gap, self.least, self.remaining, self.progress = gap, least, max_trials, progress
        work, prepared = gap.prepared(recipe)
        flops = count_flops(work, prepared, None, gap.work)
        if not flops.in_fp8:
            raise FP8BackendError(f"{recipe.name}: no product of a weight ran in FP8 in the batches: {prepared.report}")
        self.given_flops = flops.in_fp8
        self.layers = {
            product.name: gap.work[product.name].flops if product.name in gap.work else product.flops
            for product in prepared.report.products
            if product.state == FP8 and product.name
        }
        self.given = self._measured("as given", recipe, work, prepared)
        self.trials: list[Trial] = [self.given]
        self.alone: list[Alone] = []
        found = features.run(
            "sums_lost", work, prepared, lambda: list(gap._gradients(work, gap.around, gap.batches[:1]))
        )
        self.sums = found[0] if found else {}
        self.slow = self._without_fast_accumulation() if self.sums and self.remaining else None
        self.start = self.slow or self.given
        """Further changes start from here."""

    def advice(self) -> Advice:
        gap, chosen = self.gap, self.slow if self.slow and self._helps(self.slow) else None
        if chosen is None and gap.floor.gap <= TARGET * self.given.gap:
            chosen = self._without_layers() or next(filter(self._helps, self._scalings()), None)
        facts = (self.given, chosen, self.trials, self.alone, gap.around, gap.floor, gap.not_counted, self.least)
        return Advice(*facts, gap.passes, self.sums, self.slow)

    def _without_fast_accumulation(self) -> Trial | None:
        recipe, names = self.given.recipe, list(self.sums)
        before = () if recipe.fast_accumulation is True else recipe.fast_accumulation
        slow = [*before, *names] if all(names) else False  # the root has no name
        changed = resolve({**_fields(recipe), "backend": recipe.name, "fast_accumulation": slow})
        trial = self._try(f"fast accumulation off in {together(names)}", changed)
        return None if trial.why_not else trial

    def _helps(self, trial: Trial) -> bool:
        return trial.gap <= TARGET * self.given.gap and trial.kept >= self.least and trial.gap < math.inf

    def _try(self, change: str, recipe: Recipe) -> Trial:
        """Measure a candidate. One that cannot run, or keeps too little in FP8, is only recorded."""
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
            return Trial(change, recipe, flops.in_fp8 / flops.needed, kept, why_not="it keeps too little in FP8")
        self.remaining -= 1
        self.progress(change)
        return Trial(change, recipe, flops.in_fp8 / flops.needed, kept, self.gap.of(work, prepared))

    def _scalings(self) -> Iterator[Trial]:
        """Try the backend's other scaling rules, except those that do not run here or are emulated."""
        given = self.start.recipe
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
            if not any(finding.severity == "error" or finding.rule == "emulated_here" for finding in new):
                yield self._try(f"scaling {scaling}", recipe)

    def _without_layers(self) -> Trial | None:
        """Keep the fewest layers in high precision that halve the gap.

        Squares of gaps add up, as for independent errors, so gaps of groups predict the gap without some layers. Split
        the worst group, until single layers explain enough or so few cannot.
        """
        budget = (1 - self.least) * sum(self.layers.values())
        if min(self.layers.values(), default=math.inf) > budget:
            return None
        recipe, groups = self.start.recipe, [Alone(tuple(self.layers), self.start.gap)]
        while self.remaining and (worst := self._most_erring(groups, budget)):
            coarse = next((group for group in worst if len(group.names) > 1), None)
            if coarse is not None:
                groups.remove(coarse)
                groups += [self._alone(part, recipe) for part in coarse.parts()]
                continue
            names = [group.names[0] for group in worst]
            trial = self._try(f"{together(names)} kept out", without(recipe, names))
            return trial if self._helps(trial) else None
        return None

    def _most_erring(self, groups: list[Alone], budget: float) -> list[Alone]:
        """Return the fewest groups without which the predicted gap is small enough; none if they exceed the budget."""
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

    def _alone(self, names: tuple[str, ...], recipe: Recipe) -> Alone:
        """Measure these layers alone in FP8. The gap is 0 if the trial fails, or without a remaining trial."""
        group = Alone(names, 0.0)
        if self.remaining:
            with contextlib.suppress(*_FAILURES):
                alone = self.gap.prepared(without(recipe, sorted(self.layers.keys() - set(names))))
                self.remaining -= 1
                self.progress(f"{listed(names)} alone in FP8")
                group = group._replace(gap=self.gap.of(*alone).gap)
                self.alone.append(group)
        return group


# Recipes with a change


def without(recipe: Recipe, names: Sequence[str]) -> Recipe:
    fields = {**_fields(recipe), "backend": recipe.name, "exclude": [*(recipe.exclude or ()), *names]}
    if not isinstance(slow := recipe.fast_accumulation, bool):  # a pattern must match a layer in FP8
        fields["fast_accumulation"] = [pattern for pattern in slow if pattern not in names] or True
    return resolve(fields)


def with_scaling(recipe: Recipe, scaling: str) -> Recipe:
    """Return the recipe with another scaling rule, without fields unknown to this rule. Raises `RecipeError`."""
    names_level = recipe.level != "O0" or "level" in recipe.given
    fields = {"backend": canonical_name(recipe.compute, scaling, recipe.level if names_level else None)}
    changed = resolve(fields)
    for name, value in _fields(recipe).items():
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


def _fields(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in recipe.to_kwargs().items() if name not in NAMING}
