"""The fused update of delayed scaling: transformer_engine/common/recipe/delayed_scaling.cu,
`kernel_bulk`."""

from __future__ import annotations

import torch

from .casts import FLT_MAX, FP8_DTYPES


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype,
    margin: float,
) -> None:
    """Roll the histories and set the scales of many modules, in place.

    amax_reduction_buffer: FP32, the reduced amaxes of all modules in a row. amax_histories: FP32
    [length, tensors] of each module. scales: FP32 [tensors] of each. As in the kernel, one tensor
    of one module after the other: an amax of zero leaves history and scale alone.
    """
    scaled_max = torch.tensor(torch.finfo(FP8_DTYPES[int(fp8_dtype)]).max * 2.0**-margin)  # FP32
    reduced = iter(amax_reduction_buffer.tolist())
    for history, scale in zip(amax_histories, scales, strict=True):
        for tensor in range(scale.numel()):
            column, amax = history[:, tensor], next(reduced)
            last = torch.tensor(amax) if amax != 0 else column[0].clone()
            if last != 0:
                _update(column, scale[tensor], last, amax_compute_algo, scaled_max)


def _update(
    history: torch.Tensor, scale: torch.Tensor, last: torch.Tensor, algorithm: str, scaled_max
) -> None:
    """One tensor: history [length] and its 0-dimensional scale, in place, from its last amax, not
    zero."""
    rolled = torch.cat([history[1:], last.reshape(1)])
    amax = last if algorithm == "most_recent" else _fmax_of(rolled)
    rolled[0] = 0
    history.copy_(rolled)
    if torch.isfinite(amax) and amax > 0:
        scale.copy_(torch.clamp(scaled_max / amax, max=FLT_MAX))


def _fmax_of(values: torch.Tensor) -> torch.Tensor:
    """The largest, NaN passed over, at least 0: how the kernel's loop of fmaxf ends."""
    return torch.cat([values[~values.isnan()], torch.zeros(1)]).amax()
