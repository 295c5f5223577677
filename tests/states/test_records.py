"""Records of stored tensors: valid after each step, dropped after any other write."""

import copy
import io

import pytest
import torch
from level_steps import OPTIMIZERS, loss_of, parameters_of, prepared, train

from fp8_backends.formats.scaling import tensor_amax
from fp8_backends.kernels import quantize as quantization
from fp8_backends.kernels.adam import AdamSteps
from fp8_backends.kernels.adam_table import measured
from fp8_backends.states import adamw
from fp8_backends.tensors.scaled_tensor import ScaledTensor


def known(model):
    return {
        name: p.known_amax() for name, p in model.named_parameters() if isinstance(p, ScaledTensor)
    }


@pytest.fixture
def measurements(monkeypatch):
    """Count measured records."""
    calls = []
    monkeypatch.setattr(adamw, "measured", lambda *slots: calls.append(slots) or measured(*slots))
    return calls


def test_record_is_measured_only_after_foreign_writes(measurements):
    model, optimizer = prepared("O2")
    train(model, optimizer, range(4))
    count = len(known(model))
    assert len(measurements) == count > 0
    optimizer.state[model[0].weight]["exp_avg"].mul_(2.0)
    train(model, optimizer, range(2))
    assert len(measurements) == count + 1
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    train(model, optimizer, range(2))
    assert len(measurements) == count + 2
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(2))
    assert len(measurements) == 2 * count + 2


def test_step_without_eps_takes_two_passes(monkeypatch):
    jobs = []
    made = AdamSteps.__init__
    monkeypatch.setattr(
        AdamSteps, "__init__", lambda self, of, **how: jobs.extend(of) or made(self, of, **how)
    )
    for eps in (0.0, 1e-8):
        model, optimizer = prepared("O2", lambda p, eps=eps: torch.optim.AdamW(p, 1e-3, eps=eps))
        train(model, optimizer, [0])
        assert {job.record is not None for job in jobs if job.weight.scale_inv is not None} == {
            eps > 0
        }
        jobs.clear()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weight_amax_is_known_until_a_write(kind):
    model, optimizer = prepared("O2", OPTIMIZERS[kind])
    assert set(known(model).values()) == {None}
    train(model, optimizer, range(3))
    for name, p in model.named_parameters():
        if isinstance(p, ScaledTensor):
            assert torch.equal(p.known_amax(), tensor_amax(p.codes)), name
    assert set(known(copy.deepcopy(model)).values()) == {None}
    buffer = io.BytesIO()
    torch.save(model, buffer)
    with torch.no_grad():
        model[0].weight.add_(1.0)
        model[3].weight.data = torch.zeros(64, 128)
    assert set(known(model).values()) == {None}


def test_forward_uses_known_amax_and_computes_same_codes(monkeypatch):
    model, optimizer = prepared("O2")
    train(model, optimizer, range(3))
    taken = []
    quantize = quantization.quantize
    monkeypatch.setattr(
        quantization,
        "quantize",
        lambda *a, amax=None, **k: taken.append(amax) or quantize(*a, amax=amax, **k),
    )
    with torch.no_grad():
        first = loss_of(model, 9)
        assert sum(amax is not None for amax in taken) == len(known(model))
        for p in parameters_of(optimizer):
            if isinstance(p, ScaledTensor):
                p.stored.known = None
        taken.clear()
        assert (
            torch.equal(loss_of(model, 9), first)
            and taken
            and not any(amax is not None for amax in taken)
        )
