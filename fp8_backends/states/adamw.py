"""Adam and AdamW over scaled weights, gradients and states.

The step reads and writes the scaled weight: FP16, at O4 E4M3 codes with residuals, at O3 the master
and then the E4M3 weight from it. It computes in FP32 and rounds with scales from bounds of this
step's amaxes, in one kernel over all parameters if the device has one (`kernels`). PyTorch's own
implementation steps plain FP32 parameters with FP32 states (O1, or tensors of fewer than 4096
elements).
"""

import copy
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adam import adam

from ..formats.formats import NOT_NEGATIVE, Range
from ..kernels.adam import AdamSteps, Job, Slot, adam_hyper, adam_hypers, has_kernels
from ..kernels.adam_table import LEAST_ROOT, exact_update, measured
from ..tensors.scaled_tensor import ScaledTensor, stored_parts
from ..tensors.sharded_tensor import local_part
from . import sharding
from .scaled_states import Declaration, LocalView, ScaledStates
from .sharding import slot_of

MOMENTS = ("exp_avg", "exp_avg_sq")

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
    """The largest numbers of a parameter's stored tensors after the last step.

    A one-pass step needs the previous record and leaves a new one (`kernels/adam_table.py`).
    Checkpoints and copies have none: measuring the tensors again, as after any other write, gives
    the same numbers.
    """

    numbers: torch.Tensor
    """FP32 [4], from `measured`."""
    seen: list[tuple[weakref.ref, int]]
    """The measured tensors, and autograd's counts of writes to them."""


class ScaledMoments(ScaledStates):
    """Steps of Adam and AdamW with rounded states."""

    fp8_records: dict[int, _Record]
    """By the `id` of a parameter."""

    def _step_plain(self, views: Sequence[LocalView]) -> None:
        group, states = views[0].group, [view.state for view in views]
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
            **{
                name: group[name]
                for name in ("lr", "weight_decay", "eps", "maximize", "foreach", "capturable")
            },
            differentiable=False,
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    def step_scaled(self, views: Sequence[LocalView]) -> None:
        torch._foreach_add_([view.state["step"] for view in views], 1.0)
        jobs = [self._job(view, hyper) for view, hyper in zip(views, _hypers(views), strict=True)]
        steps = AdamSteps(jobs)
        if any(view.is_shard for view in views):
            sharding.run_agreed(steps, [view.parameter for view in views])
        else:
            steps.run()
        for job, view in zip(jobs, views, strict=True):
            if not isinstance(view.weight, ScaledTensor) and not view.weight.is_contiguous():
                view.weight.copy_(job.weight.data)
            if job.record is not None:
                seen = [(weakref.ref(part), part._version) for part in _recorded_parts(view)]
                self.__dict__.setdefault("fp8_records", {})[id(view.parameter)] = _Record(
                    job.record, seen
                )
        _remember_amaxes(jobs, views)

    def _job(self, view: LocalView, hyper: torch.Tensor) -> Job:
        """Return the step of one parameter, in one pass with a record if kernels and eps bound
        every scale."""
        job = Job(
            slot_of(_contiguous(view.weight)),
            slot_of(_contiguous(view.gradient)),
            *(slot_of(view.state[name]) for name in MOMENTS),
            hyper,
            decoupled=view.group["decoupled_weight_decay"],
            maximize=view.group["maximize"],
            rounding=self.fp8_states.rounding,
            seed=view.index,
            copy=None if view.copy is None else slot_of(view.copy),
            first=view.first,
            finite=view.finite,
        )
        scaled = any(slot.scale_inv is not None for slot in job.written)
        if not (scaled and view.group["eps"] >= LEAST_ROOT and has_kernels(job.weight.data)):
            return job
        record = self.__dict__.get("fp8_records", {}).pop(id(view.parameter), None)
        parts = _recorded_parts(view)
        if record is not None and len(record.seen) == len(parts):
            pairs = zip(record.seen, parts, strict=True)
            if all(seen() is part and version == part._version for (seen, version), part in pairs):
                return job._replace(record=record.numbers)
        return job._replace(record=measured(*job.written))

    @torch.no_grad()
    def lost_updates(self) -> float | None:
        """Return the share, 0 to 1, of the next update of scaled weights that rounding would lose:
        1 minus the projection of the stored update on the exact one, from this rank's states; None
        before the first step."""
        stored_share = total = 0.0
        for p, group, index in self.members():
            state, weight = self.state.get(p, {}), self.stepped(p)
            has_moments = all(name in state for name in MOMENTS)
            if not isinstance(weight, ScaledTensor) or not has_moments or not all(group["betas"]):
                continue
            weight.settle()
            weight = weight if weight.master is None else weight.master
            before = weight.exact(torch.float32)
            exact = exact_update(
                before,
                *(_float(state[name]) for name in MOMENTS),
                lr=float(group["lr"]),
                betas=tuple(map(float, group["betas"])),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=float(state["step"]),
                decoupled=group["decoupled_weight_decay"],
            )
            stored = self._rounded_step(group, state, weight, index).exact(torch.float32) - before
            stored_share += (stored.double() * exact).sum().item()
            total += exact.square().sum().item()
        return min(1.0, max(0.0, 1.0 - stored_share / total)) if total > 0 else None

    def _rounded_step(
        self, group: dict[str, Any], state: dict[str, Any], weight: ScaledTensor, index: int
    ) -> ScaledTensor:
        """Return a copy of the weight after a step with a gradient of zero and moments divided by
        their betas."""
        stepped = copy.deepcopy(weight.detach())
        moments = [
            _float(state[name]) / beta for name, beta in zip(MOMENTS, group["betas"], strict=True)
        ]
        decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
        job = Job(
            Slot(stepped.codes, stepped.scale_inv, residual=stepped.residual),
            Slot(torch.zeros_like(moments[0])),
            *map(Slot, moments),
            adam_hyper(
                group["lr"], group["betas"], group["eps"], decay, state["step"], weight.device
            ),
            decoupled=True,
            maximize=False,
            rounding=self.fp8_states.rounding,
            seed=index,
        )
        AdamSteps([job], fused=False).run()
        return stepped


class ScaledAdamW(ScaledMoments, torch.optim.AdamW):
    fp8_declared = ADAMW


class ScaledAdam(ScaledMoments, torch.optim.Adam):
    fp8_declared = ADAMW._replace(stock=torch.optim.Adam)


def _recorded_parts(view: LocalView) -> list[torch.Tensor]:
    """Return the tensors of a record. A plain weight has no scale, so its numbers are not read."""
    weight = stored_parts(view.weight, exact=True) if isinstance(view.weight, ScaledTensor) else ()
    return [
        *weight,
        *(part for name in MOMENTS for part in stored_parts(local_part(view.state[name]))),
    ]


def _remember_amaxes(jobs: Sequence[Job], views: Sequence[LocalView]) -> None:
    """Give whole weights the amaxes of their data from the records, for the next forward's casts.
    Pairs have none."""
    recorded = [
        (view.weight, job.record)
        for job, view in zip(jobs, views, strict=True)
        if not view.is_shard and job.record is not None
        if isinstance(view.weight, ScaledTensor) and view.weight.residual is None
    ]
    if recorded:
        # scales are powers of two: the division is exact
        amaxes = torch._foreach_div(
            [record[0] for _, record in recorded], [w.scale_inv for w, _ in recorded]
        )
        for (weight, _), amax in zip(recorded, amaxes, strict=True):
            weight.remember_amax(amax)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, ScaledTensor) else tensor.contiguous()


def _float(value: torch.Tensor) -> torch.Tensor:
    value = local_part(value)
    return value.dequantize(torch.float32) if isinstance(value, ScaledTensor) else value.float()


def _hypers(views: Sequence[LocalView]) -> list[torch.Tensor]:
    """Return the hyperparameters of each step, computed together for equal options: few
    launches."""
    alike: dict[Any, list[int]] = {}
    for i, view in enumerate(views):
        alike.setdefault(
            (id(view.group), view.weight.device, view.state["step"].device), []
        ).append(i)
    hypers = [None] * len(views)
    for (_, device, _), members in alike.items():
        group, steps = views[members[0]].group, [views[i].state["step"] for i in members]
        rows = adam_hypers(
            group["lr"], group["betas"], group["eps"], group["weight_decay"], steps, device
        )
        for i, hyper in zip(members, rows.unbind(), strict=True):
            hypers[i] = hyper
    return hypers
