"""Runs a comparison: one worker process a backend, and after every run the results and the page on disk."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch

from . import summary
from .report_page import render
from .settings import BASELINES, REFERENCE, Settings, fast_fp8
from .training_text import TrainingText, load_text

RESULTS, PAGE = "results.json", "report.html"
_PACKAGES = ("fp8-backends", "torch", "accelerate", "torchao", "transformers", "transformer-engine")


class Progress(Protocol):
    """Who shows how far a comparison is."""

    def backend_started(self, backend: str) -> None: ...

    def step(self, backend: str, seed: int, step: int, loss: float | None) -> None: ...

    def run_finished(self, backend: str, run: dict[str, Any]) -> None: ...

    def backend_ended(self, backend: str, status: str, message: str) -> None: ...


class Comparison:
    """All backends one after another, on the same text, weights and order of data."""

    def __init__(self, settings: Settings, output: Path, fault: str | None = None) -> None:
        self.settings, self.output, self.fault = settings, output, fault
        self.worker: subprocess.Popen | None = None
        text = load_text(settings.text, settings.limit_mb, settings.tokenizer)
        text.held_out_windows(1, settings.sequence)  # too little text is an error now, not in every worker
        text.batches(1, 1, settings.sequence, 0)
        self.text = text
        self.results: dict[str, Any] = {
            "status": "running",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(settings.device),
            "versions": versions(),
            "fast_fp8": fast_fp8(settings.device),
            "settings": settings.to_dict(),
            "text": {"description": text.description, "sha256": text.sha256, "vocab_size": text.vocab_size},
            "backends": {
                name: {"status": "waiting", "message": "", "inspection": None, "runs": []}
                for name in (REFERENCE, *settings.backends)
            },
        }
        output.mkdir(parents=True, exist_ok=True)

    def run(self, progress: Progress) -> None:
        """Train every backend. Whatever ends this early leaves all finished runs on disk."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                settings_path, text_path = Path(folder, "settings.json"), Path(folder, "text.pt")
                settings_path.write_text(json.dumps(self.settings.to_dict()))
                torch.save({field.name: getattr(self.text, field.name) for field in fields(TrainingText)}, text_path)
                self.save()
                for backend in self.results["backends"]:
                    self._train(backend, [str(settings_path), str(text_path), backend], progress)
            self.results["status"] = "finished"
        finally:
            self._stop_worker()
            if self.results["status"] == "running":
                self.results["status"] = "terminated"
                for found in self.results["backends"].values():
                    if found["status"] in ("waiting", "running"):
                        found["status"] = "terminated"
            self.save()

    def _train(self, backend: str, arguments: list[str], progress: Progress) -> None:
        found = self.results["backends"][backend]
        found["status"] = "running"
        progress.backend_started(backend)
        for event in self._events(arguments):
            kind = event.pop("event")
            if kind == "step":
                progress.step(backend, **event)
            elif kind == "inspected":
                found["inspection"] = event
            elif kind == "run":
                found["runs"].append(self._with_honest_speed(backend, event))
                progress.run_finished(backend, event)
            elif kind == "failed":
                found["message"] = found["message"] or event["message"]  # of several ranks the first is the cause
            if kind != "step":
                self.save()
        code = self.worker.returncode if self.worker is not None else None
        complete = code == 0 and len(found["runs"]) == self.settings.seeds
        found["status"] = "finished" if complete else "failed"
        if not complete and not found["message"]:
            tail = " / ".join(self.last_words) or "no message"
            found["message"] = f"the worker ended with code {code}: {tail}"
        progress.backend_ended(backend, found["status"], found["message"])
        self.save()

    def _events(self, arguments: list[str]) -> Iterator[dict[str, Any]]:
        """What a worker reports, until it ends."""
        command = [*launcher(self.settings.nproc), "fp8_backends.cli.training_run", *arguments]
        command += [self.fault] if self.fault else []
        # a session of its own: Ctrl-C reaches this process alone, which then stops the worker
        self.worker = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=worker_environment(self.settings.nproc),
            start_new_session=True,
        )
        self.last_words: deque[str] = deque(maxlen=5)
        drain = threading.Thread(target=self._keep_last_words, args=(self.worker.stderr,), daemon=True)
        drain.start()
        for line in self.worker.stdout:
            yield json.loads(line)
        self.worker.wait()
        drain.join()

    def _keep_last_words(self, stream) -> None:
        for line in stream:
            if line.strip():
                self.last_words.append(line.strip())

    def _with_honest_speed(self, backend: str, run: dict[str, Any]) -> dict[str, Any]:
        """Without FP8 products in the chip, FP8's speed goes under a name that says so."""
        if backend not in BASELINES and not self.results["fast_fp8"]:
            run["emulated_tokens_per_second"] = run.pop("tokens_per_second")
            run["tokens_per_second"] = None
        return run

    def _stop_worker(self) -> None:
        if self.worker is not None and self.worker.poll() is None:
            self.worker.terminate()
            try:
                # torchrun passes the signal on to its ranks, and after 30 s ends those that do not obey
                self.worker.wait(timeout=5 if self.settings.nproc == 1 else 40)
            except subprocess.TimeoutExpired:
                self.worker.kill()

    def save(self) -> None:
        """Results, then the page, each replaced as a whole so that a reader never sees half of one."""
        self.results["summary"] = {
            "rows": [{**asdict(row), "gap": _gap(row)} for row in summary.rows(self.results)],
            "reference_spread": summary.reference_spread(self.results),
            "checks": {name: [asdict(check) for check in done] for name, done in self.checks().items()},
        }
        write_atomically(self.output / RESULTS, json.dumps(_without_nan(self.results), indent=1))
        write_atomically(self.output / PAGE, render(self.results))

    def checks(self) -> dict[str, list[summary.Check]]:
        return summary.all_checks(self.results)

    @property
    def passed(self) -> bool:
        return all(check.passed for done in self.checks().values() for check in done)


def _gap(row: summary.Row) -> dict[str, Any] | None:
    gap = row.gap
    return gap and {**asdict(gap), "low": gap.low, "high": gap.high, "verdict": gap.verdict()}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def write_atomically(path: Path, content: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(content, encoding="utf-8")
    os.replace(new, path)


def launcher(ranks: int) -> list[str]:
    """What runs a module on so many ranks of this machine."""
    if ranks == 1:
        return [sys.executable, "-m"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*torchrun, "-m"]


def worker_environment(ranks: int = 1) -> dict[str, str]:
    """This process's, without what would steer Accelerate from outside."""
    steering = ("ACCELERATE_", "FP8_BACKENDS_DISABLE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    if ranks > 1:
        kept.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    found: dict[str, Any] = {
        "device": device,
        "processor": _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
    return found


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
