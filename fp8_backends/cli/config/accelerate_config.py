"""A configuration file of Accelerate, as `TrainingConfig`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ...compute.fields import flag, one_of, whole_number
from ...errors import RecipeError
from ...recipes.merging import accelerate_fields
from ...recipes.sources import config_source
from ...training.rules import Compiled, Parallel
from .training_config import (
    DEEPSPEED_PRECISION,
    UNCOMPILED,
    TrainingConfig,
    block,
    refuse_unknown,
    value_of,
    zero_stage,
)

_OLD_KEYS = ("fp16", "dynamo_backend")
"""Top-level keys that Accelerate still translates."""

_ENGINES: dict[str, Parallel] = {
    "NO": "none",
    "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "megatron",
    "XLA": "tpu",
    "TPU": "tpu",
}
"""By `distributed_type`; FSDP by its version, and all others are kinds of DDP."""

_GATHER = "enable_fsdp_float8_all_gather"

_BLOCKS: dict[str, tuple[str, ...]] = {
    "fsdp_config": ("fsdp_",),
    "dynamo_config": ("dynamo_",),
    "deepspeed_config": ("", "deepspeed_", "zero", "offload_", "gradient_"),
}
"""Blocks, and how the flags that their keys name begin: the first of these may be left out."""


def read_accelerate(values: Mapping[str, Any], source: str, processes: int | None = None) -> TrainingConfig:
    """What the file means. Raises `RecipeError` for keys that Accelerate does not take, or would take and ignore."""
    if "SAGEMAKER" in str(values.get("compute_environment", "")).upper():
        raise RecipeError(
            f"{source} is for Amazon SageMaker, which starts scripts by itself: put `import fp8_backends` into the "
            "script, and its backend into Accelerator(kwargs_handlers=[…])"
        )
    _check_keys(values, source)
    engine = _engine(values, source)
    precision = _precision(values, source)
    blocks = {name: _block(values, name, source) for name in _BLOCKS if values.get(name)}
    fsdp, dynamo = blocks.get("fsdp_config", {}), _dynamo(values, blocks.get("dynamo_config", {}), source)
    processes = processes or _processes(values, engine, source)
    config = TrainingConfig(
        source,
        "accelerate",
        precision,
        fields=_fields(values, source) if precision == "fp8" else {},
        parallel=_parallel(engine, fsdp, source),
        processes=processes,
        compiled=_compiled(dynamo, source),
    )
    config.surroundings = _surroundings(values, config, fsdp, blocks.get("deepspeed_config", {}), source)
    config.accelerate = {
        **{key: value for key, value in values.items() if key not in ("mixed_precision", "fp8_config", *_OLD_KEYS)},
        "distributed_type": "XLA" if engine == "TPU" else engine,
        **({"num_processes": processes} if processes else {}),
        **({"dynamo_config": dynamo} if dynamo else {}),
    }
    _note(config, values)
    return config


def _check_keys(values: Mapping[str, Any], source: str) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    refuse_unknown(source, values, [*(f.name for f in dataclasses.fields(ClusterConfig)), *_OLD_KEYS])
    if "distributed_type" not in values:
        raise RecipeError(f"{source}: distributed_type is missing, and Accelerate wants it: NO, MULTI_GPU, FSDP, …")


def _engine(values: Mapping[str, Any], source: str) -> str:
    from accelerate.utils import DistributedType

    names = [kind.value for kind in DistributedType]
    word = values["distributed_type"]
    if word is False:
        word = "NO"  # as YAML reads a plain NO
    return value_of(f"{source}: distributed_type", one_of(*names, "TPU"), word)


def _precision(values: Mapping[str, Any], source: str) -> str:
    word = values.get("mixed_precision")
    if word is None or word is False:
        word = "fp16" if values.get("fp16") else "no"
    return value_of(f"{source}: mixed_precision", one_of("no", "fp16", "bf16", "fp8"), word)


def _block(values: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """The block under the names of its flags. A key that is no flag would be passed over in silence."""
    prefix, *_ = _BLOCKS[name]
    found = {prefix + key.removeprefix(prefix): value for key, value in block(values, name, source).items()}
    refuse_unknown(f"{source}: {name}", found, _keys(name))
    return found


@functools.cache
def _keys(name: str) -> list[str]:
    """Of a block: flags of the installed Accelerate's launcher."""
    from accelerate.commands.launch import launch_command_parser

    beginnings = tuple(filter(None, _BLOCKS[name]))
    flags = [action.dest for action in launch_command_parser()._actions if action.dest.startswith(beginnings)]
    return [*flags, "fsdp_ignored_modules"] if name == "fsdp_config" else flags  # which is read without a flag


def _parallel(engine: str, fsdp: Mapping[str, Any], source: str) -> Parallel:
    if engine == "FSDP":
        version = fsdp.get("fsdp_version", 1)
        return f"fsdp{value_of(f'{source}: fsdp_config.fsdp_version', _fsdp_version, version)}"
    return _ENGINES.get(engine, "ddp")


def _fsdp_version(value: Any) -> int:
    return int(one_of("1", "2")(str(value)))


def _processes(values: Mapping[str, Any], engine: str, source: str) -> int | None:
    given = values.get("num_processes")
    if given in (None, -1):
        return 1 if engine == "NO" else None
    return value_of(f"{source}: num_processes", whole_number(1), given)


def _dynamo(values: Mapping[str, Any], given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The block with its backend in one spelling; empty where there is none."""
    from accelerate.utils.dataclasses import DynamoBackend

    word = given.get("dynamo_backend", values.get("dynamo_backend"))
    if word is None:
        return dict(given)
    names = one_of(*(each.value for each in DynamoBackend))
    word = "NO" if word is False else word  # as YAML reads a plain NO
    return {**given, "dynamo_backend": value_of(f"{source}: dynamo_backend", names, word)}


def _compiled(dynamo: Mapping[str, Any], source: str) -> Compiled:
    if dynamo.get("dynamo_backend", "NO") in UNCOMPILED:
        return "none"
    regional = dynamo.get("dynamo_use_regional_compilation", False)
    return "regional" if value_of(f"{source}: dynamo_use_regional_compilation", flag, regional) else "full"


def _fields(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    fields = accelerate_fields(block(values, "fp8_config", source), source)
    if fields.get("pad_inner_dim") is True:
        del fields["pad_inner_dim"]  # the wizard's answer, and TorchAO's default
    return fields


def _idle(values: Mapping[str, Any], source: str) -> frozenset[str]:
    """Fields whose values are what `accelerate config` fills in by itself."""
    return config_source(block(values, "fp8_config", source), source).idle


def _surroundings(
    values: Mapping[str, Any], config: TrainingConfig, fsdp: Mapping, deepspeed: Mapping, source: str
) -> dict[str, Any]:
    """What `validate` wants to know. The launcher's own defaults hold where the file says nothing."""
    found: dict[str, Any] = {}
    if config.parallel in ("fsdp1", "fsdp2"):
        for name, default in (("activation_checkpointing", False), ("cpu_ram_efficient_loading", True)):
            key = f"fsdp_{name}"
            found[name] = value_of(f"{source}: fsdp_config.{key}", flag, fsdp.get(key, default))
    if config.parallel == "deepspeed":
        file, stage = deepspeed.get("deepspeed_config_file"), deepspeed.get("zero_stage", 2)
        stage = zero_stage(file, source) if file else value_of(f"{source}: zero_stage", whole_number(0), stage)
        found["zero_stage"] = stage
    ranks = block(values, "parallelism_config", source).get("parallelism_config_tp_size")
    if ranks is not None:
        found["tensor_parallel"] = value_of(f"{source}: parallelism_config_tp_size", whole_number(1), ranks)
    return found


def _note(config: TrainingConfig, values: Mapping[str, Any]) -> None:
    if config.mixed_precision != "fp8" and values.get("fp8_config"):
        config.notes.append(f"fp8_config has no effect: mixed_precision is {config.mixed_precision}, not fp8")
    if config.parallel != "fsdp2" and _GATHER in config.fields and _GATHER in _idle(values, config.source):
        del config.fields[_GATHER]
        config.notes.append(
            "enable_fsdp_float8_all_gather: true, which `accelerate config` recommends, has no effect without FSDP2: "
            "left out"
        )
    if "deepspeed_config_file" in block(values, "deepspeed_config", config.source) and values.get("mixed_precision"):
        config.notes.append(DEEPSPEED_PRECISION)
    if config.processes is None:
        config.notes.append("num_processes is not said: give --num_processes N when you launch")
