"""The monitor with `te`: the same statistics as with the native rule of the same name."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fp8_backends


def samples(spec, file):
    """What two sampled steps have, and the losses, of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    fields = {"backend": spec, "monitor_every": 2, "monitor_file": file}
    model, optimizer = fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), fields)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(4):
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [], losses


@pytest.mark.parametrize("scaling", ["delayed", "dynamic", "blockwise"])
def test_statistics_are_those_of_the_native_rule(scaling, tmp_path):
    (ours, losses), (native, its_losses) = (samples(f"{n}:{scaling}", tmp_path / n) for n in ("te", "native"))
    assert losses == pytest.approx(its_losses, rel=1e-5) and len(ours) == 2
    for record, expected in zip(ours, native, strict=True):
        assert record["casts"] == "the native equivalent of TransformerEngine's rule"
        assert record["tensors"].keys() == expected["tensors"].keys() == {"0", "2"}
        for layer, tensors in record["tensors"].items():
            for name, entry in tensors.items():
                of_native = expected["tensors"][layer][name]
                assert entry["format"] == of_native["format"] and entry["elements"] == of_native["elements"]
                # the order of summation in products moves single values across the edge of a code
                assert entry["scale"] == pytest.approx(of_native["scale"], rel=1e-3), (layer, name)
                assert entry["sqnr_db"] == pytest.approx(of_native["sqnr_db"], abs=0.1)
                assert entry["saturated"] == pytest.approx(of_native["saturated"], abs=2e-3)
