"""A comparison small enough for a test, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from fp8_backends.cli.comparison import Comparison
from fp8_backends.cli.settings import Settings
from fp8_backends.cli.training_run import train_backend

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = "the quick brown fox jumps over the lazy dog and runs on through the wood until it finds a stream to drink"


def write_text(folder: Path, files: int = 20) -> Path:
    """A folder of small text files that differ from one another."""
    folder.mkdir(parents=True, exist_ok=True)
    words = WORDS.split()
    for number in range(files):
        chosen = [words[(7 * number + 3 * k * k) % len(words)] for k in range(120)]
        (folder / f"{number:02}.txt").write_text(" ".join(chosen))
    return folder


def tiny_settings(folder: Path, *backends: str, **changes) -> Settings:
    values = {
        "backends": backends,
        "text": str(write_text(folder / "text")),
        "shape": TINY,
        "steps": 6,
        "seeds": 2,
        "batch": 2,
        "sequence": 32,
        "lr": 1e-3,
        "held_out_windows": 4,
        "compile": False,
        "loss_gap_bound": 0.01,
        "device": "cpu",
    }
    return Settings(**{**values, **changes})


class InProcess(Comparison):
    """Trains in this process instead of in workers."""

    def _events(self, arguments):
        events = []
        train_backend(
            self.settings,
            self.text,
            arguments[-1],
            lambda event, **values: events.append(json.loads(json.dumps({"event": event, **values}))),
            self.fault,
        )
        self.worker = SimpleNamespace(returncode=0, poll=lambda: 0)
        return events


class Silent:
    """A progress display that shows nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def compared(folder: Path, *backends: str, fault: str | None = None, **changes) -> Comparison:
    comparison = InProcess(tiny_settings(folder, *backends, **changes), folder / "out", fault)
    comparison.run(Silent())
    return comparison


def checks_by_name(comparison: Comparison, backend: str) -> dict[str, bool]:
    return {check.name: check.passed for check in comparison.checks()[backend]}
