"""Train for long: the process must stay unchanged, and its replicas equal.

    python benchmarks/reliability/soak.py [--steps 20000] [--only NAME] [--recipe KEY=VALUE]...
    [--quick] [--out FOLDER]

Three trainings by Accelerate: `msamp:O2` and `msamp:O3` on two ranks, and `native:delayed` on one
with gradient accumulation. The model is tiny (three Linear layers and two norms, 12,448
parameters): only the number of steps counts. Each evaluates every 200 steps, saves every 1,000 with
two folders kept, and in the middle returns to the last save by `load_state`. Forty times it records
resident memory, Python's objects and tensors, open file descriptors, threads, hooks on the model
and the optimizer, and a checksum of all weights. Then, in a process each, 200 times: a model is
prepared, trained and restored; an Accelerator is made and dropped.

Over the last half, memory may grow by 1 %; descriptors, threads, hooks and tensors may not;
replicas are always equal, losses finite and falling. Exits with 1 otherwise. `--recipe` sets a
recipe field in all parts.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
import measuring  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import ProjectConfiguration  # noqa: E402

import fp8_backends  # noqa: E402

LOOKS = 40
"""Number of inspections, fewer than steps."""
GROWTH = 0.01
"""Largest growth of resident memory over the last half."""
COUNTED = ("descriptors", "threads", "hooks", "tensors")
"""Resources that may not grow at all."""
CYCLES = 200
CYCLED = ("native:delayed", "msamp:O2", "ao:tensorwise")


class Setting(NamedTuple):
    """A training."""

    backend: str
    ranks: int
    accumulation: int


SETTINGS = (Setting("msamp:O2", 2, 1), Setting("msamp:O3", 2, 1), Setting("native:delayed", 1, 2))


class Every(NamedTuple):
    """Set the number of steps between two events of a kind."""

    evaluation: int
    saving: int


def model_and_data() -> tuple[nn.Module, TensorDataset]:
    """Return the model, and 256 inputs of a linear map with their outputs."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(32, 64),
        nn.LayerNorm(64),
        nn.GELU(),
        nn.Linear(64, 96),
        nn.GELU(),
        nn.LayerNorm(96),
    ]
    inputs = torch.randn(256, 32)
    return nn.Sequential(*layers, nn.Linear(96, 32)), TensorDataset(
        inputs, inputs @ torch.randn(32, 32) / 32**0.5
    )


def accelerator_for(backend: str, recipe: dict[str, Any], **options) -> Accelerator:
    handler = fp8_backends.FP8RecipeKwargs(backend=backend, **recipe)
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[handler], cpu=True, **options)


# Inspection of a process


def look(model: nn.Module | None = None, optimizer: Any = None) -> dict[str, int]:
    """Return the resources held by this process."""
    measuring.settle()
    objects = gc.get_objects()
    return {
        "resident_bytes": measuring.resident()["now"],
        "objects": len(objects),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in objects),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "hooks": count_hooks(model, optimizer) if model is not None else 0,
    }


def count_hooks(model: nn.Module, optimizer: Any) -> int:
    """Count the hooks of all modules, all parameters and the optimizer."""
    holders = [*model.modules(), *model.parameters(), getattr(optimizer, "optimizer", optimizer)]
    tables = (
        value for holder in holders for name, value in vars(holder).items() if "_hooks" in name
    )
    gradient_hooks = (
        each
        for p in model.parameters()
        for each in (p._backward_hooks, p._post_accumulate_grad_hooks)
    )
    return sum(len(table) for table in (*tables, *gradient_hooks) if table)


def checksum(model: nn.Module) -> int:
    """Return a checksum of all values, equal on two ranks only for equal bits."""
    found = 0
    for parameter in model.parameters():
        found = zlib.crc32(parameter.detach().float().contiguous().numpy().tobytes(), found)
    return found


# A training


def train(setting: Setting, steps: int, every: Every, recipe: dict[str, Any], folder: Path) -> dict:
    """Train on this rank, and return its record."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = accelerator_for(
        setting.backend,
        recipe,
        gradient_accumulation_steps=setting.accumulation,
        project_config=project,
    )
    model, data = model_and_data()
    loader = DataLoader(data, batch_size=16 // setting.ranks, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 1000)
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    held_out = data[:64]
    losses, evaluations, looks = [], [], []
    saved: tuple[int, int] | None = None
    resumed = done = 0
    while done < steps:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            losses.append(loss.item())
            if done % every.evaluation == 0:
                evaluations.append(evaluate(model, held_out))
            if done % every.saving == 0:
                accelerator.save_state()
                saved = done, checksum(model)
            if (
                not resumed
                and done > steps // 2
                and saved is not None
                and done == saved[0] + every.evaluation // 2
            ):
                kept = sorted(
                    (folder / "checkpoints").iterdir(),
                    key=lambda each: int(each.name.split("_")[-1]),
                )
                accelerator.load_state(str(kept[-1]))
                assert checksum(model) == saved[1], (
                    "load_state gave other weights than save_state had"
                )
                assert len(kept) <= 2, "more folders were kept than total_limit says"
                resumed = done
            if done % max(5, steps // LOOKS) == 0:
                looks.append({"step": done, **look(model, optimizer), "checksum": checksum(model)})
            if done == steps:
                break
    assert resumed, "nothing was resumed"
    tenth = max(1, steps // 10)
    record = {
        "looks": looks,
        "finite": all(map(math.isfinite, (*losses, *evaluations))),
        "losses": [statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])],
        "evaluations": len(evaluations),
        "alarms": [str(each) for each in fp8_backends.watch.guard.faults(optimizer)],
    }
    accelerator.end_training()
    return record


def evaluate(model: nn.Module, held_out: tuple[torch.Tensor, torch.Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        loss = (model(held_out[0]) - held_out[1]).square().mean().item()
    model.train()
    return loss


# Objects created and dropped


def prepare_and_restore(index: int, recipe: dict[str, Any]) -> None:
    model, data = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"backend": CYCLED[index % len(CYCLED)], **recipe}
    model, optimizer = fp8_backends.prepare(model, optimizer, given)
    for inputs, targets in (data[:16], data[16:32]):
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fp8_backends.restore(model)
    model(data[:16][0])


def make_and_drop(index: int, recipe: dict[str, Any]) -> None:
    accelerator = accelerator_for(CYCLED[index % len(CYCLED)], recipe)
    model, data = model_and_data()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward((model(data[:16][0]) - data[:16][1]).square().mean())
    optimizer.step()
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)


def cycles(once: Callable[[int, dict], None], number: int, recipe: dict[str, Any]) -> dict:
    """The record of doing something over and over."""
    looks = []
    for index in range(number):
        once(index, recipe)
        if (index + 1) % max(1, number // LOOKS) == 0:
            looks.append({"step": index + 1, **look()})
    return {"looks": looks}


# Conditions


def highest(name: str, looks: list[dict]) -> int:
    return max(each[name] for each in looks)


def judge(records: list[dict]) -> dict:
    """Return the worst rank's figures over the last half, and violations."""
    faults, growth = [], []
    for record in records:
        half = record["looks"][len(record["looks"]) // 2 :]
        third = max(1, len(half) // 3)
        first, last = (
            statistics.median(each["resident_bytes"] for each in part)
            for part in (half[:third], half[-third:])
        )
        growth.append(last / first - 1)
        faults += [
            name for name in COUNTED if highest(name, half[-third:]) > highest(name, half[:-third])
        ]
        if not record.get("finite", True):
            faults.append("a loss is not finite")
        if "losses" in record and not record["losses"][1] < record["losses"][0]:
            faults.append("the loss does not fall")
        if record.get("alarms"):
            faults.append("a false alarm")
    if max(growth) > GROWTH:
        faults.append("memory")
    checksums = [[each.get("checksum") for each in record["looks"]] for record in records]
    if any(each != checksums[0] for each in checksums):
        faults.append("replicas differ")
    return {"growth": max(growth), "faults": sorted(set(faults))}


# Processes


def in_processes(number: int, work: Callable[[Path], dict], folder: Path) -> list[dict]:
    """Return `work`'s results from this many forked processes, the ranks of one group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start_rank(rank, number, port, work, folder) for rank in range(number)]
    failed = False
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)  # it would wait for the ended one
    if failed:
        raise RuntimeError("a rank failed")
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(number)]


def start_rank(
    rank: int, number: int, port: int, work: Callable[[Path], dict], folder: Path
) -> int:
    child = os.fork()
    if child:
        return child
    try:
        if number > 1:
            group = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": number,
                "LOCAL_WORLD_SIZE": number,
            }
            group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in group.items()})
        warnings.simplefilter("ignore")
        (folder / f"rank_{rank}.json").write_text(json.dumps(work(folder)))
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def measure(name: str, ranks: int, work: Callable[[Path], dict], number: int) -> dict:
    """Return the result of one part, with violations."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            records = in_processes(ranks, work, Path(folder))
        except RuntimeError as error:
            return {"name": name, "ranks": ranks, "number": number, "faults": [str(error)]}
    seconds = time.monotonic() - start
    return {
        "name": name,
        "ranks": ranks,
        "number": number,
        "seconds": seconds,
        **judge(records),
        "records": records,
    }


def row(result: dict) -> list:
    """Return a row of the table: rank 0's resources in the middle and at the end."""
    verdict = "holds" if not result["faults"] else f"FAILED: {', '.join(result['faults'])}"
    if "records" not in result:
        return [result["name"], result["ranks"], result["number"], *["-"] * 8, verdict]
    record = result["records"][0]
    looks = record["looks"]
    middle, last = looks[len(looks) // 2], looks[-1]
    both = [f"{middle[key]} {last[key]}" for key in ("tensors", "descriptors", "threads", "hooks")]
    return [
        *(result["name"], result["ranks"], result["number"]),
        f"{1000 * result['seconds'] / result['number']:.1f}",
        f"{middle['resident_bytes'] / 2**20:.1f} {last['resident_bytes'] / 2**20:.1f}",
        f"{100 * result['growth']:+.2f} %",
        *both,
        "{:.4f} {:.4f}".format(*record["losses"]) if "losses" in record else "-",
        verdict,
    ]


def value_of(text: str) -> Any:
    """A number, true, false or a list as JSON writes them; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20000, help="of each training")
    parser.add_argument("--only", default="", help="trainings and cycles whose names contain this")
    parser.add_argument(
        "--recipe", action="append", default=[], metavar="KEY=VALUE", help="a field of the recipe"
    )
    parser.add_argument(
        "--quick", action="store_true", help="40 steps and 8 cycles, in which memory proves nothing"
    )
    parser.add_argument("--out", help="folder for the record, soak_cpu_FEATURES.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # two ranks on two cores, and a forked process has no OpenMP threads
    recipe = {
        name: value_of(text) for name, text in (each.split("=", 1) for each in arguments.recipe)
    }
    steps, number = (40, 8) if arguments.quick else (arguments.steps, CYCLES)
    every = Every(200, 1000) if steps >= 4000 else Every(max(2, steps // 20), max(4, steps // 4))
    prepare_and_restore(CYCLED.index("ao:tensorwise"), {})  # loads TorchAO, once for all
    parts: dict[str, tuple[int, Callable[[Path], dict], int]] = {
        setting.backend: (
            setting.ranks,
            lambda folder, s=setting: train(s, steps, every, recipe, folder),
            steps,
        )
        for setting in SETTINGS
    }
    for name, once in {
        "prepare and restore": prepare_and_restore,
        "Accelerators": make_and_drop,
    }.items():
        parts[name] = (1, lambda folder, once=once: cycles(once, number, recipe), number)
    results = [measure(name, *part) for name, part in parts.items() if arguments.only in name]
    if arguments.quick:
        for result in results:
            result["faults"] = [fault for fault in result["faults"] if fault != "memory"]
    header = [
        "of",
        "ranks",
        "number",
        "ms each",
        "MiB",
        "growth",
        "tensors",
        "descriptors",
        "threads",
        "hooks",
        "loss",
    ]
    print(measuring.table([*header, "result"], [row(result) for result in results]), flush=True)
    if arguments.out:
        path = Path(arguments.out) / f"soak_cpu_{measuring.cpu_features()}.json"
        settings = {"steps": steps, "cycles": number, "recipe": recipe, **every._asdict()}
        measuring.write_json(str(path), {**settings, "results": results})
    return int(any(result["faults"] for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
