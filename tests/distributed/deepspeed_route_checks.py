"""Train levels under DeepSpeed as users launch them: by transformers' Trainer, and by the files of
other projects."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
import transformers.training_args
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from deepspeed_training import (
    Blocks,
    accelerator,
    adamw,
    batches,
    json_file,
    mean_over_ranks,
    shares,
    train,
)
from safetensors.torch import load_file
from states_checks import equal

sys.path.append(str(Path(__file__).parent.parent / "trainers"))
from tiny_trainers import llama, losses_of, trainer_for

import fp8_backends
from fp8_backends.errors import FP8BackendError, RecipeError

STEPS, SAVED = 6, 3
_AUTO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
AUTO = dict.fromkeys(_AUTO, "auto") | {"bf16": {"enabled": "auto"}}


def trainer(folder: str, config=None, backend: str = "msamp:O2", **given):
    """A Trainer under a launch in FP8, which only the environment tells; without a configuration
    under DDP."""
    given = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 1.0,
        "bf16": True,
    } | given
    given |= {"use_cpu": True} if config is None else {"use_cpu": False, "deepspeed": config}
    launch = {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_BACKEND": backend,
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    with mock.patch.dict(os.environ, launch), contextlib.ExitStack() as as_on_gpus:
        if config is not None:  # with gloo between the ranks
            gloo = mock.patch.object(
                PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_GPU)
            )
            bf16 = mock.patch.object(
                transformers.training_args, "is_torch_bf16_gpu_available", return_value=True
            )
            as_on_gpus.enter_context(gloo)
            as_on_gpus.enter_context(bf16)
        return trainer_for(folder, llama(), **given)


def check_trainer_resumes_bitwise():
    """With a dictionary and with a file; the unbroken run equals DDP's, saves, and ends with its
    best checkpoint."""
    folder = ranks.shared_folder()
    warmup = dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    )
    adamw = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    by_engine = AUTO | {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
    }
    for backend, config in (
        ("msamp:O2", AUTO | {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}),
        ("msamp:O4", json_file(by_engine)),
    ):
        place = f"{folder}/{backend}"
        saves = {
            "save_strategy": "steps",
            "save_steps": SAVED,
            "eval_strategy": "steps",
            "eval_steps": SAVED,
        }
        best = {
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": True,
        }
        whole = trainer(place, config, backend, **saves, **best)
        whole.train()
        assert type(whole.model_wrapped).__name__ == "DeepSpeedEngine"
        assert (
            whole.accelerator.fp8_recipe.name == backend
            and whole.optimizer.optimizer.fp8_owners is not None
        )
        losses, norms = (
            [e[key] for e in whole.state.log_history if key in e] for key in ("loss", "grad_norm")
        )
        assert (
            losses[-1] < losses[0] and len(norms) == STEPS and all(0 < norm < 100 for norm in norms)
        )
        # then the schedule is Trainer's
        if "optimizer" not in whole.accelerator.deepspeed_plugin.deepspeed_config:
            by_ddp = trainer(f"{place}/ddp", None, backend)
            by_ddp.train()
            assert losses_of(by_ddp) == losses
        checkpoint = Path(place, f"checkpoint-{SAVED}")
        files = {
            str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()
        }
        of_engine = {"latest", f"global_step{SAVED}/mp_rank_00_model_states.pt"}
        assert {*of_engine, "model.safetensors", "fp8_manifest.json"} <= files

        assert whole.state.best_model_checkpoint == str(checkpoint)
        whole.save_model(f"{place}/best")
        dist.barrier()
        saved, at_best = (
            load_file(path / "model.safetensors") for path in (Path(place, "best"), checkpoint)
        )
        assert equal(saved, at_best) and equal(saved, weights_of(whole))

        again = trainer(place, config, backend)
        again.train(resume_from_checkpoint=str(checkpoint))
        assert losses_of(again) == losses, (backend, losses_of(again), losses)
        assert equal(
            weights_of(again), load_file(Path(place, f"checkpoint-{STEPS}", "model.safetensors"))
        )


def weights_of(trained) -> dict[str, torch.Tensor]:
    """Return plain weights, which a file stores."""
    weights = trained.accelerator.get_state_dict(trained.model_wrapped)
    assert all(type(weight) is torch.Tensor for weight in weights.values())
    return weights


def llama_factory(**zero) -> dict:
    """Return the settings of hiyouga/LLaMA-Factory's examples/deepspeed/ds_z?_config.json
    (2026-08-18)."""
    scaler = {
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
    }
    return AUTO | {
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": "auto", "min_loss_scale": 1, **scaler},
        "zero_optimization": {"overlap_comm": False, "contiguous_gradients": True, **zero},
    }


def axolotl(**zero) -> dict:
    """Return the settings of axolotl-ai-cloud/axolotl's deepspeed_configs/zero?.json
    (2026-07-24)."""
    scaler = {
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 32,
        "hysteresis": 2,
    }
    return AUTO | {
        "fp16": {"enabled": "auto", "auto_cast": False, "min_loss_scale": 1, **scaler},
        "zero_optimization": {"overlap_comm": True, **zero},
        "wall_clock_breakdown": False,
    }


BUCKETS = {"allgather_partitions": True, "allgather_bucket_size": 5e8, "reduce_scatter": True}
BUCKETS |= {"reduce_bucket_size": 5e8, "round_robin_gradients": True}
ZERO3 = {
    "stage": 3,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
}
ZERO3 |= {
    "stage3_param_persistence_threshold": "auto",
    "stage3_gather_16bit_weights_on_model_save": True,
}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
TRAINED = {
    "LLaMA-Factory ds_z0_config": llama_factory(stage=0, **BUCKETS),
    "LLaMA-Factory ds_z2_config": llama_factory(stage=2, **BUCKETS),
    "Axolotl zero1": axolotl(stage=1),
}
REFUSED = {
    "LLaMA-Factory ds_z2_offload_config": (
        llama_factory(stage=2, **BUCKETS, **OFFLOAD),
        "here: offload",
    ),
    "LLaMA-Factory ds_z3_config": (llama_factory(**ZERO3), "here: zero_stage 3"),
    "LLaMA-Factory ds_z3_offload_config": (llama_factory(**ZERO3, **OFFLOAD), "here: zero_stage 3"),
    "Axolotl zero2": (axolotl(stage=2, offload_optimizer={"device": "cpu"}), "here: offload"),
    "Axolotl zero3": (axolotl(**ZERO3 | {"sub_group_size": 0}), "here: zero_stage 3"),
}


def check_files_of_other_projects():
    """Axolotl's zero1_torch_compile.json is from the time before DeepSpeed 0.19, which refuses its
    keys."""
    folder, expected = ranks.shared_folder(), {}
    for name, config in TRAINED.items():
        trained = trainer(f"{folder}/{name}", json_file(config), "msamp:O2", max_steps=3)
        trained.train()
        losses = losses_of(trained)
        assert type(trained.model_wrapped).__name__ == "DeepSpeedEngine"
        assert (trained.optimizer.optimizer.fp8_owners is not None) == (
            config["zero_optimization"]["stage"] > 0
        )
        assert expected.setdefault("losses", losses) == losses, name  # of any stage
    for name, (config, cause) in REFUSED.items():
        with pytest.raises(RecipeError) as error:
            trainer(f"{folder}/{name}", json_file(config))
        assert cause in str(
            error.value
        ) and "FullyShardedDataParallelPlugin(fsdp_version=2)" in str(error.value), name
    compiled = axolotl(stage=1) | {"compile": {"disable": False, "backend": "inductor"}}
    with pytest.raises(ValueError, match="CompileConfig\ndisable"):
        trainer(folder, json_file(compiled)).train()


def check_run_of_zero_without_a_level_continues_at_a_level():
    """With its weights; ZeRO's flat states belong to no weight."""
    place = ranks.shared_folder()
    with accelerator(2, "native:dynamic") as acc:
        engine, optimizer = acc.prepare(model := Blocks(), adamw(model))
        train(acc, engine, optimizer, shares(DATA[:2]))
        acc.save_state(place)
        saved = acc.get_state_dict(engine)
    with trained("O1", 2, 1) as (acc, engine, optimizer):
        with pytest.raises(
            FP8BackendError, match="load the weights only, with load_optimizer_states=False"
        ):
            acc.load_state(place)
        acc.load_state(place, load_optimizer_states=False)
        for name, weight in acc.get_state_dict(engine).items():
            torch.testing.assert_close(weight, saved[name], rtol=2**-4, atol=2**-10)  # in E4M3


# Written by two ranks, read by one and four


FOLDER = Path(os.environ.get("DEEPSPEED_CHECKPOINTS", "."))
WRITTEN = (("O1", 2), ("O2", 1), ("O3", 0), ("O4", 2))
"""Levels, and stages; O3 and O4 shard states at each stage."""


@contextlib.contextmanager
def trained(level: str, stage: int, steps: int):
    with accelerator(stage, f"msamp:{level}", bf16=True) as acc:
        model = Blocks()
        engine, optimizer = acc.prepare(model, adamw(model))
        train(acc, engine, optimizer, shares(DATA[:steps]))
        yield acc, engine, optimizer


DATA = batches(6)


def write_checkpoints():
    losses = {}
    for level, stage in WRITTEN:
        with trained(level, stage, 3) as (acc, engine, optimizer):
            acc.save_state(str(FOLDER / level / "accelerate"))
            engine.save_checkpoint(str(FOLDER / level / "engine"), tag="t")
            losses[level] = mean_over_ranks(train(acc, engine, optimizer, shares(DATA[3:])))
    return losses


def read_checkpoints():
    """Compare gathered weights and states with the files, and return the losses that follow."""
    losses = {}
    for level, stage in WRITTEN:
        saved = torch.load(
            FOLDER / level / "engine/t/mp_rank_00_model_states.pt", weights_only=False
        )
        for load in (
            lambda acc, engine, place: acc.load_state(str(place / "accelerate")),
            lambda acc, engine, place: engine.load_checkpoint(str(place / "engine")),
        ):
            with trained(level, stage, 5) as (acc, engine, optimizer):
                load(acc, engine, FOLDER / level)
                with fp8_backends.checkpoints.whole_states(optimizer.optimizer):
                    assert equal(dict(engine.module.state_dict()), dict(saved["module"])), level
                    assert equal(optimizer.state_dict()["state"], saved["optimizer"]["state"]), (
                        level
                    )
                losses[level] = mean_over_ranks(train(acc, engine, optimizer, shares(DATA[3:])))
                assert engine.global_steps == 6
    return losses


if __name__ == "__main__":
    ranks.main(globals())
