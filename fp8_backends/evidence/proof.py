"""Prove at the first optimizer step that FP8 ran.

Backends with counters report their products. For others (`ao`), a profile of a training step
counts them (`step_profile.py`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import words
from ..announcement import announce, logger
from ..compute.counts import DGRAD, FPROP, KINDS, WGRAD, ProductCounts
from ..compute.interface import Compute
from ..convert import conversion
from ..convert.conversion import Prepared, Root
from ..convert.first_step import Work
from ..convert.weight_products import CONVOLUTION, COUNTED, FP8, LINEARS
from ..errors import FP8BackendError
from ..recipes.fields import KEPT_IN_BF16
from ..recipes.handlers import Recipe
from ..tensors.sharded_tensor import stored_dtype
from ..torch_tools.backward_end import inside_backward
from ..torch_tools.modules import EagerHook, is_traced, is_trained, plain_name
from ..torch_tools.optimizers import parameter_ids

_BESIDE = {CONVOLUTION: CONVOLUTION, "parameter": "other weight"}
"""Nouns for kinds without an FP8 product. Others, such as `FP8Linear of transformers`, keep their
name."""


def watch(roots: list[Root], optimizer: torch.optim.Optimizer) -> None:
    """Prove FP8 at the optimizer's first step, for its models of these roots. Raises
    `FP8BackendError` if it has no hooks."""
    if not hasattr(optimizer, "register_step_post_hook"):
        name = type(optimizer).__name__
        raise FP8BackendError(
            f"FP8 cannot be proven with an optimizer of type {name}: use a torch.optim.Optimizer"
        )
    held = parameter_ids(optimizer)
    # sharding may have swapped all parameters; then every model counts
    trained = [root for root in roots if is_trained(root.module, held)] or roots
    unproven: dict[Compute, list[Root]] = {}
    for root in trained:
        observed = root.prepared.observed
        if optimizer not in observed.optimizers():
            observed.watch(optimizer)
            if not observed.proven:
                unproven.setdefault(root.prepared.compute, []).append(root)
    for of_compute in unproven.values():
        FirstStep(of_compute, optimizer)


@contextlib.contextmanager
def profiler_elsewhere(models: Iterable[nn.Module]) -> Iterator[None]:
    """Delay the proof of these models while other code profiles, now or later: PyTorch has one
    profiler."""
    from .profiling import give_way  # only for code that profiles

    profiles = [step.profile for step in _first_steps(models) if step.profile is not None]
    for profile in profiles:
        profile.waits += 1
        profile.begin_anew()
    give_way()  # another model's
    try:
        yield
    finally:
        for profile in profiles:
            profile.waits -= 1


def begin_anew(models: Iterable[nn.Module]) -> None:
    """Forget the profile of these models' first step after an exception."""
    for first_step in _first_steps(models):
        first_step.forget_step()


def _first_steps(models: Iterable[nn.Module]) -> set[FirstStep]:
    """Return the unfinished proofs of the prepared models in `models`."""
    roots = conversion.prepared_roots(*models)
    return {first_step for _, _, prepared in roots for first_step in prepared.observed.first_steps}


class FirstStep:
    """Watch prepared models from their first training forward to the first step of their
    optimizer."""

    def __init__(self, roots: list[Root], optimizer: torch.optim.Optimizer) -> None:
        self.roots = roots
        self.compute = roots[0].prepared.compute
        """The common backend of these models."""
        self.profile: Any = None
        """The `StepProfile` of a backend without counters."""
        uncounted = [
            (name, layer, prepared)
            for _, root, prepared in roots
            for name, layer in self.compute.converted_layers(root).items()
            if self.compute.products(layer) is None
        ]
        if uncounted:
            from .step_profile import StepProfile  # only for such a backend

            self.profile = StepProfile(self.compute, uncounted)
        self.forward_seen = False
        self.steps = 0
        self.step_is_due = False
        """True after a step inside backward, until the next forward looks at it."""
        self.hooked: set[nn.Module] = set()
        """Roots with a hook on the end of their forward: one training forward has begun."""
        # the optimizer's hook stays, without effect after the proof: a running hook cannot remove
        # itself
        optimizer.register_step_post_hook(self.after_step)
        hook = EagerHook(self._before_forward)
        self.hooks = [root.register_forward_pre_hook(hook) for _, root, _ in self.roots]
        for _, _, prepared in self.roots:
            prepared.observed.first_steps.append(self)

    def _is_due(self) -> bool:
        """Return False in a bf16 phase of all models, without FP8 products to prove."""
        return any(prepared.phase != KEPT_IN_BF16 for _, _, prepared in self.roots)

    def _before_forward(self, root: nn.Module, args) -> None:
        if not self._is_due():
            return
        self.forward_seen = True
        if self.step_is_due and not inside_backward():
            self.step_is_due = False
            self._look_at_step()
            return
        # no replica of DataParallel
        for prepared in (prepared for _, known, prepared in self.roots if known is root):
            prepared.observed.measure(root)
            if root not in self.hooked and torch.is_grad_enabled():
                self.hooked.add(root)
                # late, and never while a compiler traces
                self.hooks.append(
                    root.register_forward_hook(EagerHook(self._after_forward), always_call=True)
                )
        if self.profile is not None and torch.is_grad_enabled() and not inside_backward():
            self.profile.before_forward(root)

    def _after_forward(self, root: nn.Module, args, output: object) -> None:
        if output is None and sys.exc_info()[0] is not None:  # the forward raised
            self.forget_step()

    def begin_anew(self) -> None:
        """Abandon an incomplete profile. The next training forward starts another."""
        if self.profile is not None:
            self.profile.begin_anew()

    def forget_step(self) -> None:
        """Drop the profile and measurements of an interrupted step."""
        self.begin_anew()
        for meter in (prepared.observed.meter for _, _, prepared in self.roots):
            if meter is not None:
                meter.work.clear()

    def after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        if not self.roots or is_traced():
            return
        if not self._is_due():
            return self.begin_anew()
        self.steps += 1
        for _, root, prepared in self.roots:
            named = (
                (plain_name(name), p) for name, p in root.named_parameters(remove_duplicate=False)
            )
            prepared.observed.gradient_dtypes |= {
                n: stored_dtype(p.grad) for n, p in named if p.grad is not None
            }
        runs_elsewhere = self.profile is not None and self.profile.runs_elsewhere
        was_due = self.step_is_due
        self.step_is_due = runs_elsewhere or inside_backward()
        # Inside a backward, gradients of other layers are still to come, and autograd restarts a
        # profiler stopped there. Nor can a thread stop another thread's. A compiled forward does
        # not run hooks.
        if not self.step_is_due or (was_due and self.profile is None):
            self._look_at_step()

    def _look_at_step(self) -> None:
        for _, root, prepared in self.roots:
            if root.__dict__.get(conversion.PREPARED) is not prepared:
                prepared.observed.prove(root)  # restored: nothing left to prove
        if all(prepared.observed.proven for _, _, prepared in self.roots):
            self._finish()  # by another optimizer's step
            return
        if self.profile is not None and not self.profile.completes(self.steps == 1):
            return
        counts = [count_products(root, prepared) for _, root, prepared in self.roots]
        # a step before any forward only sets up optimizer states; compiled forwards are not seen
        ran = any(count.kinds for root_counts in counts for count in root_counts.values())
        if not ran and not self.forward_seen and self.steps == 1:
            return
        self._finish()

    def _finish(self) -> None:
        roots = self.roots
        self.roots = []
        by_shape = self.profile is not None and self.profile.by_shape
        self.profile = None
        self.hooked.clear()
        # else the hook is compiled into the model, without effect: removing it would recompile
        if self.forward_seen:
            for hook in self.hooks:
                hook.remove()
        for _, root, prepared in roots:
            observed = prepared.observed
            observed.first_steps.remove(self)
            if not observed.proven:
                observed.prove(root)
                conversion.update_report(root, prepared)
                observed.proof = read_proof(root, prepared, by_shape)
                judge(observed.proof, root, prepared)


def count_products(root: nn.Module, prepared: Prepared) -> dict[str, ProductCounts]:
    """Return the FP8 products of each converted layer, by its own counter or from the last profiled
    step."""
    return {
        name: prepared.compute.products(module) or prepared.profiled.get(name, ProductCounts())
        for name, module in prepared.compute.converted_layers(root).items()
    }


@dataclass
class Flops:
    """FLOPs of one prepared root in the first step, or per token if it was compiled."""

    in_fp8: float = 0.0
    needed: float = 0.0
    """FLOPs of all products needed by training."""
    uncounted: list[str] = field(default_factory=list)
    """Convolutions of unknown FLOPs."""

    @property
    def share(self) -> float:
        """Return the share in FP8, 0 to 1."""
        return self.in_fp8 / self.needed if self.needed else 0.0


def count_flops(
    root: nn.Module,
    prepared: Prepared,
    counts: dict[str, ProductCounts] | None,
    work: dict[str, Work] | None = None,
    tokens: float = 1,
) -> Flops:
    """Sum the FLOPs of all products needed by training, and of the products in FP8 (`counts`; None
    predicts a step in which every converted layer runs in FP8).

    A gradient of the output makes both gradients necessary: the weight's if it trains, the input's
    if an input needs one. A weight not seen in the first step (`work`) counts as if every token
    passed it (at least `tokens`), unless it is known to be idle; its products show the need for an
    input gradient.
    """
    work = prepared.observed.work if work is None else work
    high = prepared.compute.high_precision_products(prepared.recipe)
    trains = {
        plain_name(name): p.requires_grad
        for name, p in root.named_parameters(remove_duplicate=False)
    }
    tokens = max(tokens, tokens_of(prepared, work))
    flops = Flops()
    for product in prepared.report.products:
        seen = work.get(product.name)
        weight = product.name if product.name in trains else f"{product.name}.weight".lstrip(".")
        ran = counts.get(product.name) if counts is not None and product.state == FP8 else None
        needed = set(_needed_kinds(trains.get(weight, True), seen, ran, high))
        if ran is not None:
            done = ran.kinds
        elif counts is None and product.state == FP8:
            done = needed.difference(high)
        else:
            done = set()
        if seen is None and weight in prepared.observed.idle:
            needed = set()
        needed |= done
        if seen is not None:
            size = seen.flops
        elif product.kind != CONVOLUTION:
            size = product.flops * tokens
        else:
            flops.uncounted += [product.name] * bool(needed)
            continue
        flops.needed += size * len(needed)
        flops.in_fp8 += size * len(done)
    return flops


def tokens_of(prepared: Prepared, work: dict[str, Work]) -> float:
    """Return the most rows of any layer, used for unseen layers: 1 without any."""
    positions = {
        product.name for product in prepared.report.products if product.kind == CONVOLUTION
    }
    return max((seen.rows for name, seen in work.items() if name not in positions), default=1)


def _needed_kinds(
    trains: bool, seen: Work | None, ran: ProductCounts | None, high: tuple[str, ...]
) -> Iterator[str]:
    """Yield the products of a weight needed by training."""
    yield FPROP
    if seen is not None and not seen.backward:
        return
    if trains:
        yield WGRAD
    if seen is None:
        # beside a wgrad in FP8, a dgrad in use would have been in FP8, too
        needs_dgrad = ran is None or ran.wgrad == 0 or DGRAD in high
    else:
        needs_dgrad = seen.input_gradient
    if needs_dgrad:
        yield DGRAD


@dataclass
class Proof:
    """The FP8 products of a prepared root's first training step. Its text is the proof line."""

    recipe: str
    """`Prepared.name`."""
    layers: Counter[str]
    """Weights in FP8 by noun, such as Linear or experts."""
    of: Counter[str]
    """All weights by noun, kinds without an FP8 product included."""
    flops: Flops
    products: list[str]
    """Kinds with FP8 products: fprop, dgrad, wgrad."""
    engine: str
    notes: list[str]
    idle: list[str]
    """Converted layers without products."""
    other_wgrad: list[str]
    """Layers in FP8 with a weight gradient of other products, against the recipe."""

    def __str__(self) -> str:
        """Write such as `native:dynamic: 28/29 Linear (beside 2 convolutions), 94 % of weight FLOPs
        in FP8, fprop dgrad wgrad (bf16-exact)`."""
        counted = [
            f"{self.layers[noun]}/{self.of[noun]} {noun}" for noun in COUNTED if self.of[noun]
        ]
        others = [
            words.counted(number, _BESIDE[noun]) if noun in _BESIDE else f"{number} {noun}"
            for noun, number in self.of.items()
            if noun not in COUNTED
        ]
        layers = ", ".join(counted or ["0/0 Linear"])
        if others:
            layers += f" (beside {', '.join(others)})"
        share = f"{words.share(self.flops.share)} of weight FLOPs in FP8"
        notes = "; ".join([self.engine, *self.notes])
        return f"{self.recipe}: {layers}, {share}, {' '.join(self.products)} ({notes})"


def read_proof(root: nn.Module, prepared: Prepared, by_shape: bool = False) -> Proof:
    """Read the products since `prepare`, or of the last profiled step."""
    recipe = prepared.recipe
    compute = prepared.compute
    layers = compute.converted_layers(root)
    counts = count_products(root, prepared)
    ran = [layer for layer, count in counts.items() if count.kinds]
    nouns = {
        product.name: "Linear" if product.kind in LINEARS else product.kind
        for product in prepared.report.products
    }
    flops = count_flops(root, prepared, counts)
    high = compute.high_precision_products(recipe)
    notes = []
    if high:
        notes.append(f"{' '.join(high)} in high precision by recipe")
    notes += [
        f"{kind} {word}" for kind, word in (recipe.products or {}).items() if word != KEPT_IN_BF16
    ]
    if by_shape:
        notes.append("compiled, counted by shape")
    if flops.uncounted:
        notes.append(f"{words.counted(len(flops.uncounted), CONVOLUTION)} not counted")
    return Proof(
        prepared.name,
        Counter(nouns.get(layer, "Linear") for layer in ran),
        Counter(nouns.values()),
        flops,
        [kind for kind in KINDS if any(kind in count.kinds for count in counts.values())],
        "+".join(sorted({compute.engine(layers[layer]) for layer in ran})),
        notes,
        idle=[layer for layer in counts if layer not in ran],
        other_wgrad=[
            layer
            for layer in ran
            if WGRAD not in high
            and not counts[layer].wgrad
            and layers[layer].weight.grad is not None
        ],
    )


def judge(proof: Proof, root: nn.Module, prepared: Prepared) -> None:
    """Print the proof line. Raises `FP8BackendError` if nothing ran in FP8, unless
    `on_unproven="warn"`."""
    name = prepared.recipe.name
    if not proof.products:
        layers = prepared.compute.converted_layers(root).values()
        remedy = "Check that the prepared model is the one that trains, and in training mode"
        if prepared.recipe.compute in ("native", "te") and not any(m.training for m in layers):
            remedy = "They are in evaluation mode, and multiply in high precision: call model.train() before training"
        layers = words.counted(len(proof.idle), "converted layer")
        message = f"{name}: no FP8 product ran in the first training step in {layers}. {remedy}"
        return refuse_unproven(message, prepared.recipe)
    if proof.idle:
        logger.warning("%s: layers without products: %s", name, words.listed(proof.idle))
    if proof.other_wgrad:
        message = "%s: layers whose weight gradient did not come from an FP8 product: %s"
        logger.warning(message, name, words.listed(proof.other_wgrad))
    announce(str(proof))


def refuse_unproven(message: str, recipe: Recipe) -> None:
    """Raise `FP8BackendError`, or warn if the recipe's `on_unproven` is "warn"."""
    if recipe.on_unproven == "raise":
        raise FP8BackendError(f'{message}; on_unproven="warn" trains on regardless')
    warnings.warn(message, stacklevel=3)
