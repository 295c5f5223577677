"""Copy numbers of the host to a GPU: nothing waits for them, and no CUDA graph records the copy."""

import ast
from pathlib import Path

import pytest
import torch

import fp8_backends
from fp8_backends import FP8BackendError
from fp8_backends.kernels.adam_table import adam_hypers
from fp8_backends.kernels.devices import on_device


def test_cuda_graph_does_not_record_host_copies(monkeypatch):
    """A replay would read freed memory."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert on_device([1, 2], torch.int64, "cpu").tolist() == [1, 2]
    with pytest.raises(FP8BackendError, match="outside of the graph"):
        on_device([1, 2], torch.int64, torch.device("cuda", 0))
    step = torch.tensor(1.0)
    for rate in (1e-3, torch.tensor(1e-3)):
        with pytest.raises(FP8BackendError, match="optimizer step at a level"):
            adam_hypers(rate, (0.9, 0.999), 1e-8, 0.01, [step], "cuda")


@pytest.mark.nightly
def test_only_on_device_copies_from_pinned_memory():
    package = Path(fp8_backends.__file__).parent
    found = {
        f"{file.relative_to(package)}"
        for file in package.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and "pin_memory" in {keyword.arg for keyword in call.keywords}
        if ast.unparse(call.func) == "torch.tensor"
    }
    assert found == {"kernels/devices.py"}
