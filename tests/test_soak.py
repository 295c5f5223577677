"""Run the soak briefly. Its purpose takes thousands of steps."""

import json
from pathlib import Path

import pytest
import warm_process

SOAK = Path(__file__).resolve().parents[1] / "benchmarks" / "reliability" / "soak.py"


@pytest.mark.nightly
def test_soak_saves_resumes_and_writes_a_record(tmp_path):
    arguments = (
        "--quick",
        "--only",
        "native",
        "--recipe",
        "amax_history_len=4",
        "--out",
        str(tmp_path),
    )
    done = warm_process.run(str(SOAK), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = (json.loads(file.read_text()) for file in tmp_path.glob("soak_cpu_*.json"))
    (result,) = record["results"]
    assert record["recipe"] == {"amax_history_len": 4} and not result["faults"]
    assert len(result["records"][0]["looks"]) == 8 and result["records"][0]["evaluations"] == 20
