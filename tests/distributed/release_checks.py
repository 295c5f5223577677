"""Release gradients on several ranks: steps inside backward match the usual order bitwise."""

from __future__ import annotations

import contextlib

import ddp_training
import feature_setting
import fsdp2_training
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_training import assert_equal_on_all_ranks, digest, everything
from torch import nn

from fp8_backends.errors import FP8BackendError
from fp8_backends.states import gradient_release
from fp8_backends.states.gradient_release import is_dropped
from fp8_backends.tensors.sharded_tensor import local_part

LEVELS = ("O2", "O4")
SIZES = (1, 2**13, 2**20)
"""Elements that wait for each other: each parameter steps separately, some together, all at the end
of backward."""


def released(level: str, **fields) -> dict:
    return {"backend": f"msamp:{level}", "gradient_release": True, **fields}


class Branches(nn.Module):
    """Stack four layers: only the first rank uses the second, and nobody the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        x = self.layers[0](x)
        if dist.get_rank() == 0:
            x = x + self.layers[1](x)
        return self.layers[2](x)


@contextlib.contextmanager
def pending_elements(count: int):
    before, gradient_release.PENDING = gradient_release.PENDING, count
    try:
        yield
    finally:
        gradient_release.PENDING = before


def equal_to_usual_order(usual, ours, count: int) -> None:
    with pending_elements(count):
        for seed in range(3):
            assert ddp_training.step(*ours, seed) == ddp_training.step(*usual, seed)
    assert everything(*ours) == everything(*usual)
    assert_equal_on_all_ranks(*ours)


def check_ddp_steps_bucket_by_bucket():
    for count, level, comm in ((1, "O2", "plain"), (2**13, "O4", "fp8")):
        specs = (
            {"backend": f"msamp:{level}", "gradient_comm": comm},
            released(level, gradient_comm=comm),
        )
        equal_to_usual_order(
            *(ddp_training.wrapped(spec, ddp_training.mlp()) for spec in specs), count
        )


def check_weights_unused_on_some_ranks_step_as_usual():
    specs = "msamp:O2", released("O2")
    equal_to_usual_order(
        *(ddp_training.wrapped(spec, Branches(), find_unused_parameters=True) for spec in specs), 1
    )


def check_accelerate_trains_as_usual():
    """Accelerate lists models without the DDP wrapper, whose own buckets reduce the biases."""
    trained = []
    for fields in ({}, {"gradient_release": True}):
        acc = feature_setting.accelerator("msamp:O4", fields=fields)
        model = ddp_training.mlp()
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), 5e-3))
        losses = [ddp_training.step(model, optimizer, seed) for seed in range(3)]
        trained.append((losses, everything(model, optimizer.optimizer)))
    assert trained[0] == trained[1]


def check_gradients_are_dropped_while_backward_runs():
    """When the first layer's gradient arrives, the last layer's weight has moved."""
    model, optimizer = ddp_training.wrapped(released("O2"), ddp_training.mlp())
    ddp_training.step(model, optimizer, 0)
    last, seen = model.module[-1].weight, []
    before = last.dequantize()

    def look(p: torch.Tensor) -> None:
        seen.append(is_dropped(last.grad) and not torch.equal(last.dequantize(), before))

    model.module[0].weight.register_post_accumulate_grad_hook(look)
    with pending_elements(1):
        ddp_training.mse(model, ddp_training.mine(1)).backward()
    assert seen == [True] and all(
        is_dropped(weight.grad) for weight in ddp_training.scaled(model).values()
    )
    optimizer.step()


def check_kept_gradients_are_refused():
    model, optimizer = ddp_training.wrapped(released("O2"), ddp_training.mlp())
    with (
        model.no_sync(),
        pytest.raises(FP8BackendError, match="gradient_release.*no_sync.*synchronize"),
    ):
        ddp_training.mse(model, ddp_training.mine(0)).backward()


def on_this_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Digests of all weights and states."""
    stored = [(p, *optimizer.state.get(p, {}).values()) for p in model.parameters()]
    return [digest(local_part(tensor)) for tensors in stored for tensor in tensors]


def check_shards_step_after_reduction():
    for index, level in enumerate(LEVELS):
        usual = fsdp2_training.prepared(f"msamp:{level}")
        model, optimizer = fsdp2_training.prepared(released(level))
        losses = fsdp2_training.train(*usual, 3)
        with pending_elements(SIZES[index % len(SIZES)]):
            for ids, expected in zip(fsdp2_training.batches(3), losses, strict=True):
                loss = fsdp2_training.loss_of(model, ids)
                loss.backward()
                assert all(is_dropped(p.grad) for p in model.parameters() if p.requires_grad)
                with pytest.raises(FP8BackendError, match="dropped"):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                assert fsdp2_training.mean(loss) == expected
                optimizer.zero_grad()
        assert on_this_rank(model, optimizer) == on_this_rank(*usual)


if __name__ == "__main__":
    ranks.main(globals())
