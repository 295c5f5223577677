"""Count FP8 products with PyTorch's profiler, for backends without counters.

A product inside the range of a layer's forward is an fprop (recomputed, if the range began in a
backward). A product in a backward function belongs to the layer whose forward created the function,
by autograd's sequence number; dgrad comes before wgrad. Products of compiled code are told apart by
their shapes. The profiler is `torch.autograd.profiler_legacy`, one for each thread: Kineto, one for
the process, crashes if two threads start it.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch._C import _autograd, _profiler
from torch.autograd import ProfilerConfig, ProfilerState
from torch.autograd import profiler as torch_profiler
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from ..compute.counts import DGRAD, FPROP, RECOMPUTED, WGRAD, ProductCounts
from ..errors import FP8BackendError
from ..torch_tools.backward_end import inside_backward
from ..torch_tools.modules import TemporaryHook, is_traced, renumber

try:
    import resource
except ImportError:  # Windows
    resource = None

PRODUCT_EVENTS = frozenset({"aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_mm.out"})
"""Operators that multiply FP8 matrices."""

_BACKWARD_FUNCTION = 1  # torch::RecordScope::BACKWARD_FUNCTION
_MODE = "PythonDispatchMode"
_SUBCLASS = "PythonSubclass"
_COMPILED = "Torch-Compiled Region"
_ENGINE = "autograd::engine::"
_MARK = "fp8_backends:"
_AGAIN = ":again"
_OF_COMPILED_CODE = -1
MAXIMUM_GROWTH = 4 << 30
"""Bytes by which the process may grow during a profile: PyTorch keeps 3 kB for each operator until
the profile ends. A step that needs more for itself is profiled once it has grown."""


class Layer(NamedTuple):
    """A converted layer to count for."""

    name: str
    module: nn.Module
    backward_kinds: tuple[str, ...]
    """The FP8 products of its backward, in order: dgrad and wgrad, less the ones in high
    precision."""
    results: dict[str, ProductCounts]
    """Receives its counts, by name, when the profile stops."""


class ProductProfile:
    """One profiled stretch of training in one thread, with which it ends: `start`, some steps,
    `stop`."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.complete = False
        self.by_shape = False
        """After `stop`: some layers were counted by shape (compiled code)."""
        self._recording: Callable[[], _Recording | None] = lambda: None

    @property
    def running(self) -> bool:
        return self._recording() is not None

    @property
    def runs_here(self) -> bool:
        """Return True in the thread that it runs in, the only one that can stop it."""
        return self.running and self._recording() is _thread.recording

    def start(self, begun: nn.Module | None = None) -> bool:
        """Begin to count. Return False if another profiler is active in this thread: PyTorch allows
        one. Raises `FP8BackendError` if this version of PyTorch has no profiler for a thread.

        `begun`: the root whose forward begins now; it may be a layer. Its profile ends another of
        this thread without a result, and notes no shapes, so it cannot count compiled code: during
        compilation, shapes fail for some tensors.
        """
        if begun is not None:
            give_way()
        if not hasattr(_autograd, "_enable_profiler_legacy"):
            raise FP8BackendError(
                f"FP8 cannot be proven with torch {torch.__version__}, which has no profiler of a "
                "thread: install another version of torch, or a newer fp8-backends"
            )
        if _profiler_runs():
            return False
        _give_way_to_others()
        marks = _Marks([layer.module for layer in self.layers])
        _thread.recording = _Recording(_hooked(marks), shapes=begun is None)
        if begun in marks.index_of:
            marks(begun, ())
        self._recording = weakref.ref(_thread.recording)
        # of a model that is forgotten after its last forward or an error in backward
        weakref.finalize(self.layers[0].module, _end, self._recording).atexit = False
        return True

    def restart(self) -> None:
        """Discard the counts so far."""
        if self.runs_here:
            self._recording().restart()

    def stop(self) -> None:
        """End, and write counts to `results`, if they are of this thread and do not lack a compiled
        step's shapes."""
        recording = self._recording() if self.runs_here else None
        self.abandon()
        if recording is None:
            return
        counts, compiled = self._count(_read_events(recording.records))
        if compiled and not recording.shapes:
            return
        if compiled:
            self.by_shape = _count_by_shape(self.layers, counts, compiled)
        for layer, layer_counts in zip(self.layers, counts, strict=True):
            layer.results[layer.name] = layer_counts
        self.complete = True

    def abandon(self) -> None:
        """End without a result."""
        _end(self._recording)
        self._recording = lambda: None

    __del__ = abandon

    def _count(self, events: list[_Event]) -> tuple[list[ProductCounts], list[tuple[bool, list]]]:
        """Return each layer's counts in eager code, and (made by a backward, operand shapes) of
        compiled products."""
        counts = [ProductCounts() for _ in self.layers]
        compiled = []
        # places of the forwards that created autograd's functions; later events win: an operator
        # without gradients shows the number of the next function
        creators = {
            (event.thread, event.sequence_nr): _place(event, {})[0]
            for event in events
            if event.sequence_nr >= 0
            and event.scope != _BACKWARD_FUNCTION
            and not event.name.startswith(_ENGINE)
        }
        products_of: Counter = Counter()  # products of each backward function so far
        for product in _products(events):
            index, parent = _place(product, creators)
            if index == _OF_COMPILED_CODE:
                in_backward = any(
                    parent.scope == _BACKWARD_FUNCTION for parent in _parents(product)
                )
                compiled.append((in_backward, product.shapes()))
            elif index is not None and parent.scope != _BACKWARD_FUNCTION:
                counts[index].add(RECOMPUTED if parent.name.endswith(_AGAIN) else FPROP)
            elif index is not None:
                kinds = self.layers[index].backward_kinds[products_of[parent] :]
                products_of[parent] += 1
                if kinds:
                    counts[index].add(kinds[0])
        return counts, compiled


class _Recording:
    """PyTorch's running profiler of this thread, held only by the thread, and the hooks to remove
    at its end."""

    def __init__(self, hooks: list[RemovableHandle], shapes: bool) -> None:
        self.hooks = hooks
        self.shapes = shapes
        self.given_up = False
        """The profile ended in another thread or inside a backward: end when the thread next looks
        at it."""
        self.records: list[list] = []
        """After `end`: the events of each thread that took part."""
        self.most_memory = _peak_memory() + MAXIMUM_GROWTH
        self._thread: int | None = None
        self._enable()
        self._thread = threading.get_ident()

    def _enable(self) -> None:
        # on the host, without memory, stacks, FLOPs and modules
        switches = (self.shapes, False, False, False, False)
        _autograd._enable_profiler_legacy(
            ProfilerConfig(ProfilerState.CPU, *switches, _profiler._ExperimentalConfig())
        )

    def restart(self) -> None:
        _autograd._disable_profiler_legacy()
        self._enable()

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if self._thread == threading.get_ident():  # else a forked or ending process clears up
            self._thread = None
            self.records = _autograd._disable_profiler_legacy()

    __del__ = end


def _end(reference: Callable[[], _Recording | None]) -> None:
    """End a recording without a result, or leave that to its thread."""
    recording = reference()
    # a profiler stopped inside a backward comes back at its end, for good
    if recording is not None and recording is _thread.recording and not inside_backward():
        give_way()
    elif recording is not None:
        recording.given_up = True


class _Thread(threading.local):
    """The recording of this thread."""

    recording: _Recording | None = None


_thread = _Thread()


def give_way() -> None:
    """End this thread's profile without a result, for another profiler to start."""
    if _thread.recording is not None:
        _thread.recording.end()
        _thread.recording = None


def foreign_profiler_runs() -> bool:
    """Return True if another package's profiler is active in this thread."""
    return _thread.recording is None and _profiler_runs()


def _profiler_runs() -> bool:
    if _thread.recording is not None and _thread.recording.given_up:
        give_way()
    return _autograd._profiler_enabled()


def _give_way_to_others() -> None:
    """Let other profilers start, bound our memory, and leave ours behind in forked processes. Once
    in a process."""
    start = torch_profiler._run_on_profiler_start
    if hasattr(start, "gives_way"):
        return

    def give_way_first() -> None:
        give_way()
        start()

    give_way_first.gives_way = True
    torch_profiler._run_on_profiler_start = give_way_first
    gc.callbacks.append(_give_way_to_memory)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=give_way)


def _give_way_to_memory(phase: str, info: object) -> None:
    """End a profile that outgrew its step. No operator tells how many events PyTorch holds, so the
    collector of Python's garbage asks."""
    recording = _thread.recording
    if recording is not None and _peak_memory() > recording.most_memory and not inside_backward():
        give_way()


def _peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes; 0 on Windows."""
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _hooked(marks: _Marks) -> list[RemovableHandle]:
    # one hook under one number in all modules: a compiler guards on both, and like modules keep
    # sharing its code
    handles = []
    for module in marks.index_of:
        before = module.register_forward_pre_hook(marks)
        after = module.register_forward_hook(marks, always_call=True)
        first = handles[:2] or (before, after)
        renumber(before, first[0].id, module._forward_pre_hooks)
        renumber(after, first[1].id, module._forward_hooks, module._forward_hooks_always_called)
        handles += before, after
    return handles


class _Marks(TemporaryHook):
    """Forward hook before and after layers: open and close a layer's range. Inert in a copied
    model."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.index_of = weakref.WeakKeyDictionary(
            {module: index for index, module in enumerate(modules)}
        )
        self.open: defaultdict[tuple[int, int], list[record_function]] = defaultdict(list)
        """Ranges by layer and thread: another thread may evaluate the model."""

    def __call__(self, module: nn.Module, args, *output) -> None:
        if is_traced():
            return
        index = self.index_of[module]
        ranges = self.open[index, threading.get_ident()]
        if not output:
            ranges.append(record_function(f"{_MARK}{index}{_AGAIN if inside_backward() else ''}"))
            ranges[-1].__enter__()
        elif ranges:
            ranges.pop().__exit__(None, None, None)


class _Event:
    """One operator, range or function of a profile, and the event around it."""

    __slots__ = ("name", "thread", "forward_thread", "sequence_nr", "scope", "shapes", "parent")

    def __init__(self, record, parent: _Event | None) -> None:
        self.name = record.name()
        self.scope = record.scope()
        self.sequence_nr = record.sequence_nr()
        self.thread = record.thread_id()
        self.forward_thread = record.fwd_thread_id()
        self.shapes = record.shapes  # read for few
        self.parent = parent


def _read_events(records: list[list]) -> list[_Event]:
    """Return the profile's events with their parents, in order for each thread."""
    events = []
    open_by_thread = defaultdict(dict)
    for record in itertools.chain.from_iterable(records):
        # by handle, the innermost last
        around: dict[int, _Event] = open_by_thread[record.thread_id()]
        if record.kind() == "push":
            parent = next(reversed(around.values()), None)
            around[record.handle()] = event = _Event(record, parent)
            events.append(event)
        elif record.kind() == "pop":
            around.pop(record.handle(), None)  # none, if it began before the profile
    return events


def _parents(event: _Event) -> Iterator[_Event]:
    while (event := event.parent) is not None:
        yield event


def _products(events: list[_Event]) -> list[_Event]:
    """Return the products that ran, not the ones inside another or answered for a compiler's fake
    tensors."""
    multiplied = {
        parent for event in events if event.name in PRODUCT_EVENTS for parent in _parents(event)
    }
    answered = {event.parent for event in events if event.name == _MODE} - multiplied
    return [event for event in events if _is_product(event) and event not in answered]


def _is_product(event: _Event) -> bool:
    names = [parent.name for parent in _parents(event)]
    # TorchAO with `emulate=True`: a plain product by an FP8 tensor subclass for its own product
    emulated = event.name == "aten::mm" and names[:2] == [_SUBCLASS, "aten::mm"]
    if not emulated and event.name not in PRODUCT_EVENTS:
        return False
    # a compiler's mode answers products of FP8 tensors itself; other modes run the operator of
    # their subclass
    nearer = names[: names.index(_SUBCLASS)] if _SUBCLASS in names else names
    return _MODE not in nearer and PRODUCT_EVENTS.isdisjoint(names)


def _place(
    event: _Event, creators: dict[tuple[int, int], int | None]
) -> tuple[int | None, _Event | None]:
    """Return an event's layer index, _OF_COMPILED_CODE or None, and the range or backward function
    around it."""
    compiled = None
    for parent in _parents(event):
        if parent.name.startswith(_MARK):
            return int(parent.name.removeprefix(_MARK).removesuffix(_AGAIN)), parent
        if parent.scope == _BACKWARD_FUNCTION:
            index = creators.get((parent.forward_thread, parent.sequence_nr))
            return (compiled if index is None else index), parent
        if parent.name.startswith(_COMPILED):
            compiled = _OF_COMPILED_CODE
    return compiled, None


def _count_by_shape(
    layers: list[Layer], counts: list[ProductCounts], products: list[tuple[bool, list]]
) -> bool:
    """Share the products of compiled code out among the layers of each shape. Return True if any
    fits."""
    members = defaultdict(list)
    for index, layer in enumerate(layers):
        trains = layer.module.weight.requires_grad
        kinds = tuple(kind for kind in layer.backward_kinds if trains or kind != WGRAD)
        members[layer.module.in_features, layer.module.out_features, kinds].append(index)
    tokens = defaultdict(set)  # rows that went through layers of a shape
    for in_backward, (a, b, *_) in products:
        if not in_backward and len(a) == len(b) == 2:
            tokens[tuple(b)].update({a[0], a[0] + -a[0] % 16})
    candidates = []
    for in_backward, (a, b, *_) in products:
        if len(a) == len(b) == 2 and a[1] == b[0]:
            fitting = [
                (shape, kind)
                for shape in members
                for kind in _fitting(shape, in_backward, a, b, tokens)
            ]
            gradients = [place for place in fitting if place[1] != RECOMPUTED]
            candidates.append(gradients or fitting)
    totals: Counter = Counter()
    for fitting in sorted(filter(None, candidates), key=len):
        # of products that look alike (as many tokens as features), the one with fewer counts so far
        totals[min(fitting, key=lambda place: totals[place] / len(members[place[0]]))] += 1
    for (shape, kind), total in totals.items():
        share, rest = divmod(total, len(members[shape]))
        for place, index in enumerate(members[shape]):
            counts[index].add(kind, share + (place < rest))
    return bool(totals)


def _fitting(shape: tuple, in_backward: bool, a, b, tokens: dict[tuple, set]) -> list[str]:
    """List the kinds of products of a layer shape (in, out, kinds) with operands of the sizes a [m,
    k] and b [k, n]."""
    n_in, n_out, kinds = shape
    if not in_backward:
        return [FPROP] if tuple(b) == (n_in, n_out) else []
    rows = tokens.get((n_in, n_out), ())
    fitting = []
    if WGRAD in kinds and (a[0], b[1]) == (n_out, n_in) and a[1] in rows:
        fitting.append(WGRAD)  # before dgrad, which a compiler drops if the input needs no gradient
    if DGRAD in kinds and tuple(b) == (n_out, n_in) and a[0] in rows:
        fitting.append(DGRAD)
    if not fitting and tuple(b) == (n_in, n_out) and a[0] in rows:
        fitting.append(RECOMPUTED)
    return fitting
