"""Steps that an optimizer's stock class itself makes, on plain FP32 tensors: no formula is written here.

The stock class is made anew around FP32 copies of a weight, its gradient and its states (a twin), and steps. What it
leaves is rounded as weight and states are stored, with scales from its amaxes. No more than `PART` elements are copied
at a time, or one parameter where its step needs all of it; under FSDP2 that one is gathered, and each rank keeps its
rows. Plain FP32 parameters with FP32 states are stepped where they lie.

Random bits follow from a parameter's place in the optimizer, its count of steps and the element's index, as Adam's do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import FP8BackendError
from ..numerics.formats import E4M3, E4M11, FORMAT_OF, FP32, ROOT8, saturating_cast
from ..numerics.kernels import cpu_casts
from ..numerics.kernels.adam import Slot, is_finite
from ..numerics.kernels.rounding import (
    EXP_AVG_BITS,
    EXP_AVG_SQ_BITS,
    WEIGHT_BITS,
    codes_of,
    decoded,
    random_bits,
    random_key,
)
from ..numerics.scaled_tensor import ScaledTensor, block_amax, tensor_amax_of
from ..numerics.scaling import power_of_two_scale, scale_inv_of
from ..numerics.sharded_tensor import is_distributed, local_part, with_local
from . import sharding
from .checkpoint import MASTER
from .scaled_states import LocalView, ScaledStates, slot_of

PART = 2**22
"""Elements that are copied to FP32 at a time; a multiple of every block size."""
ROUNDED_ON_A_CPU = 2**16
"""Elements that are rounded at a time on a CPU, in its cache; a multiple of every block size."""

WEIGHT = "weight"
_BITS = {
    WEIGHT: WEIGHT_BITS,
    "first_moment": EXP_AVG_BITS,
    "second_moment": EXP_AVG_SQ_BITS,
    "direction": EXP_AVG_SQ_BITS,
}
"""Role -> the field of an element's random bits."""


class StockSteps(ScaledStates):
    """A converted optimizer whose steps its stock class makes."""

    def _is_plain(self, group: Mapping[str, Any], p: torch.Tensor) -> bool:
        gathered = is_distributed(p) and not self.fp8_declared.elementwise
        return super()._is_plain(group, p) and not gathered

    def state_of(self, group: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
        state = self.state[p]
        if "step" not in state and not state.keys().isdisjoint(self.fp8_declared.roles):
            state["step"] = torch.ones(
                (), dtype=torch.float32
            )  # the stock class has made some, and has not counted them
        return super().state_of(group, p)

    def new_counter(self, group: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32)

    def _step_plain(self, views: Sequence[LocalView]) -> None:
        states = [self.state_of(view.group, view.parameter) for view in views]
        weights = [view.weight.detach() for view in views]
        before = [{name: local_part(value) for name, value in _seen(state).items()} for state in states]
        after = self.twin_step(views[0].group, weights, [view.gradient for view in views], before)
        for view, state, left in zip(views, states, after, strict=True):
            local = {name: with_local(view.parameter, left[name]) for name in self.roles_of(view.group) if name in left}
            _keep(state, left | local)

    def _step_scaled(self, views: Sequence[LocalView]) -> None:
        for together in _batches(views):
            batch = _Batch(self, together)
            if any(view.is_shard for view in together):
                sharding.run_agreed(batch, [view.parameter for view in together])
            else:
                batch.run()

    def whole_step(
        self,
        group: Mapping[str, Any],
        p: torch.Tensor,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """`twin_step` of a parameter whose step needs all of it, on what lies here. A sharded one is gathered, stepped
        on each of its ranks, which all call this, and each keeps its rows."""
        roles = self.roles_of(group)
        whole = sharding.gathered(p, weight)
        state = {name: sharding.gathered(p, value) if name in roles else value for name, value in state.items()}
        (left,) = self.twin_step(group, [whole], [sharding.gathered(p, gradient)], [state])
        weight.copy_(sharding.shard_of(p, whole))
        return {name: sharding.shard_of(p, value) if name in roles else value for name, value in left.items()}

    def twin_step(
        self,
        group: Mapping[str, Any],
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Let a stock optimizer with the options of a group step plain tensors, in place. Returns the states that it
        leaves. states: as the stock class has them; empty before the first step."""
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        twin = self.fp8_declared.stock([{**options, "params": list(weights)}])
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            weight.grad, twin.state[weight] = gradient, state
        twin.step()
        left = [twin.state[weight] for weight in weights]
        for weight, state in zip(weights, left, strict=True):
            declared = {"step", *self.fp8_declared.roles, *self.fp8_declared.exact_states(weight.shape)}
            if unknown := state.keys() - declared:
                raise FP8BackendError(
                    f"{self.fp8_declared.stock.__name__} has a state {sorted(unknown)[0]!r} of each parameter that is "
                    f"not declared, and would be lost: name it in fp8_roles of the class, or train at level O0"
                )
        return left


def _seen(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the stock class sees of a parameter's state: nothing before the first step, which fills it as it likes."""
    if not state["step"]:
        return {}
    return {name: value for name, value in state.items() if name != MASTER} | {"step": state["step"].clone()}


def _keep(state: dict[str, Any], left: Mapping[str, Any]) -> None:
    """Count a step, and keep what the stock class has left but for its own count."""
    state["step"] += 1
    state.update((name, value) for name, value in left.items() if name != "step")


def _batches(views: Sequence[LocalView]) -> Iterator[list[LocalView]]:
    """Parameters of one group, in order, that have `PART` elements together at most; or a larger one alone."""
    batch, size = [], 0
    for view in views:
        numel = view.parameter.numel()  # of the whole: all ranks make the same batches
        if batch and (size + numel > PART or view.group is not batch[0].group):
            yield batch
            batch, size = [], 0
        batch.append(view)
        size += numel
    if batch:
        yield batch


class _Batch:
    """One step of several parameters of a group, in the three parts that `AdamSteps` has. A parameter that is larger
    than `PART` is computed part by part and twice, for its amaxes and for its values."""

    def __init__(self, optimizer: StockSteps, views: Sequence[LocalView]) -> None:
        self._optimizer, self._group = optimizer, views[0].group
        self._steps = [_Step(optimizer, view) for view in views]
        longest = max(1, *(step.numel for step in self._steps))
        size = PART if optimizer.fp8_declared.elementwise else longest
        self._spans = [slice(start, start + size) for start in range(0, longest, size)]
        self._kept: list[_Values] | None = None

    def run(self) -> None:
        """Make the whole step."""
        self.write_copies(self.write(self.amaxes()))

    def amaxes(self) -> list[list[torch.Tensor | None]]:
        """max |x| of each parameter's new weight and states, FP32: 0-dim, or [blocks]; None for those without scales.
        Nothing is written."""
        spans = [
            [step.amaxes(values) for step, values in zip(self._steps, new, strict=True)] for _, new in self._computed()
        ]
        return [[_joined(parts) for parts in zip(*of_step, strict=True)] for of_step in zip(*spans, strict=True)]

    def write(self, amaxes: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Write weights and states, with scales from these amaxes. Returns max |x| of each weight as it is stored,
        0-dim, or None if there is no copy of it."""
        for span, new in self._computed():
            for step, values, of_step in zip(self._steps, new, amaxes, strict=True):
                step.write(span, values, of_step)
        self._kept = None
        return [step.finish(of_step) for step, of_step in zip(self._steps, amaxes, strict=True)]

    def write_copies(self, amaxes: list[torch.Tensor | None]) -> None:
        """Write the copies of weights that have one, from the weights as they are stored."""
        for step, amax in zip(self._steps, amaxes, strict=True):
            if amax is not None:
                step.write_copy(self._spans, amax)

    def _computed(self) -> Iterator[tuple[slice, list[_Values]]]:
        """The new values of all parameters, part by part. Those of a single part are kept until they are written."""
        for span in self._spans:
            new = self._kept or self._compute(span)
            if len(self._spans) == 1:
                self._kept = new
            yield span, new

    def _compute(self, span: slice) -> list[_Values]:
        optimizer, before = self._optimizer, [step.before(span) for step in self._steps]
        if optimizer.fp8_declared.elementwise:
            left = optimizer.twin_step(self._group, *zip(*before, strict=True))
        else:
            parameters = [step.view.parameter for step in self._steps]
            left = [optimizer.whole_step(self._group, p, *e) for p, e in zip(parameters, before, strict=True)]
        return [step.after(weight, state) for step, (weight, *_), state in zip(self._steps, before, left, strict=True)]


_Values = dict[str, torch.Tensor]
"""New values of a weight and of its declared states, FP32, flat."""


class _Step:
    """One step of one parameter, or of what lies here of it."""

    def __init__(self, optimizer: StockSteps, view: LocalView) -> None:
        self.view, self.state = view, optimizer.state_of(view.group, view.parameter)
        self.roles = {WEIGHT: WEIGHT, **optimizer.roles_of(view.group)}
        weight = view.weight if isinstance(view.weight, ScaledTensor) else view.weight.contiguous()
        self.slots = {name: slot_of(weight if name == WEIGHT else self.state[name]) for name in self.roles}
        self.numel = self.slots[WEIGHT].data.numel()
        self.gradient = slot_of(view.gradient)
        self.finite = is_finite(self.gradient) if view.finite is None else view.finite
        self.shape = (-1,) if optimizer.fp8_declared.elementwise else weight.shape
        self.rounding, self.left = optimizer.fp8_states.rounding, {}

    def before(self, span: slice) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Weight, gradient and states of a part as the stock class takes them, copied."""
        gradient = torch.where(self.finite, _read(self.gradient, span), 0.0)
        state = _seen(self.state)
        for name, value in state.items():
            declared = name in self.roles
            state[name] = _read(self.slots[name], span).view(self.shape) if declared else copy.deepcopy(value)
        return _read(self.slots[WEIGHT], span).view(self.shape), gradient.view(self.shape), state

    def after(self, weight: torch.Tensor, left: dict[str, Any]) -> _Values:
        """What the stock class has left of a part."""
        self.left = {name: value for name, value in left.items() if name not in self.roles}
        values = {name: weight if name == WEIGHT else left.get(name) for name in self.roles}
        return {name: (torch.zeros_like(weight) if v is None else v).reshape(-1) for name, v in values.items()}

    def amaxes(self, values: _Values) -> list[torch.Tensor | None]:
        """max |x| of these values: weight, then states."""
        return [_amax(self.slots[name], values[name]) for name in self.roles]

    def write(self, span: slice, values: _Values, amaxes: Sequence[torch.Tensor | None]) -> None:
        """Store a part, rounded with scales from the amaxes of all parts."""
        weight = values[WEIGHT]
        size = ROUNDED_ON_A_CPU if weight.device.type == "cpu" else max(weight.numel(), 1)
        key = None
        if self.rounding == "stochastic":
            key = random_key(self.view.index, (self.state["step"] + 1).to(weight.device, torch.float32))
        for start in range(0, weight.numel(), size):
            piece = slice(span.start + start, span.start + min(start + size, weight.numel()))
            first, count = self.view.first + piece.start, piece.stop - piece.start
            random = None if key is None else random_bits(key, first, count)
            for (name, role), amax in zip(self.roles.items(), amaxes, strict=True):
                slot, rounded = self.slots[name], values[name][start : start + size]
                _write(slot, piece, _scaled(slot, piece, rounded, amax), role, random)

    def finish(self, amaxes: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Store scales, and what is not rounded. Returns max |x| of the stored weight if a copy is made of it."""
        for slot, amax in zip(self.slots.values(), amaxes, strict=True):
            if amax is not None:
                slot.scale_inv.copy_(scale_inv_of(_scale(slot, amax), amax))
        weight, view = self.slots[WEIGHT], self.view
        if not isinstance(view.weight, ScaledTensor) and not view.weight.is_contiguous():
            view.weight.copy_(weight.data)
        _keep(self.state, self.left)
        return None if view.copy is None else tensor_amax_of(weight.data) * weight.scale_inv

    def write_copy(self, spans: Sequence[slice], amax: torch.Tensor) -> None:
        """Make the E4M3 weight of its master."""
        target = slot_of(self.view.copy)
        for span in spans:
            _write(target, span, _scaled(target, span, _read(self.slots[WEIGHT], span), amax), WEIGHT, None)
        target.scale_inv.copy_(scale_inv_of(_scale(target, amax), amax))


# Reading and rounding what is stored


def _read(slot: Slot, span: slice) -> torch.Tensor:
    """Exact values of a part, FP32, flat, a copy."""
    flat = _flat(slot.data, span)
    if slot.scale_inv is None:
        return flat.to(torch.float32, copy=True)
    if slot.format is E4M3 and flat.device.type == "cpu":
        values = cpu_casts.decoded(flat.view(E4M3.dtype), torch.float32)
    else:
        values = decoded(flat, slot.format, None if slot.residual is None else _flat(slot.residual, span))
    values = values * _of_part(slot.scale_inv.detach(), slot, span, values)
    return values.square_() if slot.format is ROOT8 else values


def _flat(data: torch.Tensor, span: slice) -> torch.Tensor:
    """A part of stored data, flat; FP8 as bytes."""
    flat = data.detach().reshape(-1)[span]
    return flat.view(torch.uint8) if flat.dtype.is_floating_point and flat.dtype.itemsize == 1 else flat


def _as_stored(slot: Slot, values: torch.Tensor) -> torch.Tensor:
    """What is rounded of values: these, or their roots."""
    return values.sqrt() if slot.format is ROOT8 else values


def _of_part(scale: torch.Tensor, slot: Slot, span: slice, values: torch.Tensor) -> torch.Tensor:
    """The scale of each of a part's values, or the one of all."""
    if not slot.block_size:
        return scale
    return scale[span.start // slot.block_size :].repeat_interleave(slot.block_size)[: values.numel()]


def _amax(slot: Slot, values: torch.Tensor) -> torch.Tensor | None:
    if slot.scale_inv is None:
        return None
    values = _as_stored(slot, values)
    return block_amax(values, slot.block_size) if slot.block_size else tensor_amax_of(values)


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The amaxes of all parts of one tensor."""
    if parts[0] is None:
        return None
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts).amax()


def _scale(slot: Slot, amax: torch.Tensor) -> torch.Tensor:
    return power_of_two_scale(amax, FORMAT_OF[slot.data.dtype])


def _scaled(slot: Slot, span: slice, values: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    if amax is None:
        return values
    return _as_stored(slot, values) * _of_part(_scale(slot, amax), slot, span, values)


def _write(slot: Slot, span: slice, values: torch.Tensor, role: str, random: torch.Tensor | None) -> None:
    """Store scaled values of a part. random: an element's bits; None rounds to nearest."""
    fmt, above_zero = slot.format, role == "second_moment"
    if fmt is FP32:
        slot.data.detach().view(-1)[span].copy_(values)
    elif random is None and not above_zero and fmt is not E4M11:
        slot.data.detach().view(-1)[span].copy_(saturating_cast(values, fmt))
    else:
        codes, residual = codes_of(values, fmt, random, _BITS[role], above_zero)
        if residual is not None:
            _flat(slot.residual, span).copy_(residual)
        _flat(slot.data, span).copy_(codes)
