"""Products of many groups whose operands have a scale for each block along the contraction.

No kernel that PyTorch has makes them for all groups at once, so experts are multiplied one after the other by the
engine of a single product (`block_products`), in the output's dtype and with gradients in the recipe's own format. Rows
stay as they lie. Blocks of wgrad, which contracts rows, begin anew with each group.

What depends on the sizes of groups, which no compiler knows, runs in operators.
"""

from __future__ import annotations

import torch

from ...numerics.formats import FORMATS, Format
from ...numerics.kernels.layouts import Layouts
from ...numerics.kernels.quantize import quantize_blocks
from ...numerics.scaling import Blocks, Quantized
from .grouped_products import READS_SIZES, Groups, rows_of_groups, zeros_where_empty
from .layer_rule import ALONG_CONTRACTION, LayerRule, Stored


def quantize_groups_in_blocks(
    x: torch.Tensor, groups: Groups, rule: LayerRule, fmt: Format, rows: bool, columns: bool
) -> Layouts:
    """Rows of groups, cut into the rule's blocks.

    Args:
        x: [rows, columns], bf16, fp16 or fp32.
        rows, columns: the layouts that are needed.

    Returns:
        codes [rows, columns] with the scales of `Blocks`; transposed [columns, rows], and transposed_scale_inv
        [columns, at least the blocks of all groups], those of a group where `_places_of` says.
    """
    along_columns = along_rows = (None, None)
    if rows:
        along_columns = quantize_blocks(x, rule.along.blocks, fmt, columns=False)[:2]
    if columns:
        along_rows = torch.ops.fp8_backends.quantize_block_columns(x, groups.ends, rule.scaling, fmt.dtype)
    return Layouts(*along_columns, *along_rows)


def experts_in_blocks(stored: Stored, blocks: Blocks, fmt: Format, turned: bool) -> Quantized:
    """Each expert's matrix, or its transpose where `turned`, as a layer of its own would cut it.

    Args:
        stored: data [experts, rows, columns]. FP8 codes stay as they are, with their scale in every block, or with
            those of their blocks, which lie as they do.

    Returns:
        codes [experts, n, k], scales [experts, rows of blocks, blocks in a row].
    """
    if stored.is_in(fmt):
        codes = stored.data.transpose(1, 2) if turned else stored.data
        if stored.scale_inv.dim():
            return Quantized(codes, stored.scale_inv.transpose(1, 2).contiguous() if turned else stored.scale_inv)
        return Quantized(codes, blocks.repeated(stored.scale_inv, codes.shape[1:]).repeat(len(codes), 1, 1))
    each = [Stored(matrix, stored.scale_inv).in_blocks(blocks, fmt, turned) for matrix in stored.data.unbind()]
    codes = torch.stack([q.codes.view(torch.uint8) for q in each])  # autocast stacks no FP8
    return Quantized(codes.view(fmt.dtype), torch.stack([q.scale_inv for q in each]))


def grouped_block_product(
    a: Quantized, b: Quantized, groups: Groups, rule: LayerRule, out_dtype: torch.dtype
) -> torch.Tensor:
    """Each row of a with the matrix of its group, `a[row] @ b[group].T`.

    Args:
        a: codes [rows, k] with their scales.
        b: codes [groups, n, k], as `experts_in_blocks` makes them.

    Returns:
        [rows, n] of out_dtype.
    """
    return torch.ops.fp8_backends.grouped_block_product(*a, *b, groups.ends, rule.scaling, out_dtype)


def grouped_block_wgrad(
    a: Quantized, b: Quantized, groups: Groups, rule: LayerRule, out_dtype: torch.dtype
) -> torch.Tensor:
    """For each group the product over its rows, `a[:, rows of g] @ b[:, rows of g].T`; zeros for a group without rows.

    Args:
        a: codes [m, rows], as `quantize_groups_in_blocks` transposes them; b: codes [k, rows].

    Returns:
        [groups, m, k] of out_dtype.
    """
    return torch.ops.fp8_backends.grouped_block_wgrad(*a, *b, groups.ends, rule.scaling, out_dtype)


def _quantize_columns(
    x: torch.Tensor, ends: torch.Tensor, scaling: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = ALONG_CONTRACTION[scaling].blocks
    codes, scale_inv = _empty_columns(x, ends, scaling, dtype)
    for group, begin, end in rows_of_groups(ends):
        layouts = quantize_blocks(x.narrow(0, begin, end - begin), blocks, FORMATS[dtype], rows=False)
        codes.narrow(1, begin, end - begin).copy_(layouts.transposed)
        scale_inv.narrow(1, *_places_of(group, begin, end, blocks)).copy_(layouts.transposed_scale_inv)
    return codes, scale_inv


def _empty_columns(
    x: torch.Tensor, ends: torch.Tensor, scaling: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    width = ALONG_CONTRACTION[scaling].blocks.columns
    scales = x.new_zeros(columns, rows // width + len(ends), dtype=torch.uint8 if scaling == "mxfp8" else torch.float32)
    return x.new_empty(columns, rows, dtype=dtype), scales


def _places_of(group: int, begin: int, end: int, blocks: Blocks) -> tuple[int, int]:
    """Where the blocks of a group lie, and how many they are: none overlaps another's, whatever the sizes are."""
    return begin // blocks.columns + group, -(-(end - begin) // blocks.columns)


def _product(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    ends: torch.Tensor,
    scaling: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    along, out = ALONG_CONTRACTION[scaling], a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    for group, begin, end in rows_of_groups(ends):
        rows = Quantized(*(each.narrow(0, begin, end - begin) for each in (a, a_scale_inv)))
        matrix = Quantized(b.select(0, group), b_scale_inv.select(0, group))
        product = along.product(rows, matrix, along.weight_blocks, out_dtype)
        out.narrow(0, begin, end - begin).copy_(product)
    return out


def _wgrad(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    ends: torch.Tensor,
    scaling: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    along, out = ALONG_CONTRACTION[scaling], a.new_empty(len(ends), a.shape[0], b.shape[0], dtype=out_dtype)
    rows = rows_of_groups(ends)
    zeros_where_empty(out, rows)
    for group, begin, end in rows:
        places = _places_of(group, begin, end, along.blocks)
        left, right = (
            Quantized(codes.narrow(1, begin, end - begin), scale_inv.narrow(1, *places))
            for codes, scale_inv in ((a, a_scale_inv), (b, b_scale_inv))
        )
        out.select(0, group).copy_(along.product(left, right, along.blocks, out_dtype))
    return out


def _operator(name: str, function, empty) -> None:
    operator = torch.library.custom_op(f"fp8_backends::{name}", function, mutates_args=(), tags=READS_SIZES)
    operator.register_fake(empty)


_operator("quantize_block_columns", _quantize_columns, _empty_columns)
_operator(
    "grouped_block_product",
    _product,
    lambda a, a_inv, b, b_inv, ends, scaling, out_dtype: a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype),
)
_operator(
    "grouped_block_wgrad",
    _wgrad,
    lambda a, a_inv, b, b_inv, ends, scaling, out_dtype: a.new_empty(
        len(ends), a.shape[0], b.shape[0], dtype=out_dtype
    ),
)
