"""Test the meaning of Axolotl's keys."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from fp8_backends import RecipeError
from fp8_backends.tools.config.axolotl_config import read_axolotl

BASE = {
    "base_model": "meta-llama/Llama-3.2-3B",
    "datasets": [{"path": "x"}],
    "sequence_len": 512,
    "bf16": "auto",
}
FSDP2 = yaml.safe_load("""
fsdp_version: 2
fsdp_config: {offload_params: false, cpu_ram_efficient_loading: true, auto_wrap_policy: TRANSFORMER_BASED_WRAP,
  transformer_layer_cls_to_wrap: LlamaDecoderLayer, state_dict_type: FULL_STATE_DICT, reshard_after_forward: true}
""")
FP8 = {"fp8": True, "fp8_enable_fsdp_float8_all_gather": True, "torch_compile": True}


def meant(processes=8, **values):
    return read_axolotl({**BASE, **values}, "a.yaml", processes)


def findings(config):
    return {finding.rule: finding for finding in config.findings()}


def test_the_documented_fp8_example(hopper):
    """The FSDP2 example of Axolotl's page on mixed precision."""
    config = meant(**FP8, **FSDP2)
    assert (
        config.recipe.name == "ao:tensorwise"
        and config.recipe.enable_fsdp_float8_all_gather is True
    )
    assert (config.mixed_precision, config.parallel, config.compiled, config.processes) == (
        "fp8",
        "fsdp2",
        "full",
        8,
    )
    assert config.findings() == []
    assert config.passed_over == ["base_model", "datasets"]
    assert config.for_accelerate() == yaml.safe_load("""
      {compute_environment: LOCAL_MACHINE, num_machines: 1, machine_rank: 0, use_cpu: false, distributed_type: FSDP,
       num_processes: 8, mixed_precision: fp8, fp8_config: {backend: "ao:tensorwise", all_gather: true},
       dynamo_config: {dynamo_backend: INDUCTOR}, fsdp_config: {fsdp_version: 2, fsdp_offload_params: false,
       fsdp_cpu_ram_efficient_loading: true, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP,
       fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, fsdp_state_dict_type: FULL_STATE_DICT,
       fsdp_reshard_after_forward: true}}
    """)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_each_recipe_of_fp8_config(recipe):
    assert meant(fp8=True, fp8_config={"recipe": recipe}).recipe.name == f"ao:{recipe}"


@pytest.mark.parametrize(
    ("values", "precision"),
    [
        ({}, "bf16"),  # bf16: auto
        ({"bf16": True}, "bf16"),
        ({"bf16": "full"}, "no"),  # evaluation in bf16, training in float32
        ({"bf16": None}, "no"),
        ({"bf16": False}, "no"),
        ({"fp16": True}, "fp16"),
        ({"fp16": True, "bf16": True}, "bf16"),
        ({"fp8": False}, "bf16"),
        ({"fp8": True, "bf16": True}, "fp8"),
        ({"fp8": "true", "bf16": False}, "fp8"),
    ],
)
def test_precision_keys_are_mapped(values, precision):
    config = meant(**values)
    assert config.mixed_precision == precision
    assert (config.recipe is None) == (precision != "fp8")
    assert config.for_accelerate()["mixed_precision"] == precision
    assert ("fp8_config" in config.for_accelerate()) == (precision == "fp8")


def test_fp16_with_fp8_sets_surrounding_precision():
    assert meant(fp8=True, fp16=True).recipe.autocast_dtype == "fp16"
    for given in ({"bf16": True}, {"bf16": "true", "fp16": True}):
        recipe = meant(fp8=True, **given).recipe
        assert recipe.autocast_dtype == "bf16" and "autocast_dtype" in recipe.given
    assert "autocast_dtype" not in meant(fp8=True, bf16="auto").recipe.given
    assert "engine_decides" in findings(meant(fp8=True, fp16=True, **FSDP2))


@pytest.mark.parametrize(
    ("values", "parallel"),
    [
        ({}, "ddp"),
        ({"fsdp_config": {"fsdp_version": 2}}, "fsdp2"),
        ({"fsdp_config": {"version": "2"}}, "fsdp2"),
        ({"fsdp_version": "2", "fsdp_config": {"offload_params": True}}, "fsdp2"),
        ({"fsdp_config": {"offload_params": True}}, "fsdp1"),  # Axolotl's default
        (
            {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": True}},
            "fsdp1",
        ),
        ({"fsdp_version": 2}, "ddp"),  # no block: Axolotl uses no FSDP
        ({"deepspeed": "deepspeed_configs/zero3.json"}, "deepspeed"),
        ({"deepspeed": "false", "fsdp": "false"}, "ddp"),
    ],
)
def test_engine_keys_are_mapped(values, parallel):
    assert meant(**values).parallel == parallel


def test_prefixed_keys_mean_the_same():
    prefixed = {f"fsdp_{key}": value for key, value in FSDP2["fsdp_config"].items()}
    assert (
        meant(fsdp_version=2, fsdp_config=prefixed).for_accelerate()
        == meant(**FSDP2).for_accelerate()
    )


def test_blocks_are_written_with_axolotls_defaults():
    """The launcher's own default is efficient loading."""
    block = meant(fsdp_config={"fsdp_sharding_strategy": "FULL_SHARD"}).accelerate["fsdp_config"]
    assert block == {
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_version": 1,
        "fsdp_sharding_strategy": "FULL_SHARD",
    }


def test_number_of_processes_is_mapped(monkeypatch):
    assert meant(None).processes == 1 and meant(None).parallel == "none"
    assert meant(None, **FSDP2).processes is None
    assert "num_processes" not in meant(None, **FSDP2).for_accelerate()
    sized = meant(None, dp_shard_size=4, tensor_parallel_size=2, **FSDP2)
    assert sized.processes == 8
    assert sized.accelerate["parallelism_config"]["parallelism_config_tp_size"] == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (meant(None).processes, meant(None).parallel) == (4, "ddp")
    assert meant(None, **FSDP2).processes == 4


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"fp8_enable_fsdp_float8_allgather": True},
            "did you mean 'fp8_enable_fsdp_float8_all_gather'",
        ),
        ({"FP8": True}, "FP8.*did you mean 'fp8'"),
        (
            {"fp8": True, "fp8_config": {"recipie": "rowwise"}},
            "fp8_config: not known: recipie.*did you mean 'recipe'",
        ),
        (
            {"fp8": True, "fp8_config": {"recipe": "blockwise"}},
            "recipe='blockwise' must be one of tensorwise",
        ),
        (
            {"fp8": True, "fp8_config": "rowwise"},
            "fp8_config must be a block of keys, not 'rowwise'",
        ),
        ({"fp8_config": {"recipe": "rowwise"}}, "fp8_config is read with fp8: true only"),
        ({"fp8": "perhaps"}, "fp8='perhaps' must be True or False"),
        (
            {"fsdp_config": {"offlod_params": True, "reshard_after_foward": True}},
            "offlod_params.*did you mean 'reshard_after_forward'",
        ),
        (
            {"fsdp_config": {"state_dict_type": "FULL"}},
            "fsdp_config.state_dict_type='FULL' must be one of",
        ),
        (
            {"fsdp_version": 3, **{"fsdp_config": {"offload_params": True}}},
            "fsdp_version='3' must be one of 1, 2",
        ),
        (
            {"fsdp_version": 1, "fsdp_config": {"version": 2}},
            "fsdp_version: 1, fsdp_config.version: 2 disagree",
        ),
        ({**FSDP2, "deepspeed": "zero3.json"}, "deepspeed and fsdp_config are two engines"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "write them to a JSON file"),
        (
            {"fsdp_version": 1, "deepspeed": "true"},
            "deepspeed='true' must be what the engine reads",
        ),
        ({"deepspeed": True}, "deepspeed=True must be what the engine reads"),
        (
            {"torch_compile": True, "torch_compile_backend": "indctor"},
            "torch_compile_backend='indctor' must be one of",
        ),
    ],
)
def test_an_invalid_key_or_value_is_named_with_its_file(values, expected):
    with pytest.raises(RecipeError, match=f"a.yaml.*{expected}"):
        meant(**values)


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({"fp8_enable_fsdp_float8_all_gather": True}, "has no effect without fp8: true"),
        ({"fsdp_version": 2}, "has no effect without fsdp_config"),
        (
            {"fsdp_version": 2, "fsdp_config": {"sharding_strategy": "FULL_SHARD"}},
            "no effect under FSDP2",
        ),
        ({"fsdp_config": {"limit_all_gathers": True}}, "limit_all_gathers is left out"),
        ({"torch_compile": "auto"}, "torch_compile: auto is written as true"),
        ({"deepspeed": "zero3.json"}, "Accelerate refuses it beside deepspeed_config_file"),
        ({"expert_parallel_size": 2}, "no expert parallelism"),
    ],
)
def test_a_setting_without_an_equivalent_is_noted(values, note):
    assert any(note in each for each in meant(**values).notes)


@pytest.mark.parametrize(
    ("rule", "fires", "near"),
    [
        ("ao_without_compile", {"torch_compile": False}, {"torch_compile": "auto"}),
        (
            "ao_without_compile",
            {"torch_compile_backend": "eager"},
            {"torch_compile_backend": "inductor"},
        ),
        (
            "checkpointing_fsdp2_compile",
            {"gradient_checkpointing": "offload"},
            {"gradient_checkpointing": False},
        ),
        (
            "checkpointing_fsdp2_compile",
            {"fsdp_config": {"fsdp_activation_checkpointing": True}},
            {"fsdp_config": {"activation_checkpointing": False}},
        ),
        ("flash_attention_2_compile", {"flash_attention": True}, {"flash_attention": False}),
        (
            "flash_attention_2_compile",
            {"attn_implementation": "flash_attention_2"},
            {"attn_implementation": "sdpa"},
        ),
        ("all_gather_without_fsdp2", {"fsdp_version": 1}, {"fsdp_version": "2"}),
        ("tokens_off_16", {"sequence_len": 1000}, {"sequence_len": 1024}),
        ("bitsandbytes_fsdp2", {"optimizer": "adamw_bnb_8bit"}, {"optimizer": "adamw_torch_8bit"}),
        ("ao_adamw_fp8", {"optimizer": "ao_adamw_fp8"}, {"optimizer": "adamw_torch_fused"}),
        ("quantized_base", {"load_in_4bit": True}, {"load_in_4bit": False}),
        ("ao_ddp_full_compile", {"fsdp_version": None, "fsdp_config": None}, {}),
    ],
)
def test_axolotls_rules_and_gaps_are_covered(hopper, rule, fires, near):
    common = {**FP8, **FSDP2}
    assert rule in findings(meant(**{**common, **fires}))
    assert rule not in findings(meant(**{**common, **near}))


def test_fp8_all_gather_requires_tensorwise_recipe():
    with pytest.raises(
        RecipeError, match="a.yaml: enable_fsdp_float8_all_gather.*only by ao:tensorwise"
    ):
        meant(**FP8, **FSDP2, fp8_config={"recipe": "rowwise"}).findings()


def test_zero_stage_is_read_from_deepspeed_file(tmp_path):
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    values = {**BASE, "fp8": True, "deepspeed": "zero3.json"}
    config = read_axolotl(values, str(tmp_path / "a.yaml"), 2)
    assert (config.surroundings["zero_stage"], config.surroundings["zero_offload"]) == (3, False)
    written = config.for_accelerate()
    assert (
        written["deepspeed_config"] == {"deepspeed_config_file": "zero3.json"}
        and "mixed_precision" not in written
    )
    config.use("te+msamp:O2")
    assert "level_deepspeed" in findings(config)
    for offload, refused in (({}, False), ({"offload_optimizer": {"device": "cpu"}}, True)):
        (tmp_path / "zero3.json").write_text(
            json.dumps({"zero_optimization": {"stage": 2, **offload}})
        )
        config = read_axolotl(values, str(tmp_path / "a.yaml"), 2)
        config.use("msamp:O2")
        assert ("level_deepspeed" in findings(config)) == refused


def test_another_backend_keeps_only_its_fields():
    config = meant(**FP8, **FSDP2)
    config.use("te+msamp:O2")
    assert config.recipe.name == "te:delayed+msamp:O2" and config.fields == {
        "backend": "te+msamp:O2"
    }
    assert any(
        "enable_fsdp_float8_all_gather=True of the file is left out" in note
        for note in config.notes
    )
    plain = meant(bf16=True)
    plain.use("msamp:O3")
    assert plain.for_accelerate()["fp8_config"] == {"backend": "msamp:O3"}
    assert "o3_alone" not in findings(plain)
    alone = meant(1, bf16=True)
    alone.use("msamp:O3")
    assert "o3_alone" in findings(alone)
    with pytest.raises(RecipeError, match="did you mean 'native'"):
        plain.use("nativ")
