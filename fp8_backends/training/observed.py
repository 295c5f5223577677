"""What the first optimizer step showed of a prepared model, for the proof and for later audits.

`WorkMeter` reads from the shapes that pass its modules how often a model multiplies by each of its weights. Before any
forward, FLOPs can be counted per token only, as if every token passed every weight: encoder and decoder see sequences
of different lengths, a head may read one token of many, a shared layer runs several times, and nobody knows the output
of a convolution before it ran. So the share of FP8 that a proof states is counted over what a step did.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..numerics.engine import inside_backward
from ..numerics.modules import TemporaryHook, is_traced, plain_name
from .weight_products import CONVOLUTION, Found, find_weight_products


class Observed:
    """The record of one prepared model."""

    def __init__(self) -> None:
        self.proven = False
        self.gradient_dtypes: dict[str, torch.dtype] = {}
        self.work: dict[str, Work] = {}
        """How much the first step multiplied by each weight; nothing of what was compiled."""
        self.left_out: set[str] | None = None
        """Trainable parameters that no optimizer holds, as the user knows; None until an optimizer is prepared."""
        self.idle: set[str] = set()
        """Weights that took no part in it, by the names of their modules and by their own: they train and got no
        gradient, or PEFT trains a copy in their place (`modules_to_save`)."""
        self.meter: WorkMeter | None = None
        """What measures that, from the first training forward on."""
        self.first_steps: list[Any] = []
        """What watches this model for its proof (`proof.FirstStep`)."""
        self.wrapper: weakref.ref[nn.Module] | None = None
        """The `DistributedDataParallel` in which it trains, of which Accelerate tells nobody."""
        self._optimizers: list[weakref.ref] = []

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those still alive that train this model."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    def measure(self, root: nn.Module) -> None:
        """Measure the forward of the model that begins now, if it is one of training before the proof."""
        trains = torch.is_grad_enabled()
        if self.meter is None and trains and not self.proven and not inside_backward():
            self.meter = WorkMeter(root, find_weight_products(root))
        if self.meter is not None:
            self.meter.paused = not trains

    def prove(self, root: nn.Module) -> None:
        """End what was measured for the proof."""
        self.proven = True
        if self.meter is not None:
            self.meter.detach()
            self.work, self.meter = self.meter.work, None
        trains = trainable_by_name(root)
        got_gradients = _under_module(dict.fromkeys(self.gradient_dtypes, True))
        if got_gradients:  # else an engine keeps them to itself
            self.idle = {
                name
                for name in trains.keys() - self.work.keys() - got_gradients.keys()
                if trains[name] or "original_module" in name.split(".")
            }

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the model is not what these optimizers train, and weak references do not pickle
        none_yet = {"_optimizers": [], "first_steps": [], "meter": None, "proven": False, "left_out": None}
        return {**self.__dict__, **none_yet, "wrapper": None}


def trainable_by_name(root: nn.Module) -> dict[str, bool]:
    """Whether a weight trains, under the name of its module and under its own."""
    named = root.named_parameters(remove_duplicate=False)
    return _under_module({plain_name(name): parameter.requires_grad for name, parameter in named})


def _under_module(by_name: dict[str, bool]) -> dict[str, bool]:
    """What is known of Parameters by their names, under the names of the modules too whose `weight` they are."""
    weights = {name: value for name, value in by_name.items() if name.split(".")[-1] == "weight"}
    return by_name | {name.removesuffix("weight").removesuffix("."): value for name, value in weights.items()}


@dataclass
class Work:
    """What one weight was multiplied by since the meter was attached."""

    rows: float = 0.0
    """Rows of the input, such as tokens; of a convolution the positions that each kernel is laid on."""
    flops: float = 0.0
    """FLOPs of its forward products; those of either gradient are as many. Recomputation does not count."""
    backward: bool = False
    """Whether a gradient of its output arrived, so that gradients of the weight and the input are needed."""
    input_gradient: bool = False
    """Whether backward needs the gradient of an input too."""

    def note_backward(self, _gradient: torch.Tensor) -> None:
        """Hook of the output."""
        self.backward = True


class WorkMeter(TemporaryHook):
    """Forward hooks on the modules of a model that write `work`, by the names of the weight products.

    A module that compiled code runs, whose weight had no size yet, or whose forward is never called because another
    module multiplies by its weight, has no entry. In a copied or unpickled model the hooks do nothing.
    """

    def __init__(self, model: nn.Module, found: Iterable[Found]) -> None:
        self.work: dict[str, Work] = {}
        self.paused = False
        """Whether the forwards that run now are none of training, and do not count."""
        compiled = {part for module in model.modules() if _is_compiled(module) for part in module.modules()}
        self._products: dict[nn.Module, list[Found]] = defaultdict(list)
        for each in found:
            if each.module not in compiled and each.product.flops:
                self._products[each.module].append(each)
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self, with_kwargs=True) for module in self._products
        ]

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self, module: nn.Module, args, kwargs, output) -> None:
        if is_traced() or torch.jit.is_tracing():  # sizes are no numbers there
            return
        recomputes = inside_backward()
        if self.paused and not recomputes:
            return
        inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(output))
        if not outputs:
            return
        inputs = inputs or outputs[:1]  # TransformerEngine's layer that norms its own input gets no tensor
        differentiable = [tensor for tensor in outputs if tensor.requires_grad]
        needs_gradient = bool(differentiable) and any(tensor.requires_grad for tensor in inputs)
        for each in self._products[module]:
            work = self.work.setdefault(each.product.name, Work())
            # the gradient of hidden states that the module has made itself is needed in any case
            reads_hidden_states = isinstance(module, nn.RNNBase) and not each.part.startswith("weight_ih_l0")
            work.input_gradient |= needs_gradient or reads_hidden_states
            for tensor in differentiable:
                # deferred logits have a way of their own: a loss may need no gradient of them
                getattr(tensor, "when_backward", tensor.register_hook)(work.note_backward)
            if not recomputes:
                rows = _rows(each, inputs, outputs[0])
                work.rows += rows
                work.flops += rows * _flops_of_a_row(each)


def _rows(each: Found, inputs: list[torch.Tensor], output: torch.Tensor) -> float:
    """How many rows this call multiplied the weight by."""
    module, kind = each.module, each.product.kind
    if kind == CONVOLUTION:
        return inputs[0].numel() / module.in_channels if module.transposed else output.numel() / module.out_channels
    rows = [tensor.numel() / max(tensor.size(-1), 1) for tensor in inputs]  # a nested tensor has no `shape`
    if isinstance(module, nn.MultiheadAttention):
        own = _ATTENTION_INPUTS.get(each.part)
        return sum(rows[:3]) / 3 if own is None else rows[own]  # one weight for all three: a third each
    return rows[0]


_ATTENTION_INPUTS = {"q_proj_weight": 0, "k_proj_weight": 1, "v_proj_weight": 2}
"""Which input of an attention module its weight is multiplied by, where query, key and value have one each."""


def _flops_of_a_row(each: Found) -> float:
    product = each.product
    # a 3-D Parameter is passed by every token, and multiplied for the experts that it visits; an expert of a list is
    # called with its own tokens
    return product.flops if each.part else 2 * product.in_features * product.out_features


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in what a module takes or gives, however deep in tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.dim():
            yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _is_compiled(module: nn.Module) -> bool:
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or "_orig_mod" in module._modules
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )
