"""Run a comparison in worker processes, at once as many as cores and memory allow; write results
and page after every run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ...compute import hardware
from ...errors import FP8BackendError, RecipeError
from ...kernels.devices import free_memory
from ...words import counted, finite
from ..terminal import Progress, duration, environment_without, wrapped
from . import summary
from .report_page import render
from .summary import checks, verdict
from .workload import BASELINES, FIRST_STEPS, PERMIT, Settings, fast_fp8, load_text, task

RESULTS = "results.json"
PAGE = "report.html"


class Log:
    """Print a line for each finished part, and show the current step on a terminal, or every 30
    seconds in a file."""

    def __init__(self, display: Progress) -> None:
        self.display = display if sys.stdout.isatty() else None
        self.last_line = time.monotonic()

    def begun(self, backend: str, seed: int) -> None:
        if self.display and seed == FIRST_STEPS:
            self.display(f"{backend}: first steps")

    def planned(self, comparison: Comparison) -> None:
        self.comparison = comparison
        settings = comparison.settings
        self.say(
            f"about {duration(comparison.seconds_left(settings.seeds))} more: "
            f"{summary.runs_text(settings.seeds, settings.steps)} with "
            f"{counted(len(comparison.living), 'backend')}, by the steps just timed"
        )

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None:
        settings = self.comparison.settings
        text = f"{backend} seed {seed}: step {step} of {settings.steps}, loss {_loss(loss)}"
        if self.display:
            elapsed = self.comparison.elapsed
            left = self.comparison.seconds_left(settings.seeds)
            self.display(f"{text}, {duration(left)} left", elapsed / (elapsed + left))
        elif time.monotonic() - self.last_line > 30:
            self.say(text)

    def run_finished(self, backend: str, run: dict[str, Any]) -> None:
        self.say(
            f"{backend} seed {run['seed']}: held-out loss {_loss(run['held_out_loss'])} "
            f"({run['seconds']:.1f} s)"
        )

    def say(self, line: str) -> None:
        self.last_line = time.monotonic()
        print(wrapped(line), flush=True)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


class Comparison:
    """Train all backends on the same text, weights and order of data: first steps of each, then
    seed by seed."""

    def __init__(self, settings: Settings, output: Path) -> None:
        self.began = time.monotonic()
        self.output = output
        self.workers: list[Worker] = []
        self.events: queue.SimpleQueue[tuple[Worker, dict[str, Any]]] = queue.SimpleQueue()
        self.free_bytes = free_memory()
        self.run_bytes = 0
        """Memory of the largest process so far, times ranks."""
        kind = task(settings)
        self.text = text = load_text(settings.text, settings.limit_mb)
        # fail now rather than in every worker if the text is too short
        text.batches(1, 1, settings.sequence, 0)
        versions = {
            "python": platform.python_version(),
            **{name: hardware.version(name) for name in ("fp8-backends", *hardware.LIBRARIES)},
        }
        versions["cuda"] = torch.version.cuda
        self.results: dict[str, Any] = {
            "status": "running",
            "note": "",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(settings.device),
            "versions": {name: version for name, version in versions.items() if version},
            "fast_fp8": fast_fp8(settings.device),
            "task": kind,
            "asked": {"steps": settings.steps, "seeds": settings.seeds},
            "text": {
                "description": text.description,
                "sha256": text.sha256,
                "vocab_size": text.vocab_size,
            },
            "backends": {
                name: {"status": "running", "message": "", "inspection": None, "runs": []}
                for name in settings.trained
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

    def seconds_left(self, seeds: int) -> float:
        """Estimate the remaining seconds until so many seeds of every backend are trained."""
        left = {name: seeds - len(report["runs"]) for name, report in self.living.items()}
        for worker in self.workers:
            if worker.backend in left:
                left[worker.backend] -= worker.steps / steps_with_evaluation(self.settings)
        return self.seconds(left, self.settings)

    @property
    def living(self) -> dict[str, dict[str, Any]]:
        """Return the reports of backends that have made their first steps and not failed."""
        backends = self.results["backends"].items()
        return {
            name: report
            for name, report in backends
            if report["inspection"] and report["status"] == "running"
        }

    def seconds(self, runs: dict[str, float], settings: Settings) -> float:
        """Return the seconds in which so many runs of each backend end, some at the same time: an
        upper bound (Graham 1969)."""
        reports = self.living
        each = {name: run_seconds(reports[name], settings) for name in runs if runs[name] > 0}
        total = sum(runs[name] * seconds for name, seconds in each.items())
        longest = max(each.values(), default=0)
        return longest + (total - longest) / self.at_once

    def fitted(self) -> Settings:
        """Return settings whose steps and seeds fit into their minutes. Raises `RecipeError` if not
        one seed fits."""
        settings = self.settings

        def needed(steps: int, seeds: int) -> float:
            runs = dict.fromkeys(self.living, seeds)
            return self.elapsed + self.seconds(runs, replace(settings, steps=steps))

        usable = 60 * SHARE_OF_TIME * settings.minutes
        steps, seeds = fit(usable, settings.steps, settings.seeds, needed)
        if not seeds:
            minutes = needed(steps, 1) / SHARE_OF_TIME / 60
            raise RecipeError(
                f"--minutes {settings.minutes:g} is too little for one seed of "
                f"{counted(steps, 'step')} with {counted(len(self.living), 'backend')}: give "
                f"--minutes {minutes + 0.05:.1f} or more, fewer backends, or a smaller --batch or "
                "--sequence"
            )
        return replace(settings, steps=steps, seeds=seeds)

    @property
    def takes_turns(self) -> bool:
        """Return True if runs never overlap, and each backend has its process: on a GPU, where they
        would slow each other, and with compiled code, of which a process keeps a bounded number."""
        return self.settings.device == "cuda" or self.settings.compile

    @property
    def at_once(self) -> int:
        """Return the number of runs at a time. The first one runs alone: it tells how much memory
        a run takes."""
        if self.takes_turns or not self.run_bytes:
            return 1
        fitting = min(cores(), self.free_bytes // self.run_bytes)
        return max(1, fitting // self.settings.nproc)

    def run(self, progress: Log) -> None:
        """Train every backend. After an early end all finished runs are on disk."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.folder = Path(folder)
                self._write_settings()
                torch.save(vars(self.text), self.folder / "text.pt")
                backends = self.results["backends"]
                self.save()
                if self.takes_turns:
                    # all load their libraries at the same time, and none trains before the last
                    # one is ready
                    self.workers += map(self.hire, backends)
                    while any(worker.loading for worker in self.workers):
                        self._record(progress)
                self._take_turns(((backend, FIRST_STEPS) for backend in backends), progress)
                if self.living:
                    if self.settings.minutes is not None:
                        self._take(self.fitted())
                        self._write_settings()
                    if self.settings.device == "cpu":
                        self.results["machine"]["runs_at_once"] = self.at_once
                    progress.planned(self)
                    self._take_turns(self._runs(), progress)
                self._end("finished")
        except BaseException as error:
            self.results["note"] = f"{type(error).__name__}: {error}"
            if isinstance(error, FP8BackendError):
                self.results["note"] = str(error)
            elif isinstance(error, KeyboardInterrupt):
                self.results["note"] = f"interrupted by {error}"
            raise
        finally:
            stop(self.workers)
            if self.results["status"] == "running":
                self._end("terminated")
            self.save()

    def _write_settings(self) -> None:
        (self.folder / "settings.json").write_text(json.dumps(asdict(self.settings)))

    def hire(self, backend: str) -> Worker:
        """Start a worker for the turns of this backend, or of any where runs overlap."""
        return Worker(self.folder, self.settings.nproc, self.events, backend)

    def _runs(self) -> Iterator[tuple[str, int]]:
        """Yield seed by seed over all backends, so that finished seeds are comparable at any
        time."""
        settings = self.settings
        for seed in range(settings.seeds):
            if seed and settings.minutes is not None:
                end = self.elapsed + self.seconds_left(seed + 1)
                if end > 60 * SHARE_OF_TIME * settings.minutes:
                    self._take(replace(settings, seeds=seed))
                    asked = self.results["asked"]["seeds"]
                    self.results["note"] = (
                        f"{seed} of {counted(asked, 'seed')}: one more would not fit into the time "
                        "given"
                    )
                    return
            for backend in self.results["backends"]:
                if backend in self.living:
                    yield backend, seed

    def _take_turns(self, turns: Iterable[tuple[str, int]], progress: Log) -> None:
        """Hand out turns (backend, seed) in order, and record until all have ended."""
        turns = iter(turns)
        while True:
            busy = sum(worker.backend is not None for worker in self.workers)
            for backend, seed in itertools.islice(turns, max(0, self.at_once - busy)):
                progress.begun(backend, seed)
                self._idle_worker(backend).begin(self.settings, backend, seed)
                busy += 1
            if not busy:
                return
            self._record(progress)

    def _idle_worker(self, backend: str) -> Worker:
        for worker in self.workers:
            if worker.backend is None and (not self.takes_turns or worker.hired_for == backend):
                return worker
        self.workers.append(self.hire(backend))
        return self.workers[-1]

    def _record(self, progress: Log) -> None:
        """Record the next event of any worker. One that ends in a turn fails its backend."""
        worker, event = self.events.get()
        kind = event.pop("event")
        backend = worker.backend
        report = self.results["backends"].get(backend)  # none while it waits for a turn
        if kind == "ready":
            worker.loading -= 1
            worker.began = time.monotonic()
        elif kind == "step":
            worker.steps = event["step"]
            progress.step(backend, **event)
        elif kind == "failed":
            # the first rank's is the cause
            worker.message = worker.message or event["message"]
        elif kind == "ended":
            self.workers.remove(worker)
            if report:
                report |= {"status": "failed", "message": worker.message}
                progress.say(f"{backend} failed: {worker.message}")
                self.save()
        else:
            worker.rest()
            if kind == "inspected":
                resident = event["resident_bytes"] * self.settings.nproc
                self.run_bytes = max(self.run_bytes, resident)
                report["inspection"] = event
                seconds = event["step_seconds"]
                progress.say(f"{backend}: first steps observed; {seconds:.2g} s a step")
            else:
                event["seconds"] = time.monotonic() - worker.began
                if backend not in BASELINES and not self.results["fast_fp8"]:
                    event["emulated_tokens_per_second"] = event.pop("tokens_per_second")
                    event["tokens_per_second"] = None
                report["runs"] = sorted([*report["runs"], event], key=itemgetter("seed"))
                progress.run_finished(backend, event)
            self.save()

    def _end(self, status: str) -> None:
        self.results["status"] = status
        for report in self.results["backends"].values():
            if report["status"] == "running":
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
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_bf16_products": hardware.cpu_bf16(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return facts


# Workers


class Worker:
    """Train in another process, or in torchrun for several ranks, in turns given by standard
    input. Its events go to a queue, the last one is `ended`."""

    def __init__(self, folder: Path, ranks: int, events: queue.SimpleQueue, hired_for: str) -> None:
        self.ranks = ranks
        self.events = events
        self.hired_for = hired_for
        self.loading = ranks
        self.message = ""
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        self.rest()
        torchrun = ""
        if ranks > 1:
            torchrun = f"torch.distributed.run --standalone --nproc_per_node {ranks} -m"
        # in its own session, so that Ctrl-C reaches only this process, which then stops the worker
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                *torchrun.split(),
                "fp8_backends.tools.compare.training_run",
                str(folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=worker_environment(),
            start_new_session=True,
        )
        threading.Thread(target=self._read_events, daemon=True).start()

    def rest(self) -> None:
        self.backend: str | None = None
        self.steps = 0

    def begin(self, settings: Settings, backend: str, seed: int) -> None:
        self.backend = backend
        self.began = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # `_read_events` reports that it has ended
            permit = PERMIT % (settings.trained.index(backend), seed)
            os.write(self.process.stdin.fileno(), permit * self.ranks)

    def _read_events(self) -> None:
        with contextlib.suppress(json.JSONDecodeError):  # killed in the middle of a line
            for line in self.process.stdout:
                self.events.put((self, json.loads(line)))
        code = self.process.wait()
        self.errors.seek(0)
        last_lines = deque(filter(None, map(str.strip, self.errors)), maxlen=5)
        words = " / ".join(last_lines) or "no message"
        self.message = self.message or f"the worker ended with code {code}: {words}"
        self.events.put((self, {"event": "ended"}))


def stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        try:
            # torchrun forwards the signal to its ranks, and kills them after 30 s
            worker.process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            worker.process.kill()


def worker_environment() -> dict[str, str]:
    launched = ("ACCELERATE_", "FP8_BACKENDS_DISABLE", "FP8_BACKENDS_RECIPE")
    kept = environment_without(launched)
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def cores() -> int:
    """Return the number of cores that this process may use. Only Linux says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


FORWARD = 1 / 3
"""Time of a forward pass, and of evaluating as many windows, relative to a training step."""
FEWEST_STEPS = 20
"""Do not shorten a run below this, unless the user asks for fewer steps."""
WANTED_SEEDS = 3
"""Give up steps for this many seeds: fewer have no useful confidence interval."""
SHARE_OF_TIME = 0.9
"""Share of the given minutes to plan with, for slower runs, loading and ending."""


def fit(
    seconds: float, steps: int, seeds: int, needed: Callable[[int, int], float]
) -> tuple[int, int]:
    """Return the (steps, seeds) that fit into a time, at most as many as given; no seeds if not one
    fits.

    First give up seeds down to three, then steps down to `FEWEST_STEPS`, then the other seeds.
    `needed` maps (steps, seeds) to the seconds over all backends.
    """
    fewest = min(FEWEST_STEPS, steps)
    wanted = min(WANTED_SEEDS, seeds)
    while steps > fewest and needed(steps, wanted) > seconds:
        steps -= 1
    while seeds and needed(steps, seeds) > seconds:
        seeds -= 1
    return steps, seeds


def run_seconds(report: dict[str, Any], settings: Settings) -> float:
    """Estimate the seconds of a backend's run from timed steps, or from its finished runs."""
    if report["runs"]:
        return statistics.fmean(run["seconds"] for run in report["runs"])
    first = report["inspection"]
    return first["start_seconds"] + first["step_seconds"] * steps_with_evaluation(settings)


def steps_with_evaluation(settings: Settings) -> float:
    return settings.steps + FORWARD * settings.held_out_windows / settings.batch
