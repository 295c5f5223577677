"""`fp8-backends estimate`: does a training fit, how fast is it, and with what, before anything
runs."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...compute import chips, hardware
from ...compute.rates import pays_from
from ...errors import FP8BackendError, RecipeError
from ...kernels.devices import memory_limit
from ...recipes.handlers import resolve
from ...rules import BY_NAME
from ...rules.validate import validate
from ...words import share
from .. import page
from ..terminal import (
    Progress,
    Verdict,
    add_feature_flags,
    features_of,
    paragraphs,
    positive_int,
    table,
    write_text,
)
from .estimates import (
    BASELINE_DTYPES,
    SHARDINGS,
    SHARE_OF_MEMORY,
    WEIGHT_DTYPES,
    Estimate,
    Layout,
    Workload,
    estimate,
    named,
)
from .model_shapes import (
    ModelShape,
    from_parameters,
    from_transformers,
    parse_count,
    readable_count,
)
from .step_time import TIMED

if TYPE_CHECKING:
    from .simulation import Simulation

SEQUENCE = 2048
LORA_BACKENDS = "bf16,native:dynamic"
BACKENDS = "bf16,native:dynamic,msamp:O1,msamp:O2,msamp:O3,msamp:O4,te,ao"

GIB = 2**30
LORA_RANK = 16
MOST_DEVICES = 1024
"""Of the changes that would make a training fit."""


class Device(NamedTuple):
    title: str
    memory: float | None
    chip: str | None = None
    """A name in `chips.CARDS`, if known."""


UNKNOWN = Device("", None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Traces a training step of the model without computing it, and prints what one device "
        "holds, sends and takes: no weights are loaded, nothing is fetched, and the device need "
        "not be there."
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        help="a config.json of transformers, its folder, or the name of a cached model",
    )
    add("--params", help="instead of a model: a Llama of so many parameters (8B, 350M)")
    add("--devices", type=positive_int, default=1, help="how many train it (default: 1)")
    add(
        "--chip",
        "--device",
        help="h100, h200, b200, a100, l40s, rtx4090, …, cpu, or GiB (default: this machine)",
    )
    of_shardings = (
        f"of {', '.join(SHARDINGS)}, each with +tp:N, by commas (default: none; ddp,fsdp2)"
    )
    add("--sharding", help=of_shardings)
    add(
        "--backend",
        help=f"backend strings by commas (default: {BACKENDS}; with --lora {LORA_BACKENDS})",
    )
    add(
        "--batch",
        type=_batch,
        default=1,
        help='samples of one device at a time, or "largest" that fits (default: 1)',
    )
    add(
        "--sequence",
        type=positive_int,
        help="tokens of a sequence (default: 2048, or what the model takes)",
    )
    add(
        "--microbatches",
        type=positive_int,
        default=1,
        help="accumulated before a step (default: 1)",
    )
    add("--checkpointing", action="store_true", help="activation checkpointing of each layer")
    add_feature_flags(parser)
    add(
        "--gradient-release",
        action="store_true",
        help="at levels: drop each gradient inside backward",
    )
    add(
        "--offload",
        action="store_true",
        help="at levels: keep masters, residuals and states in the memory of the host",
    )
    add(
        "--cores",
        type=positive_int,
        help="of the host for each device, with --offload (default: all)",
    )
    add(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="train PEFT's adapters of this rank on a frozen base",
    )
    add(
        "--frozen-fp8",
        action="store_true",
        help="with --lora: hold the frozen base in FP8 (fp8_params)",
    )
    add("--compile", action="store_true", help="time the step with torch.compile of each layer")
    add(
        "--simulate",
        action="store_true",
        help="trace a step of one rank among fake ones: its collectives and peak",
    )
    add("--page", metavar="FILE", help="write a page with charts")
    add(
        "--weights",
        choices=WEIGHT_DTYPES,
        default="fp32",
        help="dtype of the model (default: fp32)",
    )
    add("--json", action="store_true", help="print JSON, in bytes")


def _batch(text: str) -> int:
    return 0 if text == "largest" else positive_int(text)


def run(args: argparse.Namespace) -> int:
    if (args.model is None) == (args.params is None):
        raise FP8BackendError(
            "name a model (config.json, folder, or a cached model), or give --params, one of both"
        )
    if args.frozen_fp8 and not args.lora:
        raise FP8BackendError(
            "--frozen-fp8 holds the frozen base of --lora RANK: name a rank, such as 16"
        )
    device = device_named(args.chip)
    if args.params is None:
        model = from_transformers(args.model)
    else:
        model = from_parameters(parse_count(args.params))
    model.lora = args.lora
    if args.sequence is not None and not model.reads_tokens:
        raise FP8BackendError(
            f"--sequence {args.sequence}: the model reads images, which have no tokens: leave it "
            "out"
        )
    workload = workload_of(args, model, device)
    with Progress(f"tracing a training step of {model.title}") as progress:
        shardings = ["none"] if args.devices == 1 else ["ddp", "fsdp2"]
        if args.sharding is not None:
            shardings = _listed("--sharding", args.sharding.lower())
        backends = backends_of(args)
        refuse_idle_flags(args, backends)
        report = Report(workload, device, estimate(workload, backends, shardings, progress))
        in_fp8 = [each.backend for each in report.estimates if each.flops_share]
        report.advice = fp8_advice(model, device, in_fp8)
        if not any(each.fits for each in report.estimates):
            report.smaller = changes(args, workload, device, report.known, progress)
        if args.simulate:
            report.simulations = simulated(workload, backends, report.known, progress)
    if args.page is not None:
        write_text(args.page, report.page())
    print(json.dumps(report.to_dict(), indent=1) if args.json else report)
    return 0


def simulated(
    workload: Workload,
    backends: list[str | dict[str, Any]],
    estimates: list[Estimate],
    on_step: Callable[[str], object],
) -> dict[tuple[str, str], Simulation]:
    """Simulate the backends, shardings and batches of these estimates. Raises `FP8BackendError` for
    ZeRO, and what `simulation.simulate` raises."""
    from .simulation import (  # a second: FSDP2, DDP and DTensor
        REPLICATE,
        SHARD,
        TENSOR_PARALLEL,
        simulate,
    )

    recipes = {name: recipe for name, recipe, _ in map(named, backends)}
    found = {}
    for each in estimates:
        layout = Layout.parsed(each.sharding, workload.devices)
        if layout.kind not in ("ddp", "fsdp2") or workload.devices == 1:
            raise FP8BackendError(
                f"--simulate: of ddp, fsdp2 and hsdp with several --devices, not {each.sharding}"
            )
        shards = layout.shards if layout.kind == "fsdp2" else 1
        sizes = {REPLICATE: layout.ranks // shards, SHARD: shards, TENSOR_PARALLEL: layout.tensor}
        on_step(f"{each.backend} among {workload.devices} ranks")
        one = replace(workload, batch=each.batch)
        mesh = {name: size for name, size in sizes.items() if size > 1}
        backend = recipes[each.backend] or each.backend
        found[each.backend, each.sharding] = simulate(one, backend, mesh)
    return found


def workload_of(args: argparse.Namespace, model: ModelShape, device: Device) -> Workload:
    cores = {} if args.cores is None else {"cores": args.cores}
    if args.lora != model.lora:
        model = replace(model, lora=args.lora)
    return Workload(
        model=model,
        batch=args.batch,
        sequence=args.sequence or min(SEQUENCE, model.longest or SEQUENCE),
        checkpointing=args.checkpointing,
        weights=args.weights,
        devices=args.devices,
        memory=device.memory,
        chip=device.chip,
        compiled=args.compile,
        microbatches=args.microbatches,
        **cores,
    )


_FIELDS = {
    "gradient_release": ("gradient_release", True, True),
    "offload": ("offload", "states", True),
    "frozen_fp8": ("fp8_params", True, False),
}
"""Flags: the field, its value, and True for a field of levels only, False for one of all others."""


def refuse_idle_flags(args: argparse.Namespace, backends: list[str | dict[str, Any]]) -> None:
    """Raise `FP8BackendError` for a flag that none of the backends takes."""
    for flag, (name, _, of_levels) in _FIELDS.items():
        if getattr(args, flag) and not any(name in each for each in backends):
            raise FP8BackendError(
                f"--{flag.replace('_', '-')} is for backends {'at' if of_levels else 'without'} a "
                f"level, and --backend names none: add {'msamp:O4' if of_levels else 'native'}, or "
                "leave it out"
            )


def backends_of(args: argparse.Namespace) -> list[str | dict[str, Any]]:
    """Return the backends with the flags' fields."""
    found = []
    for name in _listed("--backend", args.backend or (LORA_BACKENDS if args.lora else BACKENDS)):
        if name.lower() in BASELINE_DTYPES:
            found.append(name)
            continue
        recipe = {"backend": name, **features_of(args)}
        is_level = resolve(name).level != "O0"
        for flag, (name, value, of_levels) in _FIELDS.items():
            if getattr(args, flag) and is_level == of_levels:
                recipe[name] = value
        found.append(recipe)
    return found


class Change(NamedTuple):
    title: str
    options: str
    """Options of `fp8-backends estimate`, to paste."""
    estimate: Estimate


_LORA = f"--lora {LORA_RANK}"
_RELEASED = "--backend msamp:O4 --gradient-release"
_SMALLER = {
    "level O4": "--backend msamp:O4",
    "O4, gradient release": _RELEASED,
    "O4, release and checkpointing": f"{_RELEASED} --checkpointing",
    "O4, release, checkpointing and offload": f"{_RELEASED} --checkpointing --offload",
    f"LoRA, rank {LORA_RANK}, bf16 base": f"{_LORA} --backend native:dynamic",
    "LoRA, FP8 base": f"{_LORA} --backend native:dynamic --frozen-fp8",
    f"LoRA and checkpointing, rank {LORA_RANK}, bf16 base": (
        f"{_LORA} --checkpointing --backend native:dynamic"
    ),
    "LoRA and checkpointing, FP8 base": (
        f"{_LORA} --checkpointing --backend native:dynamic --frozen-fp8"
    ),
}
"""Changes of a full training, from the mildest on, and their options."""


def changes(
    args: argparse.Namespace,
    workload: Workload,
    device: Device,
    known: list[Estimate],
    on_step: Callable[[str], object],
) -> list[Change]:
    """Return changes from the mildest on: of what is stored, of what is trained, and of the number
    of devices. Left out are those that the sharding refuses, and adapters of a model that trains
    adapters already."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    best = min(known, key=lambda each: each.peak)
    usable = SHARE_OF_MEMORY * device.memory
    made: list[Change] = []

    def estimated(
        options: str, sharding: str, traced: dict, where: Device = UNKNOWN
    ) -> Estimate | None:
        """Return the estimate of a change, with the user's other options; None if it is refused."""
        changed = parser.parse_args(options.split(), copy.copy(args))
        changed.batch = changed.batch or 1
        changed_workload = workload_of(changed, workload.model, where)
        with contextlib.suppress(FP8BackendError):
            return estimate(changed_workload, backends_of(changed), [sharding], traced=traced)[0]
        return None

    def add(title: str, options: str, sharding: str) -> None:
        on_step(title)
        traced: dict = {}
        one = estimated(options, sharding, traced)
        if one is None:
            return
        if one.peak <= usable and not any(each.estimate.fits for each in made):
            one = estimated(options, sharding, traced, device)  # the recommended one
        one.fits = one.peak <= usable
        made.append(Change(title, options, one))

    if not args.checkpointing:
        options = f"--backend {best.backend} --checkpointing"
        add("activation checkpointing", options, best.sharding)
    if not args.lora:
        for title, options in _SMALLER.items():
            add(title, options, best.sharding)
    kind = best.sharding if "fsdp2" in best.sharding or best.sharding == "hsdp" else "fsdp2"
    backend = best.backend if "msamp" in best.backend else "msamp:O2"
    if best.sharding.startswith("zero"):
        backend = "bf16"
    traced: dict = {}
    devices = args.devices
    while (devices := 2 * devices) <= MOST_DEVICES:
        if devices <= best.static / device.memory / 2:
            continue
        options = f"--devices {devices} --sharding {kind} --backend {backend}"
        one = estimated(options, kind, traced)
        if one is None:
            break
        if one.peak <= usable or devices == MOST_DEVICES:
            add(f"{devices} devices", options, kind)
            break
    return made


def device_named(name: str | None) -> Device:
    """Return a device by name or GiB; None is this machine. Raises `FP8BackendError` for unknown or
    ambiguous names."""
    if name is None and hardware.has_gpu():
        memory = min(
            torch.cuda.get_device_properties(i).total_memory
            for i in range(torch.cuda.device_count())
        )
        return Device(
            f"{torch.cuda.get_device_name(0)} ({memory / GIB:.0f} GiB)", memory, hardware.chip().key
        )
    name = name or chips.CPU.key
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:gib|gb)?", name.lower())
    if number is not None and float(number[1]):
        return Device(f"device of {number[1]} GiB", float(number[1]) * GIB)
    try:
        product = chips.product_named(name)
    except RecipeError as error:
        raise FP8BackendError(f"--chip: {error}; or the GiB of one device, such as 64") from None
    if product.gpu is None:
        memory = memory_limit()
        return Device(f"this machine's RAM ({memory / GIB:.1f} GiB)", memory, product.name)
    if product.gib is None:
        sold = [each.name for each in chips.SOLD.values() if each.chip is product.chip]
        raise FP8BackendError(
            f"--chip {name}: chips of this kind differ in memory: name one ({', '.join(sold)}), or "
            "its GiB, such as 64"
        )
    return Device(f"{product.name.upper()} ({product.gib} GiB)", product.gib * GIB, product.name)


def _listed(flag: str, text: str) -> list[str]:
    words = [word for part in text.split(",") if (word := part.strip())]
    if not words:
        raise FP8BackendError(f"{flag} names none")
    return words


NOT_WORTH_IT = (
    "no_fp8_hardware",
    "emulated_here",
    "minority_in_fp8",
    "small_layers",
    "modest_gain",
)
"""Rules for little or no speed from FP8, the plainest first."""


def fp8_advice(model: ModelShape, device: Device, backends: list[str]) -> list[str]:
    """Explain why FP8 brings little or no speed to this model on this chip, in one sentence if all
    backends agree."""
    if device.chip is None or not backends:
        return []
    product = chips.product_named(device.chip)
    advice = chips.advice_for(product.gpu, cpu_bf16=hardware.cpu_bf16())
    if advice.precision != "fp8":
        return [f"for speed train in {advice.precision}: {advice.reason}"]
    with torch.device("meta"):
        meta = model.make_model(torch.float32)
    rules = {
        name: {finding.rule for finding in validate(name, meta, chip=device.chip)}
        for name in backends
    }
    sentences = []
    for rule in (BY_NAME[name] for name in NOT_WORTH_IT):
        slow = [name for name, applying in rules.items() if rule.name in applying]
        of = "" if len(slow) == len(rules) else f" with {', '.join(slow)}"
        if slow:
            sentences.append(
                f"little or no speed is to be expected of FP8{of}: {rule.reason}; {rule.fix}"
            )
            if not of:
                return sentences[-1:]
    return sentences


HEADINGS = {
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
    "none": "nothing "
            "shared", "ddp": "DDP", "fsdp2": "FSDP2", "hsdp": "HSDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}  # fmt: skip


@dataclass
class Report:
    """Print or draw the estimates of a workload on a device."""

    workload: Workload
    device: Device
    estimates: list[Estimate]
    advice: list[str] = field(default_factory=list)
    smaller: list[Change] = field(default_factory=list)
    simulations: dict[tuple[str, str], Simulation] = field(default_factory=dict)

    @property
    def known(self) -> list[Estimate]:
        return [each for each in self.estimates if not each.refused]

    def answers(self) -> list[tuple[str, str]]:
        """Answer three questions, (question, answer) each: the fastest that fits, or the mildest
        change that does."""
        usable = SHARE_OF_MEMORY * self.workload.memory / GIB
        fitting = [each for each in self.estimates if each.fits]
        least = min(self.known, key=lambda each: each.peak)
        fit = f"yes, {len(fitting)} of {len(self.known)} do" if fitting else "no"
        fit += f": the least is {least.backend} with {_number(least.peak / GIB)} of {usable:.0f} usable GiB"
        if not fitting:
            mild = [each for each in self.smaller if each.estimate.fits]
            if not mild:
                return [("fits?", f"{fit}; and none of the changes below is enough")]
            fit += f"; with {mild[0].title} it needs {_number(mild[0].estimate.peak / GIB)}"
            fitting = [mild[0].estimate]
        best = max(fitting, key=lambda each: (each.tokens_per_second or 0, -each.peak))
        recipe = f'mixed_precision="{best.backend}"'
        if best.backend not in BASELINE_DTYPES:
            fields = "".join(f", {name}={value!r}" for name, value in best.fields.items())
            recipe = f'mixed_precision="fp8", kwargs_handlers=[FP8RecipeKwargs(backend="{best.backend}"{fields})]'
        return [("fits?", fit), ("speed?", self._speed(best)), ("recipe", f"Accelerator({recipe})")]

    def _speed(self, best: Estimate) -> str:
        if best.time is None:
            card = chips.CARDS.get(self.workload.chip)
            what = f"{best.backend} on this chip" if card and card.rates else "this chip"
            return f"unknown: no public rates of {what} are known here; least memory that fits: {best.backend}"
        time, (low, ratio, high) = best.time, best.speedup
        text = f"{best.backend}: {_time(time.seconds)} a step ({_time(time.low)} to {_time(time.high)}), "
        text += f"{best.tokens_per_second:,.0f} tokens/s a device"
        if best.backend not in BASELINE_DTYPES:
            text += f", {ratio:.2f} times bf16 ({low:.2f} to {high:.2f})"
            chip = chips.CARDS[self.workload.chip].rates
            recipe = resolve(best.backend)
            tokens = best.batch * self.workload.sequence
            text += f"; {pays_from(recipe.compute, recipe.scaling, chip, tokens)}"
        return f"{text}; rates: {time.source}"

    def training(self) -> str:
        """Describe the training in a line."""
        workload = self.workload
        model = self.workload.model
        weights = "bf16 weights"
        if model.lora:
            weights = f"LoRA of rank {model.lora} in FP32 on a frozen bf16 model"
        elif workload.weights == "fp32":
            weights = "FP32 weights under bf16 autocast"
        samples = "the most that fit"
        if workload.batch:
            samples = model.samples(workload.batch, workload.sequence)
        if workload.microbatches > 1:
            samples += f", {workload.microbatches} times a step"
        end = ", activation checkpointing" if workload.checkpointing else ""
        return f"{workload.devices} x {self.device.title}; on each {samples}; {weights}, fused AdamW{end}"

    def to_dict(self) -> dict[str, Any]:
        names = ("batch", "sequence", "microbatches", "checkpointing", "weights", "devices")
        return {
            "model": self.workload.model.title,
            "parameters": self.workload.model.parameters,
            "device": self.device._asdict(),
            "settings": {name: getattr(self.workload, name) for name in names},
            "estimates": [each.to_dict() for each in self.estimates],
            "changes": [
                {**each._asdict(), "estimate": each.estimate.to_dict()} for each in self.smaller
            ],
            "answer": dict(self.answers()),
            "simulations": [
                {
                    "backend": backend,
                    "sharding": sharding,
                    "peak": one.peak,
                    "sent": one.sent,
                    "peaks": one.peaks,
                    "collectives": {
                        " ".join(key): each._asdict() for key, each in one.traffic.items()
                    },
                }
                for (backend, sharding), one in self.simulations.items()
            ],
            "advice": self.advice,
        }

    def __str__(self) -> str:
        known = self.known
        workload = self.workload
        most = max(each.peak for each in known)
        unit, size = next((unit, size) for unit, size in _UNITS.items() if most >= size)
        model = workload.model.title
        if not model.endswith("parameters)"):
            model += f": {readable_count(workload.model.parameters)} parameters"
        head = [("model", model), ("training", self.training()), *self.answers()]
        parts = [paragraphs(head)]
        for sharding in dict.fromkeys(each.sharding for each in self.estimates):
            where = "the device"
            if workload.devices > 1:
                where = f"each of {workload.devices} devices, {_SHARDINGS.get(sharding, sharding)}"
            group = [each for each in self.estimates if each.sharding == sharding]
            parts.append(f"{unit} on {where}\n{_table(group, size)}")
            if any(each.time for each in group):
                form = "compiled" if workload.compiled else "eager"
                parts.append(f"time of a step, {form}\n{table(_times(group))}")
        if self.smaller:
            rows = [
                (_fit_of(each.estimate), f"{each.title}: {each.options}") for each in self.smaller
            ]
            parts.append(f"peak with a change\n{paragraphs(rows)}")
        parts.append(paragraphs(self._legend()))
        if self.simulations:
            parts.append(f"simulated step of rank 0, in GiB\n{table(self._traffic())}")
        return "\n\n".join(parts)

    def _legend(self) -> Iterator[tuple[str, str]]:
        known = self.known
        for name, meaning in _MEANINGS.items():
            if _has_column(name, known):
                yield HEADINGS[name], meaning
        moments = "; ".join(dict.fromkeys(each.peak_at for each in known))
        yield "peak", f"the highest moment of a step ({moments})"
        if _has_column("sent", known):
            yield "sent", "to other devices in a step"
        yield from _LEGEND
        if any(each.time for each in known):
            yield "/ bf16", "speed over bf16, with its interval"
        for note in dict.fromkeys(note for each in known for note in each.notes):
            yield "note", note
        for sentence in self.advice:
            yield "advice", sentence

    def _traffic(self) -> list[list[str]]:
        rows = ["backend sharding peak sent collective among ranks calls GiB".split()]
        for (backend, sharding), one in self.simulations.items():
            head = [backend, sharding, _number(one.peak / GIB), _number(one.sent / GIB)]
            for (dimension, kind), each in one.traffic.items():
                size = _number(each.bytes / GIB)
                rows.append([*head, kind, dimension, str(each.ranks), f"{each.calls:.0f}", size])
                head = [""] * len(head)
        return rows

    def page(self) -> str:
        known = self.known
        timed = [each for each in known if each.time]
        colors = {each.backend: f"var(--c{i % page.COLORS + 1})" for i, each in enumerate(known)}

        def bars(title: str, values: Iterable[tuple[Estimate, float, str]]) -> str:
            where = "" if self.workload.devices == 1 else ", {}"
            rows = [
                (e.backend + where.format(e.sharding), colors[e.backend], value, label)
                for e, value, label in values
            ]
            return page.bars(rows, title)

        mood = "good" if any(each.fits for each in known) else "bad"
        headline, *details = (" ".join(answer) for answer in self.answers())
        head, *rows = [[page.signed(cell) for cell in row] for row in _times(timed)]
        peaks = ((e, e.peak, f"{_number(e.peak / GIB)} GiB") for e in known)
        seconds = ((e, e.time.seconds, _time(e.time.seconds)) for e in timed)
        sections = {
            "Peak memory of a device": bars("GiB", peaks),
            "Time of a step": bars("seconds", seconds),
            "Its parts": page.table(head, rows) if timed else "",
        }
        facts = [self.workload.model.title, self.training()]
        verdict = Verdict(mood, headline, details)
        return page.page("A training, estimated", facts, verdict, sections)


_LEGEND = (
    ("FP8", "share of the FLOPs of weight products"),
    (
        "fits",
        f"the peak is at most {share(SHARE_OF_MEMORY)} of the memory; the rest is for libraries and "
        "fragmentation",
    ),
    ("largest", "parameters of this shape with more or fewer layers"),
    ("batch", "the most samples at a time on a device"),
)


def _fit_of(one: Estimate) -> str:
    if one.refused:
        return "refused"
    return f"{_number(one.peak / GIB):>4} GiB {'fits' if one.fits else 'no'} "


def _times(group: Iterable[Estimate]) -> list[list[str]]:
    """Return headings, and rows of each backend with a time."""
    timed = [each for each in group if each.time]
    parts = [
        name
        for name in TIMED
        if any(each.time.parts[name] > 0.002 * each.time.seconds for each in timed)
    ]
    rows = [["", "seconds", "between", "tokens/s", "/ bf16", "between", *parts]]
    for each in timed:
        time, (low, ratio, high) = each.time, each.speedup
        row = [
            each.backend,
            f"{time.seconds:.3g}",
            f"{time.low:.2g}-{time.high:.2g}",
            f"{each.tokens_per_second:,.0f}",
            f"{ratio:.2f}",
            "" if each.backend in BASELINE_DTYPES else f"{low:.2f}-{high:.2f}",
        ]
        rows.append(row + [share(time.parts[name] / time.seconds) for name in parts])
    return rows


def _table(group: list[Estimate], size: int) -> str:
    known = [each for each in group if not each.refused]
    columns = [name for name in HEADINGS if _has_column(name, known)]
    rows = [["", *(HEADINGS[name] for name in columns), "FP8", "fits", "largest", "batch"]]
    for each in known:
        largest = "?"
        if each.largest_parameters is not None:
            largest = readable_count(each.largest_parameters) if each.largest_layers else "none"
        numbers = [_number(getattr(each, name) / size) for name in columns]
        fits = {True: "yes", False: "no", None: "?"}[each.fits]
        row = [each.backend, *numbers, share(each.flops_share), fits, largest]
        rows.append([*row, str(each.largest_batch)])
    refused = [
        (f"{each.backend}:", each.refused.removeprefix(f"{each.backend}: "))
        for each in group
        if each.refused
    ]
    return "\n".join(
        [*([table(rows)] if known else []), *([paragraphs(refused)] if refused else [])]
    )


def _has_column(name: str, estimates: Iterable[Estimate]) -> bool:
    """Return True if the field is more than a small share of a peak."""
    return any(getattr(each, name) > 0.002 * each.peak for each in estimates)


def _number(value: float) -> str:
    if value == 0:
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
