"""Writing a trained model as an FP8 checkpoint that stock transformers loads: `fp8_backends.checkpoints.export`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..announcement import announce, is_main_process
from ..compute import registry
from ..compute.conv1d import is_conv1d
from ..compute.fields import check_known
from ..errors import FP8BackendError, on_all_ranks
from ..numerics.modules import check_is_module, plain_name
from ..numerics.scaled_tensor import ScaledTensor, dequantize_shards
from ..numerics.scaling import Quantized
from ..numerics.sharded_tensor import is_distributed
from ..words import counted, listed
from . import checkpoint_formats, quantized_layers
from .checkpoint_formats import FITS_INTO, FORMATS, IN_WORDS, CheckpointFormat
from .conversion import prepared_roots, unwrapped
from .weight_products import Found, find_weight_products


@dataclass
class Export:
    """A record of `export`."""

    folder: str
    format: str
    grid: str
    """How many values of a weight share a scale in the file: `tensor`, `channel` (a row) or `block` (128 x 128)."""
    exact: list[str] = field(default_factory=list)
    """Layers with the very codes that their products multiply by now."""
    rounded: dict[str, str] = field(default_factory=dict)
    """Layers whose weights, with all the precision that is stored, were rounded to codes for the file; and why."""
    high_precision: dict[str, str] = field(default_factory=dict)
    """The other weights, which are in the file as they are; and why."""

    def __str__(self) -> str:
        parts = [f"{counted(len(self.exact), 'weight')} as the FP8 codes that training used"] if self.exact else []
        parts += [f"{len(names)} rounded to FP8 ({why})" for why, names in _by_reason(self.rounded)]
        parts += [f"{listed(names)} in high precision ({why})" for why, names in _by_reason(self.high_precision)]
        return f"{self.folder}, {self.format}: {'; '.join(parts)}"


def _by_reason(reasons: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    for why in dict.fromkeys(reasons.values()):
        yield why, [name for name, reason in reasons.items() if reason == why]


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    format: str = "finegrained_fp8",
    *,
    max_shard_size: int | str = "50GB",
) -> Export:
    """Write a prepared transformers model as an FP8 checkpoint, which stock `from_pretrained` loads.

    Layers that run in FP8 are written as E4M3 codes and scales, everything else as it is. Codes are those of training
    where the format has scales for them, to the bit; else the weights are rounded to codes. The model stays as it is.

    On several ranks all of them call it, and the first writes.

    Args:
        model: a transformers model that was prepared; DDP, FSDP2 and `torch.compile` may lie around it.
        folder: where `config.json` and `model.safetensors` go, as with `save_pretrained`. A tokenizer is saved apart.
        format: `finegrained_fp8`, transformers' own, with a scale for 128 x 128 values; or `compressed-tensors`, with
            the scales of the recipe.
        max_shard_size: of one file, as `save_pretrained` takes it.

    Raises:
        RecipeError: a format that is not known.
        FP8BackendError: it is no such model, a weight is not finite, or nothing would be in FP8.
    """
    check_known("format", format, FORMATS)
    fmt = FORMATS[format]
    check_is_module(model)
    model = unwrapped(model)
    layers, left = _split(model)
    shapes = [(each.product.out_features, each.product.in_features) for each in layers.values()]
    # codes are made again when their turn comes: those of all layers would take a byte an element at once
    grids = [checkpoint_formats.grid_of(_codes_of(each)) for each in layers.values()]
    grid = checkpoint_formats.grid_for(fmt, list(zip(shapes, grids, strict=True)))
    result = Export(os.fspath(folder), format, grid, high_precision=left)

    def state_to_write() -> None:
        state.update(_state(model, layers, fmt, result))
        if not result.exact and not result.rounded:
            reasons = "; ".join(f"{listed(names)}: {why}" for why, names in _by_reason(result.high_precision))
            raise FP8BackendError(f"format={format!r} can hold no weight of this model in FP8: {reasons}")

    def write() -> None:
        if is_main_process():
            _write(model, state, fmt, result, max_shard_size)

    state: dict[str, torch.Tensor] = {}
    on_all_ranks("export", state_to_write)
    on_all_ranks("export", write)
    announce(f"exported: {result}")
    return result


def _split(model: nn.Module) -> tuple[dict[str, Found], dict[str, str]]:
    """Return the converted layers that a checkpoint can hold as codes, by name, and the reasons why it has all other
    weights as they are. Raise for a model that cannot be exported."""
    if not callable(getattr(model, "save_pretrained", None)) or not hasattr(model, "config"):
        raise FP8BackendError(
            f"export writes what transformers loads, and {type(model).__name__} is no transformers model: save it with "
            f"safetensors.torch.save_model"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise FP8BackendError(
            "DeepSpeed's ZeRO-3 has cut the weights up: save with it, load the result, and export that"
        )
    found = find_weight_products(model)
    if any(each.product.kind == "adapter" for each in found) or hasattr(model, "peft_config"):
        raise FP8BackendError(
            "the model has adapters: fp8_backends.restore(model), merge_and_unload(), and "
            "prepare(model, None, spec) come before an export of what they make"
        )
    if foreign := [name for name, _, _ in quantized_layers.quantized_layers(model)]:
        raise FP8BackendError(
            f"{listed(foreign)}: FP8 layers of the checkpoint that this model came from: call "
            f"fp8_backends.checkpoints.dequantize(model) before prepare"
        )
    if not any(each.conversion for each in found):
        raise FP8BackendError(
            "no layer of this model is prepared, and export writes those that run in FP8 as codes: "
            'fp8_backends.prepare(model, None, "native:blockwise") comes first'
        )
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(plain_name(name))
    reasons = {
        plain_name(f"{prefix}.{name}".strip(".")): why
        for prefix, _, prepared in prepared_roots(model)
        for name, why in prepared.report.high_precision.items()
    }
    layers, left = {}, {}
    for each in found:
        name = each.product.name
        if each.conversion is None:
            left[name] = reasons.get(name) or each.obstacle or each.default_exclusion or "not prepared"
        elif each.part:
            left[name] = "the weights of experts lie in one Parameter"
        elif is_conv1d(each.module):
            left[name] = "transformers reads FP8 codes of Linear layers alone, not of Conv1D"
        elif others := [other for other in owners[id(each.module.weight)] if other != f"{name}.weight"]:
            left[name] = f"its weight is that of {', '.join(others)} too"
        else:
            layers[name] = each
    return layers, left


def _codes_of(found: Found) -> Quantized | None:
    """Return the current codes of a converted layer; None if its backend does not tell."""
    return registry.get_compute(found.conversion.recipe.compute).weight_codes(found.module)


def _state(
    model: nn.Module, layers: dict[str, Found], fmt: CheckpointFormat, result: Export
) -> dict[str, torch.Tensor]:
    """Return the tensors of the file, on the CPU, by name; empty on ranks that do not write. Note in the result what
    becomes of these layers."""
    writes, state, seen = is_main_process(), {}, {}
    for full_name, value in model.state_dict(keep_vars=True).items():
        name = plain_name(full_name)
        layer = name.removesuffix(".weight")
        stored = None
        if layer != name and layer in layers:
            stored = _stored(layer, value, _codes_of(layers[layer]), fmt, result)
        if stored is None:
            if id(value) not in seen and (writes or is_distributed(value)):
                seen[id(value)] = value, _whole(value)
            new = {name: seen[id(value)][1]} if writes else {}  # ties stay ties
        else:
            new = {name: stored.codes, f"{layer}.{fmt.scale}": checkpoint_formats.spread(stored, result.grid, fmt)}
        if writes:
            state |= new
    return state


def _stored(
    name: str, weight: torch.Tensor, codes: Quantized | None, fmt: CheckpointFormat, result: Export
) -> Quantized | None:
    """Return the codes of a layer for the file, and note them in the result; None if the file has the weight itself."""
    grid = checkpoint_formats.grid_of(codes)
    is_exact = result.grid in FITS_INTO.get(grid, ())
    if not is_exact:
        why = f"its codes have {IN_WORDS[grid]}, and the file has {IN_WORDS[result.grid]}"
        if codes is None:
            why = "it is sharded" if is_distributed(weight) else "its backend does not tell its codes"
        codes = checkpoint_formats.rounded(_whole(weight), result.grid)
    if not bool(torch.isfinite(codes.scale_inv).all()) or bool(torch.isnan(codes.codes.float()).any()):
        raise FP8BackendError(f"{name}: its weight is not finite; nothing was written")
    scales_are_equal = bool((codes.scale_inv == codes.scale_inv.reshape(-1)[0]).all())
    if reason := fmt.unfit(tuple(codes.codes.shape), result.grid, scales_are_equal):
        result.high_precision[name] = reason
        return None
    if is_exact:
        result.exact.append(name)
    else:
        result.rounded[name] = why
    return Quantized(codes.codes.detach().cpu(), codes.scale_inv.detach().cpu())


@torch.no_grad()
def _whole(value: torch.Tensor) -> torch.Tensor:
    """Plain values of a Parameter or buffer with all the precision that is stored, on the CPU. All ranks call it for a
    shard."""
    if is_distributed(value):
        return dequantize_shards(value).full_tensor().cpu()
    return (value.exact() if isinstance(value, ScaledTensor) else value.detach()).cpu()


def _write(
    model: nn.Module, state: dict[str, torch.Tensor], fmt: CheckpointFormat, result: Export, max_shard_size: int | str
) -> None:
    quantized_layers.save_plain(model)
    # where a weight is a module's own Parameter, the module is left out
    parts = {each.product.name: f".{each.part}" for each in find_weight_products(model) if each.part}
    left = {name.removesuffix(parts.get(name, "")) for name in result.high_precision}
    config = fmt.config(result.grid, sorted(left), [*result.exact, *result.rounded])
    with _quantization_config(model, config):
        model.save_pretrained(result.folder, state_dict=state, max_shard_size=max_shard_size)


@contextlib.contextmanager
def _quantization_config(model: nn.Module, config: dict) -> Iterator[None]:
    """Put the description of the codes into the model's configuration inside, and take the ranks out of it:
    transformers would wait for the others, and they do not write."""
    own = model.config
    before = {name: own.__dict__.pop(name, None) for name in ("quantization_config", "distributed_config")}
    own.quantization_config = config
    try:
        yield
    finally:
        del own.quantization_config
        own.__dict__.update({name: value for name, value in before.items() if value is not None})
