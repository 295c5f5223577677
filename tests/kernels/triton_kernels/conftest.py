"""Provide Triton to the processes started by these tests; pytest's own process never has it."""

from __future__ import annotations

import os
from pathlib import Path

import installing
import pytest

HERE = Path(__file__).parent
# by test_triton_processes.py
collect_ignore = [] if "TRITON_SITE" in os.environ else ["inside", "ahead"]


@pytest.fixture(scope="session")
def triton_site(tmp_path_factory) -> Path:
    """A folder with Triton."""
    return installing.folder_of(HERE / "requirements.txt", "triton_site", tmp_path_factory)
