"""What the rules say of the training that an Accelerator is about to prepare: refused, or logged before it begins."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, DynamoBackend
from torch import nn

from ..announcement import is_main_process
from ..training.rules import Compiled, Machine, Parallel, Setup
from ..training.validators import Finding, findings

logger = logging.getLogger("fp8_backends")

_SAID_ELSEWHERE = ("no_fp8_hardware",)
"""On a machine without FP8 products the proof line names the engine that emulates them."""


def setup_of(accelerator: Accelerator) -> Setup:
    """The recipe of an Accelerator with the machine and the engine around it, without a model."""
    engine = accelerator.distributed_type
    fsdp = accelerator.state.fsdp_plugin if engine == DistributedType.FSDP else None
    deepspeed = accelerator.state.deepspeed_plugin if engine == DistributedType.DEEPSPEED else None
    return Setup(
        accelerator.fp8_recipe,
        Machine.this(),
        _parallel(accelerator),
        _compiled(accelerator),
        activation_checkpointing=True if fsdp and fsdp.activation_checkpointing else None,
        cpu_ram_efficient_loading=fsdp.cpu_ram_efficient_loading if fsdp else None,
        world_size=accelerator.num_processes,
        zero_stage=3 if deepspeed and deepspeed.hf_ds_config.is_zero3() else None,
        engine_bf16=_runs_in_bf16(deepspeed) if deepspeed else None,
    )


def _parallel(accelerator: Accelerator) -> Parallel | None:
    """The engine; None: what the model shows."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "deepspeed"
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        return "megatron"
    return "ddp" if accelerator._wraps_in_ddp else None


def _compiled(accelerator: Accelerator) -> Compiled | None:
    dynamo = accelerator.state.dynamo_plugin
    if dynamo.backend == DynamoBackend.NO:
        return None
    return "regional" if dynamo.use_regional_compilation else "full"


def _runs_in_bf16(plugin: DeepSpeedPlugin) -> bool:
    return any(_is_enabled(plugin.deepspeed_config.get(section)) for section in ("bf16", "torch_autocast"))


def _is_enabled(section: Any) -> bool:
    return isinstance(section, dict) and str(section.get("enabled", False)).lower() == "true"


def known_problems(setup: Setup, models: Iterable[nn.Module]) -> list[Finding]:
    """Errors and warnings about the models that train, not converted yet; on the main process, nothing elsewhere."""
    found: dict[str, Finding] = {}
    for model in models if is_main_process() else ():
        if any(parameter.requires_grad for parameter in model.parameters()):
            for finding in findings(setup, model):
                if finding.severity != "info" and finding.rule not in _SAID_ELSEWHERE:
                    found.setdefault(finding.rule, finding)
    return list(found.values())


def log(found: Iterable[Finding]) -> None:
    """Log one warning for each finding."""
    for finding in found:
        logger.warning("%s", finding)
