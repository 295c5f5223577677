"""The reference defines the numbers: each operation once, short, eager, in FP32, with no regard for speed.

Nothing here is used in training. Fast paths are tested against it: codes, scales and histories bit for bit, products
up to the order of accumulation.
"""

from __future__ import annotations

import math

import torch

from ..formats import Format

FP32_MAX = torch.finfo(torch.float32).max


def cast(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """FP32 to FP8 through the format's own table: the nearest value, ties to an even code, saturating; NaN stays NaN.

    An independent check of the hardware's and PyTorch's casts: every finite code is decoded, and each value looks up
    its two neighbours.
    """
    codes = torch.arange(0, 128, dtype=torch.uint8).view(fmt.dtype).float()
    table = codes[torch.isfinite(codes) & (codes <= fmt.max)]  # ascending, from 0 to fmt.max; index = code
    magnitude = values.float().abs().clamp(max=fmt.max)
    above = torch.searchsorted(table, magnitude.contiguous()).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = table[above].double() - magnitude.double(), magnitude.double() - table[below].double()
    nearest = torch.where(to_above < to_below, above, below)
    nearest = torch.where(to_above == to_below, torch.where(above % 2 == 0, above, below), nearest)
    code = nearest.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 7)
    code = torch.where(torch.isnan(values), torch.full_like(code, 0x7F), code)
    return code.view(fmt.dtype)


def scale(amax: float, fmt: Format, margin: int = 0) -> torch.Tensor:
    """`fmt.max * 2**-margin / amax` rounded to FP32; 1 for 0, inf and NaN; at most the largest FP32."""
    if amax == 0 or not math.isfinite(amax):
        return torch.tensor(1.0)
    return torch.minimum(torch.tensor(fmt.max * 2.0**-margin) / torch.tensor(amax), torch.tensor(FP32_MAX))


def quantize(x: torch.Tensor, fmt: Format, rowwise: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale_inv of a matrix: one scale, or one a row. FP8 [rows, columns]; FP32 0-dim or [rows, 1]."""
    x = x.float()
    if rowwise:
        parts = [quantize(row.unsqueeze(0), fmt) for row in x]
        return torch.cat([codes for codes, _ in parts]), torch.stack([inv.reshape(1) for _, inv in parts])
    amax = x.abs().max().item()
    s = scale(amax, fmt)
    return cast(x * s, fmt), 1.0 / s if math.isfinite(amax) else torch.tensor(float("nan"))


def dequantize(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """FP32 values of codes."""
    return codes.float() * scale_inv


def linear(
    x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor, forward: Format, gradient: Format, rowwise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx, dw of one linear layer with quantised operands and FP64 accumulation.

    x: [tokens, in]; weight: [out, in]; grad_output: [tokens, out]. With rowwise scales each product quantises its
    operands along its own contraction; with one scale a tensor, both products of an operand use the same codes.
    """

    def product(a, a_format, b, b_format):  # a [m, k], b [n, k]
        return (
            dequantize(*quantize(a, a_format, rowwise)).double()
            @ dequantize(*quantize(b, b_format, rowwise)).double().t()
        )

    y = product(x, forward, weight, forward)
    dx = product(grad_output, gradient, weight.t(), forward)
    dw = product(grad_output.t(), gradient, x.t(), forward)
    return y, dx, dw


def delayed_update(
    s: float, history: list[float], fmt: Format, margin: int, algorithm: str
) -> tuple[float, list[float]]:
    """One step of delayed scaling for one tensor, in plain Python.

    TransformerEngine's fused update: `history[0]` is the amax recorded since the last step.
    """
    recorded = history[0]
    if recorded == 0:
        return s, history
    amax = recorded if algorithm == "most_recent" else max(history)
    if math.isfinite(amax) and amax > 0:
        s = scale(amax, fmt, margin).item()
    history = [*history[1:], recorded]
    history[0] = 0.0
    return s, history
