"""TransformerEngine for the processes that these tests start; pytest's own process never has it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore = [] if "TE_SITE" in os.environ else ["inside"]  # run by test_inside.py, in a process of their own


@pytest.fixture(scope="session")
def te_site(tmp_path_factory) -> Path:
    """A folder with TransformerEngine's Python, installed once a session, whichever worker comes first."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    site, unfinished = base / "te_site", base / "te_site.unfinished"
    with open(base / "te_site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not site.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            options = ["--no-deps", "--target", str(unfinished), "--requirement", str(HERE / "requirements.txt")]
            installed = subprocess.run([*pip, *options], capture_output=True, text=True)
            assert installed.returncode == 0, f"pip could not install {options[-1]}:\n{installed.stderr}"
            unfinished.rename(site)
    return site
