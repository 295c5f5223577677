"""Limits of engines, of ranks, and of the compilers and optimizers that train with them."""

from ..comm.ddp import HOOK_AT_A_LEVEL
from ..compute.frozen_weights import SHARDED
from ..recipes.fields import ONE_SCALE
from ..words import listed
from .setup import Rule, Setup, error, info, refused, warning


def _gathers_ao(setup: Setup) -> bool:
    if setup.recipe.compute != "ao":
        return False
    # slow: its products load torch's compiler
    from ..compute.torchao.backend import asks_for_all_gather

    return asks_for_all_gather(setup.recipe)


def _decided_by_engine(setup: Setup) -> str:
    """Name the recipe's fields that the engine's own configuration replaces."""
    recipe = setup.recipe
    engine = setup.parallel
    autocast = "autocast_dtype" in recipe.given and (
        recipe.autocast_dtype != "bf16" or setup.engine_bf16 is False
    )
    if engine == "deepspeed" and setup.has_level:  # the level's own autocast, without a loss scaler
        autocast = recipe.autocast_dtype == "fp16"
    fields = {
        "autocast_dtype": engine in ("fsdp2", "deepspeed") and autocast,
        "gradient_comm": engine in ("deepspeed", "fsdp1")
        and not setup.has_level
        and recipe.gradient_comm == "fp8",
        "enable_fsdp_float8_all_gather": (
            engine in ("deepspeed", "fsdp1")
            and recipe.compute == "native"
            and recipe.enable_fsdp_float8_all_gather
        ),
    }
    return ", ".join(
        f"{name}={getattr(recipe, name)!r} with {engine}"
        for name, decided in fields.items()
        if decided
    )


def _shares_layers(setup: Setup) -> str:
    ranks = setup.tensor_parallel
    return f"{ranks} ranks share layers" if ranks is not None and ranks > 1 else ""


TENSOR_PARALLEL_RULES = (
    refused(
        "level_tensor_parallel",
        lambda s: s.recipe.level in ("O3", "O4") and _shares_layers(s),
        "only the levels O1 and O2 go with tensor parallelism; at O3 and O4 parts of a weight "
        "would have untested masters, residuals and blocks of states",
        "use the same backend with +msamp:O2, or leave tensor parallelism out and shard with FSDP2",
    ),
    refused(
        "offload_tensor_parallel",
        lambda s: s.recipe.offload != "off" and _shares_layers(s),
        "offload keeps the states of whole weights in the host, and under tensor parallelism each "
        "rank has parts",
        "leave offload out, or train under DDP",
    ),
    refused(
        "te_tensor_parallel",
        lambda s: s.recipe.compute == "te" and not s.whole_layers and _shares_layers(s),
        "TransformerEngine's layers know tensor parallelism by process groups of their own, and "
        "not the DTensors of PyTorch, transformers and Accelerate",
        "use native:... or ao:..., or leave tensor parallelism out",
    ),
    refused(
        "fp8_params_tensor_parallel",
        lambda s: s.recipe.fp8_params and _shares_layers(s),
        "fp8_params=True does not go with tensor parallelism: frozen FP8 weights are whole",
        "leave fp8_params out, or train adapters on one rank or under DDP",
    ),
    refused(
        "ddp_shared_layers",
        lambda s: s.parallel == "ddp" and _shares_layers(s),
        "DDP takes no model with layers or experts shared by ranks: it reduces whole tensors, and "
        "these are DTensors",
        "with tensor parallelism give Accelerator a ParallelismConfig(tp_size=...); for expert "
        "parallelism Accelerate and Lightning have none: load the model with "
        "DistributedConfig(fsdp_size=..., ep_size=...), and train it with fp8_backends.prepare in "
        "a loop of your own",
    ),
)
"""Limits of models with layers shared by ranks, checked on the model itself, too."""

ENGINE_RULES = (
    refused(
        "level_deepspeed",
        lambda s: (
            s.has_level
            and s.parallel == "deepspeed"
            and (s.zero_stage == 3 and "zero_stage 3" or s.zero_offload and "offload")
        ),
        "the levels O1 to O4 do not go with ZeRO-3 and offload of DeepSpeed, which flatten and "
        "move the weights: a scale belongs to a whole weight",
        "shard this very level with FSDP2: FullyShardedDataParallelPlugin(fsdp_version=2), or in a "
        "configuration of Accelerate distributed_type: FSDP, fsdp_config: {fsdp_version: 2, "
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_reshard_after_forward: true}; or use "
        "zero_stage 1 or 2 without offload, or the same backend without +msamp",
    ),
    refused(
        "release_deepspeed",
        lambda s: s.recipe.gradient_release and s.parallel == "deepspeed",
        "gradient_release steps inside backward, and DeepSpeed's engine clips, steps and drops "
        "gradients after it",
        "leave gradient_release out, or use DDP or FSDP2",
    ),
    refused(
        "offload_engine",
        lambda s: (
            s.recipe.level != "O0"
            and s.recipe.offload != "off"
            and s.parallel not in (None, "none", "ddp")
            and f"offload={s.recipe.offload!r} with {s.parallel}"
        ),
        "offload keeps the states of whole weights in the host: it is made for one process and "
        "DDP, and other engines shard or move states themselves",
        "use DDP, or leave offload out: FSDP2 has its CPUOffloadPolicy at level O0, DeepSpeed "
        "offload_optimizer_device: cpu",
    ),
    refused(
        "level_fsdp1",
        lambda s: s.has_level and s.parallel == "fsdp1",
        "the levels O1 to O4 do not go with FSDP1: it flattens parameters, and flat ones have no "
        "scaled form",
        "set fsdp_version=2 (FullyShardedDataParallelPlugin, `accelerate launch --fsdp_version "
        "2`), or use the same backend without +msamp",
    ),
    warning(
        "fsdp1",
        lambda s: not s.has_level and s.parallel == "fsdp1",
        "FP8 under FSDP1 is not tested with this package, and its ranks do not agree on the scales "
        "of native:delayed and native:window",
        "set fsdp_version: 2",
    ),
    Rule(
        "error",
        # one process is refused where its model is converted
        lambda s: s.world_size not in (None, 1),
        "all_gather_without_fsdp2",
        lambda s: s.parallel != "fsdp2" and _gathers_ao(s),
        "enable_fsdp_float8_all_gather replaces the weights by tensors trained only by FSDP2: they "
        "would never change",
        "leave enable_fsdp_float8_all_gather out, or use FSDP2 (fsdp_version: 2)",
    ),
    refused(
        "engine_decides",
        _decided_by_engine,
        "engines set this themselves: DeepSpeed and FSDP2 the precision around FP8, DeepSpeed and "
        "FSDP1 the format of gradients and of gathered weights",
        "leave the field out and configure the engine (DeepSpeed: bf16.enabled, "
        "communication_data_type), or use DDP or FSDP2 (fsdp_version: 2) for gradients and weights "
        "in FP8",
    ),
    warning(
        "engine_unused",
        lambda s: (
            s.unused_engine
            and f"{s.unused_engine} is asked for, "
            f"{'DDP' if s.parallel == 'ddp' else 'one process'} trains"
        ),
        "Accelerate trains without this engine, though a plug-in or a launcher asks for it: it "
        "takes none without GPUs or without a launcher, and with ACCELERATE_USE_CPU or cpu=True",
        "launch the script on GPUs, or remove the plug-in; DeepSpeed trains ranks on CPUs without "
        "ACCELERATE_USE_CPU "
        'and with InitProcessGroupKwargs(backend="gloo") in kwargs_handlers',
    ),
    refused(
        "guard_engine",
        lambda s: (
            s.recipe.guard != "off"
            and s.parallel in ("deepspeed", "fsdp1")
            and f"guard={s.recipe.guard!r} with {s.parallel}"
        ),
        "the guard looks at each parameter's gradient before each step of a PyTorch optimizer: "
        "DeepSpeed makes steps in its engine, and FSDP1 flattens parameters",
        "leave guard out, or use DDP or FSDP2 (fsdp_version: 2)",
    ),
    refused(
        "comm_hook_level",
        lambda s: (
            s.has_level
            and s.parallel == "ddp"
            and s.comm_hook is not None
            and f"comm_hook={s.comm_hook!r}"
        ),
        *HOOK_AT_A_LEVEL,
    ),
    refused(
        "fp8_activations_backend",
        lambda s: (
            s.recipe.activation_comm == "fp8" and s.recipe.compute != "native" and s.recipe.compute
        ),
        'activation_comm="fp8" needs native: products of other backends do not take activations as '
        "codes",
        "use native:..., or leave activation_comm out",
    ),
    refused(
        "fp8_params_sharded",
        lambda s: (
            s.recipe.fp8_params
            and s.parallel in ("fsdp1", "fsdp2", "deepspeed")
            and (s.parallel, s.recipe.compute) != ("fsdp2", "native")
        ),
        *SHARDED,
    ),
    error(
        "efficient_loading_buffers",
        lambda s: (
            s.parallel == "fsdp2"
            and bool(s.cpu_ram_efficient_loading and s.persistent_buffers)
            and listed(s.persistent_buffers, 3)
        ),
        "with cpu_ram_efficient_loading Accelerate's FSDP2 takes every entry of the state dict for "
        "a sharded parameter: a buffer in it ends in \"'Tensor' object has no attribute "
        "'device_mesh'\"",
        "register the buffers with persistent=False, or set cpu_ram_efficient_loading to false",
    ),
    error(
        "ddp_nothing_left",
        lambda s: s.has_level and s.parallel == "ddp" and s.only_weights_train,
        "only weights in scaled precision train, and DDP refuses a model without gradients of its "
        "own to reduce",
        'keep one layer out, such as exclude=["lm_head"], or leave its bias trainable',
    ),
    info(
        "o3_alone",
        lambda s: s.recipe.level == "O3" and s.world_size == 1,
        "on one process O3 takes 7 bytes for a weight, with its master, and O2 takes 6: O3 pays "
        "with masters shared by N ranks, at 2 + 5/N bytes",
        "use O2; or O4 with 5 bytes on one process and 2 + 3/N on N",
    ),
    info(
        "shared_states_saving",
        lambda s: s.recipe.shares_states and s.parallel == "ddp",
        "under DDP each rank has the masters, residuals and states of its own part (shard_states), "
        "so a state dict needs all ranks: saving on rank 0 only is an error (under transformers' "
        "Trainer each rank keeps all)",
        "save with Accelerator.save_state, or set shard_states=False",
    ),
    *TENSOR_PARALLEL_RULES,
    warning(
        "tensor_parallel",
        lambda s: s.parallel in ("fsdp1", "deepspeed") and _shares_layers(s),
        "tensor parallelism is tested with this package alone and with FSDP2, and not with "
        "DeepSpeed or FSDP1",
        "use ParallelismConfig(tp_size=..., dp_shard_size=...) with FSDP2 (fsdp_version: 2)",
    ),
    refused(
        "megatron",
        lambda s: s.parallel == "megatron",
        "Megatron-LM brings its own FP8, and this package converts none of its layers",
        'use accelerate launch with mixed_precision="bf16" and Megatron\'s own FP8 options',
    ),
    error(
        "tpu",
        lambda s: s.parallel == "tpu",
        "TPUs multiply no FP8 matrices for PyTorch through this package",
        'use accelerate launch with mixed_precision="bf16"',
    ),
)

COMPILATION_RULES = (
    warning(
        "ao_without_compile",
        lambda s: s.recipe.compute == "ao" and s.machine.has_gpu and not s.is_compiled,
        "TorchAO's casts are many small kernels unless compiled: without torch.compile FP8 is "
        "slower than bf16",
        "compile the model, or its repeated blocks",
    ),
    warning(
        "compiled_before_ada",
        lambda s: (
            s.recipe.compute == "native"
            and s.machine.chip.key == "before-fp8"
            and s.machine.torch < (2, 13)
            and s.is_compiled
        ),
        "Inductor of torch before 2.13 writes kernels in E4M3 for GPUs below compute capability "
        "8.9, where Triton has no E4M3: compilation fails",
        "install torch 2.13 or newer, or leave torch.compile out",
    ),
    warning(
        "ao_ddp_full_compile",
        lambda s: s.recipe.compute == "ao" and s.parallel == "ddp" and s.compiled == "full",
        "TorchAO's FP8 under DDP with the whole model compiled is known to fail in other trainers",
        "compile the repeated blocks instead (regional compilation), or use FSDP2",
    ),
    warning(
        "checkpointing_fsdp2_compile",
        lambda s: bool(s.activation_checkpointing) and s.parallel == "fsdp2" and s.is_compiled,
        "FP8 under FSDP2 with torch.compile and activation checkpointing of whole blocks tends to "
        "be slower than bf16 (reported by Axolotl): recomputed layers cast to FP8 again",
        "turn activation checkpointing off, or checkpoint selected operations only",
    ),
    warning(
        "checkpointing_ada",
        lambda s: (
            bool(s.activation_checkpointing)
            and s.machine.chip.key == "ada"
            and s.recipe.scaling in ONE_SCALE
            and s.recipe.name
        ),
        "on compute capability 8.9 Unsloth saw NaN gradients of FP8 with one scale a tensor under "
        "activation checkpointing, and refuses both together there (an L4 with TorchAO; not "
        "measured here)",
        "use native:rowwise or ao:rowwise (on that L4 at 0.98 of bf16's speed), or turn activation "
        "checkpointing off; "
        'guard="stop" ends training at a NaN',
    ),
    warning(
        "flash_attention_2_compile",
        lambda s: (
            s.attention in ("flash_attention_2", "kernels-community/flash-attn2")
            and s.is_compiled
            and s.attention
        ),
        "FlashAttention 2 does not go well with torch.compile (reported by Axolotl)",
        "use attn_implementation sdpa or flex_attention",
    ),
    info(
        "fp8_attention",
        lambda s: s.attention == "fp8",
        "FP8 attention is another library's: this package converts layers with weights, and "
        "neither counts nor proves the products of attention",
        "use attn_implementation sdpa to have all FP8 products proven",
    ),
)

AT_LEVELS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw",
    "adam",
    "sgd",
    "muon",
    "torch.optim.adafactor",
)
"""Names for the classes of `torch.optim` converted by levels. transformers' and Axolotl's
`adafactor` differs."""
BITSANDBYTES = (
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "paged_lion_8bit",
    "ademamix_8bit",
)


def _named(setup: Setup, *names: str) -> str:
    return (
        setup.optimizer if setup.optimizer is not None and setup.optimizer.lower() in names else ""
    )


OPTIMIZER_RULES = (
    error(
        "level_optimizer",
        lambda s: (
            s.has_level and s.optimizer is not None and not _named(s, *AT_LEVELS) and s.optimizer
        ),
        "the levels train with torch.optim.AdamW, Adam, SGD, Muon or Adafactor, and store their "
        "states: in 8 and 16 bits at O2 and O3, in 8 at O4",
        "use adamw_torch (torch.optim.AdamW), or a backend without +msamp",
    ),
    error(
        "lomo_ddp",
        lambda s: s.parallel == "ddp" and s.world_size != 1 and _named(s, "lomo", "adalomo"),
        "LOMO steps inside backward, before DDP has averaged the gradients: the ranks drift apart, "
        "also without FP8",
        "train on one process, or use an optimizer that steps after backward",
    ),
    error(
        "bitsandbytes_fsdp2",
        lambda s: s.parallel == "fsdp2" and _named(s, *BITSANDBYTES),
        "the 8-bit optimizers of bitsandbytes do not know FSDP2's sharded parameters (Axolotl "
        "refuses them, too)",
        "use adamw_torch with level O2 or O3 (states in 8 and 16 bits), or adamw_torch_8bit",
    ),
    warning(
        "ao_adamw_fp8",
        lambda s: bool(_named(s, "ao_adamw_fp8")),
        "TorchAO's FP8 Adam keeps the second moment in E4M3 with one scale for 256 elements: where "
        "gradients of one block span three orders of magnitude, small ones are flushed to zero, "
        "and their updates were 4.5 times too large on average in a synthetic test",
        "use adamw_torch with level O2 or O3 (second moment in FP16), or ao_adamw_8bit",
    ),
    info(
        "fp16_autocast",
        lambda s: s.recipe.autocast_dtype == "fp16",
        "fp16 around FP8 needs a loss scaler: Accelerate makes one, a loop of your own must",
        "use bf16 if the device has it",
    ),
)

KEPT = "leave gradient_release out"

RELEASE_RULES = (
    refused(
        "release_accumulation",
        lambda s: (
            s.recipe.gradient_release
            and (s.accumulation_steps or 1) > 1
            and f"gradient_accumulation_steps={s.accumulation_steps}"
        ),
        "gradient_release steps with the gradients of each backward and drops them, so "
        "microbatches cannot accumulate",
        f"use gradient_accumulation_steps=1 with a larger batch, or {KEPT}",
    ),
    refused(
        "release_clipping",
        lambda s: (
            s.recipe.gradient_release
            and bool(s.max_grad_norm)
            and f"max_grad_norm={s.max_grad_norm:g}"
        ),
        "gradient_release steps with the first gradients before the last ones exist, so nothing "
        "can be clipped by the norm of all, or afterwards",
        f"clip nothing (max_grad_norm=0 in TrainingArguments, whose default is 1.0), or {KEPT}",
    ),
    refused(
        "release_fp16",
        lambda s: (
            s.recipe.gradient_release
            and s.recipe.autocast_dtype == "fp16"
            and "autocast_dtype='fp16'"
        ),
        "gradient_release steps before a loss scaler can check and divide the gradients, or skip "
        "the step",
        f"use autocast_dtype='bf16', which needs no loss scaling, or {KEPT}",
    ),
    refused(
        "release_guard",
        lambda s: (
            s.recipe.gradient_release
            and s.recipe.guard not in ("off", "warn")
            and f"guard={s.recipe.guard!r}"
        ),
        "gradient_release steps before the guard's check, so no step can be skipped or stopped",
        f"use guard='warn', which then sees losses and scaling states, or {KEPT}",
    ),
)
"""Limits of `gradient_release`, checked by `prepare`, too."""
