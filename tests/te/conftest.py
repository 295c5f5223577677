"""Provide TransformerEngine to the processes started by these tests; pytest's own process never has
it."""

from __future__ import annotations

import os
from pathlib import Path

import installing
import pytest

HERE = Path(__file__).parent
# run by test_inside.py, in a separate process
collect_ignore = [] if "TE_SITE" in os.environ else ["inside"]


@pytest.fixture(scope="session")
def te_site(tmp_path_factory) -> Path:
    """A folder with TransformerEngine's Python."""
    return installing.folder_of(HERE / "requirements.txt", "te_site", tmp_path_factory)
