"""What the rules say of the training that an Accelerator is about to prepare: refused, or logged before it begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DeepSpeedPlugin, DistributedType, DynamoBackend
from torch import nn

from ..announcement import is_main_process
from ..training.rules import Compiled, Machine, Parallel, Setup
from ..training.validators import Finding, findings
from .callers import running_trainer


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
        tensor_parallel=accelerator.parallelism_config.tp_size if accelerator.parallelism_config else None,
        comm_hook=_comm_hook(accelerator),
        accumulation_steps=_asked_of_trainer("gradient_accumulation_steps", accelerator.gradient_accumulation_steps),
        max_grad_norm=_asked_of_trainer("max_grad_norm"),
    )


def _asked_of_trainer(argument: str, default: Any = None) -> Any:
    """One of the TrainingArguments of the Trainer that makes or uses the Accelerator; without one, the default."""
    return getattr(getattr(running_trainer(), "args", None), argument, default)


def _parallel(accelerator: Accelerator) -> Parallel | None:
    """The engine; None means what the model shows."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    engines: dict[DistributedType, Parallel] = {
        DistributedType.DEEPSPEED: "deepspeed",
        DistributedType.MEGATRON_LM: "megatron",
    }
    return engines.get(accelerator.distributed_type, "ddp" if accelerator._wraps_in_ddp else None)


def _comm_hook(accelerator: Accelerator) -> str | None:
    hook = accelerator.ddp_handler.comm_hook if accelerator.ddp_handler is not None else DDPCommunicationHookType.NO
    return None if hook == DDPCommunicationHookType.NO else str(getattr(hook, "value", hook))


def _compiled(accelerator: Accelerator) -> Compiled | None:
    dynamo = accelerator.state.dynamo_plugin
    if dynamo.backend == DynamoBackend.NO:
        return None
    return "regional" if dynamo.use_regional_compilation else "full"


def _runs_in_bf16(plugin: DeepSpeedPlugin) -> bool:
    sections = [plugin.deepspeed_config.get(name) for name in ("bf16", "torch_autocast")]
    return any(isinstance(each, dict) and str(each.get("enabled")).lower() == "true" for each in sections)


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
