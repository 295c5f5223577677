"""Quantize a matrix for the products that read it. PyTorch operations, CPU parts and Triton kernels
give the same bits.

A matrix takes part in two products, one contracting its columns, the other its rows, and Hopper's
FP8 units contract only along contiguous memory. Triton kernels write both layouts in one pass. On a
CPU, and under `torch.compile`, codes are computed once and products read views.
"""

import functools
import math
from types import ModuleType

import torch

from ..formats import scaling
from ..formats.formats import Format, saturating_cast
from ..formats.scaling import (
    DYNAMIC,
    ROWS,
    Blocks,
    Quantized,
    tensor_amax,
    times,
    without_nan,
)
from . import cpu_casts
from .layouts import Layouts
from .triton_gate import usable


def quantize(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    *,
    how: str = DYNAMIC,
    window_state: torch.Tensor | None = None,
    stored_scale_inv: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> Layouts:
    """Quantize a matrix with one scale. `scale_inv` is NaN if the amax is not finite.

    Args:
        x: [rows, columns], bf16, fp16 or FP32, any strides.
        fmt: E4M3 or E5M2.
        scale: FP32, 0-dim; None: derived from the amax as `how` says.
        rows, columns: requested layouts: `codes`, `transposed`.
        how: DYNAMIC, POWER_OF_TWO or JUST_IN_TIME. Only DYNAMIC leaves NaN out of the amax.
        window_state: int32 [2 + WINDOW], the tensor's row of a window state; for JUST_IN_TIME. Read only.
        stored_scale_inv: FP32, 0-dim, a power of two: scale and amax refer to `x *
            stored_scale_inv`, without a copy.
        record: int32, 0-dim, bits of an FP32 amax, raised to this amax in place
            (`scaling.record_amax`, `record_window_amax`). Ignores a NaN left out of the amax.
        amax: FP32, 0-dim: max |x| if known, to save a pass over x.
    """
    if usable(x):
        return _triton_matrix().quantize(
            *(x, fmt, scale, rows, columns),
            how=how,
            window_state=window_state,
            stored_scale_inv=stored_scale_inv,
            record=record,
            amax=amax,
        )
    keep_nan, on_host = how != DYNAMIC, cpu_casts.is_on_host(x)
    rules = cpu_casts if on_host else scaling
    if amax is None:
        amax = _amax_of(x, keep_nan, scale is not None, on_host)
    if stored_scale_inv is not None:
        amax = amax * stored_scale_inv
    if record is not None:
        recorded = record.view(torch.float32)
        recorded.copy_((torch.maximum if keep_nan else torch.fmax)(recorded, amax))
    if scale is None and how == DYNAMIC:
        scale = rules.scale_from_amax(amax, fmt)
    elif scale is None:
        state = None if window_state is None else window_state.unsqueeze(0)
        scale = scaling.scale_by(how, amax, fmt, state, 0)
    scale_inv = rules.scale_inv_of(scale, amax)
    if stored_scale_inv is not None:
        scale = scale * stored_scale_inv  # exact, since the stored scale is a power of two
    if on_host and x.numel() >= cpu_casts.FEWEST_TO_CAST:
        codes = cpu_casts.cast(x, scale, fmt)
    else:
        codes = saturating_cast(x.float() * scale, fmt)
    return Layouts(codes, scale_inv, None, None, amax)


def quantize_blocks(
    x: torch.Tensor,
    blocks: Blocks,
    fmt: Format,
    rows: bool = True,
    columns: bool = True,
    *,
    stored_scale_inv: torch.Tensor | None = None,
) -> Layouts:
    """Quantize a matrix and its transpose with a scale for each block, without an amax. Results may
    be views on a CPU.

    Args:
        blocks: `scaling.ROWS`, `VECTORS`, `SQUARES` or `MX`.
        x, fmt, rows, columns, stored_scale_inv: as in `quantize`.
    """
    if usable(x):
        from . import triton_blocks as kernels  # Triton takes a second to load

        return kernels.quantize_blocks(
            x, blocks, fmt, rows, columns, stored_scale_inv=stored_scale_inv
        )
    along_columns = _in_blocks(x, blocks, fmt, False, stored_scale_inv) if rows else (None, None)
    along_rows = _in_blocks(x, blocks, fmt, True, stored_scale_inv) if columns else (None, None)
    return Layouts(*along_columns, *along_rows)


def quantize_rows(
    x: torch.Tensor, fmt: Format, amax: torch.Tensor, stored_scale_inv: torch.Tensor | None = None
) -> Quantized:
    """Run `quantize_blocks` in ROWS from known amaxes of the rows, FP32 [rows, 1]."""
    amax = times(amax, stored_scale_inv)
    scale = ROWS.scale(amax, fmt)
    return Quantized(ROWS.cast(x, times(scale, stored_scale_inv), fmt), ROWS.inverse(scale, amax))


def dequantize_blocks(q: Quantized, blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """Return the values, bf16 or FP32, of codes [rows, columns] in blocks."""
    if cpu_casts.serves(q.codes):
        return cpu_casts.dequantize_blocks(q, blocks, dtype)
    return blocks.dequantize(q, dtype)


def amax_of(
    x: torch.Tensor, keep_nan: bool = False, is_only_recorded: bool = False
) -> torch.Tensor:
    """Return max |x| in FP32, 0-dim, ignoring NaN unless `keep_nan`. is_only_recorded: no cast
    waits for the amax."""
    if usable(x):
        return _triton_matrix().amax(x, keep_nan)
    return _amax_of(x, keep_nan, is_only_recorded, cpu_casts.is_on_host(x))


@functools.cache
def _triton_matrix() -> ModuleType:
    """Import the kernels at their first use. An import statement in a function takes microseconds
    each time."""
    from . import triton_matrix

    return triton_matrix


def _amax_of(
    x: torch.Tensor, keep_nan: bool, is_only_recorded: bool, on_host: bool
) -> torch.Tensor:
    if on_host and not keep_nan:
        amax = tensor_amax(x)
        # copies x only if it has a NaN
        return tensor_amax(without_nan(x)) if math.isnan(amax.item()) else amax
    x = x if keep_nan else without_nan(x)
    if not torch.compiler.is_compiling():
        return tensor_amax(x)
    # Inductor makes two reductions of `aminmax` and materializes their common input
    magnitudes = x.abs()
    if is_only_recorded:
        # maxima of rows share a kernel with the cast, with tiled stores; a whole amax stores single
        # bytes there
        magnitudes = magnitudes.amax(-1)
    return magnitudes.amax().float()


def cast(x: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Cast x [rows, columns] times a factor, saturating, to nearest: FP8, row-major."""
    if cpu_casts.serves(x):
        return cpu_casts.cast(x, factor, fmt)
    return saturating_cast(x.float() * factor, fmt)


def _in_blocks(
    x: torch.Tensor,
    blocks: Blocks,
    fmt: Format,
    transposed: bool,
    stored_scale_inv: torch.Tensor | None,
) -> Quantized:
    if cpu_casts.serves(x):
        quantized = cpu_casts.quantize_blocks(x, blocks, fmt, transposed, stored_scale_inv)
        if quantized is not None:
            return quantized
    return blocks.quantize(x.t() if transposed else x, fmt, stored_scale_inv)
