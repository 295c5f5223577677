"""TransformerEngine's kernels, recorded on an H200, against `native` on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORD = BENCHMARKS / "results" / "te_golden_H200.safetensors"


@pytest.fixture(scope="module")
def golden():
    sys.path[:0] = [str(Path(__file__).parent)]
    import golden

    return golden


def test_codes_scales_and_histories_equal_those_of_transformer_engine(golden):
    assert golden.differences(load_file(RECORD)) == []
    with safe_open(RECORD, "pt") as file:
        metadata = file.metadata()
    assert metadata["kernels"] == "TransformerEngine's"
    machine = json.loads(metadata["machine"])
    assert (machine["chip"], machine["transformer-engine"]) == ("NVIDIA H200", "2.20.2")


@pytest.mark.parametrize("recipe", ["delayed_max", "delayed_recent", "dynamic", "blockwise"])
def test_a_changed_code_is_found(golden, recipe):
    found = load_file(RECORD)
    key = next(
        key
        for key in found
        if key.startswith(recipe) and key.endswith("x") and found[key].dtype.itemsize == 1
    )
    found[key].view(-1).view(golden.torch.uint8)[0] ^= 1
    assert any(difference.startswith(key) for difference in golden.differences(found))
