"""Test the guard on real ranks: all ranks decide on a fault of one, and diverged replicas are
named."""

from __future__ import annotations

import functools

import pytest
import ranks
import torch
import torch.distributed as dist
from fsdp2_training import on_all_ranks, prepared_in
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8_backends
from fp8_backends.errors import FP8BackendError
from fp8_backends.formats.scaling import INPUT, SCALE
from fp8_backends.tensors.scaled_tensor import ScaledTensor
from fp8_backends.tensors.sharded_tensor import local_part
from fp8_backends.watch import guard

guard.COMPARED_EVERY = 2


def training(backend: str, shard: bool = False, **fields):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)
    )
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, guard="skip", **fields)
    return prepared_in(fully_shard if shard else DistributedDataParallel, model, recipe, lr=1e-2)


def batch() -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(dist.get_rank()))


def step(model, optimizer, x=None, tamper=lambda: None) -> None:
    """`tamper` is called on rank 1, between backward and the step."""
    optimizer.zero_grad()
    model(batch() if x is None else x).float().square().mean().backward()
    if dist.get_rank() == 1:
        tamper()
    optimizer.step()


def kinds(optimizer) -> list[tuple[int, str]]:
    return [(fault.step, fault.kind) for fault in guard.faults(optimizer)]


def check_clipping_on_one_rank_skips_step_on_all():
    model, optimizer = training("native:delayed")
    for _ in range(3):
        step(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, batch() * (1e4 if dist.get_rank() else 1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert on_all_ranks(kinds(optimizer)) == [[(4, "clipped")]] * 2


def check_flipped_bit_of_weight_or_scale_is_named():
    def flip_weight(layer):
        layer.weight.codes.view(torch.int16)[0, 3] ^= 1

    def flip_scale(layer):
        layer.fp8_scaling[INPUT, SCALE] ^= 1 << 22

    for backend, flip, place in (
        ("msamp:O2", flip_weight, "2.weight"),
        ("native:delayed", flip_scale, "2, its scaling state"),
    ):
        model, optimizer = training(backend)
        step(model, optimizer)
        step(model, optimizer, tamper=functools.partial(flip, model.module[2]))
        (fault,) = guard.faults(optimizer)
        assert (fault.step, fault.kind, fault.where) == (2, "apart", (place,)), fault
        assert fault.figures == "rank 1 holds other values than the first"


def check_rank_without_backward_is_named_and_stays_synchronized():
    model, optimizer = training("native:dynamic")
    for number in range(4 + dist.get_rank()):
        if dist.get_rank() == 1 and number == 2:
            optimizer.step()  # with the gradients of the step before
        else:
            step(model, optimizer)
    assert on_all_ranks(kinds(optimizer)) == [[], [(3, "alone")]]
    first, second = on_all_ranks([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check_fsdp2_sums_statistics_of_shards():
    for backend in ("native:delayed", "msamp:O2"):
        model, optimizer = training(backend, shard=True)
        for _ in range(3):
            step(model, optimizer)
        assert kinds(optimizer) == [], guard.faults(optimizer)
        before = [local_part(p).detach().clone() for p in model.parameters()]
        spoiled = batch()
        if dist.get_rank() == 1:
            spoiled[0, 0] = float("nan")
        step(model, optimizer, spoiled)
        assert all(
            torch.equal(a, local_part(b)) for a, b in zip(before, model.parameters(), strict=True)
        )
        (found,) = {tuple(each) for each in on_all_ranks(kinds(optimizer))}
        assert found == ((4, "gradient"),)
        assert guard.faults(optimizer)[0].where[0] == "4.bias"
        step(model, optimizer)
        assert kinds(optimizer) == [(4, "gradient")]


def check_non_finite_parameter_of_one_rank_stops_all_ranks():
    for backend, shard, place in (
        ("native:delayed", False, "4.bias"),
        ("msamp:O4", False, "2.weight"),
        ("msamp:O2", True, "4.bias"),
    ):
        model, optimizer = training(backend, shard)
        step(model, optimizer)
        if dist.get_rank() == 1:
            layer, _, name = place.partition(".")
            weight = local_part(
                getattr((model if shard else model.module)[int(layer)], name).detach()
            )
            (weight.scale_inv if isinstance(weight, ScaledTensor) else weight).fill_(float("nan"))
        with pytest.raises(
            FP8BackendError, match=f"step 2: parameter in {place}: an inf or a NaN in 1 tensor"
        ) as error:
            step(model, optimizer)
        message = str(error.value)
        assert set(on_all_ranks(message)) == {message}


def check_local_steps_are_not_compared():
    model, optimizer = training("native:dynamic")
    for _ in range(4):
        with model.no_sync():
            step(model, optimizer)
    assert kinds(optimizer) == []


if __name__ == "__main__":
    ranks.main(globals())
