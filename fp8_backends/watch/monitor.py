"""Sample statistics of FP8 tensors in training: every `monitor_every` optimizer steps, for each
converted layer.

A sampled step has forward hooks on the layers; other steps have none. The hooks ask the backend for
each tensor's cast (`Compute.cast_of`), count its effects on the device, and change nothing. When
the step ends, all numbers come to the host at once, and rank 0 appends a line of JSON to a file,
for its own tensors and batch.

All microbatches of the step count together, weights once; recomputation by activation checkpointing
does not count. Compiled code has no hooks: on every rank `torch.compile` steps aside for a sampled
step, and with it fused kernels whose rounding differs in the last bits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..announcement import is_main_process, logger
from ..compute.interface import Compute
from ..convert import features
from ..convert.conversion import PREPARED, Prepared, Root
from ..formats.formats import FORMAT_OF, FORMATS, ROOT8
from ..formats.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from ..recipes.handlers import Recipe
from ..tensors.encoding import amax_of
from ..tensors.scaled_tensor import ScaledTensor
from ..tensors.sharded_tensor import local_part
from ..tensors.statistics import Counts, Statistics, read, statistics_of, statistics_of_codes
from ..torch_tools.backward_end import inside_backward
from ..torch_tools.modules import CONVERSION, EagerHook, is_traced
from ..torch_tools.optimizers import steps_of
from ..words import listed, share

OPERAND_NAMES = {INPUT: "input", WEIGHT: "weight", GRAD_OUTPUT: "grad_output"}
"""Names of cast tensors in records."""
SAMPLED_STATES = ("gradient", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of tensors stored by levels in few bits, besides weights."""
FIGURES = ("share", "guard_faults", "guard_skipped")
"""Figures of a record besides its tensors: FP8's share of the weight FLOPs, and the counts of a
guard so far."""

NOT_FINITE = "inf or NaN"
MANY_SATURATED, MANY_FLUSHED = 0.01, 0.05
NOTABLE: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    NOT_FINITE: lambda entry: not is_finite(entry),
    f"over {share(MANY_SATURATED)} clipped": lambda entry: (
        (entry.get("saturated") or 0.0) > MANY_SATURATED
    ),
    f"over {share(MANY_FLUSHED)} flushed to zero": lambda entry: (
        (entry.get("flushed") or 0.0) > MANY_FLUSHED
    ),
}
"""Entries of a record that deserve a line in the log. Clipped values are among the largest of a
tensor, flushed ones below a hundred-thousandth of the largest; both are rare with fitting scales: a
scale from the tensor's own amax clips nothing, and flushes one value of 10,000 in a bell-shaped
tensor."""


def watch(
    roots: Iterable[Root],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    report: Callable[[dict[str, float], int], None] | None = None,
) -> None:
    """Sample the prepared models of this optimizer every `monitor_every` steps. Repeated calls
    replace the recipe."""
    monitor = monitor_of(optimizer)
    if monitor is not None:
        monitor.recipe = recipe
        monitor.due = min(monitor.due, monitor.steps + recipe.monitor_every)
    if not recipe.monitor_every:
        return
    if monitor is None:
        monitor = Monitor(recipe)
        optimizer.register_step_post_hook(monitor)
    monitor.report = report or monitor.report
    monitor.roots.update(
        (root, None)
        for _, root, prepared in roots
        if prepared.observed.optimizers()[:1] == [optimizer]
    )


def monitor_of(optimizer: torch.optim.Optimizer) -> Monitor | None:
    """Return the monitor of an optimizer, if any."""
    hooks = optimizer._optimizer_step_post_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, Monitor)), None)


class Monitor:
    """Sample every `monitor_every` steps of an optimizer: a step post-hook.

    The proof has the first step. If a step yields no sample, the next one is sampled.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.report: Callable[[dict[str, float], int], None] | None = None
        """Called with the summary and the step of each sample."""
        self.steps = 0
        """Steps of this optimizer in this process."""
        self.due = max(recipe.monitor_every, 2)
        self.sample: Sample | None = None
        self.roots: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.logged: set[str] = set()
        """Findings named in the log."""

    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        if is_traced():
            return
        self.steps += 1
        if self.sample is not None:
            self._finish(optimizer)
        if self.recipe.monitor_every and self.steps + 1 >= self.due:
            self._begin(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        roots = [
            (root, root.__dict__[PREPARED]) for root in self.roots if PREPARED in root.__dict__
        ]
        if not roots:  # all were restored
            return
        watched = [
            Watched(root, prepared, prepared.compute.converted_layers(root))
            for root, prepared in roots
        ]
        self.sample = Sample(watched, is_main_process())
        # close the sample of an optimizer that is deleted before its next step
        gone = weakref.finalize(optimizer, self.sample.close)
        gone.atexit = False
        self.sample.closing.callback(gone.detach)

    def _finish(self, optimizer: torch.optim.Optimizer) -> None:
        sample, self.sample = self.sample, None
        self.due = self.steps + self.recipe.monitor_every
        sample.close()
        is_prepared = any(
            watched.root.__dict__.get(PREPARED) is watched.prepared for watched in sample.watched
        )
        # restored, or switched off meanwhile
        if not (sample.records and is_prepared and self.recipe.monitor_every):
            return
        began, counted_steps, skipped = (
            time.perf_counter(),
            steps_of(optimizer),
            getattr(optimizer, "fp8_skipped", 0),
        )
        step = self.steps if counted_steps is None else counted_steps + skipped
        tensors: dict[str, dict[str, Any]] = {}
        for (name, tensor), numbers in sample.numbers().items():
            tensors.setdefault(name, {})[tensor] = _entry(numbers, stored=tensor in SAMPLED_STATES)
        record = {
            "step": step,
            "recipe": self.recipe.name,
            "casts": ", ".join(
                dict.fromkeys(watched.prepared.compute.casts_by for watched in sample.watched)
            ),
            "tensors": tensors,
            "not_seen": sorted(
                {name for watched in sample.watched for name in watched.layers} - tensors.keys()
            ),
            "share": _share(sample.watched),
            "seconds": round(sample.seconds + time.perf_counter() - began, 4),
        }
        if guard := features.loaded("guard"):
            record |= guard.counts_of(optimizer)
        self._write(record)
        self._name_notable(record)
        if self.report is not None and (values := summary(record)):
            self.report(values, step)

    def _write(self, record: dict[str, Any]) -> None:
        path = Path(self.recipe.monitor_file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 1, 0))
                # start a new line after one cut by a kill or a full disk
                begin = "" if file.read(1) in (b"", b"\n") else "\n"
                file.write(f"{begin}{json.dumps(record, allow_nan=False)}\n".encode())
        except OSError as error:  # such as a full disk, no reason to stop a training
            if "file" not in self.logged:
                self.logged.add("file")
                logger.warning("%s: statistics cannot be written: %s", self.recipe.name, error)

    def _name_notable(self, record: Mapping[str, Any]) -> None:
        """Log the notable tensors in one line, each tensor once."""
        parts = []
        for finding, is_notable in NOTABLE.items():
            names = [label for label, _, entry in tensors_of(record) if is_notable(entry)]
            new = [name for name in names if f"{finding} {name}" not in self.logged]
            self.logged.update(f"{finding} {name}" for name in new)
            origin = f", first {new[0]}" if finding == NOT_FINITE and len(new) > 1 else ""
            parts += [f"{finding}: {listed(new)}{origin}"] if new else []
        if parts:
            see = f"fp8-backends monitor {self.recipe.monitor_file} shows all"
            logger.warning(
                "%s, step %d: %s (%s)", self.recipe.name, record["step"], "; ".join(parts), see
            )


class Watched(NamedTuple):
    root: nn.Module
    prepared: Prepared
    layers: Mapping[str, nn.Module]
    """The root's FP8 layers."""


class Sample:
    """Hooks and counts of one sampled step. Ranks without `records` only take the same way through
    the step."""

    def __init__(self, watched: list[Watched], records: bool) -> None:
        self.watched, self.records = watched, records
        self.trains = False
        """A training forward of a root runs: reentrant checkpointing turns gradients off inside."""
        self.seconds = 0.0
        """Host seconds taken by the hooks."""
        self.counted: dict[tuple[str, str], Counts] = {}
        """By layer and tensor."""
        self.closing = contextlib.ExitStack()
        # a layer missing from the first step in Python ran in compiled code
        missing = any(
            not each.layers.keys() <= each.prepared.observed.work.keys() for each in watched
        )
        if missing and "torch._dynamo" in sys.modules:
            stance = torch.compiler.set_stance("force_eager")
            self.closing.callback(stance.__exit__, None, None, None)
        for root, prepared, layers in watched if records else ():
            hook = EagerHook(self._around_forward)
            handles = [
                root.register_forward_pre_hook(hook),
                root.register_forward_hook(hook, always_call=True),
            ]
            for name, layer in layers.items():
                hook = EagerHook(functools.partial(self._after_layer, name, prepared.compute))
                # before FSDP2 frees the gathered weight
                handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
            for handle in handles:
                self.closing.callback(handle.remove)

    def _around_forward(self, root: nn.Module, args, *output) -> None:
        self.trains = not output and torch.is_grad_enabled()

    def _after_layer(
        self, name: str, compute: Compute, layer: nn.Module, args, kwargs, output: Any
    ) -> None:
        # DataParallel has replicas
        if getattr(layer, "_is_replica", False) or not isinstance(output, torch.Tensor):
            return
        if CONVERSION not in layer.__dict__:  # restored meanwhile
            return
        if (self.trains or torch.is_grad_enabled()) and not inside_backward():
            self._count(name, compute, layer, INPUT, next(iter((*args, *kwargs.values()))))
            if (name, OPERAND_NAMES[WEIGHT]) not in self.counted:
                self._count(name, compute, layer, WEIGHT, layer.weight)
        if output.requires_grad and not hasattr(output, "when_backward"):  # else it may have none
            output.register_hook(functools.partial(self._count, name, compute, layer, GRAD_OUTPUT))

    @torch.no_grad()
    def _count(
        self, name: str, compute: Compute, layer: nn.Module, tensor: int, values: torch.Tensor
    ) -> None:
        if tensor != WEIGHT:
            # under tensor parallelism, whose amax may be smaller than the whole's
            values = local_part(values)
        if not values.numel():
            return
        began = time.perf_counter()
        with torch.autocast(values.device.type, enabled=False):
            cast = compute.cast_of(layer, tensor, values)
            if cast is not None:
                counts, key = statistics_of(cast), (name, OPERAND_NAMES[tensor])
                self.counted[key] = (
                    self.counted[key].merged(counts) if key in self.counted else counts
                )
        self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        self.closing.close()

    @torch.no_grad()
    def numbers(self) -> dict[tuple[str, str], Statistics]:
        """Return all numbers by layer and tensor, tensors stored by a level included. Waits for the
        device."""
        for watched in self.watched:
            optimizers = watched.prepared.observed.optimizers()
            for name, weight in ((name, layer.weight) for name, layer in watched.layers.items()):
                tensors = {"gradient": weight.grad}
                for state in (optimizer.state.get(weight, {}) for optimizer in optimizers):
                    tensors |= {
                        tensor: state[tensor] for tensor in SAMPLED_STATES if tensor in state
                    }
                for tensor, stored in tensors.items():
                    # this rank's part, after the step
                    stored = None if stored is None else local_part(stored)
                    if isinstance(stored, ScaledTensor) and stored.codes.dtype in FORMAT_OF:
                        fmt, amax = (
                            FORMATS[stored.codes.dtype],
                            amax_of(stored.dequantize(torch.float32)),
                        )
                        amax = amax.sqrt() if fmt is ROOT8 else amax
                        self.counted[name, tensor] = statistics_of_codes(
                            stored.codes, stored.scale_inv, amax, fmt
                        )
        return dict(zip(self.counted, read(list(self.counted.values())), strict=True))


# Records


def _share(watched: list[Watched]) -> float | None:
    """Return the share of the first step's weight FLOPs in FP8, as in the proof line; None before
    the proof."""
    flops = [proof.flops for each in watched if (proof := each.prepared.observed.proof)]
    needed = sum(part.needed for part in flops)
    return round(sum(part.in_fp8 for part in flops) / needed, 6) if needed else None


def _entry(numbers: Statistics, stored: bool) -> dict[str, Any]:
    """Return the numbers of one tensor for JSON; None for non-finite ones, and for those without
    meaning then."""
    low, high = _finite(numbers.lowest_scale), _finite(numbers.highest_scale)
    if numbers.lowest_scale > numbers.highest_scale:  # nothing but zeros
        low = high = None
    entry: dict[str, Any] = {
        "format": numbers.fmt.name,
        "amax": _finite(numbers.amax),
        "scale": high if low == high else [low, high],
        "elements": numbers.elements,
        "counted": numbers.counted,
        "zeros" if stored else "flushed": round(numbers.flushed_share, 8)
        if numbers.is_finite
        else None,
        "at_max" if stored else "saturated": round(numbers.saturated_share, 8)
        if numbers.is_finite
        else None,
    }
    if not stored:
        entry["sqnr_db"] = None if numbers.sqnr_db is None else round(numbers.sqnr_db, 2)
    held = [index for index, count in enumerate(numbers.binades) if count and numbers.is_finite]
    first, end = (held[0], held[-1] + 1) if held else (0, 0)
    top = numbers.fmt.max_exponent + 1
    return entry | {
        "exponents": [top - end + 1, top - first],
        "binades": numbers.binades[first:end][::-1],
    }


def _finite(number: float) -> float | None:
    # enough digits to tell FP32 numbers apart, and no -0
    return float(f"{number:.9g}") + 0.0 if math.isfinite(number) else None


def is_finite(entry: Mapping[str, Any]) -> bool:
    """Return True if the values and scales of a tensor were finite."""
    return None not in (entry["amax"], entry.get("saturated", entry.get("at_max")))


def tensors_of(record: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return (label, name, entry) of tensors: forward, backward, states. The first non-finite is
    the likely origin."""
    tensors = [
        (f"{layer or '(root)'} {name}", name, entry)
        for layer, entries in record["tensors"].items()
        for name, entry in entries.items()
    ]
    forward = [
        tensor for tensor in tensors if tensor[1] in (OPERAND_NAMES[INPUT], OPERAND_NAMES[WEIGHT])
    ]
    backward = [tensor for tensor in reversed(tensors) if tensor[1] == OPERAND_NAMES[GRAD_OUTPUT]]
    return [*forward, *backward, *(tensor for tensor in tensors if tensor[1] in SAMPLED_STATES)]


def summary(record: Mapping[str, Any]) -> dict[str, float]:
    """Summarize a record for trackers, by its worst casts: `fp8/worst_sqnr` in dB, `fp8/sqnr/GROUP`
    for layers whose names differ only in numbers, the shares `fp8/saturated` and
    `fp8/flushed`, all NaN if one of these casts is not finite; `fp8/not_finite`, the number of
    tensors with an inf or a NaN; and the record's `FIGURES`. Empty for a record without casts."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for layer, entries in record["tensors"].items():
        group = re.sub(r"(^|\.)\d+(?=\.|$)", "", layer).lstrip(".") or layer or "root"
        groups.setdefault(group, []).extend(
            entry for name, entry in entries.items() if name not in SAMPLED_STATES
        )
    if not (casts := [entry for entries in groups.values() for entry in entries]):
        return {}
    values = {f"fp8/{name}": record.get(name) for name in FIGURES}
    values["fp8/not_finite"] = float(sum(not is_finite(entry) for *_, entry in tensors_of(record)))
    values["fp8/worst_sqnr"] = _worst(min, "sqnr_db", casts)
    values |= {f"fp8/{key}": _worst(max, key, casts) for key in ("saturated", "flushed")}
    values |= {
        f"fp8/sqnr/{group}": _worst(min, "sqnr_db", entries) for group, entries in groups.items()
    }
    return {name: value for name, value in values.items() if value is not None}


def _worst(pick: Callable[..., Any], key: str, casts: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the worst figure of these casts: NaN if a cast with it is not finite, None if no cast
    has it."""
    entries = [entry for entry in casts if key in entry]
    if not all(map(is_finite, entries)):
        return math.nan
    return pick((entry[key] for entry in entries if entry[key] is not None), default=None)
