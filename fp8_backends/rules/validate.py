"""Find combinations with known problems: one loop over the rules of `rules`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..compute.fields import flag, parsed, whole_number, word
from ..convert import conversion, quantized_layers
from ..errors import BackendUnavailableError, FP8BackendError, RecipeError
from ..recipes.handlers import Spec, resolve
from ..torch_tools.modules import check_is_module
from ..words import as_html, counted, shown
from . import Compiled, Machine, Parallel, Setup, Severity, applying, preconditions


@dataclass(frozen=True)
class Finding:
    """A known problem of a setup."""

    severity: Severity
    """"error": does not run as configured. "warning": runs, at a cost. "info": good to know."""
    rule: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.reason} [{self.rule}]. Fix: {self.fix}"

    def _repr_html_(self) -> str:
        return as_html(
            f"{self.severity}: {self.rule}", [("reason", "fix"), (self.reason, self.fix)]
        )


class Findings(list[Finding]):
    """Findings, the worst first: a list with a table for notebooks."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing is known to go wrong"

    def _repr_html_(self) -> str:
        rows = [(finding.severity, finding.rule, finding.reason, finding.fix) for finding in self]
        tables = [[("severity", "rule", "reason", "fix"), *rows]] if rows else []
        return as_html(counted(len(rows), "finding") if rows else str(self), *tables)


def validate(
    spec: Spec = None,
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
    zero_offload: bool | None = None,
    tensor_parallel: int | None = None,
    quantized_base: bool | None = None,
    accumulation_steps: int | None = None,
    max_grad_norm: float | None = None,
    chip: str | None = None,
) -> Findings:
    """Find known problems of a recipe in a setup, on this machine or another, the worst first.

    None means unknown: values visible in the model are read from it, without changing it; rules
    skip the rest.

    Args:
        spec: as for `resolve`. An invalid string or field becomes a finding, not an exception.
        model: read for its wrapper, layers, configuration and buffers.
        parallel, compiled: how the model will be wrapped; default: as `model` shows, else "none".
        attention: transformers' `attn_implementation`, such as sdpa or flash_attention_2.
        sequence_length: tokens in a sequence of a batch.
        optimizer: the object, or its name in transformers' `optim` or Axolotl's `optimizer`.
        cpu_ram_efficient_loading: FSDP's option to load weights on the first rank only.
        world_size: processes that train together; default: those of the running process group.
        zero_stage, zero_offload: DeepSpeed's stage, and if it keeps states or weights on the CPU or
            a disk.
        tensor_parallel: ranks that share a layer.
        quantized_base: bitsandbytes stores layers in 4 or 8 bits.
        accumulation_steps: backward passes for each optimizer step.
        max_grad_norm: norm for gradient clipping; 0: no clipping.
        chip: a name in `chips.CARDS` such as "h100" or "hopper": judge for a machine with this
            chip and new libraries; default: this machine with its libraries.

    Raises:
        RecipeError: `chip`, `parallel` or `compiled` is an unknown word, `optimizer` is neither an
            optimizer nor a name, or another argument is not a number, flag or word of its kind.
        FP8BackendError: `model` is not a module.
    """
    if model is not None:
        check_is_module(model)
    if not isinstance(optimizer, (torch.optim.Optimizer, str, type(None))):
        raise RecipeError(
            f"optimizer={shown(optimizer)} must be a torch.optim.Optimizer that was made, or a name"
        )
    arguments = {
        "activation_checkpointing": (flag, activation_checkpointing),
        "attention": (word, attention),
        "sequence_length": (whole_number(1), sequence_length),
        "vocab_size": (whole_number(1), vocab_size),
        "cpu_ram_efficient_loading": (flag, cpu_ram_efficient_loading),
        "world_size": (whole_number(1), world_size),
        "zero_stage": (whole_number(0), zero_stage),
        "zero_offload": (flag, zero_offload),
        "tensor_parallel": (whole_number(1), tensor_parallel),
        "quantized_base": (flag, quantized_base),
        "accumulation_steps": (whole_number(1), accumulation_steps),
        "max_grad_norm": (float, max_grad_norm),
    }
    read = {
        name: None if value is None else parsed(name, parse, value)
        for name, (parse, value) in arguments.items()
    }
    if (
        read["world_size"] is None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        read["world_size"] = torch.distributed.get_world_size()
    machine = Machine.this() if chip is None else Machine.with_chip(chip)
    try:
        recipe = resolve(spec)
    except RecipeError as error:
        return Findings([_wrong_recipe(error)])
    name = optimizer if isinstance(optimizer, str) else None
    setup = Setup(recipe, machine, parallel, compiled, optimizer=name, **read)
    found = findings(setup, model)
    if not any(finding.rule == "recipe" for finding in found):
        found += _refused(optimizer, setup, on_this_machine=chip is None)
    return _sorted(found)


def findings(setup: Setup, model: nn.Module | None = None) -> Findings:
    """Apply the rules to a setup, completed from the model. The worst come first."""
    try:
        setup = setup if model is None else _with_model(setup, model)
    except RecipeError as error:
        return Findings([_wrong_recipe(error)])
    return _sorted(
        Finding(rule.severity, rule.name, rule.reason_in(each), rule.fix)
        for rule, each in applying(setup)
    )


def _sorted(found: Iterable[Finding]) -> Findings:
    return Findings(
        sorted(found, key=lambda finding: ("error", "warning", "info").index(finding.severity))
    )


def _wrong_recipe(error: RecipeError) -> Finding:
    return Finding("error", "recipe", str(error), "correct the backend string or the field")


def _refused(optimizer: Any, setup: Setup, on_this_machine: bool) -> Iterator[Finding]:
    """Yield the refusals of an optimizer object and of the machine by `prepare`."""
    try:
        if isinstance(optimizer, torch.optim.Optimizer):
            preconditions.check_optimizer(optimizer, setup.recipe)
    except BackendUnavailableError:
        pass  # a finding of its own
    except FP8BackendError as error:
        yield Finding(
            "error", "optimizer", str(error), "use torch.optim.AdamW, or a backend without +msamp"
        )
    try:
        if on_this_machine:
            preconditions.check_machine(setup.recipe)
    except BackendUnavailableError as error:
        yield Finding(
            "error", "unavailable", str(error), "choose a backend that `fp8-backends doctor` lists"
        )
    except RecipeError as error:
        yield _wrong_recipe(error)


# Reading the model


def _with_model(setup: Setup, model: nn.Module) -> Setup:
    expected = conversion.expected(model, setup.recipe)
    fp8 = set(expected.converted)
    # experts have the name of their Parameter
    converted = fp8 | {f"{name}.weight".lstrip(".") for name in fp8}
    trains = [
        conversion.plain_name(name) for name, p in model.named_parameters() if p.requires_grad
    ]
    config = getattr(model, "config", None)
    # the language model of a multimodal one
    config = getattr(config, "text_config", None) or config
    shown = {
        "parallel": _parallel(model),
        "compiled": _compiled(model),
        "activation_checkpointing": any(map(_is_checkpointed, model.modules())),
        "attention": getattr(config, "_attn_implementation", None),
        "vocab_size": getattr(config, "vocab_size", None),
    }
    return replace(
        setup,
        **{name: value for name, value in shown.items() if getattr(setup, name) is None},
        linear_sizes=tuple(
            (p.in_features, p.out_features) for p in expected.products if p.name in fp8
        ),
        linear_trains=not converted.isdisjoint(trains),
        codes_that_train=tuple(quantized_layers.training_codes(model)),
        expected=expected,
        only_weights_train=bool(trains) and converted.issuperset(trains),
        persistent_buffers=tuple(
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ),
    )


_WRAPPERS = {
    "DistributedDataParallel": "ddp",
    "FullyShardedDataParallel": "fsdp1",
    "FSDPModule": "fsdp2",
    "DeepSpeedEngine": "deepspeed",
}


def _parallel(model: nn.Module) -> Parallel:
    """Find the model's wrapper by class names, without an import (`fully_shard` subclasses
    FSDPModule)."""
    names = {
        cls.__name__
        for module in (model, getattr(model, "_orig_mod", model))
        for cls in type(module).__mro__
    }
    return next((kind for name, kind in _WRAPPERS.items() if name in names), "none")


def _compiled(model: nn.Module) -> Compiled:
    if _is_compiled(model) or _is_compiled(getattr(model, "module", None)):
        return "full"
    return "regional" if any(_is_compiled(module) for module in model.modules()) else "none"


def _is_checkpointed(module: nn.Module) -> bool:
    """Recognize layers of transformers and diffusers, and PyTorch's `checkpoint_wrapper`."""
    return (
        getattr(module, "gradient_checkpointing", False)
        or type(module).__name__ == "CheckpointWrapper"
    )


def _is_compiled(module: Any) -> bool:
    """Recognize the wrapper of `torch.compile(module)` and the attribute of `module.compile()`."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
