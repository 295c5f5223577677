"""`fp8-backends compare`: train a small model with bf16 and each FP8 backend side by side; measure
cost and gain."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import torch

from ...compute import hardware
from ...compute.registry import check_available
from ...errors import BackendUnavailableError, RecipeError
from ...recipes.handlers import resolve
from ...recipes.strings import names_file
from ..terminal import (
    Progress,
    add_feature_flags,
    duration,
    features_of,
    paragraphs,
    positive_int,
    positive_number,
    table,
    wrapped,
)
from . import summary
from .comparison import FEWEST_STEPS, PAGE, RESULTS, WANTED_SEEDS, Comparison, Log
from .workload import BASELINES, REFERENCES, Settings, defaults, fast_fp8

_DESCRIPTION = """\
Trains a language model from random weights on real text, in bf16 (the reference; FP32 on a CPU without bf16
products) and with every backend, each with the same initial weights and order of data, and reports losses, paired gaps
with their 95 % intervals, memory and speed. It goes seed by seed over all backends, and says how long it will take once
each has done its first steps. Exits with 1 when a check fails, and with 2 when something asked for cannot be done. A
check that so few seeds and steps do not resolve is named, and has neither passed nor failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    default = ",".join(Settings.backends)
    reference = "what backends are compared with, and compute in around FP8 (bf16; fp32 on a CPU without bf16 products)"
    model = "a transformers config.json or its folder, causal or masked (a small Llama; on a GPU with FP8, 1B)"
    minutes = (
        "fit the whole command into so many minutes: --steps and --seeds are then upper bounds, "
        f"and steps are given up (not below {FEWEST_STEPS}) for {WANTED_SEEDS} seeds (no limit)"
    )
    held_out = f"held-out windows as a share of the windows trained on ({Settings.held_out_share})"
    nproc = (
        "train on N ranks with DDP, over gloo on a CPU and NCCL on GPUs; they share each batch (1)"
    )
    add = parser.add_argument
    backends = f"backend strings, and of {', '.join(BASELINES)} ({default})"
    add("--backends", default=default, metavar="A,B,…", help=backends)
    add("--reference", choices=REFERENCES, help=reference)
    add(
        "--text",
        metavar="PATH",
        help="a text file or a folder of them (the Python standard library's sources)",
    )
    add("--model", metavar="CONFIG", help=model)
    add(
        "--megabytes",
        dest="limit_mb",
        type=positive_number,
        default=Settings.limit_mb,
        metavar="N",
        help="read at most this much text (8)",
    )
    add(
        "--steps", type=positive_int, metavar="N", help="training steps (80; on a GPU with FP8, 60)"
    )
    add(
        "--seeds",
        type=positive_int,
        metavar="N",
        help="runs of each backend (5; on a GPU with FP8, 3)",
    )
    add("--minutes", type=positive_number, metavar="M", help=minutes)
    add(
        "--batch",
        type=positive_int,
        metavar="N",
        help="sequences in a batch (8; on a GPU with FP8, 2)",
    )
    add(
        "--sequence",
        type=positive_int,
        metavar="N",
        help="tokens in a sequence (128; on a GPU with FP8, 4096)",
    )
    add(
        "--held_out",
        dest="held_out_share",
        type=positive_number,
        default=Settings.held_out_share,
        metavar="X",
        help=held_out,
    )
    add(
        "--lr",
        type=positive_number,
        metavar="X",
        help="highest learning rate, decayed to zero (1e-3; on a GPU with FP8, 3e-4)",
    )
    add("--nproc", type=positive_int, default=1, metavar="N", help=nproc)
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile the model (only on a GPU with FP8)",
    )
    add_feature_flags(parser)
    add(
        "--output",
        type=Path,
        default=Path("fp8_compare"),
        metavar="DIR",
        help="where to write (./fp8_compare)",
    )
    add("--json", action="store_true", help=f"print {RESULTS}, and the report to standard error")


def run(args: argparse.Namespace) -> int:
    """Run the comparison; return 1 if a check failed, 128 + the signal if terminated, else 0."""
    settings = settings_from(args)
    comparison: Comparison | None = None
    received: list[int] = []

    def terminate(number, frame) -> None:
        received.append(number)
        if len(received) == 1:  # an impatient second signal must not prevent writing the results
            raise KeyboardInterrupt(signal.Signals(number).name)

    before = {
        number: signal.signal(number, terminate) for number in (signal.SIGTERM, signal.SIGINT)
    }
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        try:
            announce(settings)
            settings.backends = backend_names(settings.backends, settings.reference)
            comparison = Comparison(settings, args.output)
            introduce(comparison)
            with Progress("comparing") as display:
                comparison.run(Log(display))
        except KeyboardInterrupt:
            pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if comparison is not None:
            conclude(comparison)
    if args.json and comparison is not None:
        print((comparison.output / RESULTS).read_text())
    if received:
        return 128 + received[0]
    return 1 if comparison.failed else 0


def settings_from(args: argparse.Namespace) -> Settings:
    """Return the settings; `run` resolves the backends later, after the first line, because that
    takes seconds."""
    device = hardware.device()
    names = {field.name for field in fields(Settings)}
    given = {name: value for name, value in vars(args).items() if name in names}
    values = defaults(fast_fp8(device)) | {
        name: value for name, value in given.items() if value is not None
    }
    check_ranks(args.nproc, values["batch"], device)
    values["backends"] = tuple(filter(None, map(str.strip, args.backends.split(","))))
    values.setdefault("reference", hardware.fast_precision(device))
    return Settings(
        **values,
        loss_gap_bound=summary.LOSS_GAP_BOUND,
        device=device,
        features=features_of(args),
    )


def check_ranks(ranks: int, batch: int, device: str) -> None:
    """Raise if the batch or the machine does not suit this number of ranks."""
    if batch % ranks:
        raise RecipeError(
            f"--nproc {ranks}: a batch of {batch} sequences cannot be shared evenly among {ranks} "
            f"ranks; set --batch to a multiple of {ranks}"
        )
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise BackendUnavailableError(
            f"--nproc {ranks}: this machine has {torch.cuda.device_count()} GPUs, and each rank "
            "needs one; CUDA_VISIBLE_DEVICES= trains on the CPU"
        )


def backend_names(words: Iterable[str], reference: str) -> tuple[str, ...]:
    """Return canonical names, and files, without repetitions and the reference. Raises for invalid
    or unavailable backends, and for one that names another precision around FP8."""
    names: dict[str, None] = {}
    for word in words:
        if word.lower() in BASELINES:
            names[word.lower()] = None
            continue
        recipe = resolve({"backend": word})
        check_available(recipe)
        if "autocast_dtype" in recipe.given and recipe.autocast_dtype != reference:
            raise RecipeError(
                f"{word} has autocast_dtype={recipe.autocast_dtype!r}, and this comparison runs "
                f"{reference} around FP8: choose the same by --reference (bf16 or fp32), or leave "
                "the field out of the file"
            )
        names[word if names_file(word) else recipe.name] = None
    names.pop(reference, None)
    return tuple(names)


_MARKS = {True: "ok", False: "FAIL", None: "?"}


def announce(settings: Settings) -> None:
    """Print the known facts before anything is loaded."""
    backends = ", ".join(name for name in settings.backends if name != settings.reference)
    limit = ""
    if settings.minutes is not None:
        limit = f", or what of it fits into {settings.minutes:g} min"
    text = (
        f"fp8-backends compare: {backends or 'no backend'} against {settings.reference} on "
        f"{'a GPU' if settings.device == 'cuda' else 'the CPU'}; {settings.reference} around FP8; "
        f"{summary.runs_text(settings.seeds, settings.steps)} of {settings.batch} × "
        f"{settings.sequence} tokens{limit}"
    )
    print(wrapped(text), flush=True)


def introduce(comparison: Comparison) -> None:
    results = comparison.results
    parts = (
        f"{results['task']} on {results['text']['description']}",
        summary.held_out_text(results),
    )
    print(wrapped("; ".join(filter(None, (*parts, summary.ranks_text(results))))), flush=True)


def conclude(comparison: Comparison) -> None:
    """Print the table, the verdict, the reference's own spread, the checks and the paths of the
    results."""
    results = comparison.results
    headings = summary.columns(results)
    rows = summary.rows(results)
    cells = [[summary.cell(row, key) for key in headings] for row in rows]
    notes = [(row.backend, row.note) for row in rows]
    if any(row.emulated for row in rows):
        about = "this chip has no FP8 products, so FP8's speed cannot be measured; losses and memory are real"
        notes.append(("emulated", about))
    if speeds := summary.threads_text(results):
        notes.append(("tokens/s", speeds))
    parts = [
        table([list(headings.values()), *cells]),
        paragraphs(notes),
        str(summary.verdict(results)),
        wrapped(summary.spread_line(results)),
    ]
    for backend, made in summary.checks(results).items():
        lines = [(_MARKS[check.passed], f"{check.name} ({check.detail})") for check in made]
        if lines:
            parts.append(f"{backend}:\n{paragraphs(lines, 4)}")
    if results["status"] == "finished" and results["note"]:
        parts.append(wrapped(results["note"]))
    places = f"{comparison.output / RESULTS}\n{comparison.output / PAGE}"
    parts.append(f"took {duration(results['seconds'])}\n{places}")
    print("\n" + "\n\n".join(parts), flush=True)
