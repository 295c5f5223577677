"""Check `benchmarks/scale_loss.py`: it pairs runs by seed, and continues a record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

own_path = list(sys.path)
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import scale_loss  # noqa: E402

sys.path[:] = own_path


@pytest.mark.nightly
def test_a_record_is_continued_and_paired_with_its_reference(tmp_path, monkeypatch):
    file = tmp_path / "record.json"

    def record(*options: str) -> dict:
        small = ("--hidden", "64", "--layers", "1", "--seeds", "1", "--steps", "1")
        monkeypatch.setattr(sys, "argv", ["scale_loss.py", "--json", str(file), *small, *options])
        scale_loss.main()
        return json.loads(file.read_text())

    first = record("--variants", "rows reversed")
    both = record("--variants", "rows reversed", "msamp:O4, gradient release")
    assert both["runs"][:2] == first["runs"] and len(both["runs"]) == 4
    names = ["reference", "rows reversed", "reference, not clipped", "msamp:O4, gradient release"]
    assert [each["variant"] for each in both["runs"]] == names
    losses = [each["held_out_loss"] for each in both["runs"]]
    gaps = [each["gap"] and each["gap"]["mean"] for each in both["results"]]
    assert gaps == [None, losses[1] - losses[0], None, losses[3] - losses[2]]
    assert all(not each["unmoved"] for each in both["runs"]) and losses[3] != losses[2]
    with pytest.raises(SystemExit, match="other settings"):
        record("--steps", "2")
