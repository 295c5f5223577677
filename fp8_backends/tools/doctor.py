"""`fp8-backends doctor`: list the backends that run on this machine, test them, and fix the
others."""

import argparse
import json
import platform
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from .. import __version__
from ..compute import chips, hardware, registry
from ..compute.rates import Rates, pays_from
from ..compute.te.backend import REINSTALL
from ..errors import FP8BackendError
from ..words import share
from . import self_test
from .terminal import paragraphs, table

MORE_LIBRARIES = ("deepspeed", "peft", "trl", "triton")
"""Optional libraries to list besides `hardware.LIBRARIES`."""
SCALED_LEVELS = ("O1", "O2", "O3", "O4")
TE_TIME_LIMIT = 120.0
"""Seconds for importing TransformerEngine, usually 3 to 20, or minutes from a cold network disk."""

Lines = Iterator[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists devices and versions, says for each backend whether it can run here, or why not, "
        "and trains one step of a small model with each that can, beside a plain one. Recommends a "
        "precision for this chip."
    )
    parser.add_argument("--no-test", action="store_true", help="run no training step")
    parser.add_argument(
        "--chips", action="store_true", help="print which backend has FP8 products on which chip"
    )
    parser.add_argument(
        "--chip",
        help="say what another chip does, and nothing of this machine: h100, l40s, hopper, …",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, the chips included")


def run(args: argparse.Namespace) -> int:
    if args.chip is not None:
        product = chips.product_named(args.chip)
        advice = chips.advice_for(product.gpu, cpu_bf16=hardware.cpu_bf16())._asdict()
        report = {"name": product.name, "advice": advice, "chip": chips.described(product.chip)}
        rows = [
            _advice(advice, product.rates or product.chip.rates),
            *_chip(report["chip"]),
        ]
        print(json.dumps(report, indent=1) if args.json else paragraphs(rows))
        return 0
    if args.json:
        every_chip = [chips.described(chip) for chip in chips.CHIPS]
        print(json.dumps({**diagnosis(not args.no_test), "chips": every_chip}, indent=1))
    elif args.chips:
        notes = [(f"({number})", str(note)) for number, note in enumerate(chips.NOTES.values(), 1)]
        legend = paragraphs([*(("", line) for line in chips.legend()), *notes], label_width=4)
        print(f"{table(chips.rows(), justify='left')}\n\n{legend}")
    else:
        report = diagnosis(not args.no_test)
        parts = (
            _machine(report),
            _backends(report["backends"]),
            _tests(report["tests"]),
            _chip(report["chip"]),
        )
        print("\n\n".join(map(paragraphs, parts)))
    return 0


def diagnosis(tests: bool = True) -> dict[str, Any]:
    """Return devices, versions, backends, test results, this chip's products and the recommended
    precision."""
    described = hardware.describe()
    devices = []
    for index in range(torch.cuda.device_count() if hardware.has_gpu() else 0):
        gpu = torch.cuda.get_device_properties(index)
        fp8 = hardware.gpu_chip(index).fp8
        chip = gpu.gcnArchName if torch.version.hip else f"{gpu.major}.{gpu.minor}"
        devices.append(
            {"name": gpu.name, "chip": chip, "memory_bytes": gpu.total_memory, "fp8_products": fp8}
        )
    optional = {"CUDA of torch": torch.version.cuda, "ROCm of torch": torch.version.hip}
    versions = {
        **{"fp8-backends": __version__, "python": platform.python_version()},
        **{name: version for name, version in optional.items() if version},
        **described.pop("versions"),
        **{
            name: version
            for name in MORE_LIBRARIES
            if (version := hardware.version(name)) is not None
        },
    }
    backends = {}
    for name, availability in registry.available_backends().items():
        try:
            scalings = list(registry.get_compute(name).scalings)
        except FP8BackendError:
            scalings = []
        backends[name] = {**asdict(availability), "scalings": scalings}
    _explain_te(backends)
    return {
        "hardware": described | {"devices": devices, "driver": _driver()},
        "versions": versions,
        "advice": hardware.advice(bool(backends.get("te", {}).get("can_run")))._asdict(),
        "auto": registry.auto_choice()._asdict(),
        "backends": backends,
        "tests": [asdict(test) for test in self_test.run(_to_test(backends))] if tests else None,
        "chip": chips.described(hardware.chip(), hardware.cuda_release(), hardware.torch_release()),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(output.split()), None)


def _explain_te(backends: dict[str, dict[str, Any]]) -> None:
    """Import a TransformerEngine that looks usable in a new process, since the import may hang or
    crash."""
    if not backends.get("te", {}).get("can_run"):
        return
    command = [sys.executable, "-c", "import torch, transformer_engine.pytorch"]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=TE_TIME_LIMIT, check=True)
        return
    except subprocess.TimeoutExpired:
        how = f"did not end within {TE_TIME_LIMIT:.0f} seconds"
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        how = f"fails with {last}"
        if error.returncode < 0:
            how = f"ends with {signal.Signals(-error.returncode).name}"
    backends["te"] |= {
        "can_run": False,
        "reason": f"importing TransformerEngine {how}",
        "fix": REINSTALL,
    }


def _to_test(backends: dict[str, dict[str, Any]]) -> list[str]:
    """List the rules of backends that can run here and that this chip does not refuse, and the
    levels."""
    chip = hardware.chip()
    cuda = hardware.cuda_release()
    names = []
    for name, backend in backends.items():
        if not backend["can_run"] or not backend["scalings"]:
            continue
        for rule in (f"{name}:{scaling}" for scaling in backend["scalings"]):
            cell = chips.cell_of(rule, chip)
            if cell is None or cell.state_with(cuda) != chips.REFUSED:
                names.append(rule)
        prefix = "" if name == "native" else f"{name}+"
        names += [
            f"{prefix}msamp:{level}"
            for level in SCALED_LEVELS
            if level in registry.get_compute(name).levels
        ]
    return names


def _machine(report: dict[str, Any]) -> Lines:
    machine = report["hardware"]
    if not machine["devices"]:
        fast = "without fast bf16 products: FP32 runs around FP8"
        if machine["cpu_bf16"]:
            fast = "with bf16 products"
        yield "device", f"{machine['device']}, {fast}; no GPU is visible"
    alike = Counter(tuple(device.values()) for device in machine["devices"])
    for number, ((name, chip, memory, fp8), count) in enumerate(alike.items()):
        can = "FP8 products in hardware" if fp8 else "no FP8 products"
        chip = chip if "gfx" in chip else f"capability {chip}"
        yield (
            "" if number else "device",
            f"{count} x {name} ({memory / 2**30:.0f} GiB), {chip}: {can}",
        )
    if len(alike) > 1:
        yield "", "they differ, and train together: the least of them decides"
    if machine["driver"]:
        yield "driver", machine["driver"]
    yield (
        "versions",
        ", ".join(
            f"{name} {version or 'not installed'}" for name, version in report["versions"].items()
        ),
    )
    yield _advice(report["advice"], hardware.chip().rates)
    yield "auto", f"means {report['auto']['backend']} here: {report['auto']['reason']}"


def _advice(advice: dict[str, str], known: Rates | None) -> tuple[str, str]:
    precision = "FP8" if advice["precision"] == "fp8" else advice["precision"]
    backend = f" ({advice['backend']})" if advice["backend"] else ""
    sizes = f"; {pays_from('native', 'dynamic', known)}" if known else ""
    return "advice", f"train in {precision}{backend}: {advice['reason']}{sizes}"


def _backends(backends: dict[str, dict[str, Any]]) -> Lines:
    for name, backend in backends.items():
        state = "can run" if backend["can_run"] else "cannot run"
        yield name, state + (f": {backend['reason']}" if backend["reason"] else "")
        if backend["can_run"] and backend["scalings"]:
            yield (
                "",
                f"scalings: {', '.join(f'{name}:{scaling}' for scaling in backend['scalings'])}",
            )
        if backend["fix"]:
            yield "", f"fix: {backend['fix']}"


def _tests(tests: list[dict[str, Any]] | None) -> Lines:
    if tests is None:
        yield "tests", "left out (--no-test): nothing here is proven"
        return
    proven = [test for test in tests if test["proven"]]
    yield "proven", ", ".join(test["backend"] for test in proven) or "none"
    if proven:
        error = max(test["gradient_error"] for test in proven)
        seconds = sum(test["seconds"] for test in tests)
        bound = f"gradients within {share(error)} of {proven[0]['precision']}'s"
        facts = f"every product in FP8, {bound}, bytes as planned, weights moved"
        yield "", f"(a training step each, {seconds:.1f} s in all: {facts})"
    yield from (
        ("unproven", f"{test['backend']}: {test['reason']}") for test in tests if not test["proven"]
    )


def _chip(chip: dict[str, Any]) -> Lines:
    """List the products of the backends on this chip, in one line for equal ones."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for row in chip["products"]:
        alike.setdefault((row["state"], row["reason"], row["install"]), []).extend(row["backends"])
    yield "chip", f"{chip['title']} ({chip['examples']}); all chips: fp8-backends doctor --chips"
    order = list(chips.MEANING)
    for (state, reason, install), backends in sorted(
        alike.items(), key=lambda item: order.index(item[0][0])
    ):
        text = ", ".join(backends) + (f": {reason}" if reason else "")
        yield (
            state,
            text + (f"; install {install}" if state == chips.RUNS and install != "nothing" else ""),
        )
    for state in dict.fromkeys(row["state"] for row in chip["products"]):
        yield "", f"({state}: {chips.MEANING[state]})"
