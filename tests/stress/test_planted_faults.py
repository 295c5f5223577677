"""Plant faults in trainings: the guard must name each at its step, and nothing else.

A fault is planted at a random step: in a batch, a gradient, a scaling state, or on one of two
ranks. The guard must name it at that step, with its place, and act on all ranks alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from stress.harness import STRESS, Processes, Training, bytes_of, forked

from fp8_backends import FP8BackendError
from fp8_backends.formats.scaling import HISTORY, INPUT, SCALE
from fp8_backends.tensors.scaled_tensor import stored_parts
from fp8_backends.watch import guard

EVERY = 4
"""Steps from one comparison of replicas to the next."""
FIRST, LAST, STEPS = 52, 60, 80
"""A fault is planted at a random step from FIRST to LAST."""


class Fault(NamedTuple):
    """Describe a fault by the kinds that name it, the begin of its first place, and its injection
    into the inputs, or into a stored value between backward and the step."""

    kinds: set[str]
    place: str = ""
    plant: Callable[[Training, torch.Tensor], torch.Tensor] = lambda run, x: x
    tamper: Callable[[Training], object] = lambda run: None
    scaled: bool = False
    """Possible only with scaling states."""


def with_nan(run: Training, x: torch.Tensor) -> torch.Tensor:
    return x.index_put((torch.tensor(3), torch.tensor(3)), torch.tensor(torch.nan))


def large(run: Training, x: torch.Tensor) -> torch.Tensor:
    return 1e4 * x


def infinite_gradient(run: Training, x: torch.Tensor) -> torch.Tensor:
    def inject(module, args, output):
        handle.remove()
        output.register_hook(lambda g: g.where(g < g.max(), torch.inf))

    handle = run.bare[0][2].register_forward_hook(inject)
    return x


def nan_history(run: Training) -> None:
    run.bare[0][2].fp8_scaling.view(torch.float32)[INPUT, HISTORY:] = torch.nan


def scale_bit(run: Training) -> None:
    run.bare[0][2].fp8_scaling[INPUT, SCALE] ^= 1 << 22


def weight_bit(run: Training) -> None:
    stored_parts(run.bare[0][2].weight.detach())[0].view(-1).view(torch.uint8)[20] ^= 1


SINGLE = {
    "NaN in a batch": Fault({"loss", "gradient"}, plant=with_nan),
    "inf in one layer's gradient": Fault({"gradient"}, "2.", plant=infinite_gradient),
    "activations x 10,000": Fault({"clipped"}, "0 (input)", plant=large, scaled=True),
    "history of NaN": Fault({"stuck"}, "2 (input)", tamper=nan_history, scaled=True),
    "history frozen": Fault({"stuck"}, "2 (input)", scaled=True),
}
ON_RANKS = {
    "rank 1: NaN in its batch": SINGLE["NaN in a batch"],
    "rank 1: activations x 10,000": SINGLE["activations x 10,000"],
    "rank 1: a bit of a weight": Fault({"apart"}, "2.weight", tamper=weight_bit),
    "rank 1: a bit of a scale": Fault(
        {"apart"}, "2, its scaling state", tamper=scale_bit, scaled=True
    ),
    "rank 1: skips a backward": Fault({"alone"}),
}


GUARDED = ("native:delayed", "msamp:O2", "msamp:O3", "ao:tensorwise")[: 1 if STRESS == 1 else None]
ACTIONS = ("skip", "stop") if STRESS == 1 else ("skip", "stop", "warn")


@pytest.mark.nightly
@pytest.mark.parametrize("backend", GUARDED)
def test_planted_fault_is_named_at_its_step(backend):
    forked(lambda: trials(SINGLE, backend, ACTIONS))


@pytest.mark.nightly
@pytest.mark.parametrize("backend", GUARDED)
def test_fault_of_one_rank_is_named_and_ranks_act_alike(backend):
    ranks = Processes(lambda: trials(ON_RANKS, backend, ACTIONS[::2]), ranks=2)
    decided, decided_by_1 = ranks.results()
    assert decided == decided_by_1


def trials(faults: dict[str, Fault], backend: str, actions: tuple[str, ...]) -> dict:
    """Return the guard's findings by fault and action."""
    random.seed(0)  # equal on all ranks
    findings = {}
    for name in possible(faults, backend):
        for action in actions:
            at = random.randint(FIRST, LAST)
            # a scale is synchronized again with the next backward, and each step recomputes the
            # codes of a weight at O3: such a bit exists only if it is compared at once
            if "scale" in name or ("weight" in name and backend == "msamp:O3"):
                at = LAST
            findings[name, action] = trial(backend, action, name, at)
    return findings


def possible(faults: dict[str, Fault], backend: str) -> list[str]:
    return [
        name
        for name, fault in faults.items()
        if not (fault.scaled and backend.startswith("ao"))
        # its steps wait for all ranks: the guard stops the rank, and leaves no run to judge
        and not (backend == "msamp:O3" and "skips" in name)
    ]


def trial(backend: str, action: str, name: str, at: int) -> list[tuple]:
    """Train with one fault, check that the guard names it and acts, and return its findings."""
    guard.COMPARED_EVERY = EVERY
    fault = {**SINGLE, **ON_RANKS}[name]
    case = f"{name} at {at}, {action}"
    run = Training(backend, guard=action)
    scaling = run.bare[0][2]
    is_mine = "rank 1" not in name or run.accelerator.process_index == 1
    skips, freezes = "skips" in name, name == "history frozen"
    is_stopped = False
    # a rank without a backward owes the others one
    for step in range(1, STEPS + 1 + (skips and is_mine)):
        is_due = step == at and is_mine
        x, y = run.batch(step, rows=32)
        if not (is_due and skips):
            run.backward(fault.plant(run, x) if is_due else x, y)
        if is_due:
            fault.tamper(run)
        if freezes and step == at:
            kept = scaling.fp8_scaling.clone()
        if freezes and step > at:
            for part in (slice(HISTORY - 1), 1):
                scaling.fp8_scaling[:, part] = kept[:, part]
        run.accelerator.clip_grad_norm_(run.models[0].parameters(), 1.0)
        before = values(run)
        try:
            run.optimizers[0].step()
        except FP8BackendError:
            is_stopped = True
        run.optimizers[0].zero_grad()
        if step == at and not (skips or freezes or "bit" in name):
            is_same = before == values(run)
            # a NaN may change weights or not, if nothing is done
            assert is_same == (action != "warn") or (action == "warn" and "NaN" in name), case
        found = guard.faults(run.optimizers[0])
        if is_stopped or (freezes and found):
            break
    assert not [each for each in found if each.step < at], f"{case}: false alarm {found[0]}"
    if skips and not is_mine:
        assert not found, f"{case}: named on a rank that did nothing wrong: {found[0]}"
        return []
    assert is_stopped == (action == "stop"), case
    due = {at}
    if freezes:
        due = set(range(at + guard.STUCK_AFTER - 1, at + guard.STUCK_AFTER + 2))
    if "weight" in name:
        due = {-(-at // EVERY) * EVERY}  # the next comparison
    first = [each for each in found if each.step in due]
    assert fault.kinds <= {each.kind for each in first}, f"{case}: named {found[:2]}"
    places = [each.where[0] for each in first if each.where]
    assert not fault.place or any(place.startswith(fault.place) for place in places), places
    return [] if skips else [tuple(each) for each in found]


def values(run: Training) -> list:
    """Return copies of everything that an optimizer's step changes."""
    states = [value for state in run.optimizers[0].state.values() for value in state.values()]
    return [bytes_of(each) for each in (*run.bare[0].parameters(), *states)]
