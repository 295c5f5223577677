"""Profile one training step of layers whose backend has no counters (`ao`).

The profile runs from the forward of a microbatch to the next one's. If any of it is compiled, or
another profiler is active or announced (`proof.profiler_elsewhere`), a later step is profiled, from
optimizer step to optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..announcement import logger
from ..compute.counts import DGRAD, WGRAD
from ..compute.interface import Compute
from ..compute.refusals import refuse_transforms
from ..convert.conversion import Prepared
from .profiling import Layer, ProductProfile, foreign_profiler_runs


class StepProfile:
    """The profile of the first step, begun anew until one is complete."""

    def __init__(self, compute: Compute, layers: Iterable[tuple[str, nn.Module, Prepared]]) -> None:
        self.layers = []
        for name, layer, prepared in layers:
            high = compute.high_precision_products(prepared.recipe)
            kinds = tuple(kind for kind in (DGRAD, WGRAD) if kind not in high)
            self.layers.append(Layer(name, layer, kinds, prepared.profiled))
        self.profile: ProductProfile | None = None
        self.began: nn.Module | None = None
        """Root whose forward began the profile, with its layers' gradients at that time."""
        self.gradients: list = []
        self.overlapping = False
        """True if a forward began before the last one's backward: gradients may be an earlier
        forward's."""
        self.waits = 0
        """Number of running blocks of code with their own profiler."""

    @property
    def runs_elsewhere(self) -> bool:
        """Return True if another thread profiles."""
        return self.profile is not None and self.profile.running and not self.profile.runs_here

    @property
    def by_shape(self) -> bool:
        return self.profile is not None and self.profile.by_shape

    def before_forward(self, root: nn.Module) -> None:
        """Begin with the first training forward, and stop before the second one."""
        if self.profile is not None and not self.profile.runs_here:
            return  # complete, interrupted, or another thread's: the optimizer's step decides
        for layer in self.layers:
            refuse_transforms(layer.module.weight)
        grads = [layer.module.weight.grad for layer in self.layers]
        # changes as each arrives
        gradients = [None if grad is None else (id(grad), grad._version) for grad in grads]
        if self.began is root:
            arrived = [
                new is not None and new != old
                for new, old in zip(gradients, self.gradients, strict=True)
            ]
            self.overlapping |= not any(arrived)
            if all(arrived) and not self.overlapping:
                self.profile.stop()  # the first of several microbatches is enough
            elif all(arrived) or not any(arrived):
                self.profile.restart()  # no backward: no training, or a pipeline runs it later
                self.gradients = gradients
            return
        if self.profile is None:
            self._start(begun=root)
        if self.profile is not None and self.began is None:
            self.began = root
            self.gradients = gradients

    def begin_anew(self) -> None:
        """Abandon an incomplete profile."""
        if self.profile is not None and not self.profile.complete:
            self.profile.abandon()
            self.profile = self.began = None

    def completes(self, is_first_step: bool) -> bool:
        """Return True if the profile is complete at an optimizer step. Else start one that lasts
        until the next."""
        if self.profile is not None and self.profile.running:
            self.profile.stop()
        if self.profile is not None and self.profile.complete:
            return True
        self.profile = self.began = None
        self._start()
        if self.profile is None and is_first_step and (self.waits or foreign_profiler_runs()):
            logger.warning(
                "another profiler is active: the proof that FP8 runs waits until it has stopped"
            )
        return False

    def _start(self, begun: nn.Module | None = None) -> None:
        """Start a profile, if no other runs. One begun by a root's forward may contain
        compilation."""
        if self.waits:
            return
        profile = ProductProfile(self.layers)
        if profile.start(begun):
            self.profile = profile
