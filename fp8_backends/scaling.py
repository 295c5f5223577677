"""How a scale is chosen.

A scale `s` (FP32) maps a tensor into the range of an FP8 format: `codes = saturate(round(x * s))`, and
`x ≈ codes * scale_inv` with `scale_inv = 1 / s`.

=========  =============================================================  ==============  =====
rule       scale                                                          one scale per   state
=========  =============================================================  ==============  =====
dynamic    from the tensor's own amax (TransformerEngine: current)        tensor          none
delayed    from the amaxes of earlier steps (TransformerEngine: delayed)  tensor          yes
rowwise    from each row's own amax                                       row             none
=========  =============================================================  ==============  =====

The delayed state of one layer is an int32 tensor that holds FP32 bits: wrappers such as FSDP1's `buffer_dtype` or
DeepSpeed's bf16 engine cast every floating-point buffer of a module, and a scale in bf16 is a wrong scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import Format, saturating_cast

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
"""Rows of a delayed state: one a tensor of the layer."""
SCALE, ROLLS, HISTORY = 0, 1, 2
"""Columns of a delayed state: the scale, how often it rolled (an integer), and where the amax history begins."""

_FP32_MAX = torch.finfo(torch.float32).max


class Quantized(NamedTuple):
    """FP8 codes and what turns them back: `codes * scale_inv`."""

    codes: torch.Tensor
    """FP8, [rows, columns], row-major."""
    scale_inv: torch.Tensor
    """FP32, 0-dimensional (one scale) or [rows, 1] (one scale a row). NaN when the tensor had a non-finite value."""


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| over all elements, FP32, 0-dimensional. NaN when x has one."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| of each row of a matrix, FP32, [rows, 1]. NaN in a row that has one."""
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    return torch.maximum(-low, high).float()


def scale_from_amax(amax: torch.Tensor, fmt: Format, margin: int = 0) -> torch.Tensor:
    """`fmt.max * 2**-margin / amax` in FP32; 1 for an amax of 0, inf or NaN; at most the largest FP32.

    TransformerEngine's `compute_scale_from_amax` (common/recipe/recipe_common.cuh).
    """
    # tensor by tensor: a Python number divided by a tensor is a multiplication by the reciprocal, rounded twice
    scale = torch.clamp(torch.full_like(amax, fmt.max * 2.0**-margin) / amax, max=_FP32_MAX)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


def scale_inv_of(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """`1 / scale`, or NaN where the quantised values were not finite.

    The saturating cast turns an inf into the format's maximum. Without the NaN a loss scaler, a gradient clip or a
    user would never learn of the overflow. The scale itself stays finite, so the next step is not affected.
    """
    return torch.where(torch.isfinite(amax), scale.reciprocal(), torch.full_like(scale, float("nan")))


def quantize_with(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, fmt: Format) -> Quantized:
    """x times a given scale, cast. x: [rows, columns], bf16, fp16 or fp32; scale and amax: FP32, 0-dim or [rows, 1]."""
    return Quantized(saturating_cast(x.float() * scale, fmt), scale_inv_of(scale, amax))


def quantize_dynamic(x: torch.Tensor, fmt: Format) -> Quantized:
    """One scale from the amax of x itself."""
    amax = tensor_amax(x)
    return quantize_with(x, scale_from_amax(amax, fmt), amax, fmt)


def quantize_rowwise(x: torch.Tensor, fmt: Format) -> Quantized:
    """One scale for each row of x."""
    amax = row_amax(x)
    return quantize_with(x, scale_from_amax(amax, fmt), amax, fmt)


# delayed scaling: the state of one layer is int32 [3, 2 + history length], viewed as FP32


def new_delayed_state(history_len: int, device: torch.device | str | None = None) -> torch.Tensor:
    """A fresh state: scale 1 (TransformerEngine's first step), an empty history. int32 [3, 2 + history_len]."""
    state = torch.zeros(3, HISTORY + history_len, dtype=torch.int32, device=device)
    state.view(torch.float32).select(1, SCALE).fill_(1.0)
    return state


def delayed_scale(state: torch.Tensor, tensor: int) -> torch.Tensor:
    """The scale in force for INPUT, WEIGHT or GRAD_OUTPUT. FP32, 0-dimensional."""
    return state.view(torch.float32).select(0, tensor).select(0, SCALE)


def record_amax(state: torch.Tensor, tensor: int, amax: torch.Tensor) -> None:
    """history[0] = max(history[0], amax), in place. Idempotent, so recomputation may record again; NaN is ignored."""
    newest = state.view(torch.float32).select(0, tensor).select(0, HISTORY)
    newest.copy_(torch.fmax(newest, amax))


def rolled_delayed_states(
    states: torch.Tensor, format_max: torch.Tensor, margin: int, algorithm: str, interval: int
) -> torch.Tensor:
    """The states after one step, from states of any number of layers. int32 [layers, 3, 2 + L] in and out.

    TransformerEngine's fused update (common/recipe/delayed_scaling.cu). With the recorded amax `a = history[0]`:
    nothing changes when a is 0; else `A` is a (`most_recent`) or the largest of the history (`max`), the history
    shifts with a at its end, and a finite A gives the scale `format_max * 2**-margin / A`. `interval` recomputes the
    scale on every interval-th roll only. format_max: FP32, broadcastable to [layers, 3].
    """
    bits, length = states.view(torch.float32), states.shape[-1] - HISTORY
    scale, history, rolls = bits.select(-1, SCALE), bits.narrow(-1, HISTORY, length), states.select(-1, ROLLS)
    recorded = history.select(-1, 0)
    amax = recorded if algorithm == "most_recent" else history.amax(dim=-1)
    due = (recorded != 0) & (amax > 0) & torch.isfinite(amax) & (rolls % interval == 0)
    new_scale = torch.where(due, torch.clamp(format_max * 2.0**-margin / amax, max=_FP32_MAX), scale)
    room = torch.zeros_like(recorded.unsqueeze(-1))  # where the next step records
    shifted = torch.cat([room, history.narrow(-1, 2, length - 2), recorded.unsqueeze(-1)], -1) if length > 1 else room
    new_history = torch.where((recorded != 0).unsqueeze(-1), shifted, history)
    return torch.cat(
        [
            new_scale.unsqueeze(-1).view(torch.int32),
            (rolls + (recorded != 0)).to(torch.int32).unsqueeze(-1),
            new_history.view(torch.int32),
        ],
        dim=-1,
    )
