from __future__ import annotations

import pytest
from accelerate_state import fresh_accelerate

__all__ = ["fresh_accelerate", "launched"]


@pytest.fixture
def launched(monkeypatch):
    """The environment of `accelerate launch --mixed_precision fp8 --fp8_backend native`; another by
    calling it."""

    def launch(backend: str = "native", **fields: str) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
        for name, value in fields.items():
            monkeypatch.setenv(f"ACCELERATE_FP8_{name.upper()}", value)

    launch()
    return launch
