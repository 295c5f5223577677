"""`fp8-backends launch`: train a script as it is, in FP8, with any of Accelerate's launchers."""

from __future__ import annotations

import argparse

from ..accelerate_plugin import launch

PARSER = {"prefix_chars": "\0", "add_help": False}
"""Every word goes to Accelerate's parser, whatever it begins with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def run(args: argparse.Namespace) -> int:
    return launch.run(args.arguments)
