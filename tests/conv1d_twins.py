"""Models of transformers' Conv1D, and their twins of Linear layers with the same values."""

from __future__ import annotations

import torch
from model_families import build
from torch import nn
from transformers.pytorch_utils import Conv1D


def conv(n_in: int, n_out: int) -> Conv1D:
    """Return a Conv1D with a nonzero bias."""
    made = Conv1D(n_out, n_in)
    nn.init.normal_(made.bias)
    return made


def linear_twin(module: Conv1D) -> nn.Linear:
    linear = nn.Linear(module.nx, module.nf)
    with torch.no_grad():
        linear.weight.copy_(module.weight.t())
        linear.bias.copy_(module.bias)
    return linear


def conv_twin(linear: nn.Linear) -> Conv1D:
    module = Conv1D(linear.out_features, linear.in_features)
    with torch.no_grad():
        module.weight.copy_(linear.weight.t())
        module.bias.copy_(linear.bias)
    return module


def gpt2(of_linears: bool = False) -> nn.Module:
    """Return the tiny GPT-2 of `model_families`, with Conv1D or with a Linear in the place of
    each."""
    model = build("gpt2")
    for block in model.transformer.h if of_linears else ():
        for part, name in (
            (block.attn, "c_attn"),
            (block.attn, "c_proj"),
            (block.mlp, "c_fc"),
            (block.mlp, "c_proj"),
        ):
            setattr(part, name, linear_twin(getattr(part, name)))
    return model


def results_of_steps(layer: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Output, input's gradient, weight's as [out, in] and bias's, of some steps of a Conv1D or
    Linear under bf16 autocast."""
    results = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(3, 11, layer.in_features, generator=generator, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
        gradient = layer.weight.grad.t() if isinstance(layer, Conv1D) else layer.weight.grad
        results += [y.detach(), x.grad, gradient, layer.bias.grad]
        layer.weight.grad = layer.bias.grad = None
    return results
