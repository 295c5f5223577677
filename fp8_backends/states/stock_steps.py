"""SGD, Muon and Adafactor over scaled weights, gradients and states: steps of a stock class on
plain FP32 tensors.

A twin of the stock optimizer steps FP32 copies, at most `STEPPED_AT_ONCE` elements at a time or one
parameter if its step needs all of it, and the results are rounded to their storage, with scales
from their amaxes. Under FSDP2 such a parameter is gathered, and each rank keeps its rows. Plain FP32
parameters with FP32 states are stepped in place.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

from ..errors import FP8BackendError
from ..formats.formats import (
    E4M3,
    E4M11,
    FINITE,
    FORMAT_OF,
    FP32,
    NOT_NEGATIVE,
    ROOT8,
    saturating_cast,
)
from ..formats.scaling import power_of_two_scale, scale_inv_of
from ..kernels import cpu_casts
from ..kernels.adam import Slot, is_finite
from ..kernels.rounding import (
    EXP_AVG_BITS,
    EXP_AVG_SQ_BITS,
    WEIGHT_BITS,
    codes_of,
    random_bits,
    random_key,
)
from ..tensors.encoding import amax_of, decode, decode_pair
from ..tensors.scaled_tensor import ScaledTensor
from ..tensors.sharded_tensor import is_distributed, local_part, with_local
from . import sharding
from .scaled_states import (
    Declaration,
    LocalView,
    ScaledStates,
    changed_options,
    options_of,
)
from .sharding import slot_of

STEPPED_AT_ONCE = 2**22
"""Elements copied to FP32 at a time; a multiple of every block size."""

WEIGHT_ROLE = "weight"
_BITS = {
    WEIGHT_ROLE: WEIGHT_BITS,
    "first_moment": EXP_AVG_BITS,
    "second_moment": EXP_AVG_SQ_BITS,
    "direction": EXP_AVG_SQ_BITS,
}
"""Role -> the field of an element's random bits."""


class StockSteps(ScaledStates):
    """A converted optimizer with its stock class's steps."""

    def _is_plain(self, group: Mapping[str, Any], p: torch.Tensor) -> bool:
        gathered = is_distributed(p) and not self.fp8_declared.elementwise
        return super()._is_plain(group, p) and not gathered

    def state_of(self, group: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
        state = self.state[p]
        if "step" not in state and not state.keys().isdisjoint(self.fp8_declared.roles):
            # the stock class has made uncounted steps
            state["step"] = torch.ones((), dtype=torch.float32, device="cpu")
        return super().state_of(group, p)

    def new_counter(self, group: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device="cpu")

    def _step_plain(self, views: Sequence[LocalView]) -> None:
        states = [view.state for view in views]
        weights = [view.weight.detach() for view in views]
        before = [
            {name: local_part(value) for name, value in _stock_state(state).items()}
            for state in states
        ]
        after = self.twin_step(views[0].group, weights, [view.gradient for view in views], before)
        for view, state, new in zip(views, states, after, strict=True):
            local = {
                name: with_local(view.parameter, new[name])
                for name in self.roles_of(view.group)
                if name in new
            }
            _keep(state, new | local)

    def step_scaled(self, views: Sequence[LocalView]) -> None:
        for together in _batches(views):
            batch = _Batch(self, together)
            if any(view.is_shard for view in together):
                sharding.run_agreed(batch, [view.parameter for view in together])
            else:
                batch.write_copies(batch.write(batch.amaxes()))

    def whole_step(
        self,
        group: Mapping[str, Any],
        p: Tensor,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """Make a `twin_step` of a whole parameter. All ranks of a sharded one gather it, and keep
        their rows."""
        roles = self.roles_of(group)
        whole = sharding.gathered(p, weight)
        state = {
            name: sharding.gathered(p, value) if name in roles else value
            for name, value in state.items()
        }
        (new,) = self.twin_step(group, [whole], [sharding.gathered(p, gradient)], [state])
        weight.copy_(sharding.shard_of(p, whole))
        return {
            name: sharding.shard_of(p, value) if name in roles else value
            for name, value in new.items()
        }

    def twin_step(
        self,
        group: Mapping[str, Any],
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Step plain tensors in place with a stock optimizer and the options of a group. Return its
        new states.

        Args:
            states: the stock class's states; empty before the first step.

        Raises:
            FP8BackendError: the stock class has an undeclared state, or writes elsewhere.
        """
        options = {
            name: value for name, value in group.items() if name not in ("params", "param_names")
        }
        twin = self.fp8_declared.stock([{**options, "params": list(weights)}])
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            weight.grad, twin.state[weight] = gradient, state
        places = (vars(twin), twin.param_groups[0])
        before = [options_of(place) for place in places]
        twin.step()
        if changed := sum(map(changed_options, before, places), []):
            raise FP8BackendError(
                f"{self.fp8_declared.stock.__name__}.step writes {changed[0]!r} of the optimizer or "
                "of a parameter group, which a level would lose: keep it in a state of each "
                "parameter, named in fp8_roles of the class, or train at level O0"
            )
        new_states = [twin.state[weight] for weight in weights]
        for weight, state in zip(weights, new_states, strict=True):
            declared = {
                "step",
                *self.fp8_declared.roles,
                *self.fp8_declared.exact_states(weight.shape),
            }
            if unknown := state.keys() - declared:
                raise FP8BackendError(
                    f"{self.fp8_declared.stock.__name__} has a state {sorted(unknown)[0]!r} of "
                    "each parameter that is not declared, and would be lost: name it in fp8_roles "
                    "of the class, or train at level O0"
                )
        return new_states


_RATES = {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE}


def _has_momentum(group: Mapping[str, Any]) -> bool:
    momentum = group.get("momentum")
    return not isinstance(momentum, Real) or momentum != 0  # a checkpoint may hold anything


class ScaledSGD(StockSteps, torch.optim.SGD):
    fp8_declared = Declaration(
        torch.optim.SGD,
        roles={"momentum_buffer": "first_moment"},
        ranges={**_RATES, "momentum": NOT_NEGATIVE, "dampening": FINITE},
        refused=("differentiable",),
        counts=False,
        has_states=_has_momentum,
    )


class ScaledMuon(StockSteps, torch.optim.Muon):
    fp8_declared = Declaration(
        torch.optim.Muon,
        roles={"momentum_buffer": "direction"},
        ranges={**_RATES, "momentum": NOT_NEGATIVE, "eps": NOT_NEGATIVE},
        counts=False,
        elementwise=False,
    )

    def whole_step(
        self,
        group: Mapping[str, Any],
        p: Tensor,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """Gather only the direction of a sharded matrix, in PyTorch's BF16: 2 bytes an element."""
        if not is_distributed(p):
            return super().whole_step(group, p, weight, gradient, state)
        momentum, lr = group["momentum"], float(group["lr"])
        average = state.get("momentum_buffer", torch.zeros_like(gradient)).lerp_(
            gradient, 1 - momentum
        )
        direction = gradient.lerp(average, momentum) if group["nesterov"] else average
        direction = _muon._zeropower_via_newtonschulz(
            sharding.gathered(p, direction.bfloat16()),
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        weight.mul_(1 - lr * group["weight_decay"])
        adjusted = _muon._adjust_lr(lr, group["adjust_lr_fn"], p.shape)
        weight.add_(sharding.shard_of(p, direction), alpha=-adjusted)
        return {"momentum_buffer": average}


def _variances(shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Adafactor's states: a number for each row and column, or each element of
    a vector."""
    if len(shape) < 2:
        return {"variance": tuple(shape)}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


class ScaledAdafactor(StockSteps, torch.optim.Adafactor):
    fp8_declared = Declaration(
        torch.optim.Adafactor, roles={}, ranges=_RATES, elementwise=False, exact_states=_variances
    )


def _stock_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state for the stock class: empty before the first step, which fills
    it."""
    if not state["step"]:
        return {}
    return {**state, "step": state["step"].clone()}


def _keep(state: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Count a step, and keep the stock class's new state except for its own count."""
    state["step"] += 1
    state.update((name, value) for name, value in new.items() if name != "step")


def _batches(views: Sequence[LocalView]) -> Iterator[list[LocalView]]:
    """Yield parameters of one group, in order, with at most `STEPPED_AT_ONCE` elements together, or
    a single larger one."""
    batch, size = [], 0
    for view in views:
        numel = view.parameter.numel()  # of the whole: all ranks make the same batches
        if batch and (size + numel > STEPPED_AT_ONCE or view.group is not batch[0].group):
            yield batch
            batch, size = [], 0
        batch.append(view)
        size += numel
    if batch:
        yield batch


_Values = dict[str, torch.Tensor]
"""New values of a weight and of its declared states, FP32, flat."""


class _Batch:
    """Step parameters of a group in the three parts of `AdamSteps`. One of more than
    `STEPPED_AT_ONCE` elements runs twice."""

    def __init__(self, optimizer: StockSteps, views: Sequence[LocalView]) -> None:
        self._optimizer, self._group = optimizer, views[0].group
        self._steps = [_Step(optimizer, view) for view in views]
        longest = max(1, *(step.numel for step in self._steps))
        size = STEPPED_AT_ONCE if optimizer.fp8_declared.elementwise else longest
        self._spans = [slice(start, start + size) for start in range(0, longest, size)]
        self._kept: list[_Values] | None = None

    def amaxes(self) -> list[list[torch.Tensor | None]]:
        """Return max |x| of new weights and states, FP32: 0-dim, or [blocks]; None without scales.
        Writes nothing."""
        spans = [
            [step.amaxes(values) for step, values in zip(self._steps, new, strict=True)]
            for _, new in self._computed()
        ]
        return [
            [_joined(parts) for parts in zip(*of_step, strict=True)]
            for of_step in zip(*spans, strict=True)
        ]

    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Write weights and states with scales from these amaxes. Return max |x| of stored weights
        that need a copy."""
        for span, new in self._computed():
            for step, values, step_amaxes in zip(self._steps, new, amaxes, strict=True):
                step.write(span, values, step_amaxes)
        self._kept = None
        return [
            step.finish(step_amaxes) for step, step_amaxes in zip(self._steps, amaxes, strict=True)
        ]

    def write_copies(self, amaxes: list[torch.Tensor | None]) -> None:
        for step, amax in zip(self._steps, amaxes, strict=True):
            if amax is not None:
                step.write_copy(self._spans, amax)

    def _computed(self) -> Iterator[tuple[slice, list[_Values]]]:
        """Yield the new values of all parameters, part by part. A single part is kept until it is
        written."""
        for span in self._spans:
            new = self._kept or self._compute(span)
            if len(self._spans) == 1:
                self._kept = new
            yield span, new

    def _compute(self, span: slice) -> list[_Values]:
        optimizer, before = self._optimizer, [step.before(span) for step in self._steps]
        if optimizer.fp8_declared.elementwise:
            new = optimizer.twin_step(self._group, *zip(*before, strict=True))
        else:
            parameters = [step.view.parameter for step in self._steps]
            new = [
                optimizer.whole_step(self._group, p, *old)
                for p, old in zip(parameters, before, strict=True)
            ]
        return [
            step.after(weight, state)
            for step, (weight, *_), state in zip(self._steps, before, new, strict=True)
        ]


class _Step:
    """One step of this rank's part of one parameter."""

    def __init__(self, optimizer: StockSteps, view: LocalView) -> None:
        self.view, self.state = view, view.state
        self.roles = {WEIGHT_ROLE: WEIGHT_ROLE, **optimizer.roles_of(view.group)}
        weight = view.weight if isinstance(view.weight, ScaledTensor) else view.weight.contiguous()
        self.slots = {
            name: slot_of(weight if name == WEIGHT_ROLE else self.state[name])
            for name in self.roles
        }
        self.numel = self.slots[WEIGHT_ROLE].data.numel()
        self.gradient = slot_of(view.gradient)
        self.finite = is_finite(self.gradient) if view.finite is None else view.finite
        self.shape = (-1,) if optimizer.fp8_declared.elementwise else weight.shape
        self.rounding, self.unrounded = optimizer.fp8_states.rounding, {}

    def before(self, span: slice) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Copy weight, gradient and states of a part for the stock class."""
        gradient = torch.where(self.finite, _read(self.gradient, span), 0.0)
        state = _stock_state(self.state)
        for name, value in state.items():
            declared = name in self.roles
            state[name] = (
                _read(self.slots[name], span).view(self.shape) if declared else copy.deepcopy(value)
            )
        return (
            _read(self.slots[WEIGHT_ROLE], span).view(self.shape),
            gradient.view(self.shape),
            state,
        )

    def after(self, weight: torch.Tensor, new: dict[str, Any]) -> _Values:
        """Split the stock class's results of a part into rounded values and others."""
        self.unrounded = {name: value for name, value in new.items() if name not in self.roles}
        values = {name: weight if name == WEIGHT_ROLE else new.get(name) for name in self.roles}
        return {
            name: (torch.zeros_like(weight) if v is None else v).reshape(-1)
            for name, v in values.items()
        }

    def amaxes(self, values: _Values) -> list[torch.Tensor | None]:
        amaxes = []
        for name, slot in self.slots.items():
            stored = values[name].sqrt() if slot.format is ROOT8 else values[name]
            amaxes.append(None if slot.scale_inv is None else amax_of(stored, slot.block_size))
        return amaxes

    def write(self, span: slice, values: _Values, amaxes: Sequence[torch.Tensor | None]) -> None:
        """Store a part, rounded with scales from the amaxes of all parts."""
        weight, random = values[WEIGHT_ROLE], None
        if self.rounding == "stochastic":
            step = (self.state["step"] + 1).to(weight.device, torch.float32)
            random = random_bits(
                random_key(self.view.index, step), self.view.first + span.start, weight.numel()
            )
        for (name, role), amax in zip(self.roles.items(), amaxes, strict=True):
            _write(self.slots[name], span, values[name], amax, role, random)

    def finish(self, amaxes: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Store scales and unrounded results. Return max |x| of the stored weight if it has a
        copy."""
        for slot, amax in zip(self.slots.values(), amaxes, strict=True):
            _write_scale(slot, amax)
        weight, view = self.slots[WEIGHT_ROLE], self.view
        if not isinstance(view.weight, ScaledTensor) and not view.weight.is_contiguous():
            view.weight.copy_(weight.data)
        _keep(self.state, self.unrounded)
        return None if view.copy is None else amax_of(weight.data) * weight.scale_inv

    def write_copy(self, spans: Sequence[slice], amax: torch.Tensor) -> None:
        target = slot_of(self.view.copy)
        for span in spans:
            _write(target, span, _read(self.slots[WEIGHT_ROLE], span), amax, WEIGHT_ROLE, None)
        _write_scale(target, amax)


# Reading and rounding stored values


def _read(slot: Slot, span: slice) -> torch.Tensor:
    """Return the exact values of a part, FP32, flat, a copy."""
    flat = slot.data.detach().reshape(-1)[span]
    if slot.scale_inv is None:
        return flat.to(torch.float32, copy=True)
    scale_inv = _spread(slot.scale_inv.detach(), slot, span, flat)
    if slot.residual is not None:
        return decode_pair(flat, slot.residual.reshape(-1)[span], scale_inv)
    if slot.format is E4M3 and flat.device.type == "cpu":  # five times as fast as torch's cast
        return cpu_casts.decoded(flat, torch.float32) * scale_inv
    return decode(flat, scale_inv)


def _bytes(data: torch.Tensor, span: slice) -> torch.Tensor:
    """Return a part of stored data, flat; FP8 as bytes."""
    flat = data.detach().view(-1)[span]
    return (
        flat.view(torch.uint8)
        if flat.dtype.is_floating_point and flat.dtype.itemsize == 1
        else flat
    )


def _spread(scale: torch.Tensor, slot: Slot, span: slice, values: torch.Tensor) -> torch.Tensor:
    """Return the scale of each value of a part, or the one of all."""
    if not slot.block_size:
        return scale
    return scale[span.start // slot.block_size :].repeat_interleave(slot.block_size)[
        : values.numel()
    ]


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    if parts[0] is None:
        return None
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts).amax()


def _scale(slot: Slot, amax: torch.Tensor) -> torch.Tensor:
    return power_of_two_scale(amax, FORMAT_OF[slot.data.dtype])


def _write_scale(slot: Slot, amax: torch.Tensor | None) -> None:
    if amax is not None:
        slot.scale_inv.copy_(scale_inv_of(_scale(slot, amax), amax))


def _write(
    slot: Slot,
    span: slice,
    values: torch.Tensor,
    amax: torch.Tensor | None,
    role: str,
    random: torch.Tensor | None,
) -> None:
    """Store a part, scaled if there is an amax. random: an element's bits; None rounds to
    nearest."""
    fmt, above_zero = slot.format, role == "second_moment"
    if amax is not None:
        values = values.sqrt() if fmt is ROOT8 else values
        values = values * _spread(_scale(slot, amax), slot, span, values)
    if fmt is FP32:
        slot.data.detach().view(-1)[span].copy_(values)
    elif random is None and not above_zero and fmt is not E4M11:
        slot.data.detach().view(-1)[span].copy_(saturating_cast(values, fmt))
    else:
        codes, residual = codes_of(values, fmt, random, _BITS[role], above_zero)
        if residual is not None:
            _bytes(slot.residual, span).copy_(residual)
        _bytes(slot.data, span).copy_(codes)
