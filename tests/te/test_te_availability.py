"""The answers of the `te` compute without a usable TransformerEngine. Here it is not even
installed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8_backends import BackendUnavailableError, prepare
from fp8_backends.compute import hardware, registry

COMPUTE = registry.get_compute("te")


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Install a package `transformer_engine` without its compiled part, and without a GPU."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(
        "raise OSError('libcudnn.so.9: cannot open')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "transformer_engine"


@pytest.fixture
def compiled(installed, monkeypatch):
    (installed / "wheel_lib").mkdir()
    (installed / "wheel_lib" / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()


def pretend_gpu(monkeypatch, gpu):
    """Pretend one GPU, by CUDA capability or AMD's architecture."""
    is_amd = isinstance(gpu, str)
    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: (9, 4) if is_amd else gpu
    )
    monkeypatch.setattr(torch.version, "hip", "6.4" if is_amd else None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=gpu)
    )


def assert_refused(reason: str) -> None:
    availability = COMPUTE.availability()
    assert (
        not availability and "native:delayed" in availability.fix and reason in availability.reason
    ), availability
    assert "transformer_engine" not in sys.modules, "only looked up"


def test_missing_te_is_reported():
    assert_refused("TransformerEngine is not installed")


def test_te_without_compiled_part_is_reported(installed):
    assert_refused("without its compiled part for PyTorch")


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (None, "runs on NVIDIA GPUs only (here: CPU)"),
        ((8, 6), "from compute capability 8.9 on (here: to 8.6)"),
        ("gfx942", "runs on NVIDIA GPUs only (here: MI300)"),
    ],
)
def test_machines_without_te_products_are_reported(gpu, reason, compiled, monkeypatch):
    if gpu is not None:
        pretend_gpu(monkeypatch, gpu)
    assert_refused(reason)


def test_failing_import_on_hopper_is_quoted(compiled, monkeypatch):
    pretend_gpu(monkeypatch, (9, 0))
    assert COMPUTE.availability()
    model = nn.Linear(16, 16)
    with pytest.raises(
        BackendUnavailableError,
        match="OSError: libcudnn.so.9: cannot open.*installation.html.*, or use the native",
    ):
        prepare(model, None, "te")
    assert type(model) is nn.Linear
