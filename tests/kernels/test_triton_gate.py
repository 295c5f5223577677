"""Select tensors for Triton's kernels, as far as a process without Triton and a GPU can tell. The
folder `triton` has the rest."""

from __future__ import annotations

import itertools
import logging
import sys
import types

import pytest
import torch

from fp8_backends import kernels
from fp8_backends.kernels import devices, triton_gate


class OnGPU:
    """What the gate asks of a tensor. Each is on a device of its own: the gate remembers its
    answers by device."""

    is_cuda = True
    devices = itertools.count(1)

    def __init__(self) -> None:
        self.device = torch.device("cuda", next(self.devices))

    def get_device(self) -> int:
        return self.device.index


@pytest.fixture
def gpu(monkeypatch):
    """Tensors on GPUs of a capability, with Triton: `gpu((8, 0))`. `obstacle`: what the trial of
    kernels finds."""

    def of(capability, obstacle=lambda device: None):
        # a stand-in: the trial itself needs Triton, and a GPU
        matrix = types.SimpleNamespace(obstacle=obstacle)
        monkeypatch.setitem(sys.modules, "fp8_backends.kernels.triton_matrix", matrix)
        monkeypatch.setattr(kernels, "triton_matrix", matrix, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return OnGPU()

    monkeypatch.setattr(triton_gate, "is_eager", lambda tensor: True)
    monkeypatch.setattr(triton_gate, "has_triton", lambda: True)
    return of


def test_gpus_since_ampere_use_triton(gpu):
    for capability, usable, has_casts in (
        ((7, 5), False, False),
        ((8, 0), True, False),
        ((8, 9), True, True),
    ):
        tensor = gpu(capability)
        assert triton_gate.usable(tensor) == usable and devices.has_fp8_casts(tensor) == has_casts


def test_environment_disables_triton(gpu, monkeypatch):
    """Read the variable once per device, since every launch checks."""
    for value, usable in (("0", False), ("", True)):
        tensor = gpu((9, 0))
        for _ in range(2):
            monkeypatch.setenv(triton_gate.VARIABLE, value)
            assert triton_gate.usable(tensor) == usable
            value = "" if value == "0" else "0"


def test_device_guard_only_switches_to_other_devices(monkeypatch):
    """The guard takes as long as a tenth of a launch."""
    tensor = OnGPU()
    monkeypatch.setattr(torch.cuda, "current_device", tensor.get_device)
    assert devices.on_device_of(tensor) is devices.on_device_of(torch.randn(1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    guard = devices.on_device_of(tensor)
    assert isinstance(guard, torch.cuda.device) and guard.idx == tensor.get_device()


def test_amd_gpus_do_not_use_triton(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not triton_gate.usable(gpu((9, 4)))


def test_missing_triton_warns_once(monkeypatch, caplog):
    triton_gate.has_triton.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING):
        assert not triton_gate.has_triton() and not triton_gate.has_triton()
    (record,) = caplog.records
    assert "Triton cannot be imported" in record.message and "pip install triton" in record.message
    triton_gate.has_triton.cache_clear()


@pytest.mark.parametrize(
    "found",
    [RuntimeError("Failed to find C compiler"), "3 of 65536 casts to e4m3 differ", None],
    ids=str,
)
def test_gpu_failing_the_trial_uses_plain_operations_with_reason(found, gpu, caplog):
    def obstacle(device):
        assert device == tensor.device
        if isinstance(found, Exception):
            raise found
        return found

    tensor = gpu((9, 0), obstacle)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert triton_gate.usable(tensor) == (found is None)
    said = [record.message for record in caplog.records]
    assert [str(found) in line and str(tensor.device) in line for line in said] == [True] * bool(
        found
    )


def test_cpu_does_not_use_triton(monkeypatch):
    assert not triton_gate.usable(torch.randn(4)) and not devices.has_fp8_casts(torch.randn(4))
    monkeypatch.setenv(triton_gate.VARIABLE, "interpret")  # without Triton's own switch
    assert not triton_gate.usable(torch.randn(4))
