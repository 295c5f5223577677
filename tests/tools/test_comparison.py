"""Test the order, the time limits and the workers of a comparison."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch
import warm_process
from hypothesis import given
from hypothesis import strategies as st
from tools.comparing import (
    TINY,
    InProcess,
    InProcessWorker,
    Silent,
    compared,
    tiny_settings,
    write_text,
)

from fp8_backends.compute import hardware
from fp8_backends.errors import RecipeError
from fp8_backends.tools.compare import comparison as comparing
from fp8_backends.tools.compare.comparison import (
    Comparison,
    Worker,
    fit,
    worker_environment,
)
from fp8_backends.tools.compare.summary import checks
from fp8_backends.tools.compare.workload import FIRST_STEPS, load_text
from fp8_backends.tools.main import main
from fp8_backends.tools.terminal import duration

REFERENCE = hardware.fast_precision("cpu")
"""The default reference of a comparison."""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Options of a comparison of a second a run."""
    import transformers

    folder = tmp_path_factory.mktemp("options")
    transformers.LlamaConfig(**TINY, vocab_size=256, max_position_embeddings=64).save_pretrained(
        folder / "model"
    )
    text = write_text(folder / "text")
    small = ["--text", text, "--model", folder / "model", "--batch", "2", "--sequence", "32"]
    return ["compare", *map(str, small)]


@pytest.fixture
def warm_workers(monkeypatch):
    monkeypatch.setattr(comparing.sys, "executable", warm_process.python())


@pytest.mark.usefixtures("warm_workers")
def test_the_command_writes_results_and_page(options, tmp_path, capsys):
    short = ["--backends", f"{REFERENCE},Native", "--steps", "3", "--seeds", "2"]
    code = main([*options, *short, "--output", str(tmp_path), "--json"])
    out, printed = capsys.readouterr()
    results = json.loads(out)
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert (
        list(results["backends"]) == [REFERENCE, "native:dynamic"]
        and results["status"] == "finished"
    )
    assert all(len(found["runs"]) == 2 for found in results["backends"].values())
    failed = [
        c for done in results["summary"]["checks"].values() for c in done if c["passed"] is False
    ]
    assert code == (1 if failed else 0)
    if not results["fast_fp8"]:
        run = results["backends"]["native:dynamic"]["runs"][0]
        assert run["tokens_per_second"] is None and run["emulated_tokens_per_second"] > 0
        cells = " ".join(
            line for line in printed.splitlines() if line.startswith("native:dynamic  ")
        )
        assert cells.count("emulated") == 2
    assert f"{REFERENCE}'s own spread" in printed and str(tmp_path / "report.html") in printed
    assert "native:dynamic" in (tmp_path / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminated_run_keeps_finished_results_and_ends_its_workers(options, tmp_path, ranks):
    command = [
        *options,
        "--backends",
        "native",
        "--steps",
        "10",
        "--seeds",
        "500",
        "--nproc",
        str(ranks),
    ]
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
        if (
            results.exists()
            and len(json.loads(results.read_text())["backends"][REFERENCE]["runs"]) >= 2
        ):
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
    # the command, and its workers: torchrun with its ranks has both cores; each forked process with
    # its requesting one
    of_each = 1 if warm_process.python() == sys.executable else 2
    assert len(running) >= of_each * (1 + (min(2, comparing.cores()) if ranks == 1 else 1 + ranks))
    deadline = time.monotonic() + 10  # forked processes end with their requesters, not before
    while _processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _processes_in(tmp_path)


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_workers")
def test_ranks_share_the_batches_of_one_rank(options, tmp_path):
    """In FP32 only the order of the sum over ranks differs."""
    settings = tiny_settings(tmp_path, "fp32", nproc=2, seeds=1)
    comparison = Comparison(settings, tmp_path / "two")
    comparison.run(Silent())
    alone = compared(tmp_path, "fp32", seeds=1).results["backends"]["fp32"]
    found = comparison.results["backends"]["fp32"]
    assert found["status"] == "finished", found["message"]
    for key in ("losses", "held_out_loss"):
        assert found["runs"][0][key] == pytest.approx(alone["runs"][0][key], abs=2e-5)
    assert found["runs"][0]["start_checksum"] == alone["runs"][0]["start_checksum"]
    # DDP sums FP32 gradients, 4 bytes a parameter times 2 (N - 1) / N, and copies the buffers of
    # rank 0: rotary angles
    assert 0 <= found["inspection"]["sent_bytes"] - 4 * found["inspection"]["parameters"] <= 64
    assert alone["inspection"]["sent_bytes"] is None
    page, page_alone = (
        (tmp_path / folder / "report.html").read_text() for folder in ("two", "out")
    )
    for text in ("2 ranks (DDP over gloo)", "sent a step"):
        assert text in page and text not in page_alone


def _processes_in(folder) -> set[int]:
    """Return the processes in a folder, and with them their children."""
    found = set()
    for process in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if process.isdigit() and os.readlink(f"/proc/{process}/cwd") == str(folder):
                found.add(int(process))
    return found


def test_a_dead_worker_is_a_failed_check(tmp_path, monkeypatch):
    comparison = Comparison(tiny_settings(tmp_path, "native:dynamic"), tmp_path / "out")
    monkeypatch.setattr(comparing.sys, "executable", "/bin/false")
    comparison.run(Silent())
    assert comparison.results["status"] == "finished" and comparison.failed
    for backend in ("bf16", "native:dynamic"):
        (check,) = checks(comparison.results)[backend]
        assert check.passed is False and "code 1" in check.detail


def test_worker_environment_excludes_variables_of_accelerate(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    monkeypatch.setenv("FP8_BACKENDS_RECIPE", '{"guard": "stop"}')
    kept = {"OMP_NUM_THREADS": "1", "FP8_BACKENDS_TRITON": "0"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    environment = worker_environment()
    assert not {"ACCELERATE_FP8_BACKEND", "FP8_BACKENDS_RECIPE"} & environment.keys()
    assert kept.items() <= environment.items()


class Recorded(Silent):
    """Record the turns in order, and the results after the reference's last seed."""

    def __init__(self):
        self.order = []

    def planned(self, comparison):
        self.order.append(("about", round(comparison.seconds_left(2)) >= 0))

    def begun(self, backend, seed):
        self.order.append((backend, seed))


def test_backends_train_seed_by_seed_and_the_first_seed_gives_gaps_and_checks(
    tmp_path, monkeypatch
):
    early = {}

    class Look(Recorded):
        def run_finished(self, backend, run):
            if (backend, run["seed"]) == ("bf16", 1):
                early.update(json.loads((tmp_path / "out" / "results.json").read_text()))

    monkeypatch.setattr(comparing, "cores", lambda: 1)
    look = Look()
    settings = tiny_settings(tmp_path, "native:dynamic", "fp32", steps=1)
    InProcess(settings, tmp_path / "out").run(look)
    names = ("bf16", "native:dynamic", "fp32")
    assert look.order == [
        *((name, FIRST_STEPS) for name in names),
        ("about", True),
        *((name, seed) for seed in (0, 1) for name in names),
    ]
    row, made = early["summary"]["rows"][1], early["summary"]["checks"]["native:dynamic"]
    assert row["seeds_done"] == 1 and row["gap"]["pairs"] == 1 and len(made) == 6
    assert early["versions"].keys() >= {"python", "torch", "accelerate"}
    assert early["date"].endswith("+00:00") and len(early["text"]["sha256"]) == 64
    assert early["machine"]["device"] == "cpu" and early["machine"]["processor"]
    assert early["settings"]["steps"] == 1


@pytest.fixture
def started(tmp_path):
    """Start a worker."""
    settings, text = tiny_settings(tmp_path), load_text(tmp_path / "text")
    (tmp_path / "settings.json").write_text(json.dumps(asdict(settings)))
    torch.save(vars(text), tmp_path / "text.pt")
    return lambda ranks: Worker(tmp_path, ranks, queue.SimpleQueue(), "bf16")


def event_of(worker):
    return worker.events.get(timeout=120)[1]


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_idle_worker_ends_with_its_standard_input(started, ranks):
    worker = started(ranks)
    assert [event_of(worker)["event"] for _ in range(ranks)] == ["ready"] * ranks
    worker.process.stdin.close()
    assert event_of(worker) == {"event": "ended"} and worker.process.returncode == 0


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_workers")
def test_a_worker_reads_its_settings_at_each_turn(started, tmp_path):
    worker = started(1)
    assert event_of(worker) == {"event": "ready"}
    worker.begin(tiny_settings(tmp_path), "bf16", FIRST_STEPS)
    inspected = event_of(worker)
    assert 0 < inspected["step_seconds"] and 0 < inspected["start_seconds"]
    assert 1e8 < inspected["resident_bytes"] < 1e11
    changed = tiny_settings(tmp_path, "fp32", steps=3)
    (tmp_path / "settings.json").write_text(json.dumps(asdict(changed)))
    worker.begin(changed, "fp32", 5)
    while (run := event_of(worker))["event"] == "step":
        pass
    assert run["seed"] == 5 and len(run["losses"]) == 3
    comparing.stop([worker])


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_workers")
def test_losses_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    losses, workers = [], []
    for cores in (1, 2):
        monkeypatch.setattr(comparing, "cores", lambda cores=cores: cores)
        comparison = Comparison(
            tiny_settings(tmp_path, "native:dynamic", "msamp:O2", steps=3), tmp_path / "out"
        )
        comparison.run(Silent())
        assert comparison.results["machine"]["runs_at_once"] == cores
        workers.append(len(comparison.workers))
        found = comparison.results["backends"]
        assert [*found] == ["bf16", "native:dynamic", "msamp:O2"]
        assert all([run["seed"] for run in each["runs"]] == [0, 1] for each in found.values())
        kept = ("losses", "held_out_loss", "start_checksum")
        losses.append(
            {name: [[run[k] for k in kept] for run in each["runs"]] for name, each in found.items()}
        )
    assert workers == [1, 2] and losses[0] == losses[1]


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_workers")
def test_a_killed_worker_fails_its_backend(tmp_path):
    comparison = Comparison(
        tiny_settings(tmp_path, "native:dynamic", "fp32", steps=100), tmp_path / "out"
    )

    class Killing(Recorded):
        def step(self, backend, seed, step, loss):
            if backend == "native:dynamic":
                (busy,) = (each for each in comparison.workers if each.backend == backend)
                os.kill(busy.process.pid, signal.SIGKILL)

    comparison.run(Killing())
    found = comparison.results["backends"]
    counts = {name: len(each["runs"]) for name, each in found.items()}
    assert counts == {"bf16": 2, "native:dynamic": 0, "fp32": 2}
    failed = found["native:dynamic"]
    assert failed["status"] == "failed" and "code -9" in failed["message"] and comparison.failed
    assert found["bf16"]["status"] == comparison.results["status"] == "finished"


def test_cores_are_counted_without_affinity(monkeypatch):
    """macOS and Windows have none."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert comparing.cores() == os.cpu_count()


def test_runs_at_once_fit_into_cores_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "cores", lambda: 8)
    comparison = InProcess(tiny_settings(tmp_path), tmp_path / "out")
    assert comparison.at_once == 1  # nothing is known of a run's memory
    comparison.free_bytes, comparison.run_bytes = 5_500, 1_000
    assert comparison.at_once == 5
    comparison.free_bytes = 500
    assert comparison.at_once == 1
    comparison.free_bytes = 1_000_000
    assert comparison.at_once == 8
    comparison.settings.nproc = 3
    assert comparison.at_once == 2
    comparison.settings.device = "cuda"
    assert comparison.at_once == 1


def test_without_the_reference_checks_against_it_are_missing(tmp_path):
    class Ending(InProcessWorker):
        def begin(self, settings, backend, seed):
            if backend != "bf16":
                super().begin(settings, backend, seed)
                return
            self.backend, self.message = backend, "out of order"
            self.events.put((self, {"event": "ended"}))

    class NoReference(InProcess):
        def hire(self, backend):
            return Ending(self)

    comparison = NoReference(tiny_settings(tmp_path, "native:dynamic", steps=1), tmp_path / "out")
    comparison.run(Silent())
    assert comparison.results["backends"]["bf16"]["message"] == "out of order"
    names = [check.name for check in checks(comparison.results)["native:dynamic"]]
    assert len(comparison.results["backends"]["native:dynamic"]["runs"]) == 2
    assert len(names) == 4 and not any(
        "held-out" in name or "same initial" in name for name in names
    )


class TwoSeedsOfThreeSteps(InProcess):
    """Plans four seeds of three steps, and has no time for more than two."""

    def fitted(self):
        return replace(self.settings, steps=3, seeds=4)

    def seconds(self, runs, settings):
        return 1e9 * (runs["bf16"] + len(self.results["backends"]["bf16"]["runs"]) > 2)


def test_minutes_reduce_steps_and_seeds(tmp_path):
    settings = tiny_settings(tmp_path, steps=6, seeds=5, minutes=7.0)
    comparison = TwoSeedsOfThreeSteps(settings, tmp_path / "out")
    comparison.run(Silent())
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["asked"] == {"steps": 6, "seeds": 5} and results["settings"]["minutes"] == 7.0
    assert (results["settings"]["steps"], results["settings"]["seeds"]) == (3, 2)
    assert [len(run["losses"]) for run in results["backends"]["bf16"]["runs"]] == [3, 3]
    assert results["status"] == results["backends"]["bf16"]["status"] == "finished"
    assert (
        "2 of 5 seeds" in results["note"]
        and results["note"] in (tmp_path / "out" / "report.html").read_text()
    )


def test_too_few_minutes_end_the_comparison_with_the_reason(tmp_path):
    comparison = InProcess(tiny_settings(tmp_path, minutes=1e-6), tmp_path / "out")
    with pytest.raises(RecipeError, match="--minutes 1e-06 is too little for one seed") as error:
        comparison.run(Silent())
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["status"] == "terminated" and results["note"] == str(error.value)


@pytest.mark.parametrize(("share", "windows"), [(0.2, 128), (0.5, 320), (0.001, 8)])
def test_held_out_windows_are_a_share_and_at_least_a_batch(tmp_path, share, windows):
    assert (
        tiny_settings(tmp_path, steps=80, batch=8, held_out_share=share).held_out_windows == windows
    )


def test_a_short_text_has_fewer_held_out_windows(tmp_path):
    comparison = InProcess(
        tiny_settings(tmp_path, steps=100, held_out_share=10.0), tmp_path / "out"
    )
    held_out = comparison.text.held_out
    assert (
        comparison.results["held_out_windows"]
        == len(held_out) // 32
        < comparison.settings.held_out_windows
    )


@given(
    st.floats(-100, 1e5),
    st.integers(1, 500),
    st.integers(1, 20),
    st.floats(0.001, 10),
    st.floats(0, 50),
)
def test_the_best_fitting_choice_is_taken(seconds, steps, seeds, step_seconds, start):
    def takes(steps, seeds=1):
        return seeds * (start + step_seconds * steps)

    wanted = min(3, seeds)
    found_steps, found_seeds = fit(seconds, steps, seeds, takes)
    assert min(comparing.FEWEST_STEPS, steps) <= found_steps <= steps and 0 <= found_seeds <= seeds
    assert found_seeds * takes(found_steps) <= max(0, seconds) * (1 + 1e-9)
    if found_steps < steps:
        assert wanted * takes(found_steps + 1) > seconds
    if found_seeds < seeds:
        assert (found_seeds + 1) * takes(found_steps) > seconds - 1e-6
    if found_seeds < wanted:
        assert found_steps == min(comparing.FEWEST_STEPS, steps)


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """A round takes 2 + 1.5 s and, with the evaluation of 0.3 windows, a third of a step each, 1.1
    x 0.5 s a step."""
    settings = tiny_settings(
        tmp_path, "native:dynamic", steps=40, seeds=5, batch=4, held_out_share=0.3, minutes=1.0
    )
    monkeypatch.setattr(comparing, "cores", lambda: 1)
    comparison = InProcess(settings, tmp_path / "out")
    for name, start, step in (("bf16", 2.0, 0.2), ("native:dynamic", 1.5, 0.3)):
        report = comparison.results["backends"][name]
        report["inspection"] = {"start_seconds": start, "step_seconds": step}
    comparison.began, comparison.run_bytes = time.monotonic(), 1
    return comparison


def test_finished_runs_replace_estimates(timed, monkeypatch):
    def seconds(*runs):
        return timed.seconds(dict(zip(timed.living, runs, strict=True)), timed.settings)

    reports = timed.results["backends"]
    longer = 1.5 + 0.3 * 44
    assert seconds(1, 1) == pytest.approx(3.5 + 0.5 * 44)
    reports["bf16"]["runs"] += [{"seconds": 4.0}, {"seconds": 6.0}]
    assert seconds(1, 1) == pytest.approx(5 + longer)
    assert timed.seconds_left(3) == pytest.approx(5 + 3 * longer)
    monkeypatch.setattr(comparing, "cores", lambda: 2)
    assert seconds(1, 1) == pytest.approx(longer + 5 / 2)
    assert seconds(3, 0) == 5 + 10 / 2 and seconds(0, 0) == 0
    reports["native:dynamic"]["status"] = "failed"
    assert timed.seconds_left(3) == 5


def test_elapsed_time_counts(timed, monkeypatch):
    fitted = timed.fitted()
    timed.began -= 10
    later = timed.fitted()
    assert (fitted.steps, fitted.seeds) == (26, 3) and (later.steps, later.seeds) == (20, 3)
    monkeypatch.setattr(comparing, "cores", lambda: 2)
    beside = timed.fitted()
    assert beside.steps > later.steps and beside.seeds == 3


def test_too_few_minutes_are_an_error_with_the_needed_ones(timed):
    message = r"--minutes 0\.2 is too little for one seed of 20 steps with 2 backends: give --minutes ([0-9.]+)"
    timed.settings.minutes = 0.2
    with pytest.raises(RecipeError, match=message) as error:
        timed.fitted()
    needed = float(str(error.value).split("give --minutes ")[1].split()[0])
    timed.settings.minutes = needed
    assert timed.fitted().seeds == 1
    timed.settings.minutes = needed - 0.1
    with pytest.raises(RecipeError):
        timed.fitted()


def test_durations_are_readable():
    readable = "0 s, 60 s, 99 s, 2 min, 1 h 0 min, 1 h 0 min, 2 h 5 min"
    assert ", ".join(map(duration, (0.4, 59.6, 99.4, 100, 3599, 3601, 7500))) == readable
