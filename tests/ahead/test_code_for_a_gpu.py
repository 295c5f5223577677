"""Generate this tree's GPU code on a CPU with PyTorch's build for CUDA, and hold it to its budgets.

`CUDA_BUILD_PYTHON` names the Python of an environment with that build; without it these tests are
skipped, and `test_prediction.py` holds the committed record against the same budgets.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from budgets import (
    BUDGETS,
    BYTEWISE,
    BYTEWISE_IN_2_11,
    OPTIMIZER,
    SPECIALISATIONS,
    assert_one_graph_of_fp8_products,
    within,
)

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("CUDA_BUILD_PYTHON")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="CUDA_BUILD_PYTHON names no Python with PyTorch's build for CUDA"
)


def answered(script: str, *arguments: str, cwd: Path, folder: str = "benchmarks/ahead") -> dict:
    process = subprocess.run(
        [PYTHON, str(ROOT / folder / script), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr[-8000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("backend", BUDGETS)
def test_compiled_layer_stays_within_budget(backend, tmp_path):
    result = answered(
        "compiled_layers.py", "--backend", backend, "--no-machine-code", "--layer", cwd=tmp_path
    )
    assert not within(result, BUDGETS[backend])
    assert_one_graph_of_fp8_products(result)
    stores = result["fp8_stores"]
    assert stores["kernels"] >= 10
    assert stores["with_nan_instructions"] == 0
    is_oldest = result["torch"].startswith("2.11.")
    assert stores["bytewise"] < (BYTEWISE_IN_2_11 if is_oldest else BYTEWISE)


def test_clamps_and_maxima_of_a_model_leave_no_nan_instruction_beside_fp8(tmp_path):
    """ReLU, clamps and a maximum of the model itself are compiled into kernels with FP8 results."""
    result = answered(
        "small_layers.py", "native:delayed", "9", "0", "clamps", cwd=tmp_path, folder="tests/ahead"
    )
    assert result["clamping"] >= 4 and not result["failures"]
    assert result["with_nan_instructions"] == 0


@pytest.mark.parametrize("capability", ["9 0", "8 0"], ids=["Hopper", "A100"])
def test_every_kernel_of_a_compiled_layer_compiles(capability, tmp_path):
    """Include a layer with a single output and a row as gradient. Below 8.9, without E4M3 in
    Triton, products are emulated."""
    for backend in ("native:delayed", "native:rowwise"):
        result = answered(
            "small_layers.py", backend, *capability.split(), cwd=tmp_path, folder="tests/ahead"
        )
        assert result["kernels"] >= 12
        # the rule "compiled_before_ada" warns of it
        assert not result["failures"] or (
            capability == "8 0"
            and result["torch"].startswith("2.11.")
            and all("fp8e4nv not supported" in failure for failure in result["failures"])
        )
        assert {dtype[:6] for dtype in result["products"]} == {
            "float8" if capability == "9 0" else "float3"
        }


def test_eager_layer_and_optimizer_stay_within_budget(tmp_path):
    backends = ",".join(SPECIALISATIONS)
    found = answered("eager_calls.py", "--backends", backends, "--levels", "O2", cwd=tmp_path)
    for backend, kernels in SPECIALISATIONS.items():
        calls, matrices = found["linear"][backend], found["quantize"][backend]
        assert (
            calls["launches"] <= BUDGETS[backend].launches
            and calls["operators"] <= BUDGETS[backend].operators
        )
        assert calls["synchronisations"] == 0
        assert sum(each["specialisations"] for each in matrices) <= kernels
        assert not any(each["stack"] for each in matrices)
    cost = found["optimizer"]["O2"]["of_an_element"]
    assert 0 < cost["read"] + cost["written"] <= OPTIMIZER["bytes"]
    assert 0 < cost["instructions"] <= OPTIMIZER["instructions"]
