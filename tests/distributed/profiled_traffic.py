"""Count a step's bytes at the process group by PyTorch's profiler, below the operators at which
`tools.compare.measuring` counts them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fp8_backends.tools.compare.measuring import SENT

_ELEMENT_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "int": 4, "long": 8,
    "long int": 8, "unsigned char": 1, "signed char": 1, "byte": 1, "char": 1, "bool": 1,
}  # fmt: skip


def profiled_bytes(step: Callable[[], object]) -> int | None:
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
