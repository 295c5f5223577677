"""Crafted states are refused before anything changes. The table of them is
`benchmarks/reliability/crafted.py`."""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from unsealed import unseal

import fp8_backends
from fp8_backends.errors import FP8BackendError

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "reliability"))
import crafted  # noqa: E402


@pytest.mark.parametrize(
    "backend, tried",
    [("msamp:O1", 120), ("msamp:O3", 150), ("msamp:O4", 140), ("native:delayed", 25)],
)
def test_crafted_state_is_refused_without_changing_a_byte(backend, tried):
    rows = list(crafted.crafted(backend))
    assert len(rows) >= tried and [row for row in rows if row["wrong"]] == []


def test_crafted_pickle_of_scaled_tensor_is_refused():
    rows = list(crafted.crafted_pickles())
    assert len(rows) >= 30 and [row for row in rows if row["wrong"]] == []


@pytest.mark.slow
def test_load_state_refuses_before_loading_any_model():
    rows = list(crafted.crafted_folders("msamp:O3"))
    assert len(rows) >= 120 and [row for row in rows if row["wrong"]] == []


@pytest.mark.parametrize("backend", ["msamp:O4", "native:delayed"])
def test_genuine_and_third_party_states_load(backend):
    rows = list(crafted.loaded(backend))
    assert len(rows) >= 10 and [row for row in rows if row["wrong"]] == []


def test_comparison_detects_one_changed_byte():
    """Justify the tests above: the comparison covers all stored bytes."""
    run = crafted.Run("msamp:O3")
    before, weight = run.stored(), run.models[0][2].weight
    state = run.optimizers[0].state[weight]
    parts = (
        weight.codes,
        weight.master.codes,
        state["exp_avg"].scale_inv,
        state["exp_avg_sq"].codes,
        state["step"],
    )
    for stored in (part.reshape(-1).view(torch.uint8) for part in parts):
        kept = stored.clone()
        stored[-1] += 1
        assert run.stored() != before
        stored.copy_(kept)
        assert run.stored() == before


def test_refusal_names_file_parameter_state_and_fix(tmp_path):
    run = crafted.Run("msamp:O2")
    run.accelerator.save_state(str(tmp_path))
    saved = torch.load(unseal(tmp_path) / "optimizer.bin")
    saved["state"][4]["exp_avg_sq"][3, 5] = torch.nan
    torch.save(saved, tmp_path / "optimizer.bin")
    with pytest.raises(FP8BackendError) as refusal:
        run.accelerator.load_state(str(tmp_path))
    said = str(refusal.value)
    for part in (
        "optimizer.bin",
        "exp_avg_sq of parameter 4 (2.weight, of shape (64, 64))",
        "nan",
        "earlier checkpoint",
    ):
        assert part in said


def test_refusal_names_parameters_of_named_groups():
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.named_parameters())
    model, optimizer = fp8_backends.prepare(model, optimizer, "msamp:O2")
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = torch.tensor(-1.0)
    with pytest.raises(
        FP8BackendError, match=r"step of parameter 0 \(0.weight, .* holds -1, and must be whole"
    ):
        optimizer.load_state_dict(state)


# Another recipe of the same name


def resumed(folder: Path, saved: dict, now: dict, by_state_dict: bool = False) -> tuple:
    """Return the optimizers of a run saved with the first fields and of its continuation with the
    second."""
    optimizers = []
    for fields in (saved, now):
        run = crafted.Run("msamp:O2", **fields)
        if not optimizers:
            run.accelerator.save_state(str(folder))
            state = copy.deepcopy(run.optimizers[0].state_dict())
        elif by_state_dict:
            run.optimizers[0].load_state_dict(state)
        else:
            run.accelerator.load_state(str(folder))
        optimizers.append(run.optimizers[0])
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
    run = crafted.Run("native:delayed")
    run.accelerator.save_state(str(tmp_path))
    metadata = unseal(tmp_path) / "fp8_backend.json"
    metadata.write_text(metadata.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(FP8BackendError, match="format 3, and this version of fp8_backends reads 2"):
        run.accelerator.load_state(str(tmp_path))
