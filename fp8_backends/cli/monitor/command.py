"""`fp8-backends monitor`: which layers lose most by FP8, from the file of a training with `monitor_every`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

from ...errors import FP8BackendError
from ...training.watching.monitor import summary
from ...words import counted, shortened
from ..terminal import WIDTH, paragraphs, table, width
from .findings import findings, remarks
from .page import render
from .samples import CAST_COLUMNS, STORED_COLUMNS, Samples, cells, read_samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads the statistics that a training with monitor_every=N adds to a file, also while it runs: which layers "
        "lose most by their casts to FP8, in the last sample and over the run."
    )
    parser.add_argument("file", nargs="?", default="fp8_monitor.jsonl", help="what to read (./fp8_monitor.jsonl)")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write a page for a browser too, such as monitor.html")
    parser.add_argument("--json", action="store_true", help="print JSON: every sample's summary, and all tensors")
    parser.add_argument("--worst", type=int, default=12, metavar="N", help="how many tensors the tables show (12)")


def run(args: argparse.Namespace) -> int:
    samples = read_samples(args.file)
    print(json.dumps(as_json(samples), indent=1) if args.json else in_words(samples, max(args.worst, 1)))
    if args.out is not None:
        try:
            args.out.write_text(render(samples), encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FP8BackendError(f"--out {shortened(str(args.out))} cannot be written: {reason}") from None
        print(f"\n{args.out}", file=sys.stderr if args.json else sys.stdout)
    return 0


def as_json(samples: Samples) -> dict[str, Any]:
    """Return the findings, the summary of each sample and the last entry of each tensor; None for NaN."""
    summaries = [{"step": record["step"], **summary(record)} for record in samples.records]
    tensors = [{"layer": each.layer, "tensor": each.name, "lost_db": each.lost_db} for each in samples.tensors]
    return {
        "file": str(samples.path),
        "recipe": samples.last["recipe"],
        "steps": samples.steps,
        **findings(samples)._asdict(),
        "not_finite": [{"step": step, "tensors": labels} for step, labels in samples.not_finite.items()],
        "samples": [{key: None if number != number else number for key, number in each.items()} for each in summaries],
        "tensors": [each | tensor.last for each, tensor in zip(tensors, samples.tensors, strict=True)],
        "not_seen": samples.last["not_seen"],
        "unreadable_lines": samples.unreadable,
    }


def in_words(samples: Samples, worst: int) -> str:
    """Say what the file holds: findings, the worst tensors, remarks."""
    first, last = samples.steps[0], samples.steps[-1]
    head = f"{samples.last['recipe']}: {counted(len(samples.records), 'sample')}, steps {first} to {last}"
    found = findings(samples)
    lines = [fill(each, min(WIDTH, width()), break_on_hyphens=False) for each in (found.headline, *found.details)]
    parts = [head, "\n".join(lines)]
    for columns, tensors in ((CAST_COLUMNS, samples.casts), (STORED_COLUMNS, samples.stored)):
        if tensors:
            rows = [list(columns), *map(cells, tensors[:worst])]
            parts.append(table([row[:-2] for row in rows]))  # amaxes and scales are on the page
        if len(tensors) > worst:
            parts.append(f"the worst {worst} of {len(tensors)}")
    return "\n\n".join([*parts, paragraphs(remarks(samples))])
