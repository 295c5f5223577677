"""Start Python processes without loading torch for seconds: fork them from a process that has
loaded it.

Tests of scripts, on one or several ranks, need a separate process and environment, not a new
interpreter. Tests of loading itself (`test_import.py` and others) start `sys.executable`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "TESTS_WARM_PYTHON"
"""Environment variable: the program in place of Python; set by the pytest that has started the
server."""
HERE = Path(__file__).parent


def start() -> subprocess.Popen | None:
    """Start the server, unless an outer pytest has. It loads nothing before a request, and ends
    with this process."""
    if VARIABLE in os.environ:
        return None
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    server = subprocess.Popen(
        [sys.executable, str(HERE / "warm_server.py"), str(folder / "socket")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # the end of the tests leaves it time to end its processes
    )
    server.stdout.readline()  # it listens
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -IS "{HERE}/warm_client.py" "$0" "$@"\n'
    )
    program.chmod(0o755)
    os.environ[VARIABLE] = str(program)
    return server


def end(server: subprocess.Popen) -> None:
    del os.environ[VARIABLE]
    server.communicate()


def python() -> str:
    """Return the program in place of `sys.executable`: a forked process could not use a GPU."""
    import torch

    return sys.executable if torch.cuda.is_available() else os.environ[VARIABLE]


def run(*arguments: str, timeout: float = 240, **options) -> subprocess.CompletedProcess[str]:
    """Call `subprocess.run` of `python` with these arguments: a script, `-m` or `-c` first. Capture
    its output as text."""
    return subprocess.run(
        [python(), *arguments], capture_output=True, text=True, timeout=timeout, **options
    )
