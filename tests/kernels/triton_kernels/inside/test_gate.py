"""Select tensors for the kernels in a process with Triton. tests/kernels/test_triton_gate.py has
the rest."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_backends.kernels import devices, triton_gate


def test_kernels_take_only_real_tensors_in_eager_mode(monkeypatch):
    x = torch.randn(4, 4)
    assert (
        triton_gate.usable(x)
        and triton_gate.usable(nn.Parameter(x))
        and not devices.has_fp8_casts(x)
    )
    assert not triton_gate.usable(x.to("meta"))
    assert not triton_gate.usable(x.as_subclass(type("Subclass", (torch.Tensor,), {})))
    with FakeTensorMode() as mode:
        assert not triton_gate.usable(mode.from_tensor(x)) and not triton_gate.usable(
            torch.empty(4, device="cuda")
        )
        assert not triton_gate.usable(x), "what it would write is fake"
    answers = []

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        answers.append(triton_gate.usable(x))
        return x + 1

    compiled(x)
    assert answers == [False]
    for value in ("0", ""):
        monkeypatch.setenv(triton_gate.VARIABLE, value)
        assert not triton_gate.usable(x)
    monkeypatch.setenv(triton_gate.VARIABLE, "interpret")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not triton_gate.usable(x)
