"""Observe a prepared model's first optimizer step, for the proof and later audits: shares of FP8
need real forwards."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..torch_tools.backward_end import inside_backward
from ..torch_tools.modules import TemporaryHook, is_traced, plain_name
from .weight_products import CONVOLUTION, Found, find_weight_products


class Observed:
    def __init__(self) -> None:
        self.proven = False
        self.gradient_dtypes: dict[str, torch.dtype] = {}
        self.work: dict[str, Work] = {}
        """Work of each weight in the first step; compiled code is missing."""
        self.proof: Any = None
        """The first step's `proof.Proof`; None before."""
        self.left_out: set[str] | None = None
        """Trainable parameters without an optimizer, as the user knows; None until an optimizer is
        prepared."""
        self.idle: set[str] = set()
        """Parameters without a gradient in the first step, also those that PEFT trains a copy
        of."""
        self.meter: WorkMeter | None = None
        self.first_steps: list[Any] = []
        """Unfinished proofs (`proof.FirstStep`) of this model."""
        self.wrapper: weakref.ref[nn.Module] | None = None
        self._optimizers: list[weakref.ref] = []

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            optimizer for reference in self._optimizers if (optimizer := reference()) is not None
        ]

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    def measure(self, root: nn.Module) -> None:
        """Measure the forward that begins now, if it trains before the proof."""
        trains = torch.is_grad_enabled()
        if self.meter is None and trains and not self.proven and not inside_backward():
            self.meter = WorkMeter(root, find_weight_products(root))
        if self.meter is not None:
            self.meter.paused = not trains

    def prove(self, root: nn.Module) -> None:
        self.proven = True
        if self.meter is not None:
            self.meter.detach()
            self.work = self.meter.work
            self.meter = None
        if self.gradient_dtypes:  # else an engine hides them
            named = (
                (plain_name(name), p) for name, p in root.named_parameters(remove_duplicate=False)
            )
            trained = {
                name for name, p in named if p.requires_grad or "original_module" in name.split(".")
            }
            self.idle = trained - self.gradient_dtypes.keys()

    def __getstate__(self) -> dict[str, Any]:
        # these optimizers do not train a copy of the model, and weak references do not pickle
        none_yet = {
            "_optimizers": [],
            "first_steps": [],
            "meter": None,
            "proven": False,
            "left_out": None,
            "wrapper": None,
        }
        return {**self.__dict__, **none_yet}


@dataclass
class Work:
    """Products with one weight since the meter was attached."""

    rows: float = 0.0
    """Rows of the input, such as tokens; positions of the kernel of a convolution."""
    flops: float = 0.0
    """FLOPs of its forward products; each gradient takes the same number. Recomputation does not
    count."""
    backward: bool = False
    """True if a gradient of its output arrived: gradients of the weight and the input are
    needed."""
    input_gradient: bool = False
    """True if backward needs the gradient of an input."""

    def note_backward(self, _gradient: torch.Tensor) -> None:
        self.backward = True


class WorkMeter(TemporaryHook):
    """Write `work`, by the names of the weight products, in forward hooks on the modules of a
    model.

    Modules in compiled code, weights without a size and modules without a forward call have no
    entry.
    """

    def __init__(self, model: nn.Module, weights: Iterable[Found]) -> None:
        self.work: dict[str, Work] = {}
        self.paused = False
        """True while forwards run without gradients; they do not count."""
        compiled = {
            part
            for module in model.modules()
            if module._compiled_call_impl is not None
            or "_orig_mod" in module._modules
            or hasattr(module.forward, "_torchdynamo_orig_callable")
            for part in module.modules()
        }
        self._products: dict[nn.Module, list[Found]] = defaultdict(list)
        for weight in weights:
            if weight.module not in compiled and weight.product.flops:
                self._products[weight.module].append(weight)
        self._handles = [
            module.register_forward_hook(self, with_kwargs=True) for module in self._products
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self, module: nn.Module, args, kwargs, output) -> None:
        if is_traced() or torch.jit.is_tracing():  # sizes are no numbers there
            return
        recomputes = inside_backward()
        if self.paused and not recomputes:
            return
        inputs = list(_tensors((args, kwargs)))
        outputs = list(_tensors(output))
        if not outputs:
            return
        inputs = inputs or outputs[:1]  # TransformerEngine's layer with its own norm gets no tensor
        differentiable = [tensor for tensor in outputs if tensor.requires_grad]
        needs_gradient = bool(differentiable) and any(tensor.requires_grad for tensor in inputs)
        for weight in self._products[module]:
            work = self.work.setdefault(weight.product.name, Work())
            # the module's own hidden states always need a gradient
            reads_hidden_states = isinstance(module, nn.RNNBase) and not weight.part.startswith(
                "weight_ih_l0"
            )
            work.input_gradient |= needs_gradient or reads_hidden_states
            for tensor in differentiable:
                # a tensor may have its own hook, if a loss may need no gradient of it
                getattr(tensor, "when_backward", tensor.register_hook)(work.note_backward)
            if not recomputes:
                rows = _rows(weight, inputs, outputs[0])
                work.rows += rows
                product = weight.product
                # every token passes a 3-D Parameter, and its FLOPs count the visited experts; an
                # expert of a list is called with its own tokens
                work.flops += rows * (
                    product.flops if weight.part else 2 * product.in_features * product.out_features
                )


_ATTENTION_INPUTS = {"q_proj_weight": 0, "k_proj_weight": 1, "v_proj_weight": 2}
"""Positions of an attention module's inputs by their weight, if query, key and value have one
each."""


def _rows(weight: Found, inputs: list[torch.Tensor], output: torch.Tensor) -> float:
    module = weight.module
    kind = weight.product.kind
    if kind == CONVOLUTION:
        if module.transposed:
            return inputs[0].numel() / module.in_channels
        return output.numel() / module.out_channels
    # a nested tensor has no `shape`
    rows = [tensor.numel() / max(tensor.size(-1), 1) for tensor in inputs]
    if isinstance(module, nn.MultiheadAttention):
        position = _ATTENTION_INPUTS.get(weight.part)
        # one weight for all three: a third each
        return sum(rows[:3]) / 3 if position is None else rows[position]
    return rows[0]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.dim():
            yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
