"""Reset Accelerate's process state for each test with an Accelerator in pytest's own process."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import fp8_backends


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch):
    """Accelerate's process-wide state and its environment, empty before and after each test; on the
    CPU, offline."""

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    for name in os.environ:
        if name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reset()
    fp8_backends.connect()
    torch.manual_seed(0)
    yield
    reset()
