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
from torch._dynamo.exc import TorchRuntimeError
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
                losses += train(model, optimizer, 1, seed=1)
                runs.append((losses, weights(model)))
            assert_same(runs)


def check_what_is_gathered():
    """Codes in training, for fprop and dgrad; the weight as it is stored in evaluation."""
    seen = []
    for spec in ("native:rowwise", "native:dynamic+msamp:O2"):
        model, _ = prepared(FP8RecipeKwargs(backend=spec, weight_comm="fp8"))
        model.mix.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
        loss = loss_of(model, batches(1)[0])
        held = sorted(seen[-1].parts)
        assert isinstance(seen[-1], GatheredCodes) and model.embedding.weight.dtype == torch.float32
        loss.backward()
        assert sorted(seen[-1].parts) == ([name.replace("fprop", "dgrad") for name in held] if "row" in spec else held)
        loss_of(model.eval(), batches(1)[0])
        assert not isinstance(seen[-1], GatheredCodes)
    assert isinstance(loss_of(prepared("msamp:O2")[0], batches(1)[0]), torch.Tensor)


class _Stack(nn.Module):
    """Bias-free layers, units of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@contextlib.contextmanager
def counted_reductions():
    """The bytes that this rank hands to `dist.all_reduce`."""
    sent, original = [], dist.all_reduce

    def count(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = count
    try:
        yield sent
    finally:
        dist.all_reduce = original


def check_bytes_on_the_wire():
    """Of a forward and a backward, which gather each weight once each: beside FP32, what is gathered, and that with
    what the ranks agree on."""
    shares = {}
    for spec in (*SPECS, "native:dynamic+msamp:O1"):
        model = _Stack(256)
        recipe = FP8RecipeKwargs(backend=spec, weight_comm="fp8")
        fp8_backends.prepare(model, None, recipe)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        fp8_backends.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
        with _Counted() as counted, counted_reductions() as agreed:
            y = model(torch.randn(32, 256, requires_grad=True))
            of_amaxes = sum(agreed)
            y.square().mean().backward()
        fp32 = 2 * 2 * 256 * 256 * 4 // dist.get_world_size()
        gathered = counted.bytes["all_gather"]
        shares[spec] = round(gathered / fp32, 4), round((gathered + of_amaxes) / fp32, 4)
        assert counted.all_gather == 4 and shares[spec][0] == 0.25 and shares[spec][1] <= 0.27, shares
    return shares


def check_accumulation_and_checkpointing():
    for spec in ("native:delayed", "native:rowwise", "native:mxfp8+msamp:O2"):
        runs = []
        for model, optimizer in both(spec):
            losses = []
            for i, ids in enumerate(batches(4)):
                model.set_requires_gradient_sync(i % 2 == 1)
                loss = checkpoint(lambda ids, model=model: loss_of(model, ids), ids, use_reentrant=False)
                loss.backward()
                losses.append(loss.item())
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            runs.append((losses, weights(model)))
        assert_same(runs)


def check_checkpointed_blocks():
    """Inside of FSDP2's units, where one gathering in backward serves fprop and dgrad."""
    for reentrant in (False, True):
        runs = []
        for model, optimizer in both("native:mxfp8"):
            for block in model.blocks:
                down = block.down.forward
                block.forward = lambda x, block=block: checkpoint(
                    lambda x: x + block.down(torch.relu(block.up(block.norm(x)))), x, use_reentrant=reentrant
                )
                assert down == block.down.forward
            runs.append((train(model, optimizer, 3), weights(model)))
        assert_same(runs)


def check_two_forwards_before_their_backwards():
    for spec in ("native:delayed", "native:rowwise"):
        runs = []
        for model, optimizer in both(spec):
            (loss_of(model, batches(1)[0]) + loss_of(model, batches(1)[0])).backward()
            optimizer.step()
            runs.append(([], weights(model)))
        if spec == "native:rowwise":
            assert_same(runs)


def check_a_backward_that_finds_other_weights_is_refused_by_name():
    model, _ = prepared(FP8RecipeKwargs(backend="native:rowwise", weight_comm="fp8"))
    loss = loss_of(model, batches(1)[0])
    model.eval()
    loss_of(model, batches(1)[0])  # with a graph: its backward finds weights as they are stored
    with pytest.raises(FP8BackendError, match='weight_comm="plain"'):
        loss.backward()


def _compiled(spec: str, how: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    recipe = FP8RecipeKwargs(backend=spec, weight_comm=how)
    fp8_backends.prepare(model, None, recipe)
    model[0].compile(backend="aot_eager")
    fully_shard(fully_shard(model[0]) and model)
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, recipe)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(32, 128, requires_grad=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights(model)


def check_compiled():
    """Codes that serve both products; those that do not are refused by name."""
    torch.compiler.reset()
    assert_same([_compiled("native:delayed", how) for how in ("plain", "fp8")])
    with pytest.raises(TorchRuntimeError, match='dgrad reads are not here.*weight_comm="plain"'):
        _compiled("native:rowwise", "fp8")


if __name__ == "__main__":
    ranks.main(globals())
