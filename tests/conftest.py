"""For all tests: the environment of this machine says nothing about FP8."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the tests' models are small, and several run at a time

import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def no_fp8_in_environment(monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith(("ACCELERATE_FP8_", "ACCELERATE_MIXED_PRECISION", "FP8_BACKENDS_")):
            monkeypatch.delenv(name)
