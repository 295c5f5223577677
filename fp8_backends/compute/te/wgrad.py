"""The weight gradient in high precision: `override_linear_precision=(False, False, True)`.

TransformerEngine had this until version 2.1. Here it gets the weight as one that needs no gradient, so it makes fprop,
dgrad and the bias gradient, and keeps no codes of the input; the weight gradient is made of the unquantized input and
output gradient, as TransformerEngine made it.
"""

from __future__ import annotations

import torch


class PlainWgrad(torch.autograd.Function):
    """y, as it is, whose backward makes the gradient of `weight` [out, in] from x [tokens, in] and dy [tokens, out], in
    the dtype of y."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight_dtype, ctx.dtype = weight.dtype, y.dtype
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        (x,) = ctx.saved_tensors
        dw = torch.mm(dy.to(ctx.dtype).t(), x.to(ctx.dtype)).to(ctx.weight_dtype) if ctx.needs_input_grad[2] else None
        return dy, None, dw
