"""Describe to the rules the training that an Accelerator is about to prepare."""

from __future__ import annotations

from collections.abc import Iterable

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend
from torch import nn

from ..announcement import is_main_process
from ..training.rules import Machine, Parallel, Setup
from ..training.validators import Finding, findings
from .callers import running_trainer


def setup_of(accelerator: Accelerator) -> Setup:
    """Describe the recipe of an Accelerator with its machine and engine, without a model."""
    engine, state, ddp = accelerator.distributed_type, accelerator.state, accelerator.ddp_handler
    fsdp = state.fsdp_plugin if engine == DistributedType.FSDP else None
    deepspeed = state.deepspeed_plugin if engine == DistributedType.DEEPSPEED else None
    engines: dict[DistributedType, Parallel] = {
        DistributedType.FSDP: "fsdp2" if accelerator.is_fsdp2 else "fsdp1",
        DistributedType.DEEPSPEED: "deepspeed",
        DistributedType.MEGATRON_LM: "megatron",
    }
    dynamo, compiled = state.dynamo_plugin, None
    if dynamo.backend != DynamoBackend.NO:
        compiled = "regional" if dynamo.use_regional_compilation else "full"
    sections = [deepspeed.deepspeed_config.get(name) for name in ("bf16", "torch_autocast")] if deepspeed else []
    enabled = [isinstance(each, dict) and str(each.get("enabled")).lower() == "true" for each in sections]
    hook = ddp.comm_hook if ddp is not None else DDPCommunicationHookType.NO
    arguments = getattr(running_trainer(), "args", None)
    return Setup(
        accelerator.fp8_recipe,
        Machine.this(),
        engines.get(engine, "ddp" if accelerator._wraps_in_ddp else None),
        compiled,
        activation_checkpointing=True if fsdp and fsdp.activation_checkpointing else None,
        cpu_ram_efficient_loading=fsdp.cpu_ram_efficient_loading if fsdp else None,
        world_size=accelerator.num_processes,
        zero_stage=3 if deepspeed and deepspeed.hf_ds_config.is_zero3() else None,
        engine_bf16=any(enabled) if deepspeed else None,
        tensor_parallel=accelerator.parallelism_config.tp_size if accelerator.parallelism_config else None,
        comm_hook=None if hook == DDPCommunicationHookType.NO else str(getattr(hook, "value", hook)),
        accumulation_steps=getattr(arguments, "gradient_accumulation_steps", accelerator.gradient_accumulation_steps),
        max_grad_norm=getattr(arguments, "max_grad_norm", None),
    )


def known_problems(setup: Setup, models: Iterable[nn.Module]) -> list[Finding]:
    """Errors and warnings about the models that train, which are not converted yet. Only the main process has any."""
    found: dict[str, Finding] = {}
    for model in models if is_main_process() else ():
        if any(parameter.requires_grad for parameter in model.parameters()):
            for finding in findings(setup, model):
                # without FP8 hardware the proof line names the engine that emulates the products
                if finding.severity != "info" and finding.rule != "no_fp8_hardware":
                    found.setdefault(finding.rule, finding)
    return list(found.values())
