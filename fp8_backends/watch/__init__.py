"""Watch training: `guard` acts on bad steps, `monitor` samples casts."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import `guard`, `monitor` or `schedule` when a user asks for it, as in
    `fp8_backends.watch.guard.faults`."""
    if name not in ("guard", "monitor", "schedule"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
