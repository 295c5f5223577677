"""`fp8_backends.checkpoints.plain_weights`: plain tensors inside, stored forms afterwards, and no
change lost."""

from __future__ import annotations

import copy

import pytest
import torch
from conversion_steps import take_steps
from safetensors.torch import save
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError
from fp8_backends.tensors.block_codes import BlockCodes
from fp8_backends.tensors.scaled_tensor import ScaledTensor, stored_parts

RECIPE = {"include": ["up", "down"]}  # a tied layer is left out by default
LEVELS = ("msamp:O1", "msamp:O2", "msamp:O3", "msamp:O4")


class Tied(nn.Module):
    """An embedding tied to a layer, and another layer."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.up.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens):
        return self.down(torch.relu(self.up(self.embed(tokens))))


def prepared(backend: str, dtype: torch.dtype = torch.float32):
    model = Tied(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return fp8_backends.prepare(model, optimizer, RECIPE | {"backend": backend})


def step(model, optimizer) -> float:
    return take_steps(lambda: model(torch.arange(64)).float().square().mean(), optimizer)[0]


def bits(model) -> list[torch.Tensor]:
    parts = (part for p in model.parameters() for part in stored_parts(p.detach(), exact=True))
    return [part.detach().clone().view(-1).view(torch.uint8) for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", LEVELS)
def test_weights_are_plain_inside_and_training_resumes_unchanged(backend, dtype):
    model, optimizer = prepared(backend, dtype)
    other, its_optimizer = prepared(backend, dtype)
    assert step(model, optimizer) == step(other, its_optimizer)
    parameters, values, before = list(model.parameters()), model.state_dict(), bits(model)
    with fp8_backends.checkpoints.plain_weights(model) as same:
        assert same is model and all(
            a is b for a, b in zip(parameters, model.parameters(), strict=True)
        )
        assert all(type(p) is nn.Parameter and p.requires_grad for p in parameters)
        assert model.up.weight is model.embed.weight
        assert len(save({name: p.detach().clone() for name, p in model.named_parameters()})) > 0
        assert all(
            torch.equal(p, values[name]) and p.data_ptr() for name, p in model.named_parameters()
        )
        kept = copy.deepcopy(model)
    assert isinstance(model.down.weight, ScaledTensor) and all(
        map(torch.equal, before, bits(model))
    )
    assert [step(model, optimizer) for _ in range(3)] == [
        step(other, its_optimizer) for _ in range(3)
    ]
    assert (
        list(model.state_dict()) == list(values)
        and type(model.state_dict()["down.weight"]) is torch.Tensor
    )
    kept.load_state_dict(values)
    assert all(type(p) is nn.Parameter for p in kept.parameters())


@pytest.mark.parametrize("backend", LEVELS)
def test_changes_inside_keep_full_precision(backend):
    model, optimizer = prepared(backend)
    step(model, optimizer)
    wanted = model.down.weight.detach().clone()
    wanted[0] += wanted[0] * 1e-5  # less than half a step of FP16
    with pytest.raises(RuntimeError, match="mine"), fp8_backends.checkpoints.plain_weights(model):
        array = model.down.weight.detach().numpy()
        array[0] += array[0] * 1e-5
        raise RuntimeError("mine")
    assert isinstance(model.down.weight, ScaledTensor) and torch.equal(model.down.weight, wanted)
    assert model.up.weight.stored.edited is None
    step(model, optimizer)
    assert model.down.weight.stored.edited is None


def test_unchanged_fp16_weights_keep_bits_beyond_bf16():
    model, optimizer = prepared("msamp:O3", torch.bfloat16)
    step(model, optimizer)
    exact = model.down.weight.exact(torch.float32)
    assert not torch.equal(exact, exact.bfloat16().float())
    exact[0] = 1.0
    with fp8_backends.checkpoints.plain_weights(model), torch.no_grad():
        model.down.weight[0] = 1.0
    assert torch.equal(model.down.weight.exact(torch.float32), exact)


def test_gradients_from_outside_and_inside_add_up():
    model, optimizer = prepared("msamp:O2")
    other, its_optimizer = prepared("msamp:O2")
    for each in (model, other):
        each(torch.arange(64)).square().mean().backward()
    with fp8_backends.checkpoints.plain_weights(model):
        model(torch.arange(32)).square().mean().backward()
    other(torch.arange(32)).square().mean().backward()
    assert isinstance(model.down.weight.grad, ScaledTensor)
    torch.testing.assert_close(model.down.weight.grad.values(), other.down.weight.grad.values())
    optimizer.step()
    its_optimizer.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("backend", ["native:dynamic", "ao", None])
def test_plain_weights_stay_unchanged(backend):
    model = Tied()
    if backend:
        fp8_backends.prepare(model, None, backend)
    before = dict(model.named_parameters())
    with fp8_backends.checkpoints.plain_weights(model):
        assert all(before[name] is p for name, p in model.named_parameters())


def frozen(scaling: str) -> nn.Module:
    model = Tied().requires_grad_(False)
    recipe = fp8_backends.NativeRecipeKwargs(
        scaling=scaling, fp8_params=True, include=["down"], exclude=["up"]
    )
    return fp8_backends.prepare(model, None, recipe)[0].eval()


def test_frozen_fp8_weights_are_plain_inside_and_keep_merged_adapter():
    model = frozen("dynamic")
    before, outputs = bits(model), model(torch.arange(8))
    with fp8_backends.checkpoints.plain_weights(model):
        assert type(model.down.weight) is nn.Parameter and torch.equal(
            model(torch.arange(8)), outputs
        )
    assert isinstance(model.down.weight, ScaledTensor) and all(
        map(torch.equal, before, bits(model))
    )
    with fp8_backends.checkpoints.plain_weights(model):
        model.down.weight += 1e-3
        wanted = model.down.weight.clone()
    assert isinstance(model.down.weight, ScaledTensor) and torch.equal(
        model.down.weight.exact(), wanted
    )


def test_checkpoint_codes_return_and_keep_changes():
    from transformers.integrations.finegrained_fp8 import FP8Linear

    layer = FP8Linear(128, 128, block_size=(128, 128)).requires_grad_(False)
    layer.weight.copy_(torch.randn(128, 128))
    nn.init.constant_(layer.weight_scale_inv, 0.01)
    model = nn.Sequential(layer)
    fp8_backends.prepare(
        model, None, fp8_backends.NativeRecipeKwargs(scaling="blockwise", fp8_params=True)
    )
    with fp8_backends.checkpoints.plain_weights(model):
        assert type(layer.weight) is nn.Parameter
    assert type(layer.weight) is BlockCodes
    with pytest.raises(
        FP8BackendError, match=r"0.weight: .*cannot hold what was written.*fp8_backends.restore"
    ):
        with fp8_backends.checkpoints.plain_weights(model):
            layer.weight += 1e-3
            wanted = layer.weight.clone()
    assert type(layer.weight) is nn.Parameter and torch.equal(layer.weight, wanted)


def test_weights_restored_replaced_or_moved_inside_are_accepted():
    model, _ = prepared("msamp:O2")
    values = model.state_dict()
    with fp8_backends.checkpoints.plain_weights(model):
        model.down.weight = nn.Parameter(torch.ones(32, 64))
        model.to(torch.float64)
    assert isinstance(model.down.weight, ScaledTensor) and (model.down.weight == 1).all()
    assert model.up.weight.dtype == torch.float64 and torch.equal(
        model.up.weight, values["up.weight"].double()
    )
    with fp8_backends.checkpoints.plain_weights(model):
        fp8_backends.restore(model)
    assert (
        all(type(p) is nn.Parameter for p in model.parameters()) and type(model.down) is nn.Linear
    )


def test_weight_held_by_a_graph_is_named_and_stored_later():
    model, optimizer = prepared("msamp:O2")
    loss = model.eval()(torch.arange(8)).sum()
    with pytest.raises(FP8BackendError, match=r"weight: its storage cannot be swapped"):
        with fp8_backends.checkpoints.plain_weights(model):
            raise AssertionError("nothing runs inside")
    loss.backward()
    with pytest.raises(
        FP8BackendError, match=r"down.weight: .*it is plain until fp8_backends.prepare"
    ):
        with fp8_backends.checkpoints.plain_weights(model):
            held = model(torch.arange(8))
    assert type(model.down.weight) is nn.Parameter
    del held
    fp8_backends.prepare(model.train(), optimizer, RECIPE | {"backend": "msamp:O2"})
    assert isinstance(model.down.weight, ScaledTensor)
    optimizer.zero_grad()
    losses = [step(model, optimizer) for _ in range(4)]
    assert losses[-1] < losses[0]
