"""What `fp8-backends launch` starts in place of a script: this package connects, then the script runs, as it is.

    python -m fp8_backends.accelerate_plugin.worker script.py ARGUMENTS
    python -m fp8_backends.accelerate_plugin.worker -m module ARGUMENTS

Other launchers may start it, too: `torchrun -m fp8_backends.accelerate_plugin.worker script.py`. To the script it looks
as if Python had started it: `__main__`, `sys.argv`, `sys.path`, exit codes and tracebacks are its own.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence

from ..recipes.sources import is_launched


def main(arguments: Sequence[str]) -> None:
    """Run `script.py ARGUMENTS` or `-m module ARGUMENTS` in this process. Importing this module has imported
    `fp8_backends`, and so has connected it to Accelerate."""
    if not arguments or arguments[0] == "-m" and len(arguments) == 1:
        sys.exit("usage: python -m fp8_backends.accelerate_plugin.worker [-m MODULE | SCRIPT] ARGUMENTS")
    ask_for_fp8()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    script = arguments[0]
    if os.path.isdir(script) or script.endswith(".pyc") or zipfile.is_zipfile(script):
        if not getattr(sys.flags, "safe_path", False):
            del sys.path[0]
        runpy.run_path(script, run_name="__main__")
    else:
        _run_source(script)


def ask_for_fp8() -> None:
    """Let every Accelerator of this process train in FP8, where `fp8-backends launch` has written a recipe."""
    if is_launched():
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"


def _run_source(script: str) -> None:
    """Run a script as `runpy.run_path` does, with `sys.argv[0]` as it was given, and a `__main__` that stays to the end
    of the process: functions that run at exit, and pickled classes, are found in it."""
    path = os.path.abspath(script)
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
        sys.exit(2)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__, module.__spec__ = path, builtins, None
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
