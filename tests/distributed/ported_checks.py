"""Port the FP8-related logic of Accelerate's multi-process scripts: test_sync.py, test_script.py,
test_ops.py, test_distributed_data_loop.py, test_ddp_comm_hook.py, test_merge_weights.py, and
examples/by_feature.

Accelerate compares a model under DDP with a plain one on the whole batch, within a tolerance. FP8
rounds half a batch differently from the whole, so here gradients are compared bitwise: with other
ranks' gradients, with the rank's own, with their mean, and with a bare DDP loop.
"""

from __future__ import annotations

import copy
from pathlib import Path

import fsdp2_accelerate_checks
import pytest
import ranks
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
    merge_fsdp_weights,
    save_fsdp_model,
)
from accelerate.utils.operations import broadcast, gather, pad_across_processes, reduce
from ddp_training import WIDTH, assert_equal_on_all_ranks, batch, mine, mlp, mse, wrapped
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import fp8_backends
from fp8_backends.comm.ddp import Connection
from fp8_backends.errors import FP8BackendError
from fp8_backends.states.levels import finish_accumulation

fp8_backends.connect()
O0 = ("native:delayed", "ao:tensorwise")
"""DDP averages their gradients in FP32."""
BACKENDS = (*O0, "msamp:O2", "msamp:O3")


def fresh_accelerator(
    backend: str, *handlers, fields: dict | None = None, **arguments
) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **(fields or {}))
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe, *handlers], **arguments)


class Pair:
    """Train twice under DDP: prepared by an Accelerator, and bare. `alone` is a copy outside DDP
    with local gradients."""

    def __init__(self, backend: str, *handlers, **arguments) -> None:
        self.accelerator = fresh_accelerator(backend, *handlers, **arguments)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scheduler = LambdaLR(optimizer, _decay)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        self.bare_model, self.bare_optimizer = wrapped(backend, mlp(), bucket_mb=25)
        self.bare_scheduler = LambdaLR(self.bare_optimizer, _decay)
        self.alone = self.new_alone()

    def new_alone(self) -> nn.Module:
        alone = copy.deepcopy(self.model.module)
        alone.zero_grad()
        return alone

    def assert_equal_on_all_ranks(self) -> None:
        assert_equal_on_all_ranks(self.model, self.optimizer.optimizer)

    def assert_equal_weights(self) -> None:
        assert all_equal(
            exact_weights(self.model, self.optimizer),
            exact_weights(self.bare_model, self.bare_optimizer),
        )

    def loss(self, model: nn.Module, data: tuple) -> torch.Tensor:
        """Return the loss of a model without an Accelerator."""
        with self.accelerator.autocast():
            output = model(data[0])
        return nn.functional.mse_loss(output.float(), data[1])


def _decay(step: int) -> float:
    return 1 / (1 + step)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach().float() + 0.0 for p in model.parameters()]


def exact_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Exact values. At O3 and O4 one rank owns these."""
    with fp8_backends.checkpoints.whole_states(optimizer):
        return [p.detach() + 0.0 for p in model.parameters()]


def all_equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def differ_between_ranks(values: list[torch.Tensor]) -> bool:
    """Tell if each tensor differs from the first rank's on some rank."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, values)
    return all(
        any(not torch.equal(other[i], every[0][i]) for other in every[1:])
        for i in range(len(values))
    )


def mean_over_ranks(values: list[torch.Tensor]) -> list[torch.Tensor]:
    values = [value.clone() for value in values]
    for value in values:
        dist.all_reduce(value)
    return [value / dist.get_world_size() for value in values]


# test_sync.py


def check_no_sync_keeps_gradients_local():
    """`test_distributed_sync`."""
    for backend in ("native:delayed", "msamp:O3"):
        pair = Pair(backend)
        model, accelerator = pair.model, pair.accelerator
        for index in range(2):
            with accelerator.no_sync(model), pair.bare_model.no_sync():
                accelerator.backward(mse(model, mine(2 * index)))
                pair.loss(pair.bare_model, mine(2 * index)).backward()
            if index == 0:
                pair.loss(pair.alone, mine(0)).backward()
                assert all_equal(gradients(model), gradients(pair.alone)), backend
            assert differ_between_ranks(gradients(model)), backend
            accelerator.backward(mse(model, mine(2 * index + 1)))
            pair.loss(pair.bare_model, mine(2 * index + 1)).backward()
            pair.assert_equal_on_all_ranks()
            assert all_equal(gradients(model), gradients(pair.bare_model)), backend
        pair.optimizer.step()
        pair.bare_optimizer.step()
        pair.assert_equal_on_all_ranks()
        pair.assert_equal_weights()


def check_accumulation_matches_bare_loop():
    """Port `test_gradient_accumulation_with_opt_and_scheduler`, with and without `sync_each_batch`.
    A scheduler steps once per rank; the last step has one microbatch."""
    for each_batch, backends in ((False, BACKENDS[::2]), (True, BACKENDS[1::2])):
        for backend in backends:
            plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each_batch)
            pair = Pair(backend, gradient_accumulation_plugin=plugin)
            data = [batch(index) for index in range(5)]
            rows = TensorDataset(*(torch.cat(each) for each in zip(*data, strict=True)))
            loader = pair.accelerator.prepare(DataLoader(rows, batch_size=16))
            for index, (x, y) in enumerate(loader):
                last = index % 2 == 1 or index == 4
                with pair.accelerator.accumulate(pair.model):
                    pair.accelerator.backward(mse(pair.model, (x, y)))
                    pair.bare_model.require_backward_grad_sync = last or each_batch
                    (pair.loss(pair.bare_model, (x, y)) / 2).backward()
                    if last:
                        # as its optimizer's step will
                        finish_accumulation(pair.bare_model.parameters())
                    assert all_equal(gradients(pair.model), gradients(pair.bare_model)), (
                        backend,
                        index,
                    )
                    assert differ_between_ranks(gradients(pair.model)) != (last or each_batch), (
                        backend,
                        index,
                    )
                    pair.optimizer.step()
                    pair.scheduler.step()
                    pair.optimizer.zero_grad()
                if last:
                    pair.bare_optimizer.step()
                    pair.bare_scheduler.step()
                    pair.bare_scheduler.step()
                    pair.bare_optimizer.zero_grad()
                assert (
                    pair.optimizer.param_groups[0]["lr"]
                    == pair.bare_optimizer.param_groups[0]["lr"]
                )
            assert index == 4 and pair.scheduler.scheduler.last_epoch == 6
            pair.assert_equal_on_all_ranks()
            pair.assert_equal_weights()


# test_ops.py


def check_accelerates_operations_see_plain_tensors():
    """Compare `gather`, `broadcast`, `reduce` and `pad_across_processes` of a training model's
    weight and gradient with results for a plain copy."""
    for backend in BACKENDS:
        pair = Pair(backend, fields={"shard_states": False} if backend == "msamp:O3" else {})
        with pair.accelerator.no_sync(pair.model):
            # each rank has a different gradient
            pair.accelerator.backward(mse(pair.model, mine(0)))
        rank, weight = dist.get_rank(), pair.model.module[0].weight
        for tensor in (weight.detach(), weight.grad):
            plain = tensor.float() + 0.0
            assert torch.equal(gather(tensor).float(), gather(plain)), backend
            assert torch.equal(broadcast(tensor.clone(), 1).float(), broadcast(plain.clone(), 1)), (
                backend
            )
            for reduction in ("sum", "mean"):
                expected = reduce(plain.clone(), reduction, scale=0.5)
                assert torch.equal(
                    reduce(tensor.clone(), reduction, scale=0.5).float(), expected
                ), backend
            padded = pad_across_processes(tensor[: 16 * (rank + 1)])
            assert torch.equal(padded.float(), pad_across_processes(plain[: 16 * (rank + 1)])), (
                backend
            )


# test_merge_weights.py


def check_sharded_weights_merge_into_a_plain_file():
    for backend in ("ao:tensorwise", "msamp:O3"):
        accelerator = fsdp2_accelerate_checks.accelerator(
            backend, state_dict_type="SHARDED_STATE_DICT"
        )
        run = accelerator.prepare(*fsdp2_accelerate_checks.new())
        fsdp2_accelerate_checks.train(accelerator, *run, 2)
        folder = Path(ranks.shared_folder())
        save_fsdp_model(AcceleratorState().fsdp_plugin, accelerator, run[0], str(folder))
        state = accelerator.get_state_dict(run[0])
        merge_fsdp_weights(
            str(folder / "pytorch_model_fsdp_0"), str(folder), safe_serialization=False
        )
        if dist.get_rank() == 0:
            merged = torch.load(folder / "pytorch_model.bin", weights_only=True)
            assert merged.keys() == state.keys() and all(
                type(value) is torch.Tensor for value in merged.values()
            )
            assert all(torch.equal(value, merged[name]) for name, value in state.items()), backend
        dist.barrier()


# examples/by_feature


def check_token_weighted_loss_accumulates_manually():
    """gradient_accumulation_for_autoregressive_models.py: all microbatches of a step share one
    divisor, under DDP's own `no_sync`, and Accelerate knows of one step only."""
    for backend in ("ao:tensorwise", "msamp:O2"):
        pair = Pair(backend)
        for step in range(2):
            data = [mine(3 * step + index) for index in range(3)]
            total = (
                pair.accelerator.gather(torch.tensor(sum(y.numel() for _, y in data))).sum().item()
            )
            for model, backward in (
                (pair.model, pair.accelerator.backward),
                (pair.bare_model, torch.Tensor.backward),
            ):
                for index, (x, y) in enumerate(data):
                    model.require_backward_grad_sync = index == 2
                    with pair.accelerator.autocast():
                        output = model(x)
                    loss = nn.functional.mse_loss(output.float(), y, reduction="sum") / total
                    backward(loss * dist.get_world_size())
            models = (pair.model, pair.bare_model)
            norms = [pair.accelerator.clip_grad_norm_(each.parameters(), 0.01) for each in models]
            assert torch.equal(*norms) and norms[0] > 0.01, (backend, norms)
            for optimizer in (pair.optimizer, pair.bare_optimizer):
                optimizer.step()
                optimizer.zero_grad()
        pair.assert_equal_on_all_ranks()
        pair.assert_equal_weights()


def check_gradient_values_are_clipped():
    """`clip_grad_value_` of Accelerate, on averaged gradients."""
    for backend in BACKENDS:
        pair = Pair(backend)
        pair.accelerator.backward(mse(pair.model, mine(0)))
        expected = [gradient.clamp(-1e-3, 1e-3) for gradient in gradients(pair.model)]
        assert not all_equal(expected, gradients(pair.model))
        pair.accelerator.clip_grad_value_(pair.model.parameters(), 1e-3)
        assert all_equal(expected, gradients(pair.model)), backend
        pair.optimizer.step()
        # with sharded states, only the owners have rounded the gradients
        pair.optimizer.zero_grad()
        pair.assert_equal_on_all_ranks()


# Further behaviour under DDP


def check_regions_compile_under_ddp():
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    accelerator = fresh_accelerator("msamp:O2", dynamo_plugin=plugin)
    model = Blocks()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    _train(accelerator, model, optimizer, range(2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    assert Connection.find(model).reducer is not None and "OptimizedModule" in repr(model)
    assert_equal_on_all_ranks(model, optimizer.optimizer)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def check_model_without_ddp_parameters_is_refused():
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    with pytest.raises(FP8BackendError, match="exclude"):
        fresh_accelerator("msamp:O2").prepare(model, torch.optim.AdamW(model.parameters()))


def _train(accelerator: Accelerator, model: nn.Module, optimizer, seeds: range) -> None:
    for seed in seeds:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model, mine(seed)))
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    ranks.main(globals())
