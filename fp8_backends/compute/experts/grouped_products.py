"""Products of many small groups at once: rows of tokens, sorted by expert, with the weight of each
expert.

    fprop   y  [rows, out]        = x [rows, in]  @ (w[e] [out, in]).T       rows of expert e
    dgrad   dx [rows, in]         = dy [rows, out] @ (w[e].T [in, out]).T
    wgrad   dw [experts, out, in] : dw[e] = (dy rows of e).T @ (x rows of e)

On Hopper `torch._scaled_grouped_mm` computes all of them; elsewhere, and with block scales, groups
are multiplied one by one. Every device keeps the kernel's rules: operands in E4M3, a scale for each
row, a bf16 result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...formats.scaling import RULES, Blocks, Quantized
from ...kernels.triton_gate import usable
from .. import hardware, products
from ..native.layer_rule import fp8_product
from ..products import ALIGNMENT, engine_for, pad, row_major

SCALED_GROUPED_MM = "scaled_grouped_mm"
BY_ROWS, _PLAIN = "rowwise", "plain"
"""The scaling of operands with a scale for each row, and of operands in high precision."""


class Groups(NamedTuple):
    """The assignment of sorted rows to groups.

    On a GPU, groups of an operand begin at multiples of 16, as the kernel's loads require, with
    zero codes in between and the largest possible number of places, so that nobody reads the sizes.
    A group without rows gets 16 rows of zeros. Elsewhere the last four fields are None. Rows after
    the last group are zeros in an operand, undefined in a result.
    """

    ids: torch.Tensor
    """int64 [rows], each row's group, rising; rows without a group have the last group's id."""
    ends: torch.Tensor
    """int32 [groups], the end of each group's rows: its begin is the end of the one before."""
    places: torch.Tensor | None = None
    """int64 [rows], the place of each row."""
    place_ends: torch.Tensor | None = None
    """int32 [groups], the end of each group's places."""
    owners: torch.Tensor | None = None
    """int32 [places], the group of each place."""
    sources: torch.Tensor | None = None
    """int32 [places], the row at each place, or -1."""

    @classmethod
    def of(cls, ids: torch.Tensor, groups: int) -> Groups:
        """Build from sorted ids; rows without a group have the id `groups`. Reads nothing on the
        host."""
        every = torch.arange(groups, device=ids.device, dtype=ids.dtype)
        ends = torch.searchsorted(ids, every, right=True, out_int32=True)
        ids = ids.clamp(max=groups - 1)
        built = cls(ids, ends, *_places_of(ids, ends)) if has_places(ids) else cls(ids, ends)
        if not torch.compiler.is_compiling():
            built.ends._fp8_rows, built.operand_ends._fp8_rows = [], []
        return built

    @property
    def operand_ends(self) -> torch.Tensor:
        """int32 [groups], the end of each group's rows in an operand."""
        return self.ends if self.place_ends is None else self.place_ends

    def placed(self, codes: torch.Tensor) -> torch.Tensor:
        """Move the rows of FP8 codes [rows, columns] to their places in a GPU's operand."""
        bits = codes.view(torch.uint8)  # index_copy has no float8 kernel
        return (
            bits.new_zeros(len(self.owners), bits.shape[1])
            .index_copy(0, self.places, bits)
            .view(codes.dtype)
        )

    def rows_of(self, result: torch.Tensor) -> torch.Tensor:
        """Undo `placed` for a product [rows of the operand, columns]."""
        return result if self.places is None else result.index_select(0, self.places)


def has_places(ids: torch.Tensor) -> bool:
    """Return True if operands on this device pad their groups."""
    return ids.device.type == "cuda" or usable(ids)


def _places_of(ids: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the last four fields of `Groups`."""
    begins = F.pad(ends.narrow(0, 0, len(ends) - 1), (1, 0))
    sizes = torch.clamp(ends - begins + ALIGNMENT - 1, min=ALIGNMENT) // ALIGNMENT * ALIGNMENT
    place_ends = torch.cumsum(sizes, 0, dtype=torch.int32)
    shift = place_ends - sizes - begins  # of each group's rows
    rows, groups = len(ids), len(ends)
    places = torch.arange(rows, device=ids.device) + shift.index_select(0, ids)
    every = torch.arange(
        (rows + ALIGNMENT * groups) // ALIGNMENT * ALIGNMENT, device=ids.device, dtype=torch.int32
    )
    owners = torch.searchsorted(place_ends, every, right=True, out_int32=True).clamp_(
        max=groups - 1
    )
    sources = every - shift.index_select(0, owners)
    return (
        places,
        place_ends,
        owners,
        torch.where(sources < ends.index_select(0, owners), sources, -1),
    )


def grouped_engine_for(device: torch.device) -> str:
    """Return the engine: `scaled_grouped_mm` on Hopper, elsewhere the engine of a single product
    with a bf16 result."""
    # a CUDA device without a driver is a fake tensor's, as in `engine_for`
    if device.type == "cuda" and (
        not hardware.has_gpu() or hardware.gpu_chip(device).grouped_products
    ):
        return SCALED_GROUPED_MM
    return engine_for(device, torch.bfloat16)


grouped_engine_for = torch.compiler.assume_constant_result(grouped_engine_for)


def grouped_product(
    a: Quantized,
    b: Quantized,
    groups: Groups,
    scaling: str = BY_ROWS,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """Return `a[row] @ b[group].T` for each row of a, with FP32 accumulation: [rows, at least n] of
    out_dtype.

    a: codes [places, k], scale_inv [places], laid out for an operand; with block scales codes
    [rows, k] and the scales of their blocks. b: codes [groups, n, k], scale_inv [groups, n] or
    [groups, rows of blocks, blocks in a row]. scaling: BY_ROWS, where zero codes may pad k and n,
    and out_dtype is bf16, or a rule with block scales.
    """
    if scaling != BY_ROWS:
        return torch.ops.fp8_backends.grouped_product(
            *a, *b, groups.ends, scaling, out_dtype, fast_accumulation
        )
    assert a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn, (
        "no GPU has grouped products of another format"
    )
    if grouped_engine_for(a.codes.device) != SCALED_GROUPED_MM:
        operands = (
            a.codes,
            a.scale_inv.unsqueeze(1),
            b.codes,
            b.scale_inv.unsqueeze(2),
            groups.operand_ends,
        )
        out = torch.ops.fp8_backends.grouped_product(
            *operands, scaling, torch.bfloat16, fast_accumulation
        )
    else:
        out = torch._scaled_grouped_mm(
            row_major(pad(a.codes, 1, ALIGNMENT)),
            row_major(pad(b.codes, ALIGNMENT, ALIGNMENT)).transpose(1, 2),  # column-major
            a.scale_inv,
            pad_scales(b.scale_inv),
            offs=groups.operand_ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_accumulation,
        )
    return groups.rows_of(out)


def grouped_wgrad(
    a: Quantized,
    b: Quantized,
    groups: Groups,
    scaling: str = BY_ROWS,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return `a[:, rows of g] @ b[:, rows of g].T` for each group, zeros for one without rows:
    [groups, at least m, at least k] of out_dtype. a, b: codes [m or k, places], scale_inv [groups,
    m or k], laid out for an operand; with block scales as `quantize_groups_in_blocks` transposes
    them."""
    if scaling != BY_ROWS:
        return torch.ops.fp8_backends.grouped_wgrad(*a, *b, groups.ends, scaling, out_dtype)
    assert a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn, (
        "no GPU has grouped products of another format"
    )
    if grouped_engine_for(a.codes.device) != SCALED_GROUPED_MM:
        return torch.ops.fp8_backends.grouped_wgrad(
            *a, *b, groups.operand_ends, scaling, torch.bfloat16
        )
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
    """Pad scales [groups, n] for padded codes [groups, n', k']."""
    missing = -scale_inv.shape[1] % ALIGNMENT
    return F.pad(scale_inv, (0, missing), value=1.0) if missing else scale_inv


def plain_product(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Compute `grouped_product` of plain operands [rows, k] and [groups, n, k] of one dtype, in
    this dtype."""
    if a.dtype == torch.bfloat16 and a.device.type == "cuda":
        n, operands = (
            b.shape[1],
            (row_major(pad(a, 1, ALIGNMENT)), pad(b, ALIGNMENT, ALIGNMENT).transpose(1, 2)),
        )
        return F.grouped_mm(*operands, offs=groups.ends).narrow(1, 0, n)
    return torch.ops.fp8_backends.grouped_product(
        a, None, b, None, groups.ends, _PLAIN, a.dtype, False
    )


def plain_wgrad(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Compute `grouped_wgrad` of plain operands [rows, m] and [rows, k] of one dtype, in this
    dtype."""
    if a.dtype == torch.bfloat16 and a.device.type == "cuda":
        left, right = (row_major(pad(operand, 1, ALIGNMENT)) for operand in (a, b))
        return (
            F.grouped_mm(left.t(), right, offs=groups.ends)
            .narrow(1, 0, a.shape[1])
            .narrow(2, 0, b.shape[1])
        )
    return torch.ops.fp8_backends.grouped_wgrad(
        a.t(), None, b.t(), None, groups.ends, _PLAIN, a.dtype
    )


# Group by group, in operators: no compiler knows the sizes of the groups

READS_SIZES = (torch.Tag.cudagraph_unsafe,)
"""Tags of such an operator: no CUDA graph can record it, and a compiler splits its graph around
it."""


def _product_by_group(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor | None,
    ends: torch.Tensor,
    scaling: str,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> torch.Tensor:
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    for group, begin, end in rows_of_groups(ends):
        rows, matrix = a.narrow(0, begin, end - begin), b.select(0, group)
        if scaling == _PLAIN:
            product = products.plain_product(rows, matrix)
        else:
            left = Quantized(rows, a_scale_inv.narrow(0, begin, end - begin))
            right = Quantized(matrix, b_scale_inv.select(0, group))
            product = fp8_product(RULES[scaling], left, right, out_dtype, True, fast_accumulation)
        out.narrow(0, begin, end - begin).copy_(product)
    return out


def _wgrad_by_group(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor | None,
    ends: torch.Tensor,
    scaling: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    out = a.new_empty(len(ends), a.shape[0], b.shape[0], dtype=out_dtype)
    rows = rows_of_groups(ends)
    for group in {*range(len(ends))} - {group for group, _, _ in rows}:
        out.select(0, group).zero_()
    for group, begin, end in rows:
        left, right = (codes.narrow(1, begin, end - begin) for codes in (a, b))
        if scaling == _PLAIN:
            product = products.plain_product(left, right)
        else:
            scales = a_scale_inv, b_scale_inv
            if scaling != BY_ROWS:
                scales = [
                    scale.narrow(1, *block_places(group, begin, end, RULES[scaling].blocks))
                    for scale in scales
                ]
            else:
                scales = [scale.select(0, group).unsqueeze(1) for scale in scales]
            operands = Quantized(left, scales[0]), Quantized(right, scales[1])
            product = fp8_product(RULES[scaling], *operands, out_dtype, False)
        out.select(0, group).copy_(product)
    return out


_product = torch.library.custom_op(
    "fp8_backends::grouped_product", _product_by_group, mutates_args=(), tags=READS_SIZES
)
_product.register_fake(
    lambda a, a_inv, b, b_inv, ends, scaling, dtype, fast: a.new_empty(
        a.shape[0], b.shape[1], dtype=dtype
    )
)
_wgrad = torch.library.custom_op(
    "fp8_backends::grouped_wgrad", _wgrad_by_group, mutates_args=(), tags=READS_SIZES
)
_wgrad.register_fake(
    lambda a, a_inv, b, b_inv, ends, scaling, dtype: a.new_empty(
        len(ends), a.shape[0], b.shape[0], dtype=dtype
    )
)


def rows_of_groups(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (group, begin, end) for each group with rows. Waits for the device: eager code once
    for all products of a layer, forward and backward, compiled code once for each."""
    rows = getattr(ends, "_fp8_rows", [])  # compiled code reuses memory: it has none
    if not rows:
        bounds = [0, *ends.tolist()]
        pairs = enumerate(zip(bounds, bounds[1:], strict=False))
        rows += [(group, begin, end) for group, (begin, end) in pairs if begin < end]
    return rows


def block_places(group: int, begin: int, end: int, blocks: Blocks) -> tuple[int, int]:
    """Return the first block of a group's rows, and the number of its blocks. No group's overlap
    another's."""
    return begin // blocks.columns + group, -(-(end - begin) // blocks.columns)
