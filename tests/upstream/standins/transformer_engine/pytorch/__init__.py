"""Define layers that compute like PyTorch's and record their autocast."""

from contextlib import contextmanager

import torch
from torch import nn

_regions = []
forwards = []
"""The recipe around each forward of a Linear so far; None without FP8."""


@contextmanager
def fp8_autocast(enabled=True, fp8_recipe=None):
    """Sets the recipe of the layers inside."""
    _regions.append(fp8_recipe if enabled else None)
    yield
    _regions.pop()


class Linear(nn.Module):
    """Subclass no `nn.Linear`, like TransformerEngine's, and hold an empty tensor in place of a
    missing bias."""

    def __init__(self, in_features, out_features, bias=True, params_dtype=None):
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype))
        self.bias = (
            nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else torch.Tensor()
        )

    def forward(self, x):
        """x (…, in_features) to (…, out_features)."""
        forwards.append(_regions[-1] if _regions else None)
        return nn.functional.linear(
            x, self.weight.to(x.dtype), self.bias.to(x.dtype) if self.use_bias else None
        )


class LayerNorm(nn.Module):
    """Always with a bias, and without the attribute `normalized_shape`."""

    def __init__(self, normalized_shape, eps=1e-5, params_dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, dtype=params_dtype))
        self.bias = nn.Parameter(torch.zeros(normalized_shape, dtype=params_dtype))

    def forward(self, x):
        """Normalizes over the last dimension."""
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class TransformerLayer(nn.Module):
    """Exist for Accelerate's instance check."""
