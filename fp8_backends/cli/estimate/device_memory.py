"""How much memory devices have."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import torch

from ...compute import hardware
from ...compute.fields import closest
from ...errors import FP8BackendError

GIB = 2**30

DEVICE_GIB = {
    "a100": 80,
    "a100-40": 40,
    "h100": 80,
    "h200": 141,
    "b200": 180,
    "b300": 270,
    "l4": 24,
    "l40s": 48,
    "rtx3090": 24,
    "rtx4090": 24,
    "rtx5090": 32,
    "mi300x": 192,
    "mi325x": 256,
    "mi350x": 288,
}
"""From NVIDIA's and AMD's data sheets (B200 and B300: a DGX's memory over its 8 GPUs). Drivers show it in GiB, up to
a percent less; 6 % less on cards with GDDR memory whose ECC is on."""


class Device(NamedTuple):
    title: str
    memory: float
    """Bytes."""


def device_named(text: str | None) -> Device:
    """A device by its name, by its GiB, "cpu" for this machine's RAM; None: this machine's GPU or RAM.

    Raises:
        FP8BackendError: an unknown name.
    """
    if text is None:
        return _here()
    name = text.lower().replace(" ", "").replace("_", "-")
    if name in DEVICE_GIB:
        return Device(f"{text.upper()} ({DEVICE_GIB[name]} GiB)", DEVICE_GIB[name] * GIB)
    if name == "cpu":
        return _cpu()
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:gib|gb)?", name)
    if found is None or not float(found[1]):
        names = [*DEVICE_GIB, "cpu"]
        raise FP8BackendError(
            f"--device {text}: unknown{closest(name, names)}. Known: {', '.join(names)}; or the GiB of one device, "
            f"such as 64"
        )
    return Device(f"a device of {found[1]} GiB", float(found[1]) * GIB)


def _here() -> Device:
    if not hardware.has_gpu():
        return _cpu()
    memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return Device(f"{torch.cuda.get_device_name(0)} ({memory / GIB:.0f} GiB)", memory)


def _cpu() -> Device:
    """The RAM of this machine, or what its control group leaves of it."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as limit:
                memory = min(memory, float(limit.read()))
        except (OSError, ValueError):
            continue  # another version of control groups, or no limit ("max")
    return Device(f"this machine's RAM ({memory / GIB:.1f} GiB)", memory)
