"""What this machine can do, and what is said about machines that the tests do not have."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fp8_backends import Availability, hardware


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that these CUDA capabilities are what the process sees."""

    def pretend(*capabilities, hip=None, architecture="gfx942:sramecc+"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "pretended")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=architecture)
        )

    return pretend


@pytest.mark.parametrize(
    ("capabilities", "products"),
    [((), False), (((8, 0),), False), (((8, 9),), True), (((9, 0), (9, 0)), True), (((9, 0), (8, 0)), False)],
)
def test_fp8_products_need_8_9_on_every_visible_gpu(gpus, capabilities, products):
    """Accelerate asks nvidia-smi for the first GPU of the machine, visible or not."""
    gpus(*capabilities)
    assert hardware.fp8_products() is products
    assert hardware.lowest_capability() == min(capabilities, default=None)


@pytest.mark.parametrize(("architecture", "products"), [("gfx942:sramecc+", True), ("gfx950", True), ("gfx90a", False)])
def test_rocm_is_judged_by_architecture_not_by_capability(gpus, architecture, products):
    gpus((9, 4), hip="6.4", architecture=architecture)
    assert hardware.fp8_products() is products
    assert hardware.lowest_capability() is None


def test_describe_names_device_and_versions(gpus):
    gpus((9, 0), (8, 9))
    described = hardware.describe()
    assert (described.device, described.gpus, described.capability) == ("pretended", 2, (8, 9))
    assert described.fp8_products
    assert described.versions["torch"] == importlib.metadata.version("torch")
    gpus()
    described = hardware.describe()
    assert described.device and described.gpus == 0 and not described.fp8_products


def test_missing_library_has_no_version():
    assert hardware.version("no-such-distribution-here") is None


def test_describe_imports_no_library():
    code = (
        "import fp8_backends.hardware as h, sys; h.describe();"
        "assert not {'torchao', 'transformers', 'transformer_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_availability_is_true_where_the_backend_runs():
    assert Availability(True, "on cpu")
    assert not Availability(False, "not installed", "pip install it")
