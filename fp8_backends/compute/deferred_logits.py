"""Logits that are not multiplied before someone reads them, so that a cross-entropy can do without them.

An output head that defers (`DefersLogits`) gives a `DeferredLogits` in training: a tensor with the shape, the dtype
and the place in autograd's graph of the logits, and without their memory. Casts, views of whole rows and functions of
single elements, such as a softcap, are noted. `F.cross_entropy` of it is `HeadLoss`: chunks of tokens, no logits.
Whatever else reads the tensor gets the logits, multiplied then, once, by the layer's usual forward, with gradients as
ever. So nothing has to be known of a model or a loop: transformers' loss, `nn.CrossEntropyLoss` and a metric all find
what they expect.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from ..errors import FP8BackendError
from ..numerics.engine import inside_backward
from ..numerics.kernels.triton_gate import PLAIN
from ..numerics.scaled_tensor import stored_parts
from ..numerics.sharded_tensor import is_distributed
from .counts import DGRAD, FPROP, RECOMPUTED, WGRAD
from .head_loss import CrossEntropy, HeadLoss, HeadProducts
from .interface import COMPUTE_DTYPES

aten = torch.ops.aten

_OF_ROWS = (aten.view.default, aten._unsafe_view.default, aten.slice.Tensor)
_OF_ELEMENTS = (aten._to_copy.default, aten.div.Tensor, aten.mul.Tensor, aten.tanh.default)
_COPIES = (aten.detach.default, aten.alias.default, aten.clone.default)
_READS_MEMORY = tuple(
    getattr(torch.Tensor, name)
    for name in (
        *("__repr__", "__format__", "__reduce_ex__", "__deepcopy__", "__array__", "__dlpack__", "numpy", "tolist"),
        *("item", "data_ptr", "untyped_storage", "storage", "share_memory_"),
    )
)
_WAITS_FOR_GRADIENT = (torch.Tensor.register_hook, torch.Tensor.retain_grad)


class DefersLogits(nn.Module):
    """Mixed into the class of an output head, a Linear: its logits are deferred where a loss may come after them."""

    weight_types: tuple[type, ...] = ()
    """Classes of weights that its products read beside plain ones."""
    fp8_is_ordinary: bool
    """Whether it runs as an ordinary layer after all, as where its weight is sharded."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.fp8_is_ordinary = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = input.device.type
        out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        if torch.compiler.is_compiling() or not self._may_defer(input, out_dtype):
            return super().forward(input)
        return _Defer.apply(input, self.weight, self.bias, Pending(self, input, out_dtype))

    def _may_defer(self, x: torch.Tensor, out_dtype: torch.dtype) -> bool:
        """Whether a loss in training may follow, of a weight that will lie where it lies now."""
        weight = self.weight
        in_training = self.training and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        stays = isinstance(weight, nn.Parameter) and weight.is_leaf and not hasattr(weight, "ds_id")
        is_known = type(x) in PLAIN and type(weight) in (*PLAIN, *self.weight_types) and not is_distributed(weight)
        fits = x.numel() > 0 and x.dim() > 1 and x.shape[-1] == self.in_features and x.device == weight.device
        return (
            in_training
            and stays
            and is_known
            and fits
            and out_dtype in COMPUTE_DTYPES
            and not self.fp8_is_ordinary
            and not torch.jit.is_tracing()
            and not torch._C._are_functorch_transforms_active()
        )

    def ordinary_forward(self, input: torch.Tensor) -> torch.Tensor:
        """The logits, multiplied now."""
        return super().forward(input)

    def head_products(self, out_dtype: torch.dtype) -> HeadProducts:
        """What makes the products of the chunks, as the layer's forward makes its own."""
        return HeadProducts(self.weight, self.bias, out_dtype)

    def count_products(self, *kinds: str) -> None:
        """Note that these products of all chunks are made: FPROP, DGRAD, WGRAD, or RECOMPUTED. Where they run in high
        precision there is nothing to count."""


class HighPrecisionHead(DefersLogits, nn.Linear):
    """An output head that stays in high precision and defers its logits."""

    def _may_defer(self, x: torch.Tensor, out_dtype: torch.dtype) -> bool:
        # else `F.linear` refuses the two dtypes
        has_one_dtype = x.dtype == self.weight.dtype or torch.is_autocast_enabled(x.device.type)
        return has_one_dtype and super()._may_defer(x, out_dtype)


class Pending:
    """One forward of a head whose logits nobody has read so far."""

    def __init__(self, head: DefersLogits, x: torch.Tensor, out_dtype: torch.dtype) -> None:
        self.head, self.x, self.out_dtype = head, x, out_dtype
        self.weight, self.bias = head.weight, head.bias
        self.autocast = torch.is_autocast_enabled(x.device.type)
        self.versions = self._versions()
        self.may_fuse = True
        """Whether no one waits for the gradient of the logits themselves."""
        self.output: torch.Tensor | None = None
        """The logits with the graph of the ordinary forward, once they were read."""
        self.leaf: torch.Tensor | None = None
        self.members: list[weakref.ref[DeferredLogits]] = []
        self.backward_hooks: list[Callable] = []

    def _versions(self) -> tuple:
        read = (self.x, *stored_parts(self.weight), *([] if self.bias is None else [self.bias]))
        return tuple(tensor._version for tensor in read)

    def logits(self) -> torch.Tensor:
        """The logits without a graph, multiplied at the first call.

        Raises:
            FP8BackendError: hidden states or weight are others by now, such as after an optimizer step.
        """
        if self.output is None:
            if self._versions() != self.versions or self.head.weight is not self.weight:
                raise FP8BackendError(
                    "fused_head=True: the loss was made without logits, and they cannot be made any more, since the "
                    "head's weight or its input has changed. Read logits before optimizer.step(), or leave fused_head "
                    "out"
                )
            context = torch.autocast(self.x.device.type, self.out_dtype, self.autocast)
            with torch.enable_grad(), context:
                self.leaf = self.x.detach().requires_grad_(self.x.requires_grad)
                self.output = self.head.ordinary_forward(self.leaf)
        return self.output.detach()

    def materialise(self) -> None:
        """Let all tensors that are still deferred have their values, and none be a fused loss's."""
        self.may_fuse = False
        for member in self.members:
            if (tensor := member()) is not None:
                tensor.values()

    def note_backward(self, of_input: bool, of_weight: bool) -> None:
        """The gradients of a fused loss were handed out."""
        self.head.count_products(*[DGRAD] * of_input, *[WGRAD] * of_weight)
        for hook in self.backward_hooks:
            hook(None)


class _Defer(torch.autograd.Function):
    """The place of deferred logits in autograd's graph: gradients of logits go through the ordinary forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, pending):
        ctx.pending = pending
        shape = (*x.shape[:-1], weight.shape[0])
        return DeferredLogits(pending, (), torch.empty(shape, dtype=pending.out_dtype, device="meta"))

    @staticmethod
    def backward(ctx, dlogits):
        pending = ctx.pending
        for hook in pending.backward_hooks:
            hook(dlogits)
        pending.logits()
        inputs = [pending.leaf, pending.weight, pending.bias]
        wanted = [each for each, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        found = iter(torch.autograd.grad(pending.output, wanted, dlogits, retain_graph=retain))
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None


class DeferredLogits(torch.Tensor):
    """Logits without memory: those of a `Pending`, after steps that are noted."""

    @staticmethod
    def __new__(cls, pending: Pending, steps: tuple, like: torch.Tensor) -> DeferredLogits:
        """`like`: a meta tensor of the shape, strides and dtype."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=pending.x.device
        )
        made.pending, made.steps = pending, steps
        pending.members.append(weakref.ref(made))
        return made

    def __init__(self, *_) -> None:
        pass

    def values(self) -> torch.Tensor:
        """The plain tensor that this one stands for, without a graph."""
        if "known_values" not in self.__dict__:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                steps = (functools.partial(_applied, step) for step in self.steps)
                self.known_values = functools.reduce(lambda tensor, step: step(tensor), steps, self.pending.logits())
        return self.known_values

    def when_backward(self, hook: Callable[[Any], None]) -> None:
        """Call `hook(gradient)` when a gradient reaches the logits, and with None where their loss makes do without."""
        self.pending.backward_hooks.append(hook)

    @classmethod
    @torch.compiler.disable  # Dynamo would trace into it, and make no tensor without memory
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.cross_entropy and (loss := _fused_cross_entropy(*args, **kwargs)) is not None:
            return loss
        if func in _WAITS_FOR_GRADIENT:
            args[0].pending.may_fuse = False
        if func in _READS_MEMORY:
            args = (_readable(args[0]), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (deferred := _deferred(func, args, kwargs)) is not None:
            return deferred
        changes = func._schema.is_mutable
        with torch.overrides.enable_reentrant_dispatch():  # the ordinary forward makes a graph of its own
            plain_args, plain_kwargs = tree_map_only(DeferredLogits, DeferredLogits.values, (args, kwargs))
            if changes:
                for tensor in (each for each in (*args, *kwargs.values()) if isinstance(each, DeferredLogits)):
                    tensor.pending.materialise()
        result = func(*plain_args, **plain_kwargs)
        return args[0] if changes and result is plain_args[0] else result


def _applied(step: tuple, tensor: torch.Tensor) -> torch.Tensor:
    func, args, kwargs = step
    return func(tensor, *args, **kwargs)


def _deferred(func, args: tuple, kwargs: dict) -> DeferredLogits | None:
    """The result of an operation that can wait, or None."""
    source = args[0] if args else None
    if not isinstance(source, DeferredLogits) or "known_values" in source.__dict__:
        return None
    if func not in (*_OF_ROWS, *_OF_ELEMENTS, *_COPIES) or any(isinstance(each, torch.Tensor) for each in args[1:]):
        return None
    if func is aten._to_copy.default and not kwargs.keys() <= {"dtype"}:
        return None
    if func is aten.slice.Tensor and args[1:2] and args[1] in (-1, source.dim() - 1):  # of words, if of all
        return None
    step = func, args[1:], kwargs
    like = _applied(step, torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"))
    if like.shape[-1:] != source.shape[-1:] or not like.is_floating_point():
        return None
    return DeferredLogits(source.pending, (*source.steps, step), like)


def _readable(tensor: DeferredLogits) -> torch.Tensor:
    """Its values for what reads memory and knows no graph. A tensor that needs one is refused there as ever."""
    values = tensor.values()
    return values.view_as(values).requires_grad_() if tensor.requires_grad else values


def _fused_cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
) -> torch.Tensor | None:
    """`F.cross_entropy` without logits; None where it takes what chunks of rows cannot give."""
    is_plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if not is_plain or not isinstance(input, DeferredLogits) or not torch.is_grad_enabled():
        return None
    with torch._C.DisableTorchFunctionSubclass():
        is_indexed = target.dtype == torch.int64 and input.dim() == 2 and target.shape == input.shape[:1]
        pending, dtype = input.pending, input.dtype
        if not is_indexed or not input.requires_grad or target.device != input.device:
            return None
        if not pending.may_fuse or pending.output is not None or any(step[0] in _COPIES[:2] for step in input.steps):
            return None
        if input.numel() == 0 or pending.head._backward_hooks or pending.head._backward_pre_hooks:
            return None
        if pending._versions() != pending.versions or pending.head.weight is not pending.weight:
            return None  # reading the logits says so
        rows, elementwise = _replayed(pending.x, input.steps)
        result_dtype = torch.float32 if torch.is_autocast_enabled(input.device.type) else dtype
    options = CrossEntropy(ignore_index, reduction == "mean", float(label_smoothing))
    products = pending.head.head_products(pending.out_dtype)
    loss = HeadLoss.apply(
        rows, pending.weight, pending.bias, target, products, elementwise, options, pending.note_backward
    )
    pending.head.count_products(RECOMPUTED if inside_backward() else FPROP)
    return loss.to(result_dtype)


def _replayed(x: torch.Tensor, steps: tuple) -> tuple[torch.Tensor, Callable | None]:
    """The hidden states of the rows that steps over logits have left, and what steps did to single elements."""
    elementwise = []
    for func, args, kwargs in steps:
        if func is aten.slice.Tensor:
            x = func(x, *args, **kwargs)
        elif func in _OF_ROWS:
            x = x.reshape(*args[0][:-1], x.shape[-1])
        elif func in _OF_ELEMENTS:
            elementwise.append((func, args, kwargs))
    if all(func is aten._to_copy.default and kwargs["dtype"] == torch.float32 for func, _, kwargs in elementwise):
        return x, None
    return x, lambda tensor: functools.reduce(lambda values, step: _applied(step, values), elementwise, tensor)
