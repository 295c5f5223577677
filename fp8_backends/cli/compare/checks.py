"""What must hold for each backend of a comparison, and the verdict in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...compute.counts import KINDS
from ...words import counted, listed
from ..terminal import Verdict
from .settings import BASELINES
from .summary import Gap, Results, gap_to_reference, number, reference_of, t_quantile

COSINE_BOUND = 0.9
"""Least cosine of a parameter's gradient to the reference's: a wrong sign gives -1, FP8's rounding stays above 0.97."""

REFERENCE_COSINE_BOUND = 0.999
"""Least cosine of the reference's gradient to that of FP32 products at weights rounded to bf16. FP8 turns a gradient
away from the reference, in 1 - cosine, 40 to 160 times as far as bf16 does (models of 2 and 12 blocks): FP8 can keep
`COSINE_BOUND` only where bf16 keeps this one. Gradients that are zero in theory, such as that of a key's bias, to which
softmax is blind, stay below 0.7."""

FAR = 10
"""A mean gap beyond so many times its bound fails even where the seeds are too few for an interval."""

OUTCOMES = {True: "passed", False: "failed", None: "not resolved"}


@dataclass(frozen=True)
class Check:
    """One thing that must hold for a backend."""

    name: str
    passed: bool | None
    """None: what was measured does not tell."""
    detail: str

    @property
    def outcome(self) -> str:
        return OUTCOMES[self.passed]


def checks(results: Results) -> dict[str, list[Check]]:
    """Check everything that must hold, by backend; in a comparison that was cut short, for what it has done."""
    return {backend: list(_checks(results, backend)) for backend in results["backends"]}


def _checks(results: Results, backend: str) -> Iterator[Check]:
    found, reference = results["backends"][backend], reference_of(results)
    inspection, runs = found.get("inspection"), found["runs"]
    if found["status"] == "failed":
        yield Check("trained to the end", False, found["message"])
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
    yield Check("every loss is finite", not bad, f"not finite with seed {bad}" if bad else counted(len(runs), "run"))
    expected = {run["seed"]: run["start_checksum"] for run in results["backends"][reference]["runs"]}
    pairs = [run for run in runs if run["seed"] in expected]
    if backend != reference and pairs:
        odd = [run["seed"] for run in pairs if run["start_checksum"] != expected[run["seed"]]]
        detail = f"not with seed {odd}" if odd else counted(len(pairs), "pair")
        yield Check(f"same initial weights and data order as {reference}", not odd, detail)
    if backend not in BASELINES and (gap := gap_to_reference(results, backend)) is not None:
        yield _gap_check(gap, results["settings"]["loss_gap_bound"], reference)


def _products_check(inspection: dict[str, Any]) -> Check:
    converted, lacking = inspection["audit"]["products"], inspection["incomplete_layers"]
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
    steady = {name: number(value) for name, value in inspection["reference_gradient_cosines"].items()}
    judged = [name for name in cosines if steady[name] >= REFERENCE_COSINE_BOUND]
    others = listed(name for name in cosines if name not in judged)
    unjudged = others and f"not judged, no gradient to speak of, since bf16's rounding alone turns it: {others}"
    if not judged:
        return Check(name, None, unjudged)
    worst = min(judged, key=lambda name: -math.inf if math.isnan(cosines[name]) else cosines[name])
    detail = f"least cosine {cosines[worst]:.4f} ({worst}), bound {COSINE_BOUND}"
    return Check(name, cosines[worst] >= COSINE_BOUND, f"{detail}; {unjudged}" if unjudged else detail)


def _gap_check(gap: Gap, bound: float, reference: str) -> Check:
    name, verdict = f"held-out loss at most {bound} nats above {reference}'s", gap.verdict(bound)
    interval = "one seed, no interval" if gap.half_width is None else f"95 % interval {gap.low:+.4f} to {gap.high:+.4f}"
    if not math.isfinite(gap.mean):
        return Check(name, False, "a loss is not finite")
    if verdict == "not resolved" and gap.mean > FAR * bound:
        return Check(name, False, f"{gap.mean:+.4f}, {interval}: beyond {FAR} times the bound")
    passed = {"within": True, "not within": False, "not resolved": None}[verdict]
    return Check(name, passed, f"{gap.mean:+.4f}, {interval}: {verdict}")


# The verdict


def verdict(results: Results) -> Verdict:
    """Sum up the checks in words: `good` where the comparison finished and every check passed, `bad` where one failed.

    The details are sentences: what was cut short, each check that failed, those not resolved, and what to do.
    """
    made = [(backend, check) for backend, done in checks(results).items() for check in done]
    failed = [(backend, check) for backend, check in made if check.passed is False]
    unresolved = [(backend, check) for backend, check in made if check.passed is None]
    details = [f"Failed: {backend}: {check.name} ({check.detail})." for backend, check in failed]
    for name in dict.fromkeys(check.name for _, check in unresolved):
        backends = ", ".join(backend for backend, check in unresolved if check.name == name)
        details.append(f"Not resolved: {name} ({backends}).")
    headline, finished = _headline(len(made), len(failed), len(unresolved)), results["status"] == "finished"
    if finished:
        headline = headline[0].upper() + headline[1:]
        details += _advice(results, [backend for backend, _ in unresolved])
    else:
        why = f": {results['note']}" if results["note"] else ""
        state = "Still running" if results["status"] == "running" else f"Terminated early{why}"
        done = ", ".join(f"{name} {len(found['runs'])}" for name, found in results["backends"].items())
        headline = f"{state}. So far {headline}"
        details.insert(0, f"Finished, of {counted(results['settings']['seeds'], 'seed')} each: {done}.")
    mood = "bad" if failed else "good" if made and finished and not unresolved else "open"
    return Verdict(mood, f"{headline}.", details)


def _headline(made: int, failed: int, unresolved: int) -> str:
    if not made:
        return "no check could be made"
    passed = made - failed - unresolved
    is_open = f"{unresolved} {'is' if unresolved == 1 else 'are'} not resolved"
    if failed:
        return f"{failed} of {counted(made, 'check')} failed" + (f", and {is_open}" if unresolved else "")
    if not passed:
        return f"no check passed; {is_open}"
    all_passed = f"all {passed} checks" if passed > 1 else "the only check"
    return f"{all_passed} that could be judged passed; {is_open}" if unresolved else f"{all_passed} passed"


_FIRST_INTERVAL, _MOST_SEEDS = 5, 30


def _advice(results: Results, backends: list[str]) -> Iterator[str]:
    """Say how many seeds would resolve the gaps of these backends."""
    bound = results["settings"]["loss_gap_bound"]
    gaps = [gap for backend in backends if (gap := gap_to_reference(results, backend)) is not None]
    needed = [_seeds_to_resolve(gap, bound) for gap in gaps if gap.verdict(bound) == "not resolved"]
    if needed:
        time = "" if results["settings"]["minutes"] is None else " with more --minutes"
        yield f"More seeds or steps would resolve the held-out loss: --seeds {max(needed)}{time}."


def _seeds_to_resolve(gap: Gap, bound: float) -> int:
    """Return how many seeds decide on which side of the bound the interval lies, if they vary as those seen so far."""
    if gap.half_width is None:
        return _FIRST_INTERVAL
    deviation = gap.half_width * math.sqrt(gap.pairs) / t_quantile(gap.pairs - 1)
    for seeds in range(gap.pairs + 1, _MOST_SEEDS):
        if t_quantile(seeds - 1) * deviation / math.sqrt(seeds) <= abs(bound - gap.mean):
            return seeds
    return _MOST_SEEDS
