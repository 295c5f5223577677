"""Fire each rule for its setup, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8_backends import RecipeError, resolve, validate
from fp8_backends.compute import chips
from fp8_backends.rules import BY_NAME, THEMES, Machine, Setup, refuse


def rules(spec, model=None, *, chip="hopper", **setup):
    """Return the findings of `validate` by rule: for a Hopper GPU with new libraries, or this
    machine (None)."""
    return {finding.rule: finding for finding in validate(spec, model, chip=chip, **setup)}


def on_machine(spec, machine, parallel=None, compiled=None):
    """Return the applying rules on a machine, with their reasons."""
    setup = Setup(resolve(spec), machine, parallel, compiled)
    return {rule.name: rule.reason_in(setup) for rule in BY_NAME.values() if rule.applies(setup)}


def nvidia(*capabilities, cuda=(13, 0), torch=(2, 13)):
    return Machine(chips.chip_of(min(capabilities)), capabilities, cuda, torch=torch)


CPU = Machine(chips.CPU, torch=(2, 13))
MI350 = Machine(chips.chip_of("gfx950"), torch=(2, 13))


class Large(nn.Sequential):
    """Hold 4.3 billion parameters without memory."""

    def __init__(self, layers=16):
        super().__init__(
            *(nn.Linear(16384, 16384, bias=False, device="meta") for _ in range(layers))
        )


def test_missing_fp8_hardware_recommends_bf16():
    finding = rules("native", chip="cpu")["no_fp8_hardware"]
    assert finding.severity == "warning" and "bf16" in finding.fix
    emulated, _, refused = finding.reason.partition("refused:")
    assert "native:mxfp8" in emulated and "ao:rowwise" in emulated and "te:delayed" in refused


def test_clean_setup_has_no_findings():
    assert validate("native:delayed", Large(), chip="hopper") == []
    nothing_wrong = {
        "parallel": "fsdp2",
        "compiled": "regional",
        "activation_checkpointing": False,
        "attention": "sdpa",
        "sequence_length": 4096,
        "vocab_size": 32000,
        "optimizer": "adamw_torch",
        "cpu_ram_efficient_loading": True,
        "world_size": 8,
        "quantized_base": False,
    }
    for spec in ("native:dynamic", "ao:tensorwise", "msamp:O2", "msamp:O3"):
        assert validate(spec, Large(), chip="hopper", **nothing_wrong) == []


def test_unavailable_backend_and_wrong_string_are_findings():
    found = rules("te", chip=None)["unavailable"]
    assert found.severity == "error" and "TransformerEngine is not installed" in found.reason
    assert "unavailable" not in rules("te")
    assert "did you mean 'native'" in rules("nativ")["recipe"].reason


def test_wrapper_of_model_is_detected():
    class FSDPModule(nn.Linear):
        """Carry the name of the class mixed in by `fully_shard`."""

    assert "all_gather_without_fsdp2" not in rules(GATHERED, FSDPModule(8, 8))
    assert "ao_without_compile" not in rules("ao", torch.compile(nn.Linear(8, 8)))
    block = nn.Sequential(nn.Linear(8, 8))
    block[0].compile()
    assert "ao_without_compile" not in rules("ao", block)


def test_worst_findings_come_first_and_each_has_a_fix():
    found = validate({**GATHERED, "autocast_dtype": "fp16"}, chip="hopper")
    assert [finding.severity for finding in found] == ["error", "warning", "info"]
    assert str(found[0]).startswith("error: ") and "Fix:" in str(found[0])
    for rule in BY_NAME.values():
        assert rule.fix and rule.reason and rule.severity in ("error", "warning", "info")


# TransformerEngine


TE_RULES = {rule.name for rule in THEMES["TransformerEngine"]} | {
    "fp8_params_sharded",
    "fp8_params_trains",
}


def te_rules(spec, **setup):
    return TE_RULES & rules(spec, **setup).keys()


def test_te_without_an_nvidia_gpu_names_the_native_equivalent():
    for machine in (CPU, MI350, Machine(chips.chip_of("gfx90a"))):
        for spec in ("te", "te:blockwise", "te:mxfp8", "te+msamp:O2"):
            assert TE_RULES & on_machine(spec, machine).keys() == {"te_without_nvidia_gpu"}
        assert not TE_RULES & {*on_machine("native:delayed", machine), *on_machine("ao", machine)}
    assert "native:delayed for te:delayed" in rules("te", chip="mi350")["te_without_nvidia_gpu"].fix


@pytest.mark.parametrize(
    ("spec", "capability", "cuda", "expected"),
    [
        ("te:delayed", (8, 0), (13, 0), {"te_before_fp8"}),
        ("te:delayed", (8, 9), (13, 0), set()),
        ("te:delayed", (8, 9), (12, 0), {"te_ada_libraries"}),
        ("te:delayed", (9, 0), (12, 0), set()),
        ("te:blockwise", (8, 9), (13, 0), {"te_block_chip"}),
        ("te:blockwise", (9, 0), (12, 8), {"te_block_cuda"}),
        ("te:blockwise", (9, 0), (12, 9), set()),
        ("te:blockwise", (12, 0), (12, 9), set()),
        ("te:mxfp8", (9, 0), (13, 0), {"te_mxfp8_chip"}),
        ("te:mxfp8", (10, 0), (13, 0), set()),
        ("te:mxfp8", (11, 0), (13, 0), set()),
        ("te:mxfp8", (12, 0), (13, 0), {"te_mxfp8_chip"}),
        ("te:dynamic", (12, 0), (13, 0), set()),
        ("native:mxfp8", (9, 0), (12, 0), set()),
    ],
)
def test_te_recipe_unsupported_by_chip_or_cuda_is_found(spec, capability, cuda, expected):
    found = on_machine(spec, nvidia(capability, cuda=cuda))
    assert TE_RULES & found.keys() == expected
    if any("CUDA" in found[rule] for rule in expected):
        assert f"here: CUDA {cuda[0]}.{cuda[1]}" in found[min(expected)]


def test_backward_override_in_environment_is_found(monkeypatch):
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    assert rules("te:dynamic")["te_backward_in_high_precision"].severity == "error"
    assert not te_rules("native:dynamic")


def test_fp8_weights_must_be_frozen_and_unsharded():
    spec = {"backend": "te", "fp8_params": True}
    for parallel in ("fsdp1", "fsdp2", "deepspeed"):
        found = rules(spec, parallel=parallel)["fp8_params_sharded"]
        assert found.severity == "error" and "DDP" in found.fix and "te+msamp:O4" in found.fix
        assert not te_rules("te", parallel=parallel)
    assert not te_rules(spec) and not te_rules(spec, parallel="ddp")
    model = nn.Sequential(
        nn.Linear(8192, 8192, device="meta"), nn.Linear(8192, 8192, device="meta")
    )
    assert te_rules(spec, model=model) == {"fp8_params_trains"} and not te_rules("te", model=model)
    model[0].requires_grad_(False)
    assert te_rules(spec, model=model) == {"fp8_params_trains"}
    assert not te_rules({**spec, "exclude": "1"}, model=model)
    assert not te_rules(spec, model=model.requires_grad_(False))


# Each rule on a row: a setup that fires, and a near miss


class Buffered(nn.Linear):
    def __init__(self, persistent):
        super().__init__(16384, 16384, device="meta")
        self.register_buffer("table", torch.zeros(2), persistent=persistent)


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


def with_head(vocabulary):
    model = nn.Sequential()
    model.body, model.lm_head = Large(), nn.Linear(16384, vocabulary, device="meta")
    return model


def with_config(vocabulary, **values):
    model = with_head(vocabulary)
    model.config = Config(**values)
    return model


AO_UNPADDED = {"backend": "ao", "pad_inner_dim": False}
GATHERED = {"backend": "ao", "enable_fsdp_float8_all_gather": True}
GRADIENTS = {"backend": "native", "gradient_comm": "fp8"}
ACTIVATIONS = {"backend": "native", "activation_comm": "fp8"}
WEIGHTS = {"backend": "native", "enable_fsdp_float8_all_gather": True}
BF16, FP16, FP32 = (
    {"backend": "native", "autocast_dtype": name} for name in ("bf16", "fp16", "fp32")
)
RELEASED = {"backend": "msamp:O2", "gradient_release": True}
OFFLOADED = {"backend": "msamp:O2", "offload": "states"}
SHARED = {"tensor_parallel": 2}
RECOMPUTED_ON_ADA = {"chip": "ada", "activation_checkpointing": True}
DS, FSDP1, FSDP2, DDP = ({"parallel": name} for name in ("deepspeed", "fsdp1", "fsdp2", "ddp"))

CASES = [
    # rule, (spec, setup) that fires, (spec, setup) that does not, words of the finding
    ("ao_without_compile", ("ao", {}), ("ao", {"compiled": "regional"}), ""),
    ("ao_without_compile", ("ao", {}), ("native", {}), ""),
    (
        "ao_ddp_full_compile",
        ("ao", {**DDP, "compiled": "full"}),
        ("ao", {**DDP, "compiled": "regional"}),
        "",
    ),
    (
        "ao_ddp_full_compile",
        ("ao", {**DDP, "compiled": "full"}),
        ("native", {**DDP, "compiled": "full"}),
        "",
    ),
    ("all_gather_without_fsdp2", (GATHERED, DDP), (GATHERED, FSDP2), ""),
    ("all_gather_without_fsdp2", (GATHERED, DDP), ("ao", DDP), ""),
    ("fp16_autocast", (FP16, {}), ("native", {}), ""),
    (
        "small_layers",
        ("native", {"model": nn.Linear(256, 256)}),
        (
            "native",
            {"model": nn.Sequential(nn.Linear(64, 64), nn.Linear(4096, 4096, device="meta"))},
        ),
        "256 -> 256",
    ),
    ("fsdp1", ("native:delayed", FSDP1), ("native:delayed", FSDP2), ""),
    ("o3_alone", ("msamp:O3", {"world_size": 1}), ("msamp:O3", {"world_size": 2}), ""),
    (
        "shared_states_saving",
        ("msamp:O4", DDP),
        ({"backend": "msamp:O3", "shard_states": False}, DDP),
        "",
    ),
    (
        "tensor_parallel",
        ("native", {**DS, **SHARED}),
        ("native", {**FSDP2, **SHARED}),
        "2 ranks share layers",
    ),
    ("tpu", ("native", {"parallel": "tpu"}), ("native", DDP), ""),
    (
        "efficient_loading_buffers",
        ("native", {**FSDP2, "model": Buffered(True), "cpu_ram_efficient_loading": True}),
        ("native", {**FSDP2, "model": Buffered(False), "cpu_ram_efficient_loading": True}),
        "here: table",
    ),
    (
        "ddp_nothing_left",
        ("msamp:O1", {**DDP, "model": Large(1)}),
        ("msamp:O1", {**DDP, "model": with_head(64)}),
        "",
    ),
    (
        "checkpointing_fsdp2_compile",
        ("ao", {**FSDP2, "compiled": "full", "activation_checkpointing": True}),
        ("ao", {**FSDP2, "activation_checkpointing": True}),
        "",
    ),
    *(
        ("checkpointing_ada", (spec, RECOMPUTED_ON_ADA), near, spec)
        for spec, near in (
            ("native:dynamic", ("native:rowwise", RECOMPUTED_ON_ADA)),
            ("native:delayed", ("native:delayed", {**RECOMPUTED_ON_ADA, "chip": "hopper"})),
            ("ao:tensorwise", ("ao:rowwise", RECOMPUTED_ON_ADA)),
            ("te:delayed", ("te:delayed", {"chip": "ada"})),
        )
    ),
    (
        "flash_attention_2_compile",
        ("native", {"attention": "flash_attention_2", "compiled": "full"}),
        ("native", {"attention": "flash_attention_3", "compiled": "full"}),
        "flash_attention_2",
    ),
    ("fp8_attention", ("ao", {"attention": "fp8"}), ("ao", {"attention": "sdpa"}), ""),
    (
        "nothing_in_fp8",
        ("native", {"model": nn.Sequential(nn.Conv2d(3, 3, 3))}),
        ("native", {"model": nn.Sequential(nn.Conv2d(3, 3, 3), nn.Linear(16, 16))}),
        "convolution: FP8 has no product for it",
    ),
    (
        "minority_in_fp8",
        ("native", {"model": with_head(16384 * 17)}),
        ("native", {"model": with_head(16384 * 15)}),
        "here: 48 %; output head",
    ),
    (
        "modest_gain",
        ("native", {"model": nn.Linear(2048, 2048, device="meta")}),
        ("native", {"model": Large(1)}),
        "2048 -> 2048; 1.14 times",
    ),
    (
        "layers_faster_in_bf16",
        ("native", {"model": Large(1).append(nn.Linear(2048, 512, device="meta"))}),
        (
            {"backend": "native", "small_layers": "h200"},
            {"model": Large(1).append(nn.Linear(2048, 512, device="meta"))},
        ),
        "1 of 2, such as 2048 -> 512",
    ),
    (
        "layers_off_16",
        ("te", {"model": nn.Sequential(nn.Linear(64, 50), nn.Linear(64, 64))}),
        ("native", {"model": nn.Sequential(nn.Linear(64, 50), nn.Linear(64, 64))}),
        "here: 0",
    ),
    (
        "layers_off_16",
        ("te:mxfp8", {"model": Large(1).append(nn.Linear(48, 48))}),
        ("te", {"model": Large(1)}),
        "",
    ),
    (
        "vocabulary_off_16",
        ("ao", {"vocab_size": 50257}),
        ("native", {"vocab_size": 50257}),
        "next multiple of 16 is 50272",
    ),
    (
        "vocabulary_off_16",
        ("te", {"model": with_head(50257), "vocab_size": 50257}),
        ("te", {"model": Large(), "vocab_size": 50257}),  # a classifier, without such a head
        "50257",
    ),
    (
        "vocabulary_off_16",
        ("te:mxfp8", {"vocab_size": 50272 + 16 * 2 - 16}),
        ("te:mxfp8", {"vocab_size": 50304}),
        "32",
    ),
    (
        "tokens_off_16",
        ("native", {"sequence_length": 1000}),
        ("native", {"sequence_length": 1008}),
        "1008",
    ),
    (
        "tokens_unpadded",
        (AO_UNPADDED, {"sequence_length": 1000}),
        ("ao", {"sequence_length": 1000}),
        "1000",
    ),
    (
        "quantized_base",
        ("native", {"quantized_base": True}),
        ("native", {"quantized_base": False}),
        "",
    ),
    (
        "level_optimizer",
        ("msamp:O2", {"optimizer": "adamw_bnb_8bit"}),
        ("msamp:O2", {"optimizer": "AdamW"}),
        "bnb",
    ),
    (
        "level_optimizer",
        ("msamp:O2", {"optimizer": "adafactor"}),
        ("msamp:O2", {"optimizer": "SGD"}),
        "adafactor",
    ),
    (
        "level_optimizer",
        ("te+msamp", {"optimizer": "ao_adamw_fp8"}),
        ("te", {"optimizer": "ao_adamw_fp8"}),
        "fp8",
    ),
    (
        "lomo_ddp",
        ("native", {**DDP, "world_size": 2, "optimizer": "lomo"}),
        ("native", {**DDP, "world_size": 1, "optimizer": "lomo"}),
        "lomo",
    ),
    (
        "bitsandbytes_fsdp2",
        ("ao", {**FSDP2, "optimizer": "adamw_8bit"}),
        ("ao", {**FSDP2, "optimizer": "adamw_torch_8bit"}),
        "adamw_8bit",
    ),
    (
        "ao_adamw_fp8",
        ("ao", {"optimizer": "ao_adamw_fp8"}),
        ("ao", {"optimizer": "ao_adamw_8bit"}),
        "",
    ),
    (
        "release_accumulation",
        (RELEASED, {"accumulation_steps": 4}),
        ("msamp:O2", {"accumulation_steps": 4}),
        "=4",
    ),
    (
        "release_clipping",
        (RELEASED, {"max_grad_norm": 0.5}),
        (RELEASED, {"max_grad_norm": 0}),
        "max_grad_norm=0.5",
    ),
]


@pytest.mark.parametrize(
    ("rule", "fires", "near", "detail"), CASES, ids=[case[0] for case in CASES]
)
def test_rule_fires_and_near_miss_does_not(rule, fires, near, detail):
    (spec, setup), (near_spec, near_setup) = fires, near
    assert detail in rules(spec, **setup)[rule].reason
    assert rule not in rules(near_spec, **near_setup)


MACHINES = [
    # rule, spec, machine that fires, machine that does not, words of the finding
    ("emulated_here", "native:mxfp8", nvidia((9, 0)), nvidia((10, 0)), ""),
    ("emulated_here", "native:blockwise", nvidia((8, 9)), nvidia((9, 0)), ""),
    (
        "emulated_here",
        "native:blockwise",
        nvidia((9, 0), cuda=(12, 8)),
        nvidia((9, 0), cuda=(12, 9)),
        "CUDA 12.9",
    ),
    ("emulated_here", "native:dynamic", Machine(chips.chip_of("gfx942")), MI350, "here: MI300"),
    (
        "mixed_gpus",
        "native",
        nvidia((9, 0), (8, 9)),
        nvidia((9, 0), (9, 0)),
        "capabilities 8.9, 9.0",
    ),
    (
        "cuda_before_12_4",
        "native",
        nvidia((9, 0), cuda=(12, 3)),
        nvidia((9, 0), cuda=(12, 4)),
        "CUDA 12.3",
    ),
    ("cuda_before_12_4", "native", nvidia((9, 0), cuda=(12, 3)), nvidia((8, 0), cuda=(12, 3)), ""),
    ("no_fp8_hardware", "native", nvidia((8, 6)), nvidia((8, 9)), "te:delayed"),
]


@pytest.mark.parametrize(("rule", "spec", "fires", "near", "detail"), MACHINES)
def test_chip_rule_fires(rule, spec, fires, near, detail):
    assert BY_NAME[rule].severity == "warning"
    assert detail in on_machine(spec, fires)[rule]
    assert rule not in on_machine(spec, near)


def test_16_bit_autocast_on_cpu_without_16_bit_products_is_found():
    for has_bf16 in (False, True):
        machine = Machine(chips.CPU, bf16_products=has_bf16)
        for dtype in ("bf16", "fp16"):
            spec = {"backend": "native", "autocast_dtype": dtype}
            assert ("slow_autocast" in on_machine(spec, machine)) is not has_bf16
        assert "slow_autocast" not in on_machine(
            {"backend": "native", "autocast_dtype": "fp32"}, machine
        )
        assert "slow_autocast" not in on_machine("native", machine)
        for engine_bf16 in (False, True):  # in a DeepSpeed configuration
            setup = Setup(resolve("native"), machine, "deepspeed", engine_bf16=engine_bf16)
            assert bool(BY_NAME["slow_autocast"].applies(setup)) is (engine_bf16 and not has_bf16)
    assert "slow_autocast" not in rules({"backend": "native", "autocast_dtype": "bf16"})


def test_torch_version_rule_fires():
    for release, fires in (((2, 10), True), ((2, 11), False), ((2, 15), False), ((2, 16), True)):
        for engine in (None, "ddp", "fsdp2"):
            assert (
                "torch_untried" in on_machine("native", nvidia((9, 0), torch=release), engine)
            ) == fires
    assert "torch_untried" not in on_machine("native", Machine(chips.CPU, torch=(2, 16)))


def test_compiled_code_for_an_a100_needs_recent_torch():
    def fires(spec, capability, release, compiled):
        machine = nvidia(capability, torch=release)
        return "compiled_before_ada" in on_machine(spec, machine, compiled=compiled)

    assert fires("native:delayed", (8, 0), (2, 11), "full")
    assert fires("msamp:O2", (8, 6), (2, 12), "regional")
    assert not fires("native:delayed", (8, 0), (2, 13), "full")
    assert not fires("native:delayed", (8, 9), (2, 11), "full")
    assert not fires("native:delayed", (8, 0), (2, 11), "none")
    assert not fires("ao:tensorwise", (8, 0), (2, 11), "full")


def test_rowwise_products_on_cpu_need_recent_torch():
    old, new = Machine(chips.CPU, torch=(2, 12)), Machine(chips.CPU, torch=(2, 13))
    assert "torch 2.12" in on_machine("ao:rowwise", old)["rowwise_cpu_torch"]
    for spec, machine in (("ao:tensorwise", old), ("native:rowwise", old), ("ao:rowwise", new)):
        assert "rowwise_cpu_torch" not in on_machine(spec, machine)
    assert "rowwise_cpu_torch" not in on_machine("ao:rowwise", nvidia((9, 0), torch=(2, 12)))


def test_engine_unused_names_the_engine_that_trains():
    rule = BY_NAME["engine_unused"]
    for parallel, words in (
        ("ddp", "FSDP is asked for, DDP trains"),
        (None, "FSDP is asked for, one process trains"),
    ):
        assert words in rule.reason_in(
            Setup(resolve("native"), CPU, parallel, unused_engine="FSDP")
        )
        assert not rule.applies(Setup(resolve("native"), CPU, parallel))


# Refusals of training

REFUSED = [
    # rule, spec, refused setup, accepted setup, the cause
    (
        "level_deepspeed",
        "msamp:O2",
        {**DS, "zero_stage": 3},
        {**DS, "zero_stage": 2},
        "zero_stage 3",
    ),
    (
        "level_deepspeed",
        "msamp:O2",
        {**DS, "zero_offload": True},
        {**DS, "zero_offload": False},
        "offload",
    ),
    ("release_deepspeed", RELEASED, DS, DDP, ""),
    ("offload_engine", OFFLOADED, DS, DDP, "offload='states' with deepspeed"),
    ("offload_engine", OFFLOADED, FSDP2, DDP, "offload='states' with fsdp2"),
    ("offload_tensor_parallel", OFFLOADED, SHARED, {"tensor_parallel": 1}, ""),
    ("level_fsdp1", "te+msamp:O1", FSDP1, FSDP2, ""),
    ("fp8_params_sharded", {"backend": "native", "fp8_params": True}, FSDP1, FSDP2, ""),
    ("fp8_params_sharded", {"backend": "te", "fp8_params": True}, FSDP2, DDP, ""),
    ("engine_decides", GRADIENTS, DS, DDP, "gradient_comm='fp8' with deepspeed"),
    ("engine_decides", GRADIENTS, FSDP1, FSDP2, "gradient_comm='fp8' with fsdp1"),
    ("engine_decides", WEIGHTS, FSDP1, FSDP2, "enable_fsdp_float8_all_gather=True with fsdp1"),
    ("engine_decides", WEIGHTS, DS, FSDP2, "enable_fsdp_float8_all_gather=True with deepspeed"),
    (
        "engine_decides",
        BF16,
        {**DS, "engine_bf16": False},
        {**DS, "engine_bf16": True},
        "'bf16' with deepspeed",
    ),
    (
        "engine_decides",
        FP32,
        {**DS, "engine_bf16": True},
        DDP,
        "autocast_dtype='fp32' with deepspeed",
    ),
    (
        "engine_decides",
        {**FP16, "backend": "msamp:O2"},
        DS,
        DDP,
        "autocast_dtype='fp16' with deepspeed",
    ),
    ("engine_decides", FP16, FSDP2, DDP, "autocast_dtype='fp16' with fsdp2"),
    (
        "engine_decides",
        FP16,
        DS,
        {"recipe": resolve(BF16), **DS},
        "autocast_dtype='fp16' with deepspeed",
    ),
    (
        "guard_engine",
        {"backend": "native", "guard": "stop"},
        FSDP1,
        FSDP2,
        "guard='stop' with fsdp1",
    ),
    (
        "guard_engine",
        {"backend": "native", "guard": "warn"},
        DS,
        DDP,
        "guard='warn' with deepspeed",
    ),
    ("all_gather_without_fsdp2", GATHERED, {**DDP, "world_size": 2}, {"world_size": 1}, ""),
    ("megatron", "native", {"parallel": "megatron"}, {"parallel": "none"}, ""),
    ("comm_hook_level", "msamp:O1", {**DDP, "comm_hook": "fp16"}, DDP, "comm_hook='fp16'"),
    ("comm_hook_level", "msamp:O3", {**DDP, "comm_hook": "bf16"}, {"comm_hook": "bf16"}, ""),
    (
        "level_tensor_parallel",
        "msamp:O4",
        SHARED,
        {"recipe": resolve("msamp:O2"), **SHARED},
        "2 ranks share layers",
    ),
    ("te_tensor_parallel", "te", SHARED, {"tensor_parallel": 1}, ""),
    ("ddp_shared_layers", "native", {**DDP, **SHARED}, SHARED, "2 ranks share layers"),
    (
        "fp8_activations_backend",
        {**ACTIVATIONS, "backend": "te"},
        DDP,
        {"recipe": resolve(ACTIVATIONS), **DDP},
        "te",
    ),
    (
        "fp8_params_tensor_parallel",
        {"backend": "native", "fp8_params": True},
        SHARED,
        {"tensor_parallel": 1},
        "",
    ),
    (
        "release_accumulation",
        RELEASED,
        {"accumulation_steps": 2},
        {"accumulation_steps": 1},
        "steps=2",
    ),
    (
        "release_clipping",
        RELEASED,
        {"max_grad_norm": 1.0},
        {"max_grad_norm": 0.0},
        "max_grad_norm=1",
    ),
    (
        "release_fp16",
        {**RELEASED, "autocast_dtype": "fp16"},
        {},
        {"recipe": resolve(RELEASED)},
        "'fp16'",
    ),
    (
        "release_guard",
        {**RELEASED, "guard": "skip"},
        {},
        {"recipe": resolve(RELEASED)},
        "guard='skip'",
    ),
    (
        "release_guard",
        {**RELEASED, "guard": "stop"},
        {},
        {"recipe": resolve({**RELEASED, "guard": "warn"})},
        "",
    ),
]


@pytest.mark.parametrize(("rule", "spec", "refused", "near", "cause"), REFUSED)
def test_training_raises_message_of_rule_with_recipe(rule, spec, refused, near, cause):
    recipe = resolve(spec)
    with pytest.raises(RecipeError) as error:
        refuse(Setup(recipe, CPU, **refused))
    message = str(error.value)
    assert message.startswith(f"{recipe.name}: {BY_NAME[rule].reason}") and cause in message
    assert message.endswith(f". Fix: {BY_NAME[rule].fix}")
    refuse(Setup(**{"recipe": recipe, "machine": CPU, **near}))


def test_every_raised_rule_is_an_error_with_a_case():
    setup = Setup(resolve("native"), CPU, world_size=2)
    raised = {rule.name for rule in BY_NAME.values() if rule.is_raised(setup)}
    assert raised == {rule for rule, *_ in REFUSED}
    assert {BY_NAME[name].severity for name in raised} == {"error"}


def test_small_layers_are_judged_by_predicted_gain():
    """The break-even grows with the casts of a rule and with the speed of a chip's products over
    its memory."""
    between = nn.Sequential(nn.Linear(1664, 1664, device="meta"))
    assert "1664 -> 1664; 0.98 times" in rules("native:rowwise", between)["small_layers"].reason
    assert "small_layers" not in rules("native:dynamic", between)
    assert "small_layers" in rules("native:dynamic", between, chip="b200")
    small = nn.Sequential(nn.Linear(64, 64))
    small.lm_head = nn.Linear(64, 8192, bias=False)  # in high precision, whatever its size
    assert "64 -> 64" in rules("native", small)["small_layers"].reason
    assert "modest_gain" not in rules("native", small), "one line says that FP8 is not worth it"
    assert not {"small_layers", "modest_gain"} & rules("native:dynamic", Large()).keys()


def test_configuration_is_read_from_the_model():
    model = with_config(50257, vocab_size=50257, _attn_implementation="flash_attention_2")
    assert "checkpointing_ada" not in rules("native", model, chip="ada")
    assert "checkpointing_ada" in rules(
        "native", nn.Sequential(checkpoint_wrapper(model)), chip="ada"
    )
    model[0].gradient_checkpointing = True  # as transformers and diffusers set it, on layers
    assert "checkpointing_ada" in rules("native", nn.Sequential(model), chip="ada")
    found = rules("ao", model, parallel="fsdp2", compiled="full")
    assert {
        "vocabulary_off_16",
        "flash_attention_2_compile",
        "checkpointing_fsdp2_compile",
    } <= found.keys()
    said = rules(
        "ao",
        model,
        vocab_size=32000,
        attention="sdpa",
        activation_checkpointing=False,
        compiled="full",
    )
    assert (
        not {"vocabulary_off_16", "flash_attention_2_compile", "checkpointing_fsdp2_compile"}
        & said.keys()
    )
    language = with_config(50257, text_config=Config(vocab_size=50257))
    assert "vocabulary_off_16" in rules("ao", language)


def test_optimizer_findings_match_prepare():
    weights = [nn.Parameter(torch.zeros(2, 2))]
    refused = rules("msamp:O2", optimizer=torch.optim.RMSprop(weights, lr=1.0))["optimizer"]
    assert refused.severity == "error" and "torch.optim.AdamW" in refused.fix
    assert (
        "amsgrad"
        in rules("msamp", optimizer=torch.optim.AdamW(weights, amsgrad=True))["optimizer"].reason
    )
    for taken in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon, torch.optim.Adafactor):
        assert "optimizer" not in rules("msamp:O2", optimizer=taken(weights))
    assert "optimizer" not in rules("native", optimizer=torch.optim.RMSprop(weights, lr=1.0))


def test_patterns_that_match_nothing_are_findings():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    spec = {"backend": "native", "exclude": ["q_proj"]}
    assert "no weight of this model matches 'q_proj'" in rules(spec, model)["recipe"].reason
    assert "recipe" not in rules({"backend": "te", "exclude": ["1"]}, model)  # a norm swapped by te


def test_other_chip_is_judged_with_recent_libraries(monkeypatch):
    monkeypatch.setattr("fp8_backends.compute.hardware.cuda_release", lambda: (12, 0))
    assert not rules("te:blockwise", chip="hopper")
    assert set(rules("te:mxfp8", chip="hopper")) == {"te_mxfp8_chip"} and not rules(
        "te:mxfp8", chip="blackwell"
    )
    assert set(rules("native:mxfp8", chip="ada")) == {"emulated_here"}
    assert (
        set(rules("native", chip="before-fp8"))
        == set(rules("native", chip="cpu"))
        == {"no_fp8_hardware"}
    )
    assert set(rules("te", chip="mi350")) == {"te_without_nvidia_gpu"} and not rules(
        "native", chip="mi350"
    )
    assert set(rules("ao", chip="hopper")) == {"ao_without_compile"}
    for chip in chips.CHIPS:  # as the table has it
        for spec in (
            "te:delayed",
            "te:blockwise",
            "te:mxfp8",
            "ao:tensorwise",
            "native:blockwise",
            "native:window",
        ):
            state = chips.cell_of(spec, chip).state
            found = rules(spec, chip=chip.key, compiled="full")
            assert any(finding.severity == "error" for finding in found.values()) == (
                state == "refused"
            ), (spec, chip)
            assert bool({"emulated_here", "no_fp8_hardware"} & found.keys()) == (
                state == "emulated" or chip.key in ("cpu", "before-fp8")
            ), (spec, chip)
    assert rules("te:mxfp8", chip="h100") == rules("te:mxfp8", chip="hopper")
    with pytest.raises(RecipeError, match="did you mean 'hopper'"):
        validate("te", chip="hoper")


@pytest.mark.parametrize(
    "said, expected",
    [
        (
            {"parallel": "dpp"},
            r"parallel 'dpp' is not known \(did you mean 'ddp'\?\); there are none, ddp, fsdp1",
        ),
        ({"parallel": "FSDP2"}, r"did you mean 'fsdp2'\?"),
        ({"compiled": "regonal"}, r"compiled 'regonal' is not known \(did you mean 'regional'\?\)"),
        ({"compiled": True}, "compiled True is not known; there are none, full, regional"),
        ({"chip": "hoper"}, r"chip 'hoper' is not known \(did you mean 'hopper'\?\)"),
        (
            {"optimizer": torch.optim.AdamW},
            "must be a torch.optim.Optimizer that was made, or a name",
        ),
    ],
)
def test_unknown_setup_word_is_an_error(said, expected):
    with pytest.raises(RecipeError, match=expected):
        validate("ao", **said)


def test_validate_leaves_model_unchanged():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    state, classes = {**vars(model[0])}, [type(module) for module in model.modules()]
    validate("native", model)
    assert vars(model[0]) == state and [type(module) for module in model.modules()] == classes


def test_trainable_fp8_checkpoint_layers_are_found():
    from transformers.integrations.finegrained_fp8 import FP8Linear

    with torch.device("meta"):
        model = nn.Sequential(FP8Linear(128, 128), nn.Linear(8192, 8192))
    (finding,) = [
        each for each in validate("native", model) if each.rule == "fp8_checkpoint_trains"
    ]
    assert (
        finding.severity == "error"
        and "(here: 0)" in finding.reason
        and "dequantize" in finding.fix
    )
    model[0].requires_grad_(False)
    assert not [each for each in validate("native", model) if each.rule == "fp8_checkpoint_trains"]


def test_every_rule_has_a_case():
    source = Path(__file__).read_text(encoding="utf-8")
    assert not [name for name in BY_NAME if f'"{name}"' not in source]
    assert len(BY_NAME) == sum(map(len, THEMES.values())), "no two rules have one name"
