"""Compare FSDP2 gathers of weights as codes with plain gathers, on two ranks."""

from __future__ import annotations

import functools

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_training import Traffic
from expert_families import make_experts, routed
from fsdp2_training import batches, loss_of, prepared, train, whole
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8_backends
from fp8_backends.errors import FP8BackendError
from fp8_backends.recipes.handlers import FP8RecipeKwargs
from fp8_backends.tensors.gathered_codes import GatheredCodes
from fp8_backends.tensors.scaled_tensor import ScaledTensor

RULES = ("dynamic", "delayed", "window", "rowwise", "blockwise", "mxfp8")
SPECS = (*(f"native:{rule}" for rule in RULES), "msamp:O1", "native:mxfp8+msamp:O2")


def both(spec: str, **options):
    """(model, optimizer) with plain gathers, and with codes."""
    for how in (False, True):
        yield prepared(FP8RecipeKwargs(backend=spec, enable_fsdp_float8_all_gather=how), **options)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def assert_same(runs: list[tuple[list[float], dict[str, torch.Tensor]]]) -> None:
    (losses, before), (others, after) = runs
    assert losses == others, (losses, others)
    assert all(torch.equal(before[name], after[name]) for name in before), "weights differ"


def check_training_matches_plain_gathers_bitwise():
    """Include uneven and empty shards, evaluation in between, and units left gathered after
    forward."""
    stays_gathered = {"reshard_after_forward": False}
    for spec, options in (
        *((spec, {}) for spec in SPECS),
        *((spec, stays_gathered) for spec in SPECS[1:4:2]),
    ):
        runs = []
        for model, optimizer in both(spec, **options):
            losses = train(model, optimizer, 1)
            for mode in (False, True):
                model.train(mode)
                with torch.no_grad():
                    losses.append(loss_of(model, batches(1, seed=3)[0]).item())
            losses += train(model, optimizer, 1, seed=1)
            runs.append((losses, weights(model)))
        assert_same(runs)


def check_rank_without_tokens():
    """Its gradients are zeros, as with plain gathers."""
    for spec in ("native:rowwise", "msamp:O2"):
        runs = []
        for model, optimizer in both(spec):
            losses, ids = (
                train(model, optimizer, 1),
                batches(1)[0][: 0 if dist.get_rank() else None],
            )
            loss = model(ids[:, :-1]).float().square().sum()
            loss.backward()
            optimizer.step()
            runs.append(([*losses, loss.item()], weights(model)))
        assert_same(runs)


def check_untracked_writes_to_weights():
    """Write through `.data`, where an outdated amax would clip new values; and load a state dict in
    between."""
    runs = []
    for model, optimizer in both("native:rowwise"):
        losses = train(model, optimizer, 1)
        saved = model.state_dict()
        model.mix.weight.data.mul_(8)
        losses += train(model, optimizer, 1)
        model.load_state_dict(saved)
        model.unshard()
        losses += train(model, optimizer, 1)
        assert all(not isinstance(value.to_local(), ScaledTensor) for value in saved.values())
        runs.append((losses, weights(model)))
    assert_same(runs)


def check_prefetched_gathers():
    """Gather before the forward that reads the weights, before scales roll, and before a layer
    switches to evaluation."""
    runs = []
    for model, optimizer in both("native:delayed"):
        first = model.blocks[0]
        model.set_modules_to_forward_prefetch([first])
        losses = train(model, optimizer, 1)
        for mode in (True, False):
            first.unshard(async_op=True)
            first.train(mode)
            losses += train(model, optimizer, 1)
        runs.append((losses, weights(model)))
    assert_same(runs)


def check_gathered_tensors():
    """Gather codes for fprop and dgrad in training, and the stored weight in evaluation."""
    seen = []
    for spec in ("native:rowwise", "native:dynamic+msamp:O2"):
        model, _ = prepared(FP8RecipeKwargs(backend=spec, enable_fsdp_float8_all_gather=True))
        model.mix.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
        loss = loss_of(model, batches(1)[0])
        held = sorted(seen[-1].parts)
        assert isinstance(seen[-1], GatheredCodes) and model.embedding.weight.dtype == torch.float32
        loss.backward()
        assert sorted(seen[-1].parts) == (
            [name.replace("fprop", "dgrad") for name in held] if "row" in spec else held
        )
        loss_of(model.eval(), batches(1)[0])
        assert not isinstance(seen[-1], GatheredCodes)


def check_experts():
    """Test two experts in three uneven shards, one expert with an empty shard, both orientations,
    and sizes not divisible by a block. A checkpointed one gathers both codes for backward."""
    shares = {
        spec: _share_of_experts(spec, ("mixtral", "gpt_oss")[i % 2], 3)
        for i, spec in enumerate(SPECS)
    }
    assert all(share == (0.5 if "O" in spec else 0.25) for spec, share in shares.items()), shares
    shares["one expert"] = _share_of_experts("native:rowwise", "mixtral", 1, checkpointed=True)
    assert shares["one expert"] == 0.375
    return shares


def _share_of_experts(spec: str, family: str, number: int, checkpointed: bool = False) -> float:
    """Return the bytes of weight gathers in a forward and a backward, relative to plain gathers."""
    runs, gathered = [], []
    for how in (False, True):
        recipe = FP8RecipeKwargs(backend=spec, enable_fsdp_float8_all_gather=how)
        root = make_experts(family, num_local_experts=number, intermediate_size=40)
        fp8_backends.prepare(root, None, recipe)
        fully_shard(root.experts, reshard_after_forward=True)
        _, optimizer = fp8_backends.prepare(
            root, torch.optim.AdamW(root.parameters(), lr=1e-2), recipe
        )
        if checkpointed:
            root.experts.forward = functools.partial(
                checkpoint, root.experts.forward, use_reentrant=False
            )
        losses = []
        for step in range(2):
            hidden, chosen, shares = routed(24, seed=2 * step + dist.get_rank(), experts=number)
            shares = shares[:, : chosen.shape[1]]
            with Traffic() as counted:
                y = root.experts(hidden.requires_grad_(), chosen, shares)
                y.square().mean().backward()
            losses += [y.sum().item(), hidden.grad.sum().item()]
            optimizer.step()
            optimizer.zero_grad()
        if how == "fp8":
            root.experts(hidden[:0], chosen[:0], shares[:0]).sum().backward()
            assert all(not whole(p.grad).any() for p in root.experts.parameters())
        fp8_backends.restore(root)  # and gather weights as they are stored again
        losses.append(root.experts(hidden, chosen, shares).sum().item())
        runs.append((losses, weights(root)))
        biases = sum(
            -(-number // 2) * each.shape[1:].numel()
            for each in root.parameters()
            if each.dim() == 2
        )
        gathered.append(counted.bytes("all_gather") - 2 * 4 * biases)
    assert_same(runs)
    return round(gathered[1] / gathered[0], 4)


def check_accumulation_and_checkpointing():
    """Checkpoint the whole model: FSDP2 sees the second forward inside backward."""
    for spec in ("native:delayed", "native:rowwise"):
        runs = []
        for model, optimizer in both(spec):
            losses = []
            for i, ids in enumerate(batches(4)):
                model.set_requires_gradient_sync(i % 2 == 1)
                loss = checkpoint(
                    lambda ids, model=model: loss_of(model, ids), ids, use_reentrant=False
                )
                loss.backward()
                losses.append(loss.item())
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            runs.append((losses, weights(model)))
        assert_same(runs)


def check_checkpointed_blocks():
    """Checkpoint inside FSDP2's units: one gather in backward serves fprop and dgrad."""
    for reentrant in (False, True):
        runs = []
        for model, optimizer in both("native:mxfp8"):
            for block in model.blocks:
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=reentrant
                )
            runs.append((train(model, optimizer, 2), weights(model)))
        assert_same(runs)


def check_backward_on_other_weights_is_refused_by_name():
    model, _ = prepared(
        FP8RecipeKwargs(backend="native:rowwise", enable_fsdp_float8_all_gather=True)
    )
    loss = loss_of(model, batches(1)[0])
    model.eval()
    loss_of(model, batches(1)[0])  # with a graph: its backward finds weights as they are stored
    with pytest.raises(FP8BackendError, match="enable_fsdp_float8_all_gather=False"):
        loss.backward()


if __name__ == "__main__":
    ranks.main(globals())
