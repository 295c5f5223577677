"""Adam and AdamW over scaled weights, gradients and states.

`convert` swaps the class of a `torch.optim.Adam` or `AdamW` that exists already: the same object, with its groups,
options, hooks, schedulers and state, now stores its states as a level says (the table in `levels.py`). The step reads
and writes the scaled FP16 weight; at O3 that is the master, which the E4M3 weight is then made of.

The step computes in FP32, and rounds what it stores with scales that follow from bounds of this step's amaxes, or from
these (`optimizer_scales`): all parameters in one kernel where the device has one (`numerics/kernels/adam`). Plain FP32
parameters with FP32 states (O1, or tensors of fewer than 4096 elements) are left to PyTorch's own implementation.

On several ranks a step works on what lies there (`LocalView`): its shards under FSDP2, with scales that the ranks agree
on (`sharding.py`); all weights under DDP, but at O3 those that this rank owns.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.adam import adam

from ..errors import FP8BackendError
from ..numerics.formats import FORMAT_OF
from ..numerics.kernels.adam.bounds import LEAST_ROOT
from ..numerics.kernels.adam.dispatch import AdamSteps, Job, Slot, adam_hypers, has_kernels
from ..numerics.scaled_tensor import KnownAmax, ScaledTensor, quantize, stored_parts
from ..numerics.sharded_tensor import is_distributed, local_part, with_local
from ..words import counted
from . import checkpoint, checks, sharding
from .checkpoint import MASTER, MOMENTS
from .levels import StateRule, finish_accumulation
from .lost_updates import share_of_lost_updates
from .records import Records

MIN_SCALED_STATES = 4096
"""A plain parameter with fewer elements keeps FP32 states: norms and biases weigh nothing and are sensitive."""

COMPILE_FROM = 2**22
"""Where no fused kernel makes the step: from this many elements on, `torch.compile` (half a minute, once) pays."""


class LocalView(NamedTuple):
    """This rank's part of a parameter that takes part in a step."""

    parameter: torch.Tensor
    group: dict[str, Any]
    index: int
    """Place of the parameter among all parameters of the optimizer: the seed of its random bits."""
    weight: torch.Tensor
    """What the step reads and writes: a plain tensor, a `ScaledTensor`, or the master of one."""
    copy: ScaledTensor | None
    """The weight in E4M3 that is made of its master."""
    gradient: torch.Tensor
    is_shard: bool
    """Whether the parameter is a DTensor, of which other ranks have other elements."""
    first: int
    """Index of the first element in the whole parameter."""
    finite: torch.Tensor | None = None
    """Whether the gradient is finite on all ranks, where it is a shard; bool, 0-dim."""


def view_of(p: torch.Tensor, group: dict[str, Any], index: int) -> LocalView:
    """This rank's part of a parameter that has a gradient.

    Raises:
        FP8BackendError: the master of a weight lies on another rank.
    """
    weight, copy, is_shard = local_part(p), None, is_distributed(p)
    gradient = local_part(p.grad)
    if isinstance(gradient, ScaledTensor) and gradient._view is not None:  # somebody has put a view of another there
        gradient = gradient.values(torch.float32)
    if isinstance(weight, ScaledTensor):
        if weight.elsewhere is not None:
            weight.exact()  # a copied model's weight whose master another rank owns: this raises and says what to do
        if weight.master is not None:
            weight, copy = weight.master, weight
    first = sharding.first_element(p) if is_shard else 0
    return LocalView(p, group, index, weight, copy, gradient, is_shard, first)


class ScaledStates:
    """The step, the states and the state dicts of a converted optimizer. It stands in front of `torch.optim.Adam` or
    `AdamW`."""

    fp8_states: StateRule
    fp8_owners: sharding.Owners | None = None
    """Which ranks keep the states of which parameters, where not every rank keeps all."""
    fp8_whole: bool = False
    """Whether the states of all parameters are here for a while, although other ranks own them."""
    fp8_unread: bool = False
    """Whether nobody reads the values in this rank's state dicts for a while: they are placeholders."""
    fp8_checked: bool = False
    """Whether the state dict that comes next was looked at already, in the file that it is loaded from."""
    fp8_records: Records
    """What the last step has stored; no part of copies and checkpoints."""

    @torch.no_grad()
    def step(self, closure=None):
        """Make one step, as `torch.optim.Adam.step` does. A gradient that holds an inf or a NaN counts as zero."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_gradients_that_stay(p for group in self.param_groups for p in group["params"])
        views = self._views()
        plain, scaled = [], []
        for view in views:
            (plain if self._is_plain(view.parameter) else scaled).append(view)
        for group in self.param_groups:
            self._step_plain([view for view in plain if view.group is group])
        self._step_scaled(scaled)
        if self.fp8_owners is not None:
            self.fp8_owners.share()
        return loss

    def _views(self) -> list[LocalView]:
        """This rank's part of all parameters whose steps it makes now."""
        views, count = [], itertools.count()
        for group in self.param_groups:
            checks.check_options(group)
            for p, index in zip(group["params"], count, strict=False):
                if p.grad is not None and p.grad.is_sparse:
                    raise FP8BackendError("Adam cannot use sparse gradients: make the embedding with sparse=False")
                if p.grad is not None and self.owns(p):
                    views.append(view_of(p, group, index))
        if any(view.is_shard for view in views):
            gradients = [_slot(view.gradient) for view in views]
            finite = sharding.finite_everywhere(gradients, [view.parameter for view in views])
            views = [view._replace(finite=known) for view, known in zip(views, finite, strict=True)]
        return views

    def owns(self, p: torch.Tensor) -> bool:
        """Whether this rank keeps the states of `p` and makes its steps."""
        return self.fp8_owners is None or self.fp8_owners.owns(p)

    def _is_plain(self, p: torch.Tensor) -> bool:
        """Whether PyTorch's own step serves: nothing about the parameter or its states is scaled or rounded."""
        if p.is_complex() or p.dtype == torch.float64:
            return True
        scaled = _is_scaled(p) or self.moment_format(p, "exp_avg")[0] != torch.float32
        return not scaled and p.dtype == torch.float32

    def elements_to_scale(self) -> int:
        """The number of elements whose steps PyTorch's own implementation does not make."""
        return sum(p.numel() for group in self.param_groups for p in group["params"] if not self._is_plain(p))

    def _step_plain(self, views: Sequence[LocalView]) -> None:
        """Make the steps of parameters of one group with PyTorch's own arithmetic and implementations."""
        if not views:
            return
        group, states = views[0].group, [self.state_of(view.group, view.parameter) for view in views]
        _zero_what_is_not_finite(views)
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
        """Make the steps of parameters that are rounded, all together."""
        if not views:
            return
        finish_accumulation(view.parameter for view in views)
        states = [self.state_of(view.group, view.parameter) for view in views]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        jobs = [
            Job(
                _slot(_contiguous(view.weight)),
                _slot(_contiguous(view.gradient)),
                _slot(state["exp_avg"]),
                _slot(state["exp_avg_sq"]),
                hyper,
                decoupled=view.group["decoupled_weight_decay"],
                maximize=view.group["maximize"],
                rounding=self.fp8_states.rounding,
                seed=view.index,
                copy=None if view.copy is None else _slot(view.copy),
                first=view.first,
                finite=view.finite,
            )
            for view, state, hyper in zip(views, states, _hypers(views, states), strict=True)
        ]
        if self.fp8_states.scales == "bound":
            jobs = [self._with_record(*each) for each in zip(jobs, views, states, strict=True)]
        steps = AdamSteps(jobs, compiled=sum(view.parameter.numel() for view in views) >= COMPILE_FROM)
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
        parts = _recorded_parts(view, state)
        return job._replace(record=self._records().take(id(view.parameter), job.written, parts))

    def _records(self) -> Records:
        """Of this object: a copy begins without any."""
        if "fp8_records" not in self.__dict__:
            self.fp8_records = Records()
        return self.fp8_records

    def state_of(self, group: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
        """The parameter's state. It is filled before the first step."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = self.new_counter(group, p)
        for name in MOMENTS:
            if name not in state:
                dtype, block_size = self.moment_format(p, name)
                scaled = dtype in FORMAT_OF
                local = local_part(p)
                zeros = torch.zeros(local.shape, dtype=torch.float32 if scaled else dtype, device=local.device)
                if scaled:
                    zeros = quantize(zeros, dtype, block_size=block_size)
                    zeros.partial, zeros.is_state = is_distributed(p), True
                state[name] = with_local(p, zeros)
        self.show_master(p)
        return state

    def new_counter(self, group: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
        """A step counter of 0, where PyTorch has it."""
        on_device = group["capturable"] or group["fused"]
        return torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")

    def moment_format(self, p: torch.Tensor, name: str) -> tuple[torch.dtype, int]:
        """(dtype, block size) in which a moment of `p` is stored."""
        if p.is_complex() or p.dtype == torch.float64:
            return p.dtype, 0
        if not _is_scaled(p) and p.numel() < MIN_SCALED_STATES:
            return torch.float32, 0
        return getattr(self.fp8_states, name), self.fp8_states.exp_avg_block if name == "exp_avg" else 0

    def show_master(self, p: torch.Tensor) -> None:
        """Put the master of a weight into its state, where audits and checkpoints see it."""
        master = getattr(local_part(p), "master", None)
        if master is not None:
            self.state[p][MASTER] = with_local(p, master)

    def forget_others(self) -> None:
        """Drop the states of parameters that other ranks own."""
        for p in [p for p in self.state if not self.owns(p)]:
            del self.state[p]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "fp8_states": self.fp8_states}

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's state dict, with scaled states as plain values: BF16 or FP32 ones on the CPU, those of DTensors as
        DTensors of FP32.

        Raises:
            FP8BackendError: other ranks own some of the states, and `whole_states` is not entered.
        """
        if self.fp8_owners is not None and not self.fp8_whole:
            raise FP8BackendError(
                "this optimizer's states are shared out between the ranks (level O3): save with "
                "Accelerator.save_state, called on all ranks; or enter fp8_backends.whole_states(optimizer) on all "
                "ranks around state_dict(); or prepare with shard_states=False"
            )
        return checkpoint.export_states(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of any level or of a stock Adam, by value. Group dictionaries are updated in place, so that
        schedulers keep acting on them.

        Raises:
            FP8BackendError: training could not go on from it (`checks.check_states`). Nothing has changed then.
        """
        if not self.fp8_checked:
            checks.check_states(self, state_dict)
        checkpoint.load_states(self, state_dict, super().load_state_dict)

    def lost_updates(self) -> float | None:
        """`share_of_lost_updates` of this optimizer."""
        return share_of_lost_updates(self)


def refuse_gradients_that_stay(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `FP8BackendError` where the gradient of a scaled weight is this rank's own, though it trains together with
    others: the ranks would drift apart.

    Gradients travel under FSDP2, whose parameters are DTensors, and by a hook of the parameter that says `reduces`.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    alone = []
    for p in parameters:
        hooks = (p._post_accumulate_grad_hooks or {}).values()
        if type(p) is ScaledTensor and p.grad is not None and not any(getattr(hook, "reduces", 0) for hook in hooks):
            alone.append(p)
    if alone:
        shapes = ", ".join(sorted({str(tuple(p.shape)) for p in alone}))
        raise FP8BackendError(
            f"the gradients of {counted(len(alone), 'scaled weight')} of shape {shapes} do not travel between ranks "
            f"and would drift apart: prepare the DDP-wrapped model again, with its optimizer, so that its gradients "
            f"are reduced"
        )


def _is_scaled(p: torch.Tensor) -> bool:
    return isinstance(local_part(p), ScaledTensor)


def _slot(tensor: torch.Tensor) -> Slot:
    """This rank's part of a tensor, as the kernel reads and writes it."""
    tensor = local_part(tensor)
    if isinstance(tensor, ScaledTensor):
        tensor.settle()
        return Slot(tensor._data, tensor._scale_inv, tensor.block_size)
    return Slot(tensor.detach())


def _recorded_parts(view: LocalView, state: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors whose contents a record describes. A plain weight has no scale, and its record is not read."""
    weight = stored_parts(view.weight) if isinstance(view.weight, ScaledTensor) else ()
    return [*weight, *(part for name in MOMENTS for part in stored_parts(local_part(state[name])))]


def _remember_amaxes(stored: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Let weights know the amaxes of their data from the records of what is stored: the next forward casts them."""
    known = [(w, record) for w, record in stored if record is not None and isinstance(w, ScaledTensor)]
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


def _zero_what_is_not_finite(views: Sequence[LocalView]) -> None:
    """Set a gradient that holds an inf or a NaN to zero, in place and without asking the device."""
    spoiled = {i: ~view.finite for i, view in enumerate(views) if view.finite is not None}
    unknown: dict[torch.device, list[int]] = {}
    for i in range(len(views)):
        if i not in spoiled and views[i].gradient.numel():
            unknown.setdefault(views[i].gradient.device, []).append(i)
    for members in unknown.values():
        largest = torch._foreach_norm([views[i].gradient for i in members], float("inf"))
        spoiled |= zip(members, torch.isfinite(torch.stack(largest)).logical_not_().unbind(), strict=True)
    for i, is_spoiled in spoiled.items():
        views[i].gradient.masked_fill_(is_spoiled, 0)


# From a stock optimizer to a converted one


class ScaledAdamW(ScaledStates, torch.optim.AdamW):
    """A `torch.optim.AdamW` that `convert` made train scaled weights."""


class ScaledAdam(ScaledStates, torch.optim.Adam):
    """A `torch.optim.Adam` that `convert` made train scaled weights."""


# AdamW first: it is a subclass of Adam
_SCALED_CLASSES = {torch.optim.AdamW: ScaledAdamW, torch.optim.Adam: ScaledAdam}


def convert(optimizer: torch.optim.Optimizer, rule: StateRule) -> None:
    """Swap the class of a stock Adam or AdamW, in place. Existing moments are stored as `rule` says.

    Repeating it with the same rule changes nothing. Raises what `check` raises.
    """
    check(optimizer, rule)
    if isinstance(optimizer, ScaledStates):
        return
    converted = _SCALED_CLASSES[type(optimizer)]
    if "step" in optimizer.__dict__:
        optimizer.step = _TrackedStep(optimizer, converted)
    optimizer.__class__ = converted
    optimizer._patch_step_function()  # PyTorch's own way to give a class's step its hooks
    optimizer.fp8_states = rule
    optimizer._step_supports_amp_scaling = False  # a fused stock step divides by the loss scale itself
    for p, state in optimizer.state.items():
        for name in MOMENTS:
            if name in state:
                state[name] = checkpoint.stored_moment(p, state[name], *optimizer.moment_format(p, name))


def check(optimizer: torch.optim.Optimizer, rule: StateRule) -> None:
    """Raise where `convert` would not take this optimizer. Changes nothing.

    Raises:
        FP8BackendError: another optimizer, amsgrad, differentiable, or a `step` that somebody replaced.
    """
    if isinstance(optimizer, ScaledStates):
        if optimizer.fp8_states != rule:
            raise FP8BackendError(
                f"this optimizer keeps its states at {optimizer.fp8_states} already, and {rule} is asked for: "
                f"make a new optimizer"
            )
        return
    if type(optimizer) not in _SCALED_CLASSES:
        raise FP8BackendError(
            f"level {rule.level} trains with torch.optim.AdamW or torch.optim.Adam, not with "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}: use one of these, or level O0 "
            f"(such as native:dynamic or te), which leaves weights and optimizer alone"
        )
    for group in optimizer.param_groups:
        checks.check_options(group)
    # a learning-rate scheduler puts a `step` on the instance that calls the old class; it is given the new one
    if not getattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched", "step" not in optimizer.__dict__):
        raise FP8BackendError(
            f"optimizer.step was replaced on this {type(optimizer).__name__} object: prepare it before it is wrapped"
        )


class _TrackedStep:
    """A `step` that notes that it was called, as PyTorch's schedulers put it on an optimizer; for a converted class."""

    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: torch.optim.Optimizer, converted: type) -> None:
        self.optimizer, self.converted = weakref.ref(optimizer), converted

    def __call__(self, *args, **kwargs):
        optimizer = self.optimizer()
        optimizer._opt_called = True
        return self.converted.step(optimizer, *args, **kwargs)
