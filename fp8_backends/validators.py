"""Combinations that are known to go wrong or slow, as rows of data, and one loop over them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from . import hardware, registry
from .errors import BackendUnavailableError, RecipeError
from .recipes import Recipe, resolve

Severity = Literal["error", "warning", "info"]
_ORDER = ("error", "warning", "info")

Parallel = Literal["none", "ddp", "fsdp1", "fsdp2", "deepspeed"]
Compiled = Literal["none", "full", "regional"]


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


@dataclass(frozen=True)
class Setup:
    """What the rules look at."""

    recipe: Recipe
    parallel: Parallel
    compiled: Compiled
    gpu: bool
    fp8_products: bool
    capability: tuple[int, int] | None = None
    """The lowest CUDA capability here; None without an NVIDIA GPU."""
    cuda: tuple[int, int] | None = None
    """Release of the CUDA that this PyTorch was built for."""
    backward_override: str = ""
    """What NVTE_BACKWARD_OVERRIDE in the environment tells TransformerEngine."""
    linear_sizes: tuple[tuple[int, int], ...] = ()
    """(in_features, out_features) of the model's Linear layers; empty without a model."""
    linear_trains: bool = False
    """Whether a Linear has a weight that trains; False where the recipe names layers, or without a model."""


class Rule(NamedTuple):
    name: str
    severity: Severity
    applies: Callable[[Setup], bool]
    reason: str
    fix: str


SMALL_IN, SMALL_OUT = 4096, 1024
"""Layers up to this size gain nothing from tensorwise FP8, by the measurements behind TorchAO's automatic filter."""

TWIN = "use the native rule of the same name, such as native:delayed for te:delayed: same fields, codes and scales"


def _te(*scalings: str) -> Callable[[Setup], bool]:
    """Whether TransformerEngine makes the products, by one of these rules (none: by any)."""
    return lambda s: s.recipe.compute == "te" and (not scalings or s.recipe.scaling in scalings)


_te_blockwise, _te_mxfp8 = _te("blockwise"), _te("mxfp8")


def _older(cuda: tuple[int, int] | None, wanted: tuple[int, int]) -> bool:
    return cuda is not None and cuda < wanted


TE_RULES = (
    Rule(
        "te_without_nvidia_gpu",
        "error",
        lambda s: s.recipe.compute == "te" and s.capability is None,
        "TransformerEngine runs on NVIDIA GPUs, and there is none here",
        TWIN,
    ),
    Rule(
        "te_before_fp8",
        "error",
        lambda s: s.recipe.compute == "te" and s.capability is not None and s.capability < hardware.FP8_CAPABILITY,
        "TransformerEngine multiplies FP8 matrices from compute capability 8.9 on",
        f"train in bf16, or {TWIN}",
    ),
    Rule(
        "te_ada_libraries",
        "error",
        lambda s: s.recipe.compute == "te" and s.capability == (8, 9) and _older(s.cuda, (12, 1)),
        "on Ada TransformerEngine wants CUDA 12.1 and cuBLASLt 12.1.3, or newer",
        "install a PyTorch for a newer CUDA",
    ),
    Rule(
        "te_block_chip",
        "error",
        lambda s: _te_blockwise(s) and s.capability is not None and (8, 9) <= s.capability < (9, 0),
        "block scales need compute capability 9.0 or higher",
        "use te:dynamic, or native:blockwise, which emulates them",
    ),
    Rule(
        "te_block_cuda",
        "error",
        lambda s: _te_blockwise(s) and s.capability is not None and _older(s.cuda, (12, 9)),
        "cuBLAS multiplies with block scales from CUDA 12.9 on, and this PyTorch was built for an older one",
        "install a PyTorch for CUDA 12.9 or newer, or use te:dynamic",
    ),
    Rule(
        "te_mxfp8_chip",
        "error",
        lambda s: _te_mxfp8(s) and s.capability is not None and not (10, 0) <= s.capability < (12, 0),
        "TransformerEngine has MXFP8 on compute capability 10 and 11 only (B200, B300, Thor)",
        "use te:dynamic or te:blockwise, or native:mxfp8, which emulates it",
    ),
    Rule(
        "te_backward_in_high_precision",
        "error",
        lambda s: s.recipe.compute == "te" and bool(s.backward_override),
        "NVTE_BACKWARD_OVERRIDE in the environment takes TransformerEngine's backward products out of FP8, or, with "
        "delayed scaling, stops it",
        "unset NVTE_BACKWARD_OVERRIDE",
    ),
    Rule(
        "fp8_params_sharded",
        "error",
        lambda s: s.recipe.fp8_params and s.parallel in ("fsdp1", "fsdp2", "deepspeed"),
        "fp8_params does not go with sharded weights: FSDP and DeepSpeed cut parameters up, which TransformerEngine's "
        "FP8 weights are not made for here",
        "use DDP, or te+msamp:O3, whose FP8 weights FSDP2 shards",
    ),
    Rule(
        "fp8_params_trains",
        "error",
        lambda s: s.recipe.fp8_params and s.linear_trains,
        "fp8_params leaves no weight in high precision: an update below half a step of E4M3, 3 to 6 % of the weight, "
        "would be lost, so weights that train are refused",
        "freeze what FP8 shall keep and exclude what trains, such as adapters; or use te+msamp:O3, which has masters",
    ),
)

RULES = (
    Rule(
        "no_fp8_hardware",
        "warning",
        lambda s: not s.fp8_products,
        "no FP8 hardware here: FP8 products are made by other means, with the same numbers and slower than bf16",
        'train with mixed_precision="bf16" for speed; FP8 here is for checking a recipe',
    ),
    Rule(
        "ao_without_compile",
        "warning",
        lambda s: s.recipe.compute == "ao" and s.gpu and s.compiled == "none",
        "TorchAO's casts are many small kernels unless compiled: without torch.compile FP8 is slower than bf16",
        "compile the model, or its repeated blocks",
    ),
    Rule(
        "all_gather_without_fsdp2",
        "error",
        lambda s: _asks_for_all_gather(s.recipe) and s.parallel != "fsdp2",
        "enable_fsdp_float8_all_gather replaces the weights by tensors that only FSDP2 trains: they would never change",
        "leave enable_fsdp_float8_all_gather out, or use FSDP2",
    ),
    Rule(
        "ao_ddp_full_compile",
        "warning",
        lambda s: s.recipe.compute == "ao" and s.parallel == "ddp" and s.compiled == "full",
        "TorchAO's FP8 under DDP with the whole model compiled is known to fail in other trainers",
        "compile the repeated blocks instead (regional compilation)",
    ),
    Rule(
        "short_amax_history",
        "info",
        lambda s: (
            s.recipe.scaling == "delayed" and s.recipe.amax_history_len == 1 and "max" == s.recipe.amax_compute_algo
        ),
        "amax_history_len=1 leaves nothing to take a maximum of: amax_compute_algo='max' equals 'most_recent'",
        "lengthen the history, or drop amax_compute_algo",
    ),
    Rule(
        "fp16_autocast",
        "info",
        lambda s: s.recipe.autocast_dtype == "fp16",
        "fp16 around FP8 needs a loss scaler: Accelerate makes one, a loop of your own must",
        "use bf16 where the device has it",
    ),
    Rule(
        "small_layers",
        "warning",
        lambda s: bool(s.linear_sizes) and s.fp8_products and all(map(_is_small, s.linear_sizes)),
        f"every Linear layer is at most {SMALL_IN} -> {SMALL_OUT}: casting to FP8 costs more than its products save",
        "train in bf16, or give FP8 a larger model",
    ),
    *TE_RULES,
)


def validate(
    spec: Any = None,
    model: nn.Module | None = None,
    *,
    parallel: Parallel | None = None,
    compiled: Compiled | None = None,
) -> list[Finding]:
    """What is known to go wrong with this recipe, on this machine, in this setup. The worst come first.

    Args:
        spec: what `resolve` takes. A string or field that cannot be honoured becomes a finding, not an exception.
        model: looked at for its wrapper and its Linear layers.
        parallel, compiled: how the model will be wrapped; by default what `model` shows, else "none".
    """
    try:
        recipe = resolve(spec)
    except RecipeError as error:
        return [Finding("error", "recipe", str(error), "correct the backend string or the field")]
    setup = Setup(
        recipe,
        parallel or _parallel(model),
        compiled or _compiled(model),
        hardware.has_gpu(),
        hardware.fp8_products(),
        hardware.lowest_capability(),
        hardware.cuda_release(),
        os.environ.get("NVTE_BACKWARD_OVERRIDE", ""),
        _linear_sizes(model),
        _linear_trains(model, recipe),
    )
    findings = [Finding(rule.severity, rule.name, rule.reason, rule.fix) for rule in RULES if rule.applies(setup)]
    try:
        registry.check_available(recipe)
    except BackendUnavailableError as error:
        findings.append(
            Finding("error", "unavailable", str(error), "choose a backend that `fp8-backends doctor` lists")
        )
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def _is_small(size: tuple[int, int]) -> bool:
    return size[0] <= SMALL_IN and size[1] <= SMALL_OUT


def _asks_for_all_gather(recipe: Recipe) -> bool:
    return bool(recipe.enable_fsdp_float8_all_gather or getattr(recipe.config, "enable_fsdp_float8_all_gather", False))


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


def _linear_sizes(model: nn.Module | None) -> tuple[tuple[int, int], ...]:
    if model is None:
        return ()
    return tuple((m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear))


def _linear_trains(model: nn.Module | None, recipe: Recipe) -> bool:
    """Of layers that no pattern or filter of the user's leaves out: which these are is conversion's to say."""
    if model is None or recipe.include or recipe.exclude or recipe.module_filter_func:
        return False
    return any(m.weight.requires_grad for m in model.modules() if isinstance(m, nn.Linear))
