"""Bytes that a rank sends in a training step, read from a trace of PyTorch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_ELEMENT_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "int": 4, "long": 8,
    "long int": 8, "unsigned char": 1, "signed char": 1, "byte": 1, "char": 1, "bool": 1,
}  # fmt: skip


def sent_bytes(step: Callable[[], object]) -> int | None:
    """Run a step; what the collectives in it send to other ranks, per rank, in bytes. None: cannot be told.

    Counted from the sizes that the process group got: a sum over N ranks as a ring sends it, 2 (N - 1) / N of its
    size, and every other collective likewise by the least that any algorithm sends. A broadcast is shared among ranks.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return bytes_of(events, dist.get_world_size())


def bytes_of(events: list[dict[str, Any]], ranks: int) -> int | None:
    """Bytes that one of `ranks` ranks sends in the collectives of a trace; None where one of them is unknown."""
    total = 0.0
    for event in events:
        found = _gloo(event) or _recorded(event)
        if found is None:
            continue
        collective, size = found
        if collective == "barrier":
            continue
        share = _share(collective, ranks)
        if share is None or size is None:
            return None
        total += share * size
    return round(total)


def _gloo(event: dict[str, Any]) -> tuple[str, int | None] | None:
    """(collective, bytes handed in on this rank) of an event of the gloo backend."""
    name, arguments = event.get("name", ""), event.get("args", {})
    if not name.startswith("gloo:"):
        return None
    size = 0
    for shape, kind in zip(arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False):
        element = _ELEMENT_BYTES.get(kind.lower())
        if element is None:
            return name.removeprefix("gloo:"), None
        size += torch.Size(shape).numel() * element
    return name.removeprefix("gloo:"), size


def _recorded(event: dict[str, Any]) -> tuple[str, int | None] | None:
    """The same of the events that NCCL's and other backends leave."""
    arguments = event.get("args", {})
    if event.get("name") != "record_param_comms" or "Collective name" not in arguments:
        return None
    element = _ELEMENT_BYTES.get(str(arguments.get("dtype", "")).lower())
    count = arguments.get("In msg nelems")
    return arguments["Collective name"], None if element is None or count is None else count * element


def _share(collective: str, ranks: int) -> float | None:
    """Of the bytes that a rank hands in, how many it sends."""
    plain = collective.lower().replace("_", "")
    others = (ranks - 1) / ranks
    for beginning, share in (
        ("allreduce", 2 * others),
        ("allgather", ranks - 1),
        ("reducescatter", others),
        ("alltoall", others),
        ("broadcast", others),
    ):
        if plain.startswith(beginning):
            return share
    return None
