"""Run the tests in the environments of `matrix.json`, one after another:

    python tests/compatibility/run.py ["oldest torch" pinned …] [-- PYTEST ARGUMENTS]

Paths among pytest's arguments replace the tests of an entry. The tests of the code for a GPU
(`tests/ahead`) run in each environment with PyTorch's build for CUDA.

Each entry names a version of Python and pins some packages; all others come from
`tests/constraints.txt`. pip takes the newest version of a package listed without one. An entry may
name its `extras`, and the `tests` to run with only these. Entries without their Python or packages
on this machine are reported as not run: exit code 2, or 1 after a failure. The workflow for a CI
host (`.github/workflows/compatibility.yml`) reads the same file and calls this with one entry.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MATRIX = Path(__file__).with_name("matrix.json")


class Result(NamedTuple):
    """Hold the outcome of one entry."""

    name: str
    python: str
    versions: str
    outcome: str
    """The last line of pytest, or why nothing ran."""
    status: int
    """Exit code of pytest; -1 if nothing ran."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    entries = json.loads(MATRIX.read_text())
    parser.add_argument(
        "names", nargs="*", metavar="ENTRY", help=f"of {', '.join(entries)}; all without one"
    )
    own, pytest_arguments = _split(sys.argv[1:])
    names = parser.parse_args(own).names or list(entries)
    if unknown := sorted(set(names) - set(entries)):
        parser.error(
            f"{', '.join(unknown)}: no entry of {MATRIX.name}, which has {', '.join(entries)}"
        )
    results = [run(name, entries[name], pytest_arguments) for name in names]
    for result in results:
        print(f"{result.name:13} Python {result.python:5} {result.versions:60} {result.outcome}")
    if any(result.status > 0 for result in results):
        return 1
    return 2 if any(result.status < 0 for result in results) else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of this command, and those after `--`, for pytest."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :] or ["-n", "2", "--dist", "worksteal"]


def run(name: str, entry: dict, pytest_arguments: list[str]) -> Result:
    """Make the environment of one entry, run the tests in it, and remove it."""
    python = shutil.which(f"python{entry['python']}")
    if python is None:
        return Result(
            name, entry["python"], "", f"not run: there is no python{entry['python']} here", -1
        )
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text(constraints_of(entry["packages"]))
        subprocess.run([python, "-m", "venv", Path(folder, "venv")], check=True)
        python = str(Path(folder, "venv", "bin", "python"))
        # "===" with a version: "==" would also take a build for the CPU from a folder of wheels
        wanted = [package.replace("==", "===") for package in entry["packages"]]
        extras = entry.get("extras", "report,test")
        began = time.monotonic()
        installed = subprocess.run(
            [
                python,
                "-m",
                "pip",
                "install",
                "-q",
                "-c",
                constraints,
                *wanted,
                "-e",
                f".[{extras}]",
            ],
            cwd=ROOT,
        )
        if installed.returncode:
            return Result(name, entry["python"], "", "not run: pip finds no set of versions", -1)
        megabytes = (
            sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) >> 20
        )
        size = f"{megabytes} MB, installed in {time.monotonic() - began:.0f} s"
        began = time.monotonic()
        paths = [argument for argument in pytest_arguments if (ROOT / argument).exists()]
        tests = [
            python,
            "-m",
            "pytest",
            *([] if paths else entry.get("tests", ["tests"])),
            "-q",
            "-p",
            "no:cacheprovider",
            *pytest_arguments,
        ]
        environment = os.environ | (
            {"CUDA_BUILD_PYTHON": python} if _is_built_for_cuda(python) else {}
        )
        process = subprocess.Popen(
            tests, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        last = ""
        for line in process.stdout:
            sys.stdout.write(line)
            last = line.strip() or last
        minutes = (time.monotonic() - began) / 60
        return Result(
            name,
            entry["python"],
            _versions(python),
            f"{last} ({minutes:.0f} min; {size})",
            process.wait(),
        )


def _is_built_for_cuda(python: str) -> bool:
    return (
        subprocess.run([python, "-c", "import torch, triton; assert torch.version.cuda"]).returncode
        == 0
    )


def constraints_of(packages: list[str]) -> str:
    """Return `tests/constraints.txt` without the packages set by an entry."""
    # PyTorch bounds it, each version otherwise
    chosen = {_name(package) for package in packages} | {"setuptools"}
    lines = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if _name(line) not in chosen)


def _name(requirement: str) -> str:
    return re.split("[=<>!~;# ]", requirement, maxsplit=1)[0].lower()


def _versions(python: str) -> str:
    shown = (
        "from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in %r), sep=', ')"
    )
    names = ("torch", "accelerate", "torchao", "transformers")
    return subprocess.run(
        [python, "-c", shown % (names,)], capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
