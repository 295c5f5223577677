"""Select tensors for Triton's kernels, as far as a process without Triton and a GPU can tell. The folder `triton` has
the rest."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch

from fp8_backends import kernels
from fp8_backends.kernels import triton_gate


class OnGPU:
    """Stand for a tensor in the gate's checks."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def get_device(self) -> int:
        return 0


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of capability (9, 0), or of another: `gpu((8, 0))`. With Triton."""

    def of(capability):
        forget()
        monkeypatch.setattr(triton_gate, "_capability", lambda device: capability)
        return OnGPU()

    monkeypatch.setattr(triton_gate, "_KINDS", (OnGPU,))
    monkeypatch.setattr(triton_gate, "_triton_is_there", lambda: True)
    monkeypatch.setattr(triton_gate, "_passes_trial", lambda device: True)
    yield of
    forget()


def forget():
    """Clear the cached facts of devices."""
    triton_gate._runs_on.cache_clear()
    triton_gate._casts_in_hardware.cache_clear()


def test_gpus_from_ampere_on(gpu):
    for capability, usable, has_casts in (((7, 5), False, False), ((8, 0), True, False), ((8, 9), True, True)):
        tensor = gpu(capability)
        assert triton_gate.usable(tensor) == usable and triton_gate.has_fp8_casts(tensor) == has_casts


def test_the_environment_keeps_a_gpu_from_it(gpu, monkeypatch):
    """Read the variable once per device, since every launch checks."""
    for value, usable in (("0", False), ("", True)):
        tensor = gpu((9, 0))
        for _ in range(2):
            monkeypatch.setenv(triton_gate.VARIABLE, value)
            assert triton_gate.usable(tensor) == usable
            value = "" if value == "0" else "0"


def test_the_device_is_changed_only_for_another_one(monkeypatch):
    """The guard takes as long as a tenth of a launch."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert triton_gate.on_device_of(OnGPU()) is triton_gate.on_device_of(torch.randn(1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    guard = triton_gate.on_device_of(OnGPU())
    assert isinstance(guard, torch.cuda.device) and guard.idx == 0


def test_gpus_of_amd(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not triton_gate.usable(gpu((9, 4)))


def test_without_triton_it_is_said_once(monkeypatch, caplog):
    triton_gate._triton_is_there.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING):
        assert not triton_gate._triton_is_there() and not triton_gate._triton_is_there()
    (record,) = caplog.records
    assert "Triton cannot be imported" in record.message and "pip install triton" in record.message
    triton_gate._triton_is_there.cache_clear()


@pytest.mark.parametrize(
    "found", [RuntimeError("Failed to find C compiler"), "3 of 65536 casts to e4m3 differ", None], ids=str
)
def test_a_gpu_where_the_trial_fails_keeps_plain_operations_and_says_why(found, monkeypatch, caplog):
    monkeypatch.setattr(triton_gate, "_capability", lambda device: (9, 0))

    def obstacle(device, has_fp8_casts):  # a stand-in: the trial itself needs Triton, and a GPU
        assert device == torch.device("cuda", 1) and has_fp8_casts
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setitem(sys.modules, "fp8_backends.kernels.triton_common", types.SimpleNamespace(obstacle=obstacle))
    monkeypatch.setattr(kernels, "triton_common", sys.modules["fp8_backends.kernels.triton_common"], raising=False)
    with caplog.at_level(logging.WARNING):
        assert triton_gate._passes_trial(1) == (found is None)
    assert [str(found) in record.message and "cuda:1" in record.message for record in caplog.records] == [True] * bool(
        found
    )


def test_a_cpu_alone_does_not(monkeypatch):
    assert not triton_gate.usable(torch.randn(4)) and not triton_gate.has_fp8_casts(torch.randn(4))
    monkeypatch.setenv(triton_gate.VARIABLE, "interpret")  # without Triton's own switch
    assert not triton_gate.usable(torch.randn(4))
