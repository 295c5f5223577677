"""Use every public name as a user writes it, for a type checker. Never run this program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import fp8_backends
from fp8_backends import (
    AORecipeKwargs,
    BackendUnavailableError,
    FP8BackendError,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    RecipeError,
    TERecipeKwargs,
)
from fp8_backends.advice import Advice
from fp8_backends.checkpoints import Export, RolloutWeights
from fp8_backends.compute import Compute
from fp8_backends.compute.hardware import Availability
from fp8_backends.convert.stored_weights import keep_weight_casts
from fp8_backends.convert.weight_products import ConversionReport
from fp8_backends.evidence.auditing import Audit
from fp8_backends.evidence.policy_gap import PolicyGap
from fp8_backends.recipes.handlers import Recipe
from fp8_backends.recipes.precision_plan import PrecisionPlan
from fp8_backends.rules.validate import Finding
from fp8_backends.watch.guard import Fault, faults


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y

    def size(self) -> int:
        return 32


def recipes() -> Sequence[Recipe]:
    fields: dict[str, object] = {"backend": "native", "margin": 2}
    return [
        FP8RecipeKwargs(
            backend="msamp:O2", rounding="nearest", include=["layer"], shard_states=False
        ),
        FP8RecipeKwargs("native:delayed", margin=1, override_linear_precision=(False, False, True)),
        TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="max"),
        AORecipeKwargs(
            scaling="rowwise", module_filter_func=lambda module, name: "head" not in name
        ),
        MSAMPRecipeKwargs(opt_level="O3", gradient_comm="plain"),
        NativeRecipeKwargs(
            scaling="blockwise", exclude="lm_head", on_unproven="warn", fp8_params=True
        ),
        fp8_backends.resolve("te+msamp:O2"),
        fp8_backends.resolve(fields),
        fp8_backends.resolve(),
    ]


def use(recipe: FP8RecipeKwargs) -> str:
    margin: int = recipe.margin
    flags: tuple[bool, bool, bool] = recipe.override_linear_precision
    patterns = recipe.include
    given: frozenset[str] = recipe.given
    plan: PrecisionPlan = fp8_backends.plan(recipe)
    size: float = plan.bytes_per_element
    return f"{recipe.name} {recipe.level} {recipe.comm} {margin} {flags} {patterns} {given} {size}"


def train() -> dict[str, object]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    same, same_optimizer = fp8_backends.prepare(
        model, optimizer, FP8RecipeKwargs(backend="msamp:O3")
    )
    width: int = same.size()
    same_optimizer.step()
    found: list[Fault] = faults(same_optimizer)
    seen: list[str] = [f"{fault.step} {fault.kind} {fault.figures}" for fault in found]
    alone, nothing = fp8_backends.prepare(model, None, "native")
    none: None = nothing
    fp8_backends.initialize(alone, optimizer, opt_level="O2", use_te=False)
    keep_weight_casts(model, keep=False)
    with fp8_backends.checkpoints.whole_states(optimizer, receives=True):
        model.state_dict()
    with fp8_backends.checkpoints.plain_weights(model) as plain:
        plain.state_dict()
    fp8_backends.restore(model)
    names: list[str] = fp8_backends.checkpoints.dequantize(model, dtype=torch.bfloat16)
    names += fp8_backends.checkpoints.freeze_codes(model)
    names += fp8_backends.checkpoints.load_codes(model, "model.safetensors", prefix="net.")
    audit: Audit = fp8_backends.audit(model, optimizer)
    share: float = audit.flops_share
    return {"share": share, "width": width, "names": names, "none": none, "seen": seen}


def report(found: ConversionReport) -> list[str]:
    reasons: dict[str, str] = found.high_precision
    return [*found.converted, *reasons.values()]


def check(model: nn.Module) -> list[str]:
    findings = fp8_backends.validate(
        "te", model, parallel="ddp", compiled="full", world_size=2, chip="hopper"
    )
    worst: Finding = findings[0]
    severity: str = worst.severity
    return [severity, worst.rule, worst.reason, worst.fix]


def ask(model: nn.Module) -> str:
    batches: list[torch.Tensor] = [torch.randn(4, 32)]
    advice: Advice = fp8_backends.advise(model, batches, "native", min_flops_share=0.9)
    recipe: Recipe = advice.recipe
    return f"{advice.verdict} {recipe.name}"


def save(model: nn.Module) -> str:
    newest: str | None = fp8_backends.checkpoints.newest_checkpoint("runs")
    if newest is not None:
        return newest
    try:
        written: Export = fp8_backends.checkpoints.export(
            model, "folder", "compressed-tensors", max_shard_size="5GB"
        )
    except (BackendUnavailableError, RecipeError) as error:
        return str(error)
    except FP8BackendError:
        raise
    return f"{written.folder} {written.exact} {written.rounded}"


def roll_out(model: nn.Module) -> float:
    weights: RolloutWeights = fp8_backends.checkpoints.rollout_weights(model, "compressed-tensors")
    config: dict[str, object] = weights.quantization_config
    sent: dict[str, torch.Tensor] = dict(weights)
    gap: PolicyGap = fp8_backends.policy_gap(torch.zeros(2), torch.zeros(2), mask=torch.ones(2))
    return gap.k3 + gap.tokens + len(sent) + len(config) + len(weights.high_precision)


def backends(mine: type[Compute]) -> dict[str, str]:
    fp8_backends.connect()
    fp8_backends.register_backend("mine", mine, replace=True)
    found: dict[str, Availability] = fp8_backends.available_backends()
    return {name: each.reason + each.fix for name, each in found.items() if each.can_run}
