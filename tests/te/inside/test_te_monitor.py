"""The monitor with `te`: the same statistics as with the native rule of the same name."""

from __future__ import annotations

import json

import pytest
import torch
import transformer_engine.pytorch  # noqa: F401, the stand-in is on when it is loaded
from torch import nn

import fp8_backends


def samples(spec, file):
    """Return the records of the sampled steps of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    fields = {"backend": spec, "monitor_every": 2, "monitor_file": file}
    model, optimizer = fp8_backends.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), fields
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(32, 64, generator=generator)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("scaling", ["delayed", "dynamic", "blockwise"])
def test_statistics_match_the_native_rule(scaling, tmp_path):
    ours, native = (samples(f"{name}:{scaling}", tmp_path / name) for name in ("te", "native"))
    assert [record["step"] for record in ours] == [2, 4]
    for record, of_native in zip(ours, native, strict=True):
        assert record["casts"] == "the native equivalent of TransformerEngine's rule"
        found, expected = record["tensors"], of_native["tensors"]
        assert found.keys() == expected.keys() == {"0", "2"}
        assert found["0"]["input"] == expected["0"]["input"]
        for layer, tensors in found.items():
            for name, entry in tensors.items():
                same = expected[layer][name]
                assert (entry["format"], entry["elements"]) == (same["format"], same["elements"])
                # results of products are rounded to bf16 in one and not in the other
                assert entry["amax"] == pytest.approx(same["amax"], rel=0.02)
                assert entry["sqnr_db"] == pytest.approx(same["sqnr_db"], abs=0.3)
