"""Plant faults: the guard must name each at its step, and no other.

Each run trains a small model through stock Accelerate and plants one fault at a random step: in a
batch, a gradient, a scaling state, or on one of two ranks. The guard must name it at that step,
with its place; follow its action on all ranks; and find nothing in long sound runs with changing
batch sizes, evaluation in between, accumulation, and a frozen layer. Steps are timed with the guard
on and off in turns. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with threads cannot be forked
os.environ["ACCELERATE_USE_CPU"] = "true"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from measuring import cpu_features, interleaved, interval, ratio, table, write_json  # noqa: E402
from torch import nn  # noqa: E402

import fp8_backends  # noqa: E402
from fp8_backends.formats.scaling import HISTORY, INPUT, SCALE  # noqa: E402
from fp8_backends.tensors.scaled_tensor import ScaledTensor, stored_parts  # noqa: E402
from fp8_backends.watch import guard  # noqa: E402
from fp8_backends.watch.guard import FROZEN  # noqa: E402

BACKENDS = ("native:delayed", "msamp:O2", "msamp:O3", "ao:tensorwise")
ACTIONS = ("warn", "skip", "stop")
EVERY = 4
"""Steps from one comparison of replicas to the next."""
FIRST, LAST, STEPS = 52, 60, 80
"""A fault is planted at a random step from FIRST to LAST."""

SINGLE = {
    "NaN in a batch": ({"loss", "gradient"}, ""),
    "inf in one layer's gradient": ({"gradient"}, "2."),
    "activations x 10,000": ({"clipped"}, "0 (input)"),
    "history of NaN": ({"stuck"}, "2 (input)"),
    "history frozen": ({"stuck"}, "2 (input)"),
}
"""Faults on one process: the kinds that name it, and the begin of its first place."""
ON_RANKS = {
    "NaN in rank 1's batch": ({"loss", "gradient"}, ""),
    "rank 1's activations x 10,000": ({"clipped"}, "0 (input)"),
    "a bit of rank 1's weight": ({"apart"}, "2.weight"),
    "a bit of rank 1's scale": ({"apart"}, "2, its scaling state"),
    "rank 1 skips a backward": ({"alone"}, ""),
}
OF_STATES = (
    "activations x 10,000",
    "rank 1's activations x 10,000",
    "history of NaN",
    "history frozen",
    "a bit of rank 1's scale",
)
"""Faults only of backends with scaling states."""


class Run:
    """A small training through Accelerate, with a guard."""

    def __init__(
        self, backend: str, action: str, width: int = 32, dropout: float = 0.0, **fields: Any
    ) -> None:
        AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        microbatches = fields.pop("microbatches", 1)
        guard.COMPARED_EVERY = fields.pop("compared_every", EVERY)
        recipe = fp8_backends.FP8RecipeKwargs(backend=backend, guard=action, **fields)
        self.accelerator = Accelerator(
            mixed_precision="fp8",
            kwargs_handlers=[recipe],
            gradient_accumulation_steps=microbatches,
        )
        layers = [
            nn.Linear(32, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.Dropout(dropout),
            nn.Linear(width, 16),
        ]
        self.bare, self.width = nn.Sequential(*layers), width
        optimizer = torch.optim.AdamW(self.bare.parameters(), 1e-3)
        self.model, self.optimizer = self.accelerator.prepare(self.bare, optimizer)
        self.target = torch.randn(32, 16)
        self.generator = torch.Generator().manual_seed(self.accelerator.process_index)

    def batch(self, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, 32, generator=self.generator)
        return x, x @ self.target

    def backward(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> None:
        self.accelerator.backward(weight * nn.functional.mse_loss(self.model(x).float(), y))

    def step(self) -> None:
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def found(self) -> list[fp8_backends.watch.guard.Fault]:
        return fp8_backends.watch.guard.faults(self.optimizer)

    @property
    def scaling(self) -> torch.Tensor | None:
        """Return the state of the manipulated layer."""
        return getattr(self.bare[2], "fp8_scaling", None)

    def stored(self) -> list[torch.Tensor]:
        """Return copies of everything an optimizer step changes."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [
            *self.bare.parameters(),
            *(each for each in states if isinstance(each, torch.Tensor)),
        ]
        return [part.detach().clone() for each in tensors for part in stored_parts(each)]


@contextlib.contextmanager
def planted(
    run: Run, fault: str, x: torch.Tensor, y: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return a batch, and the fault of its step."""
    hook = None
    if "NaN in" in fault:
        x[3, 3] = float("nan")
    elif "activations" in fault:
        x = x * 1e4
    elif "targets" in fault:
        y = y * 1e3
    elif "gradient" in fault:
        hook = run.bare[2].register_forward_hook(
            lambda module, args, output: (
                output.register_hook(lambda g: g.where(g < g.max(), float("inf"))) and None
            )
        )
    yield x, y
    if hook is not None:
        hook.remove()


def tamper(run: Run, fault: str) -> None:
    """Change a stored value between backward and the step."""
    if fault == "history of NaN":
        run.scaling.view(torch.float32)[INPUT, HISTORY:] = float("nan")
    elif fault == "a bit of rank 1's scale":
        run.scaling[INPUT, SCALE] ^= 1 << 22
    elif fault == "a bit of rank 1's weight":
        weight = run.bare[2].weight
        part = stored_parts(weight)[0] if isinstance(weight, ScaledTensor) else weight.data
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[part.element_size()]
        part.view(-1).view(integers)[5] ^= 1


def trial(backend: str, action: str, fault: str, at: int) -> dict[str, Any]:
    """Run once with one fault; return faults in the guard's reaction, empty if there are none."""
    run, is_mine = Run(backend, action), True
    alone, frozen = "skips" in fault, fault == "history frozen"
    if "rank 1" in fault:
        is_mine = run.accelerator.process_index == 1
    wrong, stopped = [], None
    kept = None
    step = 0
    while step < STEPS + (alone and is_mine):  # a rank without a backward owes the others one
        step += 1
        is_due = step == at and is_mine
        x, y = run.batch()
        if not (alone and is_due):
            with planted(run, fault if is_due else "", x, y) as (x, y):
                run.backward(x, y)
        if is_due:
            tamper(run, fault)
        if frozen and step == at:
            kept = run.scaling.clone()
        if frozen and step > at:
            run.scaling[:, : HISTORY - 1], run.scaling[:, 1] = kept[:, : HISTORY - 1], kept[:, 1]
        before = run.stored() if step == at else []
        try:
            run.step()
        except fp8_backends.FP8BackendError as error:
            stopped = error
        if step == at and not (alone or frozen or " bit of" in fault):
            is_same = all(torch.equal(a, b) for a, b in zip(before, run.stored(), strict=True))
            if is_same == (action == "warn") and not (action == "warn" and "NaN" in fault):
                wrong.append(f"weights and states {'stayed' if is_same else 'changed'}")
        if stopped is not None or (frozen and run.found):
            break
    named = [fault for fault in run.found if fault.step >= at]
    wrong += judged(run, backend, fault, at, named, is_mine)
    if not alone or is_mine:
        wrong += (
            []
            if (stopped is not None) == (action == "stop")
            else ["stopped" if stopped else "did not stop"]
        )
    decisions = [tuple(each) for each in run.found] if not alone else []
    return {"wrong": wrong, "decisions": decisions, "named": [str(each) for each in named[:2]]}


def judged(run: Run, backend: str, fault: str, at: int, named: list, is_mine: bool) -> list[str]:
    """Return errors in the guard's findings."""
    kinds, place = {**SINGLE, **ON_RANKS}[fault]
    if "skips" in fault and not is_mine:
        return [f"named on a rank that did nothing wrong: {named[0]}"] if named else []
    due = at
    if fault == "history frozen":
        due = next(
            (each.step for each in named if at + FROZEN - 1 <= each.step <= at + FROZEN + 1), at
        )
    if " weight" in fault and "bit" in fault:
        due = -(-at // EVERY) * EVERY
    first = [each for each in named if each.step == due]
    missing = kinds - {each.kind for each in first}
    wrong = (
        [f"not named at step {due}: {', '.join(sorted(missing))} (named: {named[:2]})"]
        if missing
        else []
    )
    if (
        place
        and first
        and not any(each.where and each.where[0].startswith(place) for each in first)
    ):
        wrong.append(f"named in {first[0].where}")
    wrong += [f"false alarm at step {each.step}: {each}" for each in run.found if each.step < at]
    return wrong


def steps_of(faults: dict, backend: str, rng: random.Random) -> list[tuple[str, int]]:
    """Return the faults of a backend, each with its step."""
    is_stateless = backend.startswith("ao")
    chosen = [fault for fault in faults if not (is_stateless and fault in OF_STATES)]
    # its steps wait for all ranks: the guard stops the rank, and leaves no run to judge
    if backend == "msamp:O3":
        chosen = [fault for fault in chosen if "skips" not in fault]
    # a scale is synchronized again with the next backward, and each step recomputes the codes of a
    # weight at O3: such a bit only exists if it is compared at once
    heals = {"a bit of rank 1's scale"} | (
        {"a bit of rank 1's weight"} if backend == "msamp:O3" else set()
    )
    return [(f, LAST // EVERY * EVERY if f in heals else rng.randint(FIRST, LAST)) for f in chosen]


def trials(
    faults: dict, backends: tuple[str, ...], actions: tuple[str, ...], seed: int
) -> list[dict[str, Any]]:
    rng, done = random.Random(seed), []
    for backend in backends:
        for action in actions:
            for fault, at in steps_of(faults, backend, rng):
                outcome = trial(backend, action, fault, at)
                done.append(
                    {"backend": backend, "action": action, "fault": fault, "step": at} | outcome
                )
    return done


# Two ranks


def on_two_ranks(function, *arguments) -> list[Any]:
    """Return `function(*arguments)` from each of two ranks, forked from this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        children = [
            _forked(rank, Path(folder, str(rank)), function, arguments) for rank in range(2)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        if any(codes):  # the rank has reported its reason
            raise SystemExit(f"a rank ended with {codes}")
        return [
            json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(2)
        ]


def _forked(rank: int, result: Path, function, arguments: tuple) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        dist.init_process_group("gloo")
        result.write_text(json.dumps(function(*arguments)), encoding="utf-8")
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(code)


# Runs without a fault


def clean(backend: str, steps: int, seed: int) -> list[str]:
    """Return the guard's findings in a sound training."""
    run, rng = (
        Run(backend, "warn", dropout=0.1, compared_every=10, microbatches=2),
        random.Random(seed),
    )
    run.bare[0].weight.requires_grad_(rng.random() < 0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        run.optimizer.optimizer, lambda step: min(1.0, (step + 1) / 200)
    )
    made = 0
    while made < steps:
        for _ in range(2):
            with run.accelerator.accumulate(run.model):
                x, y = run.batch(rng.choice((8, 16, 32, 128)))
                # a loss of zero, as of a batch of padding
                run.backward(x, y, weight=float(rng.random() > 0.01))
                run.step()
        schedule.step()
        made += 1
        if made % 100 == 0:
            run.model.eval()
            with torch.no_grad():
                run.model(1e3 * run.batch()[0])
            run.model.train()
        if made % 1000 == 500:
            with tempfile.TemporaryDirectory() as folder:
                run.accelerator.save_state(folder)
                run.accelerator.load_state(folder)
    return [str(fault) for fault in run.found]


def cost(backend: str, width: int, runs: int) -> dict[str, Any]:
    """Time of a step with the guard over the time of one without, in turns."""
    functions = {}
    for action in ("off", "warn", "skip"):
        run = Run(backend, action, width=width, compared_every=100)

        def step(run: Run = run) -> None:
            run.backward(*run.batch(256))
            run.step()

        functions[action] = step
    seconds = interleaved(functions, runs, calls=4)
    return {action: ratio(seconds[action], seconds["off"]) for action in ("warn", "skip")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--backend", action="append", choices=BACKENDS, help="this one (repeatable; default: all)"
    )
    parser.add_argument(
        "--clean",
        type=int,
        default=2000,
        metavar="STEPS",
        help="without a fault, each backend (2000)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one backend, two actions, 100 clean steps, no timing"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write the record")
    args = parser.parse_args()
    began = time.perf_counter()
    backends, actions = tuple(args.backend or BACKENDS), ACTIONS
    if args.quick:
        backends, actions = backends[:1], ("skip", "stop")
    # ranks first: autograd starts threads, and a process with threads cannot be forked
    of_ranks = on_two_ranks(
        trials, ON_RANKS, backends, tuple(a for a in actions if a != "stop"), args.seed
    )
    found = trials(SINGLE, backends, actions, args.seed)
    for own, other in zip(*of_ranks, strict=True):
        wrong = own["wrong"] + [f"rank 1: {each}" for each in other["wrong"]]
        wrong += ["ranks decided differently"] if own["decisions"] != other["decisions"] else []
        found.append({**own, "wrong": wrong, "named": own["named"] or other["named"]})
    alarms = {
        backend: clean(backend, 100 if args.quick else args.clean, args.seed)
        for backend in backends
    }
    costs = {} if args.quick else {backend: cost(backend, 512, 15) for backend in backends}

    rows = []
    for fault in {**SINGLE, **ON_RANKS}:
        of_fault = [each for each in found if each["fault"] == fault]
        good = sum(not each["wrong"] for each in of_fault)
        rows.append([fault, len(of_fault), good, "2" if fault in ON_RANKS else "1"])
    print(table(["fault", "planted", "named at its step, and acted on", "ranks"], rows))
    steps = 100 if args.quick else args.clean
    print(
        table(
            ["without a fault", "steps", "false alarms"],
            [[b, steps, len(a)] for b, a in alarms.items()],
        )
    )
    if costs:
        rows = [
            [backend, interval(of["warn"]), interval(of["skip"])] for backend, of in costs.items()
        ]
        print(table(["time of a step / without guard", "warn", "skip"], rows))
    failures = [
        f"{f['backend']}, {f['action']}, {f['fault']} at {f['step']}: {f['wrong']}"
        for f in found
        if f["wrong"]
    ]
    failures += [
        f"{backend}: false alarm: {alarm}" for backend, of in alarms.items() for alarm in of[:3]
    ]
    print("\n".join(failures))
    if args.out:
        record = {
            "seconds": round(time.perf_counter() - began),
            "every": EVERY,
            "steps": STEPS,
            "failures": failures,
        }
        cases = [
            {key: value for key, value in each.items() if key != "decisions"} for each in found
        ]
        record |= {"results": cases, "clean": {"steps": steps, "alarms": alarms}, "cost": costs}
        write_json(str(args.out / f"faults_cpu_{cpu_features()}.json"), record)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
