"""Train small models that save and resume, in processes that a test forks and may kill."""

from __future__ import annotations

import math
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch import nn

import fp8_backends
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.tensors.scaled_tensor import stored_parts

STRESS = int(os.environ.get("STRESS", "1"))
"""Factor of the number of cases, kills and steps."""
BACKENDS = ("msamp:O2", "native:delayed", "msamp:O3")


class Training:
    """Train models of three Linears together. The data of a step follow from its number and rank.

    Args:
        folder: of checkpoints.
        anew: if each checkpoint gets a folder of its own, named by Accelerate, or all share one.
        models: their number. Each has an optimizer and a scheduler.
        kept: largest number of checkpoints in a folder.
        accelerator: arguments of the Accelerator.
        fields: fields of the recipe.
    """

    def __init__(
        self,
        backend: str,
        folder: Path | None = None,
        anew: bool = True,
        seed: int = 0,
        models: int = 1,
        kept: int | None = None,
        accelerator: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.folder, self.anew = folder, anew
        options = {"cpu": True, "kwargs_handlers": [], **(accelerator or {})}
        options["kwargs_handlers"].append(fp8_backends.FP8RecipeKwargs(backend=backend, **fields))
        if folder is not None:
            options["project_config"] = ProjectConfiguration(
                str(folder), automatic_checkpoint_naming=anew, total_limit=kept
            )
        self.accelerator = Accelerator(mixed_precision="fp8", **options)
        self.target = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)) / 32**0.5
        torch.manual_seed(seed)
        self.bare = [
            nn.Sequential(
                nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 16)
            )
            for _ in range(models)
        ]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=5e-3) for model in self.bare]
        schedulers = [torch.optim.lr_scheduler.LambdaLR(each, wave) for each in optimizers]
        prepared = self.accelerator.prepare(*self.bare, *optimizers, *schedulers)
        self.models = prepared[:models]
        self.optimizers = prepared[models : 2 * models]
        self.schedulers = prepared[2 * models :]

    def batch(self, number: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        seed = 2 * number + self.accelerator.process_index
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))
        return x, x @ self.target

    def backward(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> float:
        """Return the loss of the last model."""
        for model in self.models:
            loss = weight * nn.functional.mse_loss(model(x).float(), y)
            self.accelerator.backward(loss)
        return loss.item()

    def update(self) -> None:
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def step(self, number: int) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss and copies of the last model's weights."""
        loss = self.backward(*self.batch(number))
        self.update()
        weights = self.accelerator.get_state_dict(self.models[-1])
        return loss, {name: weight.clone() for name, weight in weights.items()}

    def save(self) -> None:
        self.accelerator.save_state(None if self.anew else str(self.folder / "last"))

    def load(self, folder: Path | None = None) -> int:
        """Load a checkpoint, or the newest one. Return its number of steps."""
        self.accelerator.load_state(folder or (None if self.anew else str(self.folder / "last")))
        return self.schedulers[-1].scheduler.last_epoch // self.accelerator.num_processes

    def stored(self) -> list[tuple[str, Any]]:
        """Return every byte in models, scaling states, optimizers and schedulers, and their
        options."""
        found: list[tuple[str, Any]] = []
        for model in self.bare:
            found += [*model.named_parameters(), *model.named_buffers()]
            for name, root, known in prepared_roots(model):
                if hasattr(known.compute, "scaling_state"):
                    state = known.compute.scaling_state(root)
                    found += [(f"{name}.{key}", tensor) for key, tensor in state.items()]
        for optimizer in (each.optimizer for each in self.optimizers):
            found.append(("parameters with a state", len(optimizer.state)))
            for group in optimizer.param_groups:
                options = {name: value for name, value in group.items() if name != "params"}
                found.append(("options", repr(options)))
                for parameter in group["params"]:
                    found += optimizer.state[parameter].items()
        found += [("scheduler", repr(each.state_dict())) for each in self.schedulers]
        return [(name, bytes_of(value)) for name, value in found]


def wave(step: int) -> float:
    """Return the learning rate's factor. It never stays near zero."""
    return 0.5 + 0.5 * math.cos(step / 300)


def bytes_of(value: Any) -> Any:
    """Return all bytes that a tensor stores; another value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    parts = stored_parts(value.detach(), exact=True)
    return [
        (part.dtype, part.shape, bytes(part.reshape(-1).view(torch.uint8).numpy()))
        for part in parts
    ]


def changed(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> list[str]:
    """Return the names of values that differ."""
    if len(before) != len(after):
        return ["more or fewer values"]
    return [old[0] for old, new in zip(before, after, strict=True) if old != new]


class Processes:
    """Run a function in forked processes: the ranks of one group with gloo, if several."""

    def __init__(self, function: Callable[[], Any], ranks: int = 1) -> None:
        store = tempfile.mktemp()
        self.ids: list[int] = []
        self._pipes = []
        for rank in range(ranks):
            read, write = os.pipe()
            process = os.fork()
            if process == 0:
                os.close(read)
                _answer(function, write, rank, ranks, store)
            os.close(write)
            self.ids.append(process)
            self._pipes.append(os.fdopen(read, "rb"))

    def kill(self) -> None:
        for process in self.ids:
            os.kill(process, signal.SIGKILL)

    def end(self) -> list[bytes]:
        """Wait until all have ended, and return their answers."""
        answers = [pipe.read() for pipe in self._pipes]
        for process, pipe in zip(self.ids, self._pipes, strict=True):
            pipe.close()
            os.waitpid(process, 0)
        return answers

    def results(self) -> list[Any]:
        """Return the function's results by rank, or raise the errors of the ranks."""
        answers = [pickle.loads(answer or NOTHING) for answer in self.end()]
        errors = [error for _, error in answers if error]
        assert not errors, "\n\n".join(errors)
        return [result for result, _ in answers]


NOTHING = pickle.dumps((None, "a process ended without an answer"))


def forked(function: Callable[[], Any]) -> Any:
    """Return the function's result from a process of its own."""
    (result,) = Processes(function).results()
    return result


def _answer(
    function: Callable[[], Any], pipe: int, rank: int, ranks: int, store: str | None
) -> None:
    try:
        result, error = None, ""
        try:
            torch.set_num_threads(1)  # a forked process has no OpenMP threads
            if ranks > 1:
                group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                group["LOCAL_WORLD_SIZE"] = ranks
                os.environ.update({name: str(value) for name, value in group.items()})
                files = dist.FileStore(store, ranks)
                dist.init_process_group("gloo", store=files, rank=rank, world_size=ranks)
            result = function()
        except BaseException:
            error = f"rank {rank}: {traceback.format_exc()}"
        with os.fdopen(pipe, "wb") as answer:
            pickle.dump((result, error), answer)
    finally:
        os._exit(0)
