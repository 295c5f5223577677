"""Quantize groups of rows in one matrix, and the weights of many experts: each group like a tensor
of its own.

Two implementations give the same bits: Triton kernels on a GPU, for all groups in two launches
(compiled code calls them as one operator), and plain operations on all groups at once elsewhere.
"""

from __future__ import annotations

import torch

from ...formats.formats import FORMATS, Format
from ...formats.scaling import (
    MX,
    ROWS,
    RULES,
    Blocks,
    Quantized,
    Rule,
    scale_from_amax,
    scale_inv_of,
    times,
    without_nan,
)
from ...kernels.layouts import Layouts
from ...kernels.quantize import cast, quantize_blocks, quantize_rows
from ...kernels.triton_gate import is_eager, usable
from ..native.layer_rule import LayerRule, Split, Stored
from ..products import ALIGNMENT, pad, row_major
from .grouped_products import (
    READS_SIZES,
    Groups,
    block_places,
    has_places,
    pad_scales,
    rows_of_groups,
)


def quantize_groups(
    x: torch.Tensor,
    groups: Groups,
    fmt: Format,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    lines: bool = False,
    split: Split | None = None,
) -> Layouts:
    """Quantize x [rows, columns] with one scale for the rows of each group (FP32 [groups]; None:
    from the amaxes), or, for `lines`, one for each row, and in `transposed` one for each column of
    each group.

    Returns codes [places, columns] and scale_inv [places] if `rows`; transposed [columns, places]
    and transposed_scale_inv [groups, columns] if `columns`, which may be padded. amax, without
    `lines`: FP32 [groups], NaN ignored, 0 for a group without rows. `split`: the cut of the columns
    over ranks, for scales of whole rows.
    """
    if split is not None and lines:
        layouts = (
            quantize_groups(x, groups, fmt, None, False, True, lines) if columns else Layouts()
        )
        if rows:
            by_rows = rows_as_operand(quantize_rows(x, fmt, split.agreed(ROWS.amax(x))), groups)
            layouts = layouts._replace(codes=by_rows.codes, scale_inv=by_rows.scale_inv)
        return layouts
    if split is not None and scale is None:
        scale = scale_from_amax(split.agreed(amaxes_of_groups(x, groups)), fmt)
    if usable(x):
        from ...kernels import triton_groups

        operands = x, groups.owners, groups.sources, len(groups.ends), fmt, scale
        return triton_groups.quantize_groups(*operands, rows, columns, lines=lines)
    if _is_traced(x):
        parts = torch.ops.fp8_backends.quantize_groups(
            x, *groups, fmt.dtype, scale, rows, columns, lines
        )
        return _from_list(parts, rows, columns, not lines)
    return _placed(groups, *_quantize_plainly(x, groups, fmt, scale, rows, columns, lines))


def quantize_experts(
    weight: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    stored_scale_inv: torch.Tensor | None = None,
    lines: bool = False,
    split: Split | None = None,
) -> Layouts:
    """Quantize a weight [experts, rows, columns] as `quantize_groups` does groups: codes [experts,
    rows, columns] and scale_inv [experts, rows]; transposed [experts, columns, rows] and
    transposed_scale_inv [experts, columns]; rows and columns may be padded. amax, without `lines`:
    FP32 [experts].

    With `stored_scale_inv` (FP32, 0-dimensional, a power of two), scale, scale_inv and amax belong
    to the values `weight * stored_scale_inv`. `split`: the cut of each matrix over ranks, for
    scales of the whole.
    """
    if split is not None and lines:
        layouts = _quantize_expert_parts(weight, fmt, rows, columns, split)
    else:
        if split is not None and scale is None:
            scale = scale_from_amax(split.agreed(amaxes_of_experts(weight, stored_scale_inv)), fmt)
        scale = None if scale is None else times(scale, stored_scale_inv)
        layouts = _quantize_data(weight, fmt, scale, rows, columns, lines)
    if stored_scale_inv is None:
        return layouts
    # with a power of two the codes of data and values are the same
    scales = {
        name: getattr(layouts, name) for name in ("scale_inv", "transposed_scale_inv", "amax")
    }
    return layouts._replace(
        **{name: s * stored_scale_inv for name, s in scales.items() if s is not None}
    )


def codes_of_experts(codes: torch.Tensor, scale_inv: torch.Tensor) -> Layouts:
    """Return views of a weight in FP8, [experts, rows, columns]; products lay them out for their
    engine. scale_inv is 0-dimensional, or [experts, 1, 1], [experts, rows, 1] or [experts, 1,
    columns]: lines with several scales have no layout."""
    experts, rows, columns = codes.shape
    scale_inv = scale_inv if scale_inv.dim() else scale_inv.repeat(experts, 1, 1)
    of_rows, of_columns = (None, None), (None, None)
    if scale_inv.shape[2] == 1:
        of_rows = codes, scale_inv.squeeze(2).repeat(1, rows // scale_inv.shape[1])
    if scale_inv.shape[1] == 1:
        of_columns = (
            codes.transpose(1, 2),
            scale_inv.squeeze(1).repeat(1, columns // scale_inv.shape[2]),
        )
    return Layouts(*of_rows, *of_columns)


def rows_as_operand(x: Quantized, groups: Groups) -> Quantized:
    """Lay out codes [rows, columns] with scale_inv [rows, 1] for `grouped_product`."""
    return _placed(groups, Quantized(x.codes, x.scale_inv.squeeze(1)), None).along_columns()


def _quantize_data(
    weight: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None,
    rows: bool,
    columns: bool,
    lines: bool,
) -> Layouts:
    """Quantize unscaled data, without a split."""
    if usable(weight):
        from ...kernels import triton_groups

        return triton_groups.quantize_matrices(weight, fmt, scale, rows, columns, lines=lines)
    if _is_traced(weight):
        parts = torch.ops.fp8_backends.quantize_experts(
            weight, fmt.dtype, scale, rows, columns, lines
        )
        return _from_list(parts, rows, columns, not lines)
    experts, height, width = weight.shape
    every = torch.arange(experts, device=weight.device)
    # products read the ends, casts only their number
    groups = Groups(every.repeat_interleave(height), every)
    by_rows, by_columns, amax = _quantize_plainly(
        weight.reshape(-1, width), groups, fmt, scale, rows, columns, lines
    )
    if by_rows is not None:
        by_rows = Quantized(
            by_rows.codes.view(weight.shape), by_rows.scale_inv.view(experts, height)
        )
    if by_columns is not None:
        by_columns = by_columns._replace(codes=by_columns.codes.view(weight.shape).transpose(1, 2))
    return _padded(by_rows, by_columns, amax)


def _quantize_expert_parts(
    weight: torch.Tensor, fmt: Format, rows: bool, columns: bool, split: Split
) -> Layouts:
    """Quantize by lines this rank's rows (`split.dim` 0) or columns (1); a line across ranks has
    one scale."""
    is_cut_row = split.dim == 1
    cut, whole = (rows, columns) if is_cut_row else (columns, rows)
    layouts = (
        _quantize_data(weight, fmt, None, not is_cut_row, is_cut_row, True) if whole else Layouts()
    )
    if not cut:
        return layouts
    lines = weight if is_cut_row else weight.transpose(1, 2)
    flat = lines.reshape(-1, lines.shape[2])
    q = quantize_rows(flat, fmt, split.agreed(ROWS.amax(flat)))
    q = Quantized(q.codes.view(lines.shape), q.scale_inv.view(lines.shape[:2]))
    if is_cut_row:
        return Layouts(*_padded(q, None)[:2], *layouts[2:])
    return Layouts(*layouts[:2], *_padded(None, q)[2:])


def _quantize_plainly(
    x: torch.Tensor,
    groups: Groups,
    fmt: Format,
    scale: torch.Tensor | None,
    rows: bool,
    columns: bool,
    lines: bool,
) -> tuple[Quantized | None, Quantized | None, torch.Tensor | None]:
    """Return codes [rows, columns] with scales of rows [rows], with scales of columns [groups,
    columns], and amaxes."""
    by_rows = by_columns = None
    if not lines:
        amax = amaxes_of_groups(x, groups)
        scale = scale_from_amax(amax, fmt) if scale is None else scale
        codes, scale_inv = (
            cast(x, scale.index_select(0, groups.ids).unsqueeze(1), fmt),
            scale_inv_of(scale, amax),
        )
        by_rows = Quantized(codes, scale_inv.index_select(0, groups.ids)) if rows else None
        by_columns = (
            Quantized(codes, scale_inv.unsqueeze(1).repeat(1, codes.shape[1])) if columns else None
        )
        return by_rows, by_columns, amax
    if rows:
        codes, scale_inv, *_ = quantize_blocks(x, ROWS, fmt, columns=False)
        by_rows = Quantized(codes, scale_inv.squeeze(1))
    if columns:
        amax = x.new_zeros(groups.ends.shape[0], x.shape[1])
        amax = amax.scatter_reduce(
            0, groups.ids.unsqueeze(1).expand_as(x), without_nan(x).abs_(), "amax"
        ).float()
        scale = scale_from_amax(amax, fmt)
        by_columns = Quantized(
            cast(x, scale.index_select(0, groups.ids), fmt), scale_inv_of(scale, amax)
        )
    return by_rows, by_columns, None


def _placed(
    groups: Groups,
    by_rows: Quantized | None,
    by_columns: Quantized | None,
    amax: torch.Tensor | None = None,
) -> Layouts:
    """Lay out codes with scales of rows, and of the columns of groups: as views, or as the kernels
    do."""
    if groups.places is None:
        by_columns = None if by_columns is None else by_columns._replace(codes=by_columns.codes.t())
    else:
        if by_rows is not None:
            codes = groups.placed(pad(by_rows.codes, 1, ALIGNMENT))
            scale_inv = by_rows.scale_inv.new_ones(len(groups.owners))
            by_rows = Quantized(codes, scale_inv.index_copy(0, groups.places, by_rows.scale_inv))
        if by_columns is not None:
            codes = row_major(groups.placed(pad(by_columns.codes, 1, ALIGNMENT)).t())
            by_columns = Quantized(codes, pad_scales(by_columns.scale_inv))
    return Layouts(*by_rows or (None, None), *by_columns or (None, None), amax)


def _padded(
    by_rows: Quantized | None, by_columns: Quantized | None, amax: torch.Tensor | None = None
) -> Layouts:
    """Lay out codes of experts and of their transposes: as they are, or as the kernels do."""
    if has_places((by_rows or by_columns).codes):
        by_rows, by_columns = (
            q and Quantized(row_major(pad(q.codes, ALIGNMENT, ALIGNMENT)), pad_scales(q.scale_inv))
            for q in (by_rows, by_columns)
        )
    return Layouts(*by_rows or (None, None), *by_columns or (None, None), amax)


def _is_traced(x: torch.Tensor) -> bool:
    """Return True if x stands for a tensor on a device with kernels."""
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
    groups = Groups(ids, ends, places, place_ends, owners, sources)
    return [
        p
        for p in quantize_groups(x, groups, FORMATS[dtype], scale, rows, columns, lines)
        if p is not None
    ]


@_quantize_groups.register_fake
def _empty_groups(
    x, ids, ends, places, place_ends, owners, sources, dtype, scale, rows, columns, lines
):
    return _empty(x, (len(owners),), x.shape[1], len(ends), dtype, rows, columns, lines)


@torch.library.custom_op("fp8_backends::quantize_experts", mutates_args=())
def _quantize_experts(
    weight: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    rows: bool,
    columns: bool,
    lines: bool,
) -> list[torch.Tensor]:
    return [
        p
        for p in quantize_experts(weight, FORMATS[dtype], scale, rows, columns, lines=lines)
        if p is not None
    ]


@_quantize_experts.register_fake
def _empty_experts(weight, dtype, scale, rows, columns, lines):
    experts, height, width = weight.shape
    return _empty(
        weight, (experts, height + -height % ALIGNMENT), width, experts, dtype, rows, columns, lines
    )


def _empty(
    x, places, width: int, groups: int, dtype, rows: bool, columns: bool, lines: bool
) -> list[torch.Tensor]:
    """Allocate the result of an operator. places: shape of the scales of rows."""
    width += -width % ALIGNMENT
    by_rows = [x.new_empty(*places, width, dtype=dtype), x.new_empty(places, dtype=torch.float32)]
    transposed = x.new_empty(*places[:-1], width, places[-1], dtype=dtype)
    by_columns = [transposed, x.new_empty(groups, width, dtype=torch.float32)]
    amax = [] if lines else [x.new_empty(groups, dtype=torch.float32)]
    return (by_rows if rows else []) + (by_columns if columns else []) + amax


def _from_list(parts: list[torch.Tensor], rows: bool, columns: bool, has_amax: bool) -> Layouts:
    """Return the `Layouts` of an operator's parts."""
    by_rows = parts[:2] if rows else (None, None)
    by_columns = parts[2 * rows : 2 * rows + 2] if columns else (None, None)
    return Layouts(*by_rows, *by_columns, parts[-1] if has_amax else None)


def quantize_groups_in_blocks(
    x: torch.Tensor, groups: Groups, rule: LayerRule, fmt: Format, rows: bool, columns: bool
) -> Layouts:
    """Quantize x [rows, columns] in the rule's blocks. Blocks of wgrad start anew at each group:
    transposed [columns, rows] has transposed_scale_inv [columns, at least all blocks], a group's at
    its `block_places`."""
    along_columns = along_rows = (None, None)
    if rows:
        along_columns = quantize_blocks(x, rule.scales.blocks, fmt, columns=False)[:2]
    if columns:
        along_rows = torch.ops.fp8_backends.quantize_block_columns(
            x, groups.ends, rule.scaling, fmt.dtype
        )
    return Layouts(*along_columns, *along_rows)


def experts_in_blocks(stored: Stored, blocks: Blocks, fmt: Format, turned: bool) -> Quantized:
    """Quantize each expert's matrix of data [experts, rows, columns], or its transpose if `turned`,
    like the weight of a layer: codes [experts, n, k], scales [experts, rows of blocks, blocks in a
    row]. FP8 codes stay as they are, with their scale in every block, or with the scales of their
    blocks."""
    if stored.is_in(fmt):
        codes = stored.data.transpose(1, 2) if turned else stored.data
        if stored.scale_inv.dim():
            return Quantized(
                codes, stored.scale_inv.transpose(1, 2).contiguous() if turned else stored.scale_inv
            )
        return Quantized(
            codes, blocks.repeated(stored.scale_inv, codes.shape[1:]).repeat(len(codes), 1, 1)
        )
    matrices = [
        Stored(matrix, stored.scale_inv).in_blocks(blocks, fmt, turned)
        for matrix in stored.data.unbind()
    ]
    codes = torch.stack([q.codes.view(torch.uint8) for q in matrices])  # autocast stacks no FP8
    return Quantized(codes.view(fmt.dtype), torch.stack([q.scale_inv for q in matrices]))


def _quantize_columns(
    x: torch.Tensor, ends: torch.Tensor, scaling: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = RULES[scaling].blocks
    codes, scale_inv = _empty_columns(x, ends, scaling, dtype)
    for group, begin, end in rows_of_groups(ends):
        layouts = quantize_blocks(
            x.narrow(0, begin, end - begin), blocks, FORMATS[dtype], rows=False
        )
        codes.narrow(1, begin, end - begin).copy_(layouts.transposed)
        scale_inv.narrow(1, *block_places(group, begin, end, blocks)).copy_(
            layouts.transposed_scale_inv
        )
    return codes, scale_inv


def _empty_columns(
    x: torch.Tensor, ends: torch.Tensor, scaling: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    width = RULES[scaling].blocks.columns
    scales = x.new_zeros(
        columns,
        rows // width + len(ends),
        dtype=torch.uint8 if RULES[scaling].blocks is MX else torch.float32,
    )
    return x.new_empty(columns, rows, dtype=dtype), scales


torch.library.custom_op(
    "fp8_backends::quantize_block_columns", _quantize_columns, mutates_args=(), tags=READS_SIZES
).register_fake(_empty_columns)


# Amaxes and states of experts, int32 [experts, 3, 2 + history length], each as a single layer's


def amaxes_of_groups(x: torch.Tensor, groups: Groups, keep_nan: bool = False) -> torch.Tensor:
    """Return max |x| of each group's rows, FP32 [groups], 0 without rows. NaN is ignored unless
    `keep_nan`."""
    of_rows = _amaxes_of_rows(x, keep_nan)
    return of_rows.new_zeros(groups.ends.shape[0]).scatter_reduce(0, groups.ids, of_rows, "amax")


def amaxes_of_experts(
    data: torch.Tensor, stored_scale_inv: torch.Tensor | None = None, keep_nan: bool = False
) -> torch.Tensor:
    """Return max |data * stored_scale_inv| of each expert, FP32. NaN is ignored unless
    `keep_nan`."""
    return times(_amaxes_of_rows(data.flatten(1), keep_nan), stored_scale_inv)


def _amaxes_of_rows(x: torch.Tensor, keep_nan: bool) -> torch.Tensor:
    if not keep_nan:
        return ROWS.amax(x).squeeze(1)
    low, high = torch.aminmax(x, dim=1)
    return torch.maximum(-low, high).float()


def scales(
    rule: Rule, amax: torch.Tensor, fmt: Format, tensor: int, states: torch.Tensor | None
) -> torch.Tensor:
    """Return the rule's scale of each expert, NaN for NaN, to show in all scaled values. FP32
    [experts]."""
    return torch.where(amax == amax, rule.scale(amax, fmt, tensor, states), amax)
