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

from ...numerics.kernels.triton_gate import usable
from ...numerics.scaling import Quantized
from .. import hardware, products
from ..products import ALIGNMENT, engine_for, pad, row_major, scaled_product

SCALED_GROUPED_MM = "scaled_grouped_mm"


class Groups(NamedTuple):
    """Which rows belong to which group; they lie sorted.

    On a GPU operands have their rows at other places, where groups begin at multiples of 16, as the kernel's loads ask
    for, with zero codes between them. The number of places is the largest possible, so that no one reads the sizes. A
    group without rows gets 16 of zeros, and so a gradient of zeros. Results behind the last group are never read.
    Elsewhere operands have their rows as they lie, and the last four are None.

    Behind the last group may lie rows that belong to none. They must be zeros in an operand, and no product reads or
    writes them: a result has anything there.
    """

    ids: torch.Tensor
    """int64 [rows], each row's group, rising; of rows that belong to none that of the last."""
    ends: torch.Tensor
    """int32 [groups], where each group's rows end: its begin is the end of the one before."""
    places: torch.Tensor | None = None
    """int64 [rows], where each row goes."""
    place_ends: torch.Tensor | None = None
    """int32 [groups], where each group's places end."""
    owners: torch.Tensor | None = None
    """int32 [places], the group of each place."""
    sources: torch.Tensor | None = None
    """int32 [places], the row that goes to each place, or -1."""

    @classmethod
    def of(cls, ids: torch.Tensor, groups: int) -> Groups:
        """From sorted ids, those of rows that belong to no group being `groups`. Nothing is read on the host."""
        every = torch.arange(groups, device=ids.device, dtype=ids.dtype)
        ends = torch.searchsorted(ids, every, right=True, out_int32=True)
        ids = ids.clamp(max=groups - 1)
        made = cls(ids, ends, *_places_of(ids, ends)) if has_places(ids) else cls(ids, ends)
        if not torch.compiler.is_compiling():
            setattr(made.ends, _KNOWN, [])
            setattr(made.operand_ends, _KNOWN, [])
        return made

    @property
    def operand_ends(self) -> torch.Tensor:
        """int32 [groups], where the rows of each group end in an operand."""
        return self.ends if self.place_ends is None else self.place_ends

    def placed(self, codes: torch.Tensor) -> torch.Tensor:
        """FP8 codes [rows, columns] as an operand has them."""
        if self.places is None:
            return codes
        bits = codes.view(torch.uint8)  # index_copy has no float8 kernel
        return bits.new_zeros(len(self.owners), bits.shape[1]).index_copy(0, self.places, bits).view(codes.dtype)

    def placed_scales(self, scale_inv: torch.Tensor) -> torch.Tensor:
        """The scales [rows] of rows as an operand has them."""
        if self.places is None:
            return scale_inv
        return scale_inv.new_ones(len(self.owners)).index_copy(0, self.places, scale_inv)

    def rows_of(self, result: torch.Tensor) -> torch.Tensor:
        """The rows of a product [rows of the operand, columns], as the groups' own lie."""
        return result if self.places is None else result.index_select(0, self.places)


def has_places(ids: torch.Tensor) -> bool:
    """Whether operands on this device have their rows at places of their own."""
    return ids.device.type == "cuda" or usable(ids)


def _places_of(ids: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The last four of `Groups`."""
    begins = F.pad(ends.narrow(0, 0, len(ends) - 1), (1, 0))
    sizes = torch.clamp(ends - begins + ALIGNMENT - 1, min=ALIGNMENT) // ALIGNMENT * ALIGNMENT
    place_ends = torch.cumsum(sizes, 0, dtype=torch.int32)
    shift = place_ends - sizes - begins  # of each group's rows
    rows, groups = len(ids), len(ends)
    places = torch.arange(rows, device=ids.device) + shift.index_select(0, ids)
    every = torch.arange((rows + ALIGNMENT * groups) // ALIGNMENT * ALIGNMENT, device=ids.device, dtype=torch.int32)
    owners = torch.searchsorted(place_ends, every, right=True, out_int32=True).clamp_(max=groups - 1)
    sources = every - shift.index_select(0, owners)
    return places, place_ends, owners, torch.where(sources < ends.index_select(0, owners), sources, -1)


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
        a: codes [places, k], scale_inv [places], the rows as `groups` has them in an operand.
        b: codes [groups, n, k], scale_inv [groups, n]. k and n may be padded with zero codes, in either operand.
        fast_accumulation: as for `scaled_product`.

    Returns:
        bf16 [rows, n], n being at least that of b.
    """
    assert a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn, "no GPU has grouped products of another format"
    if grouped_engine_for(a.codes.device) != SCALED_GROUPED_MM:
        out = torch.ops.fp8_backends.grouped_product(*a, *b, groups.operand_ends, fast_accumulation)
        return groups.rows_of(out)
    b_codes = row_major(pad(b.codes, ALIGNMENT, ALIGNMENT))
    out = torch._scaled_grouped_mm(
        row_major(pad(a.codes, 1, ALIGNMENT)),
        b_codes.transpose(1, 2),  # column-major
        a.scale_inv,
        pad_scales(b.scale_inv),
        offs=groups.operand_ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accumulation,
    )
    return groups.rows_of(out)


def grouped_wgrad(a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
    """For each group the product over its rows, `a[:, rows of g] @ b[:, rows of g].T`; zeros for a group without rows.

    Args:
        a: codes [m, places], scale_inv [groups, m], the rows as `groups` has them in an operand.
        b: codes [k, places], scale_inv [groups, k].

    Returns:
        bf16 [groups, m, k], both at least those of a and b.
    """
    assert a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn, "no GPU has grouped products of another format"
    if grouped_engine_for(a.codes.device) != SCALED_GROUPED_MM:
        return torch.ops.fp8_backends.grouped_wgrad(*a, *b, groups.operand_ends)
    a_codes, b_codes = (row_major(pad(q.codes, ALIGNMENT, 1)) for q in (a, b))
    return torch._scaled_grouped_mm(
        a_codes,
        b_codes.t(),  # column-major
        pad_scales(a.scale_inv).flatten(),
        pad_scales(b.scale_inv).flatten(),
        offs=groups.operand_ends,
        out_dtype=torch.bfloat16,
    )


def pad_scales(scale_inv: torch.Tensor) -> torch.Tensor:
    """The scales [groups, n] of the rows of padded codes [groups, n', k']."""
    missing = -scale_inv.shape[1] % ALIGNMENT
    return F.pad(scale_inv, (0, missing), value=1.0) if missing else scale_inv


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
    rows = rows_of_groups(ends)
    out = zeros_where_empty(a.new_empty(ends.shape[0], a.shape[0], b.shape[0], dtype=torch.bfloat16), rows)
    for group, begin, end in rows:
        operands = (Quantized(q[:, begin:end], s[group, :, None]) for q, s in ((a, a_scale_inv), (b, b_scale_inv)))
        out[group] = scaled_product(*operands, torch.bfloat16)
    return out


_wgrad_by_group.register_fake(
    lambda a, a_inv, b, b_inv, ends: a.new_empty(ends.shape[0], a.shape[0], b.shape[0], dtype=torch.bfloat16)
)


def rows_of_groups(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    """(group, begin, end) for each group that has rows. Waits for the device: in eager code once for all products of a
    layer, forward and backward, in compiled code once for each."""
    known = getattr(ends, _KNOWN, None)
    if known:
        return known
    bounds = [0, *ends.tolist()]
    rows = [(group, *pair) for group, pair in enumerate(zip(bounds, bounds[1:], strict=False)) if pair[0] < pair[1]]
    if known is not None:
        known += rows
    return rows


_KNOWN = "_fp8_rows_of_groups"
"""Attribute of the ends that `Groups.of` makes in eager code. Compiled code uses memory again, and has none."""


def zeros_where_empty(gradients: torch.Tensor, rows: list[tuple[int, int, int]]) -> torch.Tensor:
    """New memory with zeros for the groups that have no rows: the others are written whole."""
    for group in set(range(len(gradients))) - {group for group, _, _ in rows}:
        gradients[group].zero_()
    return gradients


# In high precision, where a recipe keeps a product there


def plain_product(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`grouped_product` of plain operands [rows, k] and [groups, n, k] of one dtype, in that dtype."""
    if a.dtype == torch.bfloat16 and a.device.type == "cuda":
        n, operands = b.shape[1], (row_major(pad(a, 1, ALIGNMENT)), pad(b, ALIGNMENT, ALIGNMENT).transpose(1, 2))
        return F.grouped_mm(*operands, offs=groups.ends).narrow(1, 0, n)
    return torch.ops.fp8_backends.plain_grouped_product(a, b, groups.ends)


def plain_wgrad(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`grouped_wgrad` of plain operands [rows, m] and [rows, k] of one dtype, in that dtype."""
    if a.dtype == torch.bfloat16 and a.device.type == "cuda":
        left, right = (row_major(pad(each, 1, ALIGNMENT)) for each in (a, b))
        return F.grouped_mm(left.t(), right, offs=groups.ends).narrow(1, 0, a.shape[1]).narrow(2, 0, b.shape[1])
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
    rows = rows_of_groups(ends)
    out = zeros_where_empty(a.new_empty(ends.shape[0], a.shape[1], b.shape[1]), rows)
    for group, begin, end in rows:
        out[group] = products.plain_product(a[begin:end].t(), b[begin:end].t())
    return out


_plain_wgrad_by_group.register_fake(lambda a, b, ends: a.new_empty(ends.shape[0], a.shape[1], b.shape[1]))
