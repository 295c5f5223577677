"""Adam and AdamW over scaled weights, gradients and states.

The step reads and writes the scaled weight: FP16, at O4 E4M3 codes with residuals; at O3 the master, from which it then
makes the E4M3 weight. It computes in FP32, and rounds with scales that follow from bounds of this step's amaxes: all
parameters in one kernel where the device has one (`numerics/kernels`). Plain FP32 parameters with FP32 states (O1,
or tensors of fewer than 4096 elements) are left to PyTorch's own implementation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adam import adam

from ..numerics.faults import NOT_NEGATIVE, Range
from ..numerics.kernels.adam import AdamSteps, Job, Slot, adam_hypers, has_kernels
from ..numerics.kernels.adam_table import LEAST_ROOT, measured
from ..numerics.scaled_tensor import KnownAmax, ScaledTensor, stored_parts
from ..numerics.sharded_tensor import local_part
from . import sharding
from .lost_updates import MOMENTS, share_of_lost_updates
from .scaled_states import Declaration, LocalView, ScaledStates, slot_of

ADAMW = Declaration(
    torch.optim.AdamW,
    roles=dict(zip(MOMENTS, ("first_moment", "second_moment"), strict=True)),
    ranges={
        "lr": NOT_NEGATIVE,
        "eps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "betas": Range("from 0 to below 1", least=0.0, most=1.0 - 2.0**-53),
    },
    refused=("amsgrad", "differentiable"),
)


class _Record(NamedTuple):
    numbers: torch.Tensor
    """FP32 [4], as `measured` returns."""
    seen: list[tuple[weakref.ref, int]]
    """The tensors that were measured, and autograd's counts of writes to them."""


class Records:
    """The largest numbers of the tensors that the last step has stored, by the `id` of a parameter.

    A step of one pass needs those before it and leaves those after it (`numerics/kernels/adam_table.py`). They are no
    part of a checkpoint: after loading, as after any other write, they are measured again, which gives the same
    numbers."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def take(self, key: int, slots: Sequence[Slot], parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The numbers of a weight, exp_avg and exp_avg_sq, for a step to use up. parts: the tensors that `slots` hold,
        or are views of."""
        record = self._records.pop(key, None)
        if record is None or len(record.seen) != len(parts):
            return measured(*slots)
        pairs = zip(record.seen, parts, strict=True)
        unchanged = all(seen() is part and version == part._version for (seen, version), part in pairs)
        return record.numbers if unchanged else measured(*slots)

    def keep(self, key: int, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Keep the numbers that a step has left."""
        self._records[key] = _Record(numbers, [(weakref.ref(part), part._version) for part in parts])


class ScaledMoments(ScaledStates):
    """Steps of Adam and AdamW over states that are rounded."""

    fp8_records: Records
    """No part of copies and checkpoints."""

    def _step_plain(self, views: Sequence[LocalView]) -> None:
        group, states = views[0].group, [self.state_of(view.group, view.parameter) for view in views]
        adam(
            [view.weight for view in views],
            [view.gradient for view in views],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            has_complex=any(view.weight.is_complex() for view in views),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize", "foreach", "capturable")},
            differentiable=False,
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    def _step_scaled(self, views: Sequence[LocalView]) -> None:
        states = [self.state_of(view.group, view.parameter) for view in views]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        jobs = [
            Job(
                slot_of(_contiguous(view.weight)),
                slot_of(_contiguous(view.gradient)),
                slot_of(state["exp_avg"]),
                slot_of(state["exp_avg_sq"]),
                hyper,
                decoupled=view.group["decoupled_weight_decay"],
                maximize=view.group["maximize"],
                rounding=self.fp8_states.rounding,
                seed=view.index,
                copy=None if view.copy is None else slot_of(view.copy),
                first=view.first,
                finite=view.finite,
            )
            for view, state, hyper in zip(views, states, _hypers(views, states), strict=True)
        ]
        jobs = [self._with_record(*each) for each in zip(jobs, views, states, strict=True)]
        steps = AdamSteps(jobs)
        if any(view.is_shard for view in views):
            sharding.run_agreed(steps, [view.parameter for view in views])
        else:
            steps.run()
        for job, view, state in zip(jobs, views, states, strict=True):
            if not isinstance(view.weight, ScaledTensor) and not view.weight.is_contiguous():
                view.weight.copy_(job.weight.data)
            if job.record is not None:
                self._records().keep(id(view.parameter), job.record, _recorded_parts(view, state))
        _remember_amaxes(
            [(view.weight, job.record) for job, view in zip(jobs, views, strict=True) if not view.is_shard]
        )

    def _with_record(self, job: Job, view: LocalView, state: dict[str, Any]) -> Job:
        """The job as a step of one pass; as it is where nothing has a scale, or eps is too small for a bound of an
        update, or no kernel keeps the record in passing."""
        scaled = any(slot.scale_inv is not None for slot in job.written)
        if not (scaled and view.group["eps"] >= LEAST_ROOT and has_kernels(job.weight.data)):
            return job
        record = self._records().take(id(view.parameter), job.written, _recorded_parts(view, state))
        return job._replace(record=record)

    def _records(self) -> Records:
        """Of this object: a copy begins without any."""
        if "fp8_records" not in self.__dict__:
            self.fp8_records = Records()
        return self.fp8_records

    lost_updates = share_of_lost_updates


class ScaledAdamW(ScaledMoments, torch.optim.AdamW):
    """A `torch.optim.AdamW` that `convert` made train scaled weights."""

    fp8_declared = ADAMW


class ScaledAdam(ScaledMoments, torch.optim.Adam):
    """A `torch.optim.Adam` that `convert` made train scaled weights."""

    fp8_declared = ADAMW._replace(stock=torch.optim.Adam)


def _recorded_parts(view: LocalView, state: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors whose contents a record describes. A plain weight has no scale, and its record is not read."""
    weight = stored_parts(view.weight, exact=True) if isinstance(view.weight, ScaledTensor) else ()
    return [*weight, *(part for name in MOMENTS for part in stored_parts(local_part(state[name])))]


def _remember_amaxes(stored: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Let weights know the amaxes of their data from the records of what is stored: the next forward casts them. That
    of a pair is of codes and residuals, and its codes are not cast."""
    known = [
        (w, record) for w, record in stored if record is not None and isinstance(w, ScaledTensor) and w.residual is None
    ]
    if known:
        # scales are powers of two: nothing is rounded
        amaxes = torch._foreach_div([record[0] for _, record in known], [w._scale_inv for w, _ in known])
        for (weight, _), amax in zip(known, amaxes, strict=True):
            weight.stored.known = KnownAmax.of(weight._data, amax)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements lie in order: itself, or a copy of a plain one."""
    return tensor if isinstance(tensor, ScaledTensor) else tensor.contiguous()


def _hypers(views: Sequence[LocalView], states: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """The hyperparameters of each step. They are made for parameters with the same options together: few launches."""
    alike: dict[Any, list[int]] = {}
    for i, (view, state) in enumerate(zip(views, states, strict=True)):
        alike.setdefault((id(view.group), view.weight.device, state["step"].device), []).append(i)
    hypers = [None] * len(views)
    for (_, device, _), members in alike.items():
        group, steps = views[members[0]].group, [states[i]["step"] for i in members]
        rows = adam_hypers(group["lr"], group["betas"], group["eps"], group["weight_decay"], steps, device)
        for i, hyper in zip(members, rows.unbind(), strict=True):
            hypers[i] = hyper
    return hypers
