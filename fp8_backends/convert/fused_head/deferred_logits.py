"""Defer the logits of an output head until somebody reads them, so that a cross-entropy can run
without them.

A deferring head returns a `DeferredLogits`: shape, dtype and graph of the logits, no memory.
`F.cross_entropy` of it is `HeadLoss`, chunk by chunk of tokens; any other reader gets the logits
from the usual forward. The loss keeps for backward the gradient of the hidden states, and of the
weight, summed in FP32. They are gradients of the sum over the tokens, within the range of FP8 and
fp16; backward multiplies the mean's factor and its incoming gradient in FP32.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from ...compute.counts import DGRAD, FPROP, RECOMPUTED, WGRAD, result_dtype
from ...compute.interface import COMPUTE_DTYPES
from ...compute.products import plain_product
from ...compute.refusals import refuse_second_derivative
from ...errors import FP8BackendError
from ...kernels.backward import cross_entropy
from ...kernels.triton_gate import PLAIN_TYPES
from ...tensors.scaled_tensor import stored_parts
from ...tensors.sharded_tensor import is_distributed
from ...torch_tools.backward_end import inside_backward

aten = torch.ops.aten

_OF_ROWS = (aten.view.default, aten._unsafe_view.default, aten.slice.Tensor)
_OF_ELEMENTS = (aten._to_copy.default, aten.div.Tensor, aten.mul.Tensor, aten.tanh.default)
_COPIES = (aten.detach.default, aten.alias.default, aten.clone.default)
_READS_MEMORY = tuple(
    getattr(torch.Tensor, name)
    for name in (
        *(
            "__repr__",
            "__format__",
            "__reduce_ex__",
            "__deepcopy__",
            "__array__",
            "__dlpack__",
            "numpy",
            "tolist",
        ),
        *("item", "data_ptr", "untyped_storage", "storage", "share_memory_"),
    )
)
_WAITS_FOR_GRADIENT = (torch.Tensor.register_hook, torch.Tensor.retain_grad)

ROWS_AT_ONCE = 128
"""Chunks are multiples of this, the longest block with one scale along the tokens
(`scaling.VECTORS`)."""


class DefersLogits(nn.Module):
    """Mixed into an output head, a Linear: it defers its logits if a loss may follow."""

    weight_types: tuple[type, ...] = ()
    """Weight classes for its products besides plain ones."""
    fp8_is_ordinary: bool
    """True to run as an ordinary layer, for example with a sharded weight."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.fp8_is_ordinary = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out_dtype = result_dtype(input)
        if torch.compiler.is_compiling() or not self._may_defer(input, out_dtype):
            return super().forward(input)
        return _Defer.apply(input, self.weight, self.bias, Pending(self, input, out_dtype))

    def _may_defer(self, x: torch.Tensor, out_dtype: torch.dtype) -> bool:
        """Return True if a loss in training may follow, and the weight keeps its memory until
        then."""
        weight = self.weight
        in_training = (
            self.training and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        )
        stays = isinstance(weight, nn.Parameter) and weight.is_leaf and not hasattr(weight, "ds_id")
        is_known = (
            type(x) in PLAIN_TYPES
            and type(weight) in (*PLAIN_TYPES, *self.weight_types)
            and not is_distributed(weight)
        )
        fits = (
            x.numel() > 0
            and x.dim() > 1
            and x.shape[-1] == self.in_features
            and x.device == weight.device
        )
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
        """Compute the logits now."""
        return super().forward(input)

    def head_products(self, out_dtype: torch.dtype) -> HeadProducts:
        """Return the products for the chunks of one forward."""
        return HeadProducts(self.weight, self.bias, out_dtype)

    def count_products(self, *kinds: str) -> None:
        """Count these products of all chunks: FPROP, DGRAD, WGRAD, or RECOMPUTED. High precision
        counts none."""


HEADS: dict[type[nn.Module], type[DefersLogits]] = {}
"""FP8 layer of a backend -> its subclass that defers logits."""


class HighPrecisionHead(DefersLogits, nn.Linear):
    """An output head in high precision with deferred logits."""

    def _may_defer(self, x: torch.Tensor, out_dtype: torch.dtype) -> bool:
        # else `F.linear` refuses the two dtypes
        has_one_dtype = x.dtype == self.weight.dtype or torch.is_autocast_enabled(x.device.type)
        return has_one_dtype and super()._may_defer(x, out_dtype)


class Pending:
    """One forward of a head with unread logits."""

    def __init__(self, head: DefersLogits, x: torch.Tensor, out_dtype: torch.dtype) -> None:
        self.head, self.x, self.out_dtype = head, x, out_dtype
        self.weight, self.bias = head.weight, head.bias
        self.autocast = torch.is_autocast_enabled(x.device.type)
        self.versions = self._versions()
        self.may_fuse = True
        """False once somebody needs the gradient of the logits themselves."""
        self.output: torch.Tensor | None = None
        """The logits with the graph of the ordinary forward, after the first read."""
        self.leaf: torch.Tensor | None = None
        self.members: list[weakref.ref[DeferredLogits]] = []
        self.backward_hooks: list[Callable] = []

    def _versions(self) -> tuple:
        read = (self.x, *stored_parts(self.weight), *([] if self.bias is None else [self.bias]))
        return tuple(tensor._version for tensor in read)

    @property
    def is_stale(self) -> bool:
        """True after a change of the hidden states or the weight, for example by an optimizer
        step."""
        return self._versions() != self.versions or self.head.weight is not self.weight

    def logits(self) -> torch.Tensor:
        """Return the logits without a graph, computed at the first call. Raises `FP8BackendError`
        if `is_stale`."""
        if self.output is None:
            if self.is_stale:
                raise FP8BackendError(
                    "fused_head=True: the loss ran without logits, and the head's weight or its "
                    "input has changed. Read logits before optimizer.step(), or leave fused_head "
                    "out"
                )
            context = torch.autocast(self.x.device.type, self.out_dtype, self.autocast)
            with torch.enable_grad(), context:
                self.leaf = self.x.detach().requires_grad_(self.x.requires_grad)
                self.output = self.head.ordinary_forward(self.leaf)
        return self.output.detach()

    def materialise(self) -> None:
        """Compute the values of all deferred tensors, and fuse none of them any more."""
        self.may_fuse = False
        for member in self.members:
            if (tensor := member()) is not None:
                tensor.values()

    def note_backward(self, of_input: bool, of_weight: bool) -> None:
        """Count the gradients of a fused loss, and call the hooks."""
        self.head.count_products(*[DGRAD] * of_input, *[WGRAD] * of_weight)
        for hook in self.backward_hooks:
            hook(None)


class _Defer(torch.autograd.Function):
    """The place of deferred logits in the autograd graph: gradients of logits go through the
    ordinary forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, pending):
        ctx.pending = pending
        shape = (*x.shape[:-1], weight.shape[0])
        return DeferredLogits(
            pending, (), torch.empty(shape, dtype=pending.out_dtype, device="meta")
        )

    @staticmethod
    def backward(ctx, dlogits):
        pending, needed = ctx.pending, ctx.needs_input_grad[:3]
        for hook in pending.backward_hooks:
            hook(dlogits)
        pending.logits()
        inputs = zip((pending.leaf, pending.weight, pending.bias), needed, strict=True)
        inputs = [tensor for tensor, is_needed in inputs if is_needed]
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = iter(torch.autograd.grad(pending.output, inputs, dlogits, retain_graph=retain))
        return *(next(gradients) if is_needed else None for is_needed in needed), None


class DeferredLogits(torch.Tensor):
    """Logits without memory: a `Pending` and the recorded steps after it."""

    @staticmethod
    def __new__(cls, pending: Pending, steps: tuple, like: torch.Tensor) -> DeferredLogits:
        """Build with the shape, strides and dtype of the meta tensor `like`."""
        deferred = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            like.stride(),
            like.storage_offset(),
            dtype=like.dtype,
            device=pending.x.device,
        )
        deferred.pending, deferred.steps = pending, steps
        pending.members.append(weakref.ref(deferred))
        return deferred

    def __init__(self, *_) -> None:
        pass

    def values(self) -> torch.Tensor:
        """Return the plain tensor behind this one, without a graph."""
        if "known_values" not in self.__dict__:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self.known_values = functools.reduce(_applied, self.steps, self.pending.logits())
        return self.known_values

    def when_backward(self, hook: Callable[[Any], None]) -> None:
        """Call `hook(gradient)` when a gradient reaches the logits, or `hook(None)` for a loss
        without logits."""
        self.pending.backward_hooks.append(hook)

    @classmethod
    @torch.compiler.disable  # Dynamo would trace into it, and make no tensor without memory
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.cross_entropy and (loss := _fused_cross_entropy(*args, **kwargs)) is not None:
            return loss
        if func in _WAITS_FOR_GRADIENT:
            args[0].pending.may_fuse = False
        if func in _READS_MEMORY:  # knows no graph: a tensor that requires one refuses as usual
            tensor, values = args[0], args[0].values()
            args = (
                values.view_as(values).requires_grad_() if tensor.requires_grad else values,
                *args[1:],
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (deferred := _deferred(func, args, kwargs)) is not None:
            return deferred
        changes = func._schema.is_mutable
        # the ordinary forward builds a graph of its own
        with torch.overrides.enable_reentrant_dispatch():
            plain_args, plain_kwargs = tree_map_only(
                DeferredLogits, DeferredLogits.values, (args, kwargs)
            )
            if changes:
                for tensor in (
                    arg for arg in (*args, *kwargs.values()) if isinstance(arg, DeferredLogits)
                ):
                    tensor.pending.materialise()
        result = func(*plain_args, **plain_kwargs)
        return args[0] if changes and result is plain_args[0] else result


def _applied(tensor: torch.Tensor, step: tuple) -> torch.Tensor:
    func, args, kwargs = step
    return func(tensor, *args, **kwargs)


def _deferred(func, args: tuple, kwargs: dict) -> DeferredLogits | None:
    """Defer an operation, or return None."""
    source = args[0] if args else None
    if not isinstance(source, DeferredLogits) or "known_values" in source.__dict__:
        return None
    if func not in (*_OF_ROWS, *_OF_ELEMENTS, *_COPIES) or any(
        isinstance(arg, torch.Tensor) for arg in args[1:]
    ):
        return None
    if func is aten._to_copy.default and not kwargs.keys() <= {"dtype"}:
        return None
    # of the vocabulary
    if func is aten.slice.Tensor and args[1:2] and args[1] in (-1, source.dim() - 1):
        return None
    step = func, args[1:], kwargs
    like = _applied(
        torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"), step
    )
    if like.shape[-1:] != source.shape[-1:] or not like.is_floating_point():
        return None
    return DeferredLogits(source.pending, (*source.steps, step), like)


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
    """Compute `F.cross_entropy` without logits; None for arguments beyond chunks of rows."""
    is_plain = (
        weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    )
    if not is_plain or not isinstance(input, DeferredLogits) or not torch.is_grad_enabled():
        return None
    with torch._C.DisableTorchFunctionSubclass():
        is_indexed = (
            target.dtype == torch.int64 and input.dim() == 2 and target.shape == input.shape[:1]
        )
        pending, dtype = input.pending, input.dtype
        if not is_indexed or not input.requires_grad or target.device != input.device:
            return None
        if (
            not pending.may_fuse
            or pending.output is not None
            or any(step[0] in _COPIES[:2] for step in input.steps)
        ):
            return None
        if input.numel() == 0 or pending.head._backward_hooks or pending.head._backward_pre_hooks:
            return None
        if pending.is_stale:
            return None  # reading the logits raises
        rows, elementwise = _replayed(pending.x, input.steps)
        result_dtype = torch.float32 if torch.is_autocast_enabled(input.device.type) else dtype
    options = CrossEntropy(ignore_index, reduction == "mean", float(label_smoothing))
    products = pending.head.head_products(pending.out_dtype)
    loss = HeadLoss.apply(
        rows,
        pending.weight,
        pending.bias,
        target,
        products,
        elementwise,
        options,
        pending.note_backward,
    )
    pending.head.count_products(RECOMPUTED if inside_backward() else FPROP)
    return loss.to(result_dtype)


def _replayed(x: torch.Tensor, steps: tuple) -> tuple[torch.Tensor, Callable | None]:
    """Replay steps on the hidden states' rows, and compose their elementwise functions."""
    elementwise = []
    for func, args, kwargs in steps:
        if func is aten.slice.Tensor:
            x = func(x, *args, **kwargs)
        elif func in _OF_ROWS:
            x = x.reshape(*args[0][:-1], x.shape[-1])
        elif func in _OF_ELEMENTS:
            elementwise.append((func, args, kwargs))
    if all(
        func is aten._to_copy.default and kwargs["dtype"] == torch.float32
        for func, _, kwargs in elementwise
    ):
        return x, None
    return x, lambda tensor: functools.reduce(_applied, elementwise, tensor)


class CrossEntropy(NamedTuple):
    """The arguments of `F.cross_entropy` for chunks."""

    ignore_index: int = -100
    takes_mean: bool = True
    """Mean over the tokens that count; else the sum."""
    label_smoothing: float = 0.0


class HeadProducts:
    """The products of a head in high precision, one chunk of tokens after another. A subclass runs
    them in FP8."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> None:
        self.matrix = weight.detach().to(out_dtype)
        self.bias = None if bias is None else bias.detach().to(out_dtype)
        self.out_dtype = out_dtype

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, vocabulary] from x [tokens, hidden], and keep this chunk's operand of
        wgrad."""
        self.x = x.to(self.out_dtype)
        return self.biased(plain_product(self.x, self.matrix))

    def gradients(
        self, dlogits: torch.Tensor, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the last chunk's dx [tokens, hidden] and dw [vocabulary, hidden], as requested."""
        dx = plain_product(dlogits, self.matrix.t()) if of_input else None
        dw = plain_product(dlogits.t(), self.x.t()) if of_weight else None
        return dx, dw

    def biased(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.bias is None else logits + self.bias


def tokens_of_chunk(tokens: int, hidden: int) -> int:
    """Return the tokens in a chunk: at most twice the hidden size, in multiples of ROWS, and about
    equally many. Each chunk but the first adds to the FP32 gradient of the weight, 10 bytes an
    element: on an H200, a tenth of the time of FP8 products with as many tokens as the hidden size.
    A single chunk's gradient stays in the products' dtype."""
    number = -(-tokens // (2 * hidden)) or 1
    return -(-tokens // (number * ROWS_AT_ONCE)) * ROWS_AT_ONCE or ROWS_AT_ONCE


def chunk_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: CrossEntropy,
    elementwise: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of a chunk, FP32 and 0-dimensional, and its gradient by the
    logits [tokens, vocabulary], whose memory it may reuse. `elementwise`: the model's function
    before the loss, such as a softcap."""
    scores = leaf = logits
    if elementwise is not None:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            scores = elementwise(leaf)
    # the gradient may reuse the memory of the scores, and a function may have saved a part of them
    # for its backward
    values = scores.detach() if elementwise is None else scores.detach().clone()
    losses, gradient = cross_entropy(values, labels, options.ignore_index, options.label_smoothing)
    if elementwise is not None:
        (gradient,) = torch.autograd.grad(scores, leaf, gradient)
    return losses.sum(), gradient


class HeadLoss(torch.autograd.Function):
    """The loss, FP32 and 0-dimensional, of hidden states x [tokens, hidden] under a head's weight
    [vocabulary, hidden] and bias, multiplied by `products`. Backward calls `on_backward(of_input,
    of_weight)`."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, products, elementwise, options, on_backward):
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total, dx, dw, db = torch.zeros((), dtype=torch.float32, device=x.device), [], None, None
        size = tokens_of_chunk(*x.shape)
        with torch.autocast(x.device.type, enabled=False):  # it would round FP32 operands
            for rows, indices in zip(x.split(size), labels.split(size), strict=True):
                loss, dlogits = chunk_loss(products.logits(rows), indices, options, elementwise)
                total += loss
                dx_of_chunk, dw_of_chunk = products.gradients(dlogits, needs_x, needs_weight)
                dx.append(dx_of_chunk)
                db = _sum(db, dlogits.sum(0, dtype=torch.float32) if needs_bias else None)
                del dlogits  # before the next allocation
                dw = _sum(dw, dw_of_chunk)
                del dw_of_chunk
        ctx.gradients, ctx.factor = (torch.cat(dx) if needs_x else None, dw, db), None
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        ctx.on_backward = on_backward
        if options.takes_mean:
            number = (labels != options.ignore_index).sum().float()
            # as in PyTorch: without a label that counts, the loss is NaN and the gradients are zero
            ctx.factor = torch.where(number > 0, number.reciprocal(), torch.zeros_like(number))
            total = total / number
        return total

    @staticmethod
    def backward(ctx, dloss):
        refuse_second_derivative(dloss)
        if ctx.gradients is None:
            raise FP8BackendError(
                "fused_head=True: backward ran twice through one loss, whose gradients are made "
                "once, in forward; leave out retain_graph=True, or fused_head"
            )
        gradients, ctx.gradients = ctx.gradients, None
        ctx.on_backward(*(gradient is not None for gradient in gradients[:2]))
        ctx.on_backward = None  # it holds the hidden states
        factor = dloss.float() if ctx.factor is None else dloss.float() * ctx.factor
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return *(
            None if grad is None else _scaled(grad, factor).to(dtype) for grad, dtype in pairs
        ), *(None,) * 5


def _sum(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """Return the FP32 sum, or the first part unchanged."""
    return part if total is None or part is None else total.float().add_(part)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return gradient * factor (FP32, 0-dimensional) in FP32, in place or in one pass."""
    if gradient.dtype == torch.float32:
        return gradient.mul_(factor)
    # one dimension or more: else PyTorch casts it to the gradient's dtype
    return gradient * factor.view(1, 1)
