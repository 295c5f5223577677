"""Read a configuration file of Accelerate as `TrainingConfig`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import DynamoBackend

from ...compute.fields import flag, one_of, whole_number, word
from ...errors import RecipeError
from ...recipes.merging import merged
from ...recipes.sources import config_source
from ...rules import Compiled, Parallel
from .training_config import DEEPSPEED_PRECISION, UNCOMPILED, ConfigFile, TrainingConfig, offloads

_OLD_KEYS = ("fp16", "dynamo_backend")
"""Top-level keys that Accelerate still translates."""

_ENGINES: dict[str, Parallel] = {"NO": "none", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
_ENGINES |= {"XLA": "tpu", "TPU": "tpu"}
"""Engines by `distributed_type`. FSDP depends on its version, and all others are kinds of DDP."""

_GATHER = "enable_fsdp_float8_all_gather"

_BLOCKS: dict[str, tuple[str, ...]] = {
    "fsdp_config": ("fsdp_",),
    "dynamo_config": ("dynamo_",),
    "deepspeed_config": ("", "deepspeed_", "zero", "offload_", "gradient_"),
}
"""Prefixes of the flags in each block; a key may omit the first one."""


def read_accelerate(
    values: Mapping[str, Any], source: str, processes: int | None = None
) -> TrainingConfig:
    """Interpret the file. Raises `RecipeError` for keys that Accelerate refuses or ignores."""
    if "SAGEMAKER" in str(values.get("compute_environment", "")).upper():
        raise RecipeError(
            f"{source} is for Amazon SageMaker, which starts scripts by itself: put `import "
            "fp8_backends` into the script, and its backend into Accelerator(kwargs_handlers=[…])"
        )
    file = ConfigFile(values, source)
    file.refuse_unknown([*(each.name for each in dataclasses.fields(ClusterConfig)), *_OLD_KEYS])
    if "distributed_type" not in values:
        raise RecipeError(
            f"{source}: distributed_type is missing, and Accelerate wants it: NO, MULTI_GPU, FSDP, "
            "…"
        )
    engines = one_of(*(kind.value for kind in DistributedType), "TPU")
    engine = file.parsed("distributed_type", engines, _word(values["distributed_type"]))
    fsdp = _block(file, "fsdp_config")
    deepspeed = _block(file, "deepspeed_config")
    dynamo = _dynamo(file)
    parallel = _ENGINES.get(engine, "ddp")
    if engine == "FSDP":
        parallel = f"fsdp{fsdp.get('fsdp_version', lambda value: one_of('1', '2')(str(value)), 1)}"
    compiled: Compiled = (
        "regional" if dynamo.get("dynamo_use_regional_compilation", flag) else "full"
    )
    if dynamo.values.get("dynamo_backend", "NO") in UNCOMPILED:
        compiled = "none"
    if processes is None and values.get("num_processes") != -1:
        processes = file.get("num_processes", whole_number(1))
    config = TrainingConfig(
        source,
        "accelerate",
        _precision(file),
        parallel=parallel,
        processes=processes or (1 if engine == "NO" else None),
        compiled=compiled,
    )
    if config.mixed_precision == "fp8":
        config.fields = _fields(file, config)
    elif values.get("fp8_config"):
        config.notes.append(
            f"fp8_config has no effect: mixed_precision is {config.mixed_precision}, not fp8"
        )
    config.surroundings = _surroundings(file, config, fsdp, deepspeed)
    config.accelerate = {
        **{
            key: value
            for key, value in values.items()
            if key not in ("mixed_precision", "fp8_config", *_OLD_KEYS)
        },
        "distributed_type": "XLA" if engine == "TPU" else engine,
        **({"num_processes": config.processes} if config.processes else {}),
        **({"dynamo_config": dynamo.values} if dynamo.values else {}),
    }
    if (
        config.parallel == "deepspeed"
        and _has_deepspeed_file(file)
        and values.get("mixed_precision")
    ):
        config.notes.append(DEEPSPEED_PRECISION)
    if config.processes is None:
        config.notes.append("num_processes is not given: give --num_processes N when you launch")
    return config


def _word(value: Any) -> Any:
    """Return "NO" for False, as YAML reads a plain NO."""
    return "NO" if value is False else value


def _has_deepspeed_file(file: ConfigFile) -> bool:
    return "deepspeed_config_file" in file.block("deepspeed_config").values


def _precision(file: ConfigFile) -> str:
    word = file.values.get("mixed_precision")
    if word is None and _has_deepspeed_file(file) and file.values.get("fp8_config"):
        return "fp8"  # Accelerate refuses mixed_precision beside that file
    if word is None or word is False:
        word = "fp16" if file.get("fp16", flag) else "no"
    return file.parsed("mixed_precision", one_of("no", "fp16", "bf16", "fp8"), word)


def _block(file: ConfigFile, name: str) -> ConfigFile:
    """Return a block with the names of its flags, and refuse keys that Accelerate would ignore."""
    prefix = _BLOCKS[name][0]
    block = file.block(name)
    block.values = {prefix + key.removeprefix(prefix): value for key, value in block.values.items()}
    if block.values:
        block.refuse_unknown(_keys(name))
    return block


@functools.cache
def _keys(name: str) -> list[str]:
    """List the flags of a block in the installed Accelerate's launcher."""
    from accelerate.commands.launch import launch_command_parser  # loads every launcher

    beginnings = tuple(filter(None, _BLOCKS[name]))
    flags = [
        action.dest
        for action in launch_command_parser()._actions
        if action.dest.startswith(beginnings)
    ]
    # the launcher has no flag for it
    return [*flags, "fsdp_ignored_modules"] if name == "fsdp_config" else flags


def _dynamo(file: ConfigFile) -> ConfigFile:
    """Return the block with its backend in one spelling; older files have it outside."""
    block = _block(file, "dynamo_config")
    key = "dynamo_backend"
    place = block if key in block.values else file
    if (word := place.values.get(key)) is not None:
        block.values[key] = place.parsed(
            key, one_of(*(each.value for each in DynamoBackend)), _word(word)
        )
    return block


def _fields(file: ConfigFile, config: TrainingConfig) -> dict[str, Any]:
    block = file.block("fp8_config").values
    source = config_source(block, file.source)
    fields = merged([source])
    if fields.get("pad_inner_dim") is True:
        del fields["pad_inner_dim"]  # the wizard's answer, and TorchAO's default
    if config.parallel != "fsdp2" and _GATHER in fields and _GATHER in source.idle:
        del fields[_GATHER]
        config.notes.append(
            "enable_fsdp_float8_all_gather: true, which `accelerate config` recommends, has no "
            "effect without FSDP2: left out"
        )
    return fields


def _surroundings(
    file: ConfigFile, config: TrainingConfig, fsdp: ConfigFile, deepspeed: ConfigFile
) -> dict[str, Any]:
    """Return further arguments of `validate`, with the launcher's own defaults."""
    arguments: dict[str, Any] = {}
    if config.parallel in ("fsdp1", "fsdp2"):
        for name, default in (
            ("activation_checkpointing", False),
            ("cpu_ram_efficient_loading", True),
        ):
            arguments[name] = fsdp.get(f"fsdp_{name}", flag, default)
    if config.parallel == "deepspeed":
        if path := deepspeed.get("deepspeed_config_file", word):
            arguments = file.zero(path)
        else:
            arguments["zero_stage"] = deepspeed.get("zero_stage", whole_number(0), 2)
            devices = (
                deepspeed.values.get(f"offload_{part}_device") for part in ("optimizer", "param")
            )
            arguments["zero_offload"] = offloads(devices)
    ranks = file.block("parallelism_config").get("parallelism_config_tp_size", whole_number(1))
    return arguments if ranks is None else {**arguments, "tensor_parallel": ranks}
