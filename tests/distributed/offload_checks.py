"""Optimizer states in the memory of the host under DDP: equal bits."""

from __future__ import annotations

import ddp_training
import feature_setting
import pytest
import ranks
import torch
from ddp_training import assert_equal_on_all_ranks, everything

from fp8_backends.errors import FP8BackendError

LEVELS = ("O1", "O2", "O3", "O4")


def trained(level: str, steps: int = 20, max_norm: float | None = None, **fields):
    """Train under DDP. Return losses and everything that ranks hold."""
    spec = {"backend": f"msamp:{level}", **fields}
    model, optimizer = ddp_training.wrapped(spec, ddp_training.mlp())
    losses = []
    for seed in range(steps):
        loss = ddp_training.mse(model, ddp_training.mine(seed))
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_equal_on_all_ranks(model, optimizer)
    return losses, everything(model, optimizer)


def check_ranks_step_in_the_host_as_on_the_device():
    for number, level in enumerate(LEVELS):
        usual = trained(level)
        assert trained(level, offload="states") == usual
        if number % 2:
            assert trained(level, offload="states", gradient_release=True) == usual


def check_clipped_gradients_step_as_on_the_device():
    for level in ("O2", "O3"):
        usual = trained(level, 5, max_norm=0.05)
        assert trained(level, 5, max_norm=0.05, offload="states") == usual


def check_whole_states_on_each_rank():
    fields = {"shard_states": False}
    assert trained("O4", 5, offload="states", **fields) == trained("O4", 5, **fields)


def accumulate(acc, model, optimizer, seeds) -> list[float]:
    losses = []
    for seed in seeds:
        with acc.accumulate(model):
            loss = ddp_training.mse(model, ddp_training.mine(seed))
            acc.backward(loss)
            if acc.sync_gradients:
                acc.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def check_accelerate_accumulates_clips_and_resumes():
    """A checkpoint of a run without offload continues with it, and back."""
    for level in ("O2", "O4"):
        found, folder = [], ranks.shared_folder()
        for run, fields in enumerate(({}, {"offload": "states"}, {})):
            options = {"gradient_accumulation_steps": 2}
            acc = feature_setting.accelerator(f"msamp:{level}", fields=fields, **options)
            model = ddp_training.mlp()
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), 5e-3))
            if run:
                accumulate(acc, model, optimizer, range(90, 94))
                acc.load_state(f"{folder}/{run - 1}")
            else:
                accumulate(acc, model, optimizer, range(6))
            acc.save_state(f"{folder}/{run}")
            losses = accumulate(acc, model, optimizer, range(6, 12))
            found.append((losses, everything(model, optimizer.optimizer)))
        assert found[0] == found[1] == found[2]


def check_fsdp2_is_refused():
    import fsdp2_training

    with pytest.raises(FP8BackendError, match="offload.*one process and DDP.*leave offload out"):
        fsdp2_training.prepared({"backend": "msamp:O4", "offload": "states"})


if __name__ == "__main__":
    ranks.main(globals())
