"""Products of many small groups at once: rows of tokens, sorted by expert, with the weight of each expert.

    fprop   y  [rows, out]        = x [rows, in]  @ (w[e] [out, in]).T       rows of expert e
    dgrad   dx [rows, in]         = dy [rows, out] @ (w[e].T [in, out]).T
    wgrad   dw [experts, out, in] : dw[e] = (dy rows of e).T @ (x rows of e)

On Hopper one kernel makes all of them, `torch._scaled_grouped_mm`; elsewhere the groups are multiplied one by one by
the engines of a single product. The kernel sets the rules, on every device, so that what passes on a laptop is valid on
a GPU: both operands in E4M3, a scale for each row, a bf16 result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...numerics.scaling import Quantized
from .. import hardware, products
from ..products import ALIGNMENT, engine_for, pad, row_major, scaled_product

SCALED_GROUPED_MM = "scaled_grouped_mm"


class Groups(NamedTuple):
    """Which rows belong to which group; they lie sorted."""

    ids: torch.Tensor
    """int64 [rows], each row's group, rising."""
    ends: torch.Tensor
    """int32 [groups], where each group's rows end: its begin is the end of the one before."""

    @classmethod
    def of(cls, ids: torch.Tensor, groups: int) -> Groups:
        """From sorted ids. Nothing is read on the host."""
        every = torch.arange(groups, device=ids.device, dtype=ids.dtype)
        return cls(ids, torch.searchsorted(ids, every, right=True, out_int32=True))


def grouped_engine_for(device: torch.device) -> str:
    """The engine is `scaled_grouped_mm` on Hopper; elsewhere that of a single product with a bf16 result."""
    # a CUDA device without a driver is a fake tensor's, as in `engine_for`
    if device.type == "cuda" and (not hardware.has_gpu() or hardware.gpu_chip(device).grouped_products):
        return SCALED_GROUPED_MM
    return engine_for(device, torch.bfloat16)


grouped_engine_for = torch.compiler.assume_constant_result(grouped_engine_for)


def grouped_product(a: Quantized, b: Quantized, groups: Groups, fast_accumulation: bool = False) -> torch.Tensor:
    """Each row of a with the matrix of its group, `a[row] @ b[group].T`, with FP32 accumulation.

    Args:
        a: codes [rows, k], scale_inv [rows].
        b: codes [groups, n, k], scale_inv [groups, n].
        fast_accumulation: as for `scaled_product`.

    Returns:
        bf16 [rows, n].
    """
    assert a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn, "no GPU has grouped products of another format"
    if grouped_engine_for(a.codes.device) != SCALED_GROUPED_MM:
        return torch.ops.fp8_backends.grouped_product(*a, *b, groups.ends, fast_accumulation)
    spread, n = _Spread.of(groups), b.codes.shape[1]
    b_codes = row_major(pad(b.codes, ALIGNMENT, ALIGNMENT))
    out = torch._scaled_grouped_mm(
        spread.rows(row_major(pad(a.codes, 1, ALIGNMENT))),
        b_codes.transpose(1, 2),  # column-major
        spread.scales(a.scale_inv),
        F.pad(b.scale_inv, (0, b_codes.shape[1] - n), value=1.0),
        offs=spread.ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accumulation,
    )
    return out.index_select(0, spread.positions).narrow(1, 0, n)


def grouped_wgrad(a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
    """For each group the product over its rows, `a[rows of g].T @ b[rows of g]`; zeros for a group without rows.

    Args:
        a: codes [rows, m], scale_inv [groups, m].
        b: codes [rows, k], scale_inv [groups, k].

    Returns:
        bf16 [groups, m, k].
    """
    assert a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn, "no GPU has grouped products of another format"
    if grouped_engine_for(a.codes.device) != SCALED_GROUPED_MM:
        return torch.ops.fp8_backends.grouped_wgrad(*a, *b, groups.ends)
    spread, m, k = _Spread.of(groups), a.codes.shape[1], b.codes.shape[1]
    a_codes, b_codes = (row_major(spread.rows(row_major(pad(q.codes, 1, ALIGNMENT))).t()) for q in (a, b))
    out = torch._scaled_grouped_mm(
        a_codes,
        b_codes.t(),  # column-major
        F.pad(a.scale_inv, (0, a_codes.shape[0] - m), value=1.0).flatten(),
        F.pad(b.scale_inv, (0, b_codes.shape[0] - k), value=1.0).flatten(),
        offs=spread.ends,
        out_dtype=torch.bfloat16,
    )
    return out.narrow(1, 0, m).narrow(2, 0, k)


class _Spread(NamedTuple):
    """Groups that begin at multiples of 16, as the kernel's loads ask for, with zero codes between them. The number of
    rows is the largest possible, so that no one reads the sizes. A group without rows gets 16 of zeros, and so a
    gradient of zeros. Results behind the last group are never read."""

    positions: torch.Tensor
    """int64 [rows], where each row goes."""
    ends: torch.Tensor
    """int32 [groups]"""
    total: int

    @classmethod
    def of(cls, groups: Groups) -> _Spread:
        sizes = torch.diff(groups.ends, prepend=groups.ends.new_zeros(1))
        sizes = torch.clamp(sizes + ALIGNMENT - 1, min=ALIGNMENT) // ALIGNMENT * ALIGNMENT
        ends = torch.cumsum(sizes, 0, dtype=torch.int32)
        shift = (ends - sizes) - F.pad(groups.ends.narrow(0, 0, len(sizes) - 1), (1, 0))  # of each group's first row
        rows = groups.ids.shape[0]
        positions = torch.arange(rows, device=groups.ids.device) + shift.index_select(0, groups.ids)
        total = (rows + ALIGNMENT * groups.ends.shape[0] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return cls(positions, ends, total)

    def rows(self, codes: torch.Tensor) -> torch.Tensor:
        """[rows, columns] to [total, columns]."""
        bits = codes.view(torch.uint8)  # index_copy has no float8 kernel
        return bits.new_zeros(self.total, bits.shape[1]).index_copy(0, self.positions, bits).view(codes.dtype)

    def scales(self, scale_inv: torch.Tensor) -> torch.Tensor:
        return scale_inv.new_ones(self.total).index_copy(0, self.positions, scale_inv)


# Group by group: operators of their own, since they read the sizes of the groups, which no compiler knows


@torch.library.custom_op("fp8_backends::grouped_product", mutates_args=())
def _product_by_group(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    ends: torch.Tensor,
    fast_accumulation: bool,
) -> torch.Tensor:
    out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for group, begin, end in rows_of_groups(ends):
        rows = Quantized(a[begin:end], a_scale_inv[begin:end, None])
        matrix = Quantized(b[group], b_scale_inv[group, :, None])
        out[begin:end] = scaled_product(rows, matrix, torch.bfloat16, fast_accumulation)
    return out


_product_by_group.register_fake(lambda a, a_scale_inv, b, *_: a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16))


@torch.library.custom_op("fp8_backends::grouped_wgrad", mutates_args=())
def _wgrad_by_group(
    a: torch.Tensor, a_scale_inv: torch.Tensor, b: torch.Tensor, b_scale_inv: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    out = _zeros_where_empty(a.new_empty(ends.shape[0], a.shape[1], b.shape[1], dtype=torch.bfloat16), ends)
    for group, begin, end in rows_of_groups(ends):
        operands = (Quantized(q[begin:end].t(), s[group, :, None]) for q, s in ((a, a_scale_inv), (b, b_scale_inv)))
        out[group] = scaled_product(*operands, torch.bfloat16)
    return out


_wgrad_by_group.register_fake(
    lambda a, a_inv, b, b_inv, ends: a.new_empty(ends.shape[0], a.shape[1], b.shape[1], dtype=torch.bfloat16)
)


def rows_of_groups(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    """(group, begin, end) for each group that has rows. Waits for the device."""
    bounds = [0, *ends.tolist()]
    return [(group, *pair) for group, pair in enumerate(zip(bounds, bounds[1:], strict=False)) if pair[0] < pair[1]]


def _zeros_where_empty(gradients: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """New memory with zeros for the groups that have no rows: the others are written whole."""
    for group in set(range(len(gradients))) - {group for group, _, _ in rows_of_groups(ends)}:
        gradients[group].zero_()
    return gradients


# In high precision, where a recipe keeps a product there


def plain_product(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`grouped_product` of plain operands [rows, k] and [groups, n, k] of one dtype, in that dtype."""
    if a.dtype == torch.bfloat16 and a.device.type == "cuda":
        return F.grouped_mm(a, b.transpose(1, 2), offs=groups.ends)
    return torch.ops.fp8_backends.plain_grouped_product(a, b, groups.ends)


def plain_wgrad(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`grouped_wgrad` of plain operands [rows, m] and [rows, k] of one dtype, in that dtype."""
    if a.dtype == torch.bfloat16 and a.device.type == "cuda":
        return F.grouped_mm(a.t(), b, offs=groups.ends)
    return torch.ops.fp8_backends.plain_grouped_wgrad(a, b, groups.ends)


@torch.library.custom_op("fp8_backends::plain_grouped_product", mutates_args=())
def _plain_product_by_group(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    for group, begin, end in rows_of_groups(ends):
        out[begin:end] = products.plain_product(a[begin:end], b[group])
    return out


_plain_product_by_group.register_fake(lambda a, b, ends: a.new_empty(a.shape[0], b.shape[1]))


@torch.library.custom_op("fp8_backends::plain_grouped_wgrad", mutates_args=())
def _plain_wgrad_by_group(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = _zeros_where_empty(a.new_empty(ends.shape[0], a.shape[1], b.shape[1]), ends)
    for group, begin, end in rows_of_groups(ends):
        out[group] = products.plain_product(a[begin:end].t(), b[begin:end].t())
    return out


_plain_wgrad_by_group.register_fake(lambda a, b, ends: a.new_empty(ends.shape[0], a.shape[1], b.shape[1]))
