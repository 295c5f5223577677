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
    for level in LEVELS:
        usual = trained(level)
        assert trained(level, offload="states") == usual
        assert trained(level, offload="states", gradient_release=True) == usual


def check_clipped_gradients_step_as_on_the_device():
    for level in LEVELS:
        usual = trained(level, max_norm=0.05)
        assert trained(level, max_norm=0.05, offload="states") == usual


def check_whole_states_on_each_rank():
    fields = {"shard_states": False}
    assert trained("O4", 5, offload="states", **fields) == trained("O4", 5, **fields)


def check_accelerate_accumulates_saves_and_resumes():
    """A checkpoint of a run without offload continues with it, and back."""
    found = []
    for fields in ({}, {"offload": "states"}):
        acc = feature_setting.accelerator("msamp:O4", fields=fields)
        model = ddp_training.mlp()
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), 5e-3))
        folder = ranks.shared_folder()
        losses = [ddp_training.step(model, optimizer, seed) for seed in range(3)]
        acc.save_state(f"{folder}/{len(found)}")
        if found:
            acc.load_state(f"{folder}/0")
        losses += [ddp_training.step(model, optimizer, seed) for seed in range(3, 6)]
        found.append((losses, everything(model, optimizer.optimizer)))
    assert found[0] == found[1]


def check_fsdp2_is_refused():
    import fsdp2_training

    with pytest.raises(FP8BackendError, match="offload.*one process and DDP.*leave offload out"):
        fsdp2_training.prepared({"backend": "msamp:O4", "offload": "states"})


if __name__ == "__main__":
    ranks.main(globals())
