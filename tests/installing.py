"""Install packages for only some of the tests' processes, in a separate folder, once a session."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path


def folder_of(requirements: Path, name: str, tmp_path_factory) -> Path:
    """Return the folder `name` with a file's packages, without their dependencies; the first worker
    installs them."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    site, unfinished = base / name, base / f"{name}.unfinished"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not site.exists():
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-compile",
            ]
            options = ["--no-deps", "--target", str(unfinished), "--requirement", str(requirements)]
            installed = subprocess.run([*pip, *options], capture_output=True, text=True)
            assert installed.returncode == 0, (
                f"pip could not install {options[-1]}:\n{installed.stderr}"
            )
            unfinished.rename(site)
    return site
