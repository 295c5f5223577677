"""Weights are stored at a level inside their Parameter objects, gradients in E4M3, and everything
leaves plain."""

import copy
import pickle
import weakref

import pytest
import torch
from level_steps import (
    LEVELS,
    STORED,
    assert_rounded,
    batch,
    loss_of,
    mlp,
    prepared,
    train,
    values_of,
)
from safetensors.torch import load_file, save_file
from torch import nn

import fp8_backends
from fp8_backends.convert.conversion import restore
from fp8_backends.errors import FP8BackendError
from fp8_backends.states.levels import quantize_weight, scale_bytes_per_element
from fp8_backends.tensors.scaled_tensor import ScaledTensor, stored_parts

BYTES = {
    "O1": {"weight": 2, "master": 0, "gradient": 1, "optimizer": 8, "total": 11},
    "O2": {"weight": 2, "master": 0, "gradient": 1, "optimizer": 3, "total": 6},
    "O3": {"weight": 1, "master": 2, "gradient": 1, "optimizer": 3, "total": 7},
    "O4": {"weight": 1, "master": 1, "gradient": 1, "optimizer": 2, "total": 5},
}
"""MS-AMP's table (FP8-LM, arXiv:2310.18313) and the level beyond it, bytes of one weight element on
one rank."""


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_per_element_match_the_level(level):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model, optimizer = prepared(level, model=model)
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    measured = fp8_backends.audit(model, optimizer).bytes_per_element
    for part, wanted in BYTES[level].items():
        scales = 5 * 4 / 256**2  # five scales a weight at most, of 4 bytes each
        scales += scale_bytes_per_element(fp8_backends.resolve(f"msamp:{level}"))
        assert wanted <= measured[part] <= wanted + scales, part
    live = sum(
        stored(p) + stored(p.grad) + sum(map(stored, optimizer.state[p].values()))
        for p in model.parameters()
    )
    elements = sum(p.numel() for p in model.parameters())
    assert live / elements == pytest.approx(measured["total"], rel=1e-3)


def stored(tensor: torch.Tensor) -> int:
    if isinstance(tensor, ScaledTensor):
        return sum(part.nbytes for part in stored_parts(tensor, exact=True))
    return tensor.nbytes if tensor.numel() > 1 else 0


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        return self.last(self.frozen(self.tied(self.first(x).relu())))


@pytest.mark.parametrize("level", LEVELS)
def test_parameter_objects_ties_flags_attributes_and_hooks_survive(level):
    model = Tied()
    model.first.weight.tag, seen = "mine", []
    model.first.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    handle = model.last.weight.register_hook(lambda gradient: seen.append("removed"))
    before = {
        name: (id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)
    }
    start = values_of(model)
    model, optimizer = prepared(level, model=model)
    assert before == {
        name: (id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)
    }
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    weights = [model.first.weight, model.frozen.weight, model.last.weight]
    assert (
        all(w.codes.dtype == STORED[level] for w in weights)
        and type(model.last.bias) is nn.Parameter
    )
    assert model.tied.weight is model.first.weight and model.first.weight.tag == "mine"
    handle.remove()
    train(model, optimizer, range(4))
    assert seen == [(64, 64)] * 4
    after = values_of(model)
    assert torch.equal(after["frozen.weight"], quantized(start["frozen.weight"], level))
    for name in ("first.weight", "last.weight", "last.bias"):
        assert not torch.equal(after[name], quantized(start[name], level)), name
    assert torch.equal(after["tied.weight"], after["first.weight"])


def quantized(values: torch.Tensor, level: str) -> torch.Tensor:
    return quantize_weight(values, level).exact() if values.dim() > 1 else values


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_e4m3_and_accumulate_in_fp32(level):
    model, optimizer = prepared(level)
    gradients = []
    model[0].weight.register_post_accumulate_grad_hook(
        lambda p: gradients.append(p.grad.codes.dtype)
    )
    loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    assert gradients == [torch.float8_e4m3fn, torch.float32]
    assert type(model[0].bias.grad) is torch.Tensor and type(model[2].weight.grad) is torch.Tensor
    optimizer.step()
    assert model[0].weight.grad.codes.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_thawed_weight_has_gradients_in_e4m3_from_its_second_step_on(level):
    model = mlp()
    model[0].weight.requires_grad_(False)
    model, optimizer = prepared(level, model=model)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, range(1))
    loss_of(model, 1).backward()
    assert model[0].weight.grad.codes.dtype == torch.float8_e4m3fn


def test_existing_gradient_is_kept():
    model = mlp()
    loss_of(model, 0).backward()
    before = model[0].weight.grad.clone()
    model, _ = prepared("O2", model=model)
    kept = model[0].weight.grad
    assert (
        isinstance(kept, ScaledTensor)
        and (kept.dequantize() - before).norm() < 0.04 * before.norm()
    )


@pytest.mark.parametrize("level", LEVELS)
def test_saved_state_is_plain_and_loads_anywhere(level, tmp_path):
    model, optimizer = prepared(level)
    train(model, optimizer, range(3))
    state = model.state_dict()
    assert all(
        not isinstance(tensor, ScaledTensor) and tensor.dtype == torch.float32
        for tensor in state.values()
    )
    save_file(state, tmp_path / "model.safetensors")
    plain = mlp(seed=9)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = batch(7)
    with torch.no_grad():
        model.eval()
        error = (model(x) - plain(x)).norm() / plain(x).norm()
        # evaluation reads the stored weight: E4M3 at O3 and O4, a step of 2**-4
        assert error < (0.05 if level in ("O3", "O4") else 1e-6)
    for other_level in LEVELS:
        other, _ = prepared(other_level, model=mlp(seed=9))
        assert not other.load_state_dict(load_file(tmp_path / "model.safetensors")).missing_keys
        for name, value in values_of(other).items():
            assert_rounded(value, state[name], other_level)
            same = other_level == level or {level, other_level} <= {"O1", "O2", "O3"}
            assert torch.equal(value, state[name]) or not same
        assert isinstance(other[0].weight, ScaledTensor)


@pytest.mark.nightly
@pytest.mark.parametrize("level", LEVELS)
def test_assigned_weights_are_stored_again(level):
    with torch.device("meta"):
        model = mlp()
    model, _ = prepared(level, model=model)
    assert model[0].weight.is_meta
    model.load_state_dict(mlp().state_dict(), assign=True)
    assert model[0].weight.codes.dtype == STORED[level] and not model[0].weight.is_meta
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fp8_backends.prepare(model, optimizer, f"msamp:{level}")
    losses = train(model, optimizer, [0] * 20)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("level", LEVELS)
def test_copies_train_independently(level):
    model, optimizer = prepared(level)
    train(model, optimizer, range(2))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = values_of(model)
        second = torch.optim.AdamW(other.parameters(), 1e-2)
        fp8_backends.prepare(other, second, f"msamp:{level}")
        loss_of(other, 0).backward()
        assert isinstance(other[0].weight.grad, ScaledTensor)
        second.step()
        assert all(
            torch.equal(a, b)
            for a, b in zip(before.values(), values_of(model).values(), strict=True)
        )
        assert not torch.equal(values_of(other)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_moved_and_cast_modules_keep_their_storage_and_hooks(level):
    model, optimizer = prepared(level)
    model[0].weight.tag = "mine"
    model.to("cpu", torch.bfloat16).to(torch.float32)
    assert model[0].weight.codes.dtype == STORED[level] and model[0].weight.tag == "mine"
    loss_of(model, 0).backward()
    assert isinstance(model[0].weight.grad, ScaledTensor)
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_restore_returns_plain_layers_with_current_values(level):
    model, optimizer = prepared(level)
    train(model, optimizer, range(3))
    weight, before = model[0].weight, values_of(model)
    restore(model)
    assert (
        type(model[0]) is nn.Linear and model[0].weight is weight and type(weight) is nn.Parameter
    )
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), values_of(model).values(), strict=True)
    )
    loss_of(model, 0).backward()
    assert type(weight.grad) is torch.Tensor and not model[0]._state_dict_hooks
    optimizer.step()  # it continues with the plain weight
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_preparing_again_changes_nothing():
    model, optimizer = prepared("O2")
    train(model, optimizer, range(2))
    before, hooks = values_of(model), len(model[0].weight._post_accumulate_grad_hooks)
    prepared_again = fp8_backends.prepare(model, optimizer, "msamp:O2")
    assert (
        prepared_again == (model, optimizer)
        and len(model[0].weight._post_accumulate_grad_hooks) == hooks
    )
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), values_of(model).values(), strict=True)
    )


@pytest.mark.parametrize("held", ["weak reference", "graph"])
def test_referenced_weight_is_named_and_nothing_changes(held):
    model = mlp()
    keep = weakref.ref(model[3].weight) if held == "weak reference" else loss_of(model, 0)
    with pytest.raises(FP8BackendError, match=r"\d\.weight: its storage cannot be swapped"):
        prepared("O2", model=model)
    assert keep is not None and not any(isinstance(p, ScaledTensor) for p in model.parameters())


@pytest.mark.nightly
@pytest.mark.parametrize("level", LEVELS)
def test_bf16_models_train_all_their_parameters(level):
    """MS-AMP forgets bf16 norms and biases."""
    model, optimizer = prepared(level, model=mlp(torch.bfloat16))
    assert model[0].weight.dtype == torch.bfloat16 and model[2].weight.dtype == torch.bfloat16
    before = values_of(model)
    losses = train(model, optimizer, [0] * 30)
    assert losses[-1] < 0.8 * losses[0]
    for name, now in values_of(model).items():
        assert now.dtype == torch.bfloat16 and not torch.equal(now, before[name]), name
