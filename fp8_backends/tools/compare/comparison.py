"""Run a comparison with one worker process a backend; write results and page after every run."""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ...compute import hardware
from ...errors import FP8BackendError, RecipeError
from ...words import counted, finite
from ..terminal import Progress, duration, environment_without
from . import summary
from .report_page import render
from .summary import checks, verdict
from .workload import BASELINES, Settings, fast_fp8, load_text, task

RESULTS = "results.json"
PAGE = "report.html"
_PACKAGES = ("fp8-backends", "torch", "accelerate", "torchao", "transformers", "transformer-engine")


class Log:
    """Print a line for each finished part, and show the current step on a terminal, or every 30
    seconds in a file."""

    def __init__(self, display: Progress) -> None:
        self.display = display if sys.stdout.isatty() else None
        self.last_line = time.monotonic()

    def inspecting(self, backend: str) -> None:
        if self.display:
            self.display(f"{backend}: first steps")

    def inspected(self, backend: str, step_seconds: float) -> None:
        self.say(f"{backend}: first steps observed; {step_seconds:.2g} s a step")

    def planned(self, comparison: Comparison) -> None:
        self.comparison = comparison
        settings = comparison.settings
        asked = comparison.results["asked"]
        given_up = ""
        if asked != {"steps": settings.steps, "seeds": settings.seeds}:
            given_up = (
                f" ({asked['seeds']} of {asked['steps']} do not fit into {settings.minutes:g} min)"
            )
        self.say(
            f"about {duration(comparison.seconds_left())} more: "
            f"{summary.runs_text(settings.seeds, settings.steps)}{given_up} with "
            f"{counted(len(comparison.workers), 'backend')}, by the steps just timed"
        )

    def run_started(self, backend: str, seed: int) -> None:
        self.began = time.monotonic()

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        text = f"{backend} seed {seed}: step {step} of {self.comparison.settings.steps}, loss {_loss(loss, 3)}"
        if self.display:
            elapsed = self.comparison.elapsed
            left = self.comparison.seconds_left(backend, step)
            self.display(f"{text}, {duration(left)} left", elapsed / (elapsed + left))
        elif time.monotonic() - self.last_line > 30:
            self.say(text)

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        seconds = time.monotonic() - self.began
        self.say(
            f"{backend} seed {run['seed']}: held-out loss {_loss(run['held_out_loss'])} "
            f"({seconds:.1f} s)"
        )

    def failed(self, backend: str, message: str) -> None:
        self.say(f"{backend} failed: {message}")

    def say(self, line: str) -> None:
        self.last_line = time.monotonic()
        print(line, flush=True)


def _loss(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


class Comparison:
    """Train all backends on the same text, weights and order of data: first steps of each, then
    seed by seed."""

    def __init__(self, settings: Settings, output: Path) -> None:
        self.began = time.monotonic()
        self.output = output
        self.workers: dict[str, Worker] = {}
        self.timetable = Timetable()
        kind = task(settings)
        self.text = text = load_text(settings.text, settings.limit_mb)
        # fail now rather than in every worker if the text is too short
        text.batches(1, 1, settings.sequence, 0)
        versions = {
            "python": platform.python_version(),
            **{name: hardware.version(name) for name in _PACKAGES},
        }
        versions["cuda"] = torch.version.cuda
        self.results: dict[str, Any] = {
            "status": "running",
            "note": "",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(settings.device),
            "versions": {name: version for name, version in versions.items() if version},
            "fast_fp8": fast_fp8(settings.device),
            "around_fp8": settings.reference,
            "task": kind,
            "asked": {"steps": settings.steps, "seeds": settings.seeds},
            "text": {
                "description": text.description,
                "sha256": text.sha256,
                "vocab_size": text.vocab_size,
            },
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
        return time.monotonic() - self.began

    def seconds_left(self, backend: str | None = None, step: int = 0) -> float:
        """Estimate the remaining seconds, less the finished steps of a backend's current run."""
        runs = {name: len(self.results["backends"][name]["runs"]) for name in self.timetable.paces}
        if backend in runs:
            runs[backend] += step / steps_with_evaluation(self.settings)
        seeds = self.settings.seeds
        timetable = self.timetable
        return sum(
            (seeds - done) * timetable.run_seconds(name, self.settings)
            for name, done in runs.items()
        )

    def run(self, progress: Log) -> None:
        """Train every backend. After an early end all finished runs are on disk."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                settings_path = Path(folder, "settings.json")
                text_path = Path(folder, "text.pt")
                settings_path.write_text(json.dumps(asdict(self.settings)))
                torch.save(vars(self.text), text_path)
                self.save()
                # all load their libraries at the same time
                for backend, report in self.results["backends"].items():
                    report["status"] = "running"
                    self.workers[backend] = self._worker(
                        [str(settings_path), str(text_path), backend]
                    )
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
            if isinstance(error, FP8BackendError):
                note = str(error)
            else:
                note = f"{type(error).__name__}: {error}"
            if isinstance(error, KeyboardInterrupt):
                note = f"interrupted by {error}" if error.args else "interrupted"
            self.results["note"] = note
            raise
        finally:
            stop(self.workers.values())
            if self.results["status"] == "running":
                self._end("terminated")
            self.save()

    def _worker(self, arguments: list[str]) -> Worker:
        return Worker(arguments, self.settings.nproc)

    def _train(self, progress: Log) -> None:
        """Train seed by seed over all backends, so that finished seeds are comparable at any
        time."""
        for seed in range(self.settings.seeds):
            if seed and not self.timetable.another_round_fits(self.settings, self.elapsed):
                self._take(replace(self.settings, seeds=seed))
                asked = self.results["asked"]["seeds"]
                self.results["note"] = (
                    f"{seed} of {counted(asked, 'seed')}: one more would not fit into the time "
                    "given"
                )
                return
            for backend, worker in list(self.workers.items()):
                progress.run_started(backend, seed)
                began = time.monotonic()
                worker.give_turn()
                self._follow(backend, progress, "run")
                self.timetable.measured[backend].append(time.monotonic() - began)

    def _follow(self, backend: str, progress: Log, last: str, times: int = 1) -> None:
        """Record a worker's events until its turn is over. A worker that ends in mid-turn has
        failed."""
        worker = self.workers[backend]
        report = self.results["backends"][backend]
        for event in worker.events(last, times):
            kind = event.pop("event")
            if kind == "step":
                progress.step(backend, **event)
            elif kind == "inspected":
                report["inspection"] = event
                self.timetable.paces[backend] = (event["start_seconds"], event["step_seconds"])
                progress.inspected(backend, event["step_seconds"])
            elif kind == "run":
                if backend not in BASELINES and not self.results["fast_fp8"]:
                    event["emulated_tokens_per_second"] = event.pop("tokens_per_second")
                    event["tokens_per_second"] = None
                report["runs"].append(event)
                progress.run_finished(backend, event)
            elif kind == "failed":
                # the first rank's is the cause
                report["message"] = report["message"] or event["message"]
            if kind in ("inspected", "run"):
                self.save()
        if worker.ended:
            report["status"], report["message"] = (
                "failed",
                report["message"] or worker.why_it_ended(),
            )
            del self.workers[backend]
            self.timetable.paces.pop(backend, None)
            progress.failed(backend, report["message"])
            self.save()

    def _end(self, status: str) -> None:
        self.results["status"] = status
        for report in self.results["backends"].values():
            if report["status"] in ("waiting", "running"):
                report["status"] = status

    def save(self) -> None:
        """Write the results, then the page, each by a rename: a reader never sees half a file."""
        self.results["seconds"] = round(self.elapsed, 1)
        self.results["summary"] = {
            "rows": [
                {**asdict(row), "gap": row.gap and row.gap.to_dict()}
                for row in summary.rows(self.results)
            ],
            "reference_spread": summary.reference_spread(self.results),
            "checks": {
                name: [asdict(check) for check in made]
                for name, made in checks(self.results).items()
            },
            "verdict": verdict(self.results)._asdict(),
        }
        for name, content in (
            (RESULTS, json.dumps(finite(self.results), indent=1)),
            (PAGE, render(self.results)),
        ):
            new = self.output / f".{name}.new"
            new.write_text(content, encoding="utf-8")
            os.replace(new, self.output / name)

    @property
    def failed(self) -> bool:
        """Return True after a failed check; an unresolved one does not count."""
        return verdict(self.results).mood == "bad"


def machine(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": device,
        "processor": hardware.cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_bf16_products": hardware.cpu_bf16(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return facts


# Workers


class Worker:
    """Train one backend in another process, or in torchrun for several ranks, in turns given by
    standard input."""

    def __init__(self, arguments: list[str], ranks: int) -> None:
        self.ranks = ranks
        self.ended = False
        torchrun = []
        if ranks > 1:
            torchrun = [
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node",
                str(ranks),
                "-m",
            ]
        # in its own session, so that Ctrl-C reaches only this process, which then stops the worker
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                *torchrun,
                "fp8_backends.tools.compare.training_run",
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=worker_environment(ranks),
            start_new_session=True,
        )
        self.last_words: deque[str] = deque(maxlen=5)
        lines = (line.strip() for line in self.process.stderr)
        self.drain = threading.Thread(
            target=self.last_words.extend, args=[filter(None, lines)], daemon=True
        )
        self.drain.start()

    def give_turn(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # `events` reports that it has ended
            os.write(self.process.stdin.fileno(), b"." * self.ranks)

    def events(self, last: str, times: int = 1) -> Iterator[dict[str, Any]]:
        """Yield events until `last` has come `times` times or the worker has ended."""
        for line in self.process.stdout:
            event = json.loads(line)
            times -= event["event"] == last
            yield event
            if not times:
                return
        self.process.wait()
        self.drain.join()
        self.ended = True

    def why_it_ended(self) -> str:
        return f"the worker ended with code {self.process.returncode}: {' / '.join(self.last_words) or 'no message'}"


def dismiss(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.process.stdin.close()
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=30)


def stop(workers: Iterable[Worker]) -> None:
    running = [worker for worker in workers if worker.process.poll() is None]
    for worker in running:
        worker.process.terminate()
    for worker in running:
        try:
            # torchrun forwards the signal to its ranks, and kills them after 30 s
            worker.process.wait(timeout=5 if worker.ranks == 1 else 40)
        except subprocess.TimeoutExpired:
            worker.process.kill()


def worker_environment(ranks: int = 1) -> dict[str, str]:
    kept = environment_without(("ACCELERATE_", "FP8_BACKENDS_DISABLE"))
    if ranks > 1:
        kept.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


FORWARD = 1 / 3
"""Time of a forward pass, and of evaluating as many windows, relative to a training step."""
FEWEST_STEPS = 20
"""Do not shorten a run below this, unless the user asks for fewer steps."""
WANTED_SEEDS = 3
"""Give up steps for this many seeds: fewer have no useful confidence interval."""
USABLE = 0.9
"""Share of the given minutes to plan with, for slower runs, loading and ending."""


def fit(
    seconds: float, steps: int, seeds: int, round_seconds: Callable[[int], float]
) -> tuple[int, int]:
    """Return the (steps, seeds) that fit into a time, at most as many as given; no seeds if not one
    fits.

    First give up seeds down to three, then steps down to `FEWEST_STEPS`, then the other seeds.
    `round_seconds` maps a number of steps to the seconds of one seed over all backends.
    """
    wanted = min(WANTED_SEEDS, seeds)
    fewest = min(FEWEST_STEPS, steps)
    choices = range(fewest, steps + 1)
    fitting = choices[
        : bisect.bisect_right(choices, seconds, key=lambda count: wanted * round_seconds(count))
    ]
    chosen = fitting[-1] if fitting else fewest
    return chosen, max(0, min(seeds, int(seconds // round_seconds(chosen))))


class Timetable:
    """Estimate the seconds of runs from timed steps, and from finished runs once there are any."""

    def __init__(self) -> None:
        self.paces: dict[str, tuple[float, float]] = {}
        """Seconds to begin a run and seconds of a step, by backend."""
        self.measured: dict[str, list[float]] = defaultdict(list)
        """Seconds of each run, by backend."""

    def run_seconds(self, backend: str, settings: Settings) -> float:
        if backend in self.measured:
            return statistics.fmean(self.measured[backend])
        start, step = self.paces[backend]
        return start + step * steps_with_evaluation(settings)

    def round_seconds(self, settings: Settings) -> float:
        return sum(self.run_seconds(backend, settings) for backend in self.paces)

    def fitted(self, settings: Settings, elapsed: float) -> Settings:
        """Return settings whose steps and seeds fit into their minutes. Raises `RecipeError` if not
        one seed fits."""
        steps, seeds = fit(
            60 * USABLE * settings.minutes - elapsed,
            settings.steps,
            settings.seeds,
            lambda count: self.round_seconds(replace(settings, steps=count)),
        )
        fitting = replace(settings, steps=steps, seeds=seeds)
        if not seeds:
            needed = (elapsed + self.round_seconds(fitting)) / USABLE / 60
            raise RecipeError(
                f"--minutes {settings.minutes:g} is too little for one seed of "
                f"{counted(steps, 'step')} with {counted(len(self.paces), 'backend')}: give "
                f"--minutes {needed + 0.05:.1f} or more, fewer backends, or a smaller --batch or "
                "--sequence"
            )
        return fitting

    def another_round_fits(self, settings: Settings, elapsed: float) -> bool:
        return (
            settings.minutes is None
            or elapsed + self.round_seconds(settings) <= 60 * USABLE * settings.minutes
        )


def steps_with_evaluation(settings: Settings) -> float:
    return settings.steps + FORWARD * settings.held_out_windows / settings.batch
