"""Each rule fires where it should, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fp8_backends import RecipeError, validate
from fp8_backends.compute import chips as hardware_table
from fp8_backends.training.rules import RULES, THEMES


def rules(*args, **kwargs):
    return {finding.rule: finding for finding in validate(*args, **kwargs)}


def pretend_gpus(monkeypatch, *capabilities, cuda=(13, 0)):
    """NVIDIA GPUs of these capabilities and a PyTorch for that CUDA; without a capability, AMD's MI350."""
    chip = hardware_table.chip_of(min(capabilities)) if capabilities else hardware_table.MI350
    fp8 = not capabilities or min(capabilities) >= (8, 9)
    for name, value in {
        "has_gpu": True,
        "fp8_products": fp8,
        "capabilities": list(capabilities),
        "cuda_release": cuda,
        "torch_release": (2, 13),
    }.items():
        monkeypatch.setattr(f"fp8_backends.compute.hardware.{name}", lambda value=value: value)
    monkeypatch.setattr("fp8_backends.compute.chips.chip_here", lambda: chip)


@pytest.fixture
def fp8_gpu(monkeypatch):
    pretend_gpus(monkeypatch, (9, 0))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("fp8_backends.compute.hardware.has_gpu", lambda: False)
    monkeypatch.setattr("fp8_backends.compute.hardware.fp8_products", lambda: False)


class Large(nn.Sequential):
    """4.3 billion parameters that take no memory."""

    def __init__(self, layers=16):
        super().__init__(*(nn.Linear(16384, 16384, bias=False, device="meta") for _ in range(layers)))


def test_no_fp8_hardware_says_that_bf16_is_faster(no_gpu):
    finding = rules("native")["no_fp8_hardware"]
    assert finding.severity == "warning" and "bf16" in finding.fix
    emulated, _, refused = finding.reason.partition("refused:")
    assert "native:mxfp8" in emulated and "ao:rowwise" in emulated and "te:delayed" in refused


def test_clean_setup_has_no_findings(fp8_gpu):
    assert validate("native:delayed", Large()) == []
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
        assert validate(spec, Large(), **nothing_wrong) == []


def test_ao_on_a_gpu_wants_torch_compile(fp8_gpu):
    assert "ao_without_compile" in rules("ao")
    assert "ao_without_compile" not in rules("ao", compiled="regional")
    assert "ao_without_compile" not in rules("native")
    assert "ao_without_compile" not in rules("ao", torch.compile(nn.Linear(8, 8)))


def test_fp8_all_gather_needs_fsdp2(fp8_gpu):
    spec = {"backend": "ao", "enable_fsdp_float8_all_gather": True}
    assert rules(spec, parallel="ddp")["all_gather_without_fsdp2"].severity == "error"
    assert "all_gather_without_fsdp2" not in rules(spec, parallel="fsdp2")
    assert "all_gather_without_fsdp2" not in rules("ao")


def test_ao_under_ddp_wants_regional_compilation(fp8_gpu):
    assert "ao_ddp_full_compile" in rules("ao", parallel="ddp", compiled="full")
    assert "ao_ddp_full_compile" not in rules("ao", parallel="ddp", compiled="regional")
    assert "ao_ddp_full_compile" not in rules("native", parallel="ddp", compiled="full")


def test_history_of_one_step_is_pointed_out(fp8_gpu):
    spec = {"backend": "native:delayed", "amax_history_len": 1, "amax_compute_algo": "max"}
    assert "short_amax_history" in rules(spec)
    assert "short_amax_history" not in rules("native:delayed")


def test_fp16_around_fp8_mentions_the_loss_scaler(fp8_gpu):
    assert "fp16_autocast" in rules({"backend": "native", "autocast_dtype": "fp16"})
    assert "fp16_autocast" not in rules("native")


def test_small_layers_are_pointed_out(fp8_gpu):
    assert "small_layers" in rules("native", nn.Linear(256, 256))
    assert "small_layers" not in rules("native", nn.Sequential(nn.Linear(8, 8), nn.Linear(256, 2048)))


def test_unavailable_backend_and_wrong_string_are_findings_not_exceptions(fp8_gpu):
    assert rules("te")["unavailable"].severity == "error"
    assert "TransformerEngine is not installed" in rules("te")["unavailable"].reason
    assert "did you mean 'native'" in rules("nativ")["recipe"].reason


def test_wrapper_is_seen_through_the_model(fp8_gpu):
    class FSDPModule(nn.Linear):
        """The name of the class that `fully_shard` mixes in."""

    spec = {"backend": "ao", "enable_fsdp_float8_all_gather": True}
    assert "all_gather_without_fsdp2" not in rules(spec, FSDPModule(8, 8))
    block = nn.Sequential(nn.Linear(8, 8))
    block[0].compile()
    assert "ao_without_compile" not in rules("ao", block)


def test_worst_findings_come_first_and_each_has_a_fix(no_gpu, monkeypatch):
    monkeypatch.setattr("fp8_backends.compute.hardware.cpu_bf16", lambda: True)
    spec = {"backend": "ao", "enable_fsdp_float8_all_gather": True, "autocast_dtype": "fp16"}
    severities = [finding.severity for finding in validate(spec)]
    assert severities == ["error", "warning", "info"]
    for rule in RULES:
        assert rule.fix and rule.reason and rule.severity in ("error", "warning", "info")
    assert str(validate(spec)[0]).startswith("error: ") and "Fix:" in str(validate(spec)[0])


# TransformerEngine


@pytest.fixture
def nvidia(monkeypatch):
    """An NVIDIA GPU of that capability (None: an AMD GPU), and a PyTorch for that CUDA."""

    def pretend(capability=None, cuda=(13, 0)):
        pretend_gpus(monkeypatch, *([] if capability is None else [capability]), cuda=cuda)

    return pretend


def te_rules(spec, **setup):
    named = {rule.name for rule in THEMES["TransformerEngine"]} | {"fp8_params_sharded", "fp8_params_trains"}
    return {name for name in rules(spec, **setup) if name in named}


def test_te_without_an_nvidia_gpu_names_the_native_twin(nvidia):
    nvidia(None)
    for spec in ("te", "te:blockwise", "te:mxfp8", "te+msamp:O2"):
        assert te_rules(spec) == {"te_without_nvidia_gpu"}
        assert "native:delayed for te:delayed" in rules(spec)["te_without_nvidia_gpu"].fix
    assert not te_rules("native:delayed") and not te_rules("ao")


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
def test_te_recipe_that_the_chip_or_its_cuda_lacks(nvidia, spec, capability, cuda, expected):
    nvidia(capability, cuda)
    assert te_rules(spec) == expected
    scaling = spec.partition(":")[2]
    if spec.startswith("te"):  # the same as the table that doctor prints
        here = hardware_table.support_of("te", scaling, hardware_table.chip_of(capability), cuda)
        assert (here.state == "refused") == bool(expected)


def test_a_backward_that_the_environment_takes_out_of_fp8_is_pointed_out(nvidia, monkeypatch):
    nvidia((9, 0))
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    assert rules("te:dynamic")["te_backward_in_high_precision"].severity == "error"
    assert not te_rules("native:dynamic")


def test_weights_in_fp8_are_whole_and_do_not_train(nvidia):
    nvidia((9, 0))
    spec = {"backend": "te", "fp8_params": True}
    for parallel in ("fsdp1", "fsdp2", "deepspeed"):
        found = rules(spec, parallel=parallel)["fp8_params_sharded"]
        assert found.severity == "error" and "DDP" in found.fix and "te+msamp:O3" in found.fix
        assert not te_rules("te", parallel=parallel)
    assert not te_rules(spec) and not te_rules(spec, parallel="ddp")
    model = nn.Sequential(nn.Linear(8192, 8192, device="meta"), nn.Linear(8192, 8192, device="meta"))
    assert te_rules(spec, model=model) == {"fp8_params_trains"} and not te_rules("te", model=model)
    model[0].requires_grad_(False)
    assert te_rules(spec, model=model) == {"fp8_params_trains"}
    assert not te_rules({**spec, "exclude": "1"}, model=model)
    assert not te_rules(spec, model=model.requires_grad_(False))


# Each rule on a row: where it fires, and a near miss


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
GRADIENTS = {"backend": "native", "gradient_comm": "fp8"}
FUSED = {"backend": "te", "fuse_norms": True}
FP16 = {"backend": "native", "autocast_dtype": "fp16"}
DS, FSDP1, FSDP2, DDP = ({"parallel": name} for name in ("deepspeed", "fsdp1", "fsdp2", "ddp"))

CASES = [
    # rule, (spec, setup) that fires, (spec, setup) that does not, what the finding says of this setup
    ("level_deepspeed", ("msamp:O2", DS), ("native", DS), ""),
    ("level_fsdp1", ("te+msamp:O1", FSDP1), ("msamp:O1", FSDP2), ""),
    ("fsdp1", ("native:delayed", FSDP1), ("native:delayed", FSDP2), ""),
    ("autocast_fsdp2", (FP16, FSDP2), (FP16, DDP), "autocast_dtype='fp16'"),
    ("autocast_deepspeed", (FP16, DS), ({"backend": "native", "autocast_dtype": "bf16"}, DS), "autocast_dtype='fp16'"),
    ("fp8_gradients_deepspeed", (GRADIENTS, DS), (GRADIENTS, DDP), ""),
    ("fp8_gradients_alone", (GRADIENTS, {"world_size": 1}), (GRADIENTS, {}), ""),
    ("fuse_norms_zero3", (FUSED, {**DS, "zero_stage": 3}), (FUSED, {**DS, "zero_stage": 2}), ""),
    ("o3_alone", ("msamp:O3", {"world_size": 1}), ("msamp:O3", {"world_size": 2}), ""),
    ("o3_ddp_saving", ("msamp:O3", DDP), ({"backend": "msamp:O3", "shard_states": False}, DDP), ""),
    ("tensor_parallel", ("native", {"tensor_parallel": 2}), ("native", {"tensor_parallel": 1}), "2 ranks"),
    ("megatron", ("te", {"parallel": "megatron"}), ("te", DDP), ""),
    ("tpu", ("native", {"parallel": "tpu"}), ("native", DDP), ""),
    (
        "efficient_loading_buffers",
        ("native", {**FSDP2, "model": Buffered(True), "cpu_ram_efficient_loading": True}),
        ("native", {**FSDP2, "model": Buffered(False), "cpu_ram_efficient_loading": True}),
        "here: table",
    ),
    ("ddp_nothing_left", ("msamp:O1", {**DDP, "model": Large(1)}), ("msamp:O1", {**DDP, "model": with_head(64)}), ""),
    (
        "checkpointing_fsdp2_compile",
        ("ao", {**FSDP2, "compiled": "full", "activation_checkpointing": True}),
        ("ao", {**FSDP2, "activation_checkpointing": True}),
        "",
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
        "it has no Linear",
    ),
    (
        "minority_in_fp8",
        ("native", {"model": with_head(16384 * 17)}),
        ("native", {"model": with_head(16384 * 15)}),
        "here: 48%; output head",
    ),
    ("small_model", ("native", {"model": Large(3)}), ("native", {"model": Large(4)}), "805 million"),
    ("modest_gain", ("native", {"model": Large(11)}), ("native", {"model": Large(12)}), "2.95 billion"),
    (
        "layers_off_16",
        ("te", {"model": nn.Sequential(nn.Linear(64, 50), nn.Linear(64, 64))}),
        ("native", {"model": nn.Sequential(nn.Linear(64, 50), nn.Linear(64, 64))}),
        "here: 0",
    ),
    ("layers_off_16", ("te:mxfp8", {"model": Large(1).append(nn.Linear(48, 48))}), ("te", {"model": Large(1)}), ""),
    (
        "vocabulary_off_16",
        ("ao", {"vocab_size": 50257}),
        ("native", {"vocab_size": 50257}),
        "next multiple of 16 is 50272",
    ),
    (
        "vocabulary_off_16",
        ("te", {"model": with_head(50257), "vocab_size": 50257}),
        ("te", {"model": Large(), "vocab_size": 50257}),  # a classifier, which has no such head
        "50257",
    ),
    ("vocabulary_off_16", ("te:mxfp8", {"vocab_size": 50272 + 16 * 2 - 16}), ("te:mxfp8", {"vocab_size": 50304}), "32"),
    ("tokens_off_16", ("native", {"sequence_length": 1000}), ("native", {"sequence_length": 1008}), "1008"),
    ("tokens_unpadded", (AO_UNPADDED, {"sequence_length": 1000}), ("ao", {"sequence_length": 1000}), "1000"),
    ("quantized_base", ("native", {"quantized_base": True}), ("native", {"quantized_base": False}), ""),
    ("level_optimizer", ("msamp:O2", {"optimizer": "adamw_bnb_8bit"}), ("msamp:O2", {"optimizer": "AdamW"}), "bnb"),
    ("level_optimizer", ("te+msamp", {"optimizer": "ao_adamw_fp8"}), ("te", {"optimizer": "ao_adamw_fp8"}), "fp8"),
    (
        "bitsandbytes_fsdp2",
        ("ao", {**FSDP2, "optimizer": "adamw_8bit"}),
        ("ao", {**FSDP2, "optimizer": "adamw_torch_8bit"}),
        "adamw_8bit",
    ),
    ("ao_adamw_fp8", ("ao", {"optimizer": "ao_adamw_fp8"}), ("ao", {"optimizer": "ao_adamw_8bit"}), ""),
]


@pytest.mark.parametrize(("rule", "fires", "near", "here"), CASES, ids=[case[0] for case in CASES])
def test_rule_fires_where_it_should_and_a_near_miss_does_not(fp8_gpu, rule, fires, near, here):
    (spec, setup), (near_spec, near_setup) = fires, near
    assert here in rules(spec, **setup)[rule].reason
    assert rule not in rules(near_spec, **near_setup)


MACHINES = [
    # rule, spec, machine that fires, machine that does not
    ("emulated_here", "native:mxfp8", [(9, 0)], [(10, 0)]),
    ("emulated_here", "native:blockwise", [(8, 9)], [(9, 0)]),
    ("emulated_here", "native:dynamic", None, [(9, 0)]),
    ("mixed_gpus", "native", [(9, 0), (8, 9)], [(9, 0), (9, 0)]),
]


@pytest.mark.parametrize(("rule", "spec", "fires", "near"), MACHINES)
def test_rule_of_a_chip(monkeypatch, rule, spec, fires, near):
    pretend_gpus(monkeypatch, *(fires or []))
    if fires is None:
        monkeypatch.setattr("fp8_backends.compute.chips.chip_here", lambda: hardware_table.MI300)
    found = rules(spec)[rule]
    assert rule != "mixed_gpus" or "capabilities 8.9, 9.0" in found.reason
    assert found.severity == "warning" and ("here: MI300" in found.reason) == (fires is None)
    pretend_gpus(monkeypatch, *near)
    assert rule not in rules(spec)


def test_16_bits_around_fp8_on_a_cpu_that_multiplies_none(monkeypatch, no_gpu):
    for has_bf16, fires in ((False, True), (True, False)):
        monkeypatch.setattr("fp8_backends.compute.hardware.cpu_bf16", lambda answer=has_bf16: answer)
        for dtype in ("bf16", "fp16"):
            assert ("slow_autocast" in rules({"backend": "native", "autocast_dtype": dtype})) == fires
        assert "slow_autocast" not in rules({"backend": "native", "autocast_dtype": "fp32"})
        assert "slow_autocast" not in rules("native")
        assert "slow_autocast" not in rules({"backend": "native", "autocast_dtype": "bf16"}, chip="hopper")


VERSIONS = [
    # rule, spec, setup, release that fires, the first that does not
    ("torch_untried", "native", {}, (2, 10), (2, 11)),
    ("fsdp2_torch", "native", FSDP2, (2, 5), (2, 6)),
    ("fp8_gradients_torch", "msamp:O2", FSDP2, (2, 8), (2, 9)),
    ("fp8_gradients_torch", GRADIENTS, FSDP2, (2, 8), (2, 9)),
]


@pytest.mark.parametrize(("rule", "spec", "setup", "old", "new"), VERSIONS)
def test_rule_of_a_version_of_torch(monkeypatch, fp8_gpu, rule, spec, setup, old, new):
    for release, fires in ((old, True), (new, False), ((2, 13), False)):
        monkeypatch.setattr("fp8_backends.compute.hardware.torch_release", lambda release=release: release)
        assert (rule in rules(spec, **setup)) == fires
    assert rule not in rules("native", parallel="ddp")


def test_rowwise_products_on_a_cpu_want_a_new_torch(monkeypatch, no_gpu):
    monkeypatch.setattr("fp8_backends.compute.hardware.torch_release", lambda: (2, 12))
    assert rules("ao:rowwise")["rowwise_cpu_torch"].severity == "error"
    assert "rowwise_cpu_torch" not in rules("ao:tensorwise") and "rowwise_cpu_torch" not in rules("native:rowwise")
    monkeypatch.setattr("fp8_backends.compute.hardware.torch_release", lambda: (2, 13))
    assert "rowwise_cpu_torch" not in rules("ao:rowwise")


def test_cuda_before_12_4(monkeypatch):
    pretend_gpus(monkeypatch, (9, 0), cuda=(12, 3))
    assert "CUDA 12.3" in rules("native")["cuda_before_12_4"].reason
    pretend_gpus(monkeypatch, (9, 0), cuda=(12, 4))
    assert "cuda_before_12_4" not in rules("native")
    pretend_gpus(monkeypatch, (8, 0), cuda=(12, 3))
    assert "cuda_before_12_4" not in rules("native")


def test_small_layers_are_judged_by_the_scale_s_granularity(fp8_gpu):
    between = nn.Sequential(nn.Linear(8192, 2048, device="meta"))  # a gain with one scale a tensor, none a row
    assert "8192 -> 2048" in rules("native:rowwise", between)["small_layers"].reason
    assert "small_layers" not in rules("native:dynamic", between)
    small = nn.Sequential(nn.Linear(64, 64))
    small.lm_head = nn.Linear(64, 8192, bias=False)  # in high precision, whatever its size
    assert "64 -> 64" in rules("native", small)["small_layers"].reason


def test_model_shows_its_configuration(fp8_gpu):
    model = with_config(50257, vocab_size=50257, _attn_implementation="flash_attention_2")
    model.is_gradient_checkpointing = True
    found = rules("ao", model, parallel="fsdp2", compiled="full")
    assert {"vocabulary_off_16", "flash_attention_2_compile", "checkpointing_fsdp2_compile"} <= found.keys()
    said = rules("ao", model, vocab_size=32000, attention="sdpa", activation_checkpointing=False, compiled="full")
    assert not {"vocabulary_off_16", "flash_attention_2_compile", "checkpointing_fsdp2_compile"} & said.keys()
    language = with_config(50257, text_config=Config(vocab_size=50257))
    assert "vocabulary_off_16" in rules("ao", language)


def test_optimizer_object_is_judged_as_prepare_judges_it(fp8_gpu):
    weights = [nn.Parameter(torch.zeros(2, 2))]
    refused = rules("msamp:O2", optimizer=torch.optim.SGD(weights, lr=1.0))["optimizer"]
    assert refused.severity == "error" and "torch.optim.AdamW" in refused.fix
    assert "amsgrad" in rules("msamp", optimizer=torch.optim.AdamW(weights, amsgrad=True))["optimizer"].reason
    assert "optimizer" not in rules("msamp:O2", optimizer=torch.optim.AdamW(weights))
    assert "optimizer" not in rules("native", optimizer=torch.optim.SGD(weights, lr=1.0))


def test_patterns_that_match_nothing_are_findings(fp8_gpu):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    spec = {"backend": "native", "exclude": ["q_proj"]}
    assert "no weight of this model matches 'q_proj'" in rules(spec, model)["recipe"].reason
    assert "recipe" not in rules({"backend": "te", "exclude": ["1"]}, model)  # a norm, which te swaps


def test_another_chip_is_judged_with_new_libraries(no_gpu, monkeypatch):
    monkeypatch.setattr("fp8_backends.compute.hardware.cuda_release", lambda: (12, 0))
    assert not rules("te:blockwise", chip="hopper")
    assert set(rules("te:mxfp8", chip="hopper")) == {"te_mxfp8_chip"} and not rules("te:mxfp8", chip="blackwell")
    assert set(rules("native:mxfp8", chip="ada")) == {"emulated_here"}
    assert set(rules("native", chip="before-fp8")) == set(rules("native", chip="cpu")) == {"no_fp8_hardware"}
    assert set(rules("te", chip="mi350")) == {"te_without_nvidia_gpu"} and not rules("native", chip="mi350")
    assert set(rules("ao", chip="hopper")) == {"ao_without_compile"}
    for chip in hardware_table.CHIPS:  # as the table has it
        for spec in ("te:delayed", "te:blockwise", "te:mxfp8", "ao:tensorwise", "native:blockwise", "native:window"):
            state = hardware_table.support_of(*spec.split(":"), chip).state
            found = rules(spec, chip=chip.key, compiled="full")
            assert any(finding.severity == "error" for finding in found.values()) == (state == "refused"), (spec, chip)
            assert bool({"emulated_here", "no_fp8_hardware"} & found.keys()) == (
                state == "emulated" or chip.key in ("cpu", "before-fp8")
            ), (spec, chip)
    with pytest.raises(RecipeError, match="did you mean 'hopper'"):
        validate("te", chip="hoper")


def test_nothing_of_the_model_changes(no_gpu):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    state, classes = {**vars(model[0])}, [type(module) for module in model.modules()]
    validate("native", model)
    assert vars(model[0]) == state and [type(module) for module in model.modules()] == classes


def test_every_rule_has_a_case(request):
    source = Path(__file__).read_text(encoding="utf-8")
    missing = [rule.name for rule in RULES if f'"{rule.name}"' not in source]
    assert not missing
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
