"""Run the faults of stock Accelerate through launchers: `launched_faults.py` forks the workers in
one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm_process

HERE = Path(__file__).parent
FAULTS = {3, 4, 5, 7, 19, 20, 21, 22, 23, 25, 26}


@pytest.mark.nightly
def test_launched_runs_have_no_fault_of_stock_accelerate(subtests, tmp_path):
    paths = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = warm_process.run(str(HERE / "launched_faults.py"), str(tmp_path), env=environment)
    assert done.returncode == 0, done.stderr
    outcomes = [
        json.loads(line.removeprefix("FAULT "))
        for line in done.stdout.splitlines()
        if line.startswith("FAULT ")
    ]
    assert {int(outcome["name"].split("_")[1]) for outcome in outcomes} == FAULTS
    for outcome in outcomes:
        with subtests.test(outcome["name"]):
            assert outcome["error"] is None, outcome["error"]
