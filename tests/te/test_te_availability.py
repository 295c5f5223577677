"""What the `te` compute says where TransformerEngine cannot run. Here, where it is not even installed."""

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
    """A package `transformer_engine` without its compiled part, and no GPU."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise OSError('libcudnn.so.9: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "transformer_engine"


@pytest.fixture
def compiled(installed, monkeypatch):
    (installed / "wheel_lib").mkdir()
    (installed / "wheel_lib" / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()


def gpu(monkeypatch, capability):
    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def assert_refused(*words: str) -> None:
    found = COMPUTE.availability()
    assert not found and "native:delayed" in found.fix, found
    for word in words:
        assert word in found.reason, found
    assert "transformer_engine" not in sys.modules, "only looked up"


def test_not_installed():
    assert_refused("TransformerEngine is not installed")


def test_installed_without_the_compiled_part(installed):
    assert_refused("without its compiled part for PyTorch")


def test_no_gpu(compiled):
    assert_refused("runs on NVIDIA GPUs only (here: CPU)")


def test_a_gpu_without_fp8(compiled, monkeypatch):
    gpu(monkeypatch, (8, 6))
    assert_refused("from compute capability 8.9 on (here: to 8.6)")


def test_a_gpu_of_amd(compiled, monkeypatch):
    gpu(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName="gfx942"))
    assert_refused("runs on NVIDIA GPUs only (here: MI300)")


def test_a_hopper_gpu_is_taken_at_its_word_and_a_failing_import_is_quoted(compiled, monkeypatch):
    gpu(monkeypatch, (9, 0))
    assert COMPUTE.availability()
    model = nn.Linear(16, 16)
    with pytest.raises(
        BackendUnavailableError, match="OSError: libcudnn.so.9: cannot open.*installation.html.*, or use the native"
    ):
        prepare(model, None, "te")
    assert type(model) is nn.Linear
