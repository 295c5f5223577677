"""`fp8-backends compare`: train a small model with bf16 and each FP8 backend side by side; measure cost and gain."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterable
from pathlib import Path

import torch

from ...compute import hardware
from ...errors import BackendUnavailableError, RecipeError
from . import settings as defaults
from .paired_gaps import LOSS_GAP_BOUND
from .settings import BASELINES, REFERENCES, Settings
from .timing import FEWEST_STEPS, WANTED_SEEDS

SUMMARY = "train a small model with bf16 and FP8 backends side by side; table, results.json and report.html"

_DESCRIPTION = """\
Trains a causal language model from random weights on real text, in bf16 (the reference; FP32 on a CPU without bf16
products) and with every backend, each with the same initial weights and order of data, and reports losses, paired gaps
with their 95 % intervals, memory and speed. It goes seed by seed over all backends, and says how long it will take once
each has done its first steps. Exits with 1 when a check fails, and with 2 when something asked for cannot be done."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    default = ",".join(Settings.backends)
    add = parser.add_argument
    add(
        "--backends",
        default=default,
        metavar="A,B,…",
        help=f"backend strings, and of {', '.join(BASELINES)} ({default})",
    )
    add(
        "--reference",
        choices=REFERENCES,
        help="what backends are compared with, and compute in around FP8 (bf16; fp32 on a CPU without bf16 products)",
    )
    add("--text", metavar="PATH", help="a text file or a folder of them (the Python standard library's sources)")
    add("--megabytes", type=_positive(float), default=8.0, metavar="N", help="read at most this much text (8)")
    add("--tokenizer", type=_positive(int), metavar="N", help="train a byte-level BPE of N tokens (one token a byte)")
    add(
        "--model",
        metavar="CONFIG",
        help="a transformers config.json or its folder (a small Llama; on a GPU with FP8, 1B)",
    )
    add("--steps", type=_positive(int), metavar="N", help="training steps (80; on a GPU with FP8, 60)")
    add("--seeds", type=_positive(int), metavar="N", help="runs of each backend (5; on a GPU with FP8, 3)")
    add(
        "--minutes",
        type=_positive(float),
        metavar="M",
        help="fit the whole command into so many minutes: --steps and --seeds are then upper bounds, and steps are "
        f"given up (not below {FEWEST_STEPS}) for {WANTED_SEEDS} seeds (no limit)",
    )
    add("--batch", type=_positive(int), metavar="N", help="sequences in a batch (8; on a GPU with FP8, 2)")
    add("--sequence", type=_positive(int), metavar="N", help="tokens in a sequence (128; on a GPU with FP8, 4096)")
    add(
        "--held_out",
        type=_positive(float),
        default=Settings.held_out_share,
        metavar="X",
        help=f"held-out windows as a share of the windows trained on ({Settings.held_out_share})",
    )
    add(
        "--lr",
        type=_positive(float),
        metavar="X",
        help="highest learning rate, decayed to zero (1e-3; on a GPU with FP8, 3e-4)",
    )
    add(
        "--nproc",
        type=_positive(int),
        default=1,
        metavar="N",
        help="train on N ranks with DDP, over gloo on a CPU and NCCL on GPUs; they share each batch (1)",
    )
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile the model (only on a GPU with FP8)")
    add("--output", type=Path, default=Path("fp8_compare"), metavar="DIR", help="where to write (./fp8_compare)")
    add("--plant", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the comparison; 0 when every check passed, 1 when one failed, 128 + the signal when terminated."""
    from .comparison import Comparison
    from .output import announce, conclude, progress_display

    settings = settings_from(args)
    _check_plant(args.plant)
    comparison: Comparison | None = None
    received: list[int] = []

    def terminate(number, frame) -> None:
        received.append(number)
        if len(received) == 1:  # an impatient second must not keep the results from disk
            raise KeyboardInterrupt

    before = {number: signal.signal(number, terminate) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        announce(settings)
        settings.backends = backend_names(settings.backends, settings.reference)
        comparison = Comparison(settings, args.output, args.plant)
        with progress_display(comparison) as progress:
            comparison.run(progress)
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if comparison is not None:
        conclude(comparison)
    if received:
        return 128 + received[0]
    return 0 if comparison.passed else 1


def settings_from(args: argparse.Namespace) -> Settings:
    """Every setting in place; the backends as they were written, because to resolve them takes seconds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = defaults.defaults(defaults.fast_fp8(device))
    given = {name: getattr(args, name) for name in ("steps", "seeds", "batch", "sequence", "lr", "compile")}
    values |= {name: value for name, value in given.items() if value is not None}
    check_ranks(args.nproc, values["batch"], device)
    reference = args.reference or hardware.fast_precision(device)
    return Settings(
        backends=tuple(filter(None, (word.strip() for word in args.backends.split(",")))),
        reference=reference,
        text=args.text,
        limit_mb=args.megabytes,
        tokenizer=args.tokenizer,
        model=args.model,
        held_out_share=args.held_out,
        minutes=args.minutes,
        loss_gap_bound=LOSS_GAP_BOUND,
        device=device,
        nproc=args.nproc,
        **values,
    )


def check_ranks(ranks: int, batch: int, device: str) -> None:
    """Raise for a number of ranks that the batch or the machine cannot serve."""
    if batch % ranks:
        raise RecipeError(
            f"--nproc {ranks}: a batch of {batch} sequences cannot be shared evenly among {ranks} ranks; "
            f"set --batch to a multiple of {ranks}"
        )
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise BackendUnavailableError(
            f"--nproc {ranks}: this machine has {torch.cuda.device_count()} GPUs, and each rank needs one; "
            "CUDA_VISIBLE_DEVICES= trains on the CPU"
        )
    if ranks > 1 and not torch.distributed.is_available():
        raise BackendUnavailableError(f"--nproc {ranks}: this build of torch {torch.__version__} has no distributed")


def backend_names(words: Iterable[str], reference: str) -> tuple[str, ...]:
    """Canonical names, without repetitions and without the reference, which is always there.

    Raises `RecipeError` for a backend string that is not valid, `BackendUnavailableError` for one that cannot run here.
    """
    from ...compute.registry import check_available
    from ...recipes.handlers import resolve

    names: dict[str, None] = {}
    for word in words:
        if word.lower() in BASELINES:
            names[word.lower()] = None
            continue
        recipe = resolve(word)
        check_available(recipe)
        names[recipe.name] = None
    names.pop(reference, None)
    return tuple(names)


def _check_plant(plant: str | None) -> None:
    from .planted_faults import PLANTS

    if plant is not None and plant not in PLANTS:
        raise RecipeError(f"--plant {plant!r}: one of {', '.join(PLANTS)}")


def _positive(kind: type):
    def parse(text: str):
        value = kind(text)
        if not value > 0 or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: must be above zero")
        return value

    parse.__name__ = kind.__name__
    return parse
