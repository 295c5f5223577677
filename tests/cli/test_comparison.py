from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import warm_process
from cli.comparing import TINY, InProcess, Silent, compared, tiny_settings, write_text

from fp8_backends.cli.compare import comparison as comparing
from fp8_backends.cli.compare.comparison import Comparison, worker_environment
from fp8_backends.cli.compare.summary import checks
from fp8_backends.cli.main import main
from fp8_backends.compute import hardware

REFERENCE = hardware.fast_precision("cpu")
"""Of a comparison for which none was asked."""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Options of a comparison that takes a second a run."""
    import transformers

    folder = tmp_path_factory.mktemp("options")
    transformers.LlamaConfig(**TINY, vocab_size=256, max_position_embeddings=64).save_pretrained(folder / "model")
    text = write_text(folder / "text")
    small = ["--text", text, "--model", folder / "model", "--batch", "2", "--sequence", "32"]
    return ["compare", *map(str, small)]


@pytest.fixture
def warm_workers(monkeypatch):
    monkeypatch.setattr(comparing.sys, "executable", warm_process.python())


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_the_command_leaves_results_and_page_and_says_emulated_without_fp8_hardware(options, tmp_path, capsys):
    code = main(
        [*options, "--backends", f"{REFERENCE},Native", "--steps", "3", "--seeds", "2", "--output", str(tmp_path)]
    )
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["backends"]) == [REFERENCE, "native:dynamic"] and results["status"] == "finished"
    assert all(len(found["runs"]) == 2 for found in results["backends"].values())
    failed = [c for done in results["summary"]["checks"].values() for c in done if c["passed"] is False]
    assert code == (1 if failed else 0)
    if not results["fast_fp8"]:
        run = results["backends"]["native:dynamic"]["runs"][0]
        assert run["tokens_per_second"] is None and run["emulated_tokens_per_second"] > 0
        cells = " ".join(line for line in printed.splitlines() if line.startswith("native:dynamic  "))
        assert cells.count("emulated") == 2
    assert f"{REFERENCE}'s own spread" in printed and str(tmp_path / "report.html") in printed
    assert "native:dynamic" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminated_run_leaves_what_was_finished_readable_and_ends_its_workers(options, tmp_path, ranks):
    command = [*options, "--backends", "native", "--steps", "10", "--seeds", "500", "--nproc", str(ranks)]
    process = subprocess.Popen(
        [warm_process.python(), "-m", "fp8_backends", *command, "--output", str(tmp_path)],
        env=worker_environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    results, deadline = tmp_path / "results.json", time.monotonic() + 120
    while time.monotonic() < deadline:
        if results.exists() and len(json.loads(results.read_text())["backends"][REFERENCE]["runs"]) >= 2:
            break
        time.sleep(0.2)
    running = _processes_in(tmp_path)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    found = json.loads(results.read_text())
    assert found["status"] == "terminated" and len(found["backends"][REFERENCE]["runs"]) >= 2
    assert found["backends"]["native:dynamic"]["status"] == "terminated"
    for text in ((tmp_path / "report.html").read_text(), printed):
        assert "Terminated early: interrupted by SIGTERM. So far " in " ".join(text.split())
    # the command, and of two backends torchrun and its ranks; each forked one with the process that asked for it
    of_each = 1 if warm_process.python() == sys.executable else 2
    assert len(running) >= of_each * (1 + 2 * (1 if ranks == 1 else 1 + ranks))
    deadline = time.monotonic() + 10  # those that were forked end with those that asked, not before
    while _processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _processes_in(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_ranks_share_the_batches_of_one_rank(options, tmp_path):
    """FP32: the order of the sum over ranks is all that differs."""
    settings = tiny_settings(tmp_path, "fp32", nproc=2, seeds=1)
    comparison = Comparison(settings, tmp_path / "two")
    comparison.run(Silent())
    alone = compared(tmp_path, "fp32", seeds=1).results["backends"]["fp32"]
    found = comparison.results["backends"]["fp32"]
    assert found["status"] == "finished", found["message"]
    for key in ("losses", "held_out_loss"):
        assert found["runs"][0][key] == pytest.approx(alone["runs"][0][key], abs=2e-5)
    assert found["runs"][0]["start_checksum"] == alone["runs"][0]["start_checksum"]
    # DDP sums FP32 gradients, 4 bytes a parameter times 2 (N - 1) / N, and copies the buffers of rank 0: rotary angles
    assert 0 <= found["inspection"]["sent_bytes"] - 4 * found["inspection"]["parameters"] <= 64
    assert alone["inspection"]["sent_bytes"] is None
    page, page_alone = ((tmp_path / folder / "report.html").read_text() for folder in ("two", "out"))
    for text in ("2 ranks (DDP over gloo)", "sent a step"):
        assert text in page and text not in page_alone


def _processes_in(folder) -> set[int]:
    """Those that work in a folder, where whatever they start does, too."""
    found = set()
    for process in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if process.isdigit() and os.readlink(f"/proc/{process}/cwd") == str(folder):
                found.add(int(process))
    return found


def test_a_worker_that_dies_is_a_failed_check_and_the_others_go_on(tmp_path, monkeypatch):
    comparison = Comparison(tiny_settings(tmp_path, "native:dynamic"), tmp_path / "out")
    monkeypatch.setattr(comparing.sys, "executable", "/bin/false")
    comparison.run(Silent())
    assert comparison.results["status"] == "finished" and comparison.failed
    for backend in ("bf16", "native:dynamic"):
        (check,) = checks(comparison.results)[backend]
        assert check.passed is False and "code 1" in check.detail


def test_results_are_written_after_every_run(tmp_path):
    seen = []

    class Seen(Silent):
        def run_finished(self, backend, run):
            seen.append(len(json.loads((tmp_path / "out" / "results.json").read_text())["backends"][backend]["runs"]))

    InProcess(tiny_settings(tmp_path, seeds=3, steps=1), tmp_path / "out").run(Seen())
    assert seen == [0, 1, 2]  # each run is saved as soon as it was shown


def test_results_hold_machine_versions_date_settings_and_no_paths_of_the_user(tmp_path):
    results = compared(tmp_path, seeds=1, steps=1).results
    assert results["versions"].keys() >= {"python", "torch", "accelerate"} and results["date"].endswith("+00:00")
    assert results["machine"]["device"] == "cpu" and results["machine"]["processor"]
    assert results["settings"]["steps"] == 1 and len(results["text"]["sha256"]) == 64


def test_worker_environment_keeps_what_steers_accelerate_out(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    monkeypatch.setenv("FP8_BACKENDS_DISABLE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = worker_environment()
    assert not {"ACCELERATE_FP8_BACKEND", "FP8_BACKENDS_DISABLE"} & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "1"
