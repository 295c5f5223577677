"""Counts of a native layer's FP8 products, amaxes noted by its compiled code, and codes shared by
layers.

Eager code counts in Python integers and records amaxes in the scaling state; compiled code does
both in tensors. AOT autograd saves backward's inputs as forward found them: of two backwards after
two forwards the second would undo the first. Backward's notes therefore go through two operators
that change memory without its knowledge. Declared effectful, they are kept without a reader of
their result, run in order, and never run again by recomputation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.library import EffectType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from ...formats.formats import E5M2
from ...formats.scaling import HISTORY, INPUT, WEIGHT
from ...torch_tools.backward_end import inside_backward
from ..counts import FPROP, RECOMPUTED, Modes, ProductCounts
from ..products import engine_for, product_dtype
from .layer_rule import LayerRule
from .weights import kind_of, read

_Amax = torch.Tensor | None


FPROPS = 2
"""The row of counts in `Ledger.of_forward`, below INPUT and WEIGHT."""
COUNTS = 2
"""The counts at the start of `Ledger.of_backward`, before amaxes."""


class Ledger:
    """The counts of one layer with any number of scaling states (from `first` on), and the
    uncollected notes of its compiled code: int32, amaxes as FP32 bits, since wrappers cast
    floating-point tensors."""

    def __init__(self, device: torch.device, states: int = 1, first: int = 0) -> None:
        self.first = first
        self.counts = ProductCounts()
        """Eager code's products."""
        self.of_forward = torch.zeros((3, states), dtype=torch.int32, device=device)
        """Compiled code's largest amaxes of INPUT and WEIGHT, and its fprops; one tensor, hence one
        kernel."""
        self.of_backward = torch.zeros(COUNTS + states, dtype=torch.int32, device=device)
        """Compiled code's dgrads, wgrads, and largest amaxes of GRAD_OUTPUT; one tensor, since a
        rule that takes the amaxes in forward lets CUDA graphs of torch 2.15 copy the last one."""

    @property
    def device(self) -> torch.device:
        return self.of_forward.device

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do as `nn.Module._apply` does with buffers."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, function(value))

    def forward(
        self, rule: LayerRule, fprop: bool, input: _Amax = None, weight: _Amax = None
    ) -> None:
        """Count the product of a forward, if it ran in FP8. Compiled code counts recomputation too,
        and notes these amaxes, FP32 [states] or 0-dimensional; eager code has recorded them."""
        if not torch.compiler.is_compiling():
            if fprop:
                self.counts.add(RECOMPUTED if inside_backward() else FPROP)
            return
        noted, row = self.of_forward, torch.arange(3, device=self.device).unsqueeze(1)
        new = noted + (row == FPROPS) if fprop else noted
        for tensor, amax in ((INPUT, input), (WEIGHT, weight)):
            if amax is not None:
                larger = _larger(
                    noted.view(torch.float32), self._of_all(amax), rule.scales.keeps_nan
                )
                new = torch.where(row == tensor, larger.view(torch.int32), new)
        noted.copy_(new)

    def newest(
        self, rule: LayerRule, state: torch.Tensor | None, tensor: int
    ) -> torch.Tensor | None:
        """Return the place for a cast to record its amax, FP32 bits in int32; None if it records
        none."""
        if state is None or torch.compiler.is_compiling():
            return None
        if tensor == WEIGHT and not rule.scales.records_weight:
            return None
        return state.select(0, tensor).select(0, HISTORY)

    def backward(self, rule: LayerRule, dgrad: bool, wgrad: bool, amax: _Amax = None) -> None:
        """Count a backward's products in FP8. Compiled code also notes GRAD_OUTPUT's amax, FP32
        [states] or 0-dim."""
        if torch.compiler.is_compiling():
            amax = None if amax is None else self._of_all(amax)
            note_backward(self.of_backward, dgrad, wgrad, amax, rule.scales.keeps_nan)
            return
        self.counts.dgrad += dgrad
        self.counts.wgrad += wgrad

    def _of_all(self, amax: torch.Tensor) -> torch.Tensor:
        """Pad the amaxes with zeros for other ranks' states."""
        missing = self.of_forward.shape[1] - amax.numel()
        return F.pad(amax, (self.first, missing - self.first)) if missing else amax

    def total(self) -> ProductCounts:
        """Return all products so far, of eager and compiled code. Waits for the device."""
        total = replace(self.counts)
        if self.device.type != "meta":
            fprop, dgrad, wgrad = torch.cat(
                [self.of_forward[FPROPS, :1], self.of_backward[:COUNTS]]
            ).tolist()
            total.fprop, total.dgrad, total.wgrad = (
                total.fprop + fprop,
                total.dgrad + dgrad,
                total.wgrad + wgrad,
            )
        return total


class SharedCodes(Modes):
    """Codes for several layers (of an activation) or microbatches (of a weight) of a prepared
    model."""

    def __init__(self, keeps_weights: bool = False) -> None:
        super().__init__()
        self.keeps_weights = keeps_weights
        """True to keep codes of weights from one forward to the next."""
        self.forward_records = True
        """False in a training forward of the whole model without gradients."""
        self._inputs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._weights: WeakKeyDictionary[nn.Module, tuple] = WeakKeyDictionary()
        """Layers with a gradient at the last optimizer step, and codes of their weights since.
        Nothing else changes these weights; code that averages others (a momentum teacher) often
        writes through `.data`, unseen."""

    def of_input(self, x: torch.Tensor, key: tuple, quantize: Callable) -> Any:
        """Return quantize(), or an earlier layer's result for this very tensor and key, held for
        the tensor's lifetime. Only for results of autograd: a leaf, such as a batch in a numpy
        array, can change without a trace."""
        if torch.compiler.is_compiling() or x.grad_fn is None:
            return quantize()  # a compiler finds equal casts itself
        version, codes = self._inputs.get(x, (None, None))
        if version != x._version:
            codes = {}
            self._inputs[x] = (x._version, codes)
        found = codes.get(key)
        if found is None:
            found = codes[key] = quantize()
        return found

    def keep_weights(self, keep: bool) -> None:
        self.keeps_weights = keep
        self.forget_weights()

    def forget_weights(self, trained: Iterable[nn.Module] = ()) -> None:
        """Drop the codes of all weights, after a change of any kind. Keep later codes of these
        layers."""
        self._weights.clear()
        if self.keeps_weights:
            self._weights.update(dict.fromkeys(trained, (None, None, None)))

    def of_weight(self, layer: nn.Module, quantize: Callable) -> Any:
        """Return quantize(), or an earlier forward's result for this layer, its very weight and
        rule. Misses changes through `weight.data`, which autograd does not count. Keeps codes only
        in training, of trained weights, and only of whole ones: codes of gathered weights would
        need the memory saved by sharding."""
        if not self.keeps_weights or torch.compiler.is_compiling():
            return quantize()
        if not (layer.training and layer in self._weights and _is_whole(layer.weight)):
            return quantize()
        memory = tuple(  # and its version. The weak reference keeps its address from reuse
            (
                StorageWeakRef(t.untyped_storage()),
                t.storage_offset(),
                t.shape,
                t.stride(),
                t.dtype,
                t._version,
            )
            for t in read(layer.weight)
            if t is not None
        )
        known_memory, known_rule, codes = self._weights[layer]
        if known_memory != memory or known_rule != layer.fp8_rule:
            codes = quantize()
            # a later forward in training could not save such codes
            if not torch.is_inference_mode_enabled():
                self._weights[layer] = (memory, layer.fp8_rule, codes)
        return codes

    def held(self, layer: nn.Module) -> Any:
        """Return the kept codes of this layer's weight, or None."""
        return self._weights.get(layer, (None, None, None))[2]

    def __reduce__(self):  # copies hold no codes
        return SharedCodes, (self.keeps_weights,)


def _is_whole(weight: torch.Tensor) -> bool:
    """Return True for a layer's own Parameter in real memory that nobody swaps (DeepSpeed's ZeRO-3
    does)."""
    if kind_of(weight).is_decoded:
        return False
    data = read(weight).data
    plain = type(data) is torch.Tensor and data.device.type != "meta"
    return (
        plain
        and isinstance(weight, nn.Parameter)
        and weight.is_leaf
        and not hasattr(weight, "ds_id")
    )


class KeepsLedger(nn.Module):
    """A layer with a ledger, `fp8_ledger`, and the state of its scaling rule, both created by
    `_reset_state`.

    Neither is a buffer: `AveragedModel` and other averages pair a model's buffers with a copy's
    from before `prepare`.
    """

    fp8_scaling: torch.Tensor | None = None
    """int32 [3, 2 + history length], of each matrix for a 3-D weight; None for a rule without
    state."""
    fp8_recomputed = False
    """True if backward may run the last forward again."""

    def gathered_codes(self) -> Any:
        """Make the layer's entry in `Compute.travelling`."""
        raise NotImplementedError

    def set_rule(self, rule: LayerRule, shared: SharedCodes, history_len: int) -> None:
        """Attach a scaling rule with fresh state."""
        self.fp8_rule, self.fp8_shared, self.fp8_history_len = rule, shared, history_len
        self.fp8_out_dtype = torch.bfloat16
        self._reset_state(self.weight.device)

    @property
    def fp8_products(self) -> torch.Tensor:
        """The numbers of fprops, dgrads, wgrads and recomputed fprops in FP8: int64 [4], on the
        CPU."""
        return torch.tensor(astuple(self.fp8_ledger.total()), dtype=torch.int64, device="cpu")

    @property
    def fp8_engine(self) -> str:
        """The engine for the dtype of the layer's last FP8 result (bf16 before any)."""
        rule = self.fp8_rule
        dtype = product_dtype(rule.scales.blocks, self.fp8_out_dtype)
        scaling = rule.scaling if rule.scales.cuts_contraction else "dynamic"
        has_e5m2 = E5M2 in (rule.gradient_format, rule.wgrad_format)
        return engine_for(self.weight.device, dtype, scaling, has_e5m2)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.fp8_ledger.device.type == "meta":
            self._follow(fn(self.fp8_ledger.of_forward).device)  # `to_empty` leaves random bits
        else:
            self._apply_to_notes(fn)
        return self

    def _records(self, training: bool) -> bool:
        """Return True if a forward in this mode records amaxes. Delayed scales have no other source:
        a frozen part run without gradients inside a training forward records, too."""
        by_root = self.fp8_rule.scales.moves_in_forward and self.fp8_shared.forward_records
        return training and (torch.is_grad_enabled() or by_root)

    def _apply_to_notes(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.fp8_ledger.apply(function)
        self.fp8_scaling = None if self.fp8_scaling is None else function(self.fp8_scaling)

    def _follow(self, device: torch.device) -> None:
        """Move ledger and state to the weight's device: a wrapper may have moved only the
        parameters, or assigned real weights to a model prepared on meta. Offloaded weights are on
        meta between forwards."""
        state = self.fp8_ledger.of_forward if self.fp8_scaling is None else self.fp8_scaling
        if device.type == "meta" or state.device == device:
            return
        if state.is_meta:
            self._reset_state(device)
        else:
            self._apply_to_notes(lambda notes: notes.to(device))


def with_noted_amaxes(states: torch.Tensor, ledgers: Sequence[Ledger]) -> torch.Tensor:
    """Move amaxes noted by compiled code to the stacked states, int32 [states, 3, 2 + history
    length], in place."""
    of_forward = [ledger.of_forward.narrow(0, 0, FPROPS) for ledger in ledgers]
    take = take_amaxes if torch.compiler.is_compiling() else _take_amaxes
    of_backward = take([ledger.of_backward for ledger in ledgers])
    noted = torch.cat([torch.cat(of_forward, 1), of_backward.unsqueeze(0)]).t().view(torch.float32)
    torch._foreach_zero_(of_forward)
    newest = states.view(torch.float32).select(2, HISTORY)
    newest.copy_(torch.maximum(newest, noted))  # a NaN is noted only for a rule that keeps it
    return states


def _larger(
    a: torch.Tensor, b: torch.Tensor, keep_nan: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.maximum(a, b, out=out) if keep_nan else torch.fmax(a, b, out=out)


# `.data`: the version counter, by which autograd finds stale saved tensors, ignores such a change


@torch.library.custom_op("fp8_backends::note_backward", mutates_args=())
def note_backward(
    of_backward: torch.Tensor,
    dgrad: bool,
    wgrad: bool,
    amax: torch.Tensor | None,
    keep_nan: bool,
) -> None:
    """Add to the counts, and keep the larger amax."""
    notes = of_backward.data
    notes.narrow(0, int(not dgrad), dgrad + wgrad).add_(1)
    if amax is not None:
        noted = notes[COUNTS:].view(torch.float32)
        _larger(noted, amax, keep_nan, out=noted)


@note_backward.register_fake
def _(of_backward, dgrad, wgrad, amax, keep_nan) -> None:
    pass


def _take_amaxes(of_backward: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the amaxes, int32 [states], and leave zeros."""
    noted = [notes.data[COUNTS:] for notes in of_backward]
    taken = torch.cat(noted)
    torch._foreach_zero_(noted)
    return taken


take_amaxes = torch.library.custom_op("fp8_backends::take_amaxes", _take_amaxes, mutates_args=())


@take_amaxes.register_fake
def _(of_backward) -> torch.Tensor:
    return of_backward[0].new_empty(sum(len(notes) - COUNTS for notes in of_backward))


for _operator in (note_backward, take_amaxes):
    _operator.register_effect(EffectType.ORDERED)
