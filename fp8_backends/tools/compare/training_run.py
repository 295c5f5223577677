"""Train as a worker of `compare`, and report each event as a line of JSON.

The worker runs in turns: a backend's first steps observed, or one of its seeds. A rank begins a
turn by reading its permit from standard input; a turn ends for no rank before it has begun for all.
Rank 0 reports.

    python -m fp8_backends.tools.compare.training_run FOLDER
"""

import contextlib
import functools
import gc
import json
import logging
import os
import resource
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer's first step would load it, which takes seconds
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from transformers import get_cosine_schedule_with_warmup

import fp8_backends

from ...announcement import logger
from ...evidence.auditing import incomplete_layers
from ...tensors.scaled_tensor import ScaledTensor
from ...words import finite
from .measuring import autocast_copies, peak_memory, sent_bytes
from .workload import (
    FIRST_STEPS,
    PERMIT_BYTES,
    Settings,
    TrainingText,
    build_model,
    inputs,
    task,
)

Report = Callable[..., None]

INSPECTED_STEPS = 4
"""Enough for the proof, for a compiler to settle, and for one step with all optimizer states in
place."""
TIMED_STEPS = 3
"""Unobserved steps after those, to estimate the time of the comparison."""


def take_turn(
    settings: Settings, text: TrainingText, backend: str, seed: int, report: Report
) -> None:
    """Inspect the first steps, or train a seed; report once all ranks have freed memory."""
    if seed == FIRST_STEPS:
        values = inspect(settings, text, backend)
    else:
        run = Run(settings, text, backend, seed)
        values = run.train(lambda step, loss: report("step", seed=seed, step=step, loss=loss))
        del run
    AcceleratorState._reset_state(True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.barrier()
    report("inspected" if seed == FIRST_STEPS else "run", **values)


class Run:
    """Hold one model, its optimizer and its data, prepared by a stock Accelerator."""

    def __init__(
        self,
        settings: Settings,
        text: TrainingText,
        backend: str,
        seed: int,
        with_reference: bool = False,
    ) -> None:
        self.settings = settings
        self.text = text
        self.seed = seed
        began = time.perf_counter()
        self.accelerator = _accelerator(settings, backend)
        self.bare = model = build_model(settings, text.vocab_size, seed)
        self.task = task(settings)
        self.starts = text.batches(settings.steps, settings.batch, settings.sequence, seed)
        checksum = zlib.crc32(self.starts.numpy().tobytes())
        for parameter in model.parameters():
            checksum = zlib.crc32(parameter.detach().cpu().numpy().tobytes(), checksum)
        self.start_checksum = f"{checksum:08x}"
        """Equal for two runs with the same initial weights and order of data."""
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.lr,
            betas=(0.9, 0.99),
            weight_decay=settings.weight_decay,
        )
        # A long warm-up: a large step early amplifies small differences, and after a short one the
        # gap of one backend varied several times as much from seed to seed.
        warmup = round(settings.steps * settings.warmup_share)
        scheduler = get_cosine_schedule_with_warmup(optimizer, warmup, settings.steps - 1)
        if with_reference:  # gradients of the first batch, before conversion
            weights = dict(model.named_parameters())
            self.reference_gradients = self._gradients(
                weights, autocast=settings.reference == "bf16"
            )
            rounded = {
                name: weight.detach().bfloat16().float().requires_grad_(weight.requires_grad)
                for name, weight in weights.items()
            }
            self.reference_cosines = self._cosines(self._gradients(rounded, autocast=False))
            """Cosines of the reference's gradients to the FP32 gradients at weights rounded to
            bf16."""
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        self.prepared = {
            name: _values(p) for name, p in model.named_parameters() if p.requires_grad
        }
        self.start_seconds = time.perf_counter() - began

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        tokens = self.text.windows(self.starts[step % len(self.starts)], self.settings.sequence)
        return self._inputs(tokens, seed=self.seed * 1_000_003 + step)

    def _inputs(self, tokens: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
        values = inputs(tokens, self.task, self.text.vocab_size, seed)
        return {name: value.to(self.accelerator.device) for name, value in values.items()}

    def backward(self, step: int) -> torch.Tensor:
        ranks = self.accelerator.num_processes
        rank = self.accelerator.process_index
        loss = self.model(
            **{name: value.chunk(ranks)[rank] for name, value in self.batch(step).items()}
        ).loss
        self.accelerator.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.scheduler.step()

    def step(self, step: int) -> torch.Tensor:
        loss = self.backward(step)
        self.update()
        self.optimizer.zero_grad()
        return loss

    def train(self, progress: Callable[[int, float], None]) -> dict[str, Any]:
        """Run all steps, then evaluate. Times exclude the first tenth, and with it compilation."""
        settings = self.settings
        losses = []
        times = []
        self.model.train()
        on_gpu = self.accelerator.device.type == "cuda"
        group = 5 if on_gpu else 1  # reading a loss makes a GPU wait
        pending: list[torch.Tensor] = []
        began = time.perf_counter()
        for step in range(settings.steps):
            pending.append(self.step(step))
            if len(pending) == group or step == settings.steps - 1:
                values = self.accelerator.reduce(torch.stack(pending).float(), "mean").tolist()
                now = time.perf_counter()
                times += [(now - began) / len(values)] * len(values)
                losses += values
                pending.clear()
                progress(step + 1, values[-1])
                began = time.perf_counter()
        settled = times[max(3, settings.steps // 10) :] or times
        last = losses[-max(1, settings.steps // 10) :]
        median = statistics.median(settled)
        return {
            "seed": self.seed,
            "losses": [round(value, 5) for value in losses],
            "final_train_loss": statistics.fmean(last),
            "held_out_loss": self.held_out_loss(),
            "step_seconds": median,
            "tokens_per_second": settings.batch * settings.sequence / median,
            "start_checksum": self.start_checksum,
            "unmoved": self.unmoved(),
        }

    @torch.no_grad()
    def held_out_loss(self) -> float:
        accelerator = self.accelerator
        several = self.accelerator.num_processes > 1
        self.model.eval()
        windows = self.text.held_out_windows(self.settings.held_out_windows, self.settings.sequence)
        model = self.bare if several else self.model  # DDP would wait for ranks with fewer windows
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        mine = torch.arange(accelerator.process_index, len(windows), accelerator.num_processes)
        inputs = self._inputs(windows, seed=-1)
        for rows in mine.to(accelerator.device).split(self.settings.batch):
            total += model(**{name: value[rows] for name, value in inputs.items()}).loss * len(rows)
        self.model.train()
        if several:
            dist.all_reduce(total)
        return total.item() / len(windows)

    def unmoved(self) -> list[str]:
        """List trainable parameters that are unchanged since `prepare` stored them."""
        now = dict(self.bare.named_parameters())
        return sorted(
            name
            for name, before in self.prepared.items()
            if torch.equal(before, _values(now[name]))
        )

    def _gradients(
        self, weights: dict[str, torch.Tensor], autocast: bool
    ) -> dict[str, torch.Tensor]:
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=autocast):
            loss = torch.func.functional_call(self.bare, weights, kwargs=self.batch(0)).loss
        gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        return {
            name: each.cpu()
            for name, each in zip(trained, gradients, strict=True)
            if each is not None
        }

    def gradient_cosines(self) -> dict[str, float]:
        """Return the cosine of every parameter's gradient to the reference's at the initial
        weights; 0 without one."""
        return self._cosines(
            {name: p.grad for name, p in self.bare.named_parameters() if p.grad is not None}
        )

    def _cosines(self, gradients: dict[str, torch.Tensor]) -> dict[str, float]:
        cosines = dict.fromkeys(self.reference_gradients, 0.0)
        for name in cosines.keys() & gradients.keys():
            pair = gradients[name], self.reference_gradients[name]
            gradient, expected = (each.detach().cpu().double().flatten() for each in pair)
            norms = (gradient.norm() * expected.norm()).item()
            # without a direction, 1 for equal ones
            equal = float(torch.equal(gradient, expected))
            cosines[name] = (gradient @ expected).item() / norms if norms != 0 else equal
        return cosines


def _values(parameter: torch.Tensor) -> torch.Tensor:
    """Return plain values on the CPU, for a scaled weight with all the precision on this rank."""
    values = parameter.detach()
    if isinstance(parameter, ScaledTensor):
        values = parameter.exact() if parameter.elsewhere is None else parameter.dequantize()
    return values.to("cpu", copy=True)


def inspect(settings: Settings, text: TrainingText, backend: str) -> dict[str, Any]:
    """Observe the first training steps (gradients at the initial weights, audit, memory), then time
    a few."""
    with _messages() as messages:
        run = Run(settings, text, backend, seed=0, with_reference=True)
        run.backward(0)
        run.optimizer.zero_grad()
        # again, weights unchanged: delayed scaling has no amax before its first pass
        run.backward(0)
        cosines = run.gradient_cosines()
        run.reference_gradients.clear()
        run.update()
        run.optimizer.zero_grad()
        for step in range(1, INSPECTED_STEPS - 1):
            run.step(step)
        last_step = functools.partial(run.step, INSPECTED_STEPS - 1)
        peak = peak_memory(last_step, run.bare, run.optimizer)
        sent = sent_bytes(last_step) if run.accelerator.num_processes > 1 else None
        with autocast_copies(run.bare) as copies:
            run.backward(INSPECTED_STEPS)
        run.update()
        audit = fp8_backends.audit(run.model, run.optimizer)
        recipe = getattr(run.accelerator, "fp8_recipe", None)
        run.optimizer.zero_grad()
    seconds = []
    for step in range(INSPECTED_STEPS + 1, INSPECTED_STEPS + 1 + TIMED_STEPS):
        began = time.perf_counter()
        run.step(step).item()  # makes a GPU wait
        seconds.append(time.perf_counter() - began)
    return {
        "parameters": sum(parameter.numel() for parameter in run.bare.parameters()),
        "peak_memory_bytes": peak,
        "autocast_copy_bytes": sum(copies.values()),
        "sent_bytes": sent,
        "first_gradient_cosines": {name: round(value, 6) for name, value in cosines.items()},
        "reference_gradient_cosines": {
            name: round(value, 6) for name, value in run.reference_cosines.items()
        },
        "audit": audit.to_dict(),
        "incomplete_layers": incomplete_layers(audit, recipe) if recipe else {},
        "messages": messages,
        "start_seconds": run.start_seconds,
        "step_seconds": statistics.median(seconds),
        "resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _accelerator(settings: Settings, backend: str) -> Accelerator:
    AcceleratorState._reset_state(True)
    # ranks share each batch: without split_batches a scheduler would take as many steps at a time
    # as there are ranks
    config = DataLoaderConfiguration(split_batches=True)
    common: dict[str, Any] = {"cpu": settings.device == "cpu", "dataloader_config": config}
    if settings.compile:
        common["dynamo_backend"] = "inductor"
    if backend == "fp32":
        return Accelerator(mixed_precision="no", **common)
    if backend in ("bf16", "fp16"):
        accelerator = Accelerator(mixed_precision=backend, **common)
        if backend == "fp16" and settings.device == "cpu":
            # stock Accelerate quietly trains in FP32 here; with these two it autocasts and scales
            # as on a GPU
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu")
        return accelerator
    fields = settings.features | {"autocast_dtype": settings.reference}
    handler = fp8_backends.FP8RecipeKwargs(backend=backend, **fields)
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[handler], **common)


@contextlib.contextmanager
def _messages() -> Iterator[list[str]]:
    """Collect this package's log messages, the proof line and notices, each once."""
    lines: dict[str, None] = {}
    handler = logging.Handler()
    level = logger.level
    handler.emit = lambda record: lines.setdefault(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    messages: list[str] = []
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        messages += lines


def _reporter() -> Report:
    """Return a writer of events to stdout (other ranks: only "ready" and "failed"); other output
    goes to stderr."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    last_step = 0.0

    def report(event: str, **values: Any) -> None:
        nonlocal last_step
        if event not in ("ready", "failed") and int(os.environ.get("RANK", 0)) != 0:
            return
        if event == "step":
            if time.monotonic() - last_step < 0.2:
                return
            last_step = time.monotonic()
        stream.write(json.dumps(finite({"event": event, **values}), allow_nan=False) + "\n")

    return report


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    report = _reporter()
    permits = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # hides the permits from this process's children
    text = TrainingText(**torch.load(folder / "text.pt", weights_only=True))
    try:
        settings = _read(folder)
        if settings.device == "cpu":
            # Runs share the cores. OpenMP's threads would wait in a loop for one that another
            # process keeps from its core. Bits may depend on their number, so it never varies.
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(True, warn_only=True)
        # loads the modules of transformers
        build_model(replace(settings, device="meta"), text.vocab_size, seed=0)
        report("ready")
        while given := os.read(permits, PERMIT_BYTES):
            settings = _read(folder)
            backend, seed = map(int, given.split())
            take_turn(settings, text, settings.trained[backend], seed, report)
    except BrokenPipeError:  # the comparison has ended
        os._exit(1)
    except Exception as error:
        report("failed", message=f"{type(error).__name__}: {error}")
        raise
    return 0


def _read(folder: Path) -> Settings:
    # read at each turn: the first ones decide how much fits into the time limit
    return Settings(**json.loads((folder / "settings.json").read_text()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
