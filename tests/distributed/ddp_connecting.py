"""Check the connection of a model under DDP, agreed scaling states, and traffic; run by
`ddp_checks.py`."""

from __future__ import annotations

import copy
import io

import ranks
import torch
import torch.distributed as dist
from ddp_training import (
    WIDTH,
    Traffic,
    assert_equal_on_all_ranks,
    batch,
    everything,
    mine,
    mlp,
    mse,
    scaled,
    share,
    step,
    wrapped,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import fp8_backends
from fp8_backends.comm.backward import agree_on_scaling
from fp8_backends.comm.ddp import Connection
from fp8_backends.errors import FP8BackendError
from fp8_backends.formats.scaling import HISTORY, ROLLS, SCALE, new_delayed_state


def check_connecting_makes_all_ranks_equal_to_rank_0():
    for spec in ("msamp:O2", {"backend": "msamp:O3", "shard_states": False}):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 32).requires_grad_(False)
        )
        before = model[0].weight.detach().clone()
        ddp, optimizer = wrapped(spec, model)
        assert_equal_on_all_ranks(ddp)
        assert dist.get_rank() or torch.allclose(
            model[0].weight.exact(), before, rtol=1e-3, atol=1e-6
        )


def check_subgroup_ddp_uses_its_group_and_timeout():
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    groups = [
        dist.new_group(members, ranks.TIMEOUT) for members in (range(half), range(half, 2 * half))
    ]
    mine_is = groups[rank >= half]
    torch.manual_seed(rank)
    ddp, optimizer = wrapped(
        "msamp:O2", nn.Sequential(nn.Linear(WIDTH, WIDTH)), process_group=mine_is
    )
    group = Connection.find(ddp).group
    assert (
        dist.get_process_group_ranks(group) == dist.get_process_group_ranks(mine_is)
        and group != mine_is
    )
    assert group._get_backend(torch.device("cpu")).options._timeout == ranks.TIMEOUT
    for index in range(2):
        x, y = batch(index + 10 * rank)
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, everything(ddp.module, optimizer))
    assert all(
        (other == every[rank]) == ((index >= half) == (rank >= half))
        for index, other in enumerate(every)
    )


def check_connecting_again_changes_nothing():
    ddp, optimizer = wrapped("msamp:O2", mlp())
    step(ddp, optimizer, 0)
    connection = Connection.find(ddp)
    parts = list(connection.collectives)
    with Traffic() as traffic:
        fp8_backends.prepare(ddp, optimizer, "msamp:O2")
    assert (
        Connection.find(ddp) is connection and connection.collectives == parts and not traffic.calls
    )
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in scaled(ddp.module).values())
    step(ddp, optimizer, 1)
    assert_equal_on_all_ranks(ddp, optimizer)


def check_unfrozen_layer_trains_after_preparing_again():
    model = mlp()
    model[2].requires_grad_(False)
    ddp, optimizer = wrapped("msamp:O2", model)
    step(ddp, optimizer, 0)
    model[2].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model[2].weight]})
    fp8_backends.prepare(ddp, optimizer, "msamp:O2")
    before = model[2].weight.detach().clone()
    step(ddp, optimizer, 1)
    assert not torch.equal(model[2].weight.dequantize(), before.dequantize())
    assert_equal_on_all_ranks(ddp, optimizer)


def refused(call, *words: str) -> None:
    try:
        call()
    except FP8BackendError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"accepted, where {words} were to be told")


def check_a_forgotten_connection_is_refused_at_the_step():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, "msamp:O2")
    ddp = DistributedDataParallel(model)
    mse(ddp, mine(0)).backward()
    before = everything(model)
    refused(optimizer.step, "prepare")
    assert everything(model) == before
    model_of_a_ddp_that_is_gone = mlp()
    gone, its_optimizer = wrapped("msamp:O2", model_of_a_ddp_that_is_gone)
    del gone
    mse(model_of_a_ddp_that_is_gone, mine(0)).backward()
    refused(its_optimizer.step, "prepare")


def check_unconnectable_models_are_refused_with_fix():
    ddp = DistributedDataParallel(mlp())
    refused(
        lambda: fp8_backends.prepare(ddp, None, "msamp:O2"),
        "first",
        "DistributedDataParallel(model)",
    )
    assert not scaled(ddp.module)
    model = mlp()
    fp8_backends.prepare(model, None, "msamp:O2")
    model[0] = checkpoint_wrapper(model[0])  # DDP meets another name
    ddp = DistributedDataParallel(model)
    refused(lambda: fp8_backends.prepare(ddp, None, "msamp:O2"), "leave it alone", "last step")
    ddp = DistributedDataParallel(mlp())
    ddp.register_comm_hook(None, unchanged_allreduce)
    spec = {"backend": "native:dynamic", "gradient_comm": "fp8"}
    refused(lambda: fp8_backends.prepare(ddp, None, spec), "unchanged_allreduce", "gradient_comm")
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(8, 64, sparse=True), mlp()))
    refused(lambda: fp8_backends.prepare(ddp, None, spec), "gradients of 0", "sparse=False")


def unchanged_allreduce(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def check_user_ignore_list_is_kept():
    model = mlp()
    model.register_buffer("own", torch.full((3,), float(dist.get_rank())))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    ddp, optimizer = wrapped("msamp:O2", model)
    step(ddp, optimizer, 0)
    assert model.own[0] == dist.get_rank()
    assert {"own", "0.weight"} <= ddp.parameters_to_ignore
    model = mlp()
    with torch.no_grad():
        model[2].weight.fill_(dist.get_rank())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    ddp, optimizer = wrapped("msamp:O2", model)
    assert model[2].weight[0, 0] == dist.get_rank()
    mse(ddp, mine(0)).backward()
    refused(optimizer.step, "1 scaled weight", "ignores in exclude")


def check_ddp_inside_a_prepared_model_and_adapters_over_a_frozen_base():
    fields = {"backend": "native:delayed", "gradient_comm": "fp8"}
    model = nn.Sequential(mlp())
    fp8_backends.prepare(model, None, fields)
    model[0] = DistributedDataParallel(model[0])
    over_part = fp8_backends.prepare(model, torch.optim.AdamW(model.parameters()), fields)
    frozen = mlp()
    frozen[0].requires_grad_(False)
    fields = {"backend": "native:blockwise", "fp8_params": True, "gradient_comm": "fp8"}
    for ddp, optimizer in (over_part, wrapped({**fields, "exclude": ["2", "4"]}, frozen)):
        with Traffic() as traffic:
            step(ddp, optimizer, 0)
        assert traffic.count("all_to_all_single")
        assert_equal_on_all_ranks(ddp)


def check_single_layer_and_compiled_module_inside_ddp():
    for model in (nn.Linear(WIDTH, WIDTH), torch.compile(mlp()[:2], backend="eager")):
        ddp, optimizer = wrapped("msamp:O2", model, bucket_mb=25)  # dynamo wants stock sizes
        for index in range(2):
            step(ddp, optimizer, index)
            assert_equal_on_all_ranks(ddp, optimizer)


def check_copies_and_files_of_the_model():
    for spec in (
        "msamp:O2",
        {"backend": "native:delayed", "amax_history_len": 4, "gradient_comm": "fp8"},
    ):
        ddp, optimizer = wrapped(spec, mlp())
        step(ddp, optimizer, 0)
        file = io.BytesIO()
        torch.save(ddp.module, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        x, _ = mine(3)
        for other in (copy.deepcopy(ddp.module), read, copy.deepcopy(ddp)):
            assert torch.equal(other.eval()(x), ddp.eval()(x))
            ddp.train()
        again = copy.deepcopy(ddp).train()  # is connected by preparing it
        its_optimizer = torch.optim.AdamW(again.parameters(), 5e-3)
        fp8_backends.prepare(again, its_optimizer, spec)
        step(again, its_optimizer, 1)
        assert_equal_on_all_ranks(again, its_optimizer)
        step(ddp, optimizer, 1)
        assert_equal_on_all_ranks(ddp, optimizer)


# Scaling states


def check_synchronization_takes_largest_amax_and_smallest_scale():
    rank, size = dist.get_rank(), dist.get_world_size()
    state = new_delayed_state(4)
    bits = state.view(torch.float32)
    bits[0, SCALE], bits[0, HISTORY + 1], state[0, ROLLS] = 2.0**rank, float(rank), 3 + rank
    bits[1, HISTORY] = float("nan") if rank == 0 else 1.0
    other = new_delayed_state(2)
    agree_on_scaling([state, other])
    assert bits[0, SCALE] == 1 and bits[0, HISTORY + 1] == size - 1 and state[0, ROLLS] == 2 + size
    assert bits[1, HISTORY] == float("inf") and torch.equal(other, new_delayed_state(2))
    bits[0, HISTORY] = 7.0 if rank == 0 else 100.0
    agree_on_scaling([state], contributes=rank == 0)
    assert bits[0, HISTORY] == 7 and state[0, ROLLS] == 2 + size and bits[0, SCALE] == 1


def check_scales_follow_largest_amax_of_all_ranks():
    ddp, optimizer = wrapped({"backend": "native:delayed", "amax_history_len": 4}, mlp())
    x, y = mine(0)
    x = x * (1 + 9 * dist.get_rank())
    largest = x.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    nn.functional.mse_loss(ddp(x), y).backward()
    assert ddp.module[0].fp8_scaling.view(torch.float32)[0, HISTORY] == largest
    assert_equal_on_all_ranks(ddp)


def check_product_counters_are_local():
    """Stock DDP copies rank 0's buffers to all ranks before each forward."""
    ddp, optimizer = wrapped("msamp:O2", mlp())
    for index in range(3):
        with ddp.no_sync():
            for k in range(dist.get_rank()):
                mse(ddp, mine(k)).backward()
        step(ddp, optimizer, index)
    counts = fp8_backends.audit(ddp.module).products["0"]
    assert counts["fprop"] == counts["wgrad"] == 3 * (1 + dist.get_rank()), counts


# Figures


def check_bytes_sent_by_a_rank():
    """All bytes count: scales, the map of used weights and scaling states too. DDP's own reduction
    is a ring."""
    figures = {}
    size = dist.get_world_size()
    for spec in ("msamp:O2", {"backend": "native:dynamic", "gradient_comm": "fp8"}):
        model = mlp(256, bias=False)
        elements = sum(p.numel() for p in model.parameters())
        model.alpha = nn.Parameter(torch.ones(()))  # keeps DDP from having nothing to do
        model.register_forward_hook(lambda module, args, out: out * module.alpha)
        ddp, optimizer = wrapped(spec, model, bucket_mb=25)
        mse(ddp, tuple(map(share, batch(0, width=256)))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with Traffic() as traffic:
            mse(ddp, tuple(map(share, batch(1, width=256)))).backward()
        ring = 2 * (size - 1) / size * elements
        name = spec if isinstance(spec, str) else "native:dynamic fp8"
        figures[name] = {
            "of FP32": traffic.sent() / (4 * ring),
            "of bf16": traffic.sent() / (2 * ring),
        }
        assert traffic.sent() <= 0.26 * 4 * ring and traffic.sent() <= 0.51 * 2 * ring, figures
    return figures


def check_buckets_leave_while_backward_runs():
    """All but the last have left when backward reaches the first layer's output."""
    figures = {}
    for name, spec in (
        ("reducer", "msamp:O2"),
        ("hook", {"backend": "native:dynamic", "gradient_comm": "fp8"}),
    ):
        ddp, optimizer = wrapped(spec, mlp(bias=name == "reducer"))
        for index in range(2):  # DDP rebuilds its buckets after the first pass
            departed = []
            with Traffic() as traffic:

                def count(gradient, traffic=traffic, departed=departed):
                    departed.append(traffic.count("all_to_all_single"))

                hook = ddp.module[0].register_forward_hook(
                    lambda module, args, out, f=count: out.register_hook(f) and None
                )
                mse(ddp, mine(index)).backward()
                hook.remove()
                buckets = traffic.count("all_to_all_single")
            optimizer.step()
            optimizer.zero_grad()
        figures[name] = {"buckets": buckets, "left before the first layer's backward": departed[0]}
        assert departed[0] == buckets - 1 >= 2, figures
    return figures


def check_mean_is_independent_of_buckets():
    """DDP rebuilds its buckets after its first backward, also in a resumed run: one bucket for all
    gradients, then for few each."""
    gradients = []
    for bucket_mb in (25, 0.01):
        ddp, _ = wrapped(
            {"backend": "native:dynamic", "gradient_comm": "fp8"}, mlp(), bucket_mb=bucket_mb
        )
        for _ in range(2):
            ddp.zero_grad()
            mse(ddp, mine(0)).backward()
            gradients.append(
                {name: digest for name, digest in everything(ddp.module).items() if "grad" in name}
            )
    assert all(each == gradients[0] for each in gradients[1:]) and len(gradients[0]) == 6
