"""Check GPT-2 with transformers' Conv1D layers on two ranks. See `ranks`."""

from __future__ import annotations

import functools

import model_families
import ranks
import torch
import torch.distributed as dist
from conversion_steps import take_steps
from fsdp2_training import on_all_ranks, prepared_in, same_on_all_ranks, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8_backends
from fp8_backends.compute.torchao.linear import AOWeight
from fp8_backends.recipes.handlers import AORecipeKwargs
from fp8_backends.tensors.scaled_tensor import ScaledTensor
from fp8_backends.tensors.sharded_tensor import local_part

STEPS = 6
LARGEST_GAP = 0.01
"""Nats, as in test_fsdp2.py."""


def _trained(spec, wrap) -> tuple[nn.Module, list[float]]:
    """Train on this rank's half of a batch. Return the model, and the mean losses over the
    ranks."""
    model, optimizer = prepared_in(wrap, model_families.build("gpt2"), spec, lr=3e-3)
    data = {
        name: rows[dist.get_rank() :: dist.get_world_size()]
        for name, rows in model_families.batch("gpt2").items()
    }
    losses = take_steps(lambda: model_families.loss_of(model, data), optimizer, STEPS)
    return model, [sum(each) / len(each) for each in zip(*on_all_ranks(losses), strict=True)]


@functools.cache
def _alone() -> list[float]:
    """Return the losses of one rank with the whole batch."""
    model = model_families.build("gpt2")
    _, optimizer = fp8_backends.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), "native:dynamic"
    )
    return model_families.train(model, optimizer, "gpt2", STEPS)


def _assert_trains(model: nn.Module, losses: list[float], name: str) -> None:
    assert losses[-1] < losses[0] - 0.2, (name, losses)
    assert max(abs(a - b) for a, b in zip(losses, _alone(), strict=True)) < LARGEST_GAP, (
        name,
        losses,
    )
    for parameter_name, value in model.state_dict().items():
        assert same_on_all_ranks(whole(value)), (name, parameter_name)


def check_ddp():
    for spec in ("native:dynamic", "msamp:O2"):
        _assert_trains(*_trained(spec, DistributedDataParallel), spec)


def check_fsdp2():
    gathered = AORecipeKwargs(enable_fsdp_float8_all_gather=True)
    for spec in ("native:rowwise", "msamp:O2", "msamp:O3", gathered):
        model, losses = _trained(spec, _sharded)
        weight = model.transformer.h[0].attn.c_attn.weight
        shard = local_part(weight.detach())
        assert weight.shape == (model_families.WIDTH, 3 * model_families.WIDTH)
        assert isinstance(shard, ScaledTensor) == (spec in ("msamp:O2", "msamp:O3"))
        assert isinstance(shard, AOWeight) == (spec is gathered)
        _assert_trains(model, losses, str(spec))


def _sharded(model: nn.Module) -> nn.Module:
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


if __name__ == "__main__":
    ranks.main(globals())
