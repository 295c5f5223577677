"""From the results of a comparison to what a reader sees: paired gaps, and a row for each backend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...words import counted, readable_bytes, share
from ..terminal import change
from .settings import BASELINES

Results = dict[str, Any]

# Statistics: paired differences of runs that share seed, initial weights and data

LOSS_GAP_BOUND = 0.01
"""Nats by which the mean held-out loss of an FP8 backend may lie above the reference's."""

# 97.5 % quantiles of Student's t for 1, 2, 3, … degrees of freedom
_T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """Mean paired difference to the reference, positive where this backend's loss is higher."""

    mean: float
    half_width: float | None
    """Half the width of the 95 % confidence interval; None with a single pair."""
    pairs: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width

    def verdict(self, bound: float = LOSS_GAP_BOUND) -> str:
        """Say where the whole interval lies: `within` the bound, `not within`, or `not resolved` by the interval."""
        if not math.isfinite(self.mean):
            return "not within"
        if self.half_width is None:
            return "not resolved"
        if self.high <= bound:
            return "within"
        return "not within" if self.low > bound else "not resolved"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "low": self.low, "high": self.high, "verdict": self.verdict()}

    def __str__(self) -> str:
        interval = "" if self.half_width is None else f" ± {self.half_width:.4f}"
        return f"{self.mean:+.4f}{interval}"


def t_quantile(degrees: int) -> float:
    """Return the factor of a two-sided 95 % interval; beyond 30 degrees the normal value with its first correction."""
    if degrees < 1:
        raise ValueError("an interval needs at least two values")
    return _T_975[degrees - 1] if degrees <= len(_T_975) else 1.95996 + 2.37227 / degrees


def paired_gap(losses: Mapping[int, float], reference: Mapping[int, float]) -> Gap | None:
    """Return the gap over the seeds that both have run; None without any."""
    differences = [losses[seed] - reference[seed] for seed in sorted(losses.keys() & reference.keys())]
    if not differences:
        return None
    mean = statistics.fmean(differences)
    if len(differences) == 1 or not all(map(math.isfinite, differences)):
        return Gap(mean, None, len(differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Gap(mean, t_quantile(len(differences) - 1) * error, len(differences))


def spread(losses: Mapping[int, float]) -> dict[str, float] | None:
    """Return standard deviation and range over seeds; None with fewer than two."""
    values = list(losses.values())
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return {"standard_deviation": statistics.stdev(values), "range": max(values) - min(values)}


# Rows


@dataclass
class Row:
    """What was measured for one backend. None: not measured, or not yet."""

    backend: str
    tokens_per_second: float | None = None
    emulated: bool = False
    """Speed says nothing about FP8: this chip has no FP8 products."""
    speed_ratio: float | None = None
    """Tokens per second over the reference's; None for itself."""
    final_train_loss: float | None = None
    held_out_loss: float | None = None
    gap: Gap | None = None
    peak_memory_bytes: int | None = None
    memory_ratio: float | None = None
    """Peak memory over the reference's; None for itself."""
    bytes_per_parameter: float | None = None
    flops_share: float | None = None
    sent_bytes: int | None = None
    """What a rank sends to others in a step."""
    seeds_done: int = 0
    note: str = ""


def reference_of(results: Results) -> str:
    """Return the name of what the others are compared with."""
    return results["settings"]["reference"]


def rows(results: Results) -> list[Row]:
    """Make one row for each backend that has anything to show, in the order of the comparison."""
    return [_row(results, name) for name in results["backends"]]


def held_out_losses(results: Results, backend: str) -> dict[int, float]:
    """Return the held-out loss by seed; NaN where it was not finite."""
    return {run["seed"]: number(run["held_out_loss"]) for run in results["backends"][backend]["runs"]}


def train_losses(results: Results, backend: str) -> dict[int, list[float]]:
    return {run["seed"]: [number(v) for v in run["losses"]] for run in results["backends"][backend]["runs"]}


def gap_to_reference(results: Results, backend: str) -> Gap | None:
    if backend == reference_of(results):
        return None
    return paired_gap(held_out_losses(results, backend), held_out_losses(results, reference_of(results)))


def reference_spread(results: Results) -> dict[str, float] | None:
    """Return how far the reference's own held-out loss varies from seed to seed."""
    return spread(held_out_losses(results, reference_of(results)))


def _row(results: Results, name: str) -> Row:
    found, reference = results["backends"][name], results["backends"][reference_of(results)]
    runs, inspection = found["runs"], found.get("inspection") or {}
    emulated = name not in BASELINES and not results["fast_fp8"]
    gap, note = gap_to_reference(results, name), _note(results, name)
    row = Row(name, emulated=emulated, seeds_done=len(runs), gap=gap, note=note)
    if runs:
        row.final_train_loss = statistics.fmean(number(run["final_train_loss"]) for run in runs)
        row.held_out_loss = statistics.fmean(held_out_losses(results, name).values())
        if not emulated:
            row.tokens_per_second = _speed(runs)
            if reference["runs"] and found is not reference:
                row.speed_ratio = row.tokens_per_second / _speed(reference["runs"])
    if inspection:
        audit = inspection["audit"]
        row.flops_share = audit["flops_share"]
        row.sent_bytes = inspection.get("sent_bytes")
        if (stored := audit["bytes_per_parameter"].get("total")) is not None:
            row.bytes_per_parameter = stored + inspection["autocast_copy_bytes"] / inspection["parameters"]
        row.peak_memory_bytes = inspection["peak_memory_bytes"]
        expected = (reference.get("inspection") or {}).get("peak_memory_bytes")
        if expected and row.peak_memory_bytes and found is not reference:
            row.memory_ratio = row.peak_memory_bytes / expected
    return row


def _speed(runs: list[dict]) -> float:
    return statistics.median(run["tokens_per_second"] or run["emulated_tokens_per_second"] for run in runs)


def number(value: float | None) -> float:
    """Return a number of `results.json`, which holds None for what is not finite."""
    return math.nan if value is None else value


def _note(results: Results, name: str) -> str:
    found = results["backends"][name]
    if found["status"] == "failed":
        return f"failed: {found['message']}"
    if found["status"] != "finished":
        return f"not finished ({found['status']})"
    if name == reference_of(results):
        return "the reference: " + ("no autocast" if name == "fp32" else "autocast, FP32 weights")
    if name in BASELINES:
        return "baseline" + (", loss scaled" if name == "fp16" else "")
    engines = ", ".join(sorted(set(found["inspection"]["audit"]["engine"].values())))
    unconverted = list(found["inspection"]["audit"]["high_precision"])
    named = ", ".join(unconverted) if len(unconverted) <= 2 else f"{len(unconverted)} weights"
    return f"{engines} products" + (f"; {named} in high precision" if unconverted else "")


# Texts


def columns(results: Results) -> dict[str, str]:
    """Return headings by key in reading order: speed leads where it means something, else loss and memory do."""
    reference = reference_of(results)
    speed = {"tokens_per_second": "tokens/s", "speed_ratio": f"% vs {reference}"}
    others = {
        "final_train_loss": "final train loss",
        "held_out_loss": "held-out loss",
        "gap": f"gap to {reference}, nats",
        "peak_memory_bytes": "peak memory",
        "bytes_per_parameter": "bytes/parameter",
        "flops_share": "FLOPs in FP8",
    }
    if results["settings"].get("nproc", 1) > 1:
        others["sent_bytes"] = "sent a step"
    middle = {**speed, **others} if results["fast_fp8"] else {**others, **speed}
    return {"backend": "backend", **middle}


_FORMATS = {
    "tokens_per_second": "{:,.0f}",
    "final_train_loss": "{:.4f}",
    "held_out_loss": "{:.4f}",
    "bytes_per_parameter": "{:.2f}",
}


def cell(row: Row, key: str) -> str:
    """Return the text of one cell."""
    value = getattr(row, key)
    if key in ("tokens_per_second", "speed_ratio") and row.emulated:
        return "emulated"
    if value is None:
        return "–"
    if not math.isfinite(getattr(value, "mean", value) if key in ("gap", "final_train_loss", "held_out_loss") else 0):
        return "not finite"
    if key in ("speed_ratio", "flops_share"):
        return change(value) if key == "speed_ratio" else share(value)
    if key in ("sent_bytes", "peak_memory_bytes"):
        compared = key == "peak_memory_bytes" and row.memory_ratio is not None
        return readable_bytes(value) + (f" ({change(row.memory_ratio)})" if compared else "")
    return _FORMATS.get(key, "{}").format(value)


def ranks_text(results: Results) -> str:
    """Say how many ranks train, such as `2 ranks (DDP over gloo)`; empty for one rank."""
    ranks = results["settings"].get("nproc", 1)
    wire = "NCCL" if results["settings"]["device"] == "cuda" else "gloo"
    return f"{ranks} ranks (DDP over {wire})" if ranks > 1 else ""


def runs_text(seeds: int, steps: int) -> str:
    return f"{counted(seeds, 'seed')} of {counted(steps, 'step')}"


def held_out_text(results: Results) -> str:
    """Say how much is held out, such as `128 held-out windows (0.2 of those trained on)`."""
    settings = results["settings"]
    relative = results["held_out_windows"] / (settings["steps"] * settings["batch"])
    return f"{counted(results['held_out_windows'], 'held-out window')} ({relative:.2g} of those trained on)"


def spread_line(results: Results) -> str:
    """State the reference's own variation, against which every gap is read."""
    found, start = reference_spread(results), f"{reference_of(results)}'s own spread from seed to seed"
    if found is None:
        return f"{start}: needs at least two seeds"
    return f"{start}: standard deviation {found['standard_deviation']:.4f} nats, range {found['range']:.4f} nats"
