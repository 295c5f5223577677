"""Runs a comparison: one worker process a backend, and after every run the results and the page on disk."""

from __future__ import annotations

import bisect
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ...compute import hardware
from ...errors import FP8BackendError, RecipeError
from ...words import counted, finite
from ..terminal import duration
from . import language_model, summary
from .checks import checks, verdict
from .report_page import render
from .settings import BASELINES, Settings, fast_fp8
from .training_text import TrainingText, load_text
from .workers import Worker, cores, dismiss, stop

RESULTS, PAGE = "results.json", "report.html"
_PACKAGES = ("fp8-backends", "torch", "accelerate", "torchao", "transformers", "transformer-engine")


class LineProgress:
    """For logs: says when something has finished, and in long runs now and then how far they are."""

    def inspecting(self, backend: str) -> None: ...

    def inspected(self, backend: str, step_seconds: float) -> None:
        self.say(f"{backend}: first steps observed; {step_seconds:.2g} s a step")

    def planned(self, comparison: Comparison) -> None:
        self.comparison, settings, asked = comparison, comparison.settings, comparison.results["asked"]
        given_up = ""
        if asked != {"steps": settings.steps, "seeds": settings.seeds}:
            given_up = f" ({asked['seeds']} of {asked['steps']} do not fit into {settings.minutes:g} min)"
        self.say(
            f"about {duration(comparison.seconds_left())} more: {summary.runs_text(settings.seeds, settings.steps)}"
            f"{given_up} with {counted(len(comparison.workers), 'backend')}, by the steps just timed"
        )

    def run_started(self, backend: str, seed: int) -> None:
        self.began = time.monotonic()

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        if time.monotonic() - self.last_line > 30:
            steps = self.comparison.settings.steps
            self.say(f"{backend} seed {seed}: step {step} of {steps}, loss {_loss(loss, 3)}")

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        seconds = time.monotonic() - self.began
        self.say(f"{backend} seed {run['seed']}: held-out loss {_loss(run['held_out_loss'])} ({seconds:.1f} s)")

    def failed(self, backend: str, message: str) -> None:
        self.say(f"{backend} failed: {message}")

    def say(self, line: str) -> None:
        self.last_line = time.monotonic()
        print(line, flush=True)


class BarProgress(LineProgress):
    """For terminals: one bar over everything, by seconds, and one for the run at work, by steps."""

    def __init__(self, bars) -> None:
        self.bars = bars
        self.whole = bars.add_task("all backends", total=None, left="")
        self.current = bars.add_task("loading libraries", total=None, left="")

    def inspecting(self, backend: str) -> None:
        self.bars.update(self.current, description=f"{backend}: first steps observed")

    def run_started(self, backend: str, seed: int) -> None:
        super().run_started(backend, seed)
        self.bars.reset(self.current, total=self.comparison.settings.steps)
        self.step(backend, seed, 0, None)

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        loss_text = f", loss {_loss(loss, 3)}" if step else ""
        description = f"{backend} seed {seed + 1}/{self.comparison.settings.seeds}{loss_text}"
        self.bars.update(self.current, completed=step, description=description)
        self._show_remaining(backend, step)

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        self._show_remaining()
        super().run_finished(backend, run)

    def _show_remaining(self, *at_work) -> None:
        elapsed, seconds = self.comparison.elapsed, self.comparison.seconds_left(*at_work)
        self.bars.update(self.whole, completed=elapsed, total=elapsed + seconds, left=f"{duration(seconds)} left")

    def say(self, line: str) -> None:
        self.bars.console.print(line, highlight=False, markup=False, emoji=False)


def _loss(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


class Comparison:
    """All backends on the same text, weights and order of data: the first steps of each, then seed by seed."""

    def __init__(self, settings: Settings, output: Path) -> None:
        self.began = time.monotonic()
        self.output = output
        self.workers: dict[str, Worker] = {}
        """The workers of the backends that have not failed."""
        self.timetable = Timetable()
        task = language_model.task(settings)
        self.text = text = load_text(settings.text, settings.limit_mb)
        text.batches(1, 1, settings.sequence, 0)  # too little text is an error now, not in every worker
        self.results: dict[str, Any] = {
            "status": "running",
            "note": "",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(settings.device),
            "versions": versions(),
            "fast_fp8": fast_fp8(settings.device),
            "around_fp8": settings.reference,
            "task": task,
            "asked": {"steps": settings.steps, "seeds": settings.seeds},
            "text": {"description": text.description, "sha256": text.sha256, "vocab_size": text.vocab_size},
            "backends": {
                name: {"status": "waiting", "message": "", "inspection": None, "runs": []}
                for name in (settings.reference, *settings.backends)
            },
        }
        self._take(settings)
        output.mkdir(parents=True, exist_ok=True)

    def _take(self, settings: Settings) -> None:
        self.settings, self.results["settings"] = settings, asdict(settings)
        windows = self.text.held_out_windows(settings.held_out_windows, settings.sequence)
        self.results["held_out_windows"] = len(windows)

    @property
    def elapsed(self) -> float:
        """Seconds."""
        return time.monotonic() - self.began

    def seconds_left(self, backend: str | None = None, step: int = 0) -> float:
        """Estimate from what was timed so far. The run at work may be named, with the steps that it has done."""
        runs = {name: len(self.results["backends"][name]["runs"]) for name in self.timetable.paces}
        if backend in runs:
            runs[backend] += step / steps_with_evaluation(self.settings)
        seeds, timetable = self.settings.seeds, self.timetable
        return sum((seeds - done) * timetable.run_seconds(name, self.settings) for name, done in runs.items())

    def run(self, progress: LineProgress) -> None:
        """Train every backend. Whatever ends this early leaves all finished runs on disk."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                settings_path, text_path = Path(folder, "settings.json"), Path(folder, "text.pt")
                settings_path.write_text(json.dumps(asdict(self.settings)))
                torch.save({field.name: getattr(self.text, field.name) for field in fields(TrainingText)}, text_path)
                self.save()
                for backend, found in self.results["backends"].items():  # all load their libraries at the same time
                    found["status"] = "running"
                    self.workers[backend] = self._worker([str(settings_path), str(text_path), backend])
                for backend in list(self.workers):  # none trains before the last one is ready
                    self._follow(backend, progress, "ready", self.settings.nproc)
                for backend, worker in list(self.workers.items()):
                    progress.inspecting(backend)
                    worker.give_turn()
                    self._follow(backend, progress, "inspected")
                if self.workers:
                    if self.settings.minutes is not None:
                        self._take(self.timetable.fitted(self.settings, self.elapsed))
                    progress.planned(self)
                    settings_path.write_text(json.dumps(asdict(self.settings)))
                    self._train(progress)
                self._end("finished")
                dismiss(self.workers.values())
        except BaseException as error:
            said = str(error) if isinstance(error, FP8BackendError) else f"{type(error).__name__}: {error}"
            if isinstance(error, KeyboardInterrupt):
                said = f"interrupted by {error}" if error.args else "interrupted"
            self.results["note"] = said
            raise
        finally:
            stop(self.workers.values())
            if self.results["status"] == "running":
                self._end("terminated")
            self.save()

    def _worker(self, arguments: list[str]) -> Worker:
        return Worker(arguments, self.settings.nproc)

    def _train(self, progress: LineProgress) -> None:
        """Seed by seed over all backends, so that what has finished can be compared at any time."""
        for seed in range(self.settings.seeds):
            if seed and not self.timetable.another_round_fits(self.settings, self.elapsed):
                self._take(replace(self.settings, seeds=seed))
                asked = self.results["asked"]["seeds"]
                self.results["note"] = f"{seed} of {counted(asked, 'seed')}: one more would not fit into the time given"
                return
            for backend, worker in list(self.workers.items()):
                progress.run_started(backend, seed)
                began = time.monotonic()
                worker.give_turn()
                self._follow(backend, progress, "run")
                self.timetable.measured[backend].append(time.monotonic() - began)

    def _follow(self, backend: str, progress: LineProgress, last: str, times: int = 1) -> None:
        """Take in what a worker reports until its turn is over. One that ends in mid-turn has failed."""
        worker, found = self.workers[backend], self.results["backends"][backend]
        for event in worker.events(last, times):
            kind = event.pop("event")
            if kind == "step":
                progress.step(backend, **event)
            elif kind == "inspected":
                found["inspection"] = event
                self.timetable.paces[backend] = (event["start_seconds"], event["step_seconds"])
                progress.inspected(backend, event["step_seconds"])
            elif kind == "run":
                if backend not in BASELINES and not self.results["fast_fp8"]:
                    event["emulated_tokens_per_second"] = event.pop("tokens_per_second")
                    event["tokens_per_second"] = None
                found["runs"].append(event)
                progress.run_finished(backend, event)
            elif kind == "failed":
                found["message"] = found["message"] or event["message"]  # of several ranks the first is the cause
            if kind in ("inspected", "run"):
                self.save()
        if worker.ended:
            found["status"], found["message"] = "failed", found["message"] or worker.why_it_ended()
            del self.workers[backend]
            self.timetable.paces.pop(backend, None)
            progress.failed(backend, found["message"])
            self.save()

    def _end(self, status: str) -> None:
        self.results["status"] = status
        for found in self.results["backends"].values():
            if found["status"] in ("waiting", "running"):
                found["status"] = status

    def save(self) -> None:
        """Write the results, then the page, each replaced as a whole so that a reader never sees half of one."""
        self.results["seconds"] = round(self.elapsed, 1)
        self.results["summary"] = {
            "rows": [{**asdict(row), "gap": row.gap and row.gap.to_dict()} for row in summary.rows(self.results)],
            "reference_spread": summary.reference_spread(self.results),
            "checks": {name: [asdict(check) for check in done] for name, done in checks(self.results).items()},
            "verdict": verdict(self.results)._asdict(),
        }
        for name, content in ((RESULTS, json.dumps(finite(self.results), indent=1)), (PAGE, render(self.results))):
            new = self.output / f".{name}.new"
            new.write_text(content, encoding="utf-8")
            os.replace(new, self.output / name)

    @property
    def failed(self) -> bool:
        """Tell whether a check failed; one that is not resolved has not."""
        return verdict(self.results).mood == "bad"


def machine(device: str) -> dict[str, Any]:
    """Describe what the numbers were measured on."""
    found: dict[str, Any] = {
        "device": device,
        "processor": hardware.cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_bf16_products": hardware.cpu_bf16(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return found


def versions() -> dict[str, str]:
    installed = {name: version for name in _PACKAGES if (version := hardware.version(name)) is not None}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"python": platform.python_version(), **installed, **cuda}


# How long a comparison takes, and how much of one fits into a given time

FORWARD = 1 / 3
"""What the forward pass takes of the time of a training step, and the evaluation of as many windows."""
FEWEST_STEPS = 20
"""A shorter run tells little; only a user who asks for fewer gets fewer."""
WANTED_SEEDS = 3
"""The fewest with a confidence interval of use; steps are given up for them."""
USABLE = 0.9
"""Share of the minutes given that is planned with: a run may take longer than the one before, and loading and ending
take seconds."""


def fit(seconds: float, steps: int, seeds: int, round_seconds: Callable[[int], float]) -> tuple[int, int]:
    """Return steps and seeds, at most those asked for, that fit into a time.

    All steps for as many seeds as possible, with three at least; where three do not fit with all steps, fewer steps;
    where they do not fit with the fewest, fewer seeds.

    Args:
        seconds: what there is.
        steps, seeds: what was asked for.
        round_seconds: from a number of steps to what one seed takes, over all backends.

    Returns:
        Steps and seeds; no seeds if not one fits.
    """
    wanted, fewest = min(WANTED_SEEDS, seeds), min(FEWEST_STEPS, steps)
    choices = range(fewest, steps + 1)
    fitting = choices[: bisect.bisect_right(choices, seconds, key=lambda count: wanted * round_seconds(count))]
    chosen = fitting[-1] if fitting else fewest
    return chosen, max(0, min(seeds, int(seconds // round_seconds(chosen))))


class Timetable:
    """What each backend's runs take: by steps that were timed, and by its runs once there are any."""

    def __init__(self) -> None:
        self.paces: dict[str, tuple[float, float]] = {}
        """Seconds to begin a run and seconds for a step, by backend."""
        self.measured: dict[str, list[float]] = defaultdict(list)
        """Seconds of each run, by backend."""

    def run_seconds(self, backend: str, settings: Settings) -> float:
        if backend in self.measured:
            return statistics.fmean(self.measured[backend])
        start, step = self.paces[backend]
        return start + step * steps_with_evaluation(settings)

    def round_seconds(self, settings: Settings) -> float:
        """Return the seconds of one seed of every backend."""
        return sum(self.run_seconds(backend, settings) for backend in self.paces)

    def fitted(self, settings: Settings, elapsed: float) -> Settings:
        """Return these settings with the steps and seeds that fit into their minutes.

        Raises:
            RecipeError: not one seed fits.
        """
        steps, seeds = fit(
            60 * USABLE * settings.minutes - elapsed,
            settings.steps,
            settings.seeds,
            lambda count: self.round_seconds(replace(settings, steps=count)),
        )
        found = replace(settings, steps=steps, seeds=seeds)
        if not seeds:
            needed = (elapsed + self.round_seconds(found)) / USABLE / 60
            raise RecipeError(
                f"--minutes {settings.minutes:g} is too little for one seed of {counted(steps, 'step')} with "
                f"{counted(len(self.paces), 'backend')}: give --minutes {needed + 0.05:.1f} or more, fewer backends, "
                "or a smaller --batch or --sequence"
            )
        return found

    def another_round_fits(self, settings: Settings, elapsed: float) -> bool:
        return settings.minutes is None or elapsed + self.round_seconds(settings) <= 60 * USABLE * settings.minutes


def steps_with_evaluation(settings: Settings) -> float:
    """Return the length of a run in training steps."""
    return settings.steps + FORWARD * settings.held_out_windows / settings.batch
