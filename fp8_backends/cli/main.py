"""The command `fp8-backends`, also `python -m fp8_backends`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import FP8BackendError

COMMANDS = {
    "launch": ".launch",
    "config": ".config.command",
    "doctor": ".doctor.command",
    "estimate": ".estimate.command",
    "chart": ".chart",
    "compare": ".compare.command",
}
"""The module of each, with SUMMARY, add_arguments(parser) and run(args) -> exit code; PARSER: options of
its parser."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; 2 with one message on stderr for what cannot be done as asked."""
    parser = argparse.ArgumentParser(
        prog="fp8-backends", description="FP8 training backends by name for Hugging Face Accelerate."
    )
    parser.add_argument("--version", action="version", version=f"fp8-backends {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    modules = {}
    for name in COMMANDS:
        modules[name] = importlib.import_module(COMMANDS[name], __package__)
        options = getattr(modules[name], "PARSER", {})
        modules[name].add_arguments(subparsers.add_parser(name, help=modules[name].SUMMARY, **options))
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return modules[args.command].run(args)
    except FP8BackendError as error:
        print(f"fp8-backends {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
