"""`fp8-backends doctor`: what can run on this machine, whether it does, and what to do about the rest."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import subprocess
from dataclasses import asdict
from typing import Any

from ..paragraphs import WIDTH, paragraph

SUMMARY = "which backends run on this machine, proven by a test, and why not"

LIBRARIES = ("deepspeed", "peft", "trl", "triton")
"""Beside `hardware.LIBRARIES`, those whose versions matter where they are installed."""
LEVELS = ("O1", "O2", "O3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists devices and versions, says for each backend whether it can run here, or why not, and trains one step of "
        "a small model with each that can, beside a plain one. Recommends a precision for this chip."
    )
    parser.add_argument("--no-test", action="store_true", help="run no training step")
    parser.add_argument("--chips", action="store_true", help="print which backend has FP8 products on which chip")
    parser.add_argument("--json", action="store_true", help="print JSON, the chips included")


def run(args: argparse.Namespace) -> int:
    from ...compute import chips

    if args.json:
        every_chip = {"chips": [chips.described(chip) for chip in chips.CHIPS]}
        print(json.dumps(diagnosis(not args.no_test) | every_chip, indent=1))
    else:
        print(chips.text(WIDTH) if args.chips else _readable(diagnosis(not args.no_test)))
    return 0


def diagnosis(tests: bool = True) -> dict[str, Any]:
    """Devices, versions, backends, what their tests found, this chip's products and the precision that is recommended,
    as plain values."""
    from ...compute import chips, hardware, registry
    from . import self_test

    described = asdict(hardware.describe())
    described |= {"devices": _devices(), "driver": _driver()}
    versions = _versions(described.pop("versions"))
    backends = {
        name: {**asdict(availability), "scalings": list(_scalings(name))}
        for name, availability in registry.available_backends().items()
    }
    _explain_te(backends)
    return {
        "hardware": described,
        "versions": versions,
        "advice": hardware.advice(bool(backends.get("te", {}).get("can_run")))._asdict(),
        "auto": registry.auto_backend(),
        "backends": backends,
        "tests": [asdict(test) for test in self_test.run(_to_test(backends))] if tests else None,
        "chip": chips.described(hardware.chip(), hardware.cuda_release()),
    }


def _versions(of_libraries: dict[str, str | None]) -> dict[str, str | None]:
    import torch

    from ... import __version__
    from ...compute import hardware

    more = {name: version for name in LIBRARIES if (version := hardware.version(name)) is not None}
    cuda = {"CUDA of torch": torch.version.cuda} if torch.version.cuda else {}
    rocm = {"ROCm of torch": torch.version.hip} if torch.version.hip else {}
    return {"fp8-backends": __version__, "python": platform.python_version(), **cuda, **rocm, **of_libraries, **more}


def _devices() -> list[dict[str, Any]]:
    """Every GPU that this process may use (`CUDA_VISIBLE_DEVICES`)."""
    import torch

    from ...compute import hardware

    found = []
    for index in range(torch.cuda.device_count() if hardware.has_gpu() else 0):
        properties = torch.cuda.get_device_properties(index)
        chip = properties.gcnArchName if torch.version.hip else f"{properties.major}.{properties.minor}"
        fp8 = hardware.gpu_chip(index).fp8
        found.append(
            {"name": properties.name, "chip": chip, "memory_bytes": properties.total_memory, "fp8_products": fp8}
        )
    return found


def _driver() -> str | None:
    """Version of NVIDIA's driver; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = done.stdout.split()
    return said[0] if done.returncode == 0 and said else None


def _to_test(backends: dict[str, dict[str, Any]]) -> list[str]:
    """Every rule of every backend that can run here and that this chip does not refuse, and the levels."""
    from ...compute import chips, hardware, registry

    chip, cuda, names = hardware.chip(), hardware.cuda_release(), []
    for name, backend in backends.items():
        if not backend["can_run"]:
            continue
        for scaling in backend["scalings"]:
            cell = chips.cell_of(f"{name}:{scaling}", chip)
            if cell is None or cell.state_with(cuda) != chips.REFUSED:
                names.append(f"{name}:{scaling}")
        levels = set(LEVELS).intersection(registry.levels_of(name)) if backend["scalings"] else ()
        names += [f"msamp:{level}" if name == "native" else f"{name}+msamp:{level}" for level in sorted(levels)]
    return names


def _explain_te(backends: dict[str, dict[str, Any]]) -> None:
    """An installed TransformerEngine that does not import: the reason that its own exception gives."""
    from ...compute.te import installation as te_installation

    if "te" not in backends or importlib.util.find_spec("transformer_engine") is None:
        return
    found = te_installation.probe()
    if not found:
        backends["te"] |= asdict(found)


def _scalings(name: str) -> tuple[str, ...]:
    """The rules that run in this version."""
    from ...compute.registry import get_compute
    from ...errors import FP8BackendError

    try:
        return get_compute(name).scalings
    except FP8BackendError:
        return ()


def _readable(found: dict[str, Any]) -> str:
    lines = [*_machine(found["hardware"]), *_version_lines(found["versions"])]
    advice = found["advice"]
    chosen = advice["precision"].upper() if advice["precision"] == "fp8" else advice["precision"]
    backend = f" ({advice['backend']})" if advice["backend"] else ""
    lines += paragraph("advice", f"train in {chosen}{backend}: {advice['reason']}")
    lines += [*paragraph("auto", f"means {found['auto']} here"), ""]
    for name, backend in found["backends"].items():
        state = "can run" if backend["can_run"] else "cannot run"
        lines += paragraph(name, state + (f": {backend['reason']}" if backend["reason"] else ""))
        if backend["can_run"] and backend["scalings"]:
            lines += paragraph("", f"scalings: {', '.join(f'{name}:{scaling}' for scaling in backend['scalings'])}")
        if backend["fix"]:
            lines += paragraph("", f"fix: {backend['fix']}")
    return "\n".join([*lines, "", *_test_lines(found["tests"]), "", *_chip(found["chip"])])


def _machine(hardware: dict[str, Any]) -> list[str]:
    devices = hardware["devices"]
    if not devices:
        fast = "with bf16 products" if hardware["cpu_bf16"] else "without fast bf16 products: FP32 runs around FP8"
        lines = paragraph("device", f"{hardware['device']}, {fast}; no GPU is visible")
    alike: dict[tuple, int] = {}
    for device in devices:
        key = (device["name"], device["chip"], device["memory_bytes"], device["fp8_products"])
        alike[key] = alike.get(key, 0) + 1
    for number, ((name, chip, memory, fp8), count) in enumerate(alike.items()):
        can = "FP8 products in hardware" if fp8 else "no FP8 products"
        line = f"{count} x {name} ({memory / 2**30:.0f} GiB), {'' if 'gfx' in chip else 'capability '}{chip}: {can}"
        lines = [*(lines if number else []), *paragraph("" if number else "device", line)]
    if len(alike) > 1:
        lines += paragraph("", "they differ, and train together: the least of them decides")
    return lines + (paragraph("driver", hardware["driver"]) if hardware["driver"] else [])


def _version_lines(versions: dict[str, str | None]) -> list[str]:
    said = [f"{name} {version or 'not installed'}" for name, version in versions.items()]
    return paragraph("versions", ", ".join(said))


def _test_lines(tests: list[dict[str, Any]] | None) -> list[str]:
    """What was proven, and what not and why."""
    if tests is None:
        return paragraph("tests", "left out (--no-test): nothing here is proven")
    proven = [test for test in tests if test["proven"]]
    lines = paragraph("proven", ", ".join(test["backend"] for test in proven) or "none")
    if proven:
        error, seconds = max(test["gradient_error"] for test in proven), sum(test["seconds"] for test in tests)
        text = (
            f"(a training step each, {seconds:.1f} s in all: every product in FP8, gradients within {error:.0%} of "
            f"{proven[0]['precision']}'s, bytes as planned, weights moved)"
        )
        lines += paragraph("", text)
    for test in tests:
        if not test["proven"]:
            lines += paragraph("unproven", f"{test['backend']}: {test['reason']}")
    return lines


def _chip(chip: dict[str, Any]) -> list[str]:
    """What each backend does on this chip; those with the same to say share a line."""
    from ...compute.chips import MEANING

    alike: dict[tuple[str, str, str], list[str]] = {}
    for each in chip["products"]:
        alike.setdefault((each["state"], each["reason"], each["install"]), []).extend(each["backends"])
    lines = paragraph("chip", f"{chip['title']} ({chip['examples']}); all chips: fp8-backends doctor --chips")
    for (state, reason, install), backends in sorted(alike.items(), key=lambda item: list(MEANING).index(item[0][0])):
        said = f"{state:<8}  {', '.join(backends)}" + (f": {reason}" if reason else "")
        lines += paragraph("", said + (f"; install {install}" if state == "FP8" and install != "nothing" else ""))
    states = dict.fromkeys(each["state"] for each in chip["products"])
    return [*lines, *(line for state in states for line in paragraph("", f"({state}: {MEANING[state]})"))]
