"""Kill `save_state` anywhere: the newest whole checkpoint must be found, and resume to the bit.

Trainings save after every step, into new folders or into one. Each is killed at a random moment of
a save, or before one of the save's calls that change a folder (open for writing, rename, remove,
mkdir, rmdir). The checkpoint found by a new process must belong to the step before the kill, or to
the killed save, and later losses and weights must equal those of an unbroken run.

A kill is no power loss: fsync is not tested here.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from stress.harness import BACKENDS, STRESS, Processes, Training, bytes_of, forked

import fp8_backends

ON_TWO_RANKS = "msamp:O4 under ZeRO-2"
WITHOUT_OFFLOAD = "msamp:O4"
OFFLOADED = "msamp:O4 with offload"
STEPS = 6
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
"""Python's audit events that change a folder, besides `open` for writing."""


@pytest.fixture(scope="module", autouse=True)
def load_once(tmp_path_factory):
    """Load what a training imports, so that its forks need not."""
    for backend in BACKENDS:
        run = Training(backend, tmp_path_factory.mktemp("loaded"))
        run.step(1)
        run.save()
        run.load()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "anew"),
    [
        (backend, anew)
        for number, backend in enumerate([*BACKENDS, ON_TWO_RANKS, OFFLOADED])
        for anew in (True, False)
        if STRESS > 1 or number % 2 == anew
    ],
)
def test_training_killed_in_a_save_resumes_to_the_bit(backend, anew, tmp_path):
    forked(lambda: kill_everywhere(backend, tmp_path, anew))


def training(backend: str, folder: Path, anew: bool, seed: int = 0) -> Training:
    name = backend.partition(" ")[0]
    if backend != ON_TWO_RANKS:
        fields = {"offload": "states"} if backend == OFFLOADED else {}
        return Training(name, folder, anew, seed, **fields)
    os.environ["ACCELERATE_USE_CPU"] = "false"  # DeepSpeed's engine knows the CPU by itself
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 16}
    engine = {"cpu": False, "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    engine["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
    return Training(name, folder, anew, seed, accelerator=engine)


def kill_everywhere(backend: str, folder: Path, anew: bool) -> None:
    ranks = 1
    if backend == ON_TWO_RANKS:
        ranks = 2
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # its all-reduce through shared memory would be compiled at the first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    whole = Processes(lambda: unbroken(training(backend, folder / "unbroken", anew)), ranks)
    expected, seconds, calls = zip(*whole.results(), strict=True)  # of each rank
    random.seed(0)
    moments = [
        (random.choice((2, 3)), random.uniform(0, 1.1 * seconds[0]), None) for _ in range(STRESS)
    ]
    moments += [(2, 0.0, call) for call in range(1, calls[0] + 1, max(1, 12 // STRESS))]
    for killed_step, moment, call in moments:
        place = folder / "killed"
        begun, begins = os.pipe()
        processes = Processes(
            lambda: train(training(backend, place, anew), killed_step, begins, call),  # noqa: B023
            ranks,
        )
        os.close(begins)
        os.read(begun, 1)
        os.close(begun)
        if call is None:
            time.sleep(moment)
        else:
            os.waitid(os.P_PID, processes.ids[0], os.WEXITED | os.WNOWAIT)
        processes.kill()
        assert not any(processes.end()), "a training ended before it was killed"
        loaders = (backend, WITHOUT_OFFLOAD) if backend == OFFLOADED else (backend,)
        for loader in loaders:
            found = Processes(lambda: resume(loader, place, anew, expected), ranks).results()  # noqa: B023
            assert set(found) <= {killed_step - 1, killed_step}, (killed_step, moment, call, found)
        shutil.rmtree(place)


def unbroken(run: Training) -> tuple[list, float, int]:
    """Return all steps of a run that saves after each, the longest save in seconds, and the number
    of calls in the second save that change a folder."""
    steps, seconds, counts = [], [], []
    for number in range(1, STEPS + 1):
        steps.append(seen(run, number))
        if number == 2:
            on_changes(run.folder, counts.append)
        start = time.perf_counter()
        run.save()
        seconds.append(time.perf_counter() - start)
        if number == 2:
            calls = counts[-1]
    return steps, max(seconds[1:4]), calls


def seen(run: Training, number: int) -> tuple[float, dict]:
    loss, weights = run.step(number)
    return loss, {name: bytes_of(weight) for name, weight in weights.items()}


def train(run: Training, killed_step: int, begins: int, call: int | None) -> None:
    for number in range(1, killed_step):
        run.step(number)
        run.save()
    run.step(killed_step)
    if call is not None and run.accelerator.is_main_process:
        on_changes(run.folder, lambda count: count == call and os.kill(os.getpid(), signal.SIGKILL))
    os.write(begins, b"b")
    run.save()
    time.sleep(60)


def resume(backend: str, folder: Path, anew: bool, expected: tuple) -> int:
    """Return the step of the checkpoint found by `load_state` and by `newest_checkpoint`."""
    newest = fp8_backends.checkpoints.newest_checkpoint(folder / "checkpoints" if anew else folder)
    run = training(backend, folder, anew, seed=7)
    step = run.load()
    expected = expected[run.accelerator.process_index]
    assert [seen(run, step + 1), seen(run, step + 2)] == expected[step : step + 2]
    assert run.load(Path(newest)) == step
    assert seen(run, step + 1) == expected[step]
    return step


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
