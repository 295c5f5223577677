"""Counts FP8 products with PyTorch's profiler, for backends that do not count by themselves.

Each converted layer's forward is marked with a `record_function` range. A product `aten::_scaled_mm` inside a range
is a forward product of that layer (a recomputed one when the range was opened inside a backward pass). A product
inside a backward function belongs to the layer whose forward made that function: the profiler gives both the same
sequence number. In a backward function the input gradient comes first, then the weight gradient.

Compiled code keeps neither ranges nor functions. Its products are told apart by their shapes, and the layers of one
shape share what was counted for that shape.

The profiler is the one of PyTorch's two that belongs to a thread (`torch.autograd.profiler_legacy`): any number of
threads have one at a time, and autograd's threads add to that of the thread whose backward they run. The other one,
Kineto, is one for the process, and crashes when two threads start it.
"""

from __future__ import annotations

import itertools
import os
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

from ..errors import FP8BackendError
from ..numerics.engine import inside_backward
from ..numerics.modules import TemporaryHook, is_traced, renumber
from .counts import DGRAD, FPROP, RECOMPUTED, WGRAD, ProductCounts

PRODUCTS = frozenset({"aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_mm.out"})
"""Operators that multiply FP8 matrices."""

_BACKWARD_FUNCTION = 1  # torch::RecordScope::BACKWARD_FUNCTION
_MODE, _SUBCLASS = "PythonDispatchMode", "PythonSubclass"
_COMPILED, _ENGINE = "Torch-Compiled Region", "autograd::engine::"
_MARK, _AGAIN = "fp8_backends:", ":again"


class Layer(NamedTuple):
    """A converted layer to count for."""

    name: str
    module: nn.Module
    backward_kinds: tuple[str, ...]
    """The products of its backward that run in FP8, in order: dgrad and wgrad, less those in high precision."""
    results: dict[str, ProductCounts]
    """Where its counts go, by name, when the profile stops."""


class ProductProfile:
    """One profiled stretch of training in one thread: `start`, some steps, `stop`. Dropped while it runs, it ends by
    itself, and so it does with its thread."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.complete = False
        self.by_shape = False
        """After `stop`: whether some layers were counted by shape (compiled code)."""
        self._recording: weakref.ref[_Recording] | None = None
        self._end: weakref.finalize | None = None

    @property
    def running(self) -> bool:
        return self._recording is not None and self._recording() is not None

    @property
    def runs_here(self) -> bool:
        """Whether it runs in this thread, which alone can stop it."""
        return self.running and self._recording() is _thread.recording

    def start(self, begun: nn.Module | None = None) -> bool:
        """Begin to count. False when another profiler is active in this thread: PyTorch has one at a time.

        Args:
            begun: the root whose forward begins now; it may be a layer. Its profile ends another `ProductProfile` of
                this thread without a result, such as one whose model was given up. It notes no shapes, by which
                compiled code is counted: while code is compiled that fails for some tensors, and PyTorch writes a
                warning for each.

        Raises:
            FP8BackendError: this version of PyTorch has no profiler of a thread.
        """
        if begun is not None:
            give_way()
        if not hasattr(_autograd, "_enable_profiler_legacy"):
            raise FP8BackendError(
                f"FP8 cannot be proven with torch {torch.__version__}, which has no profiler of a thread: install "
                "another version of torch, or a newer fp8-backends"
            )
        if _profiler_runs():
            return False
        _give_way_to_others()
        marks = _Marks([layer.module for layer in self.layers])
        _thread.recording = _Recording(_hooked(marks), shapes=begun is None)
        if begun in marks.index_of:
            marks(begun, ())
        self._recording = weakref.ref(_thread.recording)
        self._end = weakref.finalize(self, _end, self._recording)
        return True

    def restart(self) -> None:
        """Forget what was counted so far."""
        if self.runs_here:
            self._recording().restart()

    def stop(self) -> None:
        """End counting and write each layer's counts into its `results`. It ends without a result in another thread
        than that of `start`, and where compiled code ran and no shapes were noted."""
        recording = self._recording() if self.runs_here else None
        self.abandon()
        if recording is None:
            return
        counts, compiled = self._count(_read_events(recording.records))
        if compiled and not recording.shapes:
            return
        if compiled:
            self.by_shape = _count_by_shape(self.layers, counts, compiled)
        for layer, own in zip(self.layers, counts, strict=True):
            layer.results[layer.name] = own
        self.complete = True

    def abandon(self) -> None:
        """End without a result."""
        if self._end is not None:
            self._end()
            self._recording = self._end = None

    def _count(self, events: list[_Event]) -> tuple[list[ProductCounts], list[tuple[bool, list]]]:
        """The products of each layer in eager code, and those of compiled code: whether inside a backward, and the
        shapes of their operands."""
        counts = [ProductCounts() for _ in self.layers]
        compiled = []
        function_is_compiled = _compiled_functions(events)
        layer_of = _layers_by_sequence_number(events)
        products_of: Counter = Counter()  # products of each backward function so far
        imitated = _imitated_products(events)
        for product in (each for each in events if _is_product(each) and each not in imitated):
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
            elif _is_compiled(product, backward, function_is_compiled):  # any other belongs to another model
                in_backward = any(parent.scope == _BACKWARD_FUNCTION for parent in _parents(product))
                compiled.append((in_backward, product.shapes()))
        return counts, compiled


class _Recording:
    """PyTorch's profiler of this thread, which runs from now until `end`. Only the thread holds on to it: they end
    together.

    Args:
        hooks: to be removed at its end.
    """

    def __init__(self, hooks: list[RemovableHandle], shapes: bool) -> None:
        self.hooks, self.shapes = hooks, shapes
        self.given_up = False
        """Whether the profile ended in another thread, or inside a backward: the recording ends when its thread next
        meets it."""
        self.records: list[list] = []
        """After `end`: the events of each thread that took part."""
        self._thread: int | None = None
        _autograd._enable_profiler_legacy(_configuration(shapes))
        self._thread = threading.get_ident()

    def restart(self) -> None:
        _autograd._disable_profiler_legacy()
        _autograd._enable_profiler_legacy(_configuration(self.shapes))

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if self._thread == threading.get_ident():  # else a process that is forked, or that ends, clears up
            self._thread = None
            self.records = _autograd._disable_profiler_legacy()

    __del__ = end


class _Thread(threading.local):
    """The recording that runs in this thread."""

    recording: _Recording | None = None


_thread = _Thread()


def _configuration(shapes: bool) -> ProfilerConfig:
    # on the host, and neither memory nor stacks, FLOPs or modules
    switches = (shapes, False, False, False, False)
    return ProfilerConfig(ProfilerState.CPU, *switches, _profiler._ExperimentalConfig())


def give_way() -> None:
    """End the profile that runs in this thread without a result, since another profiler is about to start."""
    if _thread.recording is not None:
        _thread.recording.end()
        _thread.recording = None


def foreign_profiler_runs() -> bool:
    """Whether a profiler is active in this thread that is not this package's."""
    return _thread.recording is None and _profiler_runs()


def _profiler_runs() -> bool:
    if _thread.recording is not None and _thread.recording.given_up:
        give_way()
    return _autograd._profiler_enabled()


def _end(reference: weakref.ref[_Recording]) -> None:
    recording = reference()
    if recording is None:
        return
    # autograd brings a profiler that is stopped inside a backward back when it ends, and nothing would stop it then
    if recording is _thread.recording and not inside_backward():
        give_way()
    else:
        recording.given_up = True


class _GivesWay:
    """What PyTorch calls when a profiler starts, after ours has ended in this thread: it would not start beside it."""

    def __init__(self, start: Callable[[], None]) -> None:
        self.start = start

    def __call__(self) -> None:
        give_way()
        self.start()


def _give_way_to_others() -> None:
    """Once in a process: let other profilers start, and leave ours behind in processes that are forked."""
    if not isinstance(torch_profiler._run_on_profiler_start, _GivesWay):
        torch_profiler._run_on_profiler_start = _GivesWay(torch_profiler._run_on_profiler_start)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=give_way)


def _hooked(marks: _Marks) -> list[RemovableHandle]:
    # one hook under one number in all modules: a compiler guards on both, and like modules go on sharing its code
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
    """Forward hook before and after layers that opens and closes a layer's range. In a copied model it is inert."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.index_of = weakref.WeakKeyDictionary({module: index for index, module in enumerate(modules)})
        self.open: defaultdict[tuple[int, int], list[record_function]] = defaultdict(list)
        """Ranges by layer and thread: what records in one may evaluate in another."""

    def __call__(self, module: nn.Module, args, *output) -> None:
        if is_traced():
            return
        index = self.index_of[module]
        around = self.open[index, threading.get_ident()]
        if output:
            if around:
                around.pop().__exit__(None, None, None)
            return
        range_ = record_function(f"{_MARK}{index}{_AGAIN if inside_backward() else ''}")
        range_.__enter__()
        around.append(range_)


class _Event:
    """One operator, range or function of a profile, with the event that it happened in."""

    __slots__ = ("name", "thread", "forward_thread", "sequence_nr", "scope", "shapes", "parent")

    def __init__(self, record, parent: _Event | None) -> None:
        self.name, self.scope, self.sequence_nr = record.name(), record.scope(), record.sequence_nr()
        self.thread, self.forward_thread = record.thread_id(), record.fwd_thread_id()
        self.shapes = record.shapes  # read for few
        self.parent = parent


def _read_events(records: list[list]) -> list[_Event]:
    """The profile's events with their parents, in order for each thread."""
    events, open_by_thread = [], defaultdict(dict)
    for record in itertools.chain.from_iterable(records):
        around: dict[int, _Event] = open_by_thread[record.thread_id()]  # by handle, the innermost last
        if record.kind() == "push":
            parent = next(reversed(around.values()), None)
            around[record.handle()] = event = _Event(record, parent)
            events.append(event)
        elif record.kind() == "pop":
            around.pop(record.handle(), None)  # none, if it began before the profile
    return events


def _read_mark(name: str) -> tuple[int, bool]:
    return int(name.removeprefix(_MARK).removesuffix(_AGAIN)), name.endswith(_AGAIN)


def _is_product(event: _Event) -> bool:
    if event.name not in PRODUCTS and not _is_emulated_product(event):
        return False
    around = [parent.name for parent in _parents(event)]
    # a compiler's mode answers the products of FP8 tensors itself; others run the operator of their subclass
    answered = around[: around.index(_SUBCLASS)] if _SUBCLASS in around else around
    return _MODE not in answered and PRODUCTS.isdisjoint(around)


def _imitated_products(events: list[_Event]) -> set[_Event]:
    """Those that a mode answered without a product: the modes of compilers do, for fake tensors."""
    answered = {event.parent for event in events if event.name == _MODE}
    made = {parent for event in events if event.name in PRODUCTS for parent in _parents(event)}
    return answered - made


def _is_emulated_product(event: _Event) -> bool:
    """A plain product made by an FP8 tensor subclass for its own product: TorchAO with `emulate=True`."""
    subclass = event.parent if event.name == "aten::mm" else None
    around = subclass.parent if subclass is not None and subclass.name == _SUBCLASS else None
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


def _compiled_functions(events: list[_Event]) -> dict[tuple[int, int], bool]:
    """By (thread, sequence number) of the functions that forwards made: whether compiled code made them."""
    numbered = (each for each in events if each.sequence_nr >= 0 and each.scope != _BACKWARD_FUNCTION)
    return {
        (event.thread, event.sequence_nr): _is_inside_compiled_code(event)
        for event in numbered  # later ones win, as above
        if not event.name.startswith(_ENGINE)
    }


def _is_compiled(product: _Event, backward: _Event | None, function_is_compiled: dict[tuple[int, int], bool]) -> bool:
    """Whether compiled code made a product, or the forward whose backward function `backward` is."""
    made = backward is not None and function_is_compiled.get((backward.forward_thread, backward.sequence_nr), False)
    return made or _is_inside_compiled_code(product)


def _is_inside_compiled_code(event: _Event) -> bool:
    return any(parent.name.startswith(_COMPILED) for parent in _parents(event))


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
