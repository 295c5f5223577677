"""The order in which a comparison trains, and what its workers do between their turns."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, fields, replace

import pytest
import torch
import warm_process
from cli.comparing import InProcess, Silent, tiny_settings

from fp8_backends.cli.compare import comparison as comparing
from fp8_backends.cli.compare.comparison import Comparison, Timetable, Worker, dismiss
from fp8_backends.cli.compare.summary import checks
from fp8_backends.cli.compare.workload import TrainingText, load_text
from fp8_backends.errors import RecipeError


@pytest.fixture
def warm_workers(monkeypatch):
    monkeypatch.setattr(comparing.sys, "executable", warm_process.python())


class Recorded(Silent):
    """Which turns began, in order."""

    def __init__(self):
        self.order = []

    def inspecting(self, backend):
        self.order.append((backend, "first steps"))

    def planned(self, comparison):
        self.order.append(("about", round(comparison.seconds_left()) >= 0))

    def run_started(self, backend, seed):
        self.order.append((backend, seed))


def test_every_backend_trains_a_seed_before_any_trains_the_next(tmp_path):
    recorded = Recorded()
    InProcess(tiny_settings(tmp_path, "native:dynamic", "fp32", steps=1), tmp_path / "out").run(recorded)
    names = ("bf16", "native:dynamic", "fp32")
    assert recorded.order == [
        *((name, "first steps") for name in names),
        ("about", True),
        *((name, seed) for seed in (0, 1) for name in names),
    ]


def test_after_the_first_seed_every_backend_has_a_gap_and_checks(tmp_path):
    found = {}

    class Look(Silent):
        def run_started(self, backend, seed):
            if (backend, seed) == ("bf16", 1):
                found.update(json.loads((tmp_path / "out" / "results.json").read_text()))

    InProcess(tiny_settings(tmp_path, "native:dynamic", steps=1), tmp_path / "out").run(Look())
    row = found["summary"]["rows"][1]
    assert (
        row["seeds_done"] == 1 and row["gap"]["pairs"] == 1 and len(found["summary"]["checks"]["native:dynamic"]) == 6
    )


@pytest.fixture
def started(tmp_path):
    """Starts a worker that would train bf16."""
    settings, text = tiny_settings(tmp_path), load_text(tmp_path / "text")
    (tmp_path / "settings.json").write_text(json.dumps(asdict(settings)))
    torch.save({field.name: getattr(text, field.name) for field in fields(TrainingText)}, tmp_path / "text.pt")
    return lambda ranks: Worker([str(tmp_path / "settings.json"), str(tmp_path / "text.pt"), "bf16"], ranks)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_gets_no_turn_ends_quietly_with_its_standard_input(started, ranks):
    worker = started(ranks)
    assert [event["event"] for event in worker.events("ready", ranks)] == ["ready"] * ranks
    dismiss([worker])
    assert worker.process.returncode == 0 and list(worker.events("run")) == []


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_worker_reads_its_settings_at_each_turn(started, tmp_path):
    worker = started(1)
    list(worker.events("ready"))
    worker.give_turn()
    (inspected,) = worker.events("inspected")
    assert 0 < inspected["step_seconds"] and 0 < inspected["start_seconds"]
    changed = tiny_settings(tmp_path, steps=3)
    (tmp_path / "settings.json").write_text(json.dumps(asdict(changed)))
    worker.give_turn()
    run = list(worker.events("run"))[-1]
    assert run["seed"] == 0 and len(run["losses"]) == 3
    dismiss([worker])


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_backend_whose_worker_is_killed_drops_out_and_the_others_go_on(tmp_path):
    comparison = Comparison(tiny_settings(tmp_path, "native:dynamic", "fp32", steps=2, seeds=3), tmp_path / "out")

    class Killing(Recorded):
        def run_finished(self, backend, run):
            if (backend, run["seed"]) == ("fp32", 0):  # while it waits for its turn
                os.kill(comparison.workers["native:dynamic"].process.pid, signal.SIGKILL)

    killing = Killing()
    comparison.run(killing)
    found = comparison.results["backends"]
    assert {name: len(each["runs"]) for name, each in found.items()} == {"bf16": 3, "native:dynamic": 1, "fp32": 3}
    assert found["native:dynamic"]["status"] == "failed" and "code -9" in found["native:dynamic"]["message"]
    assert found["bf16"]["status"] == found["fp32"]["status"] == comparison.results["status"] == "finished"
    assert ("native:dynamic", 2) not in killing.order and comparison.failed


def test_without_the_reference_the_others_train_and_lack_what_needs_it(tmp_path):
    class NoReference(InProcess):
        def _worker(self, arguments):
            worker = super()._worker(arguments)
            if arguments[2] == "bf16":
                worker.ended, worker.events, worker.why_it_ended = True, lambda *_: [], lambda: "out of order"
            return worker

    comparison = NoReference(tiny_settings(tmp_path, "native:dynamic", steps=1), tmp_path / "out")
    comparison.run(Silent())
    assert comparison.results["backends"]["bf16"]["message"] == "out of order"
    names = [check.name for check in checks(comparison.results)["native:dynamic"]]
    assert len(comparison.results["backends"]["native:dynamic"]["runs"]) == 2
    assert len(names) == 4 and not any("held-out" in name or "same initial" in name for name in names)


class TwoSeedsOfThreeSteps(Timetable):
    """Plans four seeds of three steps, and after two of them has no time for more."""

    def fitted(self, settings, elapsed):
        return replace(settings, steps=3, seeds=4)

    def another_round_fits(self, settings, elapsed):
        return len(self.measured["bf16"]) < 2


def test_minutes_that_fit_less_train_less_and_the_results_hold_both(tmp_path):
    comparison = InProcess(tiny_settings(tmp_path, steps=6, seeds=5, minutes=7.0), tmp_path / "out")
    comparison.timetable = TwoSeedsOfThreeSteps()
    comparison.run(Silent())
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["asked"] == {"steps": 6, "seeds": 5} and results["settings"]["minutes"] == 7.0
    assert (results["settings"]["steps"], results["settings"]["seeds"]) == (3, 2)
    assert [len(run["losses"]) for run in results["backends"]["bf16"]["runs"]] == [3, 3]
    assert results["status"] == results["backends"]["bf16"]["status"] == "finished"
    assert "2 of 5 seeds" in results["note"] and results["note"] in (tmp_path / "out" / "report.html").read_text()


def test_minutes_too_few_for_one_seed_end_the_comparison_with_the_reason(tmp_path):
    comparison = InProcess(tiny_settings(tmp_path, minutes=1e-6), tmp_path / "out")
    with pytest.raises(RecipeError, match="--minutes 1e-06 is too little for one seed of 6 steps") as error:
        comparison.run(Silent())
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["status"] == "terminated" and results["note"] == str(error.value)


@pytest.mark.parametrize(("share", "windows"), [(0.2, 128), (0.5, 320), (0.001, 8)])
def test_held_out_windows_are_a_share_of_those_trained_on_and_at_least_a_batch(tmp_path, share, windows):
    assert tiny_settings(tmp_path, steps=80, batch=8, held_out_share=share).held_out_windows == windows


def test_a_short_text_has_fewer_held_out_windows_and_the_results_say_how_many(tmp_path):
    comparison = InProcess(tiny_settings(tmp_path, steps=100, held_out_share=10.0), tmp_path / "out")
    held_out = comparison.text.held_out
    assert comparison.results["held_out_windows"] == len(held_out) // 32 < comparison.settings.held_out_windows
