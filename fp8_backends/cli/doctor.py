"""`fp8-backends doctor`: what can run on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

SUMMARY = "which backends can run on this machine, and why not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the device, the versions, and for each backend whether it can run here, or why not."
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    found = diagnosis()
    print(json.dumps(found, indent=1) if args.json else _readable(found))
    return 0


def diagnosis() -> dict[str, Any]:
    """Device, versions and backends, as plain values."""
    from .. import __version__, hardware, registry

    described = asdict(hardware.describe())
    versions = {"fp8-backends": __version__, **described.pop("versions")}
    backends = {
        name: {**asdict(availability), "scalings": list(_scalings(name))}
        for name, availability in registry.available_backends().items()
    }
    return {"hardware": described, "versions": versions, "backends": backends, "auto": registry.auto_backend()}


def _scalings(name: str) -> tuple[str, ...]:
    """The rules that run in this version."""
    from ..errors import FP8BackendError
    from ..registry import get_compute

    try:
        return get_compute(name).scalings
    except FP8BackendError:
        return ()


def _readable(found: dict[str, Any]) -> str:
    hardware = found["hardware"]
    fp8 = "FP8 products in hardware" if hardware["fp8_products"] else "no FP8 products: bf16 is faster here"
    capability = "" if hardware["capability"] is None else f", capability {'.'.join(map(str, hardware['capability']))}"
    lines = [f"device    {hardware['device']}{capability}: {fp8}"]
    versions = [f"{name} {version or 'not installed'}" for name, version in found["versions"].items()]
    lines += [f"versions  {', '.join(versions)}", f"auto      means {found['auto']} here", ""]
    for name, backend in found["backends"].items():
        state = "can run" if backend["can_run"] else "cannot run"
        reason = f": {backend['reason']}" if backend["reason"] else ""
        lines.append(f"{name:<9} {state}{reason}")
        if backend["can_run"] and backend["scalings"]:
            lines.append(f"{'':<9} scalings: {', '.join(f'{name}:{scaling}' for scaling in backend['scalings'])}")
        if backend["fix"]:
            lines.append(f"{'':<9} fix: {backend['fix']}")
    return "\n".join(lines)
