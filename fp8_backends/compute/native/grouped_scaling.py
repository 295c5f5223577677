"""Scales for groups of rows that lie in one matrix, and for the weights of many experts.

Each group is quantized as if it were a tensor of its own, so an expert's codes are those that a Linear layer with its
weight and its tokens would make. Operands come as `grouped_products` takes them. Three implementations give the same
bits, and two of them read nothing of where a group begins:

- Triton kernels on a GPU, for all groups in two launches; compiled code calls them, too, as one operator;
- on a CPU one group after the other;
- operations on all groups at once for the rest, such as compiled code on a CPU.
"""

from __future__ import annotations

import torch

from ...numerics.formats import FORMATS, Format
from ...numerics.kernels.cpu_casts import serves
from ...numerics.kernels.layouts import Layouts
from ...numerics.kernels.quantize import cast, quantize, quantize_blocks, quantize_rows
from ...numerics.kernels.triton_gate import is_eager, usable
from ...numerics.scaling import (
    HISTORY,
    ROLLS,
    ROWS,
    SCALE,
    WINDOW,
    Quantized,
    power_of_two_scale,
    scale_from_amax,
    scale_inv_of,
    times,
    without_nan,
)
from ..products import ALIGNMENT, pad, row_major
from .grouped_products import Groups, has_places, pad_scales, rows_of_groups
from .tensor_parallel import Split


def quantize_groups(
    x: torch.Tensor,
    groups: Groups,
    fmt: Format,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
) -> Layouts:
    """One scale for the rows of each group.

    Args:
        x: [rows, columns], bf16, fp16 or fp32.
        scale: FP32 [groups]; None: from the amaxes.
        rows, columns: the layouts that are needed: `codes`, an operand of `grouped_product`, and `transposed`, one of
            `grouped_wgrad`.

    Returns:
        codes [places, columns] and scale_inv [places]; transposed [columns, places] and transposed_scale_inv [groups,
        columns]; the columns may be padded. amax: FP32 [groups], NaN left out, 0 for a group without rows.
    """
    if usable(x):
        return _kernels().quantize_groups(x, groups.owners, groups.sources, len(groups.ends), fmt, scale, rows, columns)
    if _is_traced(x):
        found = torch.ops.fp8_backends.quantize_groups(x, *groups, fmt.dtype, scale, rows, columns, False)
        return _taken(found, rows, columns, True)
    codes, scale_inv, amax = _group_by_group(x, groups, fmt, scale) if serves(x) else _at_once(x, groups, fmt, scale)
    by_rows = Quantized(codes, scale_inv.index_select(0, groups.ids))
    by_columns = Quantized(codes, scale_inv.unsqueeze(1).repeat(1, codes.shape[1]))
    return _placed(groups, by_rows if rows else None, by_columns if columns else None, amax)


def quantize_lines(x: torch.Tensor, groups: Groups, fmt: Format, rows: bool = True, columns: bool = True) -> Layouts:
    """One scale for each row of x, and in `transposed` for each column of each group. As `quantize_groups`, without
    amaxes."""
    if usable(x):
        return _kernels().quantize_groups(
            x, groups.owners, groups.sources, len(groups.ends), fmt, None, rows, columns, lines=True
        )
    if _is_traced(x):
        found = torch.ops.fp8_backends.quantize_groups(x, *groups, fmt.dtype, None, rows, columns, True)
        return _taken(found, rows, columns, False)
    by_rows, by_columns = _by_rows(x, fmt) if rows else None, _by_columns(x, groups, fmt) if columns else None
    return _placed(groups, by_rows, by_columns)


def quantize_experts(
    weight: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    stored_scale_inv: torch.Tensor | None = None,
) -> Layouts:
    """One scale for each expert.

    Args:
        weight: [experts, rows, columns], bf16, fp16 or fp32.
        scale: FP32 [experts]; None: from the amaxes.
        rows, columns: the layouts that are needed.
        stored_scale_inv: FP32, 0-dimensional, a power of two: these are data of a ScaledTensor, and scale, scale_inv
            and amax those of the values `weight * stored_scale_inv`.

    Returns:
        codes [experts, rows, columns] and scale_inv [experts, rows]; transposed [experts, columns, rows] and
        transposed_scale_inv [experts, columns]; rows and columns may be padded. amax: FP32 [experts], NaN left out.
    """
    scale = None if scale is None else times(scale, stored_scale_inv)
    return _of_values(_quantize_data(weight, fmt, scale, rows, columns), stored_scale_inv)


def quantize_lines_of_experts(
    weight: torch.Tensor,
    fmt: Format,
    rows: bool = True,
    columns: bool = True,
    stored_scale_inv: torch.Tensor | None = None,
) -> Layouts:
    """One scale for each row of each expert, and in `transposed` for each column. As `quantize_experts`, without
    amaxes."""
    if usable(weight):
        layouts = _kernels().quantize_experts(weight, fmt, None, rows, columns, lines=True)
    elif _is_traced(weight):
        found = torch.ops.fp8_backends.quantize_experts(weight, fmt.dtype, None, rows, columns, True)
        layouts = _taken(found, rows, columns, False)
    else:
        layouts = _padded(
            _rows_of_experts(weight, fmt) if rows else None,
            _rows_of_experts(weight.transpose(1, 2), fmt) if columns else None,
        )
    return _of_values(layouts, stored_scale_inv)


def codes_of_experts(codes: torch.Tensor, scale_inv: torch.Tensor) -> Layouts:
    """A weight that is FP8 codes already, [experts, rows, columns]: views, which products lay out as their engine asks.

    Args:
        scale_inv: one for all experts, 0-dimensional, or [experts, 1, 1], [experts, rows, 1] or [experts, 1, columns].
            A layout whose lines have several scales is left out.
    """
    experts, rows, columns = codes.shape
    scale_inv = scale_inv if scale_inv.dim() else scale_inv.repeat(experts, 1, 1)
    of_rows, of_columns = (None, None), (None, None)
    if scale_inv.shape[2] == 1:
        of_rows = codes, scale_inv.squeeze(2).repeat(1, rows // scale_inv.shape[1])
    if scale_inv.shape[1] == 1:
        of_columns = codes.transpose(1, 2), scale_inv.squeeze(1).repeat(1, columns // scale_inv.shape[2])
    return Layouts(*of_rows, *of_columns)


def quantize_lines_of_parts(
    x: torch.Tensor, groups: Groups, fmt: Format, rows: bool, columns: bool, split: Split
) -> Layouts:
    """`quantize_lines` of this rank's columns of rows that several ranks have: a row's scale is that of all of it."""
    layouts = quantize_lines(x, groups, fmt, False, True) if columns else Layouts()
    if not rows:
        return layouts
    by_rows = rows_as_operand(quantize_rows(x, fmt, split.agreed(ROWS.amax(x))), groups)
    return layouts._replace(codes=by_rows.codes, scale_inv=by_rows.scale_inv)


def quantize_lines_of_expert_parts(
    weight: torch.Tensor, fmt: Format, rows: bool, columns: bool, stored_scale_inv: torch.Tensor | None, split: Split
) -> Layouts:
    """`quantize_lines_of_experts` of this rank's rows (`split.dim` 0) or columns (1) of each expert's matrix. A line of
    which several ranks have parts gets the scale of all of it."""
    cut_rows, cut_columns = (rows, False) if split.dim == 1 else (False, columns)
    rows, columns = rows and not cut_rows, columns and not cut_columns
    layouts = quantize_lines_of_experts(weight, fmt, rows, columns, stored_scale_inv) if rows or columns else Layouts()
    if not (cut_rows or cut_columns):
        return layouts
    lines = weight if cut_rows else weight.transpose(1, 2)
    flat = lines.reshape(-1, lines.shape[2])
    q = quantize_rows(flat, fmt, split.agreed(ROWS.amax(flat)))
    q = Quantized(q.codes.view(lines.shape), q.scale_inv.view(lines.shape[:2]))
    if cut_rows:
        cut = _of_values(_padded(q, None), stored_scale_inv)
        return layouts._replace(codes=cut.codes, scale_inv=cut.scale_inv)
    cut = _of_values(_padded(None, q), stored_scale_inv)
    return layouts._replace(transposed=cut.transposed, transposed_scale_inv=cut.transposed_scale_inv)


def agreed_group_scales(x: torch.Tensor, groups: Groups, fmt: Format, split: Split) -> torch.Tensor:
    """The dynamic rule's scale of each group of rows of which several ranks have columns. FP32 [groups]."""
    return scale_from_amax(split.agreed(_largest_of_groups(ROWS.amax(x).squeeze(1), groups)), fmt)


def agreed_expert_scales(
    data: torch.Tensor, stored_scale_inv: torch.Tensor | None, fmt: Format, split: Split
) -> torch.Tensor:
    """The dynamic rule's scale of each expert's matrix of which several ranks have parts. FP32 [experts]."""
    return scale_from_amax(split.agreed(times(ROWS.amax(data.flatten(1)).squeeze(1), stored_scale_inv)), fmt)


def rows_as_operand(x: Quantized, groups: Groups) -> Quantized:
    """Rows that are quantized already, with a scale each, as an operand of `grouped_product`.

    Args:
        x: codes [rows, columns], scale_inv [rows, 1].
    """
    return _placed(groups, Quantized(x.codes, x.scale_inv.squeeze(1)), None).along_columns()


# on a CPU, and in plain operations


def _group_by_group(x: torch.Tensor, groups: Groups, fmt: Format, scale: torch.Tensor | None):
    """Codes [rows, columns], the scale_inv of each group, and its amax."""
    codes = torch.zeros(x.shape, dtype=fmt.dtype)  # of rows behind the last group too
    amax = torch.zeros(groups.ends.shape[0], dtype=torch.float32)
    scale_inv = scale_inv_of(torch.ones_like(amax) if scale is None else scale, amax)
    for group, begin, end in rows_of_groups(groups.ends):
        layouts = quantize(x[begin:end], fmt, None if scale is None else scale[group], columns=False)
        codes[begin:end], scale_inv[group], amax[group] = layouts.codes, layouts.scale_inv, layouts.amax
    return codes, scale_inv, amax


def _at_once(x: torch.Tensor, groups: Groups, fmt: Format, scale: torch.Tensor | None):
    """As `_group_by_group`."""
    amax = _largest_of_groups(ROWS.amax(x).squeeze(1), groups)
    scale = scale_from_amax(amax, fmt) if scale is None else scale
    return cast(x, scale.index_select(0, groups.ids).unsqueeze(1), fmt), scale_inv_of(scale, amax), amax


def _expert_by_expert(weight: torch.Tensor, fmt: Format, scale: torch.Tensor | None):
    """Codes [experts, rows, columns], the scale_inv of each expert, and its amax."""
    codes, found = torch.empty_like(weight, dtype=fmt.dtype, memory_format=torch.contiguous_format), []
    for expert, matrix in enumerate(weight.unbind()):
        layouts = quantize(matrix, fmt, None if scale is None else scale[expert], columns=False)
        codes[expert] = layouts.codes
        found.append((layouts.scale_inv, layouts.amax))
    return codes, *map(torch.stack, zip(*found, strict=True))


def _by_rows(x: torch.Tensor, fmt: Format) -> Quantized:
    """One scale for each row of x [rows, columns]. scale_inv: [rows]."""
    if serves(x):
        layouts = quantize_blocks(x, ROWS, fmt, columns=False)
        return Quantized(layouts.codes, layouts.scale_inv.squeeze(1))
    amax = ROWS.amax(x)
    scale = scale_from_amax(amax, fmt)
    return Quantized(cast(x, scale, fmt), scale_inv_of(scale, amax).squeeze(1))


def _quantize_data(weight: torch.Tensor, fmt: Format, scale: torch.Tensor | None, rows: bool, columns: bool) -> Layouts:
    """`quantize_experts` of data that are the values."""
    if usable(weight):
        return _kernels().quantize_experts(weight, fmt, scale, rows, columns)
    if _is_traced(weight):
        found = torch.ops.fp8_backends.quantize_experts(weight, fmt.dtype, scale, rows, columns, False)
        return _taken(found, rows, columns, True)
    if serves(weight):
        codes, scale_inv, amax = _expert_by_expert(weight, fmt, scale)
    else:
        amax = ROWS.amax(weight.flatten(1)).squeeze(1)
        scale = scale_from_amax(amax, fmt) if scale is None else scale
        of_rows = scale.repeat_interleave(weight.shape[1]).unsqueeze(1)
        codes = cast(weight.reshape(-1, weight.shape[2]), of_rows, fmt).view(weight.shape)
        scale_inv = scale_inv_of(scale, amax)
    by_rows, by_columns = (Quantized(codes, scale_inv.unsqueeze(1).repeat(1, n)) for n in weight.shape[1:])
    by_columns = by_columns._replace(codes=codes.transpose(1, 2))
    return _padded(by_rows if rows else None, by_columns if columns else None, amax)


def _of_values(layouts: Layouts, stored_scale_inv: torch.Tensor | None) -> Layouts:
    """Layouts of data as those of `data * stored_scale_inv`: with a power of two the codes are the same."""
    if stored_scale_inv is None:
        return layouts
    names = ("scale_inv", "transposed_scale_inv", "amax")
    found = {name: getattr(layouts, name) for name in names}
    return layouts._replace(**{name: each * stored_scale_inv for name, each in found.items() if each is not None})


def _rows_of_experts(weight: torch.Tensor, fmt: Format) -> Quantized:
    """One scale for each row of each expert. weight: [experts, n, k] of any strides; scale_inv: [experts, n]."""
    codes, scale_inv = _by_rows(weight.reshape(-1, weight.shape[2]), fmt)
    return Quantized(codes.view(weight.shape), scale_inv.view(weight.shape[:2]))


def _by_columns(x: torch.Tensor, groups: Groups, fmt: Format) -> Quantized:
    """One scale for each column of each group of x [rows, columns]. scale_inv: [groups, columns]."""
    if serves(x):
        return _columns_group_by_group(x, groups, fmt)
    amax = x.new_zeros(groups.ends.shape[0], x.shape[1])
    amax = amax.scatter_reduce(0, groups.ids.unsqueeze(1).expand_as(x), without_nan(x).abs_(), "amax").float()
    scale = scale_from_amax(amax, fmt)
    return Quantized(cast(x, scale.index_select(0, groups.ids), fmt), scale_inv_of(scale, amax))


def _columns_group_by_group(x: torch.Tensor, groups: Groups, fmt: Format) -> Quantized:
    codes = torch.zeros(x.shape, dtype=fmt.dtype)  # of rows behind the last group too
    scale_inv = torch.ones(groups.ends.shape[0], x.shape[1], dtype=torch.float32)
    for group, begin, end in rows_of_groups(groups.ends):
        layouts = quantize_blocks(x[begin:end], ROWS, fmt, rows=False)
        codes[begin:end], scale_inv[group] = layouts.transposed.t(), layouts.transposed_scale_inv.squeeze(1)
    return Quantized(codes, scale_inv)


def _placed(
    groups: Groups, by_rows: Quantized | None, by_columns: Quantized | None, amax: torch.Tensor | None = None
) -> Layouts:
    """Operands from codes [rows, columns] with scales for rows, and with scales for columns of groups: views of them,
    or as the kernels lay them out."""
    if groups.places is None:
        transposed = None if by_columns is None else by_columns._replace(codes=by_columns.codes.t())
        return Layouts(*by_rows or (None, None), *transposed or (None, None), amax)
    if by_rows is not None:
        codes = groups.placed(pad(by_rows.codes, 1, ALIGNMENT))
        by_rows = Quantized(codes, groups.placed_scales(by_rows.scale_inv))
    if by_columns is not None:
        codes = row_major(groups.placed(pad(by_columns.codes, 1, ALIGNMENT)).t())
        by_columns = Quantized(codes, pad_scales(by_columns.scale_inv))
    return Layouts(*by_rows or (None, None), *by_columns or (None, None), amax)


def _padded(by_rows: Quantized | None, by_columns: Quantized | None, amax: torch.Tensor | None = None) -> Layouts:
    """Operands from codes [experts, rows, columns] and [experts, columns, rows], each with scales for its rows: as they
    are, or as the kernels lay them out."""
    if has_places((by_rows or by_columns).codes):
        by_rows, by_columns = (
            q and Quantized(row_major(pad(q.codes, ALIGNMENT, ALIGNMENT)), pad_scales(q.scale_inv))
            for q in (by_rows, by_columns)
        )
    return Layouts(*by_rows or (None, None), *by_columns or (None, None), amax)


# in compiled code: operators of their own, which are kernels when they run


def _kernels():
    from ...numerics.kernels import triton_groups  # Triton takes a second to load

    return triton_groups


def _is_traced(x: torch.Tensor) -> bool:
    """Whether what stands for x will be on a device with kernels."""
    return has_places(x) and not is_eager(x)


@torch.library.custom_op("fp8_backends::quantize_groups", mutates_args=())
def _quantize_groups(
    x: torch.Tensor,
    ids: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    place_ends: torch.Tensor,
    owners: torch.Tensor,
    sources: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    rows: bool,
    columns: bool,
    lines: bool,
) -> list[torch.Tensor]:
    groups, fmt = Groups(ids, ends, places, place_ends, owners, sources), FORMATS[dtype]
    if lines:
        return _given(quantize_lines(x, groups, fmt, rows, columns))
    return _given(quantize_groups(x, groups, fmt, scale, rows, columns))


@_quantize_groups.register_fake
def _empty_groups(x, ids, ends, places, place_ends, owners, sources, dtype, scale, rows, columns, lines):
    return _empty(x, (len(owners),), x.shape[1], len(ends), dtype, rows, columns, lines)


@torch.library.custom_op("fp8_backends::quantize_experts", mutates_args=())
def _quantize_experts(
    weight: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, rows: bool, columns: bool, lines: bool
) -> list[torch.Tensor]:
    if lines:
        return _given(quantize_lines_of_experts(weight, FORMATS[dtype], rows, columns))
    return _given(quantize_experts(weight, FORMATS[dtype], scale, rows, columns))


@_quantize_experts.register_fake
def _empty_experts(weight, dtype, scale, rows, columns, lines):
    experts, height, width = weight.shape
    return _empty(weight, (experts, _multiple(height)), width, experts, dtype, rows, columns, lines)


def _empty(x, places, width: int, groups: int, dtype, rows: bool, columns: bool, lines: bool) -> list[torch.Tensor]:
    """What an operator returns, without the numbers. places: shape of the scales of rows."""
    width = _multiple(width)
    by_rows = [x.new_empty(*places, width, dtype=dtype), x.new_empty(places, dtype=torch.float32)]
    transposed = x.new_empty(*places[:-1], width, places[-1], dtype=dtype)
    by_columns = [transposed, x.new_empty(groups, width, dtype=torch.float32)]
    amax = [] if lines else [x.new_empty(groups, dtype=torch.float32)]
    return (by_rows if rows else []) + (by_columns if columns else []) + amax


def _multiple(length: int) -> int:
    return (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _given(layouts: Layouts) -> list[torch.Tensor]:
    return [each for each in layouts if each is not None]


def _taken(found: list[torch.Tensor], rows: bool, columns: bool, has_amax: bool) -> Layouts:
    """The layouts of which `_given` made a list."""
    by_rows = found[:2] if rows else (None, None)
    by_columns = found[2 * rows : 2 * rows + 2] if columns else (None, None)
    return Layouts(*by_rows, *by_columns, found[-1] if has_amax else None)


# states of each expert, int32 [experts, 3, 2 + history length], laid out as a single layer's


def delayed_scales(states: torch.Tensor, tensor: int) -> torch.Tensor:
    """The scales in force for INPUT, WEIGHT or GRAD_OUTPUT. FP32 [experts]."""
    return states.view(torch.float32).select(1, tensor).select(1, SCALE)


def window_scales(states: torch.Tensor, tensor: int, amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`scaling.window_scale` of each expert for INPUT or GRAD_OUTPUT, NaN where the amax is. FP32 [experts]."""
    warm = states.select(1, tensor).select(1, ROLLS) >= WINDOW
    scales = power_of_two_scales(amax, fmt)
    return torch.where(warm & (amax == amax), delayed_scales(states, tensor), scales)


def power_of_two_scales(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`scaling.power_of_two_scale` of each amax; NaN where that is, so that a NaN shows in all that it scales."""
    return torch.where(amax == amax, power_of_two_scale(amax, fmt), amax)


def amaxes_of_groups(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """max |x| of the rows of each group, NaN where there is one, 0 for a group without rows. FP32 [groups]."""
    return _largest_of_groups(_line_amaxes(x), groups)


def amaxes_of_experts(data: torch.Tensor, stored_scale_inv: torch.Tensor | None) -> torch.Tensor:
    """max |x| of each expert's values, `data * stored_scale_inv`, NaN where there is one. FP32 [experts]."""
    return times(_line_amaxes(data.flatten(1)), stored_scale_inv)


def _largest_of_groups(of_rows: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The largest of the rows of each group, 0 for a group without rows. FP32 [groups]."""
    return of_rows.new_zeros(groups.ends.shape[0]).scatter_reduce(0, groups.ids, of_rows, "amax")


def _line_amaxes(x: torch.Tensor) -> torch.Tensor:
    low, high = torch.aminmax(x, dim=1)
    return torch.maximum(-low, high).float()


def record_amaxes(states: torch.Tensor, tensor: int, amax: torch.Tensor, keep_nan: bool = False) -> None:
    """history[0] = max(history[0], amax) of each expert, in place. Idempotent; NaN is ignored unless `keep_nan`."""
    newest = states.view(torch.float32).select(1, tensor).select(1, HISTORY)
    newest.copy_((torch.maximum if keep_nan else torch.fmax)(newest, amax))
