"""Kill `save_state` anywhere: the newest whole checkpoint must be found, and resume bitwise.

Trainings save after every step, half of them into new folders and half into one folder. Each is
killed at a random moment of a save, or, in the planted part, before each call that changes a folder
(open for writing, rename, remove, mkdir, rmdir). Then `load_state` and `newest_checkpoint` look for
a checkpoint in a new process. It must belong to the step before the kill, or to the killed save,
and later steps must match an unbroken run: losses and parameters bitwise.

Exits with 1 otherwise. A kill is no power loss: fsync is not tested here.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with threads cannot be forked
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import cpu_features, table, write_json  # noqa: E402
from resumed_runs import (  # noqa: E402
    BACKENDS,
    OFFLOADED,
    ON_TWO_RANKS,
    WITHOUT_OFFLOAD,
    Failed,
    Run,
    Seen,
    forked,
    start,
    unbroken,
    warm_up,
)

import fp8_backends  # noqa: E402

PLACES = {True: "new folders", False: "the same folder"}
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
"""Python's audit events that change a folder, except `open` for writing."""
_BEGUN = b"b"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="at random moments (200)")
    parser.add_argument("--quick", action="store_true", help="a few kills of one backend")
    parser.add_argument(
        "--offload",
        action="store_true",
        help=f"of {OFFLOADED} alone, resumed with and without offload",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write the record")
    args = parser.parse_args()
    rng, began = random.Random(args.seed), time.perf_counter()
    warm_up()
    rows = []
    backends = (*BACKENDS[: 1 if args.quick else None], ON_TWO_RANKS)
    if args.offload:
        backends = (OFFLOADED,)
    kills = 8 if args.quick else args.kills
    for backend in backends:
        with tempfile.TemporaryDirectory() as folder:
            expected = forked(lambda: unbroken(backend, Path(folder, "unbroken")))  # noqa: B023
            for anew in PLACES:
                place = Path(folder, str(anew))
                part = math.ceil(kills / (len(backends) * len(PLACES)))
                rows.append(killed_at_random(backend, place, anew, expected, part, rng))
                rows.append(
                    killed_at_each_call(backend, place, anew, expected, 12 if args.quick else 1)
                )
    print(table([*rows[0]][:-1], [[*row.values()][:-1] for row in rows]))
    failures = [
        f"{row['backend']}, {row['into']}: {each}" for row in rows for each in row["failures"]
    ]
    print("\n".join(failures) or "every checkpoint was found, and resumed to the bit")
    if args.out:
        record = {"seconds": round(time.perf_counter() - began), "results": rows}
        write_json(str(args.out / f"kills_cpu_{cpu_features()}.json"), record)
    return int(bool(failures))


def killed_at_random(
    backend: str, folder: Path, anew: bool, expected: list[Seen], kills: int, rng: random.Random
) -> dict:
    """Kill runs at random moments of a save; one row of the table."""
    seconds = seconds_of_a_save(backend, folder, anew)
    outcomes = []
    for _ in range(kills):
        killed_step = rng.choice((2, 3))

        def kill(process: int) -> None:
            time.sleep(rng.uniform(0, 1.1 * seconds))  # some after the save, too
            os.killpg(process, signal.SIGKILL)

        outcomes.append(outcome(backend, folder, anew, expected, killed_step, kill=kill))
    return row(backend, anew, "random", outcomes)


def killed_at_each_call(
    backend: str, folder: Path, anew: bool, expected: list[Seen], stride: int
) -> dict:
    """Kill runs before the first call in a save that changes a folder, the second, and so on; one
    row of the table."""
    calls = forked(lambda: calls_of_a_save(backend, folder, anew))
    shutil.rmtree(folder)
    return row(
        backend,
        anew,
        "each call",
        [
            outcome(backend, folder, anew, expected, 2, at_call=at)
            for at in range(1, calls + 1, stride)
        ],
    )


def row(backend: str, anew: bool, moments: str, outcomes: list[str]) -> dict:
    found = Counter(outcomes)
    failures = sorted(set(found) - {"before", "killed step"})
    return {
        "backend": backend,
        "into": PLACES[anew],
        "killed at": moments,
        "kills": len(outcomes),
        "step before": found["before"],
        "killed step": found["killed step"],
        "failed": sum(found[each] for each in failures),
        "failures": failures,
    }


def outcome(
    backend: str,
    folder: Path,
    anew: bool,
    expected: list[Seen],
    killed_step: int,
    kill: Callable[[int], None] | None = None,
    at_call: int | None = None,
) -> str:
    """Kill one run in the save of a step; return the step found afterwards, or the fault."""
    read, write = os.pipe()
    process, result = start(lambda: train(backend, folder, anew, killed_step, write, at_call))
    os.close(write)
    os.read(read, 1)
    os.close(read)
    if kill is not None:
        kill(process)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # it leads its group until it is reaped
    os.killpg(process, signal.SIGKILL)  # a rank that is left
    os.waitpid(process, 0)
    with os.fdopen(result, "rb") as pipe:
        pipe.read()  # until each rank has ended
    loaders = (backend, WITHOUT_OFFLOAD) if backend == OFFLOADED else (backend,)
    resumed = [forked(lambda: resume(loader, folder, anew, expected)) for loader in loaders]  # noqa: B023
    shutil.rmtree(folder)
    for loader, found in zip(loaders, resumed, strict=True):
        if isinstance(found, Failed):
            return f"{loader}: {found.name}: {found.text.splitlines()[0]}"
        step, exact = found
        if not exact:
            return f"{loader} resumed at step {step} with other values"
    return {killed_step - 1: "before", killed_step: "killed step"}.get(
        step, f"found step {step} of {killed_step}"
    )


def train(
    backend: str, folder: Path, anew: bool, killed_step: int, began: int, at_call: int | None
) -> None:
    run = Run(backend, folder, anew)
    for number in range(1, killed_step):
        run.step(number)
        run.save()
    run.step(killed_step)
    if at_call is not None and run.accelerator.is_main_process:
        on_changes(folder, lambda count: count == at_call and os.kill(os.getpid(), signal.SIGKILL))
    os.write(began, _BEGUN)
    run.save()
    time.sleep(60)


def resume(backend: str, folder: Path, anew: bool, expected: list[Seen]) -> tuple[int, bool]:
    """Return the step of the checkpoint found, and if training continues as without a kill: from
    `newest_checkpoint` and from `load_state`."""
    newest = fp8_backends.checkpoints.newest_checkpoint(folder / "checkpoints" if anew else folder)
    run = Run(backend, folder, anew, seed=7)
    step = run.load()
    exact = run.continues_as(expected, step)
    again = run.load(Path(newest)) == step
    return step, exact and again and run.continues_as(expected, step, steps=1)


def seconds_of_a_save(backend: str, folder: Path, anew: bool) -> float:
    """The longest of three saves."""

    def measure() -> float:
        run, seconds = Run(backend, folder, anew), []
        for number in range(1, 5):
            run.step(number)
            began = time.perf_counter()
            run.save()
            seconds.append(time.perf_counter() - began)
        return max(seconds[1:])

    seconds = forked(measure)
    shutil.rmtree(folder)
    return seconds


def calls_of_a_save(backend: str, folder: Path, anew: bool) -> int:
    """Return the number of calls in a second save that change a folder."""
    run, counts = Run(backend, folder, anew), [0]
    run.step(1)
    run.save()
    run.step(2)
    on_changes(folder, lambda count: counts.append(count))
    run.save()
    return counts[-1]


def on_changes(folder: Path, call: Callable[[int], object]) -> None:
    """Call a function with a running number before each call of this process that changes the
    folder."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        writes = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not (writes or event in CHANGES):
            return
        path = str(arguments[0])
        # relative within a folder being removed
        if path.startswith(str(folder)) or not os.path.isabs(path):
            count += 1
            call(count)

    sys.addaudithook(hook)


if __name__ == "__main__":
    sys.exit(main())
