"""Check Accelerate's other features with FP8: one check per row of `feature_table.py` and per level; one per row for
the backends without a level, equal under DDP. One process checks all of a row."""

from __future__ import annotations

import gc
from pathlib import Path

import feature_runs
import feature_setting
import ranks
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from feature_table import BACKENDS, FEATURES, LEVELS, Feature

from fp8_backends.comm.ddp import HOOK_AT_A_LEVEL, Connection
from fp8_backends.errors import FP8BackendError


def check(feature: Feature, backend: str) -> None:
    try:
        feature_runs.run_as_listed(feature, backend, Path(ranks.shared_folder()))
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def checks() -> dict:
    """Return name -> function for each row that runs inside a process group."""
    return {
        f"check_{feature.run}_{backend.replace(':', '_')}": lambda f=feature, b=backend: check(f, b)
        for number, feature in enumerate(FEATURES)
        if feature.run in feature_runs.RUNS
        for backend in (BACKENDS[number % 2], *LEVELS)
    }


globals().update(checks())


def check_manual_ddp_hook_is_refused_with_scaled_weights():
    """Register after the model is connected, and before."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    acc = feature_setting.accelerator("msamp:O2")
    model, _ = feature_setting.prepared(acc)
    assert Connection.find(model).reducer is not None
    for call in (
        lambda: model.register_comm_hook(None, fp16_compress_hook),
        lambda: _connect_hooked(fp16_compress_hook),
    ):
        try:
            call()
        except FP8BackendError as error:
            assert "fp16_compress_hook" in str(error) and HOOK_AT_A_LEVEL[1] in str(error), error
        else:
            raise AssertionError("a hook that sees no gradient of a scaled weight was taken")


def _connect_hooked(hook) -> None:
    import fp8_backends

    model = feature_setting.Net()
    fp8_backends.prepare(model, None, "msamp:O2")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    fp8_backends.prepare(ddp, torch.optim.AdamW(ddp.parameters()), "msamp:O2")


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # loaded libraries are no garbage, and each check collects
    ranks.main(globals())
