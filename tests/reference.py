"""The reference of the numbers: each operation once, short, eager, in FP32, with no regard for
speed.

Fast paths are tested against it: codes, scales, histories and optimizer steps bit for bit, products
up to the order of accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fp8_backends.formats.formats import E4M11, FP32, Format
from fp8_backends.kernels.adam_table import GRADIENT_LIMIT, adam_numbers


def cast(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """FP32 to FP8 through the format's own table: the nearest value, ties to an even code,
    saturating; NaN stays NaN.

    An independent check of the hardware's and PyTorch's casts: every finite code is decoded, and
    each value looks up its two neighbours.
    """
    codes = torch.arange(0, 128, dtype=torch.uint8).view(fmt.dtype).float()
    # ascending, from 0 to fmt.max; index = code
    table = codes[torch.isfinite(codes) & (codes <= fmt.max)]
    magnitude = values.float().abs().clamp(max=fmt.max)
    above = torch.searchsorted(table, magnitude.contiguous()).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = (
        table[above].double() - magnitude.double(),
        magnitude.double() - table[below].double(),
    )
    nearest = torch.where(to_above < to_below, above, below)
    nearest = torch.where(to_above == to_below, torch.where(above % 2 == 0, above, below), nearest)
    code = nearest.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 7)
    code = torch.where(torch.isnan(values), torch.full_like(code, 0x7F), code)
    return code.view(fmt.dtype)


def scale(amax: float, fmt: Format, margin: int = 0) -> torch.Tensor:
    """`fmt.max * 2**-margin / amax` rounded to FP32; 1 for 0, inf and NaN; at most the largest
    FP32."""
    if amax == 0 or not math.isfinite(amax):
        return _fp32(1.0)
    return torch.minimum(_fp32(fmt.max * 2.0**-margin) / _fp32(amax), _fp32(FP32.max))


def _fp32(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float32)


def quantize(
    x: torch.Tensor, fmt: Format, rowwise: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale_inv of a matrix: one scale, or one a row. FP8 [rows, columns]; FP32 0-dim or
    [rows, 1]."""
    x = x.float()
    if rowwise:
        parts = [quantize(row.unsqueeze(0), fmt) for row in x]
        return torch.cat([codes for codes, _ in parts]), torch.stack(
            [inv.reshape(1) for _, inv in parts]
        )
    amax = x.abs().max().item()
    s = scale(amax, fmt)
    return cast(x * s, fmt), 1.0 / s if math.isfinite(amax) else _fp32(math.nan)


def block_scale(amax: float, fmt: Format) -> tuple[float, float]:
    """Scale and scale_inv of a block of TransformerEngine's Float8BlockScaling: `fmt.max / amax`
    rounded to FP32, then down to a power of two, at most 2**127; 1 for 0 and inf. An inf has the
    scale_inv NaN, here as in `quantize`."""
    if amax == 0 or math.isinf(amax):
        return 1.0, 1.0 if amax == 0 else math.nan
    ratio = min(scale(amax, fmt).item(), FP32.max)
    s = 2.0 ** (math.frexp(ratio)[1] - 1)
    return s, 1 / s


def mx_exponent(amax: float, fmt: Format) -> int:
    """Return the biased exponent e of a block of MXFP8: 2**(e - 127) is the least power of two at
    or above `amax / fmt.max`, computed as a product with the reciprocal, each rounded to FP32; 0 to
    254."""
    value = (_fp32(amax) * _fp32(1 / fmt.max)).item()
    if math.isinf(value) or value == 0:
        return 254 if value else 0
    fraction, exponent = math.frexp(value)  # from 0.5 to 1
    return min(max(exponent - (fraction == 0.5) + 127, 0), 254)


def quantize_blocks(
    x: torch.Tensor, fmt: Format, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scale_inv of a matrix in blocks; blocks of 32 columns are MXFP8's, with
    biased exponents, uint8, as scale_inv. NaN is excluded from the amax, and stays in the codes."""
    x, mx = x.float(), columns == 32
    scaled, inverse = torch.empty_like(x), []
    for top in range(0, x.shape[0], rows):
        inverse.append([])
        for first in range(0, x.shape[1], columns):
            block = (slice(top, top + rows), slice(first, first + columns))
            numbers = x[block][~torch.isnan(x[block])].abs()
            amax = numbers.max().item() if len(numbers) else 0.0
            e = mx_exponent(amax, fmt) if mx else 0
            s, s_inv = (2.0 ** (127 - e), e) if mx else block_scale(amax, fmt)
            scaled[block] = x[block] * _fp32(s)
            inverse[-1].append(s_inv)
    return cast(scaled, fmt), torch.tensor(inverse, dtype=torch.uint8 if mx else torch.float32)


def dequantize(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """FP32 values of codes."""
    return codes.float() * scale_inv


def dequantize_blocks(
    codes: torch.Tensor, scale_inv: torch.Tensor, rows: int, columns: int
) -> torch.Tensor:
    """FP32 values of codes in blocks."""
    if scale_inv.dtype == torch.uint8:
        scale_inv = (2.0 ** (scale_inv.double() - 127)).float()
    repeated = scale_inv.repeat_interleave(rows, 0)[: codes.shape[0]].repeat_interleave(columns, 1)
    return codes.float() * repeated[:, : codes.shape[1]]


BLOCKS = {"blockwise": ((1, 128), (128, 128)), "mxfp8": ((1, 32), (1, 32))}
"""Rule -> blocks of activations and gradients, and of weights."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_output: torch.Tensor,
    forward: Format,
    gradient: Format,
    scaling: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, dx, dw of one linear layer with quantized operands and FP64 accumulation.

    x: [tokens, in]; weight: [out, in]; grad_output: [tokens, out]. scaling: "dynamic", one scale a
    tensor, shares codes between both products of an operand; with "rowwise", "blockwise" and
    "mxfp8" each product quantizes its operands along its own contraction.
    """

    def values(operand, fmt, is_weight=False):
        if scaling in BLOCKS:
            block = BLOCKS[scaling][is_weight]
            return dequantize_blocks(*quantize_blocks(operand, fmt, *block), *block).double()
        return dequantize(*quantize(operand, fmt, scaling == "rowwise")).double()

    y = values(x, forward) @ values(weight, forward, True).t()
    dx = values(grad_output, gradient) @ values(weight.t(), forward, True).t()
    dw = values(grad_output.t(), gradient) @ values(x.t(), forward).t()
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


def window_update(
    s: float, counter: int, history: list[float], fmt: Format
) -> tuple[float, int, list[float]]:
    """One optimizer step of the window rule for one tensor, in plain Python.

    MS-AMP's schedule: `history[0]` is the amax recorded in this step. Up to a counter of the
    history's length the scale is just in time; afterwards `s` is in force.
    """
    recorded = history[0]
    if not math.isfinite(recorded):
        return s, 0, [0.0, *history[1:]]
    if recorded == 0:
        return s, counter, history
    s = min(2.0 ** math.floor(math.log2(fmt.max / max(history))), 2.0**126)
    return s, counter + 1, [0.0, *history[:-1]]


def exact(x):
    """Return FP64 unchanged."""
    return x


def to_fp32(x):
    """Round FP64 to FP32. An operation on FP32 numbers in FP64, then rounded, equals the FP32
    operation."""
    return (
        x.float().double()
        if isinstance(x, torch.Tensor)
        else torch.tensor(x, dtype=torch.float32).item()
    )


def adam_step(
    p: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    maximize: bool,
    rounded: Callable = exact,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the new weight, exp_avg and exp_avg_sq of torch.optim's Adam (`decoupled`: AdamW),
    FP64, before storage.

    A gradient with a non-finite element counts as zero. `adam.py`, `adam.cpp` and `triton_tiles.py`
    compute this with `to_fp32`, to the bit.

    Args:
        rounded: rounds the result of each operation: `exact` or `to_fp32`.
    """
    r = rounded
    p, g, m, v = p.double(), g.double(), m.double(), v.double()
    numbers = [r(number) for number in adam_numbers(lr, *betas, eps, weight_decay, step)]
    (
        step_size,
        decay,
        weight_decay,
        new_in_exp_avg,
        beta2,
        new_in_exp_avg_sq,
        inv_sqrt_bias2,
        eps,
        _,
    ) = numbers
    g = (
        torch.where(g.abs() < GRADIENT_LIMIT, g, 0.0)
        if torch.isfinite(g).all()
        else torch.zeros_like(g)
    )
    g = -g if maximize else g
    g = g if decoupled else r(g + r(weight_decay * p))
    m = r(m + r(new_in_exp_avg * r(g - m)))
    v = r(r(v * beta2) + r(r(new_in_exp_avg_sq * g) * g))
    p = r(p * decay) if decoupled else p
    return r(p - r(r(step_size * m) / r(r(r(v.sqrt()) * inv_sqrt_bias2) + eps))), m, v


def random_bits(count: int, seed: int, step: int, start: int = 0) -> list[int]:
    """32 random bits for each of the elements start, start + 1, ...: a hash of (seed, step, index),
    unsigned."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    key = mixed((mixed(step) + seed * 0x9E3779B1) % 2**32)
    return [mixed((start + i) % 2**32 ^ key) for i in range(count)]


def nearest_round(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The nearest numbers of any format, ties to even, saturating. FP64."""
    quantum = _quantum(values, fmt)
    return ((values.double() / quantum).round() * quantum).clamp(-fmt.max, fmt.max)


def _quantum(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The distance of the format's numbers around each value: 2**(max(exponent, smallest normal
    exponent) - mantissa bits)."""
    magnitude = values.double().abs().clamp(fmt.smallest, fmt.max)  # 0 has no exponent
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=fmt.min_exponent)
    return 2.0 ** (exponent - fmt.mantissa_bits)


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 codes, uint8, and residuals, int8, of numbers of E4M11: the code is the nearest
    E4M3 number, at ties the one of larger magnitude; the residual counts E4M11 numbers from there,
    away from zero."""
    # ascending; index = code
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    magnitude = values.double().abs()
    below = (torch.searchsorted(codes, magnitude.contiguous(), right=True) - 1).clamp(max=125)
    code = below + (magnitude - codes[below] >= codes[below + 1] - magnitude).long()
    start, end = torch.minimum(codes[code], magnitude), torch.maximum(codes[code], magnitude)
    counted = ((end - start) / _quantum(start, E4M11)).round()
    residual = torch.where(magnitude < codes[code], -counted, counted)
    return (code | torch.signbit(values).long() << 7).to(torch.uint8), residual.to(torch.int8)


def stochastic_round(
    values: torch.Tensor, fmt: Format, field: torch.Tensor, bits: int
) -> torch.Tensor:
    """Return FP64 values of the format: with |x| = (n + fraction) quanta, n + 1 if field says so,
    else n; saturating.

    quantum: as `_quantum` has it. field: integers of `bits` random bits. The probability of n + 1
    is the fraction, to the nearest 2**-bits or to the last of the bits that FP32 has below the
    format's mantissa, the coarser of the two.
    """
    magnitude, quantum = values.double().abs().clamp(max=fmt.max), _quantum(values, fmt)
    resolution = 2.0**fmt.dropped_bits  # FP32's bits below the quantum
    quanta = torch.round(magnitude / quantum * resolution) / resolution
    used = min(bits, fmt.dropped_bits)
    uniform = (field.double() / 2.0 ** (bits - used)).floor() / 2.0**used
    if used < fmt.dropped_bits:
        uniform = uniform + 2.0 ** -(used + 1)
    return torch.copysign((quanta + uniform).floor() * quantum, values.double())
