"""Load the common libraries of the tests' processes once, and fork a process for each request.

`warm_process` starts it once for all of pytest's workers. It loads nothing of `fp8_backends`: each
process imports the package. It loads the rest with the first request, and ends with its standard
input, removing its folder.

    python warm_server.py SOCKET
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

LOADED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor",
    "accelerate",
    "datasets",
    "deepspeed",
    "pytest",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)
"""Together several seconds of a CPU; many are loaded by the first step of an optimizer or by DDP.
Accelerate loads `datasets` with a process's first data loader, and `deepspeed` at its first check
of a model's wrapper."""

HERE = Path(__file__).parent


def serve(path: str) -> dict:
    """Fork for each connection until standard input is closed. Returns in the new processes, with
    their requests."""
    own_path, frozen = [each for each in sys.path if each not in _python_path()], False
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("listening", flush=True)
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            while _ended_child():
                pass
            if sys.stdin in ready:
                shutil.rmtree(Path(path).parent)
                os._exit(0)
            connection, _ = listening.accept()
            if not frozen:
                with _silent():  # `torchao`, loaded by `transformers`, reports on kernels for GPUs
                    for name in LOADED:
                        importlib.import_module(name)
                _share_code(HERE.parent / "fp8_backends")
                gc.collect()
                gc.freeze()  # loaded modules stay shared
                frozen = True
            with connection:
                if os.fork() == 0:
                    return _fork_and_report(connection) | {"path": own_path}


def _share_code(package: Path) -> None:
    """Compile the package once. Where Python may not write bytecode, each process would."""
    code = {
        str(file): compile(file.read_bytes(), file, "exec", dont_inherit=True)
        for file in package.rglob("*.py")
    }
    load = SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda loader, name: code.get(loader.path) or load(loader, name)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Redirect the file of standard error to nothing. Loggers may keep `sys.stderr`."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _ended_child() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _fork_and_report(connection: socket.socket) -> dict:
    """Report the new process's id, and its status at its end, from a process for this request
    only."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rw") as stream:
        request = json.loads(stream.readline())
        process = os.fork()
        if process == 0:
            os.setsid()  # to end it with all of its children
            return request | {"files": files}
        for file in (0, 1, 2, *files):
            os.close(file)
        print(process, file=stream, flush=True)
        threading.Thread(target=_end_with_the_client, args=(stream, process), daemon=True).start()
        status = os.waitpid(process, 0)[1]
        with contextlib.suppress(BrokenPipeError):
            print(status, file=stream, flush=True)
        os._exit(0)


def _end_with_the_client(stream, process: int) -> None:
    if stream.readline() == "":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def run(request: dict) -> None:
    """Execute these arguments (`-c code`, `-m module`, or a script) with this environment, like the
    interpreter."""
    os.chdir(request["cwd"])
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    random.seed()
    sys.executable = request["program"]
    kind, *rest = request["arguments"]
    if kind == "-u":
        sys.stdout.reconfigure(write_through=True)
        kind, *rest = rest
    first = {"-c": "", "-m": os.getcwd()}.get(kind, str(Path(kind).resolve().parent))
    sys.path[:] = [first, *_python_path(), *request["path"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [kind, *rest]
        main.__file__ = kind
        exec(compile(Path(kind).read_text(encoding="utf-8"), kind, "exec"), main.__dict__)


def run_and_exit(request: dict) -> None:
    """End as the interpreter does, but leave the memory to the system: to free each object takes
    half a second."""
    status = 0
    try:
        run(request)
    except SystemExit as exit:
        if exit.code is not None and not isinstance(exit.code, int):
            print(exit.code, file=sys.stderr)
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    del sys.path[0]  # this folder is on the path of those alone that ask for it
    run_and_exit(serve(sys.argv[1]))
