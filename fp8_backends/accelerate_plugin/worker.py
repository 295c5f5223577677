"""Connect this package, then run a script unmodified. `fp8-backends launch` starts this module in
place of the script.

    python -m fp8_backends.accelerate_plugin.worker script.py ARGUMENTS
    python -m fp8_backends.accelerate_plugin.worker -m module ARGUMENTS

The script runs as if started by Python: `__main__`, `sys.argv`, `sys.path`, exit codes and
tracebacks are the same.
"""

import builtins
import contextlib
import importlib.machinery
import io
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence

import torch
from accelerate.state import AcceleratorState
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..announcement import is_main_process
from ..preparation.optimizer_steps import is_proven
from ..recipes.sources import environment_source, is_launched


def main(arguments: Sequence[str]) -> None:
    """Run `script.py ARGUMENTS` or `-m module ARGUMENTS` in this process."""
    if not arguments or arguments[0] == "-m" and len(arguments) == 1:
        sys.exit(
            "usage: python -m fp8_backends.accelerate_plugin.worker [-m MODULE | SCRIPT] ARGUMENTS"
        )
    ask_for_fp8()
    with _Steps(arguments[arguments[0] == "-m"]) if is_launched() else contextlib.nullcontext():
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


class _Steps:
    """Observe a script's optimizer steps. If none proved FP8, say so; exit with code 1 if all were
    outside FP8."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.proofs: set[bool | None] = set()

    def __enter__(self) -> None:
        register_optimizer_step_post_hook(self.after_step)

    def after_step(self, optimizer: Optimizer, *_) -> None:
        if not torch.compiler.is_compiling() and True not in self.proofs:
            self.proofs.add(is_proven(optimizer))

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        failed = error is not None and (not isinstance(error, SystemExit) or error.code)
        # an Accelerator with another precision has warned
        if (
            failed
            or True in self.proofs
            or AcceleratorState._shared_state.get("_mixed_precision", "fp8") != "fp8"
        ):
            return
        is_unprepared = self.proofs == {None}
        reason = (
            ": no optimizer that made a step was prepared with its model. Write model, optimizer = "
            "accelerator.prepare(model, optimizer); --fp8_on_unproven warn ends with exit code 0"
        ) * is_unprepared
        if is_main_process():
            print(
                f"fp8-backends launch: {self.script} ended without a proof of FP8{reason}",
                file=sys.stderr,
            )
        if is_unprepared and environment_source().fields.get("on_unproven") != "warn":
            sys.exit(1)


def ask_for_fp8() -> None:
    """Let every Accelerator of this process train in FP8 if `fp8-backends launch` passed a
    recipe."""
    if is_launched():
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"


def _run_source(script: str) -> None:
    """Run a script with `sys.argv[0]` as given and a lasting `__main__`, unlike
    `runpy.run_path`."""
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
    module.__file__ = path
    module.__builtins__ = builtins
    module.__spec__ = None
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
