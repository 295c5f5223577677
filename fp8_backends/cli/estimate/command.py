"""`fp8-backends estimate`: what training a model takes, before anything runs."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

from ..paragraphs import WIDTH

if TYPE_CHECKING:
    from . import Estimate, Workload
    from .device_memory import Device

SUMMARY = "memory and traffic of training a model, by backend and sharding"
SEQUENCE = 2048
BACKENDS = "bf16,native:dynamic,msamp:O1,msamp:O2,msamp:O3,te,ao"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Traces a training step of the model without computing it, and prints what one device holds and sends: no "
        "weights are loaded, nothing is fetched, and the device need not be there."
    )
    parser.add_argument("model", nargs="?", help="a config.json of transformers, its folder, or a cached model's name")
    parser.add_argument("--params", help="instead of a model: a Llama of so many parameters (8B, 350M)")
    parser.add_argument("--devices", type=int, default=1, help="how many train it (default: 1)")
    parser.add_argument(
        "--device", help="h100, h200, b200, a100, l40s, rtx4090, …, cpu, or GiB (default: this machine)"
    )
    parser.add_argument(
        "--sharding", help="of none, ddp, fsdp2, zero1, zero2, zero3, by commas (default: none; ddp,fsdp2)"
    )
    parser.add_argument("--backend", default=BACKENDS, help=f"backend strings by commas (default: {BACKENDS})")
    parser.add_argument("--batch", type=int, default=1, help="sequences of one device at a time (default: 1)")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence (default: 2048, or what the model takes)")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing of each layer")
    parser.add_argument(
        "--weights", choices=("fp32", "bf16"), default="fp32", help="dtype of the model (default: fp32)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")


def run(args: argparse.Namespace) -> int:
    from .. import estimate as estimation
    from .device_memory import device_named

    _check(args)
    device = device_named(args.device)
    model = _model(args)
    workload = estimation.Workload(
        model=model,
        batch=args.batch,
        sequence=args.sequence or min(SEQUENCE, model.longest or SEQUENCE),
        checkpointing=args.checkpointing,
        weights=args.weights,
        devices=args.devices,
        memory=device.memory,
    )
    estimates = estimation.estimate(workload, _listed(args.backend), _shardings(args))
    print(json.dumps(_plain(workload, device, estimates), indent=1) if args.json else text(workload, device, estimates))
    return 0


def _check(args: argparse.Namespace) -> None:
    from ...errors import FP8BackendError

    if (args.model is None) == (args.params is None):
        raise FP8BackendError("name a model (config.json, folder, or a cached model), or give --params, one of both")
    for name in ("devices", "batch", "sequence"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise FP8BackendError(f"--{name} {getattr(args, name)}: at least 1")


def _model(args: argparse.Namespace):
    from . import model_shapes

    if args.params is not None:
        return model_shapes.from_parameters(model_shapes.parse_count(args.params))
    return model_shapes.from_transformers(args.model)


def _shardings(args: argparse.Namespace) -> list[str]:
    from ...compute.fields import closest
    from ...errors import FP8BackendError
    from .sharded_costs import SHARDINGS

    if args.sharding is None:
        return ["none"] if args.devices == 1 else ["ddp", "fsdp2"]
    asked = _listed(args.sharding.lower())
    for each in asked:
        if each not in SHARDINGS:
            raise FP8BackendError(
                f"--sharding {each}: unknown{closest(each, SHARDINGS)}; one of {', '.join(SHARDINGS)}"
            )
    return asked


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _plain(workload: Workload, device: Device, estimates: list[Estimate]) -> dict[str, Any]:
    settings = ("batch", "sequence", "checkpointing", "weights", "devices")
    return {
        "model": workload.model.title,
        "parameters": workload.model.parameters,
        "device": device._asdict(),
        "settings": {name: getattr(workload, name) for name in settings},
        "estimates": [each.to_dict() for each in estimates],
    }


# as text

COLUMNS = {
    "weights": "weights",
    "master": "master",
    "gradients": "grads",
    "states": "states",
    "buffers": "other",
    "copies": "copies",
    "activations": "acts",
    "peak": "peak",
    "sent": "sent",
}
"""Fields of an estimate and their headings. One that is nearly nothing for all backends has no column."""
_NEARLY_NOTHING = 0.002
"""Of the peak."""
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def text(workload: Workload, device: Device, estimates: list[Estimate]) -> str:
    """The tables as they are printed."""
    known = [each for each in estimates if not each.refused]
    unit = next(unit for unit, size in _UNITS.items() if max(each.peak for each in known) >= size)
    lines = [*_wrapped("model", _model_title(workload)), *_wrapped("training", _training(workload, device))]
    for sharding in dict.fromkeys(each.sharding for each in estimates):
        group = [each for each in estimates if each.sharding == sharding]
        lines += ["", *_table(group, unit, sharding, workload.devices)]
    return "\n".join([*lines, "", *_legend(workload, known)])


def _model_title(workload: Workload) -> str:
    from .model_shapes import readable_count

    title = workload.model.title
    return (
        title if title.endswith("parameters)") else f"{title}: {readable_count(workload.model.parameters)} parameters"
    )


def _training(workload: Workload, device: Device) -> str:
    sequences = "1 sequence" if workload.batch == 1 else f"{workload.batch} sequences"
    weights = "FP32 weights under bf16 autocast" if workload.weights == "fp32" else "bf16 weights"
    checkpointing = ", activation checkpointing" if workload.checkpointing else ""
    return (
        f"{workload.devices} x {device.title}; on each {sequences} of {workload.sequence} tokens; {weights}, fused "
        f"AdamW{checkpointing}"
    )


def _table(group: list[Estimate], unit: str, sharding: str, devices: int) -> list[str]:
    """One sharding: a row for each backend."""
    where = "the device" if devices == 1 else f"each of {devices} devices, {_SHARDINGS[sharding]}"
    known = [each for each in group if not each.refused]
    columns = [c for c in COLUMNS if any(getattr(each, c) > _NEARLY_NOTHING * each.peak for each in known)]
    rows = [("", *(COLUMNS[column] for column in columns), "FP8", "fits", "largest", "batch")]
    rows += [(_short(each.backend), *_cells(each, columns, _UNITS[unit])) for each in known]
    lines = [f"{unit} on {where}", *_aligned(rows)]
    for each in group:
        if each.refused:
            lines += textwrap.wrap(f"{_short(each.backend)}: {each.refused}", WIDTH, subsequent_indent="  ")
    return lines


_SHARDINGS = {
    "none": "nothing shared",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}


def _short(backend: str) -> str:
    return backend.replace("native:window+", "")


def _cells(estimate: Estimate, columns: list[str], size: int) -> list[str]:
    from .model_shapes import readable_count

    cells = [_number(getattr(estimate, column) / size) for column in columns]
    cells += [f"{estimate.flops_share:.0%}", {True: "yes", False: "no", None: "?"}[estimate.fits]]
    largest = estimate.largest_parameters
    cells.append("?" if largest is None else readable_count(largest) if estimate.largest_layers else "none")
    return [*cells, str(estimate.largest_batch)]


def _number(value: float) -> str:
    if value == 0:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    space = "  " if sum(widths) + 2 * len(widths) <= WIDTH else " "
    return [
        space.join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _legend(workload: Workload, known: list[Estimate]) -> list[str]:
    from .estimates import USABLE

    moments = dict.fromkeys(each.peak_at for each in known)
    sentences = [
        "other: DDP's buckets and the model's buffers. copies: of weights, from forward to backward (autocast's, FP8 "
        "codes). acts: activations kept for backward. "
        f"peak: the highest moment of a step ({'; '.join(moments)}). sent: to other devices in a step. FP8: share of "
        "the FLOPs of weight products.",
        f"fits: the peak is at most {USABLE:.0%} of the memory; the rest is for libraries and fragmentation. largest: "
        "parameters of this shape with more or fewer layers. batch: the most sequences at a time on a device.",
        *dict.fromkeys(note for each in known for note in each.notes),
    ]
    return sum((textwrap.wrap(sentence, WIDTH) for sentence in sentences), [])


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:<9} ", subsequent_indent=" " * 10)
