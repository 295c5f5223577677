"""Statistics of FP8 tensors while a model trains: every so many optimizer steps, for each converted layer.

A sampled step has forward hooks on the layers, which the other steps have not. They ask the backend how the layer casts
what passes it (`Compute.cast_of`), count on the device what the cast does, and change nothing. At the end of the step
all numbers come to the host at once, and rank 0 adds a line of JSON to a file: of its own tensors, of its own batch.

All microbatches of the step count together, for a weight the first. What activation checkpointing computes again counts
once. Layers that run in compiled code cannot be watched there: `torch.compile` steps aside for a sampled step, on every
rank, and with it the fused kernels whose roundings differ in the last bits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...announcement import is_main_process
from ...compute.interface import Compute
from ...numerics.encoding import amax_of
from ...numerics.engine import inside_backward
from ...numerics.formats import FORMAT_OF, FORMATS, ROOT8
from ...numerics.modules import CONVERSION, TemporaryHook, is_traced
from ...numerics.scaled_tensor import ScaledTensor
from ...numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from ...numerics.sharded_tensor import local_part
from ...numerics.statistics import Statistics, read, statistics_of, statistics_of_codes
from ...words import listed, share
from ..auditing import steps_of
from ..conversion import PREPARED, prepared_roots
from .guard import guard_of

if TYPE_CHECKING:
    from ...recipes.handlers import Recipe
    from ..conversion import Prepared

logger = logging.getLogger("fp8_backends")

NAMES = {INPUT: "input", WEIGHT: "weight", GRAD_OUTPUT: "grad_output"}
"""Names of what a layer casts, in records."""
STORED = ("gradient", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of what a level stores in few bits, beside weights."""

NOT_FINITE = "inf or NaN"
MANY_SATURATED, MANY_FLUSHED = 0.01, 0.05
NOTABLE: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    NOT_FINITE: lambda entry: not is_finite(entry),
    f"over {share(MANY_SATURATED)} clipped": lambda entry: (entry.get("saturated") or 0.0) > MANY_SATURATED,
    f"over {share(MANY_FLUSHED)} flushed to zero": lambda entry: (entry.get("flushed") or 0.0) > MANY_FLUSHED,
}
"""What is worth a line in the log, told by a tensor's entry in a record. A clipped value is among the largest of its
tensor, and a flushed one is below a hundred-thousandth of the largest; both are rare where the scales fit: with a scale
by the tensor's own amax nothing is clipped, and a bell-shaped tensor has one value of 10,000 flushed."""

Report = Callable[[dict[str, float], int], None]
"""What takes the summary of a sample, and its step."""


def watch(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Sample the prepared models that this optimizer trains, where the recipe has a `monitor_every`. A model that two
    optimizers train is sampled by the steps of the first. Repeated, the latest recipe says what is sampled."""
    monitor = monitor_of(optimizer)
    if monitor is not None:
        monitor.recipe = recipe
    if not recipe.monitor_every:
        return
    roots = [root for model in models for root in prepared_roots(model)]
    roots = [root for root in roots if root[2].observed.optimizers()[:1] == [optimizer]]
    if monitor is None:
        monitor = Monitor(recipe)
        optimizer.register_step_post_hook(monitor)
    for prefix, root, prepared in roots:
        monitor.add(prefix, root, prepared)


def monitor_of(optimizer: torch.optim.Optimizer) -> Monitor | None:
    """What samples the models that this optimizer trains, if anything does."""
    hooks = optimizer._optimizer_step_post_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, Monitor)), None)


class Monitor:
    """Step post-hook of an optimizer: samples the steps whose turn it is.

    The first step is left to the proof, and where something kept a sample from its step the next one is sampled.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.report: Report | None = None
        """What else takes the summary of each sample."""
        self.steps = 0
        """Steps that this optimizer has taken since it is watched."""
        self.due = max(recipe.monitor_every, 2)
        self.sample: Sample | None = None
        self.roots: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        """The prepared roots, and where they lie in the model that the user has."""
        self.notable: set[str] = set()
        """What the log has named already."""

    def add(self, prefix: str, root: nn.Module, prepared: Prepared) -> None:
        self.roots[root] = prefix

    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        if is_traced():
            return
        self.steps += 1
        if self.sample is not None:
            self._finish(optimizer)
        if self.recipe.monitor_every and self.steps + 1 >= self.due:
            self._begin(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        prepared = [(root, root.__dict__[PREPARED]) for root in self.roots if PREPARED in root.__dict__]
        if not prepared:  # all were restored
            return
        self.sample = Sample([Watched(root, each) for root, each in prepared], is_main_process())
        # an optimizer that goes before its next step leaves nothing behind
        gone = weakref.finalize(optimizer, self.sample.close)
        gone.atexit = False
        self.sample.closing.callback(gone.detach)

    def _finish(self, optimizer: torch.optim.Optimizer) -> None:
        sample, self.sample = self.sample, None
        self.due = self.steps + self.recipe.monitor_every
        sample.close()
        watched = any(each.root.__dict__.get(PREPARED) is each.prepared for each in sample.watched)
        if not (sample.records and watched and self.recipe.monitor_every):  # restored, or switched off meanwhile
            return
        began, made = time.perf_counter(), steps_of(optimizer)
        guard = guard_of(optimizer)
        step = self.steps if made is None else made + (0 if guard is None else guard.skipped)
        found = sample.numbers()
        seen = {name for name, _ in found}
        record = {
            "step": step,
            "recipe": self.recipe.name,
            "casts": ", ".join(dict.fromkeys(each.prepared.compute.casts_by for each in sample.watched)),
            "tensors": _by_layer(found),
            "not_seen": sorted({name for each in sample.watched for name in each.layers} - seen),
            "seconds": round(sample.seconds + time.perf_counter() - began, 4),
        }
        self._write(record)
        self._name_notable(record)
        if self.report is not None and (values := summary(record)):
            self.report(values, step)

    def _write(self, record: dict[str, Any]) -> None:
        path = Path(self.recipe.monitor_file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                # after a line that a kill or a full disk has cut, a new one
                begin = "\n" if _ends_within_a_line(path) else ""
                file.write(f"{begin}{json.dumps(record, allow_nan=False)}\n".encode())
        except OSError as error:  # such as a full disk, which is no reason to stop a training
            self._say_once("file", f"statistics cannot be written: {error}")

    def _name_notable(self, record: Mapping[str, Any]) -> None:
        """Name the tensors that lose much, in one line, each once."""
        parts = []
        for what, is_notable in NOTABLE.items():
            names = [label for label, _, entry in tensors_of(record) if is_notable(entry)]
            new = [name for name in names if f"{what} {name}" not in self.notable]
            self.notable.update(f"{what} {name}" for name in new)
            origin = f", first {new[0]}" if what == NOT_FINITE and len(new) > 1 else ""
            parts += [f"{what}: {listed(new)}{origin}"] if new else []
        if parts:
            see = f"fp8-backends monitor {self.recipe.monitor_file} shows all"
            logger.warning("%s, step %d: %s (%s)", self.recipe.name, record["step"], "; ".join(parts), see)

    def _say_once(self, key: str, message: str) -> None:
        if key not in self.notable:
            self.notable.add(key)
            logger.warning("%s: %s", self.recipe.name, message)


class Watched:
    """A prepared root and its FP8 layers."""

    def __init__(self, root: nn.Module, prepared: Prepared) -> None:
        self.root, self.prepared, self.layers = root, prepared, prepared.compute.converted_layers(root)

    @property
    def runs_compiled(self) -> bool:
        """Whether some layer took no part in the first step that Python saw."""
        return "torch._dynamo" in sys.modules and not self.layers.keys() <= self.prepared.observed.work.keys()


class Sample:
    """The hooks of one sampled step, and what they counted.

    Args:
        records: whether this rank counts. The others only take the same way through the step.
    """

    def __init__(self, watched: list[Watched], records: bool) -> None:
        self.watched, self.records = watched, records
        self.trains = False
        """Whether a training forward of a root is running: reentrant checkpointing turns gradients off inside."""
        self.seconds = 0.0
        """Host seconds that the hooks took."""
        self.counted: dict[tuple[str, str], Statistics] = {}
        """By layer and tensor."""
        self.closing = contextlib.ExitStack()
        if any(each.runs_compiled for each in watched):
            stance = torch.compiler.set_stance("force_eager")
            self.closing.callback(stance.__exit__, None, None, None)
        for each in watched if records else ():
            self._hook(each)

    def _hook(self, watched: Watched) -> None:
        root, compute = watched.root, watched.prepared.compute
        handles = [
            root.register_forward_pre_hook(Hook(self._begin_forward)),
            root.register_forward_hook(Hook(self._end_forward), always_call=True),
        ]
        for name, layer in watched.layers.items():
            hook = Hook(functools.partial(self._after_layer, name, compute))
            # before FSDP2 takes the gathered weight away
            handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
        for handle in handles:
            self.closing.callback(handle.remove)

    def _begin_forward(self, *_) -> None:
        self.trains = torch.is_grad_enabled()

    def _end_forward(self, *_) -> None:
        self.trains = False

    def _after_layer(self, name: str, compute: Compute, layer: nn.Module, args, kwargs, output: Any) -> None:
        if getattr(layer, "_is_replica", False) or not isinstance(output, torch.Tensor):  # DataParallel has many
            return
        if CONVERSION not in layer.__dict__:  # restored meanwhile
            return
        if (self.trains or torch.is_grad_enabled()) and not inside_backward():
            self._count(name, compute, layer, INPUT, next(iter((*args, *kwargs.values()))))
            if (name, NAMES[WEIGHT]) not in self.counted:
                self._count(name, compute, layer, WEIGHT, layer.weight)
        if output.requires_grad and not hasattr(output, "when_backward"):  # of deferred logits nobody makes a gradient
            output.register_hook(functools.partial(self._count, name, compute, layer, GRAD_OUTPUT))

    @torch.no_grad()
    def _count(self, name: str, compute: Compute, layer: nn.Module, tensor: int, values: torch.Tensor) -> None:
        if tensor != WEIGHT:
            values = local_part(values)  # under tensor parallelism this rank's, whose own amax may be a smaller one
        if not self.records or not values.numel():
            return
        began = time.perf_counter()
        with torch.autocast(values.device.type, enabled=False):
            cast = compute.cast_of(layer, tensor, values)
            if cast is not None:
                counted, key = statistics_of(cast), (name, NAMES[tensor])
                self.counted[key] = self.counted[key].merged(counted) if key in self.counted else counted
        self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """Take the hooks away. Repeating it does nothing."""
        self.closing.close()

    @torch.no_grad()
    def numbers(self) -> dict[tuple[str, str], Statistics]:
        """All that was counted, with what a level stores, by layer and tensor. Waits for the device."""
        for each in self.watched:
            optimizers = each.prepared.observed.optimizers()
            for name, layer in each.layers.items():
                for what, tensor in _stored_of(layer.weight, optimizers).items():
                    self.counted[name, what] = _of_stored(tensor)
        return dict(zip(self.counted, read(list(self.counted.values())), strict=True))


class Hook(TemporaryHook):
    """A hook of a sampled step. Inert in a copied or unpickled model, and in compiled code."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args) -> None:
        if not is_traced():
            self.call(*args)


def _stored_of(weight: torch.Tensor, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, ScaledTensor]:
    """What a level stores of this weight in few bits: this rank's part, as the step has left it."""
    found = {"gradient": weight.grad}
    for optimizer in optimizers:
        state = optimizer.state.get(weight, {})
        found |= {name: state[name] for name in STORED if name in state}
    local = {name: local_part(tensor) for name, tensor in found.items() if tensor is not None}
    return {name: t for name, t in local.items() if isinstance(t, ScaledTensor) and t._data.dtype in FORMAT_OF}


def _of_stored(tensor: ScaledTensor) -> Statistics:
    fmt, amax = FORMATS[tensor._data.dtype], amax_of(tensor.dequantize(torch.float32))
    return statistics_of_codes(tensor._data, tensor._scale_inv, amax.sqrt() if fmt is ROOT8 else amax, fmt)


def _ends_within_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        return file.read(1) not in (b"", b"\n")


# Records


def _by_layer(found: Mapping[tuple[str, str], Statistics]) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = {}
    for (name, tensor), numbers in found.items():
        tensors.setdefault(name, {})[tensor] = _entry(numbers, stored=tensor in STORED)
    return tensors


def _entry(numbers: Statistics, stored: bool) -> dict[str, Any]:
    """The numbers of one tensor, ready for JSON; None for what is not finite, or says nothing where values are not."""
    low, high = _finite(numbers.lowest_scale), _finite(numbers.highest_scale)
    if numbers.lowest_scale > numbers.highest_scale:  # nothing but zeros
        low = high = None
    entry: dict[str, Any] = {
        "format": numbers.fmt.name,
        "amax": _finite(numbers.amax),
        "scale": high if low == high else [low, high],
        "elements": numbers.elements,
        "counted": numbers.counted,
        "zeros" if stored else "flushed": round(numbers.flushed_share, 8) if numbers.is_finite else None,
        "at_max" if stored else "saturated": round(numbers.saturated_share, 8) if numbers.is_finite else None,
    }
    if not stored:
        entry["sqnr_db"] = None if numbers.sqnr_db is None else round(numbers.sqnr_db, 2)
    held = [index for index, count in enumerate(numbers.binades) if count and numbers.is_finite]
    first, end = (held[0], held[-1] + 1) if held else (0, 0)
    top = numbers.fmt.max_exponent + 1
    return entry | {"exponents": [top - end + 1, top - first], "binades": numbers.binades[first:end][::-1]}


def _finite(number: float) -> float | None:
    # as many digits as tell FP32 numbers apart, and no -0
    return float(f"{number:.9g}") + 0.0 if math.isfinite(number) else None


def is_finite(entry: Mapping[str, Any]) -> bool:
    """Whether the values and the scales of a tensor were finite."""
    return None not in (entry["amax"], entry.get("saturated", entry.get("at_max")))


def tensors_of(record: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """The label, the name and the entry of each tensor of a record, in the order of a step: forward, backward, states.
    The first that is not finite is the likely origin."""
    found = [
        (f"{layer or '(root)'} {name}", name, entry)
        for layer, tensors in record["tensors"].items()
        for name, entry in tensors.items()
    ]
    forward = [each for each in found if each[1] in (NAMES[INPUT], NAMES[WEIGHT])]
    stored = [each for each in found if each[1] in STORED]
    return [*forward, *(each for each in reversed(found) if each[1] == NAMES[GRAD_OUTPUT]), *stored]


def summary(record: Mapping[str, Any]) -> dict[str, float]:
    """The worst of a record in four numbers: `fp8/not_finite`, the number of tensors that hold an inf or a NaN,
    `fp8/worst_sqnr` in dB, and the shares `fp8/max_saturated` and `fp8/max_flushed`. The last three are NaN where a
    cast is not finite. Empty where nothing was cast."""
    tensors = tensors_of(record)
    casts = [entry for _, name, entry in tensors if name not in STORED]
    if not casts:
        return {}
    values = {"fp8/not_finite": float(sum(not is_finite(entry) for *_, entry in tensors))}
    if not all(map(is_finite, casts)):
        return values | dict.fromkeys(("fp8/worst_sqnr", "fp8/max_saturated", "fp8/max_flushed"), math.nan)
    values |= {f"fp8/max_{name}": max(entry[name] for entry in casts) for name in ("saturated", "flushed")}
    sqnr = [entry["sqnr_db"] for entry in casts if entry["sqnr_db"] is not None]
    return values | ({"fp8/worst_sqnr": min(sqnr)} if sqnr else {})
