"""Handle layers of a checkpoint in 8 or 4 bits: codes and scales that another library multiplies
and freezes."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..compute.interface import Compute, Recipe
from ..errors import FP8BackendError, RecipeError, Refusal
from ..formats.formats import E4M3
from ..formats.scaling import SQUARES, e8m0_values
from ..tensors.block_codes import (
    RAW_CODES,
    SQUARE_CODES,
    BlockCodes,
    CodeLayout,
    dequantize_bias,
    e4m3_layout,
    layout_of,
)
from ..tensors.parameter_swap import refuse_if_held, swap
from ..tensors.sharded_tensor import is_distributed, local_part
from ..torch_tools.modules import (
    CONVERSION,
    check_is_module,
    forward_obstacle,
    part_layer,
    plain_name,
)
from ..words import listed, shown

CODES_NEVER_TRAIN = Refusal(
    "a layer that a checkpoint stores as codes and scales would never train: the library that "
    "multiplies it gives its weight no gradient",
    "call fp8_backends.checkpoints.dequantize(model) before the optimizer is made, and its weights "
    "train; or freeze them under adapters: requires_grad_(False), and for 4 bits "
    "fp8_backends.checkpoints.freeze_codes(model) before PEFT",
)
RAW_TRAINS = Refusal(
    "its parameters are raw float8, and train: an update of ordinary size is smaller than half a "
    "step of float8, and PyTorch's optimizers do not compute in it",
    "freeze the layer under adapters, requires_grad_(False); or model.to(torch.bfloat16), and it "
    "trains",
)
LOAD_PLAIN = (
    "load the checkpoint with from_pretrained(..., "
    "quantization_config=FineGrainedFP8Config(dequantize=True)), or "
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
    (
        "activation_scale",
        "block_size",
        "has_bias",
        "activation_scheme",
        "_hf_quantized_needs_local_tp",
    ),
)
ROWWISE_LINEAR = Kind(
    "CompressedTensorsFP8Linear of transformers",
    "transformers.integrations.compressed_tensors",
    "CompressedTensorsFP8Linear",
    "weight_scale",
    ("has_bias",),
)
EXPERTS = Kind(
    "FP8Experts of transformers",
    FP8_LINEAR.library,
    "FP8Experts",
    "_scale_inv",
    (
        "gate_up_proj_activation_scale",
        "down_proj_activation_scale",
        "block_size",
        "activation_scheme",
        "_hf_quantized_needs_local_tp",
    ),
)
"""Each 3-D weight has scales by its own name: `scale` is the end of it."""
WITHOUT_BACKWARD = {
    "Mxfp4GptOssExperts": "from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True))",
    "NVFP4Linear": "a checkpoint of compressed-tensors",
}
"""Modules of transformers without gradients of their inputs, and the fix."""
COMPRESSED = Kind(
    "Linear of compressed-tensors",
    "compressed_tensors",
    "",
    "weight_scale",
    ("quantization_status",),
)


def kind_of(module: nn.Module) -> Kind | None:
    if "quantization_scheme" in module.__dict__ and isinstance(module, nn.Linear):
        return COMPRESSED
    for kind in (FP8_LINEAR, ROWWISE_LINEAR, EXPERTS):
        if isinstance(module, getattr(sys.modules.get(kind.library), kind.class_name, ())):
            return kind
    return None


class Coded(NamedTuple):
    """A layer of a checkpoint, with its plain name. A part is the name of one of its weights."""

    name: str
    layer: nn.Module
    kind: Kind

    @property
    def parts(self) -> tuple[str, ...]:
        if self.kind is not EXPERTS:
            return ("weight",)
        from ..compute.experts import first_weight

        return first_weight(self.layer), "down_proj"

    def scale_of(self, part: str) -> str:
        """Name the scales of a weight."""
        return part + self.kind.scale if self.kind is EXPERTS else self.kind.scale

    def codes_and_scales(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self.layer._parameters[self.scale_of(part)].detach()
        codes = self.layer._parameters[part].detach()
        return codes, scales.t() if self.kind is ROWWISE_LINEAR else scales

    def block(self, part: str) -> tuple[int, int]:
        """Return the rows and columns of a weight under one scale, if it has several."""
        rows, columns = self.layer._parameters[part].shape[-2:]
        if self.kind is COMPRESSED:
            scheme = self.layer.quantization_scheme
            return tuple(scheme.weights.block_structure or (1, columns))
        if self.kind is ROWWISE_LINEAR:
            return 1, columns
        return tuple(self.layer.block_size or (rows, columns))

    def keeps_codes(self) -> bool:
        """Return True for packed codes, and for FP8 in square blocks."""
        part = self.parts[0]
        weight = self.layer._parameters.get(part)
        scales = self.layer._parameters.get(self.kind.scale)
        if weight is None or weight.dtype != E4M3.dtype:
            return "weight_packed" in self.layer._parameters
        if self.kind is EXPERTS:  # missing scales are named later
            is_whole = not vars(self.layer).get("_is_expert_parallel")
        else:
            is_whole = scales is not None and scales.dim() == 2
        # a subclass
        has_own_product = self.kind.class_name not in ("", type(self.layer).__name__)
        return is_whole and not has_own_product and self.block(part) == SQUARES[:2]

    def refuse(self) -> None:
        """Raise `FP8BackendError` if the codes cannot become values (any more)."""
        parameters = self.layer._parameters
        if "weight_packed" not in parameters:
            for part in self.parts:
                self._refuse_weight(part)
            return
        layout = layout_of(parameters)
        why = "its packed codes are neither NVFP4 nor MXFP4, or have zero points"
        if layout is not None and "weight_zero_point" not in parameters:
            parts = tuple(parameters[part] for part in layout.parts)
            shape = self.layer.out_features, self.layer.in_features
            why = "its codes are sharded, or not loaded yet"
            if not any(is_distributed(part) or part.is_meta for part in parts):
                why = _unfit(layout, parts, shape)
        if why:
            raise FP8BackendError(f"{self.name}, {self.kind.title}: {why}; {LOAD_PLAIN}")

    def _refuse_weight(self, part: str) -> None:
        parameters = self.layer._parameters
        weight = parameters.get(part)
        scales = parameters.get(self.scale_of(part))
        full_name = f"{self.name}.{part}"
        name = full_name if self.kind is EXPERTS else self.name
        if weight is None or scales is None or weight.dtype != E4M3.dtype or weight.dim() < 2:
            what = "its weight is no matrix of E4M3 codes with scales"
            if self.kind is COMPRESSED and weight is not None and weight.dtype.itemsize > 1:
                what = "compressed-tensors has decompressed it in a forward, and frozen it"
            raise FP8BackendError(f"{name}, {self.kind.title}: {what}; {LOAD_PLAIN}")
        is_cut = is_distributed(weight) or vars(self.layer).get("_is_expert_parallel")
        if is_cut or weight.is_meta:
            raise FP8BackendError(
                f"{name}: its codes are sharded, or not loaded yet: dequantize whole, loaded layers"
            )
        parts = self.codes_and_scales(part)
        layout = e4m3_layout(parts[1], self.block(part))
        if why := _unfit(layout, parts, tuple(weight.shape)):
            raise FP8BackendError(f"{name}, {self.kind.title}: {why}; {LOAD_PLAIN}")
        refuse_if_held(weight, full_name)

    def make_plain(self) -> None:
        layer = self.layer
        if self.kind is COMPRESSED:
            from compressed_tensors.quantization import QuantizationMetadata

            QuantizationMetadata.clear_quantization(layer)
            layer.__dict__.pop("forward", None)  # the class's own, bound to the layer
        for name in (*map(self.scale_of, self.parts), *self.kind.added):
            layer._parameters.pop(name, None)
            layer.__dict__.pop(name, None)
        # a subclass multiplies plain weights in its own way
        if type(layer).__name__ != self.kind.class_name:
            return
        layer.__class__ = nn.Linear
        if self.kind is EXPERTS:
            from ..compute.experts.frozen_experts import FrozenExperts

            layer.__class__ = FrozenExperts


def quantized_layers(model: nn.Module) -> Iterator[Coded]:
    for name, module in model.named_modules():
        if kind := kind_of(module):
            yield Coded(plain_name(name), module, kind)


def raw_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the Linears with a raw float8 weight, such as `module.to(torch.float8_e4m3fn)`
    leaves. Another library that handles its codes has replaced class or forward. Raise
    `RecipeError` for codes with scales."""
    layers = [
        (plain_name(name), module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and (weight := module._parameters.get("weight")) is not None
        and weight.dtype in RAW_CODES
        and not kind_of(module)
        and not forward_obstacle(module)
    ]
    for name, layer in layers:
        if others := [*layer._buffers, *(layer._parameters.keys() - {"weight", "bias"})]:
            raise RecipeError(
                f"{name}: raw float8 codes have the scale 1, and this layer has {listed(others)} "
                "besides: load scaled codes with fp8_backends.checkpoints.load_codes, or leave the "
                "layer in bf16"
            )
    return layers


def training_codes(model: nn.Module) -> list[str]:
    """Return the names of layers with codes that would not train, or are packed and not frozen by
    `freeze_codes`."""
    return [
        name
        for name, module, kind in quantized_layers(model)
        if any(
            p.requires_grad or key == "weight_packed"
            for key, p in module._parameters.items()
            if p is not None
        )
    ]


def check(model: nn.Module, recipe: Recipe, compute: Compute) -> None:
    """Raise `RecipeError` for layers of a checkpoint that would not train as they are, or not with
    this recipe."""
    for name, module in model.named_modules():
        cls = type(module)
        if cls.__name__ in WITHOUT_BACKWARD and cls.__module__.startswith("transformers."):
            raise RecipeError(
                f"{plain_name(name)}: {cls.__name__} of transformers gives its inputs no "
                "gradients, so layers before it would not train: load "
                f"{WITHOUT_BACKWARD[cls.__name__]}"
            )
        if "parameter_name" in vars(module) and EXPERTS in map(kind_of, module.modules()):
            raise RecipeError(
                f"{plain_name(name)}: PEFT's target_parameters adds to the codes of FP8 experts, "
                "and rounds the sum to float8, without their scales: call "
                "fp8_backends.checkpoints.freeze_codes(model) before PEFT, which then adds to "
                f"their values; or {LOAD_PLAIN}"
            )
    if names := training_codes(model):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RecipeError(f"{names[0]}{more}: {CODES_NEVER_TRAIN}")
    for name, layer in raw_layers(model):
        layout = RAW_CODES[layer.weight.dtype]
        if any(p.requires_grad for p in layer.parameters()):
            raise RecipeError(f"{name}: {RAW_TRAINS}")
        if not compute.takes_block_codes(recipe, layout):
            raise RecipeError(
                f"{name}: {recipe.name} does not multiply {layout.name} codes: use native:... at "
                "level O0, or model.to(torch.bfloat16) first"
            )
    for name, parameter in model.named_parameters():
        codes = local_part(parameter)
        if isinstance(codes, BlockCodes) and not compute.takes_block_codes(
            recipe, codes.code_layout
        ):
            takes = (
                "native:blockwise with fp8_params=True"
                if codes.code_layout is SQUARE_CODES
                else "native:..."
            )
            raise RecipeError(
                f"{plain_name(name)}: {recipe.name} does not multiply frozen "
                f"{codes.code_layout.name} codes of a checkpoint: use {takes}, or "
                "fp8_backends.checkpoints.dequantize(model) first"
            )


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> list[str]:
    """Make the layers of a checkpoint in 8 or 4 bits plain, in place: transformers' `FP8Linear` and
    `FP8Experts`, FP8, NVFP4 and MXFP4 layers loaded by compressed-tensors, and layers with codes of
    `freeze_codes` or `load_codes`. Modules, and Parameters except packed ones, stay the same
    objects.

    Call it before the optimizer is made. Trainable weights stay trainable; weights packed in 4 bits
    train unless the model is frozen. The model forgets its quantization: trainers accept it, and it
    is saved plain.

    Args:
        model: such a model, or one that holds it. If transformers has already dequantized it while
            loading, only the memory of its quantization is removed; `prepare` does so as well.
        dtype: of the weights; default: dtype of the model's first parameter without codes.

    Returns:
        The names of the layers made plain.

    Raises:
        FP8BackendError: a layer is of another format (such as integers), or sharded, `model` is no
            module, or `dtype` no dtype; nothing has changed then.
    """
    check_is_module(model)
    if not isinstance(dtype, (torch.dtype, type(None))):
        raise FP8BackendError(f"dtype must be a torch.dtype, not {shown(dtype)}")
    layers = list(quantized_layers(model))
    unprepared = ((name, m) for name, m in model.named_modules() if CONVERSION not in m.__dict__)
    frozen = [
        (name, f"{name}.{part}", parameter)
        for name, m in unprepared
        for part, parameter in m._parameters.items()
        if isinstance(local_part(parameter), BlockCodes) and part_layer(m, part) is None
    ]
    for name, full_name, parameter in frozen:
        if is_distributed(parameter):
            raise FP8BackendError(f"{name}: its codes are sharded: dequantize before fully_shard")
        refuse_if_held(parameter, full_name)
    own_dtype = dtype
    dtype = dtype or _plain_dtype(model, layers)

    def values(coded: Coded, part: str) -> torch.Tensor:
        parts = coded.codes_and_scales(part)
        return e4m3_layout(parts[1], coded.block(part)).values(parts, dtype)

    trains = any(parameter.requires_grad for parameter in model.parameters())
    _replace_codes(layers, values, lambda packed: nn.Parameter(packed.exact(), trains), dtype)
    for _, full_name, parameter in frozen:
        if isinstance(parameter, BlockCodes):  # else tied to an earlier layer
            swap(parameter, parameter.exact().to(own_dtype or parameter.dtype), full_name)
    _forget(model)
    names = (name for name, _, _ in layers), (plain_name(name) for name, _, _ in frozen)
    return list(dict.fromkeys(itertools.chain(*names)))


def freeze_codes(model: nn.Module) -> list[str]:
    """Keep the codes of a checkpoint's layers, frozen and to the bit, in place: NVFP4 and MXFP4
    loaded by compressed-tensors, FP8 with scales for 128 x 128 values (of experts, too), and raw
    float8. The layers become plain Linears, and experts those of bf16 models, for PEFT to wrap and
    for `prepare` to multiply: 4 bits and raw float8 by every recipe of `native` at level O0, scaled
    FP8 by native:blockwise with fp8_params=True. Call it before PEFT. The model forgets its
    quantization: trainers accept it.

    Returns:
        The names of these layers. All others stay unchanged.

    Raises:
        FP8BackendError: packed layers of another format (integers, zero points), not loaded yet, or
            raw float8 with scales; nothing has changed then.
    """
    check_is_module(model)
    return freeze_layers(model, Coded.keeps_codes)


def freeze_layers(model: nn.Module, keeps: Callable[[Coded], bool]) -> list[str]:
    """Do as `freeze_codes` with the layers that `keeps` chooses, and raw float8."""
    layers = list(filter(keeps, quantized_layers(model)))
    dtype = _plain_dtype(model, layers)
    raw = raw_layers(model)
    for name, layer in raw:
        refuse_if_held(layer.weight, f"{name}.weight")

    def codes(coded: Coded, part: str) -> torch.Tensor:
        weight, scales = coded.codes_and_scales(part)
        coded.layer._parameters[part].requires_grad_(False)
        return BlockCodes((weight, scales.float().contiguous()), dtype)

    _replace_codes(layers, codes, lambda packed: nn.Parameter(packed, False), dtype)
    for name, layer in raw:
        if layer.weight.dtype in RAW_CODES:  # else tied to an earlier layer
            swap(layer.requires_grad_(False).weight, BlockCodes.of_raw(layer.weight), name)
        dequantize_bias(layer)
    if layers:
        _forget(model)
    return [*(name for name, _, _ in layers), *(name for name, _ in raw)]


def load_codes(
    model: nn.Module,
    source: Mapping[str, torch.Tensor] | str | os.PathLike[str],
    *,
    prefix: str = "",
) -> list[str]:
    """Load a checkpoint with codes that transformers does not read into a plain model, in place,
    and keep them frozen as `freeze_codes` does: NVFP4 of NVIDIA's ModelOpt (`weight`,
    `weight_scale`, `weight_scale_2`), FP8 with one scale for ComfyUI (`weight`, `scale_weight`),
    and the layouts of compressed-tensors in 4 bits. All other parameters are loaded in the model's
    dtypes; scales of activations are dropped.

    Args:
        model: with the parameter names of the file, on any device (`accelerate.init_empty_weights`
            saves memory).
        source: a safetensors file, a folder of them, or tensors by name.
        prefix: of the model's names in the file, such as `"model.diffusion_model."`; other names
        are ignored.

    Returns:
        The names of the layers with codes.

    Raises:
        FP8BackendError: names, shapes or kinds of codes do not fit the model; nothing has changed
        then.
    """
    check_is_module(model)
    tie_weights = getattr(model, "tie_weights", lambda: None)
    tie_weights()  # untied by accelerate.init_empty_weights, and by `assign` below
    tensors = {
        name[len(prefix) :]: t for name, t in _read(source).items() if name.startswith(prefix)
    }
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        parts.setdefault(layer, {})[part] = tensor
    layouts = {layer: layout for layer, own in parts.items() if (layout := layout_of(own))}
    modules = dict(model.named_modules())
    state = model.state_dict(keep_vars=True)
    for layer, layout in layouts.items():
        module = modules.get(layer)
        if type(module) is not nn.Linear:
            raise FP8BackendError(
                f"{prefix}{layer} holds {layout.name} codes, and is no plain Linear of this model"
            )
        own = tuple(parts[layer][part] for part in layout.parts)
        if why := _unfit(layout, own, tuple(module.weight.shape)):
            raise FP8BackendError(f"{prefix}{layer}: {why}")
        refuse_if_held(module.weight, f"{layer}.weight")
    taken = {
        f"{layer}.{part}"
        for layer, layout in layouts.items()
        for part in (*layout.parts, *WITHOUT_PLACE)
    }
    plain = {name: tensor for name, tensor in tensors.items() if name not in {*taken, "scaled_fp8"}}
    _check_names(plain, {f"{layer}.weight" for layer in layouts}, state)
    on_meta = any(tensor.is_meta for tensor in state.values())
    model.load_state_dict(
        {name: t.to(state[name].dtype) for name, t in plain.items()}, strict=False, assign=on_meta
    )
    for layer, layout in layouts.items():
        weight = modules[layer].weight
        own = parts[layer]
        device = torch.device("cpu") if weight.is_meta else weight.device
        codes = BlockCodes.of(
            {name: own[name].to(device) for name in layout.parts}, weight.dtype, layout
        )
        modules[layer].weight = nn.Parameter(codes, requires_grad=False)
    if on_meta:
        tie_weights()
    getattr(getattr(model, "config", None), "__dict__", {}).pop("quantization_config", None)
    return list(layouts)


def _check_names(
    plain: Mapping[str, torch.Tensor], coded: Collection[str], state: Mapping[str, torch.Tensor]
) -> None:
    """Raise `FP8BackendError` unless plain tensors and codes are exactly those of a model, ties
    counted once."""
    given = {*plain, *coded}
    ties = {id(tensor) for name, tensor in state.items() if name in plain}
    own = {
        name: state[name]
        for name in plain
        if name in state and state[name].shape == plain[name].shape
    }
    unknown = [
        name
        for name, t in plain.items()
        if name not in own or (t.itemsize == 1 and t.dtype != own[name].dtype)
    ]
    missing = [
        name for name, tensor in state.items() if name not in given and id(tensor) not in ties
    ]
    for names, why in (
        (missing, "missing"),
        (unknown, "of another name, shape or kind of codes than the model's"),
    ):
        if names:
            raise FP8BackendError(f"{listed(names)} in the checkpoint: {why}; nothing was loaded")


WITHOUT_PLACE = (
    *("input_scale", "scale_input", "input_global_scale", "activation_scale"),
    *("k_scale", "v_scale", "scaled_fp8", "comfy_quant"),
)
"""Names of scales for activations and caches in a checkpoint, and of marks for a reader."""
INDEX = "model.safetensors.index.json"


def _read(
    source: Mapping[str, torch.Tensor] | str | os.PathLike[str],
) -> Mapping[str, torch.Tensor]:
    if isinstance(source, Mapping):
        return source
    files = files_of(Path(source))
    return {name: tensor for file in files for name, tensor in mapped(file).items()}


def files_of(source: Path) -> list[Path]:
    """Return the safetensors files of a folder, those of its index if it has one, or the file."""
    names = json_of(source / INDEX).get("weight_map", {}).values()
    files = {source / name for name in names} or source.glob("*.safetensors")
    return sorted(files) or [source]


def json_of(path: Path) -> dict[str, Any]:
    """Return the content of a file that may be missing."""
    try:
        return json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise FP8BackendError(f"{path} is damaged ({error}): download it again") from None


def mapped(file: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Map tensors of a file, or all: the system reads pages as they are used."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            return {name: tensors.get_tensor(name) for name in names or tensors.keys()}
    except (OSError, SafetensorError) as error:
        raise FP8BackendError(
            f"{file}: neither a safetensors file nor a folder of them, or damaged ({error}): remove "
            "it, and download or convert it again"
        ) from None


def _replace_codes(
    layers: list[Coded],
    new_weight: Callable[[Coded, str], torch.Tensor],
    new_parameter: Callable[[BlockCodes], nn.Parameter],
    dtype: torch.dtype,
) -> None:
    """Make these layers plain with another weight, or another Parameter in place of packed codes:
    all, or none."""
    for coded in layers:
        coded.refuse()
    for coded in layers:
        layer = coded.layer
        if "weight_packed" in layer._parameters:
            packed = BlockCodes.of(layer._parameters, dtype, layout_of(layer._parameters))
            del layer._parameters["weight_packed"]
            layer.__dict__["_parameters"] = {"weight": new_parameter(packed), **layer._parameters}
        for part in coded.parts:
            weight = layer._parameters[part]
            if weight.dtype == E4M3.dtype:  # else tied to an earlier layer
                swap(weight, new_weight(coded, part), f"{coded.name}.{part}")
        coded.make_plain()


def _forget(model: nn.Module) -> None:
    for module in model.modules():
        quantizer = module.__dict__.get("hf_quantizer")
        if quantizer is not None and not any(quantized_layers(module)):
            if (compressor := getattr(quantizer, "compressor", None)) is not None:
                # it would decompress the layers in the first forward
                compressor.remove_decompression_hook(module)
            quantizer.remove_quantization_config(module)
    save_plain(model)


def keeps_unasked(coded: Coded) -> bool:
    """Return True for codes that `prepare` keeps. transformers multiplies those of experts with
    kernels of its own on GPUs, faster than one expert after the other."""
    if coded.kind is EXPERTS and any(p.device.type != "cpu" for p in coded.layer.parameters()):
        return False
    return coded.keeps_codes()


def _plain_dtype(model: nn.Module, layers: list[Coded]) -> torch.dtype:
    """Return the dtype of the first parameter outside these layers and wider than codes."""
    quantized = {id(coded.layer) for coded in layers}
    plain = (
        p
        for module in model.modules()
        if id(module) not in quantized
        for p in module._parameters.values()
    )
    dtypes = (
        p.dtype for p in plain if p is not None and p.is_floating_point() and p.dtype.itemsize > 1
    )
    return next(dtypes, torch.get_default_dtype())


def _unfit(layout: CodeLayout, parts: tuple[torch.Tensor, ...], shape: tuple[int, ...]) -> str:
    """Return the reason why these parts hold no weight of this shape; "" if they do."""
    if why := layout.unfit(parts, shape):
        return why
    scales = (e8m0_values(s) if s.dtype == torch.uint8 else s.float() for s in parts[1:])
    if all(bool(torch.isfinite(scale).all()) for scale in scales):
        return ""
    return "its scales are damaged: not all are finite"


def save_plain(model: nn.Module) -> None:
    """Make `save_pretrained` write plain weights of a dequantized model: transformers would write
    codes again."""
    for module in model.modules():
        conversions: list[Any] | None = module.__dict__.get("_weight_conversions")
        if conversions and module.__dict__.get("hf_quantizer") is None:
            module._weight_conversions = [
                plain for conversion in conversions for plain in _without_codes(conversion)
            ]


def _without_codes(conversion: Any) -> Iterator[Any]:
    """Yield transformers' conversion for a plain checkpoint; nothing if it only dequantizes."""
    operations = getattr(conversion, "operations", ())
    kept = [
        operation for operation in operations if getattr(operation, "hf_quantizer", None) is None
    ]
    if len(kept) == len(operations):
        yield conversion
    elif kept:
        targets = conversion._original_target_patterns
        sources = conversion._original_source_patterns
        # scales were collected with their weights
        weight = sources[0].rpartition(".")[2]
        sources = [source for source in sources if source.rpartition(".")[2] == weight]
        yield conversion.copy(sources, targets, operations=kept)
