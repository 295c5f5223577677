"""`fp8-backends estimate`: what training a model takes, before anything runs."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any, NamedTuple

import torch

from ...compute import hardware
from ...compute.fields import closest
from ...errors import FP8BackendError
from ...words import counted, share
from ..terminal import paragraphs, table
from .estimates import USABLE, WEIGHT_DTYPES, Estimate, Workload, estimate
from .model_shapes import from_parameters, from_transformers, parse_count, readable_count

SEQUENCE = 2048
BACKENDS = "bf16,native:dynamic,msamp:O1,msamp:O2,msamp:O3,te,ao"

GIB = 2**30
DEVICE_GIB = {
    "a100": 80, "a100-40": 40, "h100": 80, "h200": 141, "b200": 180, "b300": 270, "l4": 24, "l40s": 48,
    "rtx3090": 24, "rtx4090": 24, "rtx5090": 32, "mi300x": 192, "mi325x": 256, "mi350x": 288,
}  # fmt: skip
"""From NVIDIA's and AMD's data sheets (B200 and B300: a DGX's memory over its 8 GPUs). Drivers show it in GiB, up to
a percent less; 6 % less on cards with GDDR memory whose ECC is on."""


class Device(NamedTuple):
    title: str
    memory: float
    """Bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Traces a training step of the model without computing it, and prints what one device holds and sends: no "
        "weights are loaded, nothing is fetched, and the device need not be there."
    )
    add = parser.add_argument
    add("model", nargs="?", help="a config.json of transformers, its folder, or a cached model's name")
    add("--params", help="instead of a model: a Llama of so many parameters (8B, 350M)")
    add("--devices", type=int, default=1, help="how many train it (default: 1)")
    add("--device", help="h100, h200, b200, a100, l40s, rtx4090, …, cpu, or GiB (default: this machine)")
    add("--sharding", help="of none, ddp, fsdp2, zero1, zero2, zero3, by commas (default: none; ddp,fsdp2)")
    add("--backend", default=BACKENDS, help=f"backend strings by commas (default: {BACKENDS})")
    add("--batch", type=int, default=1, help="sequences of one device at a time (default: 1)")
    add("--sequence", type=int, help="tokens of a sequence (default: 2048, or what the model takes)")
    add("--checkpointing", action="store_true", help="activation checkpointing of each layer")
    add("--weights", choices=WEIGHT_DTYPES, default="fp32", help="dtype of the model (default: fp32)")
    add("--json", action="store_true", help="print JSON, in bytes")


def run(args: argparse.Namespace) -> int:
    if (args.model is None) == (args.params is None):
        raise FP8BackendError("name a model (config.json, folder, or a cached model), or give --params, one of both")
    for name in ("devices", "batch", "sequence"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise FP8BackendError(f"--{name} {value}: at least 1")
    device = device_named(args.device)
    model = from_transformers(args.model) if args.params is None else from_parameters(parse_count(args.params))
    workload = Workload(
        model=model,
        batch=args.batch,
        sequence=args.sequence or min(SEQUENCE, model.longest or SEQUENCE),
        checkpointing=args.checkpointing,
        weights=args.weights,
        devices=args.devices,
        memory=device.memory,
    )
    estimates = estimate(workload, _listed(args.backend), _shardings(args))
    print(json.dumps(_plain(workload, device, estimates), indent=1) if args.json else text(workload, device, estimates))
    return 0


def device_named(name: str | None) -> Device:
    """Return a device by its name, by its GiB, "cpu" for this machine's RAM; None: this machine's GPU or RAM.

    Raises:
        FP8BackendError: an unknown name.
    """
    if name is None and hardware.has_gpu():
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
        return Device(f"{torch.cuda.get_device_name(0)} ({memory / GIB:.0f} GiB)", memory)
    word = "cpu" if name is None else name.lower().replace(" ", "").replace("_", "-")
    if word == "cpu":
        memory = _ram()
        return Device(f"this machine's RAM ({memory / GIB:.1f} GiB)", memory)
    if word in DEVICE_GIB:
        return Device(f"{name.upper()} ({DEVICE_GIB[word]} GiB)", DEVICE_GIB[word] * GIB)
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:gib|gb)?", word)
    if number is None or not float(number[1]):
        names = [*DEVICE_GIB, "cpu"]
        raise FP8BackendError(
            f"--device {name}: unknown{closest(word, names)}. Known: {', '.join(names)}; or the GiB of one device, "
            "such as 64"
        )
    return Device(f"a device of {number[1]} GiB", float(number[1]) * GIB)


def _ram() -> float:
    """Return the bytes of this machine's RAM, or what its control group leaves of it."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as limit:
                memory = min(memory, float(limit.read()))
        except (OSError, ValueError):
            continue  # another version of control groups, or no limit ("max")
    return memory


def _shardings(args: argparse.Namespace) -> list[str]:
    if args.sharding is None:
        return ["none"] if args.devices == 1 else ["ddp", "fsdp2"]
    return _listed(args.sharding.lower())


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


# As text

COLUMNS = {
    "weights": "weights", "master": "master", "gradients": "grads", "states": "states", "buffers": "other",
    "copies": "copies", "activations": "acts", "peak": "peak", "sent": "sent",
}  # fmt: skip
"""Fields of an estimate and their headings. One that is nearly nothing for all backends has no column."""
_NEARLY_NOTHING = 0.002
"""A share of the peak."""
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_SHARDINGS = {
    "none": "nothing shared", "ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
}  # fmt: skip


def text(workload: Workload, device: Device, estimates: list[Estimate]) -> str:
    """Return the tables as they are printed."""
    known = [each for each in estimates if not each.refused]
    unit = next(unit for unit, size in _UNITS.items() if max(each.peak for each in known) >= size)
    model = workload.model.title
    if not model.endswith("parameters)"):
        model += f": {readable_count(workload.model.parameters)} parameters"
    parts = [paragraphs([("model", model), ("training", _training(workload, device))])]
    for sharding in dict.fromkeys(each.sharding for each in estimates):
        where = "the device" if workload.devices == 1 else f"each of {workload.devices} devices, {_SHARDINGS[sharding]}"
        group = [each for each in estimates if each.sharding == sharding]
        parts.append(f"{unit} on {where}\n{_table(group, _UNITS[unit])}")
    return "\n\n".join([*parts, _legend(known)])


def _training(workload: Workload, device: Device) -> str:
    weights = "FP32 weights under bf16 autocast" if workload.weights == "fp32" else "bf16 weights"
    checkpointing = ", activation checkpointing" if workload.checkpointing else ""
    return (
        f"{workload.devices} x {device.title}; on each {counted(workload.batch, 'sequence')} of "
        f"{counted(workload.sequence, 'token')}; {weights}, fused AdamW{checkpointing}"
    )


def _table(group: list[Estimate], size: int) -> str:
    """Write one sharding: a row for each backend, and why others are refused."""
    known = [each for each in group if not each.refused]
    columns = [name for name in COLUMNS if any(getattr(each, name) > _NEARLY_NOTHING * each.peak for each in known)]
    rows = [["", *(COLUMNS[name] for name in columns), "FP8", "fits", "largest", "batch"]]
    for each in known:
        fits = {True: "yes", False: "no", None: "?"}[each.fits]
        count = each.largest_parameters
        largest = "?" if count is None else readable_count(count) if each.largest_layers else "none"
        numbers = [_number(getattr(each, name) / size) for name in columns]
        rows.append([each.backend, *numbers, f"{share(each.flops_share)}", fits, largest, str(each.largest_batch)])
    refused = [(f"{each.backend}:", each.refused) for each in group if each.refused]
    return "\n".join([*([table(rows)] if known else []), *([paragraphs(refused)] if refused else [])])


def _number(value: float) -> str:
    if value == 0:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _legend(known: list[Estimate]) -> str:
    moments = "; ".join(dict.fromkeys(each.peak_at for each in known))
    notes = dict.fromkeys(note for each in known for note in each.notes)
    return paragraphs(
        [
            ("other", "DDP's buckets and the model's buffers"),
            ("copies", "of weights, from forward to backward (autocast's, FP8 codes)"),
            ("acts", "activations kept for backward"),
            ("peak", f"the highest moment of a step ({moments})"),
            ("sent", "to other devices in a step"),
            ("FP8", "share of the FLOPs of weight products"),
            ("fits", f"the peak is at most {share(USABLE)} of the memory; the rest is for libraries and fragmentation"),
            ("largest", "parameters of this shape with more or fewer layers"),
            ("batch", "the most sequences at a time on a device"),
            *(("note", note) for note in notes),
        ]
    )
