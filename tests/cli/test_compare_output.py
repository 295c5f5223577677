from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
from cli.comparing import InProcess, Silent, compared, tiny_settings

from fp8_backends.cli.compare.command import announce, conclude, introduce
from fp8_backends.cli.compare.comparison import Log
from fp8_backends.cli.terminal import Progress


@pytest.fixture
def comparison(tmp_path):
    return InProcess(tiny_settings(tmp_path, "native:dynamic", steps=2), tmp_path / "out")


def test_a_log_says_how_long_it_will_take_once_the_first_steps_are_done_and_how_long_it_took(comparison, capsys):
    comparison.run(Log(None))
    lines = capsys.readouterr().out.splitlines()
    conclude(comparison)
    beginnings = ["bf16: first steps observed; ", "native:dynamic: first steps observed; ", "about "]
    beginnings += [f"{name} seed {seed}: held-out loss " for seed in (0, 1) for name in ("bf16", "native:dynamic")]
    assert [line.startswith(expected) for line, expected in zip(lines, beginnings, strict=True)] == [True] * 7
    assert lines[2].endswith("s more: 2 seeds of 2 steps with 2 backends, by the steps just timed")
    assert "\ntook " in capsys.readouterr().out


def test_at_80_columns_no_line_is_longer_and_a_backend_is_written_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    comparison = InProcess(tiny_settings(tmp_path, "msamp:O2", steps=1, seeds=1), tmp_path / "out")
    announce(comparison.settings)
    introduce(comparison)
    with Progress("comparing") as display:
        comparison.run(Log(display))
    comparison.results["note"] = "1 of 3 seeds: one more would not fit into the time given " * 2
    conclude(comparison)
    printed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert [line for line in printed.splitlines() if len(line) > 80 and str(tmp_path) not in line] == []
    assert "msamp:O2: first steps observed" in printed


def test_a_long_run_is_heard_of_before_it_ends(comparison, capsys):
    log = Log(None)
    log.comparison = SimpleNamespace(settings=SimpleNamespace(steps=80))
    log.inspected("bf16", 0.1)
    log.step("bf16", 0, 40, 3.25)  # just after a line
    log.last_line -= 31
    log.step("bf16", 0, 41, 3.25)
    assert capsys.readouterr().out.splitlines()[1:] == ["bf16 seed 0: step 41 of 80, loss 3.250"]


def test_a_terminal_shows_the_current_step_and_the_growing_share_of_the_whole(comparison, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = []
    comparison.run(Log(lambda step, done=None: shown.append((step, done))))
    assert shown[:2] == [("bf16: first steps", None), ("native:dynamic: first steps", None)]
    steps, shares = zip(*shown[2:], strict=True)
    assert steps[0].startswith("bf16 seed 0: step 1 of 2, loss ") and steps[-1].endswith(" s left")
    assert 0 < shares[0] < shares[-1] < 1 and "native:dynamic seed 1: held-out loss" in capsys.readouterr().out


def test_the_conclusion_fits_a_log_and_names_every_backend_and_what_became_of_it(comparison, capsys):
    comparison.run(Silent())
    comparison.results["backends"]["native:dynamic"] |= {"status": "failed", "message": "out of memory " * 30}
    conclude(comparison)
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if str(comparison.output) not in line) <= 100
    assert " ".join(printed.split()).count("out of memory") == 90
    assert "FAIL trained to the end" in printed and "held-out loss" in printed


def test_the_conclusion_begins_with_the_verdict_and_marks_what_is_not_resolved(tmp_path, capsys):
    comparison = compared(tmp_path, "native:dynamic", steps=1, seeds=1)
    conclude(comparison)
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "All 7 checks that could be judged passed; 1 is not resolved."
    assert lines[1] == "Not resolved: held-out loss at most 0.01 nats above bf16's (native:dynamic)."
    assert lines[2].startswith("More seeds or steps would resolve the held-out loss: --seeds ")
    assert [line.split(" (")[0] for line in lines if line.startswith("? ")] == [
        "?    held-out loss at most 0.01 nats above bf16's"
    ]
    assert "bf16:" in lines
    comparison.results["status"] = "terminated"
    comparison.results["backends"]["bf16"]["runs"].clear()
    conclude(comparison)
    lines = capsys.readouterr().out.strip().splitlines()
    assert "bf16:" not in lines and "native:dynamic:" in lines  # no heading without checks
