"""Checks of weights that FSDP2 gathers as codes (`weight_comm`), against plain gathers, on two ranks."""

from __future__ import annotations

import contextlib

import pytest
import ranks
import torch
import torch.distributed as dist
from fsdp2_checks import _Counted
from fsdp2_training import Net, batches, loss_of, prepared, shard, train, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8_backends
from fp8_backends.errors import FP8BackendError
from fp8_backends.numerics.gathered_codes import GatheredCodes
from fp8_backends.recipes.handlers import FP8RecipeKwargs

RULES = ("dynamic", "delayed", "window", "rowwise", "blockwise", "mxfp8")
SPECS = (*(f"native:{rule}" for rule in RULES), *(f"native:{rule}+msamp:O2" for rule in ("window", "rowwise", "mxfp8")))


def both(spec: str, **options):
    """(model, optimizer) with plain gathers, and with codes."""
    for how in ("plain", "fp8"):
        yield prepared(FP8RecipeKwargs(backend=spec, weight_comm=how), **options)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def assert_same(runs: list[tuple[list[float], dict[str, torch.Tensor]]]) -> None:
    (losses, before), (others, after) = runs
    assert losses == others, (losses, others)
    assert all(torch.equal(before[name], after[name]) for name in before), "weights differ"


def check_training_is_that_of_plain_gathers_to_the_bit():
    """With uneven and empty shards, evaluation in between, and the units that FSDP2 leaves gathered after forward."""
    for spec in SPECS:
        for options in ({}, {"reshard_after_forward": False}):
            runs = []
            for model, optimizer in both(spec, **options):
                losses = train(model, optimizer, 2)
                model.eval()
                with torch.no_grad():
                    losses.append(loss_of(model, batches(1, seed=3)[0]).item())
                model.train()
                with torch.no_grad():
                    losses.append(loss_of(model, batches(1, seed=3)[0]).item())
                losses += train(model, optimizer, 2, seed=1)
                runs.append((losses, weights(model)))
            assert_same(runs)


if __name__ == "__main__":
    ranks.main(globals())
