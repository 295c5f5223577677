"""Measure a training step: peak memory, autocast's copies of weights, and bytes sent to other
ranks."""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ...evidence.auditing import inner_tensors


def peak_memory(
    step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer
) -> int | None:
    """Return the highest bytes of tensors in a step: PyTorch's allocator on a GPU, the profiler on
    a CPU, or None."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = (part.untyped_storage() for tensor in tensors for part in inner_tensors(tensor))
    resting = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    try:
        events = [
            event
            for event in profiled.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    except AttributeError:
        return None
    return resting + max(itertools.accumulate(changes, initial=0))


@contextlib.contextmanager
def autocast_copies(model: nn.Module) -> Iterator[dict[str, int]]:
    """Yield a dictionary that collects, by weight, the bytes of half-precision copies saved for
    backward.

    A saved tensor is a copy if it equals the weight rounded to its dtype, so no activation counts.
    """
    by_shape: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            for shape in {tuple(weight.shape), tuple(weight.shape[::-1])}:
                by_shape.setdefault(shape, []).append((name, weight))
    copies: dict[str, int] = {}

    def look(saved: torch.Tensor) -> torch.Tensor:
        if type(saved) is torch.Tensor and saved.dtype in (torch.bfloat16, torch.float16):
            for name, weight in by_shape.get(tuple(saved.shape), ()):
                if weight.dtype == saved.dtype or name in copies:
                    continue
                rounded = weight.detach().to(saved.dtype)
                if any(
                    saved.shape == copy.shape and torch.equal(saved, copy)
                    for copy in (rounded, rounded.t())
                ):
                    copies[name] = saved.nbytes
                    break
        return saved

    with torch.autograd.graph.saved_tensors_hooks(look, lambda saved: saved):
        yield copies


_ELEMENT_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "int": 4, "long": 8,
    "long int": 8, "unsigned char": 1, "signed char": 1, "byte": 1, "char": 1, "bool": 1,
}  # fmt: skip


def sent_bytes(step: Callable[[], object]) -> int | None:
    """Run a step and return the bytes that a rank sends in its collectives; None if a collective is
    unknown.

    Computed from the sizes at the process group: a sum over N ranks sends 2 (N - 1) / N of its
    size, as a ring does, and every other collective the least of any algorithm. The ranks share a
    broadcast.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return bytes_of(events, dist.get_world_size())


def bytes_of(events: list[dict[str, Any]], ranks: int) -> int | None:
    """Return the bytes that one of `ranks` ranks sends in the collectives of a trace; None if one
    is unknown."""
    total = 0.0
    for event in events:
        collective, size = _collective(event)
        if collective in ("", "barrier"):
            continue
        plain = collective.lower().replace("_", "")
        factor = next(
            (factor for beginning, factor in SENT.items() if plain.startswith(beginning)), None
        )
        if factor is None or size is None:
            return None
        total += factor(ranks) * size
    return round(total)


SENT: dict[str, Callable[[int], float]] = {
    "allreduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "allgather": lambda ranks: ranks - 1,
    **dict.fromkeys(("reducescatter", "alltoall", "broadcast"), lambda ranks: (ranks - 1) / ranks),
}
"""Bytes sent for each byte of a rank's input."""


def _collective(event: dict[str, Any]) -> tuple[str, int | None]:
    """Return (collective, bytes of this rank's input) of an event; "" for an event of another
    kind."""
    name, arguments = event.get("name", ""), event.get("args", {})
    if name.startswith("gloo:"):
        shapes, kinds = arguments.get("Input Dims", ()), arguments.get("Input type", ())
        parts = [
            (torch.Size(shape).numel(), kind) for shape, kind in zip(shapes, kinds, strict=False)
        ]
        name = name.removeprefix("gloo:")
    elif name == "record_param_comms" and "Collective name" in arguments:  # NCCL and other backends
        parts = [(arguments.get("In msg nelems"), str(arguments.get("dtype", "")))]
        name = arguments["Collective name"]
    else:
        return "", None
    sizes = [(count, _ELEMENT_BYTES.get(kind.lower())) for count, kind in parts]
    return name, None if any(None in pair for pair in sizes) else sum(
        count * element for count, element in sizes
    )
