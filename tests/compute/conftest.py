"""Layers in these tests are small: the casts that serve large matrices on a CPU make their operands all the same."""

import pytest

from fp8_backends.kernels import cpu_casts


@pytest.fixture(autouse=True)
def casts_of_large_matrices(monkeypatch):
    """What is compiled or traced takes the reference, and so do small layers in other folders' tests."""
    monkeypatch.setattr(cpu_casts, "FEWEST", 0)
