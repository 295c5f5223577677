"""Write a trained model as an FP8 checkpoint for stock transformers:
`fp8_backends.checkpoints.export`.

Codes are E4M3 and scales FP32 (E8M0 of MXFP8): value = code * scale. Coarser codes fit into a finer
grid with repeated scales. NVFP4 and MXFP4 have the layouts of `tensors.block_codes`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..announcement import announce, is_main_process
from ..comm import fsdp2
from ..compute import registry
from ..compute.fields import check_known
from ..convert import quantized_layers
from ..convert.conversion import prepared_roots, unwrapped
from ..convert.weight_products import Found, find_weight_products
from ..errors import FP8BackendError, on_all_ranks
from ..formats.formats import E4M3
from ..formats.scaling import MX, POWER_OF_TWO, ROWS, SQUARES, Quantized, e8m0_values
from ..kernels import quantize as quantization
from ..tensors.block_codes import MODELOPT_NVFP4, PACKED_MXFP4, PACKED_NVFP4, BlockCodes, is_decoded
from ..tensors.scaled_tensor import WithoutMemory, dequantize_shards
from ..tensors.sharded_tensor import is_distributed, local_part
from ..torch_tools.modules import check_is_module, plain_name
from ..words import by_reason, counted, listed

TENSOR, CHANNEL, BLOCK, GROUP, OTHER = "tensor", "channel", "block", "group", "other"
"""Values under one scale: all, a row, 128 x 128, 32 of a row. The words of compressed-tensors."""
GROUP4 = "4-bit group"
FOUR_BITS = {"tensor_group": PACKED_NVFP4, GROUP4: PACKED_MXFP4}
"""16 or 32 values of a row under one scale, in four bits, with our layouts."""
IN_WORDS = {
    TENSOR: "one scale for all values",
    CHANNEL: "one scale for a row",
    BLOCK: "one scale for 128 x 128 values",
    GROUP: "one scale for 32 values",
    OTHER: "scales of another kind, or are not E4M3",
}
FITS_INTO = {
    TENSOR: (TENSOR, CHANNEL, BLOCK),
    CHANNEL: (CHANNEL,),
    BLOCK: (BLOCK,),
    GROUP: (GROUP,),
}
"""Grids of a file for the unchanged codes of a grid."""
SIDE = SQUARES.rows


@dataclass
class Export:
    """A record of `export`."""

    folder: str
    format: str
    grid: str
    """Values under one scale in the file: `tensor`, `channel` (a row), `block` (128 x 128), `group`
    (MXFP8), `tensor_group` (NVFP4) or `4-bit group` (MXFP4)."""
    exact: list[str] = field(default_factory=list)
    """Layers with the current codes of their products."""
    rounded: dict[str, str] = field(default_factory=dict)
    """Layers whose exact weights were rounded to codes for the file, with the reason."""
    high_precision: dict[str, str] = field(default_factory=dict)
    """The other weights, unchanged in the file, with the reason."""

    def __str__(self) -> str:
        fmt = FOUR_BITS[self.grid].name if self.grid in FOUR_BITS else "FP8"
        parts = (
            [f"{counted(len(self.exact), 'weight')} as the {fmt} codes that training used"]
            if self.exact
            else []
        )
        parts += [
            f"{len(names)} rounded to {fmt} ({why})"
            for why, names in by_reason(self.rounded.items())
        ]
        high = by_reason(self.high_precision.items())
        parts += [f"{listed(names)} in high precision ({why})" for why, names in high]
        return f"{self.folder}, {self.format}: {'; '.join(parts)}"


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    format: str = "finegrained_fp8",
    *,
    max_shard_size: int | str = "50GB",
) -> Export:
    """Write a prepared transformers model as an FP8 checkpoint for stock `from_pretrained`.

    FP8 layers are written as E4M3 codes and scales, everything else unchanged. If the format has
    scales for the codes of training, these are written bit-exactly; else the weights are rounded to
    codes. The model stays unchanged.

    On several ranks all of them call it, and the first writes.

    Args:
        model: a prepared transformers model, possibly inside DDP, FSDP2 or `torch.compile`.
        folder: for `config.json` and `model.safetensors`, as with `save_pretrained`. Save a
            tokenizer separately.
        format: `finegrained_fp8`, transformers' own, with a scale for 128 x 128 values;
            `compressed-tensors`, with the scales of the recipe; or its `nvfp4-pack-quantized` or
            `mxfp4-pack-quantized`, with the unchanged codes of a frozen 4-bit base, all other
            weights rounded.
        max_shard_size: of one file, as in `save_pretrained`.

    Raises:
        RecipeError: an unknown format.
        FP8BackendError: another kind of model, a weight is not finite, or nothing would be in FP8.
    """
    check_known("format", format, CHECKPOINT_FORMATS)
    check_is_module(model)
    model = unwrapped(model)
    if not callable(getattr(model, "save_pretrained", None)) or not hasattr(model, "config"):
        name = type(model).__name__
        raise FP8BackendError(
            f"{name} is no transformers model: save it with safetensors.torch.save_model"
        )
    codes = LayerCodes(model, CHECKPOINT_FORMATS[format])
    result = Export(os.fspath(folder), format, codes.grid, high_precision=codes.high_precision)
    writes = is_main_process()

    def stored(name: str, weight: torch.Tensor) -> Quantized | BlockCodes | None:
        return _stored(name, weight, codes, result)

    def state_to_write() -> None:
        for names, tensor in codes.tensors(stored, writes):
            if writes:
                state.update(dict.fromkeys(names, tensor.cpu()))  # ties stay ties
        if not result.exact and not result.rounded:
            groups = by_reason(result.high_precision.items())
            texts = "; ".join(f"{listed(names)}: {why}" for why, names in groups)
            raise FP8BackendError(
                f"format={format!r} can hold no weight of this model in FP8: {texts}"
            )

    def write() -> None:
        quantized_layers.save_plain(model)
        with _quantization_config(model, codes, result):
            model.save_pretrained(result.folder, state_dict=state, max_shard_size=max_shard_size)

    state: dict[str, torch.Tensor] = {}
    on_all_ranks("export", state_to_write)
    on_all_ranks("export", write if writes else lambda: None)
    announce(f"exported: {result}")
    return result


def _split(model: nn.Module, fmt: CheckpointFormat) -> tuple[dict[str, Found], dict[str, str]]:
    """Return the layers to write as codes, by name, and the reasons to write the other weights
    unchanged."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise FP8BackendError(
            "DeepSpeed ZeRO-3 shards the weights: save with it, load the result, and export that"
        )
    weights = find_weight_products(model)
    if any(weight.product.kind == "adapter" for weight in weights) or hasattr(model, "peft_config"):
        raise FP8BackendError(
            "the model has adapters: fp8_backends.restore(model), merge_and_unload(), "
            "prepare(model, None, spec) first"
        )
    if foreign := [name for name, _, _ in quantized_layers.quantized_layers(model)]:
        raise FP8BackendError(
            f"{listed(foreign)}: FP8 layers of a file: call "
            "fp8_backends.checkpoints.dequantize(model) before prepare"
        )
    if not any(weight.conversion for weight in weights):
        raise FP8BackendError(
            "no layer of this model is prepared: fp8_backends.prepare(model, None, "
            '"native:blockwise") comes first'
        )
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(plain_name(name))
    reported = {
        plain_name(f"{prefix}.{name}".strip(".")): why
        for prefix, _, prepared in prepared_roots(model)
        for name, why in prepared.report.high_precision.items()
    }
    layers, reasons = {}, {}
    for weight in weights:
        name = weight.product.name
        if weight.conversion is None and not (fmt.is_4_bit and _base_of(weight) is not None):
            reasons[name] = reported.get(name) or weight.product.reason
        elif weight.part:
            reasons[name] = "the weights of experts lie in one Parameter"
        elif weight.linear is not weight.module:
            reasons[name] = (
                f"transformers reads FP8 codes of Linear layers alone, not of {weight.product.kind}"
            )
        elif others := [
            other
            for other in owners[id(weight.module.weight)]
            if other != f"{name}.weight".lstrip(".")
        ]:
            reasons[name] = f"its weight is that of {', '.join(others)} too"
        else:
            layers[name] = weight
    return layers, reasons


def _base_of(layer: Found) -> BlockCodes | None:
    """Return the weight of a layer with codes of a 4-bit checkpoint."""
    weight = local_part(layer.module._parameters.get("weight"))
    return weight.detach() if is_decoded(weight) else None


class LayerCodes:
    """The present codes of a model's layers in one format.

    FSDP2 gathers a unit as for a forward, one at a time, so all ranks call each function.
    """

    def __init__(self, model: nn.Module, format: CheckpointFormat) -> None:
        self.model, self.format = model, format
        self.layers, self.high_precision = _split(model, format)
        self._units = {
            id(m): unit for unit in fsdp2.fsdp_modules(model).values() for m in unit.modules()
        }
        self._gathered: nn.Module | None = None
        products = {name: layer.product for name, layer in self.layers.items()}
        self.shapes = {
            name: (product.out_features, product.in_features) for name, product in products.items()
        }
        # codes are made twice: those of all layers at once would take a byte an element
        with contextlib.closing(self):
            self.grids = {name: grid_of(self.of(name)) for name in self.layers}
        self.grid = grid_for(
            format, [(self.shapes[name], grid) for name, grid in self.grids.items()]
        )

    def of(self, name: str) -> Quantized | BlockCodes | None:
        """Return the codes of a layer, in four bits those of a frozen base; None if its backend
        does not tell them."""
        layer = self.layers[name]
        unit = self._units.get(id(layer.module))
        if unit is not self._gathered:
            self.close()
            if unit is not None:
                unit.unshard()
            self._gathered = unit
        if self.format.is_4_bit:
            base = _base_of(layer)
            if base is None or unit is None:
                return base
            return base.clone()
        conversion = layer.conversion  # none after a restore
        codes = conversion and registry.get_compute(conversion.recipe.compute).weight_codes(
            layer.module
        )
        # FSDP2 frees what it has gathered
        return (
            codes if codes is None or unit is None else Quantized(*(part.clone() for part in codes))
        )

    def close(self) -> None:
        if self._gathered is not None:
            self._gathered.reshard()
        self._gathered = None

    def tensors(
        self,
        stored: Callable[[str, torch.Tensor], Quantized | BlockCodes | None],
        takes: bool = True,
    ) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Yield each tensor with its names, several for a tied one. `stored`: (layer, weight) ->
        codes and scales, or None for the weight itself. `takes`: False leaves out tensors that need
        no other rank."""
        by_value: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            by_value.setdefault(id(value), (value, []))[1].append(plain_name(name))
        with contextlib.closing(self):
            for value, names in by_value.values():
                layer, _, part = names[0].rpartition(".")
                codes = stored(layer, value) if part == "weight" and layer in self.layers else None
                if isinstance(codes, BlockCodes):
                    parts = zip(codes.code_layout.parts, codes.parts, strict=True)
                    yield from (([f"{layer}.{part}".lstrip(".")], tensor) for part, tensor in parts)
                elif codes is not None:
                    yield names, codes.codes
                    scales = self.format.scales_of(codes, self.grid)
                    yield [f"{layer}.{self.format.scale}".lstrip(".")], scales
                elif takes or is_distributed(value):
                    yield names, _whole(value)

    def inexact(self, name: str, grid: str | None) -> str:
        """Return the reason why the format does not hold the codes of a layer, which have this
        grid."""
        if grid is None:
            is_cut = is_distributed(self.layers[name].module.weight)
            return "it is sharded" if is_cut else "its backend does not tell its codes"
        return f"its codes have {IN_WORDS[grid]}, and the file has {IN_WORDS[self.grid]}"

    def config(self, high_precision: Iterable[str], in_fp8: list[str]) -> dict[str, Any]:
        # the name of a Parameter excludes its module
        parts = {
            weight.product.name: f".{weight.part}"
            for weight in find_weight_products(self.model)
            if weight.part
        }
        plain = sorted({name.removesuffix(parts.get(name, "")) for name in high_precision})
        return self.format.config(self.grid, plain, in_fp8)


def _stored(
    name: str, weight: torch.Tensor, codes: LayerCodes, result: Export
) -> Quantized | BlockCodes | None:
    """Return the codes of a layer for the file, and record it in the result; None to write the
    weight itself."""
    if result.grid in FOUR_BITS:
        return _stored_in_four_bits(name, weight, codes.of(name), result)
    grid, stored = codes.grids[name], codes.of(name)
    is_exact = result.grid in FITS_INTO.get(grid, ())
    if not is_exact:
        stored = rounded(_whole(weight), result.grid)
    checked(name, stored)
    scales_are_equal = bool((stored.scale_inv == stored.scale_inv.reshape(-1)[0]).all())
    if reason := codes.format.unfit(tuple(stored.codes.shape), result.grid, scales_are_equal):
        result.high_precision[name] = reason
        return None
    if is_exact:
        result.exact.append(name)
    else:
        result.rounded[name] = codes.inexact(name, grid)
    return stored


def checked(name: str, codes: Quantized) -> Quantized:
    """Return finite codes. Raise `FP8BackendError` for others."""
    scales = (
        e8m0_values(codes.scale_inv) if codes.scale_inv.dtype == torch.uint8 else codes.scale_inv
    )
    if not bool(torch.isfinite(scales).all()) or bool(torch.isnan(codes.codes.float()).any()):
        raise FP8BackendError(f"{name}: its weight is not finite")
    return codes


def _stored_in_four_bits(
    name: str, weight: torch.Tensor, codes: BlockCodes | None, result: Export
) -> BlockCodes | None:
    layout, stored = FOUR_BITS[result.grid], codes
    if weight.shape[1] % layout.blocks.columns:
        result.high_precision[name] = (
            f"its inputs do not divide into blocks of {layout.blocks.columns}"
        )
        return None
    if codes is not None and (codes.code_layout, layout) == (MODELOPT_NVFP4, PACKED_NVFP4):
        stored = BlockCodes(
            (*codes.parts[:2], codes.tensor_scale.reciprocal().reshape(1)), codes.dtype, layout
        )
    if (
        stored is not None
        and stored.code_layout is layout
        and torch.equal(stored.exact(), codes.exact())
    ):
        result.exact.append(name)
    else:
        result.rounded[name] = (
            "it is plain" if codes is None else f"it was {codes.code_layout.name}"
        )
        stored = BlockCodes.encoded(_whole(weight), layout)
    if not bool(torch.isfinite(stored.exact()).all()):
        raise FP8BackendError(f"{name}: its weight is not finite; nothing was written")
    return stored


@torch.no_grad()
def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return exact plain values of a Parameter or buffer. All ranks call it for a shard."""
    if is_distributed(value):
        return dequantize_shards(value).full_tensor()
    return value.exact() if isinstance(value, WithoutMemory) else value.detach()


@contextlib.contextmanager
def _quantization_config(model: nn.Module, codes: LayerCodes, result: Export) -> Iterator[None]:
    """Describe the codes in the model's configuration, and hide the ranks: transformers would wait
    for all of them."""
    attributes = model.config.__dict__
    before = {
        name: attributes.pop(name, None) for name in ("quantization_config", "distributed_config")
    }
    model.config.quantization_config = codes.config(
        result.high_precision, [*result.exact, *result.rounded]
    )
    try:
        yield
    finally:
        del model.config.quantization_config
        attributes.update({name: value for name, value in before.items() if value is not None})


# Grids


def grid_of(codes: Quantized | None) -> str | None:
    """Return the grid of codes; None without codes."""
    if codes is None or codes.codes.dtype != E4M3.dtype:
        return None if codes is None else OTHER
    rows, columns = codes.codes.shape
    if codes.scale_inv.dtype == torch.uint8:
        return GROUP if codes.scale_inv.shape == (rows, -(-columns // MX.columns)) else OTHER
    # one block is a block
    shapes = {(): TENSOR, (rows, 1): CHANNEL, _blocks_of(rows, columns): BLOCK}
    return shapes.get(tuple(codes.scale_inv.shape), OTHER)


def grid_for(fmt: CheckpointFormat, weights: Sequence[tuple[tuple[int, int], str | None]]) -> str:
    """Return the coarsest grid for the unchanged codes of most weights, else the finest for most
    weights rounded."""

    def worth(grid: str) -> tuple[int, ...]:
        fit = [codes for shape, codes in weights if fmt.unfit(shape, grid, codes == TENSOR) is None]
        exact = sum(grid in FITS_INTO.get(codes, ()) for codes in fit)
        fineness = fmt.grids.index(grid)
        # none is rounded to groups
        return (exact, -fineness) if exact else (0, len(fit) * (grid != GROUP), fineness)

    return max(fmt.grids, key=worth)


def rounded(values: torch.Tensor, grid: str) -> Quantized:
    if grid == TENSOR:
        return quantization.quantize(values, E4M3, columns=False, how=POWER_OF_TWO).along_columns()
    blocks = {CHANNEL: ROWS, BLOCK: SQUARES, GROUP: MX}[grid]
    return quantization.quantize_blocks(values, blocks, E4M3, columns=False).along_columns()


def _blocks_of(*sizes: int) -> tuple[int, ...]:
    return tuple(-(-size // SIDE) for size in sizes)


# Formats


def _unfit_for_finegrained(sizes: tuple[int, int], grid: str, scales_are_equal: bool) -> str | None:
    """Refuse uneven blocks: transformers without a GPU divides each size by the number of scales
    along it."""
    blocks = _blocks_of(*sizes)
    if any(size % number for size, number in zip(sizes, blocks, strict=True)):
        return f"sizes {sizes[0]} x {sizes[1]} do not divide into equal blocks, which transformers asks for"
    cut_alike = all(
        number == 1 or size == number * SIDE for size, number in zip(sizes, blocks, strict=True)
    )
    if cut_alike or scales_are_equal:
        return None
    return f"sizes {sizes[0]} x {sizes[1]} are no multiples of {SIDE}, and transformers would cut other blocks"


def _unfit_for_compressed(sizes: tuple[int, int], grid: str, scales_are_equal: bool) -> str | None:
    group = {BLOCK: SIDE, GROUP: MX.columns}.get(grid, 1)
    reason = f"{sizes[1]} inputs do not divide into the groups of {group} that {grid}s multiply"
    return reason if sizes[1] % group else None


def _finegrained_config(grid: str, plain: list[str], in_fp8: list[str]) -> dict[str, Any]:
    # transformers takes each name for the end of longer ones too, and for a regular expression
    is_end = {name: any(layer.endswith(name) for layer in in_fp8) for name in plain}
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIDE, SIDE],
        "modules_to_not_convert": [
            f"^{re.escape(name)}$" if is_end[name] else name for name in plain
        ],
    }


def _compressed_config(grid: str, plain: list[str], in_fp8: list[str]) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**numbers, "dynamic": False, "strategy": grid}
    fmt, inputs = "float-quantized", {**numbers, "dynamic": True, "strategy": "token"}
    if layout := FOUR_BITS.get(grid):
        fmt, inputs = f"{layout.name.lower()}-pack-quantized", None  # inputs in high precision
        scale_dtype = str(layout.parts["weight_scale"])
        weights["strategy"] = "group" if grid == GROUP4 else grid
        weights |= {"num_bits": 4, "group_size": layout.blocks.columns, "scale_dtype": scale_dtype}
    elif grid == BLOCK:
        weights["block_structure"] = [SIDE, SIDE]
        inputs |= {"strategy": "group", "group_size": SIDE}
    elif grid == GROUP:
        fmt = "mxfp8-quantized"
        mx = {
            "strategy": "group",
            "group_size": MX.columns,
            "scale_dtype": "torch.uint8",
            "zp_dtype": "torch.uint8",
        }
        weights, inputs = weights | mx, inputs | mx
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": plain,
    }


class CheckpointFormat(NamedTuple):
    scale: str
    grids: tuple[str, ...]
    """Supported grids, the coarsest first."""
    scale_of_tensor: tuple[int, ...]
    """Shape of the scale of a whole weight."""
    unfit: Callable[[tuple[int, int], str, bool], str | None]
    """(shape, grid, all scales are equal) -> reason why readers would find other values; or
    None."""
    config: Callable[[str, list[str], list[str]], dict[str, Any]]
    """(grid, modules in high precision, FP8 layers) -> `quantization_config` of `config.json`."""

    @property
    def is_4_bit(self) -> bool:
        return self.grids[0] in FOUR_BITS

    def scales_of(self, codes: Quantized, grid: str) -> torch.Tensor:
        """Return scales as the file has them, repeated for a finer grid."""
        rows, columns = codes.codes.shape
        shapes = {
            TENSOR: self.scale_of_tensor,
            CHANNEL: (rows, 1),
            BLOCK: _blocks_of(rows, columns),
        }
        scales = codes.scale_inv.expand(shapes.get(grid, codes.scale_inv.shape))
        return scales.clone(memory_format=torch.contiguous_format)


CHECKPOINT_FORMATS = {
    "finegrained_fp8": CheckpointFormat(
        "weight_scale_inv", (BLOCK,), (), _unfit_for_finegrained, _finegrained_config
    ),
    "compressed-tensors": CheckpointFormat(
        "weight_scale",
        (TENSOR, CHANNEL, BLOCK, GROUP),
        (1,),
        _unfit_for_compressed,
        _compressed_config,
    ),
    **{
        f"{layout.name.lower()}-pack-quantized": CheckpointFormat(
            "", (grid,), (), lambda *_: None, _compressed_config
        )
        for grid, layout in FOUR_BITS.items()
    },
}
