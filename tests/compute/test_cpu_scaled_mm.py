"""Test the operator called by TorchAO on CPUs without a usable kernel."""

import pytest
import torch
from torch import nn
from widths import nightly

from fp8_backends import audit, prepare
from fp8_backends.compute import hardware
from fp8_backends.compute.torchao.backend import mend_cpu_product, restore_cpu_product
from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.kernels import cpu_casts


@pytest.fixture
def calls(monkeypatch):
    """Act as a CPU in need of another kernel, and record its products."""
    restore_cpu_product()  # on such a CPU an earlier test needed it
    calls = []
    product = cpu_casts.product
    monkeypatch.setattr(
        cpu_casts, "product", lambda *args: calls.append(args[0].shape) or product(*args)
    )
    monkeypatch.setattr(hardware, "cpu_scaled_mm", lambda: False)
    yield calls
    restore_cpu_product()


def operands(rowwise, a_format=E4M3):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(24, 64, generator=generator), torch.randn(48, 64, generator=generator)
    powers = (
        torch.exp2(torch.arange(-12.0, 12.0)[:, None]),
        torch.exp2(torch.arange(-24.0, 24.0)[None]),
    )
    scales = powers if rowwise else (torch.tensor(0.25), torch.tensor([2.0**-9]))
    return a.to(a_format.dtype), b.to(E4M3.dtype).t(), *scales


def own_kernel(*args, **kwargs):
    """Multiply by PyTorch without oneDNN, as on every other CPU."""
    with torch.backends.mkldnn.flags(enabled=False):
        return torch._scaled_mm(*args, **kwargs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize("a_format", [E4M3, E5M2])
def test_products_match_pytorch_on_other_cpus(a_format, out_dtype, bias, calls):
    """Power-of-two scales are exact: products differ by the order of sums and one rounding."""
    a, b, *scales = operands(False, a_format)
    options = {"bias": torch.randn(48) if bias else None, "out_dtype": out_dtype}
    expected = own_kernel(a, b, *scales, **options).float()
    mend_cpu_product()
    ours = torch._scaled_mm(a, b, *scales, **options)
    assert calls == [a.shape] and ours.dtype == (out_dtype or a.dtype)
    step = {
        torch.bfloat16: 2.0**-8,
        torch.float32: 2.0**-18,
        E4M3.dtype: 2.0**-3,
        E5M2.dtype: 2.0**-2,
    }[ours.dtype]
    assert torch.allclose(ours.float(), expected, rtol=step, atol=1e-6)


def test_rowwise_scales_apply_and_autocast_rounds_nothing(calls):
    a, b, scale_a, scale_b = operands(True)
    mend_cpu_product()
    exact = (a.double() * scale_a) @ (b.double() * scale_b)
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
    assert (
        torch.allclose(ours.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())
        and calls
    )
    out = torch.empty(24, 48, dtype=torch.bfloat16)
    torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, out=out)
    assert torch.equal(out, ours.bfloat16())


@pytest.mark.parametrize("compiler", [None, nightly("aot_eager"), nightly("inductor")])
def test_ao_trains_with_proven_products(calls, compiler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters()), "ao:tensorwise")
    run = torch.compile(model, backend=compiler) if compiler else model
    for _ in range(3):  # the proof of compiled code profiles the second step
        run(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(calls) >= 15  # three products of two layers, but dx of the first, in each step
    assert set(audit(model).engine.values()) == {"ao"}


def test_other_cpus_and_backends_keep_pytorchs_kernel(calls, monkeypatch):
    a, b, *scales = operands(False)
    for useful, spec in ((True, "ao:tensorwise"), (False, "native:dynamic")):
        monkeypatch.setattr(hardware, "cpu_scaled_mm", lambda useful=useful: useful)
        prepare(nn.Sequential(nn.Linear(64, 64)), None, spec)
        own_kernel(a, b, *scales, out_dtype=torch.bfloat16)
    mend_cpu_product()
    mend_cpu_product()
    restore_cpu_product()
    own_kernel(a, b, *scales, out_dtype=torch.bfloat16)
    assert not calls
