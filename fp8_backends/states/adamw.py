"""Adam and AdamW over scaled weights, gradients and states.

`convert` swaps the class of a `torch.optim.Adam` or `AdamW` that exists already: the same object, with its groups,
options, hooks, schedulers and state, now keeps

=====  ===========  ===============  ==========================================
level  exp_avg      exp_avg_sq       weight that the step reads and writes
=====  ===========  ===============  ==========================================
O1     FP32         FP32             scaled FP16
O2     scaled E4M3  scaled FP16      scaled FP16
O3     scaled E4M3  scaled FP16      scaled FP16 (`master_weight`), cast to E4M3
=====  ===========  ===============  ==========================================

The step computes in FP32 and rounds what it stores with this step's amax, all parameters in one kernel where the device
has one (`kernels/compiled.py`). Plain FP32 parameters with FP32 states (O1, or tensors of fewer than 4096 elements) are
left to PyTorch's own implementation.

On several ranks a step computes on what lies there: its shards under FSDP2, with scales that the ranks agree on
(`sharding.py`); all weights under DDP, but at O3 those that this rank owns (`Owners`).
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.adam import adam

from ..errors import FP8BackendError
from ..numerics.kernels.adam.dispatch import AdamSteps, Job, Slot, adam_hyper, adam_hypers, is_finite, scaled_adam_
from ..numerics.scaled_tensor import ScaledTensor, quantize
from ..numerics.sharded_tensor import is_distributed, local_part, with_local
from . import sharding
from .sharding import several_ranks

MIN_SCALED_STATES = 4096
"""A plain parameter with fewer elements keeps FP32 states: norms and biases weigh nothing and are sensitive."""

MASTER = "master_weight"
MOMENTS = ("exp_avg", "exp_avg_sq")

COMPILE_FROM = 2**22
"""Where no fused kernel makes the step: from this many elements on, `torch.compile` (half a minute, once) pays."""


class StateRule(NamedTuple):
    """How one optimizer stores what it owns."""

    level: str
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    exp_avg_block: int
    """Elements of exp_avg that share a scale; 0: the whole tensor, as in MS-AMP."""
    rounding: str
    """"stochastic" or "nearest"."""


Finite = dict[torch.Tensor, torch.Tensor]
"""Of parameters that are DTensors: whether the whole gradient is finite; bool, 0-dim, equal on all ranks."""


Todo = tuple[dict[str, Any], torch.Tensor, int]
"""A parameter whose step is to be made: its group, itself, its index among all parameters."""


class Owners(Protocol):
    """Scaled weights whose masters and states lie on one rank each."""

    weights: list[torch.Tensor]

    def owns(self, p: torch.Tensor) -> bool:
        """Whether they lie on this rank; True of a parameter that is not shared out."""

    def share(self) -> None:
        """After a step, on all ranks: the new weights, from their owners to everyone."""

    def drop(self, p: torch.Tensor) -> None:
        """Forget the master of a weight that another rank owns."""

    def send_to_all(self, p: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """On all ranks: let everyone's tensors hold what the owner's do."""


class ScaledStates:
    """In front of `torch.optim.Adam` or `AdamW`: what an converted optimizer does differently."""

    fp8_states: StateRule
    fp8_owners: Owners | None = None
    """Which ranks keep the states of which parameters, where not every rank keeps all."""
    fp8_whole: bool = False
    """Whether the states of all parameters are here for a while, although other ranks own them."""

    @torch.no_grad()
    def step(self, closure=None):
        """As `torch.optim.Adam.step`. A gradient tensor that holds an inf or a NaN counts as zero in this step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if several_ranks():
            refuse_gradients_that_stay(p for group in self.param_groups for p in group["params"])
        todo = self._with_gradient()
        finite = _finite_shards([p for _, p, _ in todo])
        plain, here, shards = [], [], []
        for each in todo:
            of = plain if self._is_plain(each[1]) else shards if is_distributed(each[1]) else here
            of.append(each)
        for group in self.param_groups:
            of_group = [p for of, p, _ in plain if of is group]
            if of_group:
                self._step_plain(group, of_group, finite)
        self._step_scaled([each for each in here if self._steps(each[1])], finite)
        self._step_scaled(shards, finite, sharding.run_shards)
        if self.fp8_owners is not None:
            self.fp8_owners.share()
        return loss

    def _with_gradient(self) -> list[Todo]:
        """Parameters that take part in this step."""
        found, first = [], 0
        for group in self.param_groups:
            _check_group(group)
            of_group = [(group, p, first + i) for i, p in enumerate(group["params"]) if p.grad is not None]
            first += len(group["params"])
            if any(p.grad.is_sparse for _, p, _ in of_group):
                raise FP8BackendError("Adam cannot use sparse gradients: make the embedding with sparse=False")
            found += of_group
        return found

    def _steps(self, p: torch.Tensor) -> bool:
        """Whether this rank keeps the states of `p`, and makes its steps."""
        return self.fp8_owners is None or self.fp8_owners.owns(p)

    def _is_plain(self, p: torch.Tensor) -> bool:
        """Whether PyTorch's own step can do it: nothing about the parameter or its states is scaled or rounded."""
        if p.is_complex() or p.dtype == torch.float64:
            return True
        return not _is_scaled(p) and p.dtype == torch.float32 and not self._scales_states_of(p)

    def _scales_states_of(self, p: torch.Tensor) -> bool:
        if self.fp8_states.exp_avg == torch.float32:
            return False
        return _is_scaled(p) or p.numel() >= MIN_SCALED_STATES

    def _elements_to_scale(self) -> int:
        return sum(p.numel() for group in self.param_groups for p in group["params"] if not self._is_plain(p))

    def _step_plain(self, group: dict[str, Any], parameters: list[torch.Tensor], finite: Finite) -> None:
        """`torch.optim.Adam`'s own arithmetic and implementations, on what lies on this rank."""
        states = [self._state_of(group, p) for p in parameters]
        gradients = [local_part(p.grad) for p in parameters]
        _zero_what_is_not_finite(gradients, [finite.get(p) for p in parameters])
        adam(
            [local_part(p) for p in parameters],
            gradients,
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            has_complex=any(p.is_complex() for p in parameters),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize", "foreach", "capturable")},
            differentiable=False,
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    def _step_scaled(self, todo: Sequence[Todo], finite: Finite, run=None) -> None:
        """The steps of parameters that are rounded, together. run: how, of shards that several ranks have."""
        if not todo:
            return
        for _, p, _ in todo:
            if isinstance(local_part(p.grad), ScaledTensor):
                local_part(p.grad).finish_accumulation()
        states = [self._state_of(group, p) for group, p, _ in todo]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        hypers = _hypers(todo, states)
        jobs = [self._job(*each, hyper, finite.get(each[1])) for each, hyper in zip(todo, hypers, strict=True)]
        steps = AdamSteps(jobs, compiled=sum(p.numel() for _, p, _ in todo) >= COMPILE_FROM)
        steps.run() if run is None else run(steps, [p for _, p, _ in todo])
        for job, (_, p, _) in zip(jobs, todo, strict=True):
            if not _is_scaled(p) and not local_part(p).is_contiguous():
                local_part(p).copy_(job.weight.data)

    def _job(
        self, group: dict[str, Any], p: torch.Tensor, index: int, hyper: torch.Tensor, finite: torch.Tensor | None
    ) -> Job:
        """What the step of one parameter works on. One that is plain and not contiguous is copied."""
        state, weight, gradient, low_precision = self.state[p], local_part(p), local_part(p.grad), None
        if isinstance(weight, ScaledTensor):
            if weight.elsewhere is not None:
                weight.exact()  # a copy of a weight of another rank: it raises, and says what to do
            if weight.master is not None:
                weight, low_precision = weight.master, _slot(weight)
        else:
            weight = weight.contiguous()
        return Job(
            _slot(weight),
            _slot(gradient if isinstance(gradient, ScaledTensor) else gradient.contiguous()),
            _slot(state["exp_avg"]),
            _slot(state["exp_avg_sq"]),
            hyper,
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            rounding=self.fp8_states.rounding,
            seed=index,
            copy=low_precision,
            first=sharding.first_element(p) if is_distributed(p) else 0,
            finite=finite,
        )

    def _state_of(self, group: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
        """The parameter's state; made at its first step."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = counter(group, p)
        for name in MOMENTS:
            if name not in state:
                state[name] = self._zeros(p, name)
        self._show_master(p)
        return state

    def forget_others(self) -> None:
        """Drop the states of parameters that other ranks own."""
        for p in [p for p in self.state if not self._steps(p)]:
            del self.state[p]

    def _show_master(self, p: torch.Tensor) -> None:
        """Put the master of a weight into its state, where audits and checkpoints see it."""
        master = getattr(local_part(p), "master", None)
        if master is not None:
            self.state[p][MASTER] = with_local(p, master) if is_distributed(p) else master

    def _format(self, p: torch.Tensor, name: str) -> tuple[torch.dtype, int]:
        """(dtype, block size) in which a moment is stored."""
        if not self._scales_states_of(p):
            return torch.float32, 0
        return getattr(self.fp8_states, name), self.fp8_states.exp_avg_block if name == "exp_avg" else 0

    def _zeros(self, p: torch.Tensor, name: str) -> torch.Tensor:
        if is_distributed(p):
            return sharding.zeros(p, *self._format(p, name))
        return self._stored(p, name, torch.zeros(p.shape, dtype=torch.float32, device=p.device))

    def _stored(self, p: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        """A moment's values, plain or scaled, as this optimizer stores them. A new tensor. All ranks call it for a
        parameter or a value that is a DTensor."""
        dtype, block = self._format(p, name)
        if is_distributed(p):
            return sharding.stored(p, value, dtype, block)
        value = sharding.whole(value)
        if isinstance(value, ScaledTensor):
            if (value._data.dtype, value.block_size) == (dtype, block):
                return value.to(p.device).clone()
            value = value.dequantize(torch.float32)
        if p.is_complex() or p.dtype == torch.float64:
            return value.to(p.device, p.dtype, copy=True)
        value = value.to(p.device, torch.float32).contiguous()
        return value.clone() if dtype == torch.float32 else quantize(value, dtype, torch.float32, block)

    # checkpoints and copies

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "fp8_states": self.fp8_states}

    def state_dict(self) -> dict[str, Any]:
        """As in PyTorch, with scaled states as they are stored (those of DTensors as DTensors with FP32 values). A
        weight that its own dtype cannot hold to the bit (scaled FP16 that stands for BF16) is kept as `master_weight`,
        for a resumed run to be equal.

        Raises:
            FP8BackendError: other ranks own a part of the states, and `whole_states` is not entered.
        """
        if self.fp8_owners is not None and not self.fp8_whole:
            raise FP8BackendError(
                "this optimizer's states are shared out between the ranks (level O3): save with "
                "Accelerator.save_state, called on all ranks; or enter fp8_backends.whole_states(optimizer) on all "
                "ranks around state_dict(); or prepare with shard_states=False"
            )
        made = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        keys = [key for group in made["param_groups"] for key in group["params"]]
        for key, p in zip(keys, parameters, strict=True):
            if key not in made["state"]:
                continue
            state = dict(made["state"][key])
            if _is_scaled(p) and local_part(p).master is None and p.dtype != torch.float32:
                state[MASTER] = p.detach()
            made["state"][key] = sharding.as_saved(state)
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch, from a checkpoint of any level or of a stock Adam, by value. Group dictionaries are updated
        in place, so that schedulers keep acting on them."""
        groups = list(self.param_groups)
        moments: dict[Any, dict[str, torch.Tensor]] = {}
        light: dict[Any, Any] = {}
        for key, state in state_dict["state"].items():
            heavy = (*MOMENTS, MASTER)
            moments[key] = {name: state[name] for name in heavy if name in state}
            # copied: PyTorch would take the step counter itself over, to be counted by two optimizers
            light[key] = copy.deepcopy({name: value for name, value in state.items() if name not in heavy})
        super().load_state_dict({**state_dict, "state": light})
        for kept, loaded in zip(groups, self.param_groups, strict=True):
            kept.clear()
            kept.update(loaded)
            _check_group(kept)
        self.param_groups[:] = groups
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in groups for p in group["params"]]
        for key, p in zip(keys, parameters, strict=True):
            self._load_moments(p, moments.get(key, {}))

    @torch.no_grad()
    def _load_moments(self, p: torch.Tensor, saved: dict[str, torch.Tensor]) -> None:
        for name in MOMENTS:
            if name in saved:
                if saved[name].shape != p.shape:
                    raise FP8BackendError(
                        f"{name} of a parameter of shape {tuple(p.shape)} was saved with shape "
                        f"{tuple(saved[name].shape)}: the checkpoint is of another model"
                    )
                if self._steps(p):
                    self.state[p][name] = self._stored(p, name, saved[name])
        if MASTER in saved and _is_scaled(p):
            sharding.write_weight(p, saved[MASTER]) if is_distributed(p) else p.copy_(sharding.whole(saved[MASTER]))
        if not self._steps(p):
            self.state.pop(p, None)
        elif p in self.state:
            self._show_master(p)

    # what rounding swallows

    @torch.no_grad()
    def lost_updates(self) -> float | None:
        """The share, 0 to 1, of the next update of scaled weights that rounding would swallow: one less the
        projection of the stored update on the exact one. From live states, of this rank; None before the first step."""
        along = of = 0.0
        parameters = ((group, p) for group in self.param_groups for p in group["params"])
        for index, (group, p) in enumerate(parameters):
            state = self.state.get(p, {})
            if not _is_scaled(p) or not all(name in state for name in MOMENTS) or not all(group["betas"]):
                continue
            weight = local_part(p)
            weight = weight if weight.master is None else weight.master
            before = weight.dequantize(torch.float32)
            exact = _exact_update(group, state, before)
            stored = self._rounded_step(group, state, weight, index).dequantize(torch.float32) - before
            along += (stored.double() * exact.double()).sum().item()
            of += exact.double().square().sum().item()
        return min(1.0, max(0.0, 1.0 - along / of)) if of > 0 else None

    def _rounded_step(self, group: dict[str, Any], state: dict[str, Any], weight: ScaledTensor, index: int):
        """A copy of the weight after a step that leaves the moments as they are: what the kernel makes of it."""
        stepped = weight.detach().clone()
        moments = [_float(state[name]) / beta for name, beta in zip(MOMENTS, group["betas"], strict=True)]
        decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
        scaled_adam_(
            _slot(stepped),
            Slot(torch.zeros_like(moments[0]), None),
            *(Slot(moment, None) for moment in moments),
            adam_hyper(group["lr"], group["betas"], group["eps"], decay, state["step"], weight.device),
            decoupled=True,
            maximize=False,
            rounding=self.fp8_states.rounding,
            seed=index,
            compiled=False,
        )
        return stepped


def _finite_shards(parameters: list[torch.Tensor]) -> Finite:
    shards = [p for p in parameters if is_distributed(p)]
    here = [is_finite(_slot(p.grad)) for p in shards]
    return dict(zip(shards, sharding.finite_everywhere(here, shards), strict=True))


def counter(group: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
    """Of steps, where PyTorch has it; 0."""
    on_device = group["capturable"] or group["fused"]
    return torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")


def _is_scaled(p: torch.Tensor) -> bool:
    return isinstance(local_part(p), ScaledTensor)


def refuse_gradients_that_stay(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `FP8BackendError` where the gradient of a scaled weight is this rank's own: the ranks would drift apart.

    Gradients travel under FSDP2, whose parameters are DTensors, and by a hook of the parameter that says `reduces`.
    """
    alone = [p for p in parameters if type(p) is ScaledTensor and p.grad is not None and not _is_reduced(p)]
    if alone:
        shapes = ", ".join(sorted({str(tuple(p.shape)) for p in alone}))
        raise FP8BackendError(
            f"the gradients of {len(alone)} scaled weights of shape {shapes} do not travel between the ranks, which "
            f"would drift apart: prepare the DDP-wrapped model again, with its optimizer, so that its gradients are "
            f"reduced"
        )


def _is_reduced(p: torch.Tensor) -> bool:
    return any(getattr(hook, "reduces", False) for hook in (p._post_accumulate_grad_hooks or {}).values())


def _exact_update(group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor) -> torch.Tensor:
    """What Adam adds to the weight (FP32) with the moments as they are."""
    exp_avg, exp_avg_sq = (_float(state[name]) for name in MOMENTS)
    (beta1, beta2), step = group["betas"], float(state["step"])
    denominator = exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + group["eps"]
    update = exp_avg / denominator * (-float(group["lr"]) / (1 - beta1**step))
    if group["decoupled_weight_decay"]:
        update = update - weight * (float(group["lr"]) * group["weight_decay"])
    return update


def _float(value: torch.Tensor) -> torch.Tensor:
    value = local_part(value)
    return value.dequantize(torch.float32) if isinstance(value, ScaledTensor) else value.float()


def _slot(tensor: torch.Tensor) -> Slot:
    """What this rank has of the tensor, as the kernel reads and writes it."""
    tensor = local_part(tensor)
    if isinstance(tensor, ScaledTensor):
        return Slot(tensor._data, tensor._scale_inv, tensor.block_size)
    return Slot(tensor.detach(), None)


def _hypers(todo: Sequence[Todo], states: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """The hyperparameters of each step: parameters with the same options together, for few launches."""
    alike: dict[Any, list[int]] = {}
    for i, ((group, p, _), state) in enumerate(zip(todo, states, strict=True)):
        alike.setdefault((id(group), local_part(p).device, state["step"].device), []).append(i)
    hypers = [None] * len(todo)
    for (_, device, _), members in alike.items():
        group, steps = todo[members[0]][0], [states[i]["step"] for i in members]
        made = adam_hypers(group["lr"], group["betas"], group["eps"], group["weight_decay"], steps, device)
        for i, hyper in zip(members, made.unbind(), strict=True):
            hypers[i] = hyper
    return hypers


def _zero_what_is_not_finite(gradients: list[torch.Tensor], finite: list[torch.Tensor | None]) -> None:
    """In place, without asking the device: a tensor with an inf or a NaN becomes zero. finite: what is known of it."""
    unknown = [gradient for gradient, known in zip(gradients, finite, strict=True) if known is None]
    largest = iter(torch._foreach_norm(unknown, float("inf")) if unknown else ())
    for gradient, known in zip(gradients, finite, strict=True):
        whole = torch.isfinite(next(largest)) if known is None else known
        torch.where(whole, gradient, gradient.new_zeros(()), out=gradient)


# from a stock optimizer to an converted one


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
                state[name] = optimizer._stored(p, name, state[name])


def check(optimizer: torch.optim.Optimizer, rule: StateRule) -> None:
    """Whether `convert` takes this optimizer; changes nothing.

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
        _check_group(group)
    # a learning-rate scheduler puts a `step` on the instance that calls the old class; it is given the new one
    if not getattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched", "step" not in optimizer.__dict__):
        raise FP8BackendError(
            f"optimizer.step was replaced on this {type(optimizer).__name__} object: prepare it before it is wrapped"
        )


def _check_group(group: dict[str, Any]) -> None:
    for option in ("amsgrad", "differentiable"):
        if group[option]:
            raise FP8BackendError(f"{option}=True is not supported with scaled weights and states: leave it out")


class _TrackedStep:
    """What PyTorch's schedulers make of `optimizer.step`, to know that it was called; over the converted class."""

    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: torch.optim.Optimizer, converted: type) -> None:
        self.optimizer, self.converted = weakref.ref(optimizer), converted

    def __call__(self, *args, **kwargs):
        optimizer = self.optimizer()
        optimizer._opt_called = True
        return self.converted.step(optimizer, *args, **kwargs)
