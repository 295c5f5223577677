"""Scales for groups of rows that lie in one matrix, and for the weights of many experts.

Each group is quantized as if it were a tensor of its own, so an expert's codes are those that a Linear layer with its
weight and its tokens would make. On a CPU that is done one group after the other. Elsewhere nothing reads where a group
begins: the operations below work on all groups at once, and give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...numerics.formats import Format
from ...numerics.kernels.quantize.cpu_casts import serves
from ...numerics.kernels.quantize.dispatch import cast, quantize, quantize_blocks
from ...numerics.kernels.triton_gate import usable
from ...numerics.scaling import HISTORY, ROWS, SCALE, Quantized, scale_from_amax, scale_inv_of, without_nan
from .grouped_products import Groups, rows_of_groups


class GroupQuantized(NamedTuple):
    """Codes with one scale for each group."""

    codes: torch.Tensor
    """FP8 [rows, columns] of an activation, [groups, out, in] of a weight (of any strides)."""
    scale_inv: torch.Tensor
    """FP32 [groups]"""
    amax: torch.Tensor
    """FP32 [groups], NaN left out; 0 for a group without rows."""

    def t(self) -> GroupQuantized:
        """A weight's codes transposed, a view [groups, in, out]."""
        return self._replace(codes=self.codes.transpose(1, 2))

    def for_rows(self, groups: Groups) -> Quantized:
        """The first operand of `grouped_product`."""
        return Quantized(self.codes, self.scale_inv.index_select(0, groups.ids))

    def for_columns(self) -> Quantized:
        """An operand of `grouped_wgrad`, or the second one of `grouped_product`."""
        return Quantized(self.codes, self.scale_inv.unsqueeze(1).repeat(1, self.codes.shape[1]))


def quantize_groups(x: torch.Tensor, groups: Groups, fmt: Format, scale: torch.Tensor | None = None) -> GroupQuantized:
    """One scale for the rows of each group.

    Args:
        x: [rows, columns], bf16, fp16 or fp32.
        scale: FP32 [groups]; None: from the amaxes.
    """
    if serves(x):
        return _group_by_group(x, groups, fmt, scale)
    of_rows = ROWS.amax(x).squeeze(1)
    amax = of_rows.new_zeros(groups.ends.shape[0]).scatter_reduce(0, groups.ids, of_rows, "amax")
    scale = scale_from_amax(amax, fmt) if scale is None else scale
    codes = cast(x, scale.index_select(0, groups.ids).unsqueeze(1), fmt)
    return GroupQuantized(codes, scale_inv_of(scale, amax), amax)


def _group_by_group(x: torch.Tensor, groups: Groups, fmt: Format, scale: torch.Tensor | None) -> GroupQuantized:
    codes = torch.empty(x.shape, dtype=fmt.dtype)
    amax = torch.zeros(groups.ends.shape[0])
    scale_inv = scale_inv_of(torch.ones_like(amax) if scale is None else scale, amax)
    for group, begin, end in rows_of_groups(groups.ends):
        layouts = quantize(x[begin:end], fmt, None if scale is None else scale[group], columns=False)
        codes[begin:end], scale_inv[group], amax[group] = layouts.codes, layouts.scale_inv, layouts.amax
    return GroupQuantized(codes, scale_inv, amax)


def quantize_experts(weight: torch.Tensor, fmt: Format, scale: torch.Tensor | None = None) -> GroupQuantized:
    """One scale for each expert. weight: [experts, rows, columns]; scale: FP32 [experts], None: from the amaxes."""
    if serves(weight) or usable(weight):
        return _expert_by_expert(weight, fmt, scale)
    amax = ROWS.amax(weight.flatten(1)).squeeze(1)
    scale = scale_from_amax(amax, fmt) if scale is None else scale
    of_rows = scale.repeat_interleave(weight.shape[1]).unsqueeze(1)
    codes = cast(weight.reshape(-1, weight.shape[2]), of_rows, fmt).view(weight.shape)
    return GroupQuantized(codes, scale_inv_of(scale, amax), amax)


def _expert_by_expert(weight: torch.Tensor, fmt: Format, scale: torch.Tensor | None) -> GroupQuantized:
    codes, found = torch.empty_like(weight, dtype=fmt.dtype, memory_format=torch.contiguous_format), []
    for expert, matrix in enumerate(weight.unbind()):
        layouts = quantize(matrix, fmt, None if scale is None else scale[expert], columns=False)
        codes[expert] = layouts.codes
        found.append((layouts.scale_inv, layouts.amax))
    return GroupQuantized(codes, *map(torch.stack, zip(*found, strict=True)))


def quantize_rows(x: torch.Tensor, fmt: Format) -> Quantized:
    """One scale for each row of x [rows, columns]. scale_inv: [rows]."""
    if serves(x) or usable(x):
        layouts = quantize_blocks(x, ROWS, fmt, columns=False)
        return Quantized(layouts.codes, layouts.scale_inv.squeeze(1))
    amax = ROWS.amax(x)
    scale = scale_from_amax(amax, fmt)
    return Quantized(cast(x, scale, fmt), scale_inv_of(scale, amax).squeeze(1))


def quantize_rows_of_experts(weight: torch.Tensor, fmt: Format) -> Quantized:
    """One scale for each row of each expert. weight: [experts, n, k] of any strides; scale_inv: [experts, n]."""
    codes, scale_inv = quantize_rows(weight.reshape(-1, weight.shape[2]), fmt)
    return Quantized(codes.view(weight.shape), scale_inv.view(weight.shape[:2]))


def quantize_columns(x: torch.Tensor, groups: Groups, fmt: Format) -> Quantized:
    """One scale for each column of each group of x [rows, columns]. scale_inv: [groups, columns]."""
    if serves(x):
        return _columns_group_by_group(x, groups, fmt)
    amax = x.new_zeros(groups.ends.shape[0], x.shape[1])
    amax = amax.scatter_reduce(0, groups.ids.unsqueeze(1).expand_as(x), without_nan(x).abs_(), "amax").float()
    scale = scale_from_amax(amax, fmt)
    return Quantized(cast(x, scale.index_select(0, groups.ids), fmt), scale_inv_of(scale, amax))


def _columns_group_by_group(x: torch.Tensor, groups: Groups, fmt: Format) -> Quantized:
    codes = torch.empty(x.shape, dtype=fmt.dtype)
    scale_inv = torch.ones(groups.ends.shape[0], x.shape[1])
    for group, begin, end in rows_of_groups(groups.ends):
        layouts = quantize_blocks(x[begin:end], ROWS, fmt, rows=False)
        codes[begin:end], scale_inv[group] = layouts.transposed.t(), layouts.transposed_scale_inv.squeeze(1)
    return Quantized(codes, scale_inv)


# delayed scaling: the state of each expert, int32 [experts, 3, 2 + history length], laid out as a single layer's


def delayed_scales(states: torch.Tensor, tensor: int) -> torch.Tensor:
    """The scales in force for INPUT, WEIGHT or GRAD_OUTPUT. FP32 [experts]."""
    return states.view(torch.float32).select(1, tensor).select(1, SCALE)


def record_amaxes(states: torch.Tensor, tensor: int, amax: torch.Tensor) -> None:
    """history[0] = max(history[0], amax) of each expert, in place. Idempotent; NaN is ignored."""
    newest = states.view(torch.float32).select(1, tensor).select(1, HISTORY)
    newest.copy_(torch.fmax(newest, amax))
