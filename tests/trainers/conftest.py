from __future__ import annotations

import os

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import fp8_backends


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch):
    """Accelerate's process-wide state and its environment, empty before and after each test; on the CPU, offline."""

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


@pytest.fixture
def launched(monkeypatch):
    """The environment of `accelerate launch --mixed_precision fp8 --fp8_backend native`; another by calling it."""

    def launch(backend: str = "native", **fields: str) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
        for name, value in fields.items():
            monkeypatch.setenv(f"ACCELERATE_FP8_{name.upper()}", value)

    launch()
    return launch
