"""What one native layer writes down as it runs: which products ran in FP8 and, in compiled code, the amaxes it saw.

Eager code counts in Python integers and records amaxes in the scaling state itself. Compiled code runs without Python
and counts in tensors. Forward changes one of them, as any buffer is changed. Backward may change nothing in that way:
AOT autograd saves what backward reads as forward found it, so of two backwards that follow two forwards the second
would undo the first, or be refused. Its notes therefore go through operators of their own, `note_backward` and
`take_amaxes`, which change memory that AOT autograd takes for unchanged. They are declared effectful: kept although
nothing reads their result, run in order, and never run again by recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.library import EffectType

from ...numerics.engine import inside_backward
from ...numerics.scaling import HISTORY, INPUT, WEIGHT
from ..counts import FPROP, RECOMPUTED, ProductCounts
from .layer_rule import LayerRule

_Amax = torch.Tensor | None


FPROPS = 2
"""The row of `Ledger.of_forward` that counts, below those of INPUT and WEIGHT."""


class Ledger:
    """The counts of one layer with any number of scaling states, and what its compiled code notes until somebody
    collects it: int32, amaxes as the bits of FP32, since wrappers cast what is of floating point."""

    def __init__(self, device: torch.device, states: int = 1, first: int = 0) -> None:
        self.first = first
        """The state of the first amax that the layer gives; those of all states, but under expert parallelism."""
        self.counts = ProductCounts()
        """Of eager code."""
        self.of_forward = _zeros((3, states), device)
        """The largest amaxes of INPUT and of WEIGHT that compiled code saw, and how often it multiplied them, which is
        the same for all states: one tensor, so that one kernel notes it all."""
        self.dgrads_wgrads, self.grad_output = _zeros((2,), device), _zeros((states,), device)
        """Counts of compiled code, and the largest amaxes of GRAD_OUTPUT that it saw."""

    @property
    def device(self) -> torch.device:
        return self.of_forward.device

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """What `nn.Module._apply` does to buffers."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, function(value))

    def forward(self, rule: LayerRule, fprop: bool, input: _Amax = None, weight: _Amax = None) -> None:
        """Count the product of a forward, if it ran in FP8. In compiled code, keep these amaxes, FP32 [states] or
        0-dimensional; elsewhere they are recorded already.

        Compiled code counts each forward once, also where it recomputes.
        """
        if torch.compiler.is_compiling():
            self._note_forward(rule, fprop, input, weight)
        elif fprop:
            self.counts.add(RECOMPUTED if inside_backward() else FPROP)

    def _note_forward(self, rule: LayerRule, fprop: bool, input: _Amax, weight: _Amax) -> None:
        noted, row = self.of_forward, torch.arange(3, device=self.device).unsqueeze(1)
        new = noted + (row == FPROPS) if fprop else noted
        for tensor, amax in ((INPUT, input), (WEIGHT, weight)):
            if amax is not None:
                larger = _larger(noted.view(torch.float32), self._of_all(amax), rule.keeps_nan)
                new = torch.where(row == tensor, larger.view(torch.int32), new)
        noted.copy_(new)

    def newest(self, rule: LayerRule, state: torch.Tensor | None, tensor: int) -> torch.Tensor | None:
        """Where a cast is to record its amax for the rule: bits of FP32, int32, 0-dimensional; None: nowhere, as in
        compiled code."""
        if state is None or torch.compiler.is_compiling() or (tensor == WEIGHT and rule.scaling == "window"):
            return None
        return state.select(0, tensor).select(0, HISTORY)

    def backward(self, rule: LayerRule, dgrad: bool, wgrad: bool, amax: _Amax = None) -> None:
        """Count the products of a backward that ran in FP8. In compiled code, keep this amax of GRAD_OUTPUT, FP32
        [states] or 0-dimensional; elsewhere it is recorded already."""
        if torch.compiler.is_compiling():
            amax = None if amax is None else self._of_all(amax)
            note_backward(self.dgrads_wgrads, dgrad, wgrad, self.grad_output, amax, rule.keeps_nan)
            return
        self.counts.dgrad += dgrad
        self.counts.wgrad += wgrad

    def _of_all(self, amax: torch.Tensor) -> torch.Tensor:
        """The amaxes, with zeros for states that are others'."""
        missing = len(self.grad_output) - amax.numel()
        return F.pad(amax, (self.first, missing - self.first)) if missing else amax

    def total(self) -> ProductCounts:
        """All products so far, of eager and of compiled code. Waits for the device."""
        total = replace(self.counts)
        if self.device.type != "meta":
            fprop, dgrad, wgrad = torch.cat([self.of_forward[FPROPS, :1], self.dgrads_wgrads]).tolist()
            total.fprop, total.dgrad, total.wgrad = total.fprop + fprop, total.dgrad + dgrad, total.wgrad + wgrad
        return total


class KeepsLedger(nn.Module):
    """A layer with a ledger, `fp8_ledger`, and the state of its scaling rule. `_reset_state` makes both.

    Neither is a buffer: `AveragedModel` and other averages pair the buffers of a model with those of a copy made
    before it was prepared.
    """

    fp8_scaling: torch.Tensor | None = None
    """int32 [3, 2 + history length], of experts [experts, 3, 2 + history length]; None for a rule without state."""

    @property
    def fp8_products(self) -> torch.Tensor:
        """How many products of fprop, dgrad, wgrad and recomputed fprop ran in FP8: int64 [4], on the CPU."""
        return torch.tensor(astuple(self.fp8_ledger.total()), dtype=torch.int64, device="cpu")

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.fp8_ledger.device.type == "meta":
            self._follow(fn(self.fp8_ledger.of_forward).device)  # `to_empty` leaves random bits
        else:
            self.fp8_ledger.apply(fn)
            self.fp8_scaling = None if self.fp8_scaling is None else fn(self.fp8_scaling)
        return self

    def _follow(self, device: torch.device) -> None:
        """Bring ledger and state to the device of the weight: a wrapper may have moved the parameters alone, or
        assigned real weights into a model that was prepared on meta. Offloaded weights are on meta between forwards."""
        state = self.fp8_ledger.of_forward if self.fp8_scaling is None else self.fp8_scaling
        if device.type == "meta" or state.device == device:
            return
        if state.is_meta:
            self._reset_state(device)
            return
        self.fp8_ledger.apply(lambda notes: notes.to(device))
        self.fp8_scaling = None if self.fp8_scaling is None else self.fp8_scaling.to(device)


def with_noted_amaxes(states: torch.Tensor, ledgers: Sequence[Ledger]) -> torch.Tensor:
    """The states of these layers, int32 [states, 3, 2 + history length], changed in place: with the amaxes that their
    compiled code noted, which leave the ledgers."""
    of_forward = [ledger.of_forward.narrow(0, 0, FPROPS) for ledger in ledgers]
    take = take_amaxes if torch.compiler.is_compiling() else _take_amaxes
    of_backward = take([ledger.grad_output for ledger in ledgers])
    noted = torch.cat([torch.cat(of_forward, 1), of_backward.unsqueeze(0)]).t().view(torch.float32)
    torch._foreach_zero_(of_forward)
    newest = states.view(torch.float32).select(2, HISTORY)
    newest.copy_(torch.maximum(newest, noted))  # a NaN is noted only where it is to stay
    return states


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def _larger(a: torch.Tensor, b: torch.Tensor, keep_nan: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.maximum(a, b, out=out) if keep_nan else torch.fmax(a, b, out=out)


# `.data`: a change that the version counter, by which autograd finds saved tensors stale, does not see


@torch.library.custom_op("fp8_backends::note_backward", mutates_args=())
def note_backward(
    dgrads_wgrads: torch.Tensor,
    dgrad: bool,
    wgrad: bool,
    grad_output: torch.Tensor,
    amax: torch.Tensor | None,
    keep_nan: bool,
) -> None:
    """Add to the counts, and keep the larger amax."""
    dgrads_wgrads.data.narrow(0, int(not dgrad), dgrad + wgrad).add_(1)
    if amax is not None:
        noted = grad_output.data.view(torch.float32)
        _larger(noted, amax, keep_nan, out=noted)


@note_backward.register_fake
def _(dgrads_wgrads, dgrad, wgrad, grad_output, amax, keep_nan) -> None:
    pass


def _take_amaxes(grad_outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their amaxes, int32 [states]; zeros stay behind."""
    noted = [each.data for each in grad_outputs]
    amaxes = torch.cat(noted)
    torch._foreach_zero_(noted)
    return amaxes


take_amaxes = torch.library.custom_op("fp8_backends::take_amaxes", _take_amaxes, mutates_args=())


@take_amaxes.register_fake
def _(grad_outputs) -> torch.Tensor:
    return grad_outputs[0].new_empty(sum(map(len, grad_outputs)))


for _operator in (note_backward, take_amaxes):
    _operator.register_effect(EffectType.ORDERED)
