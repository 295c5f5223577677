"""`fp8-backends checkpoint`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fp8_backends.tools.main import main

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from test_manifest import checkpoint  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    """Write two whole checkpoints, a newer damaged one, and an unfinished one."""
    for step in (1, 2, 3):
        checkpoint(tmp_path / f"checkpoint_{step}", step)
    (tmp_path / "checkpoint_3" / "model.safetensors").unlink()
    checkpoint(tmp_path / "checkpoint_4", sealed=False)
    return tmp_path


def test_folder_is_listed_and_newest_whole_checkpoint_named(folder, capsys):
    assert main(["checkpoint", str(folder)]) == 0
    printed = capsys.readouterr().out
    names = [line.split()[0] for line in printed.splitlines()[1:5]]
    assert names == [f"checkpoint_{n}" for n in (4, 3, 2, 1)]
    assert [line.split()[-1] for line in printed.splitlines()[1:5]] == [
        "incomplete",
        "damaged",
        "whole",
        "whole",
    ]
    assert "native:delayed" in printed and "model.safetensors is missing" in printed
    assert printed.splitlines()[-1] == f"newest whole one: {folder / 'checkpoint_2'}"


def test_json_has_every_checkpoint(folder, capsys):
    assert main(["checkpoint", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["newest"] == str(folder / "checkpoint_2")
    newest = found["checkpoints"][2]
    assert (newest["state"], newest["step"], newest["world_size"], newest["files"]) == (
        "whole",
        2,
        2,
        4,
    )


def test_the_exit_code_is_0_for_a_whole_checkpoint(folder):
    codes = [main(["checkpoint", str(folder / f"checkpoint_{step}")]) for step in (2, 3, 4)]
    assert codes == [0, 1, 1]


def test_a_folder_without_checkpoints_is_one_line(folder, capsys):
    (folder / "logs").mkdir()
    for wrong in (folder / "logs", folder / "nowhere"):
        assert main(["checkpoint", str(wrong)]) == 2
        assert "is no checkpoint" in capsys.readouterr().err
