"""For all tests: the environment of this machine says nothing about FP8."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_fp8_in_environment(monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith(("ACCELERATE_FP8_", "ACCELERATE_MIXED_PRECISION", "FP8_BACKENDS_")):
            monkeypatch.delenv(name)
