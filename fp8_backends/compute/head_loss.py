"""The loss of a language model from hidden states: output head and cross-entropy in chunks of tokens.

The logits of a chunk live until its gradients are made, in the same sweep, so that [tokens, vocabulary] is never held
whole. What forward keeps for backward is the gradient of the hidden states and that of the weight, which is summed in
FP32:

    for each chunk     y = head(x)             loss += cross_entropy(f(y), labels)
                       dy = softmax - labels   dx = dy @ w         dw += dy.T @ x

Gradients are those of the sum over the tokens, of order one whatever the batch, which FP8 and fp16 hold well. The
factor of the mean, and the gradient that arrives in backward, a loss scaler's among them, are multiplied in FP32 there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import FP8BackendError
from ..numerics.kernels.backward import cross_entropy
from .derivatives import refuse_second_derivative
from .products import plain_product

ROWS = 128
"""Chunks are multiples of this, the longest block that shares a scale along the tokens (`scaling.VECTORS`)."""


class CrossEntropy(NamedTuple):
    """The arguments of `F.cross_entropy` that the chunked form takes."""

    ignore_index: int = -100
    takes_mean: bool = True
    """Over the tokens that count; else the sum."""
    label_smoothing: float = 0.0


class HeadProducts:
    """The products of a head in high precision, one chunk of tokens after another. Subclasses make them in FP8."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
        self.matrix = weight.detach().to(out_dtype)
        self.bias = None if bias is None else bias.detach().to(out_dtype)
        self.out_dtype = out_dtype

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary] of the products' dtype from x [tokens, hidden]. Keeps what the weight's gradient of this
        chunk reads."""
        self.x = x.to(self.out_dtype)
        return self.biased(plain_product(self.x, self.matrix))

    def gradients(
        self, dlogits: torch.Tensor, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx [tokens, hidden] and dw [vocabulary, hidden] of the chunk whose logits were made last, each if it is
        asked for, from dlogits [tokens, vocabulary]. All of the products' dtype."""
        dx = plain_product(dlogits, self.matrix.t()) if of_input else None
        dw = plain_product(dlogits.t(), self.x.t()) if of_weight else None
        return dx, dw

    def biased(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.bias is None else logits + self.bias


def tokens_of_chunk(tokens: int, hidden: int) -> int:
    """How many tokens a chunk has: at most twice the hidden size, in multiples of ROWS, and all about as many.

    Each chunk but the first adds to the FP32 gradient of the weight, 10 bytes an element: on an H200, a tenth of the
    time that FP8 products of as many tokens as the hidden size take. The gradient of a sole chunk stays in the
    products' dtype, and its logits take no more memory than that sum would.
    """
    number = -(-tokens // (2 * hidden)) or 1
    return -(-tokens // (number * ROWS)) * ROWS or ROWS


def chunk_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: CrossEntropy,
    elementwise: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of a chunk, FP32 and 0-dimensional, and its gradient by the logits, of their dtype.

    Args:
        logits: [tokens, vocabulary] as the head gives them; their memory may be the gradient's afterwards.
        labels: int64 [tokens].
        elementwise: what the model makes of its logits before the loss, such as a softcap: any differentiable function
            of single elements; None: nothing but casts.
    """
    scores = leaf = logits
    if elementwise is not None:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            scores = elementwise(leaf)
    # the gradient may take the memory of the scores, of which a function may have kept a part for its backward
    values = scores.detach() if elementwise is None else scores.detach().clone()
    losses, gradient = cross_entropy(values, labels, options.ignore_index, options.label_smoothing)
    if elementwise is not None:
        (gradient,) = torch.autograd.grad(scores, leaf, gradient)
    return losses.sum(), gradient


class HeadLoss(torch.autograd.Function):
    """The loss, FP32 and 0-dimensional, of hidden states x [tokens, hidden] under a head's weight [vocabulary, hidden]
    and bias. Of x, weight and bias only the gradients are made: `products` multiplies.

    `on_backward(of_input, of_weight)` is called when the gradients are handed out.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, labels, products, elementwise, options, on_backward):
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total, dx, dw, db = torch.zeros((), dtype=torch.float32, device=x.device), [], None, None
        size = tokens_of_chunk(*x.shape)
        with torch.autocast(x.device.type, enabled=False):  # it would round what is FP32 here
            for rows, indices in zip(x.split(size), labels.split(size), strict=True):
                loss, dlogits = chunk_loss(products.logits(rows), indices, options, elementwise)
                total += loss
                dx_of_chunk, dw_of_chunk = products.gradients(dlogits, needs_x, needs_weight)
                dx.append(dx_of_chunk)
                db = _sum(db, dlogits.sum(0, dtype=torch.float32) if needs_bias else None)
                del dlogits  # before anything else is made
                dw = _sum(dw, dw_of_chunk)
                del dw_of_chunk
        ctx.gradients, ctx.factor = (torch.cat(dx) if needs_x else None, dw, db), None
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        ctx.on_backward = on_backward
        if options.takes_mean:
            number = (labels != options.ignore_index).sum().float()
            # as PyTorch has it: without a label that counts, the loss is NaN and the gradients are zero
            ctx.factor = torch.where(number > 0, number.reciprocal(), torch.zeros_like(number))
            total = total / number
        return total

    @staticmethod
    def backward(ctx, dloss):
        refuse_second_derivative()
        if ctx.gradients is None:
            raise FP8BackendError(
                "fused_head=True: backward ran twice through one loss, whose gradients are made once, in forward; "
                "leave out retain_graph=True, or fused_head"
            )
        gradients, ctx.gradients = ctx.gradients, None
        ctx.on_backward(*(gradient is not None for gradient in gradients[:2]))
        ctx.on_backward = None  # it holds the hidden states
        factor = dloss.float() if ctx.factor is None else dloss.float() * ctx.factor
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return *(None if each is None else _scaled(each, factor).to(dtype) for each, dtype in pairs), *(None,) * 5


def _sum(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """Their FP32 sum where there is a part; the first part as it is."""
    return part if total is None or part is None else total.float().add_(part)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """gradient * factor, FP32 and 0-dimensional, in FP32: in place or in one pass."""
    if gradient.dtype == torch.float32:
        return gradient.mul_(factor)
    return gradient * factor.view(1, 1)  # which is no number to PyTorch, and not cast to the gradient's dtype
