"""`fp8-backends estimate`: the memory and traffic of training a model, before anything runs."""

import argparse
import json
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...compute import chips, hardware
from ...errors import FP8BackendError, RecipeError
from ...recipes.handlers import resolve
from ...rules import RULES
from ...rules.validate import validate
from ...words import share
from ..terminal import Progress, add_feature_flags, features_of, paragraphs, table
from .estimates import BASELINES, USABLE, WEIGHT_DTYPES, Estimate, Workload, estimate
from .model_shapes import ModelShape, from_parameters, from_transformers, parse_count, readable_count

SEQUENCE = 2048
BACKENDS = "bf16,native:dynamic,msamp:O1,msamp:O2,msamp:O3,msamp:O4,te,ao"

GIB = 2**30


class Device(NamedTuple):
    title: str
    memory: float
    chip: str | None = None
    """A name in `chips.PRODUCTS`, if known."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Traces a training step of the model without computing it, and prints what one device holds and sends: no "
        "weights are loaded, nothing is fetched, and the device need not be there."
    )
    add = parser.add_argument
    add("model", nargs="?", help="a config.json of transformers, its folder, or the name of a cached model")
    add("--params", help="instead of a model: a Llama of so many parameters (8B, 350M)")
    add("--devices", type=int, default=1, help="how many train it (default: 1)")
    add("--chip", "--device", help="h100, h200, b200, a100, l40s, rtx4090, …, cpu, or GiB (default: this machine)")
    add("--sharding", help="of none, ddp, fsdp2, zero1, zero2, zero3, by commas (default: none; ddp,fsdp2)")
    add("--backend", default=BACKENDS, help=f"backend strings by commas (default: {BACKENDS})")
    add("--batch", type=int, default=1, help="sequences, images or spectrograms of one device at a time (default: 1)")
    add("--sequence", type=int, help="tokens of a sequence (default: 2048, or what the model takes)")
    add("--checkpointing", action="store_true", help="activation checkpointing of each layer")
    add_feature_flags(parser)
    add("--weights", choices=WEIGHT_DTYPES, default="fp32", help="dtype of the model (default: fp32)")
    add("--json", action="store_true", help="print JSON, in bytes")


def run(args: argparse.Namespace) -> int:
    if (args.model is None) == (args.params is None):
        raise FP8BackendError("name a model (config.json, folder, or a cached model), or give --params, one of both")
    for name in ("devices", "batch", "sequence"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise FP8BackendError(f"--{name} {value}: at least 1")
    device = device_named(args.chip)
    model = from_transformers(args.model) if args.params is None else from_parameters(parse_count(args.params))
    if args.sequence is not None and not model.reads_tokens:
        raise FP8BackendError(f"--sequence {args.sequence}: the model reads images, which have no tokens: leave it out")
    settings = {
        "batch": args.batch,
        "sequence": args.sequence or min(SEQUENCE, model.longest or SEQUENCE),
        **{name: getattr(args, name) for name in ("checkpointing", "weights", "devices")},
    }
    workload = Workload(model=model, memory=device.memory, **settings)
    with Progress(f"tracing a training step of {model.title}") as progress:
        names, kept = _listed("--backend", args.backend), features_of(args)
        backends = [name if name.lower() in BASELINES else resolve({"backend": name, **kept}) for name in names]
        shardings = ["none"] if args.devices == 1 else ["ddp", "fsdp2"]
        if args.sharding is not None:
            shardings = _listed("--sharding", args.sharding.lower())
        estimates = estimate(workload, backends, shardings, progress)
        advice = fp8_advice(model, device, [each.backend for each in estimates if each.flops_share])
        advice += auto_advice(device)
    if args.json:
        plain = {
            "model": model.title,
            "parameters": model.parameters,
            "device": device._asdict(),
            "settings": settings,
            "estimates": [each.to_dict() for each in estimates],
            "advice": advice,
        }
        print(json.dumps(plain, indent=1))
    else:
        print(text(workload, device, estimates, advice))
    return 0


def device_named(name: str | None) -> Device:
    """Return a device by name or GiB; None is this machine. Raises `FP8BackendError` for unknown or ambiguous names."""
    if name is None and hardware.has_gpu():
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
        return Device(f"{torch.cuda.get_device_name(0)} ({memory / GIB:.0f} GiB)", memory, hardware.chip().key)
    name = name or chips.CPU.key
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:gib|gb)?", name.lower())
    if number is not None and float(number[1]):
        return Device(f"device of {number[1]} GiB", float(number[1]) * GIB)
    try:
        product = chips.product_named(name)
    except RecipeError as error:
        raise FP8BackendError(f"--chip: {error}; or the GiB of one device, such as 64") from None
    if product.gpu is None:
        memory = _ram()
        return Device(f"this machine's RAM ({memory / GIB:.1f} GiB)", memory, product.name)
    if product.gib is None:
        sold = [each.name for each in chips.PRODUCTS.values() if each.gib and each.chip is product.chip]
        raise FP8BackendError(
            f"--chip {name}: chips of this kind differ in memory: name one ({', '.join(sold)}), or its GiB, such as 64"
        )
    return Device(f"{product.name.upper()} ({product.gib} GiB)", product.gib * GIB, product.name)


def _ram() -> float:
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as limit:
                memory = min(memory, float(limit.read()))
        except (OSError, ValueError):
            continue  # another version of control groups, or no limit ("max")
    return memory


def _listed(flag: str, text: str) -> list[str]:
    words = [word for part in text.split(",") if (word := part.strip())]
    if not words:
        raise FP8BackendError(f"{flag} names none")
    return words


NOT_WORTH_IT = ("no_fp8_hardware", "emulated_here", "minority_in_fp8", "small_layers", "small_model", "modest_gain")
"""Rules for little or no speed from FP8, the plainest first."""


def fp8_advice(model: ModelShape, device: Device, backends: list[str]) -> list[str]:
    """Explain why FP8 brings little or no speed to this model on this chip, in one sentence if all backends agree."""
    if device.chip is None or not backends:
        return []
    product = chips.product_named(device.chip)
    advice = chips.advice_for(product.gpu, cpu_bf16=hardware.cpu_bf16())
    if advice.precision != "fp8":
        return [f"for speed train in {advice.precision}: {advice.reason}"]
    with torch.device("meta"):
        meta = model.make_model(torch.float32)
    rules = {name: {finding.rule for finding in validate(name, meta, chip=device.chip)} for name in backends}
    sentences = []
    for rule in (RULES[name] for name in NOT_WORTH_IT):
        slow = [name for name, applying in rules.items() if rule.name in applying]
        of = "" if len(slow) == len(rules) else f" with {', '.join(slow)}"
        if slow:
            sentences.append(f"little or no speed is to be expected of FP8{of}: {rule.reason}; {rule.fix}")
            if not of:
                return sentences[-1:]
    return sentences


def auto_advice(device: Device) -> list[str]:
    """Explain the choice of `auto` on this chip; [] for an unknown chip or one without FP8 products."""
    if device.chip is None or not (chip := chips.product_named(device.chip).chip).fp8:
        return []
    choice = chips.auto_on(chip)
    return [f"without TransformerEngine auto means {choice.backend} there: {choice.reason}"]


COLUMNS = {
    "weights": "weights", "master": "master", "gradients": "grads", "states": "states", "buffers": "other",
    "copies": "copies", "activations": "acts", "peak": "peak", "sent": "sent",
}  # fmt: skip
"""Fields of an estimate and their headings. A field near zero for all backends has no column."""
_MEANINGS = {
    "buffers": "DDP's buckets and the model's buffers",
    "copies": "of weights, from forward to backward (autocast's, FP8 codes)",
    "activations": "activations kept for backward",
}
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_SHARDINGS = {
    "none": "nothing shared", "ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
}  # fmt: skip


def text(workload: Workload, device: Device, estimates: list[Estimate], advice: Iterable[str] = ()) -> str:
    known = [each for each in estimates if not each.refused]
    unit = next(unit for unit, size in _UNITS.items() if max(each.peak for each in known) >= size)
    model = workload.model.title
    if not model.endswith("parameters)"):
        model += f": {readable_count(workload.model.parameters)} parameters"
    training = [
        f"{workload.devices} x {device.title}",
        f"on each {workload.model.samples(workload.batch, workload.sequence)}",
        "FP32 weights under bf16 autocast" if workload.weights == "fp32" else "bf16 weights",
    ]
    end = ", fused AdamW" + (", activation checkpointing" if workload.checkpointing else "")
    parts = [paragraphs([("model", model), ("training", "; ".join(training) + end)])]
    for sharding in dict.fromkeys(each.sharding for each in estimates):
        where = "the device" if workload.devices == 1 else f"each of {workload.devices} devices, {_SHARDINGS[sharding]}"
        group = [each for each in estimates if each.sharding == sharding]
        parts.append(f"{unit} on {where}\n{_table(group, _UNITS[unit])}")
    moments = "; ".join(dict.fromkeys(each.peak_at for each in known))
    legend = [
        *((COLUMNS[name], meaning) for name, meaning in _MEANINGS.items() if _has_column(name, known)),
        ("peak", f"the highest moment of a step ({moments})"),
        *([("sent", "to other devices in a step")] if _has_column("sent", known) else []),
        ("FP8", "share of the FLOPs of weight products"),
        ("fits", f"the peak is at most {share(USABLE)} of the memory; the rest is for libraries and fragmentation"),
        ("largest", "parameters of this shape with more or fewer layers"),
        ("batch", "the most samples at a time on a device"),
        *(("note", note) for note in dict.fromkeys(note for each in known for note in each.notes)),
        *(("advice", sentence) for sentence in advice),
    ]
    return "\n\n".join([*parts, paragraphs(legend)])


def _table(group: list[Estimate], size: int) -> str:
    known = [each for each in group if not each.refused]
    columns = [name for name in COLUMNS if _has_column(name, known)]
    rows = [["", *(COLUMNS[name] for name in columns), "FP8", "fits", "largest", "batch"]]
    for each in known:
        fits = {True: "yes", False: "no", None: "?"}[each.fits]
        count = each.largest_parameters
        largest = "?" if count is None else readable_count(count) if each.largest_layers else "none"
        numbers = [_number(getattr(each, name) / size) for name in columns]
        rows.append([each.backend, *numbers, share(each.flops_share), fits, largest, str(each.largest_batch)])
    refused = [(f"{each.backend}:", each.refused.removeprefix(f"{each.backend}: ")) for each in group if each.refused]
    return "\n".join([*([table(rows)] if known else []), *([paragraphs(refused)] if refused else [])])


def _has_column(name: str, estimates: Iterable[Estimate]) -> bool:
    """Return True if the field is more than a small share of a peak."""
    return any(getattr(each, name) > 0.002 * each.peak for each in estimates)


def _number(value: float) -> str:
    if value == 0:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
