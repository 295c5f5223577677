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
from torch import nn
from torch.library import EffectType

from ...numerics.scaling import HISTORY, WEIGHT
from ..counts import FPROP, RECOMPUTED, ProductCounts, inside_backward
from .layer_rule import LayerRule


class Ledger:
    """The counts of one layer, and what its compiled code notes until somebody collects it."""

    def __init__(self, device: torch.device) -> None:
        self.counts = ProductCounts()
        """Of eager code."""
        self.fprops, self.dgrads_wgrads = (_zeros(n, device) for n in (1, 2))
        """Counts of compiled code."""
        self.input_weight, self.grad_output = (_zeros(n, device) for n in (2, 1))
        """FP32 bits of the largest amaxes that compiled code saw; wrappers cast what is of floating point."""

    @property
    def device(self) -> torch.device:
        return self.fprops.device

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """What `nn.Module._apply` does to buffers."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, function(value))

    def fprop(self) -> None:
        """Count a product of forward. Compiled code counts each forward once, also where it recomputes."""
        if torch.compiler.is_compiling():
            self.fprops.add_(1)
        else:
            self.counts.add(RECOMPUTED if inside_backward() else FPROP)

    def newest(self, rule: LayerRule, state: torch.Tensor | None, tensor: int) -> torch.Tensor | None:
        """Where a cast is to record its amax for the rule: bits of FP32, int32, 0-dimensional; None: nowhere.

        Compiled code is asked for INPUT and WEIGHT alone.
        """
        if state is None or (tensor == WEIGHT and rule.scaling == "window"):
            return None
        if torch.compiler.is_compiling():
            return self.input_weight.select(0, tensor)
        return state.select(0, tensor).select(0, HISTORY)

    def backward(self, rule: LayerRule, state: torch.Tensor | None, dgrad: bool, wgrad: bool, amax) -> None:
        """Count the products of a backward. In compiled code, keep the amax of GRAD_OUTPUT where the rule has a state;
        elsewhere the cast has recorded it."""
        if torch.compiler.is_compiling():
            noted = None if state is None else amax
            note_backward(self.dgrads_wgrads, dgrad, wgrad, self.grad_output, noted, _keeps_nan(rule))
            return
        self.counts.dgrad += dgrad
        self.counts.wgrad += wgrad

    def total(self) -> ProductCounts:
        """All products so far, of eager and of compiled code. Waits for the device."""
        total = replace(self.counts)
        if self.device.type != "meta":
            fprop, dgrad, wgrad = torch.cat([self.fprops, self.dgrads_wgrads]).tolist()
            total.fprop, total.dgrad, total.wgrad = total.fprop + fprop, total.dgrad + dgrad, total.wgrad + wgrad
        return total


class KeepsLedger(nn.Module):
    """A layer with a ledger, `fp8_ledger`, which its `_reset_state` makes together with other state of its own."""

    @property
    def fp8_products(self) -> torch.Tensor:
        """How many products of fprop, dgrad, wgrad and recomputed fprop ran in FP8: int64 [4], on the CPU."""
        return torch.tensor(astuple(self.fp8_ledger.total()), dtype=torch.int64, device="cpu")

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        was_meta = self.fp8_ledger.device.type == "meta"
        self.fp8_ledger.apply(fn)
        if was_meta and self.fp8_ledger.device.type != "meta":
            self._reset_state(self.fp8_ledger.device)  # `to_empty` leaves random bits
        return self

    def _follow(self, device: torch.device) -> None:
        """Bring what is the layer's own to the device of its weight."""
        if self.fp8_ledger.device == device:
            return
        state = getattr(self, "fp8_scaling", None)
        if self.fp8_ledger.device.type == "meta" or (state is not None and state.device != device):
            self._reset_state(device)  # real weights were assigned into a model prepared on meta
        else:  # a wrapper moved parameters and buffers, and nothing else
            self.fp8_ledger.apply(lambda notes: notes.to(device))


def scales_for_backward(state: torch.Tensor | None) -> torch.Tensor | None:
    """A state, for a backward that reads its scales. In compiled code a copy of what is read, without the history: the
    state itself changes with every forward, and would be taken for a stale tensor."""
    if state is None or not torch.compiler.is_compiling():
        return state
    return state.narrow(1, 0, HISTORY).clone()


def with_noted_amaxes(states: torch.Tensor, ledgers: Sequence[Ledger]) -> torch.Tensor:
    """The states of these layers, int32 [layers, 3, 2 + history length], changed in place: with the amaxes that their
    compiled code noted, which leave the ledgers."""
    of_forward = [ledger.input_weight for ledger in ledgers]
    take = take_amaxes if torch.compiler.is_compiling() else _take_amaxes
    of_backward = take([ledger.grad_output for ledger in ledgers])
    noted = torch.cat([torch.stack(of_forward), of_backward], 1).view(torch.float32)
    torch._foreach_zero_(of_forward)
    newest = states.view(torch.float32).select(2, HISTORY)
    newest.copy_(torch.maximum(newest, noted))  # a NaN is noted only where it is to stay
    return states


def _zeros(n: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32, device=device)


def _keeps_nan(rule: LayerRule) -> bool:
    """Whether a NaN stays in the history, as `record_window_amax` has it."""
    return rule.scaling == "window"


def _larger(a: torch.Tensor, b: torch.Tensor, keep_nan: bool) -> torch.Tensor:
    return torch.maximum(a, b) if keep_nan else torch.fmax(a, b)


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
        noted.copy_(_larger(noted, amax, keep_nan))


@note_backward.register_fake
def _(dgrads_wgrads, dgrad, wgrad, grad_output, amax, keep_nan) -> None:
    pass


def _take_amaxes(grad_outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their amaxes, int32 [layers, 1]; zeros stay behind."""
    noted = [each.data for each in grad_outputs]
    amaxes = torch.stack(noted)
    torch._foreach_zero_(noted)
    return amaxes


take_amaxes = torch.library.custom_op("fp8_backends::take_amaxes", _take_amaxes, mutates_args=())


@take_amaxes.register_fake
def _(grad_outputs) -> torch.Tensor:
    return grad_outputs[0].new_empty(len(grad_outputs), 1)


for _operator in (note_backward, take_amaxes):
    _operator.register_effect(EffectType.ORDERED)
