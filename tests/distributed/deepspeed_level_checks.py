"""Train the levels O1 to O4 under DeepSpeed's engine as under DDP, save and resume, and refuse what
does not go."""

from __future__ import annotations

import os
from unittest import mock

import deepspeed
import pytest
import ranks
import torch
import torch.distributed as dist
from accelerate.utils import DeepSpeedPlugin
from ddp_training import Traffic
from deepspeed_training import (
    LAYERS,
    Blocks,
    accelerator,
    accelerator_with,
    adamw,
    assert_products,
    batches,
    ds_config,
    json_file,
    resumed_bitwise,
    shares,
    train,
    trained_by_configuration,
)
from states_checks import equal
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp import fully_shard

import fp8_backends
from fp8_backends.compute import hardware
from fp8_backends.errors import FP8BackendError, RecipeError

LEVELS = ("O1", "O2", "O3", "O4")
CLIP = 0.05


def by_ddp(
    backend: str, data: list, clip: float | None = None, layers: int = LAYERS, **options
) -> list[float]:
    fields = {"autocast_dtype": "bf16"} | options.pop("fields", {})
    with accelerator_with(None, backend, cpu=True, fields=fields, **options) as acc:
        model = Blocks(layers=layers)
        return train(acc, *acc.prepare(model, adamw(model)), data, clip)


def check_losses_equal_ddp_at_every_stage():
    """To the bit, every second level with clipping and accumulation."""
    data = shares(batches(6, 8 * dist.get_world_size()))
    for number, level in enumerate(LEVELS):
        clip, microbatches = ((0.0, 1), (CLIP, 2))[number % 2]
        options = {"gradient_accumulation_steps": microbatches}
        wanted = by_ddp(f"msamp:{level}", data, clip or None, **options)
        for stage in (0, 1, 2):
            config = {"gradient_clipping": clip}
            with accelerator(stage, f"msamp:{level}", config=config, bf16=True, **options) as acc:
                model = Blocks()
                engine, optimizer = acc.prepare(model, adamw(model))
                assert train(acc, engine, optimizer, data) == wanted, (level, stage)
                norm = acc.clip_grad_norm_(engine.parameters(), clip)
                assert (norm > CLIP) if clip else norm is None
                shared = level in ("O3", "O4") or stage > 0
                assert (optimizer.optimizer.fp8_owners is not None) == shared
                assert_products(model)


def check_configured_precision_runs_on_a_cpu_without_bf16_products():
    """The hardware's default replaces no value of the configuration, with a level and without."""
    for backend in ("native:dynamic", "msamp:O2"):
        for enabled, dtype in ((True, "bf16"), ("auto", "bf16"), (False, "fp32")):
            config = {"bf16": {"enabled": enabled}}
            with (
                mock.patch.object(hardware, "cpu_bf16", return_value=False),
                accelerator(2, backend, config=config) as acc,
            ):
                assert acc.fp8_autocast_dtype == dtype, (backend, enabled)


def check_wire_as_under_ddp():
    data, sent = shares(batches(2)), {}
    for name, make in (
        ("DDP", lambda: accelerator_with(None, "msamp:O4", cpu=True)),
        ("ZeRO-2", lambda: accelerator(2, "msamp:O4")),
    ):
        with make() as acc:
            model = Blocks()
            engine, optimizer = acc.prepare(model, adamw(model))
            train(acc, engine, optimizer, data[:1])
            with Traffic() as traffic:
                train(acc, engine, optimizer, data[1:])
            sent[name] = traffic.bytes("all_to_all") + traffic.bytes("all_gather")
    assert sent["DDP"] == sent["ZeRO-2"] > 0, sent
    return sent


def check_saved_run_resumes_bitwise():
    """By `save_state` and by the engine's own checkpoint; also with other states shared, and under
    DDP and FSDP2."""
    data = shares(batches(6))
    for level, stage in (("O1", 2), ("O2", 0), ("O3", 1), ("O4", 2)):
        backend = f"msamp:{level}"
        _, (saved, unbroken) = resumed_bitwise(backend, stage, 2 - stage)
        with accelerator_with(None, backend, cpu=True, fields={"autocast_dtype": "bf16"}) as acc:
            model = Blocks()
            engine, optimizer = acc.prepare(model, adamw(model))
            model.load_state_dict(saved["module"])
            optimizer.load_state_dict(saved["optimizer"])
            assert train(acc, engine, optimizer, data[3:]) == unbroken, level
        # a shard of its states starts elsewhere: blocks of other elements share a scale
        if level != "O4":
            assert_fsdp2_holds(backend, saved)


def assert_fsdp2_holds(backend: str, saved: dict) -> None:
    """Load a checkpoint of the engine into shards, and gather the same weights and states."""
    model, whole = Blocks(), checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)
    fp8_backends.prepare(model, None, backend)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    _, optimizer = fp8_backends.prepare(model, adamw(model), backend)
    states, (group,) = saved["optimizer"]["state"], saved["optimizer"]["param_groups"]
    by_name = {name: states[i] for i, name in enumerate(saved["module"])}
    checkpoint.set_model_state_dict(model, dict(saved["module"]), options=whole)
    wanted = {
        "state": {name: dict(state) for name, state in by_name.items()},
        "param_groups": [group | {"params": list(by_name)}],
    }
    checkpoint.set_optimizer_state_dict(model, optimizer, wanted, options=whole)
    weights, found = checkpoint.get_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        assert equal(dict(weights), dict(saved["module"]))
        for name, state in by_name.items():
            assert equal(
                {part: value.float() for part, value in state.items()},
                {part: found["state"][name][part].float() for part in state},
            ), name


def check_optimizer_and_scheduler_of_the_configuration():
    zero = {"stage": 2, "overlap_comm": True}
    with trained_by_configuration("msamp:O2", zero) as (_, optimizer, plugin):
        assert isinstance(optimizer.optimizer, torch.optim.AdamW)
        assert optimizer.optimizer.fp8_owners is not None
        # as the user wrote it
        assert plugin.deepspeed_config["zero_optimization"]["stage"] == 2


def check_msamp_of_the_plugin_and_of_the_configuration():
    """`enable_msamp` as stock Accelerate has it; O3 in the configuration, as MS-AMP's fork reads
    it."""
    config = ds_config(1) | {"msamp": {"enabled": True, "opt_level": "O3"}}
    cases = {
        "O1": lambda: DeepSpeedPlugin(zero_stage=1, enable_msamp=True),
        "O2": lambda: DeepSpeedPlugin(zero_stage=2, enable_msamp=True, msamp_opt_level="O2"),
        "O3": lambda: DeepSpeedPlugin(hf_ds_config=config),
    }
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    for level, make in cases.items():
        with accelerator_with(make(), None, mixed_precision="fp8") as acc:
            assert acc.fp8_recipe.name == f"msamp:{level}" and acc.fp8_recipe.shares_states
    for level in ("O2", "O3"):
        variables = {
            "ACCELERATE_FP8_BACKEND": "MSAMP",
            "ACCELERATE_FP8_OPT_LEVEL": level,
            **launched,
        }
        with (
            mock.patch.dict(os.environ, variables),
            accelerator_with(None, None, mixed_precision="fp8") as acc,
        ):
            assert acc.fp8_recipe.name == f"msamp:{level}"
            assert os.environ["ACCELERATE_FP8_BACKEND"] == "MSAMP"
            acc.deepspeed_plugin.deepspeed_config |= {"train_micro_batch_size_per_gpu": 16}
            model = Blocks()
            engine, optimizer = acc.prepare(model, adamw(model))
            losses = train(acc, engine, optimizer, shares(batches(3)))
            assert losses[-1] < losses[0]
            assert_products(model)


def check_deepspeed_initialize_without_accelerate():
    """With the configuration of stage 0; other settings, and a forward around the engine, are
    refused by name."""
    data, recipe = batches(4), fp8_backends.FP8RecipeKwargs(backend="msamp:O4")
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": CLIP,
    }

    def engine_with(**settings):
        model = Blocks()
        fp8_backends.prepare(model, None, recipe)
        engine, optimizer, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw(model),
            config={**config, "zero_allow_untested_optimizer": True, **settings},
        )
        return fp8_backends.prepare(engine, optimizer, recipe)

    engine, optimizer = engine_with()
    model = Blocks()
    fp8_backends.prepare(model, None, recipe)
    replicas = torch.nn.parallel.DistributedDataParallel(model)
    _, reference = fp8_backends.prepare(replicas, adamw(model), recipe)
    for x, y in shares(data):
        loss, wanted = engine(x, y), replicas(x, y)
        assert loss.item() == wanted.item()
        engine.backward(loss)
        engine.step()
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        reference.step()
        reference.zero_grad()
    assert optimizer.fp8_owners is not None
    with pytest.raises(FP8BackendError, match=r"call engine\(inputs\), not engine.module"):
        engine.backward(engine.module(*shares(data)[0]))
    for settings, name in (
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage 2"),
        ({"bf16": {"enabled": True}}, "differ in dtype.*bf16 off in a DeepSpeed configuration"),
        ({"checkpoint": {"load_universal": True}}, "load_universal"),
    ):
        with pytest.raises(FP8BackendError, match=name):
            engine_with(**settings)


def check_recomputed_and_compiled_models():
    data = shares(batches(3))
    wanted = by_ddp("msamp:O2", data)
    with accelerator(2, "msamp:O2", bf16=True) as acc:
        model = Blocks(recompute=True)
        engine, optimizer = acc.prepare(model, adamw(model))
        assert train(acc, engine, optimizer, data) == wanted
        assert fp8_backends.audit(model).products["layers.1"]["recomputed"] == 3
    # of one layer beside the last: Dynamo traces the same code for each
    wanted = by_ddp("msamp:O2", data, layers=1)
    with accelerator(2, "msamp:O2", bf16=True, dynamo_backend="aot_eager") as acc:
        model = Blocks(layers=1)
        engine, optimizer = acc.prepare(model, adamw(model))
        assert train(acc, engine, optimizer, data) == wanted


def check_refusals():
    def refused(*words: str, config: dict, **fields) -> None:
        plugin = DeepSpeedPlugin(hf_ds_config=json_file(config))
        with (
            pytest.raises(RecipeError) as error,
            accelerator_with(plugin, "msamp:O2", fields=fields),
        ):
            pass
        assert all(word in str(error.value) for word in words), str(error.value)

    refused("fsdp_version: 2, fsdp_auto_wrap_policy", config=ds_config(3))
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    refused("here: offload", config=ds_config(2) | offload)
    refused("autocast_dtype='fp16'", config=ds_config(2), autocast_dtype="fp16")
    refused("guard='skip'", config=ds_config(2), guard="skip")
    refused(
        "gradient_release", "leave gradient_release out", config=ds_config(2), gradient_release=True
    )


if __name__ == "__main__":
    ranks.main(globals())
