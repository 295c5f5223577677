"""What `validate` knows about the training that an Accelerator is about to prepare, said once before it begins."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from ..announcement import is_main_process
from ..training.rules import Compiled, Parallel
from ..training.validators import Finding, validate

logger = logging.getLogger("fp8_backends")

_SAID_ELSEWHERE = ("no_fp8_hardware",)
"""Of a machine without FP8 products the engine in the proof line tells."""


def known_problems(accelerator: Accelerator, models: Iterable[nn.Module]) -> list[Finding]:
    """Errors and warnings about the models that train, not converted yet; on the main process, nothing elsewhere."""
    if not is_main_process():
        return []
    engine = accelerator.distributed_type
    fsdp = accelerator.state.fsdp_plugin if engine == DistributedType.FSDP else None  # not there otherwise
    deepspeed = accelerator.state.deepspeed_plugin if engine == DistributedType.DEEPSPEED else None
    found: dict[str, Finding] = {}
    for model in models:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            continue
        for finding in validate(
            accelerator.fp8_recipe,
            model,
            parallel=_parallel(accelerator),
            compiled=_compiled(accelerator),
            activation_checkpointing=True if fsdp and fsdp.activation_checkpointing else None,
            cpu_ram_efficient_loading=fsdp.cpu_ram_efficient_loading if fsdp else None,
            zero_stage=deepspeed.zero_stage if deepspeed else None,
            world_size=accelerator.num_processes,
        ):
            if finding.severity != "info" and finding.rule not in _SAID_ELSEWHERE:
                found.setdefault(finding.rule, finding)
    return list(found.values())


def say(findings: Iterable[Finding]) -> None:
    """One warning a finding."""
    for finding in findings:
        logger.warning("%s", finding)


def _parallel(accelerator: Accelerator) -> Parallel | None:
    """None: what the model shows."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "deepspeed"
    return "ddp" if accelerator._wraps_in_ddp else None


def _compiled(accelerator: Accelerator) -> Compiled | None:
    dynamo = accelerator.state.dynamo_plugin
    if dynamo.backend == DynamoBackend.NO:
        return None
    return "regional" if dynamo.use_regional_compilation else "full"
