"""Counts FP8 products with PyTorch's profiler, for backends that do not count by themselves.

Each converted layer's forward is marked with a `record_function` range. A product `aten::_scaled_mm` inside a range
is a forward product of that layer (a recomputed one when the range was opened inside a backward pass). A product
inside a backward function belongs to the layer whose forward made that function: the profiler gives both the same
sequence number. In a backward function the input gradient comes first, then the weight gradient.

Compiled code keeps neither ranges nor functions. Its products are told apart by their shapes, and the layers of one
shape share what was counted for that shape.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile, record_function
from torch.utils.hooks import RemovableHandle

from ..numerics.modules import inert_hook
from .counts import DGRAD, FPROP, RECOMPUTED, WGRAD, ProductCounts, inside_backward

PRODUCTS = frozenset({"aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_mm.out"})
"""Operators that multiply FP8 matrices."""

_BACKWARD_FUNCTION = 1  # torch::RecordScope::BACKWARD_FUNCTION
_TRACING = ("PythonDispatchMode", "(dynamo_timed)")  # a compiler running operators on fake tensors
_MARK, _AGAIN = "fp8_backends:", ":again"
_BEGIN = "fp8_backends, from here on"


class Layer(NamedTuple):
    """A converted layer to count for."""

    name: str
    module: nn.Module
    backward_kinds: tuple[str, ...]
    """The products of its backward that run in FP8, in order: dgrad and wgrad, less those in high precision."""
    results: dict[str, ProductCounts]
    """Where its counts go, by name, when the profile stops."""


class ProductProfile:
    """One profiled stretch of training: `start`, some steps, `stop`. Dropped while it runs, it ends by itself."""

    def __init__(self, layers: list[Layer], keep: bool = False) -> None:
        self.layers = layers
        self.keep = keep
        """Never let another one take over."""
        self.running = self.complete = False
        self.by_shape = False
        """After `stop`: whether some layers were counted by shape (compiled code)."""
        self._profiler: profile | None = None
        self._end: weakref.finalize | None = None

    def start(self, take_over: bool = False) -> bool:
        """Begin to count. False when another profiler is active: PyTorch has one at a time.

        `take_over` ends another `ProductProfile` without a result, such as one whose model was given up. Its profiler
        goes on in this one; what it has seen so far does not count.

        No profiler may be started where one was stopped just before. Hooks of a forward under DDP and of an
        optimizer's step run inside a `record_function` range. When that range ends and a profiler is active, PyTorch
        notes the time in the event of the profiler that saw it begin: in memory that belongs to somebody else by then.
        """
        taken, active = None, torch._C._autograd._profiler_enabled()
        if take_over and (other := _running_profile()) is not None and not other.keep:
            taken = other._hand_over() if active else other.abandon()  # somebody else's profiler has ended it
        elif active:
            return False
        self._profiler = taken or profile(use_kineto=True, record_shapes=True)
        hooks = _hooked([layer.module for layer in self.layers])
        if taken is None:
            with _without_profiler_messages():
                self._profiler.__enter__()
        else:
            self.restart()
        self._end = weakref.finalize(self, _end, self._profiler, hooks)
        self.running = True
        _thread.profile = weakref.ref(self)
        return True

    def restart(self) -> None:
        """Forget what was counted so far."""
        with record_function(_BEGIN):
            pass

    def _hand_over(self) -> profile:
        """End without a result, with the profiler left running."""
        _, _, (profiler, hooks), _ = self._end.detach()
        for hook in hooks:
            hook.remove()
        self.running, self._profiler = False, None
        return profiler

    def stop(self) -> None:
        """End counting and write each layer's counts into its `results`."""
        profiler = self._profiler
        self.abandon()
        for layer, counts in zip(self.layers, self._count(_read_events(profiler)), strict=True):
            layer.results[layer.name] = counts
        self.complete = True

    def abandon(self) -> None:
        """End without a result."""
        if self.running:
            self.running, self._profiler = False, None
            self._end()

    def _count(self, events: list[_Event]) -> list[ProductCounts]:
        counts = [ProductCounts() for _ in self.layers]
        unattributed: list[tuple[bool, list]] = []  # whether inside a backward, operand shapes
        layer_of = _layers_by_sequence_number(events)
        products_of: Counter = Counter()  # products of each backward function so far
        for product in filter(_is_real_product, events):
            range_, backward = _enclosing(product)
            index = backward and layer_of.get((backward.forward_thread, backward.sequence_nr))
            if range_ is not None:
                index, again = _read_mark(range_.name)
                counts[index].add(RECOMPUTED if again else FPROP)
            elif index is not None:
                kinds = self.layers[index].backward_kinds
                order, products_of[backward] = products_of[backward], products_of[backward] + 1
                if order < len(kinds):
                    counts[index].add(kinds[order])
            else:
                in_backward = any(parent.scope == _BACKWARD_FUNCTION for parent in _parents(product))
                unattributed.append((in_backward, product.shapes()))
        if unattributed:
            self.by_shape = _count_by_shape(self.layers, counts, unattributed)
        return counts


class _Thread(threading.local):
    """The profile that was started last in this thread, since PyTorch has one profiler a thread."""

    profile: weakref.ref[ProductProfile] | None = None


_thread = _Thread()


def _running_profile() -> ProductProfile | None:
    started = _thread.profile and _thread.profile()
    return started if started and started.running else None


def end_running_profile() -> None:
    """End a profile of this thread without a result, such as one whose first step has failed: what it saw of tensors
    keeps their storage from being swapped."""
    if (running := _running_profile()) is not None and not running.keep:
        running.abandon()


def foreign_profiler_runs() -> bool:
    """Whether a profiler is active that is not this package's."""
    return torch._C._autograd._profiler_enabled() and _running_profile() is None


def _end(profiler: profile, hooks: list) -> None:
    for hook in hooks:
        hook.remove()
    with _without_profiler_messages():
        profiler.__exit__(None, None, None)


def _hooked(modules: list[nn.Module]) -> list[RemovableHandle]:
    # one hook under one number in all modules: a compiler guards on both, and like modules go on sharing its code
    marks, handles = _Marks(modules), []
    for module in modules:
        before = module.register_forward_pre_hook(marks)
        after = module.register_forward_hook(marks, always_call=True)
        first = handles[:2] or (before, after)
        _renumber(before, first[0].id, module._forward_pre_hooks)
        _renumber(after, first[1].id, module._forward_hooks, module._forward_hooks_always_called)
        handles += before, after
    return handles


def _renumber(handle: RemovableHandle, number: int, *hooks: dict) -> None:
    for each in hooks:
        each[number] = each.pop(handle.id)
    handle.id = number


class _Marks:
    """Forward hook before and after layers that opens and closes a layer's range. In a copied model it is inert."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.index_of = weakref.WeakKeyDictionary({module: index for index, module in enumerate(modules)})
        self.open: defaultdict[int, list[record_function]] = defaultdict(list)

    def __call__(self, module: nn.Module, args, *output) -> None:
        if torch.compiler.is_compiling():
            return
        index = self.index_of[module]
        if output:
            if self.open[index]:
                self.open[index].pop().__exit__(None, None, None)
            return
        range_ = record_function(f"{_MARK}{index}{_AGAIN if inside_backward() else ''}")
        range_.__enter__()
        self.open[index].append(range_)

    def __reduce__(self):
        return inert_hook, ()


class _Event:
    """One operator, range or function of a profile, with the event that it happened in."""

    __slots__ = ("name", "start", "end", "thread", "forward_thread", "sequence_nr", "scope", "shapes", "parent")

    def __init__(self, event) -> None:
        self.name, self.start, self.end = event.name(), event.start_ns(), event.end_ns()
        self.thread, self.forward_thread = event.start_thread_id(), event.fwd_thread_id()
        self.sequence_nr, self.scope = event.sequence_nr(), event.scope()
        self.shapes = event.shapes  # read for few
        self.parent: _Event | None = None


def _read_events(profiler: profile) -> list[_Event]:
    """The profile's events on the host in the order of time, with their parents (`profile.function_events` has them
    too, at thirty times the cost)."""
    raw = profiler.kineto_results.events()
    began = max((e.start_ns() for e in raw if e.name() == _BEGIN), default=0)
    on_host = (e for e in raw if e.device_type() == DeviceType.CPU and e.start_thread_id() == e.end_thread_id())
    events = [_Event(e) for e in on_host if e.start_ns() >= began]
    stacks: dict[int, list[_Event]] = defaultdict(list)
    events.sort(key=lambda event: (event.start, -event.end))
    for event in events:
        around = stacks[event.thread]
        while around and event.end > around[-1].end:
            around.pop()
        event.parent = around[-1] if around else None
        around.append(event)
    return events


def _read_mark(name: str) -> tuple[int, bool]:
    return int(name.removeprefix(_MARK).removesuffix(_AGAIN)), name.endswith(_AGAIN)


def _is_real_product(event: _Event) -> bool:
    if event.name not in PRODUCTS and not _is_emulated_product(event):
        return False
    return not any(p.name in PRODUCTS or any(t in p.name for t in _TRACING) for p in _parents(event))


def _is_emulated_product(event: _Event) -> bool:
    """A plain product made by an FP8 tensor subclass for its own product: TorchAO with `emulate=True`."""
    subclass = event.parent if event.name == "aten::mm" else None
    around = subclass.parent if subclass is not None and subclass.name == "PythonSubclass" else None
    return around is not None and around.name == "aten::mm"


def _enclosing(event: _Event) -> tuple[_Event | None, _Event | None]:
    """The nearest marked range or the nearest backward function around an event, whichever is nearer."""
    for parent in _parents(event):
        if parent.name.startswith(_MARK):
            return parent, None
        if parent.scope == _BACKWARD_FUNCTION:
            return None, parent
    return None, None


def _layers_by_sequence_number(events: list[_Event]) -> dict[tuple[int, int], int]:
    """The layers by (thread, sequence number) of the functions that their forwards made."""
    layers = {}  # later ones win: a function without gradients shows a number that the next one with gradients takes
    for event in events:
        if event.sequence_nr >= 0 and event.scope != _BACKWARD_FUNCTION:
            range_, _ = _enclosing(event)
            if range_ is not None:
                layers[event.thread, event.sequence_nr] = _read_mark(range_.name)[0]
    return layers


def _parents(event: _Event) -> Iterator[_Event]:
    while (event := event.parent) is not None:
        yield event


class _Shape(NamedTuple):
    in_features: int
    out_features: int
    backward_kinds: tuple[str, ...]


def _count_by_shape(layers: list[Layer], counts: list[ProductCounts], products: list[tuple[bool, list]]) -> bool:
    """Share the products of compiled code out among the layers of each shape; whether any could be placed."""
    members = defaultdict(list)
    for index, layer in enumerate(layers):
        trains = layer.module.weight.requires_grad
        kinds = tuple(kind for kind in layer.backward_kinds if trains or kind != WGRAD)
        members[_Shape(layer.module.in_features, layer.module.out_features, kinds)].append(index)
    tokens = defaultdict(set)  # rows that went through layers of a shape
    for in_backward, (a, b, *_) in products:
        if not in_backward and len(a) == len(b) == 2:
            tokens[tuple(b)].update({a[0], a[0] + -a[0] % 16})
    candidates = []
    for in_backward, (a, b, *_) in products:
        if len(a) == len(b) == 2 and a[1] == b[0]:
            fitting = [(shape, kind) for shape in members for kind in _fitting(shape, in_backward, a, b, tokens)]
            gradients = [place for place in fitting if place[1] != RECOMPUTED]
            candidates.append(gradients or fitting)
    totals: Counter = Counter()
    for fitting in sorted(filter(None, candidates), key=len):
        # where two products look alike (as many tokens as features), the one that was seen less often
        totals[min(fitting, key=lambda place: totals[place] / len(members[place[0]]))] += 1
    for (shape, kind), total in totals.items():
        share, rest = divmod(total, len(members[shape]))
        for place, index in enumerate(members[shape]):
            counts[index].add(kind, share + (place < rest))
    return bool(totals)


def _fitting(shape: _Shape, in_backward: bool, a, b, tokens: dict[tuple, set]) -> list[str]:
    """Which products of layers of a shape have operands of the sizes a [m, k] and b [k, n]."""
    n_in, n_out, kinds = shape
    if not in_backward:
        return [FPROP] if tuple(b) == (n_in, n_out) else []
    rows = tokens.get((n_in, n_out), ())
    fitting = []
    if WGRAD in kinds and (a[0], b[1]) == (n_out, n_in) and a[1] in rows:
        fitting.append(WGRAD)  # before dgrad, which a compiler drops where the input needs no gradient
    if DGRAD in kinds and tuple(b) == (n_out, n_in) and a[0] in rows:
        fitting.append(DGRAD)
    if not fitting and tuple(b) == (n_in, n_out) and a[0] in rows:
        fitting.append(RECOMPUTED)
    return fitting


@contextlib.contextmanager
def _without_profiler_messages() -> Iterator[None]:
    """Drop the lines that the profiler's C++ part writes to stderr when it starts and stops (`USDT:...`)."""
    try:
        sys.stderr.flush()
        stderr = os.dup(2)
    except (OSError, ValueError, AttributeError):
        yield  # no stderr to keep clean
        return
    with tempfile.TemporaryFile() as caught:
        try:
            os.dup2(caught.fileno(), 2)
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            other = b"".join(line for line in caught if not line.startswith(b"USDT:"))
            if other:
                os.write(2, other)
