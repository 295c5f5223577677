"""`fp8-backends examples`: list or copy training scripts in FP8, ready to run, also without a
GPU."""

import argparse
import ast
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from ..compute.fields import closest
from ..errors import FP8BackendError
from ..words import shortened, shown
from .terminal import paragraphs

FOLDER = Path(__file__).parents[1] / "examples"


class Example(NamedTuple):
    """A script in the folder, with the purpose and the start command from its docstring."""

    script: Path
    shows: str
    start: str


def examples() -> dict[str, Example]:
    by_name = {}
    for script in sorted(FOLDER.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
        shows, start, *_ = docstring.split("\n\n")
        by_name[script.stem] = Example(script, " ".join(shows.split()), start.strip())
    return by_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists training scripts in FP8, or copies one. Each runs without a GPU, some with --tiny."
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="copy this one (without it: list them all)"
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        type=Path,
        default=Path(),
        help="a folder, or a new file (default: here)",
    )


def run(args: argparse.Namespace) -> int:
    known = examples()
    if args.name is None:
        rows = [
            row
            for name, example in known.items()
            for row in ((name, example.shows), ("", example.start))
        ]
        print(f"{paragraphs(rows)}\n\nfp8-backends examples NAME copies one into this folder.")
        return 0
    name = args.name.removesuffix(".py")
    if name not in known:
        raise FP8BackendError(
            f"no example is named {shown(name)}{closest(name, known)}; there are {', '.join(known)}"
        )
    script = known[name].script
    path = args.target / script.name if os.path.isdir(args.target) else args.target
    if path.suffix != ".py":
        raise FP8BackendError(
            f"{shortened(str(path))} is no folder, and a script's name ends in .py: give one of "
            "both"
        )
    try:
        with path.open("xb") as new:
            new.write(script.read_bytes())
    except FileExistsError:
        raise FP8BackendError(
            f"{path} exists already, and stays as it is: give another file or folder, as in "
            f"fp8-backends examples {name} my_{script.name}"
        ) from None
    except OSError as error:
        raise FP8BackendError(
            f"{shortened(str(path))} cannot be written: {error.strerror}"
        ) from error
    start = known[name].start.replace(script.name, shlex.quote(str(path)))
    print(f"copied to {path}; start it with\n\n    {start}")
    if "--model" in start:
        print(
            "\nTry it with --tiny in place of model and data: random weights, without a GPU or a "
            "network."
        )
    return 0
