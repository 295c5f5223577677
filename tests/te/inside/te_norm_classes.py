"""Define norms as models bring them along, and look-alikes."""

from __future__ import annotations

import torch
from torch import nn


class ScaleNorm(nn.Module):
    """Compute x / |x|, with a norm's name, a weight and an eps."""

    def __init__(self, n: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        return self.weight * x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps)


class MeanAbsNorm(ScaleNorm):
    """Near to RMSNorm for some inputs only."""

    def forward(self, x):
        return self.weight * x / (x.abs().mean(-1, keepdim=True) * 1.2533 + self.eps)


class GatedRMSNorm(ScaleNorm):
    """RMSNorm, but called with a second tensor."""

    def forward(self, x, gate=None):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return x if gate is None else x * nn.functional.silu(gate)


class ClassEpsNorm(nn.Module):
    """Keep the eps of RMSNorm on the class."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class FP32LayerNorm(nn.LayerNorm):
    """Override LayerNorm's forward with the same function."""

    def forward(self, x):
        return nn.functional.layer_norm(
            x.float(), self.normalized_shape, self.weight, self.bias, self.eps
        ).to(x.dtype)


class NoisyLayerNorm(nn.LayerNorm):
    """Another function in training than in eval."""

    def forward(self, x):
        return super().forward(x) * (1.5 if self.training else 1.0)
