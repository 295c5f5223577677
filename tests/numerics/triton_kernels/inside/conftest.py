"""Kernels run in Triton's interpreter, on tensors of the CPU."""

from __future__ import annotations

import numpy
import pytest


@pytest.fixture(autouse=True)
def triton_interprets(no_fp8_in_environment, monkeypatch):
    """After the fixture that empties the environment: tensors of the CPU go to the kernels."""
    monkeypatch.setenv("FP8_BACKENDS_TRITON", "interpret")


@pytest.fixture(autouse=True, scope="session")
def numpy_computes_with_inf_and_nan_as_a_gpu_does():
    """Without a word: the interpreter is NumPy, which warns."""
    with numpy.errstate(all="ignore"):
        yield
