"""From the results of a comparison to what a reader sees: one row and a list of checks for each backend."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from .paired_gaps import Gap, paired_gap, spread
from .settings import BASELINES

COSINE_BOUND = 0.9
"""Least cosine of every parameter's gradient to the reference's: a wrong sign gives -1, FP8's rounding stays above
0.97."""

Results = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One thing that must hold for a backend."""

    name: str
    passed: bool
    detail: str


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
    """Over the reference's; None for itself."""
    bytes_per_parameter: float | None = None
    flops_share: float | None = None
    sent_bytes: int | None = None
    """What a rank sends to others in a step."""
    seeds_done: int = 0
    note: str = ""


def reference_of(results: Results) -> str:
    """What the others are compared with."""
    return results["settings"]["reference"]


def rows(results: Results) -> list[Row]:
    """One row for each backend that has anything to show, in the order of the comparison."""
    return [_row(results, name) for name in results["backends"]]


def held_out_losses(results: Results, backend: str) -> dict[int, float]:
    """By seed; NaN where it was not finite."""
    return {run["seed"]: _number(run["held_out_loss"]) for run in results["backends"][backend]["runs"]}


def train_losses(results: Results, backend: str) -> dict[int, list[float]]:
    return {run["seed"]: [_number(v) for v in run["losses"]] for run in results["backends"][backend]["runs"]}


def gap_to_reference(results: Results, backend: str) -> Gap | None:
    if backend == reference_of(results):
        return None
    return paired_gap(held_out_losses(results, backend), held_out_losses(results, reference_of(results)))


def reference_spread(results: Results) -> dict[str, float] | None:
    """How far the reference's own held-out loss varies from seed to seed."""
    return spread(held_out_losses(results, reference_of(results)))


def _row(results: Results, name: str) -> Row:
    found, reference = results["backends"][name], results["backends"][reference_of(results)]
    runs, inspection = found["runs"], found.get("inspection") or {}
    emulated = name not in BASELINES and not results["fast_fp8"]
    row = Row(
        name, emulated=emulated, seeds_done=len(runs), gap=gap_to_reference(results, name), note=_note(results, name)
    )
    if runs:
        row.final_train_loss = statistics.fmean(_number(run["final_train_loss"]) for run in runs)
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
    engines = sorted(set(found["inspection"]["audit"]["engine"].values()))
    kept = list(found["inspection"]["audit"]["high_precision"])
    named = ", ".join(kept) if len(kept) <= 2 else f"{len(kept)} weights"
    return f"{', '.join(engines)} products" + (f"; {named} in high precision" if kept else "")


def checks(results: Results, backend: str) -> list[Check]:
    """Everything that must hold for a backend; in a comparison that was cut short, for what it has done."""
    found, reference = results["backends"][backend], reference_of(results)
    if found["status"] == "failed":
        return [Check("trained to the end", False, found["message"])]
    inspection, runs = found.get("inspection"), found["runs"]
    done = []
    if inspection:
        done += [_products_check(inspection)] if backend not in BASELINES else []
        done += [_gradients_check(inspection, reference)] if backend != reference else []
    if runs:
        done += [_moved_check(runs), _finite_check(runs)]
        if backend != reference:
            done.append(_same_start_check(runs, results["backends"][reference]["runs"], reference))
        if backend not in BASELINES:
            done.append(_gap_check(results, backend))
    return [check for check in done if check is not None]


def all_checks(results: Results) -> dict[str, list[Check]]:
    return {backend: checks(results, backend) for backend in results["backends"]}


def _products_check(inspection: dict) -> Check:
    converted, lacking = inspection["audit"]["products"], inspection["incomplete_layers"]
    name = "every eligible layer ran its products in FP8"
    if not converted:
        return Check(name, False, "no layer was converted")
    if lacking:
        layer, kinds = next(iter(lacking.items()))
        return Check(
            name, False, f"{len(lacking)} of {len(converted)} layers lack some: {layer} has no {' '.join(kinds)}"
        )
    kinds = [k for k in ("fprop", "dgrad", "wgrad") if any(counts[k] for counts in converted.values())]
    return Check(name, True, f"{len(converted)} layers, {' '.join(kinds)}")


def _gradients_check(inspection: dict, reference: str) -> Check:
    cosines = {name: _number(value) for name, value in inspection["first_gradient_cosines"].items()}
    worst = min(cosines, key=lambda name: -math.inf if math.isnan(cosines[name]) else cosines[name])
    passed = cosines[worst] >= COSINE_BOUND
    return Check(
        f"gradients at the initial weights point where {reference}'s do",
        passed,
        f"least cosine {cosines[worst]:.4f} ({worst}), bound {COSINE_BOUND}",
    )


def _moved_check(runs: list[dict]) -> Check:
    unmoved = sorted({name for run in runs for name in run["unmoved"]})
    shown = ", ".join(unmoved[:3]) + (f" and {len(unmoved) - 3} more" if len(unmoved) > 3 else "")
    return Check(
        "every trainable parameter moved", not unmoved, f"not moved: {shown}" if unmoved else f"{len(runs)} runs"
    )


def _finite_check(runs: list[dict]) -> Check:
    bad = [run["seed"] for run in runs if None in (*run["losses"], run["held_out_loss"])]
    return Check("every loss is finite", not bad, f"not finite with seed {bad}" if bad else f"{len(runs)} runs")


def _same_start_check(runs: list[dict], reference_runs: list[dict], reference: str) -> Check | None:
    expected = {run["seed"]: run["start_checksum"] for run in reference_runs}
    pairs = [run for run in runs if run["seed"] in expected]
    if not pairs:
        return None
    odd = [run["seed"] for run in pairs if run["start_checksum"] != expected[run["seed"]]]
    detail = f"seed {odd} differ" if odd else f"{len(pairs)} pairs"
    return Check(f"same initial weights and data order as {reference}", not odd, detail)


def _gap_check(results: Results, backend: str) -> Check | None:
    gap, bound = gap_to_reference(results, backend), results["settings"]["loss_gap_bound"]
    if gap is None:
        return None
    interval = "one seed, no interval" if gap.half_width is None else f"95 % interval {gap.low:+.4f} to {gap.high:+.4f}"
    return Check(
        f"held-out loss at most {bound} nats above {reference_of(results)}'s",
        gap.mean <= bound,
        f"{gap.mean:+.4f}, {interval}: {gap.verdict(bound)}" if math.isfinite(gap.mean) else "a loss is not finite",
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def columns(results: Results) -> list[tuple[str, str]]:
    """(key, heading) in reading order: speed leads where it means something, else loss and memory do."""
    reference = reference_of(results)
    speed = [("tokens_per_second", "tokens/s"), ("speed_ratio", f"% vs {reference}")]
    loss = [
        ("final_train_loss", "final train loss"),
        ("held_out_loss", "held-out loss"),
        ("gap", f"gap to {reference}, nats"),
    ]
    memory = [
        ("peak_memory_bytes", "peak memory"),
        ("bytes_per_parameter", "bytes/parameter"),
        ("flops_share", "FLOPs in FP8"),
    ]
    if results["settings"].get("nproc", 1) > 1:
        memory.append(("sent_bytes", "sent a step"))
    middle = [*speed, *loss, *memory] if results["fast_fp8"] else [*loss, *memory, *speed]
    return [("backend", "backend"), *middle, ("note", "note")]


def cell(row: Row, key: str) -> str:
    """The text of one cell."""
    value = getattr(row, key)
    if key in ("tokens_per_second", "speed_ratio") and row.emulated:
        return "emulated"
    if value is None:
        return "–"
    if not math.isfinite(getattr(value, "mean", value) if key in ("gap", "final_train_loss", "held_out_loss") else 0):
        return "not finite"
    if key == "speed_ratio":
        return f"{(value - 1) * 100:+.1f} %"
    if key == "sent_bytes":
        return readable_bytes(value)
    if key == "peak_memory_bytes":
        change = "" if row.memory_ratio is None else f" ({row.memory_ratio - 1:+.0%})"
        return readable_bytes(value) + change
    formats = {
        "tokens_per_second": "{:,.0f}",
        "final_train_loss": "{:.4f}",
        "held_out_loss": "{:.4f}",
        "bytes_per_parameter": "{:.2f}",
        "flops_share": "{:.0%}",
    }
    return formats.get(key, "{}").format(value)


def readable_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def ranks_text(results: Results) -> str:
    """Such as `2 ranks (DDP over gloo)`; empty for one rank."""
    ranks = results["settings"].get("nproc", 1)
    wire = "NCCL" if results["settings"]["device"] == "cuda" else "gloo"
    return f"{ranks} ranks (DDP over {wire})" if ranks > 1 else ""


def runs_text(seeds: int, steps: int) -> str:
    return f"{seeds} seed{'s' * (seeds > 1)} of {steps} steps"


def held_out_text(results: Results) -> str:
    """Such as `128 held-out windows (0.2 of those trained on)`."""
    settings = results["settings"]
    share = results["held_out_windows"] / (settings["steps"] * settings["batch"])
    return f"{results['held_out_windows']} held-out windows ({share:.2g} of those trained on)"


def spread_line(results: Results) -> str:
    """The reference's own variation, against which every gap is read."""
    found, reference = reference_spread(results), reference_of(results)
    if found is None:
        return f"{reference}'s own spread from seed to seed: needs at least two seeds"
    return (
        f"{reference}'s own spread from seed to seed: standard deviation {found['standard_deviation']:.4f} nats, "
        f"range {found['range']:.4f} nats"
    )
