"""Explain an installed TransformerEngine that does not import."""

from __future__ import annotations

import signal
import subprocess
import sys
import traceback

from ..hardware import Availability

TIME_LIMIT = 120.0
"""Seconds for the import in a new process. It takes 3 to 20, and some minutes from a cold network disk."""
GUIDE = "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/installation.html"


def explain(error: BaseException) -> Availability:
    """Quote the exception of a failed import, and name the fix."""
    return _fails(f"fails with {' '.join(traceback.format_exception_only(error)[-1].split())}")


def probe(time_limit: float = TIME_LIMIT) -> Availability:
    """Import TransformerEngine in a new process, since the import may hang or crash."""
    command = [sys.executable, "-c", "import torch, transformer_engine.pytorch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit)
    except subprocess.TimeoutExpired:
        return _fails(f"did not end within {time_limit:.0f} seconds")
    if done.returncode < 0:
        return _fails(f"ends the process with {signal.Signals(-done.returncode).name}")
    if done.returncode:
        return _fails(f"fails with {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return Availability(True, "TransformerEngine imports")


def _fails(how: str) -> Availability:
    fix = f"reinstall it for this PyTorch and CUDA: {GUIDE}"
    return Availability(False, f"importing TransformerEngine {how}", fix)
