"""Run checks on several ranks: one launch for many, since starting ranks takes most of the time.

A file of checks has functions `check_…()`, run in the order of the file on every rank inside one
gloo process group, and ends with `if __name__ == "__main__": ranks.main(globals())`. A pytest test
calls `report(subtests, run("file.py", ranks=2))`: each check is a subtest, and a failure on any
rank fails it. `run("ranks.py", 2, "file", "other_file:check_…")` joins files in one launch.

The ranks are real processes with torchrun's environment. `main` forks them after loading the file
and its imports, in half of torchrun's time. `python -m torch.distributed.run --nproc_per_node 2
file.py` runs the same checks.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

TIMEOUT = datetime.timedelta(seconds=60)
"""Limit of one collective: ranks waiting for a lost one give up with an error."""
GRACE = 15
"""Seconds for the other ranks to report their own error after a failure."""
PORTS = range(15000, 32000)
"""Below Linux's ephemeral ports, so no other process gets one between choice and use."""
HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


def run(
    script: str, ranks: int, *checks: str, seconds: float = 280, **environment: str
) -> dict[str, dict]:
    """Run the named checks of a file in this folder, or all. Name -> {"errors": {rank: text},
    "figures": …}."""
    import warm_process  # tests/ is not on the path of ranks started by torchrun

    results = warm_process.run(
        str(HERE / script),
        *checks,
        env={
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}{os.pathsep}{HERE}",
            "RANKS": str(ranks),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "DS_ACCELERATOR": "cpu",
            "PYTHONFAULTHANDLER": "1",  # a rank killed by a signal names the place
            **environment,
        },
        timeout=seconds,
    )
    outcome: dict[str, dict] = {}
    for line in results.stdout.splitlines():
        if line.startswith("RESULT "):
            for name, result in json.loads(line.removeprefix("RESULT ")).items():
                known = outcome.setdefault(name, {"errors": {}, "figures": None})
                known["errors"] |= result["errors"]
                known["figures"] = result.get("figures")
    assert outcome, f"no check ran:\n{results.stdout[-4000:]}\n{results.stderr[-8000:]}"
    if results.returncode != 0:  # with stderr: a rank killed by a signal has no error
        outcome["the ranks' exit"] = {"errors": {"": results.stderr[-12000:]}, "figures": None}
    return outcome


def report(subtests, outcome: dict[str, dict]) -> None:
    """Report one subtest per check."""
    for name, result in outcome.items():
        with subtests.test(name):
            errors = [f"rank {rank}: {text}" for rank, text in result["errors"].items()]
            assert not errors, "\n".join(errors)


def main(namespace: dict) -> None:
    """Run the checks of a file on every rank: the names on the command line, or all."""
    checks = {name: namespace[name] for name in sys.argv[1:] or names_of(namespace)}
    if "RANK" in os.environ:  # torchrun has started this rank
        _run_checks(checks)
    else:
        sys.exit(_fork_ranks(checks, int(os.environ["RANKS"])))


def names_of(namespace: dict) -> list[str]:
    return [name for name in namespace if name.startswith("check_")]


def of_files(words: list[str]) -> dict:
    """Return `file:check` -> function. A file alone stands for all of its checks."""
    checks = {}
    for word in words:
        file, _, name = word.partition(":")
        namespace = vars(importlib.import_module(file))
        for each in [name] if name else names_of(namespace):
            checks[f"{file}:{each}"] = namespace[each]
    return checks


def shared_folder() -> str:
    """Make a new folder, the same on all ranks."""
    import torch.distributed as dist

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]


class Said(logging.Handler):
    """Record the package's messages inside a `with`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Said:
        logger = logging.getLogger("fp8_backends")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *exc) -> None:
        logging.getLogger("fp8_backends").removeHandler(self)


def _fork_ranks(checks: dict, ranks: int) -> int:
    """1 when a rank failed. The others are then given GRACE seconds."""
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    sys.stdout.flush()
    import fp8_backends.compute.native.backend  # noqa: F401, once; the first layer that each rank converts loads it

    gc.collect()
    gc.freeze()  # loaded modules stay shared
    alive = {_fork(checks, rank): rank for rank in range(ranks)}
    deadline, failed = float("inf"), 0
    while alive:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            if time.monotonic() > deadline:
                for process in alive:
                    os.kill(process, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.02)
            continue
        rank, code = alive.pop(process), os.waitstatus_to_exitcode(status)
        if code != 0:
            failed, deadline = 1, min(deadline, time.monotonic() + GRACE)
            print(f"rank {rank} ended with {code}", file=sys.stderr, flush=True)
    return failed


def _fork(checks: dict, rank: int) -> int:
    process = os.fork()
    if process == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        code = 1
        try:
            _run_checks(checks)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return process


def _free_port() -> int:
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def _run_checks(checks: dict) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for name, check in checks.items():
        torch.manual_seed(0)
        began = time.process_time()
        try:
            figures = check()
            dist.barrier()
        except BaseException:
            # at once: the others wait for this rank
            _say({name: {"errors": {dist.get_rank(): traceback.format_exc()}}})
            os._exit(1)
        if dist.get_rank() == 0:
            _say(
                {
                    name: {
                        "errors": {},
                        "figures": figures,
                        "cpu_seconds": round(time.process_time() - began, 2),
                    }
                }
            )
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _say(result: dict) -> None:
    """Print one line for `run`, in one piece: ranks share their standard output."""
    sys.stdout.write(f"\nRESULT {json.dumps(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import ranks  # under the name by which files of checks know it

    found = ranks.of_files(sys.argv[1:])
    sys.argv[1:] = found
    ranks.main(found)
