"""The FP8 checkpoints that others load: how codes and scales of a weight lie in them, and what `config.json` says.

=====================  ====================================  ==========================================================
format                 read by                               scales of a weight [out, in]
=====================  ====================================  ==========================================================
`finegrained_fp8`      transformers' FineGrainedFP8Config    `weight_scale_inv`: one for 128 x 128 values
`compressed-tensors`   transformers with the package of      `weight_scale`: one, one a row, or one for 128 x 128
                       that name
=====================  ====================================  ==========================================================

Codes are E4M3 and scales FP32: value = code * scale. A scale that stands for more values than the file has it for is
written several times, so coarser codes fit into a finer grid as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..numerics.formats import E4M3
from ..numerics.kernels import quantize as quantization
from ..numerics.kernels.layouts import POWER_OF_TWO
from ..numerics.scaling import ROWS, SQUARES, Quantized

TENSOR, CHANNEL, BLOCK = "tensor", "channel", "block"
"""How many values share a scale: all, a row, 128 x 128. The words of compressed-tensors."""
IN_WORDS = {
    TENSOR: "one scale for all values",
    CHANNEL: "one scale for a row",
    BLOCK: "one scale for 128 x 128 values",
    None: "scales of another kind",
}
FITS_INTO = {TENSOR: (TENSOR, CHANNEL, BLOCK), CHANNEL: (CHANNEL,), BLOCK: (BLOCK,)}
"""The grids that can hold codes of a grid without a change."""
SIDE = SQUARES.rows


class CheckpointFormat(NamedTuple):
    """One format of FP8 checkpoints."""

    scale: str
    """The name of the scales beside `weight`."""
    grids: tuple[str, ...]
    """Those that it has, the coarsest first."""
    scale_of_tensor: tuple[int, ...]
    """The shape in which it has the one scale of a weight."""
    unfit: Callable[[tuple[int, int], str, bool], str | None]
    """Why it cannot hold the codes of a weight so that every reader finds the same values; or None. Of the weight's
    shape, the grid, and whether all its scales are equal."""
    config: Callable[[str, list[str], list[str]], dict[str, Any]]
    """The `quantization_config` of `config.json`: of a grid, of the modules that are not in FP8, and of the layers that
    are."""


def grid_of(codes: Quantized | None) -> str | None:
    """The grid of these scales; None for one that no format has (MXFP8's), and where there are no codes."""
    if codes is None or codes.codes.dtype != E4M3.dtype or codes.scale_inv.dtype != torch.float32:
        return None
    rows, columns = codes.codes.shape
    shapes = {(): TENSOR, (rows, 1): CHANNEL, _blocks_of(rows, columns): BLOCK}  # one block is a block
    return shapes.get(tuple(codes.scale_inv.shape))


def grid_for(fmt: CheckpointFormat, weights: Sequence[tuple[tuple[int, int], str | None]]) -> str:
    """The coarsest of the grids that hold the codes of most weights as they are; where no grid holds any, the finest of
    those that hold most weights rounded. `weights`: the shape of each, and the grid of its codes."""

    def worth(grid: str) -> tuple[int, ...]:
        fit = [its for shape, its in weights if fmt.unfit(shape, grid, its == TENSOR) is None]
        exact = sum(grid in FITS_INTO.get(its, ()) for its in fit)
        fineness = fmt.grids.index(grid)
        return (exact, -fineness) if exact else (0, len(fit), fineness)

    return max(fmt.grids, key=worth)


def rounded(values: torch.Tensor, grid: str) -> Quantized:
    """Plain values [out, in] as codes of that grid, with scales from their own maxima."""
    if grid == TENSOR:
        return quantization.quantize(values, E4M3, columns=False, rule=POWER_OF_TWO).along_columns()
    blocks = SQUARES if grid == BLOCK else ROWS
    return quantization.quantize_blocks(values, blocks, E4M3, columns=False).along_columns()


def spread(codes: Quantized, grid: str, fmt: CheckpointFormat) -> torch.Tensor:
    """The scales of codes that fit into a grid, as the format has them there. FP32, of their own memory."""
    rows, columns = codes.codes.shape
    shape = {TENSOR: fmt.scale_of_tensor, CHANNEL: (rows, 1), BLOCK: _blocks_of(rows, columns)}[grid]
    return codes.scale_inv.expand(shape).clone()


def _blocks_of(*sizes: int) -> tuple[int, ...]:
    return tuple(-(-size // SIDE) for size in sizes)


# transformers' FineGrainedFP8Config


def _unfit_for_finegrained(sizes: tuple[int, int], grid: str, scales_are_equal: bool) -> str | None:
    """transformers without a GPU divides each size by the number of scales along it, whatever is left."""
    blocks = _blocks_of(*sizes)
    if any(size % number for size, number in zip(sizes, blocks, strict=True)):
        return f"sizes {sizes[0]} x {sizes[1]} do not divide into equal blocks, which transformers asks for"
    cut_alike = all(number == 1 or size == number * SIDE for size, number in zip(sizes, blocks, strict=True))
    if cut_alike or scales_are_equal:
        return None
    return f"sizes {sizes[0]} x {sizes[1]} are no multiples of {SIDE}, and transformers would cut other blocks"


def _finegrained_config(grid: str, left: list[str], in_fp8: list[str]) -> dict[str, Any]:
    # transformers takes each name for the end of longer ones too, and for a regular expression
    is_end = {name: any(layer.endswith(name) for layer in in_fp8) for name in left}
    left = [f"^{re.escape(name)}$" if is_end[name] else name for name in left]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIDE, SIDE],
        "modules_to_not_convert": left,
    }


# compressed-tensors


def _unfit_for_compressed(sizes: tuple[int, int], grid: str, scales_are_equal: bool) -> str | None:
    columns = sizes[1]
    if grid == BLOCK and columns % SIDE:
        return f"{columns} inputs do not divide into the groups of {SIDE} that blocks multiply"
    return None


def _compressed_config(grid: str, left: list[str], in_fp8: list[str]) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**numbers, "dynamic": False, "strategy": grid}
    inputs = {**numbers, "dynamic": True, "strategy": "token"}
    if grid == BLOCK:
        weights["block_structure"] = [SIDE, SIDE]
        inputs |= {"strategy": "group", "group_size": SIDE}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": left,
    }


FORMATS = {
    "finegrained_fp8": CheckpointFormat("weight_scale_inv", (BLOCK,), (), _unfit_for_finegrained, _finegrained_config),
    "compressed-tensors": CheckpointFormat(
        "weight_scale", (TENSOR, CHANNEL, BLOCK), (1,), _unfit_for_compressed, _compressed_config
    ),
}
