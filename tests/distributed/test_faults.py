"""Lose a rank in the middle of a step: the others fail in bounded time, and the last checkpoint
resumes."""

from __future__ import annotations

import json
import os

import pytest
import warm_process
from faults import SCENARIOS, TIMEOUT
from ranks import HERE, REPOSITORY


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return the outcome per scenario, and the folder of all runs."""
    folder = tmp_path_factory.mktemp("faults")
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--max-restarts",
        str(len(SCENARIOS)),
    ]
    launcher += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--monitor-interval",
        "0.2",
    ]
    ended = warm_process.run(
        *launcher,
        str(HERE / "faults.py"),
        str(folder),
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            # else torch 2.13 passes the store of the first attempt to the next ones, which find
            # dead ranks' addresses
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        timeout=200,
    )
    lines = [
        line.removeprefix("RESULT ")
        for line in ended.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    assert ended.returncode == 0 and len(lines) == 1, ended.stdout[-3000:] + ended.stderr[-8000:]
    return json.loads(lines[0]), folder


@pytest.mark.nightly
@pytest.mark.parametrize(
    "number", range(len(SCENARIOS)), ids=[" ".join(scenario) for scenario in SCENARIOS]
)
def test_lost_rank_is_detected_and_last_checkpoint_resumes(outcome, number):
    noticed, folder = outcome
    found = noticed[number]
    assert found["scenario"] == list(SCENARIOS[number])
    # a closed connection is detected at once; a hanging one, after the group's timeout
    bound = TIMEOUT if found["scenario"][2] == "killed" else 2 * TIMEOUT
    assert found["seconds"] < bound, found
    assert all((folder / f"resumed_{number}_{rank}").exists() for rank in range(2))
