"""Train for long, and prepare and drop models over and over: the process must stay as it was.

Over the last half, descriptors, threads, hooks and tensors may not grow, and memory by 1 % at most;
replicas stay equal, losses finite and falling, and the guard raises no alarm. Trainings have a
frozen layer, changing batch sizes and losses of zero; they evaluate, save with two folders kept, and
return once to the last save.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import statistics
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from stress.harness import STRESS, Processes, Training, forked
from torch import nn

import fp8_backends
from fp8_backends.tensors.scaled_tensor import stored_parts
from fp8_backends.watch import guard

STEPS, CYCLES = 40 * STRESS, 6 * STRESS
LOOKS = 20
COUNTED = ("descriptors", "threads", "hooks", "tensors")
"""Resources that may not grow at all."""
TRAINED = [
    ("native:delayed", 1, 2),
    ("msamp:O2", 2, 1),
    ("msamp:O3", 2, 1),
    ("ao:tensorwise", 1, 1),
]
"""Backends with their ranks and microbatches."""


def look(model: nn.Module | None = None, optimizer: Any = None) -> dict[str, int]:
    """Return the resources held by this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory, back to the system
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "hooks": 0 if model is None else count_hooks(model, optimizer),
    }


def count_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Count the hooks of all modules, all parameters and the optimizer."""
    holders = [*model.modules(), *model.parameters(), optimizer]
    tables = [table for each in holders for name, table in vars(each).items() if "_hooks" in name]
    for parameter in model.parameters():
        tables += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    return sum(len(table) for table in tables if table)


def check_steady(looks: list[dict[str, int]]) -> None:
    half = looks[len(looks) // 2 :]
    third = max(1, len(half) // 3)
    for name in COUNTED:
        early, late = (max(each[name] for each in part) for part in (half[:-third], half[-third:]))
        assert late <= early, f"{name} grew from {early} to {late}"
    first, last = (
        statistics.median(each["resident"] for each in part)
        for part in (half[:third], half[-third:])
    )
    if STRESS >= 25:  # caches fill in the first hundred steps
        assert last <= 1.01 * first, f"memory grew by {last / first - 1:.2%}"


@pytest.mark.nightly
@pytest.mark.parametrize("backend, ranks, microbatches", TRAINED[: 1 if STRESS == 1 else None])
def test_long_training_leaves_its_process_as_it_was(backend, ranks, microbatches, tmp_path):
    looks = Processes(lambda: train(backend, microbatches, tmp_path), ranks).results()
    for of_rank in looks:
        check_steady(of_rank)
    checksums = [[each["checksum"] for each in of_rank] for of_rank in looks]
    assert all(each == checksums[0] for each in checksums), "replicas differ"


def train(backend: str, microbatches: int, folder: Path) -> list[dict[str, int]]:
    accelerator = {"gradient_accumulation_steps": microbatches}
    run = Training(backend, folder, kept=2, guard="warn", accelerator=accelerator)
    model, optimizer = run.models[0], run.optimizers[0]
    run.bare[0][0].weight.requires_grad_(False)
    random.seed(0)  # equal on all ranks
    guard.COMPARED_EVERY = 10
    losses, looks, saved = [], [], None
    for step in range(1, STEPS + 1):
        for microbatch in range(microbatches):
            with run.accelerator.accumulate(model):
                rows = random.choice((8, 16, 32, 128))
                x, y = run.batch(step * microbatches + microbatch, rows)
                # sometimes a loss of zero, as of a batch of padding
                losses.append(run.backward(x, y, weight=float(random.random() > 0.01)))
                if run.accelerator.sync_gradients:
                    run.accelerator.clip_grad_norm_(model.parameters(), 1.0)
                run.update()
        if step % (STEPS // 20) == 0:
            model.eval()
            with torch.no_grad():
                losses.append(nn.functional.mse_loss(model(x).float(), y).item())
                model(1e3 * x)
            model.train()
        if step % (STEPS // 4) == 0:
            run.save()
            saved = checksum(run)
        if step == STEPS * 5 // 8:
            folders = (folder / "checkpoints").iterdir()
            newest = max(folders, key=lambda each: int(each.name.split("_")[-1]))
            assert run.load(newest) == STEPS // 2
            assert checksum(run) == saved and len(os.listdir(newest.parent)) == 2
        if step % (STEPS // LOOKS) == 0:
            resources = look(run.bare[0], optimizer.optimizer)
            looks.append({**resources, "checksum": checksum(run)})
    assert all(map(math.isfinite, losses))
    tenth = len(losses) // 10
    assert statistics.fmean(losses[-tenth:]) < statistics.fmean(losses[:tenth])
    assert not guard.faults(optimizer)
    return looks


def checksum(run: Training) -> int:
    """Return a checksum of all weights and their codes, equal on two ranks only for equal bits."""
    found = 0
    weights = run.accelerator.get_state_dict(run.models[0]).values()
    codes = [part for p in run.bare[0].parameters() for part in stored_parts(p.detach())]
    for tensor in (*weights, *codes):
        found = zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), found)
    return found


def prepare_and_restore(backend: str) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8_backends.prepare(model, optimizer, backend)
    for _ in range(2):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fp8_backends.restore(model)
    model(torch.randn(16, 32))


def make_and_drop(backend: str) -> None:
    run = Training(backend)
    run.step(1)
    run.accelerator.free_memory()


@pytest.mark.nightly
@pytest.mark.parametrize("once", [prepare_and_restore, make_and_drop])
def test_models_made_and_dropped_leave_their_process_as_it_was(once):
    check_steady(forked(lambda: cycles(once)))


def cycles(once) -> list[dict[str, int]]:
    looks = []
    for cycle in range(1, CYCLES + 1):
        for backend in ("native:delayed", "msamp:O2", "ao:tensorwise"):
            once(backend)
        if cycle % max(1, CYCLES // LOOKS) == 0:
            looks.append(look())
    return looks
