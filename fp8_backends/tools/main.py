"""Run the command `fp8-backends`, also `python -m fp8_backends`."""

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..compute import hardware
from ..compute.fields import closest
from ..errors import FP8BackendError
from ..words import shortened, shown
from .completion import SHELLS, completion_script

COMMANDS = {
    "examples": (
        ".examples",
        "training scripts in FP8, listed or copied: each runs as it is, also without a GPU",
    ),
    "launch": (
        "..accelerate_plugin.launch",
        "run a training script, unmodified, in FP8: takes everything that accelerate launch takes",
    ),
    "config": (
        ".config",
        "what a configuration file of Accelerate or Axolotl means, checked, and written for "
        "Accelerate",
    ),
    "doctor": (".doctor", "which backends run on this machine, proven by a test, and why not"),
    "estimate": (
        ".estimate.command",
        "memory and traffic of training a model, by backend and sharding",
    ),
    "chart": (".chart", "precision and bytes of every level, measured on small prepared models"),
    "compare": (
        ".compare.command",
        "train a small model with bf16 and FP8 backends side by side; table, results.json and "
        "report.html",
    ),
    "monitor": (
        ".monitor",
        "which layers of a training lose most by FP8, from what monitor_every has written; table "
        "and page",
    ),
    "advise": (
        ".advise",
        "the mildest change of a recipe that halves the error of its gradients, measured on a "
        "model",
    ),
    "checkpoint": (
        ".checkpoint",
        "which checkpoints are whole, and which file is at fault in the others",
    ),
    "convert": (
        ".convert",
        "rewrite FP8 and 4-bit checkpoints as bf16 or FP8, file by file, on a CPU",
    ),
}
"""Module and purpose of each command. The module has `add_arguments(parser)` and `run(args) -> exit
code`, and is imported only to run its command; `run` of `launch` takes the words."""


class _Parser(argparse.ArgumentParser):
    """Shorten long words in errors."""

    def error(self, message: str) -> NoReturn:
        super().error(shortened(message, 1000))


def _with_sleeping_threads() -> None:
    """Start this program again, on a CPU: OpenMP's threads then sleep while they wait for one that
    another process keeps from its core, and not in a loop. OpenMP reads the variable once, when
    torch loads it."""
    if hardware.device() == "cpu" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 2 with a message on stderr for a user's error, 130
    for Ctrl-C."""
    is_program = argv is None
    argv = list(sys.argv[1:] if is_program else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a file of the parent process that has become a pipe keeps its errors
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="replace")
    parser = _Parser(
        prog="fp8-backends",
        description="FP8 training backends by name for Hugging Face Accelerate.",
    )
    parser.add_argument("--version", action="version", version=f"fp8-backends {__version__}")
    parser.add_argument(
        "--print-completion",
        choices=SHELLS,
        help="print the script that completes words in this shell",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-") and word not in SHELLS), None)
    if chosen == "advise" and is_program:
        _with_sleeping_threads()
    if chosen not in (None, *COMMANDS):
        parser.error(
            f"unknown command {shown(chosen)}{closest(chosen, COMMANDS)}; known are "
            f"{', '.join(COMMANDS)}"
        )
    for name, (module_name, purpose) in COMMANDS.items():
        if name != chosen:
            subparsers.add_parser(name, help=purpose)
            continue
        module = importlib.import_module(module_name, __package__)
        if chosen == "launch":  # Accelerate's own parser reads every word, whatever it begins with
            of_command = subparsers.add_parser(
                name, help=purpose, prefix_chars="\0", add_help=False
            )
            of_command.add_argument("words", nargs=argparse.REMAINDER)
        else:
            of_command = subparsers.add_parser(name, help=purpose)
            module.add_arguments(of_command)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        at_fault = parser if args.command is None else of_command
        options = {**parser._option_string_actions, **at_fault._option_string_actions}
        at_fault.error(
            "unrecognized arguments: "
            f"{' '.join(unknown)}{closest(unknown[0].partition('=')[0], options)}"
        )
    if args.command is None and args.print_completion is None:
        parser.print_help()
        return 0
    try:
        if args.print_completion is not None:
            print(completion_script(COMMANDS, args.print_completion))
            return 0
        return module.run(args.words if chosen == "launch" else args)
    except FP8BackendError as error:
        print(f"{' '.join(filter(None, ('fp8-backends', args.command)))}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fp8-backends {args.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
