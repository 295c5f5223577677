"""Port the FP8-related logic of Accelerate's multi-process scripts that `ddp_checks.py` and
`accelerate_plugin/test_ported.py` leave out: test_ops.py and test_merge_weights.py."""

from __future__ import annotations

from pathlib import Path

import fsdp2_accelerate_checks
import pytest
import ranks
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    TorchDynamoPlugin,
    merge_fsdp_weights,
    save_fsdp_model,
)
from accelerate.utils.operations import broadcast, gather, pad_across_processes, reduce
from ddp_training import WIDTH, assert_equal_on_all_ranks, mine, mlp, mse
from torch import nn

import fp8_backends
from fp8_backends.comm.ddp import Connection
from fp8_backends.errors import FP8BackendError

fp8_backends.connect()
BACKENDS = ("native:delayed", "ao:tensorwise", "msamp:O2", "msamp:O3")


def fresh_accelerator(backend: str, fields: dict | None = None, **arguments) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    recipe = fp8_backends.FP8RecipeKwargs(backend=backend, **(fields or {}))
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], **arguments)


# test_ops.py


def check_accelerates_operations_see_plain_tensors():
    """Compare `gather`, `broadcast`, `reduce` and `pad_across_processes` of a training model's
    weight and gradient with results for a plain copy."""
    for backend in BACKENDS:
        fields = {"shard_states": False} if backend == "msamp:O3" else {}
        accelerator = fresh_accelerator(backend, fields=fields)
        model = accelerator.prepare(mlp())
        with accelerator.no_sync(model):
            # each rank has a different gradient
            accelerator.backward(mse(model, mine(0)))
        rank, weight = dist.get_rank(), model.module[0].weight
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
