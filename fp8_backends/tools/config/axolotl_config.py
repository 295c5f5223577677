"""Read the precision, sharding and compilation of an Axolotl (0.19) configuration file as
`TrainingConfig`."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils.dataclasses import DynamoBackend

from ...compute.fields import flag, one_of, whole_number, word
from ...errors import RecipeError
from ...rules import Parallel
from .training_config import DEEPSPEED_PRECISION, UNCOMPILED, ConfigFile, TrainingConfig

_FP8_KEYS = ("fp8", "fp8_config", "fp8_enable_fsdp_float8_all_gather")
_RECIPES = one_of("tensorwise", "rowwise", "rowwise_with_gw_hp")
_FSDP_KEYS = ("fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type")

_FSDP_BLOCK = {
    "activation_checkpointing": flag,
    "auto_wrap_policy": one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "cpu_ram_efficient_loading": flag,
    "min_num_params": whole_number(1),
    "offload_params": flag,
    "reshard_after_forward": None,
    "state_dict_type": one_of("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    "transformer_layer_cls_to_wrap": None,
}
"""Keys of fsdp_config, without the prefix fsdp_, and the parsers of their values (None: as they
are)."""
_FSDP1_ONLY = {"backward_prefetch": None, "forward_prefetch": flag, "sharding_strategy": None}
_FSDP1_ONLY |= {"sync_module_states": flag, "use_orig_params": flag}
"""Further keys, without effect under FSDP2."""
_NOT_CARRIED = {
    "cpu_offload_pin_memory": "set FSDP_CPU_OFFLOAD_PIN_MEMORY in the environment",
    "final_state_dict_type": "it is Axolotl's own, for the last save",
    "limit_all_gathers": "Accelerate has no such setting",
    "mixed_precision_policy": "FP8 under Accelerate computes in bf16 around its products",
}

_ATTENTION_FLAGS = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
"""Older keys for `attn_implementation`, and its values."""
_COMPILERS = one_of(*(each.value for each in DynamoBackend if each.value != "NO"))
_COMPILE_MODES = one_of("default", "reduce-overhead", "max-autotune")
_MESH = {
    "dp_replicate_size": "parallelism_config_dp_replicate_size",
    "dp_shard_size": "parallelism_config_dp_shard_size",
    "tensor_parallel_size": "parallelism_config_tp_size",
    "context_parallel_size": "parallelism_config_cp_size",
}
_READ = (
    *(*_FP8_KEYS, *_FSDP_KEYS, *_ATTENTION_FLAGS, *_MESH),
    *(
        "bf16",
        "fp16",
        "bfloat16",
        "float16",
        "deepspeed",
        "gradient_checkpointing",
        "optimizer",
        "sequence_len",
    ),
    *(
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "attn_implementation",
        "load_in_4bit",
    ),
    *("load_in_8bit", "expert_parallel_size"),
)


def read_axolotl(
    values: Mapping[str, Any], source: str, processes: int | None = None
) -> TrainingConfig:
    """Interpret the file. Raises `RecipeError` for unknown keys of fp8 and fsdp, or values that
    Axolotl refuses."""
    file = ConfigFile(values, source)
    notes = []
    file.refuse_unknown(_FP8_KEYS, "fp8")
    file.refuse_unknown(_FSDP_KEYS, "fsdp")
    fsdp = _fsdp(file, notes)
    parallel = _parallel(file, fsdp)
    mesh = {key: file.get(key, whole_number(1), 1) for key in _MESH}
    if processes is None:
        # Axolotl starts one process for each GPU; without a GPU here, an engine leaves the number
        # unknown
        processes = torch.cuda.device_count() or (1 if parallel == "none" else None)
        processes = math.prod(mesh.values()) if max(mesh.values()) > 1 else processes
    if parallel == "none" and processes is not None and processes > 1:
        parallel = "ddp"
    config = TrainingConfig(
        source,
        "axolotl",
        _precision(file, notes),
        parallel=parallel,
        processes=processes,
        notes=notes,
    )
    if config.mixed_precision == "fp8":
        config.fields = _fields(file, notes)
    dynamo = {}
    if _is_on(file, "torch_compile", "auto"):
        backend = file.values.get("torch_compile_backend") or "INDUCTOR"
        dynamo["dynamo_backend"] = file.parsed("torch_compile_backend", _COMPILERS, backend)
        if file.values.get("torch_compile_mode"):
            dynamo["dynamo_mode"] = file.get("torch_compile_mode", _COMPILE_MODES)
    config.compiled = "none" if dynamo.get("dynamo_backend", "NO") in UNCOMPILED else "full"
    config.surroundings = _surroundings(file, fsdp, parallel)
    config.accelerate = {
        **_engine(file, parallel, fsdp),
        **({"num_processes": processes} if processes else {}),
        **({"dynamo_config": dynamo} if dynamo else {}),
    }
    if file.get("expert_parallel_size", whole_number(1), 1) > 1:
        notes.append("expert_parallel_size is left out: Accelerate has no expert parallelism")
    if max(mesh.values()) > 1:
        config.accelerate["parallelism_config"] = {_MESH[key]: size for key, size in mesh.items()}
    config.passed_over = [key for key in values if key not in _READ]
    if values.get("torch_compile") == "auto":
        notes.append("torch_compile: auto is written as true: it is on from torch 2.5.1")
    if parallel == "deepspeed":
        notes.append(DEEPSPEED_PRECISION)
    if processes is None:
        notes.append(
            "the file does not say how many processes train: give --num_processes N here or to "
            "launch"
        )
    elif parallel == "none":
        notes.append("one process: Axolotl starts one for each GPU; for DDP say --num_processes N")
    return config


def _is_on(file: ConfigFile, key: str, *words: str) -> bool:
    """Read a flag, by default False. `words` also mean true."""
    return file.get(key, lambda value: value in words or flag(value), False)


def _engine_settings(value: Any) -> Any:
    """Return the settings of an engine; None for false."""
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1"):
        raise ValueError(
            "must be what the engine reads: DeepSpeed's JSON file, a list of FSDP's options"
        )
    return None if word in ("false", "no", "off", "0") else value


def _precision(file: ConfigFile, notes: list[str]) -> str:
    if _is_on(file, "fp8"):
        return "fp8"
    if file.values.get("fp8_config") is not None:
        raise RecipeError(
            f"{file.source}: fp8_config is read with fp8: true only: set fp8: true, or remove it"
        )
    if _is_on(file, "fp8_enable_fsdp_float8_all_gather"):
        notes.append("fp8_enable_fsdp_float8_all_gather has no effect without fp8: true")
    if _is_fp16(file):
        return "fp16"
    if file.values.get("bf16", "auto") == "auto":
        notes.append("bf16: auto is written as bf16, for a machine that has it")
        return "bf16"
    return "bf16" if _is_bf16(file) else "no"


def _is_bf16(file: ConfigFile) -> bool:
    return file.values.get("bf16", "auto") not in ("auto", "full") and _is_on(file, "bf16")


def _is_fp16(file: ConfigFile) -> bool:
    return _is_on(file, "fp16") and (
        file.values.get("bf16") == "auto" or not _is_on(file, "bf16", "full")
    )


def _fields(file: ConfigFile, notes: list[str]) -> dict[str, Any]:
    block = file.block("fp8_config")
    block.refuse_unknown(["recipe"])
    fields: dict[str, Any] = {"backend": f"ao:{block.get('recipe', _RECIPES, 'tensorwise')}"}
    if _is_on(file, "fp8_enable_fsdp_float8_all_gather"):
        fields["enable_fsdp_float8_all_gather"] = True
    if _is_bf16(file):
        fields["autocast_dtype"] = "bf16"
    if _is_fp16(file):
        fields["autocast_dtype"] = "fp16"
        notes.append(
            "fp16: true beside fp8: here FP8 runs over fp16 autocast; Axolotl loads the weights in "
            "fp16 and runs bf16 autocast around FP8"
        )
    return fields


def _fsdp(file: ConfigFile, notes: list[str]) -> dict[str, Any]:
    """Return the FSDP block without prefixes and unset keys, with its version; {} without FSDP."""
    block = file.block("fsdp_config")
    if not file.get("fsdp", _engine_settings) and not block.values:
        if file.values.get("fsdp_version") is not None:
            notes.append("fsdp_version has no effect without fsdp_config")
        return {}
    in_block = {f"fsdp_config.{key}": block.values.get(key) for key in ("fsdp_version", "version")}
    places = {"fsdp_version": file.values.get("fsdp_version"), **in_block}
    # perhaps in quotes
    places = {key: str(value).strip() for key, value in places.items() if value is not None}
    if len(set(places.values())) > 1:
        raise RecipeError(
            f"{file.source}: {', '.join(f'{key}: {each}' for key, each in places.items())} disagree"
        )
    key, version = next(iter(places.items()), ("fsdp_version", "1"))  # Axolotl's own default
    version = int(file.parsed(key, one_of("1", "2"), version))
    block.values = {
        key.removeprefix("fsdp_"): value for key, value in block.values.items() if value is not None
    }
    parsers = _FSDP_BLOCK | _FSDP1_ONLY
    block.refuse_unknown([*parsers, *_NOT_CARRIED, "version"])
    settings: dict[str, Any] = {"version": version}
    for key, value in block.values.items():
        if key in _NOT_CARRIED:
            notes.append(f"fsdp_config.{key} is left out: {_NOT_CARRIED[key]}")
        elif key in _FSDP1_ONLY and version == 2:
            notes.append(f"fsdp_config.{key} is left out: it has no effect under FSDP2")
        elif key != "version":
            settings[key] = value if parsers[key] is None else block.get(key, parsers[key])
    return settings


def _parallel(file: ConfigFile, fsdp: Mapping[str, Any]) -> Parallel:
    deepspeed = file.get("deepspeed", _engine_settings)
    if not deepspeed:
        return f"fsdp{fsdp['version']}" if fsdp else "none"
    if fsdp:
        raise RecipeError(
            f"{file.source}: deepspeed and fsdp_config are two engines: leave one out"
        )
    if not isinstance(deepspeed, str):
        raise RecipeError(
            f"{file.source}: deepspeed holds DeepSpeed's settings themselves, and Accelerate reads "
            "them from a file: write them to a JSON file, and name it there"
        )
    return "deepspeed"


def _engine(file: ConfigFile, parallel: Parallel, fsdp: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "machine_rank": 0,
        "use_cpu": False,
    }
    if parallel == "deepspeed":
        block = {"deepspeed_config_file": file.values["deepspeed"]}
        return {**keys, "distributed_type": "DEEPSPEED", "deepspeed_config": block}
    if fsdp:
        # the launcher loads efficiently by default, Axolotl does not
        block = {
            "fsdp_cpu_ram_efficient_loading": False,
            **{f"fsdp_{key}": value for key, value in fsdp.items()},
        }
        return {**keys, "distributed_type": "FSDP", "fsdp_config": block}
    return {**keys, "distributed_type": "MULTI_GPU" if parallel == "ddp" else "NO"}


def _surroundings(file: ConfigFile, fsdp: Mapping[str, Any], parallel: Parallel) -> dict[str, Any]:
    flags = (name for key, name in _ATTENTION_FLAGS.items() if _is_on(file, key))
    attention = file.values.get("attn_implementation")
    checkpointing = _is_on(file, "gradient_checkpointing", "offload", "offload_disk")
    return {
        "activation_checkpointing": checkpointing or fsdp.get("activation_checkpointing", False),
        "attention": str(attention) if attention else next(flags, None),
        "sequence_length": file.get("sequence_len", whole_number(1)),
        "optimizer": file.get("optimizer", word),
        "cpu_ram_efficient_loading": fsdp.get("cpu_ram_efficient_loading", False) if fsdp else None,
        **(file.zero(file.values["deepspeed"]) if parallel == "deepspeed" else {}),
        "tensor_parallel": file.get("tensor_parallel_size", whole_number(1), 1),
        "quantized_base": any(_is_on(file, key) for key in ("load_in_4bit", "load_in_8bit")),
    }
