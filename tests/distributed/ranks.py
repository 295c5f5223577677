"""Checks that run on several ranks: one torchrun for a whole file of them, since starting ranks is what costs time.

A file of checks has functions `check_…()`, run in the order of the file on every rank inside one gloo process group,
and ends with `if __name__ == "__main__": ranks.main(globals())`. A pytest test beside it calls
`report(subtests, run("file.py", ranks=2))`: each check is a subtest, and a check that fails on any rank fails.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

TIMEOUT = datetime.timedelta(seconds=60)
"""Of one collective: ranks that wait for one that is lost give up with an error."""
HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


def run(script: str, ranks: int, *checks: str, seconds: float = 280, **environment: str) -> dict[str, dict]:
    """Run the checks of a file in this folder (those named, or all). Name -> {"errors": {rank: text}, "figures": …}."""
    results = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
        + [str(HERE / script), *checks],
        env={
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}{os.pathsep}{HERE}",
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "DS_ACCELERATOR": "cpu",
            "PYTHONFAULTHANDLER": "1",  # a rank that dies of a signal says where
            **environment,
        },
        capture_output=True,
        text=True,
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
    if results.returncode != 0:  # with what the launcher says: the rank that died first may have said nothing itself
        outcome["the ranks' exit"] = {"errors": {"": results.stderr[-12000:]}, "figures": None}
    return outcome


def report(subtests, outcome: dict[str, dict]) -> None:
    """One subtest for each check."""
    for name, result in outcome.items():
        with subtests.test(name):
            errors = [f"rank {rank}: {text}" for rank, text in result["errors"].items()]
            assert not errors, "\n".join(errors)


def main(namespace: dict) -> None:
    """On every rank: run the checks of a file, those named on the command line or all."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    checks = [name for name in namespace if name.startswith("check_")]
    for name in sys.argv[1:] or checks:
        torch.manual_seed(0)
        try:
            figures = namespace[name]()
            dist.barrier()
        except BaseException:
            # at once and by itself: the others wait for this rank, and the launcher ends them
            _say({name: {"errors": {dist.get_rank(): traceback.format_exc()}}})
            os._exit(1)
        if dist.get_rank() == 0:
            _say({name: {"errors": {}, "figures": figures}})
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _say(result: dict) -> None:
    """One line for `run`, in one piece: ranks share their standard output."""
    sys.stdout.write(f"\nRESULT {json.dumps(result)}\n")
    sys.stdout.flush()
