"""Test `fp8-backends config`: the meaning of files, and files accepted by Accelerate."""

from __future__ import annotations

import json

import pytest
import yaml
from accelerate.commands import launch as stock
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import launch as stock_environments
from accelerate.utils.dataclasses import FP8BackendType

from fp8_backends import RecipeError, resolve
from fp8_backends.recipes.sources import environment_source
from fp8_backends.tools.config import read
from fp8_backends.tools.config.training_config import yaml_fields
from fp8_backends.tools.main import main

AXOLOTL = """
base_model: meta-llama/Llama-3.2-3B
datasets: [{path: yahma/alpaca-cleaned, type: alpaca}]
sequence_len: 512
fp8: true
fp8_enable_fsdp_float8_all_gather: true
torch_compile: true
fsdp_version: 2
fsdp_config:
  offload_params: false
  cpu_ram_efficient_loading: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  state_dict_type: FULL_STATE_DICT
  reshard_after_forward: true
"""
WIZARD = yaml.safe_load("""
{compute_environment: LOCAL_MACHINE, distributed_type: "NO", mixed_precision: fp8, use_cpu: false, debug: false,
 num_processes: 1, num_machines: 1, machine_rank: 0, gpu_ids: all, main_training_function: main, downcast_bf16: false,
 enable_cpu_affinity: false, rdzv_backend: static, same_network: true}
""")
"""The constant answers of `accelerate config`."""
TE = yaml.safe_load("""
{backend: TE, use_autocast_during_eval: false, margin: 0, interval: 1, fp8_format: HYBRID, amax_history_length: 1024,
 amax_compute_algorithm: max}
""") | {"override_linear_precision": (False, False, False)}
MSAMP = {"backend": "MSAMP", "optimization_level": "O1"}
AO = {"backend": "AO", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}
FSDP2 = yaml.safe_load("""
{fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_offload_params: false,
 fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,
 fsdp_state_dict_type: SHARDED_STATE_DICT, fsdp_cpu_ram_efficient_loading: true, fsdp_activation_checkpointing: false}
""")
FSDP = {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": FSDP2}


@pytest.fixture
def asked(tmp_path):
    """Write a file of the wizard with these blocks and values, and read it."""

    def ask(fp8_config=None, **values):
        path = tmp_path / "wizard.yaml"
        ClusterConfig(**{**WIZARD, "fp8_config": fp8_config, **values}).to_yaml_file(path)
        return read(str(path))

    return ask


def exported(path, *flags):
    """Return the environment of the stock launcher for a file."""
    args = stock.launch_command_parser().parse_args(
        ["--config_file", str(path), *flags, "script.py"]
    )
    args, defaults, from_file = stock._validate_launch_command(args)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        # DeepSpeedPlugin refuses it together with a file of DeepSpeed's
        assert "mixed_precision" not in fields
        return stock_environments.prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.multi_gpu:
        return stock_environments.prepare_multi_gpu_env(args)
    return stock_environments.prepare_simple_launcher_cmd_env(args)[1]


# Files of `accelerate config`


@pytest.mark.parametrize(
    ("fp8_config", "values", "spec"),
    [
        (TE, {}, {"backend": "te", "amax_compute_algo": "max"}),
        (MSAMP, {}, "msamp:O1"),
        (AO, {}, "ao"),
        (AO, FSDP, {"backend": "ao", "enable_fsdp_float8_all_gather": True}),
        (
            {"backend": "native:rowwise", "exclude": "a,b"},
            {},
            {"backend": "native:rowwise", "exclude": ("a", "b")},
        ),
        (
            {"backend": "te+msamp:O3", "margin": 1},
            {},
            {"backend": "te:delayed+msamp:O3", "margin": 1},
        ),
    ],
)
def test_recipe_of_an_accelerate_file(asked, fp8_config, values, spec):
    config = asked(fp8_config, **values)
    assert config.system == "accelerate" and config.recipe == resolve(spec)


def test_fp8_alone_means_auto(asked, capsys):
    config = asked()
    assert config.recipe.name == "auto" and config.for_accelerate()["fp8_config"] == {
        "backend": "auto"
    }
    assert main(["config", config.source]) == 0
    assert (
        "auto, which is native:dynamic on this machine (no FP8 products" in capsys.readouterr().err
    )


def test_wizards_all_gather_is_omitted_without_fsdp2(asked):
    config = asked(AO)
    assert config.fields == {"backend": "ao"} and "has no effect without FSDP2" in config.notes[0]
    assert "all_gather_without_fsdp2" not in {finding.rule for finding in config.findings()}
    expected = asked({"backend": "ao", "all_gather": True})  # not the wizard's key
    assert "all_gather_without_fsdp2" in {finding.rule for finding in expected.findings()}


@pytest.mark.parametrize(
    ("values", "parallel", "compiled"),
    [
        ({}, "none", "none"),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2}, "ddp", "none"),
        ({"distributed_type": "MULTI_CPU", "num_processes": 2}, "ddp", "none"),
        (FSDP, "fsdp2", "none"),
        # the launcher's default
        ({**FSDP, "fsdp_config": {"fsdp_offload_params": False}}, "fsdp1", "none"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
            "deepspeed",
            "none",
        ),
        ({"distributed_type": "MEGATRON_LM"}, "megatron", "none"),
        ({"distributed_type": "XLA"}, "tpu", "none"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "none", "full"),
        (
            {"dynamo_config": {"dynamo_backend": "inductor", "use_regional_compilation": True}},
            "none",
            "regional",
        ),
        ({"dynamo_config": {"dynamo_backend": "NO"}}, "none", "none"),
        ({"dynamo_config": {"dynamo_backend": "AOT_EAGER"}}, "none", "none"),  # without kernels
    ],
)
def test_engine_and_compilation_of_an_accelerate_file(asked, values, parallel, compiled):
    config = asked(MSAMP, **values)
    assert (config.parallel, config.compiled) == (parallel, compiled)


def test_surroundings_come_from_the_file_or_the_launchers_defaults(asked):
    told = asked(
        MSAMP, **{**FSDP, "fsdp_config": {**FSDP2, "fsdp_cpu_ram_efficient_loading": False}}
    )
    assert told.surroundings == {
        "activation_checkpointing": False,
        "cpu_ram_efficient_loading": False,
    }
    untold = asked(
        MSAMP, **{**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
    )
    assert untold.surroundings == {
        "activation_checkpointing": True,
        "cpu_ram_efficient_loading": True,
    }
    shared = asked(MSAMP, **FSDP, parallelism_config={"parallelism_config_tp_size": 2})
    assert shared.surroundings["tensor_parallel"] == 2


@pytest.mark.parametrize(
    ("block", "stage", "offload"),
    [
        ({"gradient_clipping": 1.0}, 2, False),
        (
            {"zero_stage": 1, "offload_optimizer_device": "none", "offload_param_device": "none"},
            1,
            False,
        ),
        ({"zero_stage": 2, "offload_optimizer_device": "cpu"}, 2, True),
        ({"zero_stage": 1, "offload_param_device": "nvme"}, 1, True),
        ({"zero_stage": 3}, 3, False),
    ],
)
def test_levels_are_refused_at_zero3_and_with_offload(block, stage, offload, asked):
    for spec in ("msamp:O2", "native:delayed"):
        config = asked({"backend": spec}, distributed_type="DEEPSPEED", deepspeed_config=block)
        assert config.surroundings == {"zero_stage": stage, "zero_offload": offload}
        refusal = [finding for finding in config.findings() if finding.rule == "level_deepspeed"]
        assert bool(refusal) == (spec != "native:delayed" and (stage == 3 or offload))
        assert all(
            "FullyShardedDataParallelPlugin(fsdp_version=2)" in finding.fix for finding in refusal
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "distributed_type: NO, mixed_precison: fp8",
            "mixed_precison.*did you mean 'mixed_precision'",
        ),
        ("mixed_precision: fp8", "distributed_type is missing"),
        ("distributed_type: MULTI_GPUS", "distributed_type='MULTI_GPUS' must be one of"),
        (
            "distributed_type: NO, mixed_precision: fp9",
            "mixed_precision='fp9' must be one of no, fp16, bf16, fp8",
        ),
        (
            "distributed_type: FSDP, fsdp_config: {fsdp_offlod_params: true}",
            "did you mean 'fsdp_offload_params'",
        ),
        ("distributed_type: FSDP, fsdp_config: [1]", "fsdp_config must be a block of keys"),
        (
            "distributed_type: NO, dynamo_config: {dynamo_backend: indctor}",
            "dynamo_backend='indctor' must be one of",
        ),
        ("distributed_type: NO, num_processes: two", "num_processes='two' must be a whole number"),
        (
            "distributed_type: NO, mixed_precision: fp8, fp8_config: {backend: TE, margn: 1}",
            "did you mean 'margin'",
        ),
        (
            "distributed_type: NO, mixed_precision: fp8, fp8_config: {backend: native, margin: 1}",
            "margin",
        ),
        ("compute_environment: AMAZON_SAGEMAKER, distributed_type: NO", "is for Amazon SageMaker"),
        (
            "distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: x}",
            "zero_stage='x' must be a whole number",
        ),
        ("[1]", "holds no keys"),
        ("a: [1", "is no YAML.*line"),
        ("x: 1", "do not tell whether.*say it with --from"),
        (None, "broken.yaml: No such file"),
    ],
)
def test_an_invalid_file_exits_with_2_and_names_file_and_key(tmp_path, capsys, text, expected):
    path = tmp_path / "broken.yaml"
    if text is not None:
        path.write_text(text if text.startswith("[") else f"{{{text}}}")
    assert main(["config", str(path)]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("fp8-backends config: ")
        and "broken.yaml" in error
        and "Traceback" not in error
    )
    with pytest.raises(RecipeError, match=expected):
        read(str(path))


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("distributed_type: NO, mixed_precision: no, dynamo_config: {dynamo_backend: NO}", "NO"),
        ("distributed_type: multi_gpu, mixed_precision: FP8, num_processes: '2'", "MULTI_GPU"),
        ("distributed_type: NO, mixed_precision: fp8, dynamo_backend: inductor", "NO"),
        ("compute_environment: LOCAL_MACHINE, distributed_type: NO, fp16: true", "NO"),
        ("compute_environment: LOCAL_MACHINE, distributed_type: NO, fp16: 'false'", "NO"),
        ("distributed_type: TPU, mixed_precision: fp8", "XLA"),
    ],
)
def test_other_spellings_are_written_for_accelerate(tmp_path, text, engine):
    (tmp_path / "a.yaml").write_text(f"{{{text}}}")
    config = read(str(tmp_path / "a.yaml"))
    assert (config.compiled == "full") == ("inductor" in text)
    assert (config.mixed_precision == "fp16") == ("fp16: true" in text)
    written = tmp_path / "b.yaml"
    written.write_text(yaml.safe_dump(config.for_accelerate()))
    loaded = load_config_from_file(str(written))
    assert loaded.distributed_type == engine and loaded.mixed_precision == config.mixed_precision
    assert loaded.num_processes == (config.processes or -1)
    backend = exported(written, "--num_processes", "2")["ACCELERATE_DYNAMO_BACKEND"]
    assert backend == ("INDUCTOR" if "inductor" in text else "NO")


def test_an_fp8_block_without_fp8_is_noted(asked):
    config = asked(TE, mixed_precision="bf16")
    assert config.recipe is None and "fp8_config has no effect" in config.notes[0]


# Written files


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("axolotl", None),
        ("one process", "auto"),
        ("ddp", "native:rowwise"),
        ("fsdp2", "te+msamp:O3"),
        ("deepspeed", "msamp:O4"),
        ("axolotl", "ao:rowwise_with_gw_hp"),
    ],
)
def test_accelerate_exports_the_recipe_of_a_written_file(tmp_path, backend, kind):
    source, written = tmp_path / "source.yaml", tmp_path / "written.yaml"
    values = {
        "one process": {},
        "ddp": {"distributed_type": "MULTI_GPU", "num_processes": 2},
        "fsdp2": {
            **FSDP,
            "dynamo_config": {
                "dynamo_backend": "INDUCTOR",
                "dynamo_use_regional_compilation": True,
            },
        },
        "deepspeed": {
            "distributed_type": "DEEPSPEED",
            "num_processes": 2,
            "deepspeed_config": {"zero_stage": 1},
        },
    }
    if kind == "axolotl":
        source.write_text(AXOLOTL)
    else:
        ClusterConfig(**{**WIZARD, "fp8_config": AO, **values[kind]}).to_yaml_file(source)
    config = read(str(source), processes=2)
    if backend is not None:
        config.use(backend)
    written.write_text(yaml.safe_dump(config.for_accelerate()))
    assert load_config_from_file(str(written)).mixed_precision == "fp8"
    # mixed_precision comes from the file, and DeepSpeed's settings do too, so the two agree
    environment = exported(written, *(["--mixed_precision", "fp8"] if kind == "deepspeed" else []))
    assert environment["ACCELERATE_MIXED_PRECISION"] == "fp8"
    assert resolve(environment_source(environment).fields) == resolve(config.fields)
    again = read(str(written))
    assert (
        resolve(again.fields) == resolve(config.fields)
        and again.for_accelerate() == config.for_accelerate()
    )
    same = ("parallel", "compiled", "processes")
    assert [getattr(again, name) for name in same] == [getattr(config, name) for name in same]
    if kind == "axolotl":
        assert (
            environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
            and environment["FSDP_VERSION"] == "2"
        )
        assert environment["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"


def test_every_field_passes_through_the_stock_launcher(tmp_path):
    specs = [
        {
            "backend": "native:delayed",
            "margin": 2,
            "interval": 3,
            "amax_history_len": 8,
            "amax_compute_algo": "max",
        },
        {
            "backend": "native:dynamic",
            "override_linear_precision": [False, False, True],
            "fp8_format": "E4M3",
        },
        {"backend": "te", "use_autocast_during_eval": True, "fp8_params": True},
        {"backend": "ao", "pad_inner_dim": False, "enable_fsdp_float8_all_gather": True},
        {"backend": "te:blockwise", "fp8_format": "HYBRID"},
        {"backend": "msamp:O3", "rounding": "nearest", "shard_states": False},
        {
            "backend": "native",
            "include": ["q_proj", "*.mlp.*"],
            "exclude": ["lm_head"],
            "autocast_dtype": "fp16",
        },
        {"backend": "native", "gradient_comm": "fp8", "on_unproven": "warn"},
    ]
    for spec in specs:
        recipe = resolve(spec)
        path = tmp_path / "a.yaml"
        path.write_text(yaml.safe_dump({**WIZARD, "fp8_config": yaml_fields(recipe)}))
        assert (
            resolve(environment_source(exported(path)).fields)
            == recipe
            == resolve(read(str(path)).fields)
        ), spec


def test_config_keeps_deepspeed_file_without_mixed_precision(tmp_path):
    zero, source, written = (tmp_path / name for name in ("zero.json", "a.yaml", "b.yaml"))
    zero.write_text('{\n\t"zero_optimization": {"stage": 3}\n}')  # a tab is no YAML
    source.write_text(f"base_model: x\nfp8: true\ndeepspeed: {zero}\n")
    assert main(["config", str(source), "--num_processes", "2", "--output", str(written)]) == 0
    environment = exported(written, "--mixed_precision", "fp8")
    assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(zero)
    assert resolve(environment_source(environment).fields).name == "ao:tensorwise"
    again = read(str(written))
    assert again.surroundings == {"zero_stage": 3, "zero_offload": False}
    assert again.recipe.name == "ao:tensorwise"


# The command


@pytest.fixture
def axolotl(tmp_path):
    path = tmp_path / "axolotl.yaml"
    path.write_text(AXOLOTL)
    return path


def test_yaml_goes_to_standard_output_and_explanations_to_standard_error(axolotl, capsys, hopper):
    assert main(["config", str(axolotl), "--num_processes", "8"]) == 0
    printed = capsys.readouterr()
    written = read(str(axolotl), processes=8).for_accelerate()
    assert yaml.safe_load(printed.out) == written
    message = "is not a valid FP8BackendType"  # it names no fix, so the file does
    with pytest.raises(ValueError, match=message):
        FP8BackendType(written["fp8_config"]["backend"])
    assert printed.out.startswith("# For `fp8-backends launch`") and message in printed.out
    expected = (
        "ao:tensorwise",
        "enable_fsdp_float8_all_gather=True",
        "FSDP2, efficient loading",
        "8",
        "whole model",
    )
    assert all(text in printed.err for text in expected)
    assert "no validator found anything" in printed.err
    assert max(map(len, printed.err.splitlines())) <= max(100, len(str(axolotl)) + 20)


def test_output_is_a_file_and_explanations_go_to_standard_output(axolotl, capsys, tmp_path):
    written = tmp_path / "accelerate.yaml"
    assert main(["config", str(axolotl), "-o", str(written), "--backend", "te:delayed"]) == 0
    printed = capsys.readouterr()
    assert (
        "te:delayed" in printed.out
        and f"--config_file {written}" in printed.out
        and not printed.err
    )
    assert read(str(written)).recipe.name == "te:delayed"
    assert main(["config", str(axolotl), "-o", str(tmp_path / "none" / "x.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_check_exits_with_1_and_writes_nothing_after_an_error(axolotl, capsys, hopper, tmp_path):
    assert main(["config", str(axolotl), "--check"]) == 0
    assert "fp8_config" in capsys.readouterr().out
    axolotl.write_text(AXOLOTL.replace("fsdp_version: 2", "fsdp_version: 1"))
    written = tmp_path / "never.yaml"
    assert main(["config", str(axolotl), "--check", "-o", str(written)]) == 1
    printed = capsys.readouterr()
    assert "[all_gather_without_fsdp2]" in " ".join(printed.out.split()) and not written.exists()
    assert main(["config", str(axolotl), "-o", str(written)]) == 0 and written.exists()
    axolotl.write_text("base_model: x\nfp8: true\n")
    # a warning, torch.compile missing, is no error
    assert main(["config", str(axolotl), "--check"]) == 0
    assert "[ao_without_compile]" in " ".join(capsys.readouterr().err.split())


def test_check_for_another_chip(axolotl, capsys):
    flags = ["config", str(axolotl), "--backend", "te:blockwise", "--check"]
    assert main(flags) == main([*flags, "--chip", "ada"]) == main([*flags, "--chip", "l40s"]) == 1
    capsys.readouterr()
    assert main([*flags, "--chip", "h100"]) == main([*flags, "--chip", "hopper"]) == 0
    assert "no validator found anything" in capsys.readouterr().err


def test_json_holds_everything(axolotl, capsys, hopper):
    assert main(["config", str(axolotl), "--json", "--backend", "native:mxfp8"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = ("from", "backend", "parallel", "compiled")
    assert [found[key] for key in keys] == ["axolotl", "native:mxfp8", "fsdp2", "full"]
    assert [finding["rule"] for finding in found["findings"]] == ["emulated_here"]
    assert found["accelerate"]["fp8_config"] == {"backend": "native:mxfp8", "all_gather": True}
    assert found["surroundings"]["sequence_length"] == 512 and "base_model" in found["passed_over"]
    assert not any("left out" in note for note in found["notes"])
    main(["config", str(axolotl), "--json", "--backend", "te:mxfp8"])
    note = "enable_fsdp_float8_all_gather=True of the file is left out with backend te:mxfp8"
    assert any(note in each for each in json.loads(capsys.readouterr().out)["notes"])


def test_without_fp8_there_is_nothing_to_check(tmp_path, capsys):
    path = tmp_path / "bf16.yaml"
    path.write_text("base_model: x\nbf16: true\n")
    assert main(["config", str(path), "--check"]) == 0
    printed = capsys.readouterr()
    assert "FP8 is off" in printed.err and yaml.safe_load(printed.out)["mixed_precision"] == "bf16"
    assert "#" not in printed.out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--backend", "nativ"], "did you mean 'native'"),
        (["--from", "accelerate"], "base_model"),
        (["--chip", "hoper"], "did you mean 'hopper'"),
    ],
)
def test_invalid_flags_are_refused(axolotl, capsys, flags, expected):
    assert main(["config", str(axolotl), *flags]) == 2
    assert expected in capsys.readouterr().err


def test_a_configuration_in_json(tmp_path, capsys):
    (tmp_path / "a.json").write_text(
        json.dumps({"distributed_type": "NO", "mixed_precision": "fp8"}, indent="\t")
    )
    assert read(str(tmp_path / "a.json")).recipe.name == "auto"
    (tmp_path / "b.json").write_text("{")
    assert (
        main(["config", str(tmp_path / "b.json")]) == 2 and "is no JSON" in capsys.readouterr().err
    )
