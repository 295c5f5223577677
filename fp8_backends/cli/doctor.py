"""`fp8-backends doctor`: what can run on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
import importlib.util
import json
import textwrap
from dataclasses import asdict
from typing import Any

SUMMARY = "which backends can run on this machine, and why not"
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the device, the versions, for each backend whether it can run here, or why not, and what makes its "
        "products on this chip. A TransformerEngine that is installed is imported in a process of its own."
    )
    parser.add_argument("--chips", action="store_true", help="print which backend has FP8 products on which chip")
    parser.add_argument("--json", action="store_true", help="print JSON, the chips included")


def run(args: argparse.Namespace) -> int:
    from .. import hardware_table

    if args.json:
        print(json.dumps(diagnosis() | {"chips": _table()}, indent=1))
    else:
        print(hardware_table.text(WIDTH) if args.chips else _readable(diagnosis()))
    return 0


def diagnosis() -> dict[str, Any]:
    """Device, versions, backends and this chip's products, as plain values."""
    from .. import __version__, hardware, hardware_table, registry

    described = asdict(hardware.describe())
    versions = {"fp8-backends": __version__, **described.pop("versions")}
    backends = {
        name: {**asdict(availability), "scalings": list(_scalings(name))}
        for name, availability in registry.available_backends().items()
    }
    _explain_te(backends)
    products = [each._asdict() for each in hardware_table.supports_here()]
    chip = {**hardware_table.chip_here()._asdict(), "products": products}
    auto = registry.auto_backend()
    return {"hardware": described, "versions": versions, "backends": backends, "chip": chip, "auto": auto}


def _explain_te(backends: dict[str, dict[str, Any]]) -> None:
    """An installed TransformerEngine that does not import: the reason that its own exception gives."""
    from .. import te_installation

    if "te" not in backends or importlib.util.find_spec("transformer_engine") is None:
        return
    found = te_installation.probe()
    if not found:
        backends["te"] |= asdict(found)


def _table() -> list[dict[str, Any]]:
    """For each chip what every backend does there."""
    from .. import hardware_table

    return [
        {**chip._asdict(), "products": [each._asdict() for each in hardware_table.supports(chip)]}
        for chip in hardware_table.CHIPS
    ]


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
    lines = _entry("device", f"{hardware['device']}{capability}: {fp8}")
    versions = [f"{name} {version or 'not installed'}" for name, version in found["versions"].items()]
    lines += [*_entry("versions", ", ".join(versions)), *_entry("auto", f"means {found['auto']} here"), ""]
    for name, backend in found["backends"].items():
        state = "can run" if backend["can_run"] else "cannot run"
        lines += _entry(name, state + (f": {backend['reason']}" if backend["reason"] else ""))
        if backend["can_run"] and backend["scalings"]:
            lines += _entry("", f"scalings: {', '.join(f'{name}:{scaling}' for scaling in backend['scalings'])}")
        if backend["fix"]:
            lines += _entry("", f"fix: {backend['fix']}")
    return "\n".join([*lines, "", *_chip(found["chip"])])


def _chip(chip: dict[str, Any]) -> list[str]:
    """What each backend does on this chip; those with the same to say share a line."""
    from ..hardware_table import MEANING

    alike: dict[tuple[str, str, str], list[str]] = {}
    for each in chip["products"]:
        alike.setdefault((each["state"], each["reason"], each["install"]), []).extend(each["backends"])
    lines = _entry("chip", f"{chip['title']} ({chip['examples']}); all chips: fp8-backends doctor --chips")
    for (state, reason, install), backends in sorted(alike.items(), key=lambda item: list(MEANING).index(item[0][0])):
        said = f"{state:<8}  {', '.join(backends)}" + (f": {reason}" if reason else "")
        lines += _entry("", said + (f"; install {install}" if state == "FP8" and install != "nothing" else ""))
    states = dict.fromkeys(each["state"] for each in chip["products"])
    return [*lines, *(line for state in states for line in _entry("", f"({state}: {MEANING[state]})"))]


def _entry(label: str, text: str) -> list[str]:
    """One paragraph under its label, no wider than WIDTH. A command may be longer than a line: it is not broken."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{label:<9} ",
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )
