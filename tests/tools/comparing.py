"""A comparison small enough for a test, in this process."""

from __future__ import annotations

import copy
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from fp8_backends.tools.compare.comparison import Comparison, Worker
from fp8_backends.tools.compare.summary import checks
from fp8_backends.tools.compare.training_run import Run, take_turn
from fp8_backends.tools.compare.workload import Settings

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
RECORD = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "comparison_cpu_avx2.json").read_text()
)
"""A comparison with FP32 by the default settings, of five seeds: all 26 checks passed."""


def recorded(*backends: str) -> dict[str, Any]:
    """Return the record of FP32 and these backends, to change."""
    results = copy.deepcopy(RECORD)
    results["backends"] = {name: results["backends"][name] for name in ("fp32", *backends)}
    return results


WORDS = "the quick brown fox jumps over the lazy dog and runs on through the wood until it finds a stream to drink"


def write_text(folder: Path, files: int = 20) -> Path:
    """Write a folder of small, different text files."""
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
        "held_out_share": 0.3,
        "reference": "bf16",
        "compile": False,
        "loss_gap_bound": 0.01,
        "device": "cpu",
    }
    return Settings(**{**values, **changes})


class InProcessWorker(Worker):
    """Takes its turns in this process."""

    def __init__(self, comparison: Comparison) -> None:
        self.text, self.events = comparison.text, comparison.events
        self.loading, self.message, self.process = 0, "", mock.Mock()
        self.rest()

    def begin(self, settings, backend, seed):
        self.backend, self.began = backend, time.monotonic()
        take_turn(settings, self.text, backend, seed, self.report)

    def report(self, event, **values):
        self.events.put((self, json.loads(json.dumps({"event": event, **values}))))


class InProcess(Comparison):
    """Trains in this process instead of in workers."""

    def hire(self, backend):
        return InProcessWorker(self)


class Silent:
    """Print nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def compared(folder: Path, *backends: str, **changes) -> Comparison:
    comparison = InProcess(tiny_settings(folder, *backends, **changes), folder / "out")
    comparison.run(Silent())
    return comparison


def planted(fault: str, folder: Path, *backends: str, **changes) -> Comparison:
    """Compare while the first Linear of every model in FP8 is broken after `prepare`."""
    made = Run.__init__

    def broken(self, settings, text, backend, *args, **kwargs):
        made(self, settings, text, backend, *args, **kwargs)
        if backend in settings.backends:
            weight = next(
                module for module in self.bare.modules() if isinstance(module, nn.Linear)
            ).weight
            PLANTS[fault](weight, self.optimizer)

    with mock.patch.object(Run, "__init__", broken):
        return compared(folder, *backends, **changes)


def freeze(weight: nn.Parameter, optimizer) -> None:
    """Hide a weight from the optimizer, like a conversion with a new Parameter."""
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not weight]


PLANTS = {"frozen": freeze, "flipped-wgrad": lambda weight, _: weight.register_hook(torch.neg)}


def checks_by_name(comparison: Comparison, backend: str) -> dict[str, bool | None]:
    return {check.name: check.passed for check in checks(comparison.results)[backend]}


class _Tags(HTMLParser):
    """Check that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(html: str) -> None:
    """Check a page: one well-formed file without scripts and outside references."""
    tags = _Tags()
    tags.feed(html)
    assert not tags.open
    assert not re.search(r"<script|src=|href=|url\(|@import|https?://", html)
