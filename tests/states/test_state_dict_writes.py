"""Writes into the tensors of a model's state dict reach the weights, as in PyTorch, and files of these are plain."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from level_steps import mlp, prepared, train, values_of
from safetensors.torch import load, save
from torch import nn

from fp8_backends import FP8BackendError
from fp8_backends.numerics.scaled_tensor import ScaledTensor

LEVELS = ("O1", "O2", "O3", "O4")


def move_average(average: nn.Module, model: nn.Module, decay: float = 0.9) -> None:
    """As timm's ModelEmaV2."""
    with torch.no_grad():
        for mine, theirs in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(decay * mine + (1 - decay) * theirs)


@pytest.mark.parametrize("level", LEVELS)
def test_an_average_kept_by_state_dict_is_that_of_plain_models(level):
    model, optimizer = prepared(level)
    average, twin, twins_average = copy.deepcopy(model), mlp(), mlp()
    twins_average.load_state_dict(model.state_dict())
    for batch in range(4):
        train(model, optimizer, [batch])
        twin.load_state_dict(model.state_dict())
        move_average(average, model)
        move_average(twins_average, twin)
    torch.testing.assert_close(values_of(average), values_of(twins_average), rtol=2**-21, atol=1e-8)


def weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if value.dim() == 2}


def through_data(value: torch.Tensor, new: torch.Tensor) -> None:
    value.data = new


WRITES = {
    "copy_": lambda value, new: value.copy_(new),
    "data.copy_": lambda value, new: value.data.copy_(new),
    "data": through_data,
    "row by row": lambda value, new: [value[i].copy_(new[i]) for i in range(len(value))],
    "setitem": lambda value, new: value.__setitem__(slice(None), new),
    "view": lambda value, new: value.detach().view(-1).copy_(new.reshape(-1)),
    "zero, add": lambda value, new: value.zero_().add_(new),
    "lerp_": lambda value, new: value.lerp_(new, 1.0),
    "foreach": lambda value, new: torch._foreach_copy_([value], [new]),
    "foreach lerp": lambda value, new: torch._foreach_lerp_([value, torch.zeros(1)], [new, torch.zeros(1)], 1.0),
    "out": lambda value, new: torch.add(new, 0, out=value),
    "dcp": lambda value, new: loaded_by_dcp(value, new),
}


def loaded_by_dcp(value: torch.Tensor, new: torch.Tensor) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"w": new.contiguous()}, checkpoint_id=folder, no_dist=True)
        dcp.load({"w": value}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("level", LEVELS)
def test_writes_land(level, way, mode):
    model, optimizer = prepared(level)
    train(model, optimizer, range(1))
    new, other = prepared(level, model=mlp(seed=1))[0].state_dict(), model.state_dict()
    with mode():
        for name, value in weights(other).items():
            WRITES[way](value, new[name])
    for name, value in weights(model.state_dict()).items():
        assert torch.equal(value, other[name]), name
        torch.testing.assert_close(value, new[name], rtol=0, atol=0)
    train(model, optimizer, range(2))


def test_a_write_changes_the_weight_as_it_is_then():
    """A state dict of PyTorch is no snapshot."""
    model, optimizer = prepared("O4")
    state = model.state_dict()
    train(model, optimizer, range(2))
    wanted = model[0].weight.exact() * 0.5
    state["0.weight"].mul_(0.5)
    assert torch.equal(model[0].weight.exact(), wanted) and torch.equal(state["0.weight"], wanted)


def test_small_changes_add_up():
    model, _ = prepared("O4")
    wanted = model[0].weight.exact().double()
    for _ in range(100):
        model.state_dict()["0.weight"].mul_(1 + 1e-5)
        wanted *= 1 + 1e-5
    torch.testing.assert_close(model[0].weight.exact().double(), wanted, rtol=1e-5, atol=0)


def test_what_cannot_land_is_refused():
    model, _ = prepared("O2")
    value = model.state_dict()["0.weight"]
    for change in (lambda: value.t_(), lambda: value.resize_(3), lambda: torch.from_dlpack(value)):
        with pytest.raises(FP8BackendError, match=r"clone|values\(\)"):
            change()
    with pytest.raises(ValueError, match="read-only"):
        value.numpy()[0] = 0


@pytest.mark.parametrize("level", LEVELS)
def test_files_and_copies_are_plain(level, tmp_path):
    model, optimizer = prepared(level)
    train(model, optimizer, range(1))
    state, buffer = model.state_dict(), io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    from_dcp = mlp().state_dict()
    dcp.load({"model": from_dcp}, checkpoint_id=tmp_path, no_dist=True)
    assigned = mlp()
    assigned.load_state_dict({name: value.detach() for name, value in state.items()}, assign=True)
    copies = [
        torch.load(buffer, weights_only=True),
        load(save(state)),
        from_dcp,
        copy.deepcopy(state),
        {name: value.clone() for name, value in state.items()},
        {name: value.double().float() for name, value in state.items()},
        dict(copy.deepcopy(assigned).named_parameters()),
    ]
    for each in copies:
        for name, value in state.items():
            assert type(each[name]) in (torch.Tensor, nn.Parameter) and torch.equal(each[name], value)
            each[name].data.zero_()
    assert model[0].weight.exact().abs().sum() > 0 and isinstance(model[0].weight, ScaledTensor)


def test_a_state_dict_is_freed_with_its_last_reference():
    import gc
    import weakref

    model, _ = prepared("O2")
    gc.disable()
    try:
        state = model.state_dict()
        state["0.weight"].mul_(2)
        memory = weakref.ref(state["0.weight"])
        del state
        assert memory() is None
    finally:
        gc.enable()
