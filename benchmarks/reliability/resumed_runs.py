"""Save and resume small trainings, each in a process forked from one with everything loaded."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("ACCELERATE_USE_CPU", "true")
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, ProjectConfiguration  # noqa: E402
from torch import nn  # noqa: E402

import fp8_backends  # noqa: E402

BACKENDS = ("msamp:O2", "native:delayed", "msamp:O3")
ON_TWO_RANKS = "msamp:O4 under ZeRO-2"
"""The same on two ranks in DeepSpeed's engine, which a run forks: its process and a child."""
WITHOUT_OFFLOAD = "msamp:O4"
OFFLOADED = "msamp:O4 with offload"
STEPS = 6
_LAST = "last"


class Seen(NamedTuple):
    """Identify a run, bitwise."""

    loss: float
    parameters: dict[str, torch.Tensor]

    def equals(self, other: Seen) -> bool:
        return self.loss == other.loss and all(
            torch.equal(p, other.parameters[n]) for n, p in self.parameters.items()
        )


class Run:
    """Train a model. The data of a step follow from its number.

    Args:
        anew: if each checkpoint gets a separate folder, named by Accelerate, or all share one.
    """

    def __init__(self, backend: str, folder: Path, anew: bool, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self.folder, self.anew = folder, anew
        fields = {"offload": "states"} if backend == OFFLOADED else {}
        recipe = fp8_backends.FP8RecipeKwargs(backend=backend.partition(" ")[0], **fields)
        arguments = {"kwargs_handlers": [recipe]}
        if backend == ON_TWO_RANKS:
            arguments["deepspeed_plugin"] = _zero_2_on_two_ranks()
            arguments["kwargs_handlers"].append(InitProcessGroupKwargs(backend="gloo"))
        project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=anew)
        self.accelerator = Accelerator(mixed_precision="fp8", project_config=project, **arguments)
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 16)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )

    def step(self, number: int) -> Seen:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(16, 32, generator=generator), torch.randn(16, 16, generator=generator)
        loss = nn.functional.mse_loss(self.model(x).float(), y)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        weights = self.accelerator.get_state_dict(self.model)
        return Seen(loss.item(), {name: weight.clone() for name, weight in weights.items()})

    def save(self) -> None:
        self.accelerator.save_state(None if self.anew else str(self.folder / _LAST))

    def load(self, folder: Path | None = None) -> int:
        """Load a checkpoint, or the newest one of a run with separate folders. Returns its number
        of steps."""
        self.accelerator.load_state(folder or (None if self.anew else str(self.folder / _LAST)))
        return self.scheduler.scheduler.last_epoch // self.accelerator.num_processes

    def continues_as(self, unbroken: list[Seen], done: int, steps: int = 2) -> bool:
        """Tell if the next steps match an unbroken run with step n in `unbroken[n - 1]`."""
        return all(
            self.step(n).equals(unbroken[n - 1])
            for n in range(done + 1, min(done + steps, STEPS) + 1)
        )


def _zero_2_on_two_ranks() -> DeepSpeedPlugin:
    """Fork the other rank, and connect both."""
    store = tempfile.mktemp()
    rank = int(os.fork() == 0)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "ACCELERATE_USE_CPU": "false",
    }
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 16}
    return DeepSpeedPlugin(hf_ds_config=config)


def unbroken(backend: str, folder: Path) -> list[Seen]:
    """Return the steps of a run that never ends early and saves after each."""
    run, seen = Run(backend, folder, anew=False), []
    for number in range(1, STEPS + 1):
        seen.append(run.step(number))
        run.save()
    return seen


def warm_up() -> None:
    """Load a run's modules in this process, so that its forks need not. It keeps a single thread,
    as a fork requires."""
    with tempfile.TemporaryDirectory() as folder:
        for backend in BACKENDS:
            run = Run(backend, Path(folder), anew=False)
            run.step(1)
            run.save()
            run.load()
            AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # the CPU's all-reduce through shared memory is an extension, compiled by DeepSpeed at its first
    # use
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    threads = (
        len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()
    )
    assert threads == 1, f"{threads} threads run: start this with OMP_NUM_THREADS=1"
    gc.freeze()


def forked(function: Callable[[], Any]) -> Any:
    """Return the function's result from a separate process, or its `Failed` error."""
    process, result = start(function)
    with os.fdopen(result, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(process, 0)
    return pickle.loads(said) if said else Failed("", f"ended with status {status}")


class Failed(NamedTuple):
    """Carry the error of a process."""

    name: str
    text: str


def start(function: Callable[[], Any]) -> tuple[int, int]:
    """Fork a process that runs a function, and return its number and the pipe of its result. It
    leads a group of processes, its ranks."""
    read, write = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process:
        os.close(write)
        return process, read
    os.close(read)
    os.setsid()
    _be_quiet()
    try:
        try:
            result = function()
        except Exception as error:
            result = Failed(type(error).__name__, f"{error}\n{traceback.format_exc()}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(result, pipe)
    finally:
        os._exit(0)


def _be_quiet() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
