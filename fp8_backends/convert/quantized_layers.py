"""Handle layers of an FP8 checkpoint: codes and scales that another library multiplies and freezes."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import FP8BackendError, RecipeError, Refusal
from ..formats.formats import E4M3
from ..formats.scaling import SQUARES, Blocks, Quantized
from ..tensors.block_codes import BlockCodes
from ..tensors.parameter_swap import refuse_if_held, swap
from ..tensors.sharded_tensor import is_distributed
from ..torch_tools.modules import check_is_module, plain_name
from ..words import shown

TRAINS = Refusal(
    "a layer that an FP8 checkpoint stores as codes and scales would never train: the library that multiplies it gives "
    "its weight no gradient",
    "call fp8_backends.checkpoints.dequantize(model) before the optimizer is made, and its weights train; or freeze "
    "them (requires_grad_(False)) under adapters",
)
LOAD_PLAIN = (
    "load the checkpoint with from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True)), or "
    "CompressedTensorsConfig(dequantize=True), and the model is plain"
)


class Kind(NamedTuple):
    title: str
    library: str
    """Module of the class. Unless it is imported, there is no such layer."""
    class_name: str
    scale: str
    added: tuple[str, ...]
    """Further parameters and attributes missing in a plain layer."""


FP8_LINEAR = Kind(
    "FP8Linear of transformers",
    "transformers.integrations.finegrained_fp8",
    "FP8Linear",
    "weight_scale_inv",
    ("activation_scale", "block_size", "has_bias", "activation_scheme", "_hf_quantized_needs_local_tp"),
)
ROWWISE_LINEAR = Kind(
    "CompressedTensorsFP8Linear of transformers",
    "transformers.integrations.compressed_tensors",
    "CompressedTensorsFP8Linear",
    "weight_scale",
    ("has_bias",),
)
NOT_LINEAR = Kind("FP8Experts of transformers", FP8_LINEAR.library, "FP8Experts", "", ())
COMPRESSED = Kind("Linear of compressed-tensors", "compressed_tensors", "", "weight_scale", ("quantization_status",))


def kind_of(module: nn.Module) -> Kind | None:
    if "quantization_scheme" in module.__dict__ and isinstance(module, nn.Linear):
        return COMPRESSED
    for kind in (FP8_LINEAR, ROWWISE_LINEAR, NOT_LINEAR):
        if isinstance(module, getattr(sys.modules.get(kind.library), kind.class_name, ())):
            return kind
    return None


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Kind]]:
    for name, module in model.named_modules():
        if kind := kind_of(module):
            yield plain_name(name), module, kind


def training_codes(model: nn.Module) -> list[str]:
    """Return the names of layers with codes and trainable parameters: these would not train."""
    return [
        name
        for name, module, kind in quantized_layers(model)
        if any(parameter.requires_grad for parameter in module._parameters.values() if parameter is not None)
    ]


def check(model: nn.Module) -> None:
    if names := training_codes(model):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RecipeError(f"{names[0]}{more}: {TRAINS}")


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> list[str]:
    """Make the layers of an FP8 checkpoint plain, in place: transformers' `FP8Linear`, and FP8 layers loaded by
    compressed-tensors. Modules and Parameters stay the same objects.

    Call it before the optimizer is made. Trainable weights stay trainable. The model forgets its quantization: trainers
    accept it, and it is saved plain.

    Args:
        model: such a model, or one that holds it. If transformers has already dequantized it while loading, only the
            memory of its quantization is removed; `prepare` does so as well.
        dtype: of the weights; default: dtype of the model's first parameter without codes.

    Returns:
        The names of the layers made plain.

    Raises:
        FP8BackendError: a layer is of another format (experts, 4 bits), or sharded, `model` is no module, or `dtype` no
            dtype; nothing has changed then.
    """
    check_is_module(model)
    if not isinstance(dtype, (torch.dtype, type(None))):
        raise FP8BackendError(f"dtype must be a torch.dtype, not {shown(dtype)}")
    layers = list(quantized_layers(model))
    dtype = dtype or _plain_dtype(model, layers)

    def values(layer: nn.Linear, kind: Kind) -> torch.Tensor:
        codes, scales = layer.weight.detach(), layer._parameters[kind.scale].detach().float()
        if scales.numel() == 1:
            return (codes.float() * scales.reshape(())).to(dtype)
        blocks = Blocks(*_block(layer, kind), SQUARES.scale, SQUARES.inverse)
        scales = scales.t() if kind is ROWWISE_LINEAR else scales
        return blocks.dequantize(Quantized(codes, scales), torch.float32).to(dtype)

    _replace_codes(layers, values)
    _forget(model)
    return [name for name, _, _ in layers]


def freeze_codes(model: nn.Module) -> None:
    """Store frozen FP8 layers with scales for 128 x 128 values as plain layers with `BlockCodes`, bit-exactly."""
    layers = [entry for entry in quantized_layers(model) if _has_square_blocks(*entry[1:])]
    dtype = _plain_dtype(model, layers)

    def codes(layer: nn.Linear, kind: Kind) -> torch.Tensor:
        scales = layer._parameters[kind.scale].detach().float().contiguous()
        return BlockCodes(layer.weight.detach(), scales, dtype)

    _replace_codes(layers, codes)
    if layers:
        _forget(model)


def _replace_codes(
    layers: list[tuple[str, nn.Module, Kind]], new_weight: Callable[[nn.Linear, Kind], torch.Tensor]
) -> None:
    """Make these layers plain with another weight, all of them or none."""
    for name, layer, kind in layers:
        _refuse(name, layer, kind)
    for name, layer, kind in layers:
        if layer.weight.dtype == E4M3.dtype:  # else tied to an earlier layer
            swap(layer.weight, new_weight(layer, kind), f"{name}.weight")
        _make_plain(layer, kind)


def _forget(model: nn.Module) -> None:
    for module in model.modules():
        quantizer = module.__dict__.get("hf_quantizer")
        if quantizer is not None and not any(quantized_layers(module)):
            if (compressor := getattr(quantizer, "compressor", None)) is not None:
                compressor.remove_decompression_hook(module)  # it would decompress the layers in the first forward
            quantizer.remove_quantization_config(module)
    save_plain(model)


def _has_square_blocks(layer: nn.Module, kind: Kind) -> bool:
    weight, scales = layer._parameters.get("weight"), layer._parameters.get(kind.scale)
    if weight is None or scales is None or weight.dtype != E4M3.dtype or scales.dim() != 2 or weight.requires_grad:
        return False
    is_linear = kind.class_name in ("", type(layer).__name__)  # a subclass has its own product
    return is_linear and _block(layer, kind) == (SQUARES.rows, SQUARES.columns)


def _plain_dtype(model: nn.Module, layers: list[tuple[str, nn.Module, Kind]]) -> torch.dtype:
    """Return the dtype of the first parameter outside these layers and wider than codes."""
    quantized = {id(layer) for _, layer, _ in layers}
    plain = (p for module in model.modules() if id(module) not in quantized for p in module._parameters.values())
    dtypes = (p.dtype for p in plain if p is not None and p.is_floating_point() and p.dtype.itemsize > 1)
    return next(dtypes, torch.get_default_dtype())


def _refuse(name: str, layer: nn.Module, kind: Kind) -> None:
    """Raise `FP8BackendError` if the codes of a layer cannot become values (any more)."""
    weight, scales = layer._parameters.get("weight"), layer._parameters.get(kind.scale)
    if weight is None or scales is None or weight.dtype != E4M3.dtype or weight.dim() != 2:
        what = "its weight is no matrix of E4M3 codes"
        if kind is COMPRESSED and weight is not None and weight.dtype.itemsize > 1:
            what = "compressed-tensors has decompressed it in a forward, and frozen it"
        raise FP8BackendError(f"{name}, {kind.title}: {what}; {LOAD_PLAIN}")
    if is_distributed(weight) or weight.is_meta:
        raise FP8BackendError(f"{name}: its codes are sharded, or not loaded yet: dequantize whole, loaded layers")
    block = _block(layer, kind)
    blocks = tuple(-(-size // side) for size, side in zip(weight.shape, block, strict=True))
    shape = scales.shape if kind is not ROWWISE_LINEAR else scales.shape[::-1]
    if tuple(shape) not in ((), (1,), (1, 1), blocks):
        raise FP8BackendError(
            f"{name}, {kind.title}: scales of shape {tuple(scales.shape)} do not go with a weight of shape "
            f"{tuple(weight.shape)} and blocks of {block[0]} x {block[1]}; {LOAD_PLAIN}"
        )
    refuse_if_held(weight, f"{name}.weight")


def _block(layer: nn.Linear, kind: Kind) -> tuple[int, int]:
    """Return the rows and columns of a layer's weight under one scale, if it has several."""
    rows, columns = layer.weight.shape
    if kind is COMPRESSED:
        return tuple(layer.quantization_scheme.weights.block_structure or (1, columns))
    return (1, columns) if kind is ROWWISE_LINEAR else tuple(layer.block_size or (rows, columns))


def _make_plain(layer: nn.Linear, kind: Kind) -> None:
    if kind is COMPRESSED:
        from compressed_tensors.quantization import QuantizationMetadata

        QuantizationMetadata.clear_quantization(layer)
        layer.__dict__.pop("forward", None)  # the class's own, bound to the layer
    for name in (kind.scale, *kind.added):
        layer._parameters.pop(name, None)
        layer.__dict__.pop(name, None)
    if type(layer).__name__ == kind.class_name:  # a subclass multiplies plain weights in its own way
        layer.__class__ = nn.Linear


def save_plain(model: nn.Module) -> None:
    """Make `save_pretrained` write plain weights of a dequantized model: transformers would write codes again."""
    for module in model.modules():
        conversions: list[Any] | None = module.__dict__.get("_weight_conversions")
        if conversions and module.__dict__.get("hf_quantizer") is None:
            module._weight_conversions = [plain for conversion in conversions for plain in _without_codes(conversion)]


def _without_codes(conversion: Any) -> Iterator[Any]:
    """Yield transformers' conversion for a plain checkpoint; nothing if it only dequantizes."""
    operations = getattr(conversion, "operations", ())
    kept = [operation for operation in operations if getattr(operation, "hf_quantizer", None) is None]
    if len(kept) == len(operations):
        yield conversion
    elif kept:
        targets, sources = conversion._original_target_patterns, conversion._original_source_patterns
        # scales were collected with their weights
        weight = sources[0].rpartition(".")[2]
        sources = [source for source in sources if source.rpartition(".")[2] == weight]
        yield conversion.copy(sources, targets, operations=kept)
