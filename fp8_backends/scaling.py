"""How a scale is chosen.

A scale `s` (FP32) maps a tensor into the range of an FP8 format: `codes = saturate(round(x * s))`, and
`x ≈ codes * scale_inv` with `scale_inv = 1 / s`.

=========  =============================================================  ==============  =====
rule       scale                                                          one scale per   state
=========  =============================================================  ==============  =====
dynamic    from the tensor's own amax (TransformerEngine: current)        tensor          none
delayed    from the amaxes of earlier steps (TransformerEngine: delayed)  tensor          yes
rowwise    from each row's own amax                                       row             none
window     a power of two, from the tensor's own amax for 16 steps, then  tensor          yes
           from the largest amax of the last 16 steps (MS-AMP)
=========  =============================================================  ==============  =====

The state of one layer is an int32 tensor that holds FP32 bits: wrappers such as FSDP1's `buffer_dtype` or DeepSpeed's
bf16 engine cast every floating-point buffer of a module, and a scale in bf16 is a wrong scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import Format, saturating_cast

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
"""Rows of a state: one a tensor of the layer."""
SCALE, ROLLS, HISTORY = 0, 1, 2
"""Columns of a state: the scale, how often it rolled (an integer), and where the amax history begins."""

WINDOW = 16
"""Optimizer steps that the `window` rule looks back, and for which it first takes each tensor's own amax."""

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


def power_of_two_scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`2**floor(log2(fmt.max / amax))` in FP32; 1 for an amax of 0, inf or NaN; at most 2**126.

    MS-AMP's rule (FP8-LM, arXiv:2310.18313): multiplying by such a scale rounds nothing. 2**126 is the largest whose
    inverse is a normal FP32 number.
    """
    ratio = torch.clamp(torch.full_like(amax, fmt.max) / amax, max=2.0**126)
    scale = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone
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


# the window rule: a state of the delayed rule's layout with a history of WINDOW; its WEIGHT row stays unused


def new_window_state(device: torch.device | str | None = None) -> torch.Tensor:
    """A fresh state: WINDOW steps of just-in-time scales lie ahead. int32 [3, 2 + WINDOW]."""
    return new_delayed_state(WINDOW, device)


def window_scale(state: torch.Tensor, tensor: int, amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The scale in force for INPUT or GRAD_OUTPUT, chosen on the device. FP32, 0-dimensional.

    Just in time, from `amax`, the tensor's own, in the first WINDOW steps; afterwards the state's.
    """
    warm = state.select(0, tensor).select(0, ROLLS) >= WINDOW
    return torch.where(warm, delayed_scale(state, tensor), power_of_two_scale(amax, fmt))


def record_window_amax(state: torch.Tensor, tensor: int, amax: torch.Tensor) -> None:
    """history[0] = max(history[0], amax), in place. Idempotent. A NaN stays: the step's end must see it."""
    newest = state.view(torch.float32).select(0, tensor).select(0, HISTORY)
    newest.copy_(torch.maximum(newest, amax))


def rolled_window_states(states: torch.Tensor, formats: tuple[Format, Format, Format]) -> torch.Tensor:
    """The states after one optimizer step, from states of any number of layers. int32 [layers, 3, 2 + WINDOW].

    MS-AMP's schedule (FP8-LM, arXiv:2310.18313). With the recorded amax `a = history[0]` of a tensor: the scale is
    computed from the largest of the history, which moves on by one step, and the counter rises. A non-finite `a` is
    dropped and sets the counter to 0, so that WINDOW just-in-time steps follow. Where nothing but zeros was recorded,
    as in a layer that did not run, all stays as it is (MS-AMP lets such steps pass through the window: after WINDOW
    of them it would know no amax, and saturate). formats: of input, weight and the output's gradient.
    """
    return torch.stack([_rolled_window(rows, fmt) for rows, fmt in zip(states.unbind(1), formats, strict=True)], 1)


def _rolled_window(rows: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The rows of one tensor of every layer. int32 [layers, 2 + WINDOW]."""
    bits = rows.view(torch.float32)
    scale, rolls, history = bits.select(-1, SCALE), rows.select(-1, ROLLS), bits.narrow(-1, HISTORY, WINDOW)
    recorded = history.select(-1, 0)
    overflowed = ~torch.isfinite(recorded)
    rolls_on = (recorded != 0) & ~overflowed
    new_scale = torch.where(rolls_on, power_of_two_scale(history.amax(-1), fmt), scale)
    new_rolls = torch.where(overflowed, torch.zeros_like(rolls), rolls + rolls_on.to(torch.int32))
    earlier = history.narrow(-1, 1, WINDOW - 1)
    kept = torch.where(rolls_on.unsqueeze(-1), history.narrow(-1, 0, WINDOW - 1), earlier)
    room = torch.zeros_like(recorded.unsqueeze(-1))  # where the next step records
    new_bits = [each.view(torch.int32) for each in (new_scale.unsqueeze(-1), room, kept)]
    return torch.cat([new_bits[0], new_rolls.unsqueeze(-1), *new_bits[1:]], -1)
