"""A configuration file of Axolotl, as `TrainingConfig`.

Of its hundreds of keys those are read that say something about precision, sharding and compilation. What they mean is
what Axolotl 0.19 does with them: FP8 through TorchAO, by `fp8_config.recipe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...compute.fields import flag, one_of, whole_number
from ...errors import RecipeError
from ...training.rules import Parallel
from .training_config import (
    DEEPSPEED_PRECISION,
    UNCOMPILED,
    TrainingConfig,
    block,
    refuse_unknown,
    value_of,
    zero_stage,
)

_FP8_KEYS = ("fp8", "fp8_config", "fp8_enable_fsdp_float8_all_gather")
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_FSDP_KEYS = ("fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type")

_OF_FSDP = {
    "activation_checkpointing": flag,
    "auto_wrap_policy": one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "cpu_ram_efficient_loading": flag,
    "min_num_params": whole_number(1),
    "offload_params": flag,
    "reshard_after_forward": None,
    "state_dict_type": one_of("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    "transformer_layer_cls_to_wrap": None,
}
"""Keys of fsdp_config, without the prefix fsdp_, and how their values are read (None: as they are)."""
_OF_FSDP1 = {
    "backward_prefetch": None,
    "forward_prefetch": flag,
    "sharding_strategy": None,
    "sync_module_states": flag,
    "use_orig_params": flag,
}
"""Further ones that FSDP2 has no use for, and examples have all the same."""
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
"""Older keys, and the `attn_implementation` that each stands for."""
_MODES = one_of("default", "reduce-overhead", "max-autotune")
_PARALLELISM = {
    "dp_replicate_size": "parallelism_config_dp_replicate_size",
    "dp_shard_size": "parallelism_config_dp_shard_size",
    "tensor_parallel_size": "parallelism_config_tp_size",
    "context_parallel_size": "parallelism_config_cp_size",
}
_READ = (
    *_FP8_KEYS,
    *_FSDP_KEYS,
    *_ATTENTION_FLAGS,
    *_PARALLELISM,
    *("bf16", "fp16", "bfloat16", "float16", "deepspeed", "gradient_checkpointing", "optimizer", "sequence_len"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "attn_implementation", "load_in_4bit"),
    *("load_in_8bit", "expert_parallel_size"),
)


def read_axolotl(values: Mapping[str, Any], source: str, processes: int | None = None) -> TrainingConfig:
    """What the file means. Raises `RecipeError` for unknown keys that begin with fp8 or fsdp, or lie in their blocks,
    and for values that Axolotl would refuse."""
    for prefix, known in (("fp8", _FP8_KEYS), ("fsdp", _FSDP_KEYS)):
        refuse_unknown(source, (key for key in values if key.lower().startswith(prefix)), known)
    notes: list[str] = []
    fsdp = _fsdp(values, source, notes)
    parallel = _parallel(values, fsdp, source)
    processes = processes or _product_of_sizes(values, source) or _processes_here(parallel)
    if parallel == "none" and processes is not None and processes > 1:
        parallel = "ddp"
    config = TrainingConfig(source, "axolotl", _precision(values, source, notes), notes=notes)
    config.parallel, config.processes = parallel, processes
    if config.mixed_precision == "fp8":
        config.fields = _fields(values, source, notes)
    dynamo = _dynamo(values, source) if _is_on(values, "torch_compile", source, "auto") else {}
    config.compiled = "none" if dynamo.get("dynamo_backend", "NO") in UNCOMPILED else "full"
    config.surroundings = _surroundings(values, fsdp, parallel, source)
    config.accelerate = {
        **_engine(values, parallel, fsdp, source),
        **({"num_processes": processes} if processes else {}),
        **({"dynamo_config": dynamo} if dynamo else {}),
        **_parallelism(values, source, notes),
    }
    config.passed_over = [key for key in values if key not in _READ]
    _note(config, values)
    return config


# precision


def _is_on(values: Mapping[str, Any], key: str, source: str, *words: str) -> bool:
    """A flag; False where it is not set. `words`: what turns it on beside true."""
    value = values.get(key)
    return value is not None and (value in words or value_of(f"{source}: {key}", flag, value))


def _precision(values: Mapping[str, Any], source: str, notes: list[str]) -> str:
    if _is_on(values, "fp8", source):
        return "fp8"
    if values.get("fp8_config") is not None:
        raise RecipeError(f"{source}: fp8_config is read with fp8: true only: set fp8: true, or remove it")
    if _is_on(values, "fp8_enable_fsdp_float8_all_gather", source):
        notes.append("fp8_enable_fsdp_float8_all_gather has no effect without fp8: true")
    if _is_fp16(values, source):
        return "fp16"
    if values.get("bf16", "auto") == "auto":
        notes.append("bf16: auto is written as bf16, for a machine that has it")
        return "bf16"
    return "bf16" if values["bf16"] != "full" and _is_on(values, "bf16", source) else "no"


def _is_fp16(values: Mapping[str, Any], source: str) -> bool:
    """Axolotl takes bf16 where both are asked for."""
    bf16 = values.get("bf16") != "auto" and _is_on(values, "bf16", source, "full")
    return _is_on(values, "fp16", source) and not bf16


def _fields(values: Mapping[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    given = block(values, "fp8_config", source)
    refuse_unknown(f"{source}: fp8_config", given, ["recipe"])
    recipe = value_of(f"{source}: fp8_config.recipe", one_of(*_RECIPES), given.get("recipe", "tensorwise"))
    fields: dict[str, Any] = {"backend": f"ao:{recipe}"}
    if _is_on(values, "fp8_enable_fsdp_float8_all_gather", source):
        fields["enable_fsdp_float8_all_gather"] = True
    if _is_fp16(values, source):
        fields["autocast_dtype"] = "fp16"
        notes.append(
            "fp16: true beside fp8: here FP8 runs over fp16 autocast; Axolotl loads the weights in fp16 and runs bf16 "
            "autocast around FP8"
        )
    return fields


# engines


def _fsdp(values: Mapping[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    """The FSDP block without prefixes, its version in it; empty without FSDP. Values are read, unset keys left out."""
    given = block(values, "fsdp_config", source)
    if not given and not values.get("fsdp"):
        if values.get("fsdp_version") is not None:
            notes.append("fsdp_version has no effect without fsdp_config")
        return {}
    plain = {key.removeprefix("fsdp_"): value for key, value in given.items() if value is not None}
    refuse_unknown(f"{source}: fsdp_config", plain, [*_OF_FSDP, *_OF_FSDP1, *_NOT_CARRIED, "version"])
    version = _version(values, given, source)
    found: dict[str, Any] = {"version": version}
    for key, value in plain.items():
        if key in _NOT_CARRIED:
            notes.append(f"fsdp_config.{key} is left out: {_NOT_CARRIED[key]}")
        elif key in _OF_FSDP1 and version == 2:
            notes.append(f"fsdp_config.{key} is left out: it has no effect under FSDP2")
        elif key != "version":
            parse = {**_OF_FSDP, **_OF_FSDP1}[key]
            found[key] = value if parse is None else value_of(f"{source}: fsdp_config.{key}", parse, value)
    return found


def _version(values: Mapping[str, Any], given: Mapping[str, Any], source: str) -> int:
    """1 where nobody says it, as in Axolotl. Its three places must agree; a number may stand in quotes."""
    said = {"fsdp_version": values.get("fsdp_version")}
    said |= {f"fsdp_config.{key}": given.get(key) for key in ("fsdp_version", "version")}
    said = {key: str(value).strip() for key, value in said.items() if value is not None}
    if len(set(said.values())) > 1:
        raise RecipeError(f"{source}: {', '.join(f'{key}: {value}' for key, value in said.items())} disagree")
    key, version = next(iter(said.items()), ("fsdp_version", "1"))
    return int(value_of(f"{source}: {key}", one_of("1", "2"), version))


def _parallel(values: Mapping[str, Any], fsdp: Mapping[str, Any], source: str) -> Parallel:
    if values.get("deepspeed") and fsdp:
        raise RecipeError(f"{source}: deepspeed and fsdp_config are two engines: leave one out")
    if values.get("deepspeed") and not isinstance(values["deepspeed"], str):
        raise RecipeError(
            f"{source}: deepspeed holds DeepSpeed's settings themselves, and Accelerate reads them from a file: write "
            "them to a JSON file, and name it there"
        )
    if values.get("deepspeed"):
        return "deepspeed"
    return f"fsdp{fsdp['version']}" if fsdp else "none"


def _product_of_sizes(values: Mapping[str, Any], source: str) -> int | None:
    """The processes that a mesh of given sizes has."""
    sizes = [_size(values, key, source) for key in _PARALLELISM]
    return torch.Size(sizes).numel() if max(sizes) > 1 else None


def _size(values: Mapping[str, Any], key: str, source: str) -> int:
    return 1 if values.get(key) is None else value_of(f"{source}: {key}", whole_number(1), values[key])


def _processes_here(parallel: Parallel) -> int | None:
    """Axolotl starts one for each GPU. None: an engine for several, and no GPU here to count."""
    gpus = torch.cuda.device_count()
    return gpus or (1 if parallel == "none" else None)


def _engine(values: Mapping[str, Any], parallel: Parallel, fsdp: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Accelerate's keys for the engine."""
    common = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0, "use_cpu": False}
    if parallel == "deepspeed":
        return {
            **common,
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"deepspeed_config_file": values["deepspeed"]},
        }
    if fsdp:
        # the launcher's own default is to load efficiently; Axolotl's is not
        written = {"fsdp_cpu_ram_efficient_loading": False, **{f"fsdp_{key}": value for key, value in fsdp.items()}}
        return {**common, "distributed_type": "FSDP", "fsdp_config": written}
    return {**common, "distributed_type": "MULTI_GPU" if parallel == "ddp" else "NO"}


def _dynamo(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    from accelerate.utils.dataclasses import DynamoBackend

    names = [each.value for each in DynamoBackend if each.value != "NO"]
    backend = values.get("torch_compile_backend") or "INDUCTOR"
    mode = values.get("torch_compile_mode")
    return {
        "dynamo_backend": value_of(f"{source}: torch_compile_backend", one_of(*names), backend),
        **({"dynamo_mode": value_of(f"{source}: torch_compile_mode", _MODES, mode)} if mode else {}),
    }


def _parallelism(values: Mapping[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    if _size(values, "expert_parallel_size", source) > 1:
        notes.append("expert_parallel_size is left out: Accelerate has no expert parallelism")
    sizes = {key: _size(values, key, source) for key in _PARALLELISM}
    if max(sizes.values()) == 1:
        return {}
    return {"parallelism_config": {_PARALLELISM[key]: size for key, size in sizes.items()}}


# what surrounds FP8


def _surroundings(values: Mapping[str, Any], fsdp: Mapping, parallel: Parallel, source: str) -> dict[str, Any]:
    checkpointing = _is_on(values, "gradient_checkpointing", source, "offload", "offload_disk")
    quantized = any(_is_on(values, key, source) for key in ("load_in_4bit", "load_in_8bit"))
    length = values.get("sequence_len")
    file = values.get("deepspeed")
    return {
        "activation_checkpointing": checkpointing or fsdp.get("activation_checkpointing", False),
        "attention": _attention(values, source),
        "sequence_length": None if length is None else value_of(f"{source}: sequence_len", whole_number(1), length),
        "optimizer": values.get("optimizer"),
        "cpu_ram_efficient_loading": fsdp.get("cpu_ram_efficient_loading", False) if fsdp else None,
        "zero_stage": zero_stage(file, source) if parallel == "deepspeed" else None,
        "tensor_parallel": _size(values, "tensor_parallel_size", source),
        "quantized_base": quantized,
    }


def _attention(values: Mapping[str, Any], source: str) -> str | None:
    if values.get("attn_implementation"):
        return str(values["attn_implementation"])
    return next((name for key, name in _ATTENTION_FLAGS.items() if _is_on(values, key, source)), None)


def _note(config: TrainingConfig, values: Mapping[str, Any]) -> None:
    if values.get("torch_compile") == "auto":
        config.notes.append("torch_compile: auto is written as true: it is on from torch 2.5.1")
    if config.parallel == "deepspeed":
        config.notes.append(DEEPSPEED_PRECISION)
    if config.processes is None:
        config.notes.append("the file does not say how many processes train: give --num_processes N here or to launch")
    elif config.parallel == "none":
        config.notes.append("one process: Axolotl starts one for each GPU; for DDP say --num_processes N")
