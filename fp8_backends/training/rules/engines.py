"""What the engines that wrap a model, and the ranks that train it, cannot do."""

from __future__ import annotations

from ...comm.ddp import HOOK_AT_A_LEVEL
from ...compute.frozen_weights import SHARDED
from .setup import Rule, Setup, always


def _asks_for_all_gather(setup: Setup) -> bool:
    if setup.recipe.compute != "ao":
        return False
    from ...compute.torchao.backend import asks_for_all_gather  # slow: its products load torch's compiler

    return asks_for_all_gather(setup.recipe)


def _native_gathers(setup: Setup) -> bool:
    return setup.recipe.compute == "native" and bool(setup.recipe.enable_fsdp_float8_all_gather)


def _own_autocast(setup: Setup) -> bool:
    return "autocast_dtype" in setup.recipe.given and setup.recipe.autocast_dtype != "bf16"


def _autocast_dtype(setup: Setup) -> str:
    return f"autocast_dtype={setup.recipe.autocast_dtype!r}"


def _shares_layers(setup: Setup) -> bool:
    return setup.tensor_parallel is not None and setup.tensor_parallel > 1


def _layers_shared(setup: Setup) -> str:
    return f"{setup.tensor_parallel} ranks share layers"


TENSOR_PARALLEL_RULES = (
    Rule(
        "level_tensor_parallel",
        "error",
        lambda s: _shares_layers(s) and s.recipe.level in ("O3", "O4"),
        "of the levels, O1 and O2 go with layers that ranks share (tensor parallelism); at O3 and O4 parts of a weight "
        "would have masters, residuals and blocks of states that no test covers",
        "use the same backend with +msamp:O2, or leave tensor parallelism out and shard with FSDP2",
        _layers_shared,
        always,
    ),
    Rule(
        "te_tensor_parallel",
        "error",
        lambda s: _shares_layers(s) and s.recipe.compute == "te" and not s.experts_alone,
        "TransformerEngine's layers know tensor parallelism by process groups of their own, and not the DTensors of "
        "PyTorch, transformers and Accelerate",
        "use native:… or ao:…, or leave tensor parallelism out",
        _layers_shared,
        always,
    ),
    Rule(
        "fp8_params_tensor_parallel",
        "error",
        lambda s: _shares_layers(s) and s.recipe.fp8_params,
        "fp8_params=True does not go with layers that ranks share (tensor parallelism): frozen FP8 weights are whole",
        "leave fp8_params out, or train adapters on one rank or under DDP",
        _layers_shared,
        always,
    ),
    Rule(
        "ddp_shared_layers",
        "error",
        lambda s: s.parallel == "ddp" and _shares_layers(s),
        "DDP takes no model with layers or experts that ranks share: it joins whole tensors, and these are DTensors",
        "with tensor parallelism give Accelerator a ParallelismConfig(tp_size=…); for expert parallelism Accelerate "
        "and Lightning have none: load the model with DistributedConfig(fsdp_size=…, ep_size=…), and train it with "
        "fp8_backends.prepare in a loop of your own",
        _layers_shared,
        always,
    ),
)
"""What no backend or level can do with a model whose layers ranks share: asked of the model itself, too."""

ENGINE_RULES = (
    Rule(
        "level_deepspeed",
        "error",
        lambda s: s.has_level and s.parallel == "deepspeed",
        "the levels O1 to O4 do not go with DeepSpeed, whose ZeRO stages keep weights, gradients and optimizer "
        "states in partitions of their own",
        "leave DeepSpeed out and use FullyShardedDataParallelPlugin(fsdp_version=2): FSDP2 shards this very level; or "
        "use the same backend without +msamp",
        lambda s: f"with DeepSpeed, {s.recipe.compute}:{s.recipe.scaling} trains in FP8",
        is_raised=always,
    ),
    Rule(
        "level_fsdp1",
        "error",
        lambda s: s.has_level and s.parallel == "fsdp1",
        "the levels O1 to O4 do not go with FSDP1, which flattens parameters: a flat one cannot be stored in "
        "scaled precision",
        "set fsdp_version=2 (FullyShardedDataParallelPlugin, `accelerate launch --fsdp_version 2`), or use the same "
        "backend without +msamp",
        is_raised=always,
    ),
    Rule(
        "fsdp1",
        "warning",
        lambda s: not s.has_level and s.parallel == "fsdp1",
        "FP8 under FSDP1 is not tested with this package, and its ranks do not agree on the scales of native:delayed "
        "and native:window",
        "set fsdp_version: 2",
    ),
    Rule(
        "all_gather_without_fsdp2",
        "error",
        lambda s: s.parallel != "fsdp2" and _asks_for_all_gather(s),
        "enable_fsdp_float8_all_gather replaces the weights by tensors that only FSDP2 trains: they would never change",
        "leave enable_fsdp_float8_all_gather out, or use FSDP2 (fsdp_version: 2)",
        is_raised=lambda s: s.world_size not in (None, 1),  # one process is refused where its model is converted
    ),
    Rule(
        "autocast_fsdp2",
        "error",
        lambda s: s.parallel == "fsdp2" and _own_autocast(s),
        "autocast_dtype has no effect under FSDP2, whose own configuration sets the precision around FP8",
        "leave autocast_dtype out",
        _autocast_dtype,
        always,
    ),
    Rule(
        "autocast_deepspeed",
        "error",
        lambda s: (
            s.parallel == "deepspeed"
            and (_own_autocast(s) or ("autocast_dtype" in s.recipe.given and s.engine_bf16 is False))
        ),
        "autocast_dtype has no effect under DeepSpeed, whose own configuration sets the precision around FP8 (bf16, or "
        "FP32 with bf16.enabled false)",
        "leave autocast_dtype out",
        _autocast_dtype,
        always,
    ),
    Rule(
        "fp8_gradients_deepspeed",
        "error",
        lambda s: s.parallel == "deepspeed" and s.recipe.gradient_comm == "fp8",
        'gradient_comm="fp8" has no effect on DeepSpeed\'s engine, which reduces gradients itself',
        "leave gradient_comm out and set communication_data_type in DeepSpeed's configuration (fp16, bf16 or fp32), or "
        "use DDP or FSDP2, where gradients travel in FP8",
        is_raised=always,
    ),
    Rule(
        "guard_engine",
        "error",
        lambda s: s.recipe.guard != "off" and s.parallel in ("deepspeed", "fsdp1"),
        "the guard looks at each parameter's gradient before each step of a PyTorch optimizer: DeepSpeed makes steps "
        "in its engine, and FSDP1 flattens parameters",
        "leave guard out, or use DDP or FSDP2 (fsdp_version: 2)",
        lambda s: f"guard={s.recipe.guard!r} with {s.parallel}",
        always,
    ),
    Rule(
        "comm_hook_level",
        "error",
        lambda s: s.has_level and s.parallel == "ddp" and s.comm_hook is not None,
        *HOOK_AT_A_LEVEL,
        lambda s: f"comm_hook={s.comm_hook!r}",
        always,
    ),
    Rule(
        "fp8_activations_backend",
        "error",
        lambda s: s.recipe.activation_comm == "fp8" and s.recipe.compute != "native",
        'activation_comm="fp8" is of native\'s products: those of other backends do not take activations as codes',
        "use native:…, or leave activation_comm out",
        lambda s: s.recipe.compute,
        always,
    ),
    Rule(
        "fp8_weights_engine",
        "error",
        lambda s: s.parallel in ("deepspeed", "fsdp1") and _native_gathers(s),
        "enable_fsdp_float8_all_gather has no effect on DeepSpeed and FSDP1, which gather weights themselves, as they "
        "are stored",
        "leave enable_fsdp_float8_all_gather out, or use FSDP2 (fsdp_version: 2), where weights travel in FP8",
        lambda s: s.parallel,
        always,
    ),
    Rule(
        "fp8_params_sharded",
        "error",
        lambda s: s.recipe.fp8_params and s.parallel in ("fsdp1", "fsdp2", "deepspeed"),
        *SHARDED,
        is_raised=always,
    ),
    Rule(
        "efficient_loading_buffers",
        "error",
        lambda s: bool(s.cpu_ram_efficient_loading and s.persistent_buffers) and s.parallel == "fsdp2",
        "with cpu_ram_efficient_loading Accelerate's FSDP2 takes every entry of the state dict for a sharded "
        "parameter: a buffer in it ends in \"'Tensor' object has no attribute 'device_mesh'\"",
        "register the buffers with persistent=False, or set cpu_ram_efficient_loading to false",
        lambda s: ", ".join(s.persistent_buffers[:3]) + (", …" if len(s.persistent_buffers) > 3 else ""),
    ),
    Rule(
        "ddp_nothing_left",
        "error",
        lambda s: s.has_level and s.parallel == "ddp" and s.only_weights_train,
        "all that trains are weights in scaled precision, and DDP takes no model that has nothing left for it to do",
        'keep one layer out, such as exclude=["lm_head"], or leave its bias trainable',
    ),
    Rule(
        "o3_alone",
        "info",
        lambda s: s.recipe.level == "O3" and s.world_size == 1,
        "on one process O3 takes 7 bytes for a weight, with its master, and O2 takes 6: O3 saves where ranks share "
        "the masters, 2 + 5/N bytes on N of them",
        "use O2; or O4, which takes 5 bytes on one process and 2 + 3/N on N",
    ),
    Rule(
        "shared_states_saving",
        "info",
        lambda s: s.recipe.shares_states and s.parallel == "ddp",
        "under DDP each rank has the masters, residuals and states of its own part at O3 and O4, so a state dict needs "
        "all ranks: a loop that saves on rank 0 alone gets an error (under transformers' Trainer, which does, each "
        "rank keeps all)",
        "save with Accelerator.save_state, or set shard_states=False",
    ),
    *TENSOR_PARALLEL_RULES,
    Rule(
        "tensor_parallel",
        "warning",
        lambda s: _shares_layers(s) and s.parallel in ("fsdp1", "deepspeed"),
        "tensor parallelism is tested with this package alone and with FSDP2, and not with DeepSpeed or FSDP1",
        "use ParallelismConfig(tp_size=…, dp_shard_size=…) with FSDP2 (fsdp_version: 2)",
        _layers_shared,
    ),
    Rule(
        "megatron",
        "error",
        lambda s: s.parallel == "megatron",
        "Megatron-LM brings its own FP8, and this package converts none of its layers",
        'use accelerate launch with mixed_precision="bf16" and Megatron\'s own FP8 options',
        is_raised=always,
    ),
    Rule(
        "tpu",
        "error",
        lambda s: s.parallel == "tpu",
        "TPUs multiply no FP8 matrices for PyTorch through this package",
        'use accelerate launch with mixed_precision="bf16"',
    ),
)
