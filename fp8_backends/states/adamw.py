"""Adam and AdamW over scaled weights, gradients and states.

`adopt` exchanges the class of a `torch.optim.Adam` or `AdamW` that exists already: the same object, with its groups,
options, hooks, schedulers and state, now keeps

=====  ===========  ===============  ==========================================
level  exp_avg      exp_avg_sq       weight that the step reads and writes
=====  ===========  ===============  ==========================================
O1     FP32         FP32             scaled FP16
O2     scaled E4M3  scaled FP16      scaled FP16
O3     scaled E4M3  scaled FP16      scaled FP16 (`master_weight`), cast to E4M3
=====  ===========  ===============  ==========================================

The step computes in FP32 and rounds what it stores with this step's amax (`kernels/compiled.py`). Plain FP32 parameters
with FP32 states (O1, or tensors of fewer than 4096 elements) are left to PyTorch's own implementation.
"""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch.optim.adam import adam

from ..errors import FP8BackendError
from ..kernels.compiled import Slot, adam_hyper, scaled_adam_
from ..scaled_tensor import ScaledTensor, quantize

MIN_SCALED_STATES = 4096
"""A plain parameter with fewer elements keeps FP32 states: norms and biases weigh nothing and are sensitive."""

MASTER = "master_weight"
MOMENTS = ("exp_avg", "exp_avg_sq")

COMPILE_FROM = 2**22
"""From this many elements on, compiling the step (half a minute, once) is worth it."""


class StateRule(NamedTuple):
    """How one optimizer stores what it owns."""

    level: str
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    exp_avg_block: int
    """Elements of exp_avg that share a scale; 0: the whole tensor, as in MS-AMP."""
    rounding: str
    """"stochastic" or "nearest"."""


class ScaledStates:
    """In front of `torch.optim.Adam` or `AdamW`: what an adopted optimizer does differently."""

    fp8_states: StateRule

    @torch.no_grad()
    def step(self, closure=None):
        """As `torch.optim.Adam.step`. A gradient tensor that holds an inf or a NaN counts as zero in this step."""
        if several_ranks():
            raise FP8BackendError(
                f"level {self.fp8_states.level} trains on one process in this version: stock DDP does not reduce "
                f"scaled gradients, so the ranks would drift apart; use a backend of level O0 such as native:dynamic"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        compiled = self._elements_to_scale() >= COMPILE_FROM
        first = 0
        for group in self.param_groups:
            _check_group(group)
            with_gradient = [(first + i, p) for i, p in enumerate(group["params"]) if p.grad is not None]
            first += len(group["params"])
            if any(p.grad.is_sparse for _, p in with_gradient):
                raise FP8BackendError("Adam cannot use sparse gradients: make the embedding with sparse=False")
            plain = [p for _, p in with_gradient if self._is_plain(p)]
            if plain:
                self._step_plain(group, plain)
            for index, parameter in with_gradient:
                if not self._is_plain(parameter):
                    self._step_scaled(group, parameter, index, compiled)
        return loss

    def _is_plain(self, p: torch.Tensor) -> bool:
        """Whether PyTorch's own step can do it: nothing about the parameter or its states is scaled or rounded."""
        if p.is_complex() or p.dtype == torch.float64:
            return True
        return type(p) is not ScaledTensor and p.dtype == torch.float32 and not self._scales_states_of(p)

    def _scales_states_of(self, p: torch.Tensor) -> bool:
        if self.fp8_states.exp_avg == torch.float32:
            return False
        return isinstance(p, ScaledTensor) or p.numel() >= MIN_SCALED_STATES

    def _elements_to_scale(self) -> int:
        return sum(p.numel() for group in self.param_groups for p in group["params"] if not self._is_plain(p))

    def _step_plain(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """`torch.optim.Adam`'s own arithmetic and implementations."""
        states = [self._state_of(group, p) for p in parameters]
        gradients = [p.grad for p in parameters]
        _zero_what_is_not_finite(gradients)
        adam(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
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

    def _step_scaled(self, group: dict[str, Any], p: torch.Tensor, index: int, compiled: bool) -> None:
        state = self._state_of(group, p)
        state["step"] += 1
        weight, low_precision, plain = p, None, None
        if isinstance(p, ScaledTensor):
            p.grad.finish_accumulation() if isinstance(p.grad, ScaledTensor) else None
            if p.master is not None:
                weight, low_precision = p.master, _slot(p)
        elif not p.is_contiguous():
            weight = plain = p.contiguous()
        scaled_adam_(
            _slot(weight),
            _slot(p.grad if isinstance(p.grad, ScaledTensor) else p.grad.contiguous()),
            _slot(state["exp_avg"]),
            _slot(state["exp_avg_sq"]),
            _hyper(group, state["step"], p.device),
            copy=low_precision,
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            rounding=self.fp8_states.rounding,
            seed=index,
            compiled=compiled,
        )
        if plain is not None:
            p.copy_(plain)

    def _state_of(self, group: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
        """The parameter's state; made at its first step."""
        state = self.state[p]
        if "step" not in state:
            on_device = group["capturable"] or group["fused"]
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
        for name in MOMENTS:
            if name not in state:
                state[name] = self._stored(p, name, torch.zeros(p.shape, dtype=torch.float32, device=p.device))
        if isinstance(p, ScaledTensor) and p.master is not None:
            state[MASTER] = p.master  # seen here by audits and checkpoints
        return state

    def _stored(self, p: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        """A moment's values, plain or scaled, as this optimizer stores them. A new tensor."""
        dtype = getattr(self.fp8_states, name) if self._scales_states_of(p) else torch.float32
        block = self.fp8_states.exp_avg_block if name == "exp_avg" else 0
        if isinstance(value, ScaledTensor):
            if (value._data.dtype, value.block_size) == (dtype, block):
                return value.to(p.device).clone()
            value = value.dequantize(torch.float32)
        if p.is_complex() or p.dtype == torch.float64:
            return value.to(p.device, p.dtype, copy=True)
        value = value.to(p.device, torch.float32).contiguous()
        return value.clone() if dtype == torch.float32 else quantize(value, dtype, torch.float32, block)

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As in PyTorch, with scaled states as they are stored. A weight that its own dtype cannot hold to the bit
        (scaled FP16 that stands for BF16) is kept as `master_weight`, for a resumed run to be equal."""
        made = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        keys = [key for group in made["param_groups"] for key in group["params"]]
        for key, p in zip(keys, parameters, strict=True):
            if isinstance(p, ScaledTensor) and p.master is None and p.dtype != torch.float32 and key in made["state"]:
                made["state"][key] = {**made["state"][key], MASTER: p.detach()}
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
                self.state[p][name] = self._stored(p, name, saved[name])
        if MASTER in saved and isinstance(p, ScaledTensor):
            p.copy_(saved[MASTER])
        if isinstance(p, ScaledTensor) and p.master is not None and p in self.state:
            self.state[p][MASTER] = p.master

    # what rounding swallows

    @torch.no_grad()
    def lost_updates(self) -> float | None:
        """The share, 0 to 1, of the next update of scaled weights that rounding would swallow: one less the
        projection of the stored update on the exact one. From live states; None before the first step."""
        along = of = 0.0
        parameters = ((group, p) for group in self.param_groups for p in group["params"])
        for index, (group, p) in enumerate(parameters):
            state = self.state.get(p, {})
            if not isinstance(p, ScaledTensor) or not all(name in state for name in MOMENTS) or not all(group["betas"]):
                continue
            weight = p if p.master is None else p.master
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


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


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
    return value.dequantize(torch.float32) if isinstance(value, ScaledTensor) else value.float()


def _slot(tensor: torch.Tensor) -> Slot:
    """The tensor as the kernel reads and writes it."""
    tensor = tensor.detach()
    if isinstance(tensor, ScaledTensor):
        return Slot(tensor._data, tensor._scale_inv, tensor.block_size)
    return Slot(tensor, None)


def _hyper(group: dict[str, Any], step: torch.Tensor, device: torch.device) -> torch.Tensor:
    return adam_hyper(group["lr"], group["betas"], group["eps"], group["weight_decay"], step, device)


def _zero_what_is_not_finite(gradients: list[torch.Tensor]) -> None:
    """In place, without asking the device: a tensor with an inf or a NaN becomes zero."""
    for gradient, largest in zip(gradients, torch._foreach_norm(gradients, float("inf")), strict=True):
        torch.where(torch.isfinite(largest), gradient, torch.zeros_like(largest), out=gradient)


# from a stock optimizer to an adopted one


class ScaledAdamW(ScaledStates, torch.optim.AdamW):
    """A `torch.optim.AdamW` that `adopt` made train scaled weights."""


class ScaledAdam(ScaledStates, torch.optim.Adam):
    """A `torch.optim.Adam` that `adopt` made train scaled weights."""


# AdamW first: it is a subclass of Adam
_ADOPTED = {torch.optim.AdamW: ScaledAdamW, torch.optim.Adam: ScaledAdam}


def adopt(optimizer: torch.optim.Optimizer, rule: StateRule) -> None:
    """Exchange the class of a stock Adam or AdamW, in place. Existing moments are stored as `rule` says.

    Repeating it with the same rule changes nothing. Raises what `check` raises.
    """
    check(optimizer, rule)
    if isinstance(optimizer, ScaledStates):
        return
    adopted = _ADOPTED[type(optimizer)]
    if "step" in optimizer.__dict__:
        optimizer.step = _TrackedStep(optimizer, adopted)
    optimizer.__class__ = adopted
    optimizer._patch_step_function()  # PyTorch's own way to give a class's step its hooks
    optimizer.fp8_states = rule
    optimizer._step_supports_amp_scaling = False  # a fused stock step divides by the loss scale itself
    for p, state in optimizer.state.items():
        for name in MOMENTS:
            if name in state:
                state[name] = optimizer._stored(p, name, state[name])


def check(optimizer: torch.optim.Optimizer, rule: StateRule) -> None:
    """Whether `adopt` takes this optimizer; changes nothing.

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
    if type(optimizer) not in _ADOPTED:
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
    """What PyTorch's schedulers make of `optimizer.step`, to know that it was called; over the adopted class."""

    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: torch.optim.Optimizer, adopted: type) -> None:
        self.optimizer, self.adopted = weakref.ref(optimizer), adopted

    def __call__(self, *args, **kwargs):
        optimizer = self.optimizer()
        optimizer._opt_called = True
        return self.adopted.step(optimizer, *args, **kwargs)
