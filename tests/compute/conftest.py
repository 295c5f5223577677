"""Use the casts for large matrices on a CPU for the small layers of these tests, too."""

import pytest

from fp8_backends.compute import hardware
from fp8_backends.kernels import cpu_casts


@pytest.fixture(autouse=True)
def casts_of_large_matrices(monkeypatch):
    """Compiled and traced code takes the reference, as do small layers in other folders' tests."""
    monkeypatch.setattr(cpu_casts, "FEWEST_TO_CAST", 0)


@pytest.fixture(params=[True, False], ids=["bf16 in hardware", "no bf16 in hardware"])
def either_cpu(request, monkeypatch):
    """Pretend a CPU with bf16 products in hardware, then one without. Return True for the first."""
    monkeypatch.setattr(hardware, "cpu_bf16", lambda: request.param)
    return request.param
