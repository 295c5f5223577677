"""What Accelerate's examples/by_feature do beside a plain loop, and what scripts that use it write around one."""

from __future__ import annotations

import io

import pytest
import torch
from plugin_training import batches, mlp
from ported import BACKENDS, assert_same, components, fresh_accelerator, plain, train, weights_of
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fp8_backends
from fp8_backends.states.levels import quantize_weight

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
LEVELS = ("msamp:O2", "msamp:O3")
INPUTS = batches(1, seed=7)[0][0]


def prepared(backend: str, steps: int = 1, **arguments) -> tuple:
    """(accelerator, model, optimizer) after some steps."""
    accelerator = fresh_accelerator(backend, **arguments)
    objects = accelerator.prepare(*components()[:3])
    train(accelerator, *objects, batches(steps))
    return accelerator, *objects[:2]


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters as they read."""
    return [plain(p) for p in model.parameters()]


def as_stored(values: torch.Tensor, backend: str) -> torch.Tensor:
    """What a weight holds that these values were written to as a whole: at a level FP16 numbers times a scale."""
    return quantize_weight(values, backend.split(":")[1]).exact() if backend in LEVELS else values


# examples/by_feature


def test_microbatches_that_a_script_adds_up_are_those_of_a_bare_loop(backend):
    """gradient_accumulation_for_autoregressive_models.py: Accelerate knows of one step only."""
    accelerator = fresh_accelerator(backend)
    ours, bare = (components()[:3] for _ in range(2))
    model, optimizer, _ = accelerator.prepare(*ours)
    fp8_backends.prepare(*bare[:2], backend)
    for step in range(2):
        for x, y in batches(3, seed=step):
            accelerator.backward(nn.functional.mse_loss(model(x), y, reduction="sum") / 768)
            with accelerator.autocast():
                output = bare[0](x)
            (nn.functional.mse_loss(output.float(), y, reduction="sum") / 768).backward()
        norms = [accelerator.clip_grad_norm_(each.parameters(), 0.01) for each in (model, bare[0])]
        assert torch.equal(*norms) and norms[0] > 0.01
        for each in (optimizer, bare[1]):
            each.step()
            each.zero_grad()
    assert_same(weights_of(model), weights_of(bare[0]))


# What scripts do with weights and gradients


def test_gradients_are_clipped_squared_and_set_as_plain_ones(backend):
    """`clip_grad_value_`, statistics of gradients, and a gradient that a script puts there itself."""
    accelerator, model, optimizer = prepared(backend)
    x, y = batches(1)[0]
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    read = [plain(p.grad) for p in model.parameters()]
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    for p, gradient in zip(model.parameters(), read, strict=True):
        clipped = gradient.clamp(-1e-3, 1e-3)
        assert not torch.equal(clipped, gradient) and torch.equal(plain(p.grad), clipped)
        assert torch.equal(plain(p.grad * p.grad), clipped * clipped)
        p.grad = clipped.sign()
        assert torch.equal(plain(p.grad), clipped.sign())
    before = values_of(model)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, values_of(model), strict=True))


def test_weights_are_read_as_numbers_of_other_libraries(backend):
    accelerator, model, _ = prepared(backend)
    for p, values in zip(model.parameters(), values_of(model), strict=True):
        assert p.detach().numpy().tobytes() == values.numpy().tobytes()
        assert p.tolist() == values.tolist() and p.sum().item() == values.sum().item()
    vector = parameters_to_vector(model.parameters())
    assert torch.equal(vector, torch.cat([values.flatten() for values in values_of(model)]))
    before = values_of(model)
    vector_to_parameters(torch.zeros_like(vector), model.parameters())
    assert not any(values.any() for values in values_of(model))
    vector_to_parameters(vector, model.parameters())
    assert_same(values_of(model), before)  # they were stored before: storing them again rounds nothing


def test_weights_are_clamped_drawn_anew_and_replaced(backend):
    """A GAN's critic, `reset_parameters`, and `p.data = …`."""
    accelerator, model, optimizer = prepared(backend)
    layer, other = model[2], mlp(seed=3)[2]
    expected = [value.clamp(-0.01, 0.01) for value in values_of(model)]
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.01, 0.01)
    assert_same(values_of(model), expected)
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    other.reset_parameters()
    assert torch.equal(plain(layer.weight), other.weight)
    layer.weight.data = other.weight.detach() / 3
    third = other.weight.detach() / 3
    assert torch.equal(plain(layer.weight), as_stored(third, backend))
    before = weights_of(model)
    train(accelerator, model, optimizer, None, batches(1))
    moved = (weights_of(model)["2.weight"] - before["2.weight"]).abs().max()
    assert 0 < moved <= 0.02  # two steps of Adam at most, and none back to what was there before


def test_a_model_in_double_precision_still_reads_and_runs(backend):
    accelerator, model, _ = prepared(backend)
    saved = weights_of(model)
    if backend not in LEVELS:
        saved = {name: value.double() for name, value in saved.items()}
    model.double()
    for name, value in weights_of(model).items():
        assert torch.equal(value.double(), saved[name].double()), name
    assert torch.isfinite(model(INPUTS.double())).all()


def test_a_trained_model_is_saved_by_torch_and_loaded(backend):
    """`torch.save(model.state_dict())` and `accelerator.save`, read back without our classes."""
    accelerator, model, _ = prepared(backend)
    for save in (torch.save, accelerator.save):
        file = io.BytesIO()
        save(accelerator.get_state_dict(model), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(type(value) is torch.Tensor for value in loaded.values())
        stock = mlp(seed=3)
        stock.load_state_dict(loaded)
        assert_same(weights_of(stock), weights_of(model))
