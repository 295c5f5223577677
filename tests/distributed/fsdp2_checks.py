"""Checks of FSDP2 without Accelerate: `fully_shard`, and this package's `prepare` before and after
it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_training import Traffic
from fsdp2_training import (
    Net,
    batches,
    loss_of,
    mean,
    prepared,
    same_on_all_ranks,
    shard,
    train,
    whole,
)
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_api as fsdp_api
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fp8_backends
from fp8_backends.comm import fsdp2
from fp8_backends.errors import FP8BackendError
from fp8_backends.recipes.handlers import AORecipeKwargs, FP8RecipeKwargs
from fp8_backends.tensors.scaled_tensor import Partial, ScaledTensor, quantize
from fp8_backends.tensors.sharded_tensor import local_part

LEVELS = ("O1", "O2", "O3", "O4")
GATHERED_BY_AO = AORecipeKwargs(enable_fsdp_float8_all_gather=True)
TRAINED = {
    **{level: (f"msamp:{level}", 65) for level in ("O2", "O4")},
    "native:delayed": ("native:delayed", 65),
    "ao:tensorwise": ("ao:tensorwise", 80),  # TorchAO takes multiples of 16
}
"""One of each kind; the checkpoints below go on with every level on other ranks."""
STEPS = 25


def check_single_layer_model_is_proven():
    for spec in ("ao:tensorwise", GATHERED_BY_AO):
        layer = nn.Linear(32, 32)
        fp8_backends.prepare(layer, None, spec)
        fully_shard(layer)
        _, optimizer = fp8_backends.prepare(layer, torch.optim.AdamW(layer.parameters()), spec)
        layer(torch.randn(16, 32)).sum().backward()
        optimizer.step()  # raises without products
        # TorchAO makes dgrad for any input
        counts = {"fprop": 1, "dgrad": 1, "wgrad": 1, "recomputed": 0}
        assert list(fp8_backends.audit(layer, optimizer).products.values()) == [counts]


def check_shards_of_scaled_weights():
    """Store one scale for the whole weight, and shard O3's FP16 master alike; all shards hold rows
    of the same values."""
    for level in LEVELS:
        torch.manual_seed(0)
        model = Net()
        fp8_backends.prepare(model, None, f"msamp:{level}")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        shard(model)
        fp8_backends.prepare(model, torch.optim.AdamW(model.parameters()), f"msamp:{level}")
        for name, parameter in model.named_parameters():
            local = local_part(parameter)
            assert isinstance(parameter, DTensor)
            assert torch.equal(whole(model.state_dict()[name]), before[name]), name
            if not isinstance(local, ScaledTensor):
                continue
            parts = [local] if local.master is None else [local, local.master]
            assert len(parts) == (2 if level == "O3" else 1)
            assert (local.residual is not None) is (level == "O4")
            for part in parts:
                assert (
                    same_on_all_ranks(part.scale_inv)
                    and part.shape == local.shape
                    and part.partial is Partial.SHARD
                )
        assert local_part(model.blocks[0].up.weight).shape[0] == (33, 32)[dist.get_rank()]
        assert local_part(model.loudness.weight).shape[0] == (1, 0)[dist.get_rank()]


def check_values_copied_into_shards_get_one_scale():
    """Agree at the next gather at the latest: each rank had a scale for its own rows."""
    for level in ("O2", "O3", "O4"):
        model, _ = prepared(f"msamp:{level}")
        with torch.no_grad():
            values = (torch.arange(64 * 64).view(64, 64) // 2) / 512
            model.mix.weight.copy_(
                distribute_tensor(values, model.mix.weight.device_mesh, [Shard(0)])
            )
        local = local_part(model.mix.weight)
        assert not same_on_all_ranks(local.scale_inv)
        loss_of(model, batches(1)[0])
        assert same_on_all_ranks(local.scale_inv) and local.partial is not Partial.WRITTEN
        assert torch.equal(local.scale_inv, quantize(values, local.codes.dtype).scale_inv)
        # eleven bits each: FP16 holds them, and E4M3 has an FP16 master
        assert torch.equal(whole(model.state_dict()["mix.weight"]), values)


def _gradients(model, ids) -> dict[str, torch.Tensor]:
    loss_of(model, ids).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _relative(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result - exact).double().norm() / exact.double().norm()).item()


def check_gradients_match_whole_batch():
    """A gradient is rounded to E4M3 twice, on the wire and at rest: 0.026 each, 0.037 together.
    Both sides have the same FP8 products, except for the amax of half a batch or of a whole one."""
    figures = {}
    for level in LEVELS:
        model, _ = prepared(f"msamp:{level}")
        gradients = _gradients(model, batches(1)[0])
        plain, _ = prepared(FP8RecipeKwargs(backend=f"msamp:{level}", gradient_comm="plain"))
        exact = _gradients(plain, batches(1)[0])
        for name, gradient in gradients.items():
            stored_in_fp8 = isinstance(local_part(gradient), ScaledTensor)
            assert stored_in_fp8 == isinstance(
                local_part(dict(model.named_parameters())[name]), ScaledTensor
            )
            if stored_in_fp8:
                assert local_part(gradient).codes.dtype == torch.float8_e4m3fn
            error = _relative(whole(gradient), whole(exact[name]))
            figures[name] = max(error, figures.get(name, 0.0))
            # both sides were rounded once more for storage
            assert error <= 0.055, (level, name, error)
        assert len(gradients) == sum(p.requires_grad for p in model.parameters())
    return figures


def check_gradients_free_the_unit_buffer():
    """A bias's view of the FP32 buffer would keep the gradients of all weights in the unit
    alive."""
    model, _ = prepared("msamp:O2")
    for name, gradient in _gradients(model, batches(1)[0]).items():
        local = local_part(gradient)
        if not isinstance(local, ScaledTensor):
            assert local.untyped_storage().nbytes() <= 2 * local.nbytes, name


def check_preparing_again():
    """Install hooks once, and only on the shards, even while FSDP2 keeps the root gathered after a
    forward."""
    model, optimizer = prepared("msamp:O2")
    with torch.no_grad():
        loss_of(model, batches(1)[0])
    fp8_backends.prepare(model, optimizer, "msamp:O2")
    assert {
        len(p._post_accumulate_grad_hooks or ()) for p in model.parameters() if p.requires_grad
    } == {1}
    train(model, optimizer, 1)
    loss_of(model, batches(1)[0])  # gathers again
    model.unshard()
    assert not model.loudness.weight._post_accumulate_grad_hooks


def check_requested_reduction_is_applied():
    """Test AVG, SUM, and PREMUL_SUM, the form of a custom divide factor."""
    averaged = None
    for factor in (None, 1.0, 8.0):
        model, _ = prepared(FP8RecipeKwargs(backend="native:dynamic", gradient_comm="fp8"))
        if factor is not None:
            for module in (model, *model.blocks, model.mix):
                module.set_gradient_divide_factor(factor)
        gradient = whole(_gradients(model, batches(1)[0])["mix.weight"])
        averaged = gradient if averaged is None else averaged
        assert torch.allclose(
            gradient, averaged * (dist.get_world_size() / (factor or dist.get_world_size()))
        )


def check_microbatches():
    """Four microbatches equal one batch of them all, reduced each or only at the end. Equal
    microbatches give equal amaxes of FP8 products, and only E4M3 on the wire and at rest differs,
    on both sides: 0.026 each."""
    ids = batches(1) * 4
    model, _ = prepared("msamp:O2")
    exact = _gradients(model, torch.cat(ids))
    for each_travels in (True, False):
        model, optimizer = prepared("msamp:O2")
        with Traffic() as counted:
            for i, part in enumerate(ids):
                model.set_requires_gradient_sync(each_travels or i == 3)
                (loss_of(model, part) / 4).backward()
        assert counted.count("all_to_all") == (16 if each_travels else 4)  # four units
        local = local_part(model.mix.weight.grad)
        assert local.codes.dtype == (torch.float32 if each_travels else torch.float8_e4m3fn)
        for name, p in model.named_parameters():
            if name in exact:
                error = _relative(whole(p.grad), whole(exact[name]))
                assert error <= 0.055, (each_travels, name, error)
        optimizer.step()  # which casts what microbatches have accumulated
        assert local_part(model.mix.weight.grad).codes.dtype == torch.float8_e4m3fn


class _Stack(nn.Module):
    """Stack bias-free layers, each an FSDP2 unit: only FP8 is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _traffic_of_a_step(spec) -> Traffic:
    model = _Stack()
    if spec is not None:
        fp8_backends.prepare(model, None, spec)
    for layer in model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    if spec is not None:
        fp8_backends.prepare(model, optimizer, spec)
    with Traffic() as counted:
        y = model(torch.randn(32, 256, requires_grad=True))
        counted.of_amaxes = counted.bytes("all_reduce")
        y.square().mean().backward()
    optimizer.step()
    return counted


def check_bytes_on_the_wire():
    """Count bytes at the collectives, of a forward and a backward: codes have half of bf16's, and
    the amaxes little. Groups of only FP8 work on gloo."""
    plain = _traffic_of_a_step(None)
    rules = [f"native:{rule}" for rule in ("dynamic", "delayed", "window", "rowwise", "blockwise")]
    gathered = {
        spec: FP8RecipeKwargs(backend=spec, enable_fsdp_float8_all_gather=True)
        for spec in (*rules, "native:mxfp8", "native:mxfp8+msamp:O2")
    }
    shares = {}
    for name, spec in {
        **{f"msamp:{level}": f"msamp:{level}" for level in LEVELS},
        "ao": GATHERED_BY_AO,
        **gathered,
    }.items():
        counted = _traffic_of_a_step(spec)
        of_weights = counted.bytes("all_gather")
        shares[name] = of_weights / plain.bytes("all_gather")
        assert shares[name] <= 0.51, shares
        if name in gathered:
            assert counted.count("all_gather") == plain.count("all_gather")
            amaxes = counted.of_amaxes / plain.bytes("all_gather")
            assert shares[name] == 0.5 and amaxes <= 0.04, (name, shares, amaxes)
        if "msamp" in name:  # the other gradients travel as FSDP2 has it
            shares[f"{name} gradients"] = counted.bytes("all_to_all") / plain.bytes(
                "reduce_scatter"
            )
            assert shares[f"{name} gradients"] <= 0.51 and not counted.count("reduce_scatter"), (
                shares
            )
    return shares


def check_scales_agree_behind_a_frozen_first_unit():
    """The model itself is no unit, and the output of its first one gets no gradient."""
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64))
    fp8_backends.prepare(model, None, "native:delayed")
    for layer in model:
        fully_shard(layer)
    fp8_backends.prepare(model, torch.optim.AdamW(model[1].parameters()), "native:delayed")
    model(torch.randn(16, 64) * (1 + dist.get_rank())).square().mean().backward()
    assert all(same_on_all_ranks(layer.fp8_scaling) for layer in model)


def check_replicas_without_shards():
    """`replicate` over FSDP2, as torchtitan has it."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(64, 64))
    fp8_backends.prepare(model, None, "msamp:O4")
    replicate(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, "msamp:O4")
    model(torch.randn(16, 64) * (1 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    assert same_on_all_ranks(whole(model.state_dict()["0.weight"]))


def check_plain_gradients_on_request():
    for spec in (FP8RecipeKwargs(backend="msamp:O2", gradient_comm="plain"), "native:dynamic"):
        counted = _traffic_of_a_step(spec)
        assert counted.count("reduce_scatter") and not counted.count("all_to_all")


def check_unsupported_torch_is_named():
    """The reduce-scatter's base class is private to torch: without it FP8 gradients are refused,
    plain ones not."""
    base = fsdp_api.ReduceScatter
    fsdp2._reduce_scatter_class.cache_clear()
    try:
        del fsdp_api.ReduceScatter
        prepared("native:dynamic")
        try:
            prepared("msamp:O2")
        except FP8BackendError as error:
            assert torch.__version__ in str(error) and 'gradient_comm="plain"' in str(error)
        else:
            raise AssertionError("connected to nothing")
    finally:
        fsdp_api.ReduceScatter = base


def check_state_dicts_are_plain():
    """Out: plain DTensors with the master's precision. In: into any other level, by value."""
    for level in LEVELS:
        model, optimizer = prepared(f"msamp:{level}")
        train(model, optimizer, 2)
        with (
            pytest.raises(FP8BackendError, match="get_state_dict"),
            fp8_backends.checkpoints.plain_weights(model),
        ):
            pass
        saved = model.state_dict()
        assert all(not isinstance(local_part(value), ScaledTensor) for value in saved.values())
        if level == "O3":
            local = local_part(model.mix.weight)
            assert torch.equal(local_part(saved["mix.weight"]), local.master.dequantize())
            assert not torch.equal(local_part(saved["mix.weight"]), local.dequantize())
        other, _ = prepared({"O3": "msamp:O1", "O4": "msamp:O4"}.get(level, "msamp:O3"))
        other.load_state_dict(saved)
        for name, value in other.state_dict().items():  # each holds the other's values
            assert torch.equal(whole(value), whole(saved[name])), (level, name)
        for name, p in other.named_parameters():
            if isinstance(local_part(p), ScaledTensor):
                assert same_on_all_ranks(local_part(p).scale_inv), name
        ids = batches(1)[0]
        assert abs(mean(loss_of(model, ids)) - mean(loss_of(other, ids))) < 1e-6
        stock = Net()
        stock.load_state_dict({name: whole(value) for name, value in saved.items()})
        assert torch.equal(stock.mix.weight, whole(saved["mix.weight"]))


def check_loading_after_a_forward():
    """Load into the shards although FSDP2 leaves the root gathered after a forward."""
    model, _ = prepared("msamp:O3")
    saved = model.state_dict()
    other, optimizer = prepared("msamp:O3")
    train(other, optimizer, 2)
    with torch.no_grad():
        loss_of(other, batches(1)[0])
    other.load_state_dict(saved)
    assert all(
        torch.equal(whole(value), whole(saved[name])) for name, value in other.state_dict().items()
    )


def check_evaluation_between_steps_changes_nothing():
    model, optimizer = prepared("msamp:O3")
    train(model, optimizer, 2)
    saved = {name: whole(value) for name, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        loss_of(model, batches(1)[0])
    model.train()
    assert all(torch.equal(whole(value), saved[name]) for name, value in model.state_dict().items())
    train(model, optimizer, 1)


def check_weights_sharded_too_early_are_refused_by_name():
    for spec, text in (("msamp:O2", "then fully_shard"), (GATHERED_BY_AO, "before fully_shard")):
        torch.manual_seed(0)
        model = shard(Net(80))
        try:
            fp8_backends.prepare(model, torch.optim.AdamW(model.parameters()), spec)
        except FP8BackendError as error:
            assert text in str(error) and "weight" in str(error), error
        else:
            raise AssertionError(spec)
        assert not any("FP8" in type(module).__name__ for module in model.modules()), (
            "nothing has changed"
        )
    unsharded, _ = prepared(GATHERED_BY_AO, 80, sharded=False)
    try:
        loss_of(unsharded, batches(1)[0])
    except FP8BackendError as error:
        assert "not sharded" in str(error)
    else:
        raise AssertionError("trained without FSDP2")


# On four ranks


def hybrid_mesh():
    """Two replicas of two shards: all ranks have the same scales, and replicas the same bytes."""
    for spec in ("msamp:O3", "native:delayed"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model, optimizer = prepared(spec, mesh=mesh)
        losses = train(model, optimizer, 8)
        assert losses[-1] < losses[0] - 0.5, losses
        for name, parameter in model.named_parameters():
            local = local_part(parameter)
            assert not isinstance(local, ScaledTensor) or same_on_all_ranks(local.scale_inv), name
            replica = local.dequantize() if isinstance(local, ScaledTensor) else local
            assert same_on_all_ranks(replica.detach(), mesh.get_group("replicas")), name
    runs = []
    for how in (False, True):
        model, optimizer = prepared(
            FP8RecipeKwargs(backend="native:rowwise", enable_fsdp_float8_all_gather=how), mesh=mesh
        )
        runs.append(train(model, optimizer, 2))
    assert runs[0] == runs[1], runs


# On two ranks, and on one


def losses():
    """Train on one rank without FSDP2, on several with it. The test compares the figures."""
    sharded = dist.get_world_size() > 1
    return {
        name: train(*prepared(spec, rows, sharded, lr=6e-3), STEPS)
        for name, (spec, rows) in TRAINED.items()
    }


# Elastic: written by two ranks, read by one, two and four


FOLDER = Path(os.environ.get("FSDP2_CHECKPOINTS", "."))


def write_checkpoints():
    losses = {}
    for level in LEVELS:
        model, optimizer = prepared(f"msamp:{level}")
        train(model, optimizer, 5)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=FOLDER / level)
        losses[level] = train(model, optimizer, 4, seed=1)
    return losses


def read_checkpoints():
    """Return the losses after loading; weights match the saved ones for any number of ranks."""
    losses = {}
    for level in LEVELS:
        model, optimizer = prepared(f"msamp:{level}", lr=1.0)  # the saved one counts
        train(model, optimizer, 1, seed=7)
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states}
        dcp.load(saved, checkpoint_id=FOLDER / level)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        for name, value in model.state_dict().items():
            assert torch.equal(whole(value), whole(saved["model"][name])), name
        losses[level] = train(model, optimizer, 4, seed=1)
    return losses


if __name__ == "__main__":
    ranks.main(globals())
