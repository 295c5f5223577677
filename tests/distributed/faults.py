"""Lose a rank in the middle of a step, in one scenario after another, under one torchrun with
restarts.

Each scenario trains once unbroken, then again with a checkpoint at step SAVED until rank 1 is lost
at step LOST. The other rank must detect the loss, record how, and fail. torchrun restarts both, and
the checkpoint of the last scenario is resumed before the next one begins. The last attempt prints
the outcomes.

    python -m torch.distributed.run --nproc_per_node 2 --max-restarts N faults.py FOLDER
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from engines import engine_arguments, start_engine
from torch import nn

import fp8_backends

STEPS, SAVED, LOST = 6, 2, 4
TIMEOUT = 10
"""Longest seconds of a collective in these runs; ranks compiling on a busy machine are seconds
apart."""


class Scenario(NamedTuple):
    engine: str
    backend: str
    loss: str
    """`killed`: the process is gone, and its connections with it. `stalled`: it stands still,
    connections open."""


SCENARIOS = (
    Scenario("DDP", "msamp:O2", "killed"),
    Scenario("DDP", "msamp:O2", "stalled"),
    Scenario("FSDP2", "msamp:O2", "killed"),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(x))


class Run:
    """Hold a model and its optimizer, prepared by a stock Accelerator."""

    def __init__(self, scenario: Scenario) -> None:
        handlers = [
            fp8_backends.FP8RecipeKwargs(backend=scenario.backend),
            InitProcessGroupKwargs(backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT)),
        ]
        AcceleratorState._reset_state(True)
        arguments = engine_arguments(scenario.engine, 0.0, 1)
        self.accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=handlers, **arguments)
        start_engine(self.accelerator, scenario.engine, arguments)
        torch.manual_seed(0)
        self.bare = nn.Sequential(Block(), Block(), Block(), nn.Linear(64, 64, bias=False))
        optimizer = torch.optim.AdamW(self.bare.parameters(), 5e-3)
        self.model, self.optimizer = self.accelerator.prepare(self.bare, optimizer)

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(2 * number + self.accelerator.process_index)
        x = torch.randn(16, 64, generator=generator)
        loss = F.mse_loss(self.model(x), torch.tanh(x.flip(1)))
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def train(self, first: int, last: int) -> list[float]:
        return [self.step(number) for number in range(first, last)]

    def lose_in_backward(self, signal_number: int) -> None:
        """Rank 1 gets the signal when backward reaches the middle block."""

        def lose(gradient: torch.Tensor) -> None:
            os.kill(os.getpid(), signal_number)

        if self.accelerator.process_index == 1:
            self.bare[1].register_forward_hook(
                lambda module, args, output: output.register_hook(lose) and None
            )


def attempt(folder: Path, number: int) -> None:
    """Run the ranks after restart `number`."""
    rank = int(os.environ["RANK"])
    if number > 0:
        check_resumed(folder, number - 1, rank)
    if number < len(SCENARIOS):
        lose_a_rank(folder, number, rank)
        return
    if rank == 0:
        print(
            "RESULT",
            json.dumps(
                [json.loads(file.read_text()) for file in sorted(folder.glob("noticed_*.json"))]
            ),
        )
    torch.distributed.destroy_process_group()


def lose_a_rank(folder: Path, number: int, rank: int) -> None:
    scenario = SCENARIOS[number]
    unbroken = Run(scenario).train(0, STEPS)
    (folder / f"losses_{number}_{rank}.json").write_text(json.dumps(unbroken))
    run = Run(scenario)
    run.train(0, SAVED)
    run.accelerator.save_state(str(folder / f"state_{number}"))
    run.train(SAVED, LOST)
    run.lose_in_backward(signal.SIGKILL if scenario.loss == "killed" else signal.SIGSTOP)
    (folder / f"process_{rank}").write_text(str(os.getpid()))
    run.accelerator.wait_for_everyone()
    # torchrun would end this rank before it notices anything itself
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    began = time.monotonic()
    try:
        run.step(LOST)
    except Exception as error:
        noticed = {"scenario": scenario, "seconds": time.monotonic() - began, "error": str(error)}
        (folder / f"noticed_{number}.json").write_text(json.dumps(noticed))
        if scenario.loss == "stalled":
            os.kill(int((folder / "process_1").read_text()), signal.SIGKILL)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def check_resumed(folder: Path, number: int, rank: int) -> None:
    run = Run(SCENARIOS[number])
    run.accelerator.load_state(str(folder / f"state_{number}"))
    losses = run.train(SAVED, STEPS)
    unbroken = json.loads((folder / f"losses_{number}_{rank}.json").read_text())
    assert losses == unbroken[SAVED:], (
        f"{SCENARIOS[number]}: resumed {losses}, unbroken {unbroken[SAVED:]}"
    )
    (folder / f"resumed_{number}_{rank}").touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    attempt(Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
