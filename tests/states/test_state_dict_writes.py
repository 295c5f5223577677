"""State dicts of models at levels hold plain copies: a write to one raises at the next read of the
weight."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from level_steps import LEVELS, mlp, prepared, train
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError

LOST = r"0\.weight: a tensor of state_dict\(\) was written to.*load_state_dict"

WRITES = {
    "copy_": lambda value: value.copy_(torch.zeros_like(value)),
    "rows": lambda value: [row.zero_() for row in value],
    "detached view": lambda value: value.detach().view(-1).mul_(0.5),
    "setitem": lambda value: value.__setitem__(slice(None), 0),
    "foreach": lambda value: torch._foreach_mul_([value], 0.5),
    "out": lambda value: torch.add(value, 1, out=value),
    "fused": lambda value: value.lerp_(torch.zeros_like(value), 0.1),
}

READS = {
    "step": lambda model, optimizer: train(model, optimizer, range(1)),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "evaluation": lambda model, optimizer: model.eval()(torch.randn(16, model[0].in_features)),
    "forward": lambda model, optimizer: model(torch.randn(16, model[0].in_features)),
    "read": lambda model, optimizer: model[0].weight.detach() + 0,
    "cast": lambda model, optimizer: model[0].weight.detach().double(),
    "copy": lambda model, optimizer: copy.deepcopy(model),
    "change": lambda model, optimizer: model[0].weight.data.add_(1.0),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("level", "write"), list(zip(itertools.cycle(LEVELS), WRITES, strict=False))
)
def test_write_to_freed_copy_raises(level, write, mode):
    model, optimizer = prepared(level)
    with mode():
        WRITES[write](model.state_dict()["0.weight"])
    with pytest.raises(FP8BackendError, match=LOST):
        train(model, optimizer, range(1))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_read_of_the_weight_raises(level, read):
    model, optimizer = prepared(level)
    model.state_dict()["0.weight"].mul_(0.5)
    with pytest.raises(FP8BackendError, match=LOST):
        READS[read](model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_changed_state_dict_loads_and_trains(level, tmp_path):
    model, optimizer = prepared(level)
    dcp.save({"model": mlp(seed=1).state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for change in (
        lambda state: dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True),
        halve,
    ):
        state = model.state_dict()
        change(state)
        model.load_state_dict(state)
        train(model, optimizer, range(2))
        assert model.state_dict().keys() == state.keys()


def halve(state: dict[str, torch.Tensor]) -> None:
    for value in state.values():
        value.mul_(0.5)


def test_snapshots_stay_unchanged_and_readable():
    model, optimizer = prepared("O2")
    state = model.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    train(model, optimizer, range(2))
    assert torch.equal(state["0.weight"], kept["0.weight"])
    assert all(value.half().mul_(2).isfinite().all() for value in state.values())
    train(model, optimizer, range(2))


def test_freed_copies_take_no_memory():
    model, _ = prepared("O2")
    for _ in range(5):
        model.state_dict()
    copies = model[0].weight.state_dict_copies.copies
    assert (
        len(copies) == 1
        and copies[0].memory.expired()
        and copies[0].counters[0].untyped_storage().nbytes() == 0
    )


@pytest.mark.parametrize("backend", ["native:dynamic", "native:blockwise"])
def test_writes_to_copies_of_frozen_fp8_weights_raise(backend):
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.01)
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, fp8_params=True, exclude=["1"])
    model, optimizer = fp8_backends.prepare(model, optimizer, recipe)
    model.state_dict()["0.weight"].zero_()
    with pytest.raises(FP8BackendError, match=LOST):
        model(torch.randn(16, 128)).square().mean().backward()
