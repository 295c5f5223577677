"""The proof that FP8 ran, made at the first optimizer step.

A backend that counts its products is asked for its counts. For one that cannot count (`ao`), the first training
step is profiled: from the first forward with gradients to the optimizer step. Where any of it is compiled, or another
profiler is active or announced (`profiler_elsewhere`), a later step is profiled instead, from optimizer step to
optimizer step. A step that an exception ended begins anew.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import words
from ..announcement import announce
from ..compute.counts import KINDS, WGRAD, ProductCounts
from ..compute.profiling import ProductProfile, foreign_profiler_runs, give_way
from ..errors import FP8BackendError
from ..numerics.engine import inside_backward
from ..numerics.modules import TemporaryHook, is_traced, plain_name
from . import conversion
from .auditing import (
    count_products,
    layers_to_profile,
    parameter_ids,
    stored_dtype,
    unwrapped,
)
from .flops import count_flops
from .weight_products import CONVOLUTION

if TYPE_CHECKING:
    from ..recipes.handlers import Recipe
    from .conversion import Prepared

logger = logging.getLogger("fp8_backends")

_COUNTED = {"Linear": ("Linear", "head", "router", "adapter"), "Conv1D": ("Conv1D",), "experts": ("experts",)}
"""Words of the proof for kinds of weights."""
_BESIDE = {CONVOLUTION: CONVOLUTION, "parameter": "other weight"}
"""The same for kinds without an FP8 product. Others, such as `FP8Linear of transformers`, are called what they are."""


def watch(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Prove at the first step of `optimizer` that the prepared models whose parameters it holds run in FP8.

    Raises:
        FP8BackendError: `optimizer` is not a PyTorch optimizer.
    """
    optimizer = unwrapped(optimizer)
    if not hasattr(optimizer, "register_step_post_hook"):
        raise FP8BackendError(
            f"FP8 cannot be proven with an optimizer of type {type(optimizer).__name__}: it must be a "
            "torch.optim.Optimizer, so that its first step can be watched"
        )
    roots = [root for model in models for root in conversion.prepared_roots(model)]
    held = parameter_ids(optimizer)
    # where sharding swapped the parameters, none is found, and every model counts
    trained = [root for root in roots if any(id(p) in held for p in root[1].parameters())] or roots
    new = [root for root in trained if optimizer not in root[2].observed.optimizers()]
    for _, _, prepared in new:
        prepared.observed.watch(optimizer)
    unproven = [root for root in new if not root[2].observed.proven]
    for compute in dict.fromkeys(prepared.compute for _, _, prepared in unproven):
        FirstStep([root for root in unproven if root[2].compute is compute]).install(optimizer)


@contextlib.contextmanager
def profiler_elsewhere(models: Iterable[nn.Module]) -> Iterator[None]:
    """Let the proof of these models wait for code that has a profiler of its own, now or by its schedule later: PyTorch
    has one at a time."""
    waiting = _first_steps(models)
    for first_step in waiting:
        first_step.waits += 1
        first_step.begin_anew()
    give_way()  # another model's
    try:
        yield
    finally:
        for first_step in waiting:
            first_step.waits -= 1


def begin_anew(models: Iterable[nn.Module]) -> None:
    """Forget what was profiled of the first step of these models: an exception has ended it."""
    for first_step in _first_steps(models):
        first_step.forget_step()


def _first_steps(models: Iterable[nn.Module]) -> set[FirstStep]:
    """Those that watch prepared models in `models` for their proof."""
    roots = [root for model in models for root in conversion.prepared_roots(model)]
    return {first_step for _, _, prepared in roots for first_step in prepared.observed.first_steps}


class FirstStep:
    """Watches prepared models from their first training forward to the first step of their optimizer."""

    def __init__(self, roots: list[tuple[str, nn.Module, Prepared]]) -> None:
        self.roots = roots
        self.compute = roots[0][2].compute
        """The one backend of these models."""
        self.layers = [layer for root in roots for layer in layers_to_profile(*root)]
        self.profile: ProductProfile | None = None
        self.began: nn.Module | None = None
        """The root whose forward began the profiled step, and the gradients that its layers had then."""
        self.gradients: list = []
        self.overlapping = False
        """Whether a forward began before the backward of the last one, so that gradients may be an earlier one's."""
        self.forward_seen = False
        self.steps = 0
        self.step_is_due = False
        """Whether a step was made inside backward, and is looked at before the next forward."""
        self.waits = 0
        """How many blocks of code with a profiler of their own are running."""
        self.hooked: set[nn.Module] = set()
        """The roots with a hook that tells when a forward ends: those that began a training forward."""
        self.hooks: list = []

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        # the optimizer's hook stays, doing nothing after the proof: it may not be removed while it runs
        optimizer.register_step_post_hook(self.after_step)
        forward_hook = ForwardHook(self)
        self.hooks = [root.register_forward_pre_hook(forward_hook) for _, root, _ in self.roots]
        for _, _, prepared in self.roots:
            prepared.observed.first_steps.append(self)

    def before_forward(self, root: nn.Module) -> None:
        self.forward_seen = True
        if self.step_is_due and not inside_backward():
            self.step_is_due = False
            self._look_at_step()
            return
        for prepared in (prepared for _, own, prepared in self.roots if own is root):  # no replica of DataParallel
            prepared.observed.measure(root)
            if root not in self.hooked and torch.is_grad_enabled():
                self.hooked.add(root)
                # only now, and never while a compiler looks
                self.hooks.append(root.register_forward_hook(ForwardHook(self), always_call=True))
        if not self.layers or not torch.is_grad_enabled() or inside_backward():
            return
        if self.profile is not None and not self.profile.runs_here:
            return  # it has its result, or gave way, or another thread steps: `after_step` sees to it
        grads = [layer.module.weight.grad for layer in self.layers]
        gradients = [None if grad is None else (id(grad), grad._version) for grad in grads]  # changes as each arrives
        if self.began is root:
            arrived = [new is not None and new != old for new, old in zip(gradients, self.gradients, strict=True)]
            self.overlapping |= not any(arrived)
            if all(arrived) and not self.overlapping:
                self.profile.stop()  # the first of several microbatches tells enough
            elif all(arrived) or not any(arrived):
                self.profile.restart()  # a forward without a backward was no training, or has it later, in a pipeline
                self.gradients = gradients
            return
        if self.profile is None:
            self._start_profile(begun=root)
        if self.profile is not None and self.began is None:
            self.began, self.gradients = root, gradients

    def after_forward(self, output: object) -> None:
        if output is None and sys.exc_info()[0] is not None:  # the forward raised
            self.forget_step()

    def begin_anew(self) -> None:
        """Drop a profile without a result. The next training forward starts another."""
        if self.profile is not None and not self.profile.complete:
            self.profile.abandon()
            self.profile = self.began = None

    def forget_step(self) -> None:
        """Drop what was profiled and measured of a step that ended halfway."""
        self.begin_anew()
        for meter in (prepared.observed.meter for _, _, prepared in self.roots):
            if meter is not None:
                meter.work.clear()

    def after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        if not self.roots or is_traced():
            return
        self.steps += 1
        self._record_gradient_dtypes()
        runs_elsewhere = self.profile is not None and self.profile.running and not self.profile.runs_here
        was_due, self.step_is_due = self.step_is_due, runs_elsewhere or inside_backward()
        # Inside a backward, other layers' gradients are still to come; and autograd brings a profiler that is stopped
        # there back when it ends, and nothing would stop it then. Nor can a thread stop another one's, whose forwards
        # these steps follow. A compiled forward does not tell that it begins.
        if not self.step_is_due or (was_due and not self.layers):
            self._look_at_step()

    def _look_at_step(self) -> None:
        for _, root, prepared in self.roots:
            if root.__dict__.get(conversion.PREPARED) is not prepared:
                prepared.observed.prove(root)  # it was restored, and has nothing to prove any more
        if all(prepared.observed.proven for _, _, prepared in self.roots):
            self._finish([{} for _ in self.roots])  # such as by another optimizer's step
            return
        if self.profile is not None and self.profile.running:
            self.profile.stop()
        if self.layers and (self.profile is None or not self.profile.complete):
            self.profile = self.began = None
            if not self._start_profile() and self.steps == 1 and (self.waits or foreign_profiler_runs()):
                logger.warning("another profiler is active: the proof that FP8 runs waits until it has stopped")
            return
        counts = [count_products(root, prepared) for _, root, prepared in self.roots]
        # a step without any forward before it only set up optimizer states; compiled forwards are not seen
        if _nothing_ran(counts) and not self.forward_seen and self.steps == 1:
            return
        self._finish(counts)

    def _start_profile(self, begun: nn.Module | None = None) -> bool:
        """Whether a profile runs now. One that the forward of a root begins takes over, and may see code being
        compiled."""
        if self.waits:
            return False
        profile = ProductProfile(self.layers)
        if profile.start(begun):
            self.profile = profile
        return self.profile is not None

    def _finish(self, counts: list[dict[str, ProductCounts]]) -> None:
        roots, self.roots = self.roots, []
        by_shape = self.profile is not None and self.profile.by_shape
        self.layers, self.profile, self.began, self.gradients = [], None, None, []
        self.hooked.clear()
        if self.forward_seen:  # else the hook is compiled into the model, doing nothing: removing it would recompile
            for hook in self.hooks:
                hook.remove()
        for (_, root, prepared), root_counts in zip(roots, counts, strict=True):
            prepared.observed.first_steps.remove(self)
            if not prepared.observed.proven:
                prepared.observed.prove(root)
                conversion.update_report(root, prepared)
                state_proof(root, prepared, root_counts, by_shape)

    def _record_gradient_dtypes(self) -> None:
        for _, root, prepared in self.roots:
            prepared.observed.gradient_dtypes |= {
                plain_name(name): stored_dtype(p.grad)
                for name, p in root.named_parameters(remove_duplicate=False)
                if p.grad is not None
            }


class ForwardHook(TemporaryHook):
    """Tells a `FirstStep` that a forward of its model begins or has ended, also by an exception. Inert in a copied or
    unpickled model, and compiled."""

    def __init__(self, first_step: FirstStep) -> None:
        self.first_step = first_step

    def __call__(self, module: nn.Module, args, *output: object) -> None:
        if not is_traced():
            self.first_step.after_forward(*output) if output else self.first_step.before_forward(module)


def state_proof(root: nn.Module, prepared: Prepared, counts: dict[str, ProductCounts], by_shape: bool = False) -> None:
    """Print the one line that says what ran in FP8.

    Raises:
        FP8BackendError: nothing did, and the recipe's `on_unproven` is "raise".
    """
    name = prepared.recipe.name
    if _nothing_ran([counts]):
        layers = prepared.compute.converted_layers(root).values()
        in_evaluation = prepared.recipe.compute in ("native", "te") and not any(layer.training for layer in layers)
        remedy = "Check that the prepared model is the one that trains, and in training mode"
        if in_evaluation:
            remedy = "They are in evaluation mode, and multiply in high precision: call model.train() before training"
        in_none = f"in none of {words.counted(len(counts), 'converted layer')}"
        message = f"{name}: no FP8 product ran in the first training step, {in_none}. {remedy}"
        return refuse_unproven(message, prepared.recipe)
    for message in _shortcomings(root, prepared, counts):
        logger.warning("%s: %s", name, message)
    announce(proof_line(root, prepared, counts, by_shape))


def refuse_unproven(message: str, recipe: Recipe) -> None:
    """Raise `FP8BackendError`, or warn where the recipe's `on_unproven` says so."""
    if recipe.on_unproven == "raise":
        raise FP8BackendError(f'{message}; on_unproven="warn" trains on regardless')
    warnings.warn(message, stacklevel=3)


def proof_line(root: nn.Module, prepared: Prepared, counts: dict[str, ProductCounts], by_shape: bool = False) -> str:
    """Such as `native:dynamic: 28/29 Linear, 94 % of weight FLOPs in FP8, fprop dgrad wgrad (bf16-exact)`."""
    kind_of = {product.name: product.kind for product in prepared.report.products}
    ran = [layer for layer, count in counts.items() if _ran(count)]
    flops = count_flops(root, prepared, counts)
    share = words.share(flops.in_fp8 / flops.needed if flops.needed else 0.0)
    kinds = [kind for kind in KINDS if any(getattr(count, kind) for count in counts.values())]
    layers = prepared.compute.converted_layers(root)
    engines = sorted({prepared.compute.engine(layers[layer]) for layer in ran})
    high = prepared.compute.high_precision_products(prepared.recipe)
    notes = "+".join(engines) + (f"; {' '.join(high)} in high precision by recipe" if high else "")
    notes += "; compiled, counted by shape" if by_shape else ""
    notes += f"; {words.counted(len(flops.uncounted), CONVOLUTION)} not counted" if flops.uncounted else ""
    layers_in_fp8 = _counted([kind_of.get(layer, "Linear") for layer in ran], Counter(kind_of.values()))
    return f"{prepared.recipe.name}: {layers_in_fp8}, {share} of weight FLOPs in FP8, {' '.join(kinds)} ({notes})"


def _counted(ran: list[str], kinds: Counter[str]) -> str:
    """Such as `28/29 Linear, 4/4 experts (beside 2 convolutions)`, from the kinds of weights that ran and of all."""
    parts, beside = [], dict(kinds)
    for title, counted in _COUNTED.items():
        number = sum(beside.pop(kind, 0) for kind in counted)
        if number:
            parts.append(f"{sum(kind in counted for kind in ran)}/{number} {title}")
    others = [
        words.counted(number, _BESIDE[kind]) if kind in _BESIDE else f"{number} {kind}"
        for kind, number in beside.items()
    ]
    return ", ".join(parts or ["0/0 Linear"]) + (f" (beside {', '.join(others)})" if others else "")


def _ran(count: ProductCounts) -> bool:
    return any(getattr(count, kind) for kind in KINDS)


def _nothing_ran(counts: list[dict[str, ProductCounts]]) -> bool:
    return not any(_ran(count) for root_counts in counts for count in root_counts.values())


def _shortcomings(root: nn.Module, prepared: Prepared, counts: dict[str, ProductCounts]) -> list[str]:
    """What a reader of the proof must know: layers that took no part, and gradients that were made some other way."""
    idle = [name for name, count in counts.items() if not _ran(count)]
    messages = [f"layers without products: {words.listed(idle)}"] if idle else []
    if WGRAD not in prepared.compute.high_precision_products(prepared.recipe):
        layers = prepared.compute.converted_layers(root)
        ran = {name: count for name, count in counts.items() if _ran(count)}
        if odd := [name for name, count in ran.items() if not count.wgrad and layers[name].weight.grad is not None]:
            messages.append(f"layers whose weight gradient did not come from an FP8 product: {words.listed(odd)}")
    return messages
