"""Combinations that are known to go wrong or slow: one loop over the rules of `rules`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compute import chips as hardware_table
from ..compute import hardware, registry
from ..compute.fields import closest
from ..errors import BackendUnavailableError, FP8BackendError, RecipeError
from ..recipes.handlers import Recipe, resolve
from . import conversion, preparation
from .rules import RULES, THEMES, Compiled, Parallel, Rule, Setup, Severity

_ORDER = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One thing to know before training."""

    severity: Severity
    """"error": it will not run, or not as asked. "warning": it runs, at a cost. "info": good to know."""
    rule: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.reason} [{self.rule}]. Fix: {self.fix}"


def validate(
    spec: Any = None,
    model: nn.Module | None = None,
    *,
    parallel: Parallel | None = None,
    compiled: Compiled | None = None,
    activation_checkpointing: bool | None = None,
    attention: str | None = None,
    sequence_length: int | None = None,
    vocab_size: int | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    cpu_ram_efficient_loading: bool | None = None,
    world_size: int | None = None,
    zero_stage: int | None = None,
    tensor_parallel: int | None = None,
    quantized_base: bool | None = None,
    chip: str | None = None,
) -> list[Finding]:
    """What is known to go wrong with this recipe, on this machine or another, in this setup. The worst come first.

    What is None is not known, and no rule asks for it; where a model shows it, it is read off the model, which stays as
    it is.

    Args:
        spec: what `resolve` takes. A string or field that cannot be honoured becomes a finding, not an exception.
        model: looked at for its wrapper, its layers, its configuration, its buffers.
        parallel, compiled: how the model will be wrapped; by default what `model` shows, else "none".
        attention: as transformers names it (`attn_implementation`).
        sequence_length: tokens in a sequence of a batch.
        optimizer: the object, or its name in transformers' `optim` or Axolotl's `optimizer`.
        cpu_ram_efficient_loading: FSDP's, where the first rank alone has the weights.
        world_size: processes that train together; by default those of the running process group.
        zero_stage: DeepSpeed's.
        tensor_parallel: ranks that share one layer.
        quantized_base: whether bitsandbytes holds layers in 4 or 8 bits.
        chip: judge for a machine with this chip, a key of `hardware_table.CHIPS` such as "hopper", with new libraries;
            by default for this machine, its libraries included.

    Raises:
        RecipeError: a chip that is not known.
    """
    machine = _machine() if chip is None else _other_machine(chip)
    try:
        recipe = resolve(spec)
        expected = None if model is None else conversion.expected(model, recipe, registry.get_compute(recipe.compute))
    except RecipeError as error:
        return [Finding("error", "recipe", str(error), "correct the backend string or the field")]
    config = _text_config(model)
    setup = Setup(
        recipe,
        parallel or _parallel(model),
        compiled or _compiled(model),
        **machine,
        activation_checkpointing=_first(activation_checkpointing, getattr(model, "is_gradient_checkpointing", None)),
        attention=_first(attention, getattr(config, "_attn_implementation", None)),
        sequence_length=sequence_length,
        vocab_size=_first(vocab_size, getattr(config, "vocab_size", None)),
        optimizer=_optimizer_name(optimizer),
        cpu_ram_efficient_loading=cpu_ram_efficient_loading,
        world_size=_first(world_size, _running_ranks()),
        zero_stage=zero_stage,
        tensor_parallel=tensor_parallel,
        quantized_base=quantized_base,
        **_shown_by(model, recipe, expected),
    )
    findings = [_finding(rule, setup) for rule in RULES if rule.applies(setup)]
    findings += _refused_optimizer(optimizer, recipe)
    findings += _unavailable(recipe) if chip is None else ()
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def _finding(rule: Rule, setup: Setup) -> Finding:
    here = rule.here(setup)
    return Finding(rule.severity, rule.name, f"{rule.reason} (here: {here})" if here else rule.reason, rule.fix)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _unavailable(recipe: Recipe) -> Iterator[Finding]:
    try:
        registry.check_available(recipe)
    except BackendUnavailableError as error:
        yield Finding("error", "unavailable", str(error), "choose a backend that `fp8-backends doctor` lists")


def _refused_optimizer(optimizer: Any, recipe: Recipe) -> Iterator[Finding]:
    """An optimizer object that `prepare` would refuse, in its words. Names are the rules' business."""
    if isinstance(optimizer, torch.optim.Optimizer):
        try:
            preparation.check_optimizer(optimizer, recipe)
        except BackendUnavailableError:
            return  # a finding of its own
        except FP8BackendError as error:
            yield Finding("error", "optimizer", str(error), "use torch.optim.AdamW, or a backend without +msamp")


# reading the machine, the process and the model


def _machine() -> dict[str, Any]:
    return {
        "gpu": hardware.has_gpu(),
        "fp8_products": hardware.fp8_products(),
        "bf16_products": hardware.has_gpu() or hardware.cpu_bf16(),
        "chip": hardware_table.chip_here(),
        "capabilities": tuple(hardware.capabilities()),
        "cuda": hardware.cuda_release(),
        "torch": hardware.torch_release(),
        "backward_override": os.environ.get("NVTE_BACKWARD_OVERRIDE", ""),
    }


_CAPABILITIES = {
    hardware_table.BEFORE_FP8: (8, 0),
    hardware_table.ADA: (8, 9),
    hardware_table.HOPPER: (9, 0),
    hardware_table.BLACKWELL: (10, 0),
    hardware_table.RTX_BLACKWELL: (12, 0),
}
"""Of NVIDIA's chips."""


def _other_machine(key: str) -> dict[str, Any]:
    chips = {chip.key: chip for chip in hardware_table.CHIPS}
    if key not in chips:
        raise RecipeError(f"chip {key!r} is not known{closest(key, chips)}; there are {', '.join(chips)}")
    chip = chips[key]
    return {
        "gpu": chip != hardware_table.CPU,
        "fp8_products": chip not in (hardware_table.CPU, hardware_table.BEFORE_FP8),
        "bf16_products": chip != hardware_table.CPU or hardware.cpu_bf16(),
        "chip": chip,
        "capabilities": tuple(filter(None, [_CAPABILITIES.get(chip)])),
        "cuda": None,
        "torch": hardware.torch_release(),
        "backward_override": os.environ.get("NVTE_BACKWARD_OVERRIDE", ""),
    }


def _shown_by(model: nn.Module | None, recipe: Recipe, expected: conversion.ConversionReport | None) -> dict[str, Any]:
    if model is None:
        return {}
    fp8 = set(expected.converted)
    converted = {f"{name}.weight".lstrip(".") for name in fp8}
    trains = [conversion.plain_name(name) for name, p in model.named_parameters() if p.requires_grad]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "linear_sizes": tuple((each.in_features, each.out_features) for each in expected.products if each.name in fp8),
        "linear_trains": not converted.isdisjoint(trains),
        "expected": expected,
        "only_weights_train": bool(trains) and converted.issuperset(trains),
        "persistent_buffers": tuple(_persistent_buffers(model)),
    }


def _persistent_buffers(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip(".")


def _text_config(model: nn.Module | None) -> Any:
    """The configuration of a model of transformers; of one with images or sound, that of its language model."""
    config = getattr(model, "config", None)
    return getattr(config, "text_config", None) or config


def _running_ranks() -> int | None:
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if running else None


def _optimizer_name(optimizer: Any) -> str | None:
    """A name as it is. An object is for `preparation.check_optimizer` to judge."""
    return optimizer if isinstance(optimizer, str) else None


_WRAPPERS = {
    "DistributedDataParallel": "ddp",
    "FullyShardedDataParallel": "fsdp1",
    "FSDPModule": "fsdp2",
    "DeepSpeedEngine": "deepspeed",
}


def _parallel(model: nn.Module | None) -> Parallel:
    """By class names, so that nothing is imported: `fully_shard` makes a subclass of FSDPModule."""
    modules = [] if model is None else [model, getattr(model, "_orig_mod", model)]
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}
    return next((kind for name, kind in _WRAPPERS.items() if name in names), "none")


def _compiled(model: nn.Module | None) -> Compiled:
    if model is None:
        return "none"
    if _is_compiled(model) or _is_compiled(getattr(model, "module", None)):
        return "full"
    return "regional" if any(_is_compiled(module) for module in model.modules()) else "none"


def _is_compiled(module: Any) -> bool:
    """`torch.compile(module)` makes a wrapper, `module.compile()` sets an attribute."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


# as text


def restructured_text(width: int = 118) -> str:
    """Every rule with its severity, reason and fix, by theme, for the README."""
    lines = []
    for theme, rules in THEMES.items():
        lines += [f"**{theme}**", ""]
        for rule in rules:
            said = f"{rule.severity}: {_escaped(rule.reason)}. *Fix*: {_escaped(rule.fix)}."
            lines += [f"``{rule.name}``", *textwrap.wrap(said, width, initial_indent="    ", subsequent_indent="    ")]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _escaped(text: str) -> str:
    """Plain text as reStructuredText shows it: `code` of ours as literals, and no emphasis or references by chance."""
    parts = text.split("`")
    plain = [part.replace("*", "\\*").replace("_ ", "\\_ ") for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(part for pair in zip(plain, [*code, ""], strict=True) for part in pair)
