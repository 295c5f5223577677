"""Request each engine from Accelerate as a user does, and adapt ranks without a GPU."""

from __future__ import annotations

import os

import split_models
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fp8_backends.tensors.scaled_tensor import ScaledTensor

SHARDED_BY_FSDP2 = ("FSDP2", "ring", "TPxDP")


class WithoutGPUs(ParallelismConfig):
    """Accept tensor parallelism on ranks without a GPU: the one workaround."""

    def _validate_accelerator(self, accelerator) -> None:
        pass


def engine_arguments(
    engine: str, clip: float, microbatches: int, wrapped: str = "Block", rows: int = 4
) -> dict:
    """Return the arguments of `Accelerator` except the recipe. `wrapped`: the class of FSDP2's
    units. `rows`: rows of a microbatch on one rank."""
    if engine == "Ulysses":
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        split_models.forget_ulysses()
        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length=split_models.LENGTH, sp_attn_implementation=split_models.ATTENTION
        )
        parallelism = ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)
        return {
            **engine_arguments("ZeRO-3", clip, microbatches, rows=8),
            "parallelism_config": parallelism,
        }
    if engine.startswith("ZeRO"):
        import deepspeed
        from accelerate.utils import DeepSpeedPlugin

        # the CPU's all-reduce through shared memory is an extension, compiled by DeepSpeed at its
        # first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = {
            "zero_optimization": {
                "stage": int(engine[-1]),
                # weights this small would not be partitioned
                "stage3_param_persistence_threshold": 0,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": microbatches,
            "gradient_clipping": clip,
            "bf16": {"enabled": False},
        }
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it Accelerate always takes DDP
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        return {
            "deepspeed_plugin": plugin,
            "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")],
        }
    if engine in SHARDED_BY_FSDP2:
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer" if engine == "ring" else wrapped],
            cpu_ram_efficient_loading=False,
        )
        shared = (
            {"parallelism_config": WithoutGPUs(tp_size=2, dp_shard_size=2)}
            if engine == "TPxDP"
            else {}
        )
        return {"fsdp_plugin": plugin, **shared}
    return {"parallelism_config": WithoutGPUs(tp_size=2)} if engine == "TP" else {}


def start_engine(accelerator, engine: str, arguments: dict) -> None:
    """Set the engine chosen on GPUs: without a GPU, Accelerate always chooses DDP."""
    from accelerate.state import AcceleratorState, PartialState

    kind = {
        "single": DistributedType.NO,
        **dict.fromkeys(SHARDED_BY_FSDP2, DistributedType.FSDP),
    }.get(engine)
    if kind is not None:
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = kind
    if engine in SHARDED_BY_FSDP2:
        AcceleratorState._shared_state["fsdp_plugin"] = arguments["fsdp_plugin"]
    if engine == "ring":
        split_models.ring_attention_on_a_cpu()
        parallelism = ParallelismConfig(cp_size=2)
        mesh = parallelism.build_device_mesh("cpu")
        AcceleratorState._shared_state |= {"parallelism_config": parallelism, "device_mesh": mesh}


def share_layers(accelerator, engine: str, model: torch.nn.Module) -> None:
    """Under tensor parallelism: cut the layers of the model's blocks over pairs of ranks."""
    if engine.startswith("TP"):
        cut_layers(model, accelerator.torch_device_mesh["tp"])
        model.tp_size = 2  # Accelerate asks for it


def cut_layers(model: torch.nn.Module, mesh) -> None:
    """Cut the layers of the model's blocks over the ranks of a mesh with one dimension."""
    parallelize_module(
        model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    )


def assert_engine(engine: str, model: torch.nn.Module) -> None:
    """Assert that this engine wraps the prepared model."""
    model = getattr(model, "_orig_mod", model)
    sharded = [isinstance(p, DTensor) for p in model.parameters()]
    assert isinstance(model, DistributedDataParallel) == (engine == "DDP"), type(model)
    assert all(sharded) if engine in SHARDED_BY_FSDP2 else any(sharded) == (engine == "TP"), sharded
    stage = model.zero_optimization_stage() if hasattr(model, "zero_optimization_stage") else None
    expected = int(engine[-1]) if engine.startswith("ZeRO") else 3 if engine == "Ulysses" else None
    if expected in (1, 2) and any(isinstance(p, ScaledTensor) for p in model.parameters()):
        expected = 0  # the level itself shards states
    assert stage == expected, stage


def plain_state_dict(accelerator, model) -> dict[str, torch.Tensor]:
    """Return copies of the whole weights by original name; empty on ranks without any."""
    state = accelerator.get_state_dict(model)
    return {name: value.detach().clone() for name, value in (state or {}).items()}
