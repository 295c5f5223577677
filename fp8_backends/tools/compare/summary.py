"""Summarize the results of a comparison: paired gaps, a row for each backend, checks, and the
verdict in words."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...compute.counts import KINDS
from ...words import counted, listed, readable_bytes, share
from ..terminal import Verdict, change
from .workload import BASELINES

Results = dict[str, Any]

# Statistics: paired differences of runs with the same seed, initial weights and data

LOSS_GAP_BOUND = 0.01
"""Nats; upper bound of an FP8 backend's mean held-out loss above the reference's."""

# 97.5 % quantiles of Student's t for 1, 2, 3, … degrees of freedom
_T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """Mean paired difference to the reference; a positive one means a higher loss."""

    mean: float
    half_width: float | None
    """Half the width of the 95 % confidence interval; None for a single pair."""
    pairs: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width

    def verdict(self, bound: float = LOSS_GAP_BOUND) -> str:
        """Compare the whole interval with the bound: `within`, `not within` or `not resolved`."""
        if not math.isfinite(self.mean):
            return "not within"
        if self.half_width is None or self.low <= bound < self.high:
            return "not resolved"
        return "within" if self.high <= bound else "not within"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "low": self.low, "high": self.high, "verdict": self.verdict()}

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + (
            "" if self.half_width is None else f" ± {self.half_width:.4f}"
        )


def t_quantile(degrees: int) -> float:
    """Return the factor of a two-sided 95 % interval; beyond 30 degrees the normal value with its
    first correction."""
    if degrees < 1:
        raise ValueError("an interval needs at least two values")
    return _T_975[degrees - 1] if degrees <= len(_T_975) else 1.95996 + 2.37227 / degrees


def paired_gap(losses: Mapping[int, float], reference: Mapping[int, float]) -> Gap | None:
    """Return the gap over the common seeds; None without any."""
    differences = [
        losses[seed] - reference[seed] for seed in sorted(losses.keys() & reference.keys())
    ]
    if not differences:
        return None
    mean = statistics.fmean(differences)
    pairs = len(differences)
    if pairs == 1 or not all(map(math.isfinite, differences)):
        return Gap(mean, None, pairs)
    return Gap(
        mean, t_quantile(pairs - 1) * statistics.stdev(differences) / math.sqrt(pairs), pairs
    )


def number(value: float | None) -> float:
    """Return a number of `results.json`, which stores NaN and inf as None."""
    return math.nan if value is None else value


def reference_of(results: Results) -> str:
    return results["settings"]["reference"]


def held_out_losses(results: Results, backend: str) -> dict[int, float]:
    """Return the held-out loss by seed; NaN for one that is not finite."""
    return {
        run["seed"]: number(run["held_out_loss"]) for run in results["backends"][backend]["runs"]
    }


def train_losses(results: Results, backend: str) -> dict[int, list[float]]:
    return {
        run["seed"]: [number(v) for v in run["losses"]]
        for run in results["backends"][backend]["runs"]
    }


def gap_to_reference(results: Results, backend: str) -> Gap | None:
    if backend == reference_of(results):
        return None
    return paired_gap(
        held_out_losses(results, backend), held_out_losses(results, reference_of(results))
    )


def reference_spread(results: Results) -> dict[str, float] | None:
    """Return standard deviation and range over seeds; None for fewer than two, or for a loss that
    is not finite."""
    values = list(held_out_losses(results, reference_of(results)).values())
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return {"standard_deviation": statistics.stdev(values), "range": max(values) - min(values)}


@dataclass
class Row:
    """Measurements of one backend, ratios over the reference's. None: not measured, or not yet."""

    backend: str
    tokens_per_second: float | None = None
    emulated: bool = False
    speed_ratio: float | None = None
    final_train_loss: float | None = None
    held_out_loss: float | None = None
    gap: Gap | None = None
    peak_memory_bytes: int | None = None
    memory_ratio: float | None = None
    bytes_per_parameter: float | None = None
    flops_share: float | None = None
    sent_bytes: int | None = None
    seeds_done: int = 0
    note: str = ""


def rows(results: Results) -> list[Row]:
    return [_row(results, name) for name in results["backends"]]


def _row(results: Results, name: str) -> Row:
    report = results["backends"][name]
    reference = results["backends"][reference_of(results)]
    runs = report["runs"]
    inspection = report["inspection"]
    emulated = name not in BASELINES and not results["fast_fp8"]
    gap = gap_to_reference(results, name)
    note = _note(results, name)
    row = Row(name, emulated=emulated, seeds_done=len(runs), gap=gap, note=note)
    if runs:
        row.final_train_loss = statistics.fmean(number(run["final_train_loss"]) for run in runs)
        row.held_out_loss = statistics.fmean(held_out_losses(results, name).values())
        if not emulated:
            row.tokens_per_second = _speed(runs)
            if reference["runs"] and report is not reference:
                row.speed_ratio = row.tokens_per_second / _speed(reference["runs"])
    if inspection:
        audit = inspection["audit"]
        row.flops_share = audit["flops_share"]
        row.sent_bytes = inspection["sent_bytes"]
        if (stored := audit["bytes_per_parameter"].get("total")) is not None:
            row.bytes_per_parameter = (
                stored + inspection["autocast_copy_bytes"] / inspection["parameters"]
            )
        row.peak_memory_bytes = inspection["peak_memory_bytes"]
        expected = (reference["inspection"] or {}).get("peak_memory_bytes")
        if expected and row.peak_memory_bytes and report is not reference:
            row.memory_ratio = row.peak_memory_bytes / expected
    return row


def _speed(runs: list[dict]) -> float:
    return statistics.median(run["tokens_per_second"] for run in runs)


def _note(results: Results, name: str) -> str:
    report = results["backends"][name]
    if report["status"] == "failed":
        return f"failed: {report['message']}"
    if report["status"] != "finished":
        return f"not finished ({report['status']})"
    if name == reference_of(results):
        return "the reference: " + ("no autocast" if name == "fp32" else "autocast, FP32 weights")
    if name in BASELINES:
        return "baseline" + (", loss scaled" if name == "fp16" else "")
    audit = report["inspection"]["audit"]
    engines = ", ".join(sorted(set(audit["engine"].values())))
    unconverted = list(audit["high_precision"])
    named = ", ".join(unconverted) if len(unconverted) <= 2 else f"{len(unconverted)} weights"
    return f"{engines} products" + (f"; {named} in high precision" if unconverted else "")


def columns(results: Results) -> dict[str, str]:
    """Return headings by key in reading order: speed first on a chip with FP8 products, else loss
    and memory."""
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
    if results["settings"]["nproc"] > 1:
        others["sent_bytes"] = "sent a step"
    return {"backend": "backend", **(speed | others if results["fast_fp8"] else others | speed)}


_CELLS = {
    "tokens_per_second": "{:,.0f}".format,
    "speed_ratio": change,
    "bytes_per_parameter": "{:.2f}".format,
    "flops_share": share,
    **dict.fromkeys(("sent_bytes", "peak_memory_bytes"), readable_bytes),
    **dict.fromkeys(("final_train_loss", "held_out_loss"), "{:.4f}".format),
}


def cell(row: Row, key: str) -> str:
    value = getattr(row, key)
    if row.emulated and key in ("tokens_per_second", "speed_ratio"):
        return "emulated"
    if value is None:
        return "–"
    number = value.mean if isinstance(value, Gap) else value
    if isinstance(number, float) and not math.isfinite(number):
        return "not finite"
    if key == "peak_memory_bytes" and row.memory_ratio is not None:
        return f"{readable_bytes(value)} ({change(row.memory_ratio)})"
    return _CELLS.get(key, str)(value)


def ranks_text(results: Results) -> str:
    """Name the ranks, such as `2 ranks (DDP over gloo)`; empty for one rank."""
    ranks = results["settings"]["nproc"]
    wire = "NCCL" if results["settings"]["device"] == "cuda" else "gloo"
    return f"{ranks} ranks (DDP over {wire})" if ranks > 1 else ""


def runs_text(seeds: int, steps: int) -> str:
    return f"{counted(seeds, 'seed')} of {counted(steps, 'step')}"


def threads_text(results: Results) -> str:
    """Say how runs share a CPU, such as `Speeds of one thread, 2 runs at a time`; empty on a GPU."""
    at_once = results["machine"].get("runs_at_once")
    return f"Speeds of one thread, {counted(at_once, 'run')} at a time" if at_once else ""


def held_out_text(results: Results) -> str:
    """Return the held-out part, such as `128 held-out windows (0.2 of those trained on)`."""
    settings = results["settings"]
    windows = results["held_out_windows"]
    relative = windows / (settings["steps"] * settings["batch"])
    return f"{counted(windows, 'held-out window')} ({relative:.2g} of those trained on)"


def spread_line(results: Results) -> str:
    values = reference_spread(results)
    start = f"{reference_of(results)}'s own spread from seed to seed"
    if values is None:
        return f"{start}: needs at least two seeds"
    return f"{start}: standard deviation {values['standard_deviation']:.4f} nats, range {values['range']:.4f} nats"


# Checks

COSINE_BOUND = 0.9
"""Lower bound of a gradient's cosine to the reference's: a wrong sign gives -1, FP8's rounding
stays above 0.97."""

REFERENCE_COSINE_BOUND = 0.999
"""Judge only parameters with a cosine above this between the reference's gradient and the FP32
gradient at weights rounded to bf16. In 1 - cosine, FP8 turns a gradient 40 to 160 times as far as
bf16 (models of 2 and 12 blocks), so `COSINE_BOUND` needs this bound. Gradients that are zero in
theory, such as a key bias under softmax, stay below 0.7."""

FAR = 10
"""Fail a mean gap beyond this multiple of its bound even without an interval."""


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool | None
    """None: not resolved by the measurements."""
    detail: str


def checks(results: Results) -> dict[str, list[Check]]:
    return {backend: list(_checks(results, backend)) for backend in results["backends"]}


def _checks(results: Results, backend: str) -> Iterator[Check]:
    report = results["backends"][backend]
    reference = reference_of(results)
    inspection = report["inspection"]
    runs = report["runs"]
    if report["status"] == "failed":
        yield Check("trained to the end", False, report["message"])
        return
    if inspection and backend not in BASELINES:
        yield _products_check(inspection)
    if inspection and backend != reference:
        yield _gradients_check(inspection, reference)
    if not runs:
        return
    unmoved = sorted({name for run in runs for name in run["unmoved"]})
    detail = f"not moved: {listed(unmoved)}" if unmoved else counted(len(runs), "run")
    yield Check("every trainable parameter moved", not unmoved, detail)
    bad = [run["seed"] for run in runs if None in (*run["losses"], run["held_out_loss"])]
    yield Check(
        "every loss is finite",
        not bad,
        f"not finite with seed {bad}" if bad else counted(len(runs), "run"),
    )
    expected = {
        run["seed"]: run["start_checksum"] for run in results["backends"][reference]["runs"]
    }
    pairs = [run for run in runs if run["seed"] in expected]
    if backend != reference and pairs:
        odd = [run["seed"] for run in pairs if run["start_checksum"] != expected[run["seed"]]]
        detail = f"not with seed {odd}" if odd else counted(len(pairs), "pair")
        yield Check(f"same initial weights and data order as {reference}", not odd, detail)
    if backend not in BASELINES and (gap := gap_to_reference(results, backend)) is not None:
        yield _gap_check(gap, results["settings"]["loss_gap_bound"], reference)


def _products_check(inspection: dict[str, Any]) -> Check:
    converted = inspection["audit"]["products"]
    lacking = inspection["incomplete_layers"]
    name = "every eligible layer ran its products in FP8"
    if not converted:
        return Check(name, False, "no layer was converted")
    if lacking:
        layer, kinds = next(iter(lacking.items()))
        detail = f"{len(lacking)} of {counted(len(converted), 'layer')} lack some: {layer} has no {' '.join(kinds)}"
        return Check(name, False, detail)
    kinds = [k for k in KINDS if any(counts[k] for counts in converted.values())]
    return Check(name, True, f"{counted(len(converted), 'layer')}, {' '.join(kinds)}")


def _gradients_check(inspection: dict[str, Any], reference: str) -> Check:
    name = f"gradients at the initial weights point where {reference}'s do"
    cosines = {name: number(value) for name, value in inspection["first_gradient_cosines"].items()}
    steady = {
        name: number(value) for name, value in inspection["reference_gradient_cosines"].items()
    }
    judged = [name for name in cosines if steady[name] >= REFERENCE_COSINE_BOUND]
    others = listed(name for name in cosines if name not in judged)
    unjudged = (
        others
        and f"not judged, no gradient to speak of, since bf16's rounding alone turns it: {others}"
    )
    if not judged:
        return Check(name, None, unjudged)
    worst = min(judged, key=lambda name: -math.inf if math.isnan(cosines[name]) else cosines[name])
    detail = f"least cosine {cosines[worst]:.4f} ({worst}), bound {COSINE_BOUND}"
    return Check(
        name, cosines[worst] >= COSINE_BOUND, f"{detail}; {unjudged}" if unjudged else detail
    )


def _gap_check(gap: Gap, bound: float, reference: str) -> Check:
    name = f"held-out loss at most {bound} nats above {reference}'s"
    verdict = gap.verdict(bound)
    interval = "one seed, no interval"
    if gap.half_width is not None:
        interval = f"95 % interval {gap.low:+.4f} to {gap.high:+.4f}"
    if not math.isfinite(gap.mean):
        return Check(name, False, "a loss is not finite")
    if verdict == "not resolved" and gap.mean > FAR * bound:
        return Check(name, False, f"{gap.mean:+.4f}, {interval}: beyond {FAR} times the bound")
    passed = {"within": True, "not within": False, "not resolved": None}[verdict]
    return Check(name, passed, f"{gap.mean:+.4f}, {interval}: {verdict}")


def verdict(results: Results) -> Verdict:
    """Sum up the checks: `good` if the comparison finished and all passed, `bad` if one failed,
    else `open`."""
    outcomes = [(backend, check) for backend, made in checks(results).items() for check in made]
    failed = [(backend, check) for backend, check in outcomes if check.passed is False]
    unresolved = [(backend, check) for backend, check in outcomes if check.passed is None]
    details = [f"Failed: {backend}: {check.name} ({check.detail})." for backend, check in failed]
    for name in dict.fromkeys(check.name for _, check in unresolved):
        backends = ", ".join(backend for backend, check in unresolved if check.name == name)
        details.append(f"Not resolved: {name} ({backends}).")
    headline = _headline(len(outcomes), len(failed), len(unresolved))
    finished = results["status"] == "finished"
    if finished:
        headline = headline[0].upper() + headline[1:]
        details += _advice(results, [backend for backend, _ in unresolved])
    else:
        why = f": {results['note']}" if results["note"] else ""
        state = "Still running" if results["status"] == "running" else f"Terminated early{why}"
        done = ", ".join(
            f"{name} {len(report['runs'])}" for name, report in results["backends"].items()
        )
        headline = f"{state}. So far {headline}"
        details.insert(
            0, f"Finished, of {counted(results['settings']['seeds'], 'seed')} each: {done}."
        )
    mood = "bad" if failed else "good" if outcomes and finished and not unresolved else "open"
    return Verdict(mood, f"{headline}.", details)


def _headline(made: int, failed: int, unresolved: int) -> str:
    if not made:
        return "no check could be made"
    passed = made - failed - unresolved
    is_open = f"{unresolved} {'is' if unresolved == 1 else 'are'} not resolved"
    if failed:
        return f"{failed} of {counted(made, 'check')} failed" + (
            f", and {is_open}" if unresolved else ""
        )
    if not passed:
        return f"no check passed; {is_open}"
    all_passed = f"all {passed} checks" if passed > 1 else "the only check"
    if unresolved:
        return f"{all_passed} that could be judged passed; {is_open}"
    return f"{all_passed} passed"


_FIRST_INTERVAL = 5
_MOST_SEEDS = 30


def _advice(results: Results, backends: list[str]) -> Iterator[str]:
    bound = results["settings"]["loss_gap_bound"]
    gaps = [gap for backend in backends if (gap := gap_to_reference(results, backend)) is not None]
    needed = [_seeds_to_resolve(gap, bound) for gap in gaps if gap.verdict(bound) == "not resolved"]
    if needed:
        time = "" if results["settings"]["minutes"] is None else " with more --minutes"
        yield f"More seeds or steps would resolve the held-out loss: --seeds {max(needed)}{time}."


def _seeds_to_resolve(gap: Gap, bound: float) -> int:
    """Return the number of seeds for an interval on one side of the bound, at the present
    deviation."""
    if gap.half_width is None:
        return _FIRST_INTERVAL
    deviation = gap.half_width * math.sqrt(gap.pairs) / t_quantile(gap.pairs - 1)
    for seeds in range(gap.pairs + 1, _MOST_SEEDS):
        if t_quantile(seeds - 1) * deviation / math.sqrt(seeds) <= abs(bound - gap.mean):
            return seeds
    return _MOST_SEEDS
