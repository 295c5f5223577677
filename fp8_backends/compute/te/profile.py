"""Count the FP8 products of `te` layers, which do not count themselves.

TransformerEngine's linear layers multiply by one Python function, `general_gemm`, and experts by `general_grouped_gemm`
(all in one call). While a profile runs, these functions are wrapped where the layers look them up: a call with only FP8
operands is a product, and its layout tells the kind. It belongs to the layer whose forward or autograd node runs.
(docs/patches.rst lists alternatives.)
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformer_engine.pytorch.module.grouped_linear as te_grouped_linear_module
import transformer_engine.pytorch.module.linear as te_linear_module

from ...errors import FP8BackendError
from ...numerics.engine import inside_backward
from ..counts import DGRAD, FPROP, RECOMPUTED, WGRAD, ProductCounts
from ..profiling import Layer
from .layer import ModelState
from .recipes import VERSION

_PLACES = (
    (te_linear_module, "general_gemm"),
    (te_grouped_linear_module, "general_grouped_gemm"),
)
"""The functions that multiply, where TransformerEngine's linear layers look them up."""
_lock = threading.RLock()
"""Held while these functions are wrapped or restored. Reentrant: garbage collection may drop a profile inside."""
_KIND_OF_LAYOUT = {"TN": FPROP, "NN": DGRAD, "NT": WGRAD}


class TEProductProfile:
    """One watched stretch of training, with the interface of `profiling.ProductProfile`. Any number can run at once.
    Dropped while it runs, it ends."""

    by_shape = False

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.running = self.complete = False
        self._states: set[ModelState] = {layer.module.te_state for layer in layers}
        self._watcher = _Watcher([layer.module for layer in layers])
        self._end: weakref.finalize | None = None

    @property
    def runs_here(self) -> bool:
        return self.running  # any thread can stop it

    def start(self, begun: torch.nn.Module | None = None) -> bool:
        self.restart()
        _watch(self._watcher, self._states)
        self._end = weakref.finalize(self, _unwatch, self._watcher, self._states)
        self.running = True
        return True

    def restart(self) -> None:
        self._watcher.counts = [ProductCounts() for _ in self.layers]

    def stop(self) -> None:
        self.abandon()
        for layer, counts in zip(self.layers, self._watcher.counts, strict=True):
            layer.results[layer.name] = counts
        self.complete = True

    def abandon(self) -> None:
        if self.running:
            self.running = False
            self._end()


class _Place(threading.local):
    """The running layer of a profile in this thread."""

    forward: int | None = None
    backward: tuple[int | None, set[str]] = (None, set())
    """The layer whose autograd node runs, and its products to come."""


class _Watcher:
    """Counts for one profile. Layers (`ModelState.watchers`), autograd nodes and `CountedGemm` notify it."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.index = {id(module): index for index, module in enumerate(modules)}
        self.counts: list[ProductCounts] = []
        self.place = _Place()

    def enter(self, layer: torch.nn.Module) -> None:
        self.place.forward = self.index.get(id(layer))

    def leave(self) -> None:
        self.place.forward = None

    def follow(self, layer: torch.nn.Module, output: torch.Tensor) -> None:
        index = self.index.get(id(layer))
        if output.grad_fn is not None and index is not None:
            output.grad_fn.register_prehook(functools.partial(self._begin_backward, index))

    def _begin_backward(self, index: int, gradients: Any) -> None:
        self.place.backward = (index, {DGRAD, WGRAD})

    def product(self, kind: str) -> None:
        if kind == FPROP:
            if self.place.forward is not None:
                self.counts[self.place.forward].add(RECOMPUTED if inside_backward() else FPROP)
            return
        index, due = self.place.backward
        if kind in due:
            due.remove(kind)
            self.counts[index].add(kind)


class CountedGemm:
    """Wrap a function that multiplies while profiles run, and notify them of each product of FP8 operands."""

    def __init__(self, multiply: Callable) -> None:
        self.multiply = multiply
        self.watchers: list[_Watcher] = []

    def __call__(self, a, b, *args, **kwargs):
        if _is_fp8(a) and _is_fp8(b):
            for watcher in tuple(self.watchers):
                watcher.product(_KIND_OF_LAYOUT[kwargs.get("layout", "TN")])
        return self.multiply(a, b, *args, **kwargs)


def _watch(watcher: _Watcher, states: Iterable[ModelState]) -> None:
    if missing := [name for module, name in _PLACES if not hasattr(module, name)]:
        raise FP8BackendError(
            f"FP8 cannot be proven with TransformerEngine {VERSION}, whose linear layers do not multiply by "
            f"{missing[0]}: install another version of transformer_engine, or a newer fp8-backends"
        )
    with _lock:
        for module, name in _PLACES:
            multiply = getattr(module, name)
            counted = multiply if isinstance(multiply, CountedGemm) else CountedGemm(multiply)
            counted.watchers.append(watcher)
            setattr(module, name, counted)
        for state in states:
            state.watchers.append(watcher)


def _unwatch(watcher: _Watcher, states: Iterable[ModelState]) -> None:
    with _lock:
        for state in states:
            state.watchers.remove(watcher)
        for module, name in _PLACES:
            counted = getattr(module, name)
            counted.watchers.remove(watcher)
            if not counted.watchers:
                setattr(module, name, counted.multiply)


def _is_fp8(operand: Any) -> bool:
    """Return True for a quantized tensor of TransformerEngine, which has an FP8 dtype in all versions, or a list of
    them (grouped products)."""
    parts = operand if isinstance(operand, (list, tuple)) else [operand]
    return all(getattr(part, "_fp8_dtype", None) is not None for part in parts)
