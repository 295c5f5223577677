"""Checkpoints of version 0.1 load: their pickles name the module of `ScaledTensor` by its place of that time."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from torch import nn

import fp8_backends


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    model, optimizer = fp8_backends.prepare(model, torch.optim.AdamW(model.parameters()), "msamp:O2")
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    return optimizer


def as_version_0_1_wrote_it(saved: bytes) -> io.BytesIO:
    """The same file with the module's name of that time in its pickle."""
    old = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as source, zipfile.ZipFile(old, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                assert b"fp8_backends.numerics.scaled_tensor\n_rebuild\n" in content
                content = content.replace(b"fp8_backends.numerics.scaled_tensor\n", b"fp8_backends.scaled_tensor\n")
            target.writestr(name, content)
    old.seek(0)
    return old


@pytest.mark.parametrize("weights_only", [True, False])
def test_states_are_those_that_were_saved(weights_only):
    optimizer, saved = trained(), io.BytesIO()
    torch.save(torch.optim.Optimizer.state_dict(optimizer), saved)  # scaled states as they are stored
    loaded = torch.load(as_version_0_1_wrote_it(saved.getvalue()), weights_only=weights_only)
    other = trained()
    other.load_state_dict(loaded)
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
