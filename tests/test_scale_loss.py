"""Check `benchmarks/scale_loss.py`: it pairs runs by seed, and continues a record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "scale_loss.py"
SMALL = "--hidden 64 --layers 1 --seeds 1 --steps 1 --device cpu --workers 2".split()


@pytest.mark.nightly
def test_a_record_is_continued_and_paired_with_its_reference(tmp_path):
    file = tmp_path / "record.json"

    def ran(*options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, SCRIPT, "--json", file, *SMALL, *options]
        return subprocess.run(command, capture_output=True, text=True)

    def record(*options: str) -> dict:
        assert not (done := ran(*options)).returncode, done.stderr
        return json.loads(file.read_text())

    first = record("--variants", "rows reversed")
    both = record("--variants", "rows reversed;msamp:O4, gradient release")
    assert both["runs"][:2] == first["runs"] and len(both["runs"]) == 4
    names = ["reference", "rows reversed", "reference, not clipped", "msamp:O4, gradient release"]
    assert [each["variant"] for each in both["results"]] == names
    by_name = {each["variant"]: each["held_out_loss"] for each in both["runs"]}
    losses = [by_name[name] for name in names]
    gaps = [each["gap"] and each["gap"]["mean"] for each in both["results"]]
    assert gaps == [None, losses[1] - losses[0], None, losses[3] - losses[2]]
    assert all(not each["unmoved"] for each in both["runs"]) and losses[3] != losses[2]
    assert "other settings" in ran("--steps", "2").stderr
