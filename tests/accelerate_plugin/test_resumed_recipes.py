"""Resume with another recipe of the same name, or from a checkpoint of a later version."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from stress.harness import Training
from unsealed import unseal

from fp8_backends.errors import FP8BackendError


def trained(backend: str, **fields) -> Training:
    run = Training(backend, **fields)
    run.step(1)
    return run


def resumed(folder: Path, saved: dict, now: dict, by_state_dict: bool = False) -> tuple:
    """Return the optimizers of a run saved with the first fields and of its continuation with the
    second."""
    optimizers = []
    for fields in (saved, now):
        run = trained("msamp:O2", **fields)
        if not optimizers:
            run.accelerator.save_state(str(folder))
            state = copy.deepcopy(run.optimizers[0].optimizer.state_dict())
        elif by_state_dict:
            run.optimizers[0].optimizer.load_state_dict(state)
        else:
            run.accelerator.load_state(str(folder))
        optimizers.append(run.optimizers[0].optimizer)
    return tuple(optimizers)


@pytest.mark.parametrize("by_state_dict", [False, True])
@pytest.mark.parametrize("old, new", [("stochastic", "nearest"), ("nearest", "stochastic")])
def test_different_recipe_fields_warn_once_and_keep_values(
    old, new, by_state_dict, tmp_path, caplog
):
    saved, now = {"rounding": old}, {"rounding": new}
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        before, after = resumed(tmp_path, saved, now, by_state_dict)
    (told,) = [record.getMessage() for record in caplog.records]
    assert (
        f"the name msamp:O2: rounding was '{old}' and is '{new}' now" in told
        and "keep their values" in told
    )
    for mine, theirs in zip(before.state.values(), after.state.values(), strict=True):
        assert torch.equal(mine["exp_avg_sq"] + 0, theirs["exp_avg_sq"] + 0)
        amax = (mine["exp_avg"] + 0).abs().max()
        # rounded once, to E4M3
        assert (mine["exp_avg"] + 0 - (theirs["exp_avg"] + 0)).abs().max() <= amax / 16


def test_guard_and_monitor_do_not_change_recipe_identity(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        resumed(tmp_path, {}, {"guard": "skip", "monitor_every": 5, "monitor_file": "other"})
    assert not caplog.records


@pytest.mark.parametrize("by_state_dict", [False, True])
def test_same_recipe_loads_silently(by_state_dict, tmp_path, caplog):
    fields = {"include": ["0", "2"], "module_filter_func": lambda module, name: True}
    with caplog.at_level(logging.WARNING, "fp8_backends"):
        resumed(tmp_path, fields, fields, by_state_dict)
    assert not caplog.records


def test_newer_checkpoint_format_is_refused(tmp_path):
    run = trained("native:delayed")
    run.accelerator.save_state(str(tmp_path))
    metadata = unseal(tmp_path) / "fp8_backend.json"
    metadata.write_text(metadata.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(FP8BackendError, match="format 3, and this version of fp8_backends reads 2"):
        run.accelerator.load_state(str(tmp_path))
