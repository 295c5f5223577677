"""`fp8-backends chart`: measure the precision and bytes of every level on a small model after one
training step."""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ..announcement import logger
from ..compute import hardware
from ..compute.counts import KINDS
from ..compute.registry import check_available
from ..errors import FP8BackendError
from ..evidence.auditing import Audit, audit, stored_bytes
from ..preparation import prepare
from ..recipes.handlers import resolve
from ..recipes.precision_plan import plan
from ..states.gradient_release import release_gradients
from ..tensors.sharded_tensor import inner_tensors
from .terminal import paragraphs, table

CHARTED = (
    *(
        "native:dynamic",
        "native:delayed",
        "native:rowwise",
        "ao:tensorwise",
        "ao:rowwise",
        "te:delayed",
    ),
    *("msamp:O1", "msamp:O2", "msamp:O3", "msamp:O4", "te+msamp:O2"),
)
"""Backends without a level (O0), then levels."""

ModelAndOptimizer = tuple[nn.Module, torch.optim.Optimizer]

_NAMES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
_NAMES |= {"float8_e4m3fn": "FP8", "uint8": "FP8", "int8": "INT8"}
_LEGEND = (
    (
        "bytes",
        "per element of the converted weights, read from live tensors after one optimizer step",
    ),
    (
        "transient",
        "copies of the weights that autograd keeps from forward to backward, beyond these bytes",
    ),
    ("accumulating", "what the gradient gains while microbatches accumulate in FP32"),
    ("released", "the bytes with gradient_release, which drops gradients inside backward"),
    ("comm", "as planned; one process communicates nothing"),
)


@dataclass
class Level:
    """One row of the chart; `_LEGEND` explains the bytes."""

    name: str
    gemm: str = "–"
    comm: str = "–"
    weight: str = "–"
    master: str = "–"
    gradient: str = "–"
    optimizer: str = "–"
    bytes_per_element: float | None = None
    transient_bytes_per_element: float | None = None
    accumulation_bytes_per_element: float | None = None
    released_bytes_per_element: float | None = None
    precision: str = ""
    """Precision around FP8, or of AMP."""
    not_measured: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prepares a small model at every level that this version has, takes one optimizer step, "
        "and prints what the audit of the live model finds. Comm is what the recipe plans."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    levels = measure()
    print(
        json.dumps([asdict(level) for level in levels], indent=1)
        if args.json
        else _readable(levels)
    )
    return 0


def _model() -> ModelAndOptimizer:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 128, bias=False), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(128, 64, bias=False)).to(hardware.device())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def measure(
    backends: Sequence[str] = CHARTED, make: Callable[[], ModelAndOptimizer] = _model
) -> list[Level]:
    """Measure AMP on a stock model, then each backend on models of `make`."""
    level_before = logger.level
    logger.setLevel(logging.WARNING)  # hides the proof line of each model
    try:
        return [_measure_amp(*make()), *(_measure(backend, *make()) for backend in backends)]
    finally:
        logger.setLevel(level_before)


def _measure_amp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Level:
    dtypes: set[str] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, __, result: dtypes.add(str(result.dtype).removeprefix("torch."))
            )
    transient = _step(model, optimizer, torch.autocast(hardware.device(), torch.float16))
    gemm = _precisions("+".join(sorted(dtypes)))
    return _level(
        "FP16 AMP", audit(model, optimizer), transient, gemm=gemm, comm="FP32", precision="fp16"
    )


def _measure(backend: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Level:
    try:
        recipe = resolve(backend)
        check_available(recipe)
    except FP8BackendError as error:
        return Level(backend, not_measured=str(error))
    prepare(model, optimizer, recipe)
    transient = _step(model, optimizer, hardware.fast_autocast(hardware.device()))
    report = audit(model, optimizer)
    kinds = [kind for kind in KINDS if any(counts[kind] for counts in report.products.values())]
    gemm = "FP8" if len(kinds) == len(KINDS) else f"FP8 {' '.join(kinds)}" if kinds else "no FP8"
    name = recipe.name if recipe.level != "O0" else f"{recipe.name} (O0)"
    precision = hardware.fast_precision(hardware.device())
    level = _level(name, report, transient, gemm=gemm, comm=plan(recipe).comm, precision=precision)
    sizes = []
    optimizer.zero_grad()
    for _ in range(2):  # microbatches
        model(torch.randn(32, 64, device=hardware.device())).float().square().mean().backward()
        sizes.append(sum(stored_bytes(weight.grad) for weight in model.parameters()))
    gained = (sizes[1] - sizes[0]) / sum(weight.numel() for weight in model.parameters())
    level.accumulation_bytes_per_element = round(gained, 3)
    if recipe.level != "O0":
        optimizer.zero_grad()
        release_gradients(optimizer, model.parameters())
        _step(model, optimizer, hardware.fast_autocast(hardware.device()))
        level.released_bytes_per_element = audit(model, optimizer).bytes_per_element["total"]
    return level


def _level(name: str, report: Audit, transient: float, **values: str) -> Level:
    parts = {
        part: _precisions(report.dtypes.get(part, ""))
        for part in ("weight", "master", "gradient", "optimizer")
    }
    sizes = {
        "bytes_per_element": report.bytes_per_element["total"],
        "transient_bytes_per_element": round(transient, 3),
    }
    return Level(name, **parts, **sizes, **values)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: torch.autocast) -> float:
    """Take one training step and return the bytes of saved weight copies per element of the
    weights."""
    weights = {_pointer(weight): weight.numel() for weight in model.parameters()}
    copies: dict[int, int] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        # no activation is as large as a weight here: 32 rows, and no side of a weight is below 64
        if saved.numel() in weights.values() and _pointer(saved) not in weights:
            copies[_pointer(saved)] = stored_bytes(saved)
        return saved

    scaler = torch.amp.GradScaler(hardware.device(), enabled=autocast.fast_dtype == torch.float16)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        loss = (
            model(torch.randn(32, 64, device=hardware.device(), requires_grad=True))
            .float()
            .square()
            .mean()
        )
    transient = sum(copies.values()) / sum(weights.values())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    return transient


def _pointer(tensor: torch.Tensor) -> int:
    """Return the address of the data; for a wrapper subclass, of its first part."""
    return next(iter(inner_tensors(tensor))).data_ptr()


def _precisions(dtypes: str) -> str:
    """Write `float32+float32` as `FP32+FP32`."""
    return "+".join(_NAMES.get(name.strip(), name.strip()) for name in dtypes.split("+")) or "–"


def _readable(levels: list[Level]) -> str:
    precisions = ("level", "GEMM", "comm", "weight", "master", "gradient", "Adam states")
    rows = [[*precisions, *(name for name, _ in _LEGEND[:4])]]
    for level in levels:
        if not level.not_measured:
            cells = [*asdict(level).values()][: len(rows[0])]
            rows.append(
                [
                    "–" if each is None else each if isinstance(each, str) else f"{each:.4g}"
                    for each in cells
                ]
            )
    notes = [*_LEGEND, ("around FP8", hardware.fast_precision(hardware.device()))]
    notes += [
        ("not measured", f"{level.name}: {level.not_measured}")
        for level in levels
        if level.not_measured
    ]
    return f"{table(rows)}\n\n{paragraphs(notes)}"
