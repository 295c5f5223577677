"""Test `fp8-backends launch`: its options, refusals before any process starts, and commands."""

from __future__ import annotations

import json
import os
import sys

import pytest
import yaml
from intercepted import Intercepted, environment, ours, stocks, yaml_file

from fp8_backends import resolve
from fp8_backends.accelerate_plugin import launch, worker
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.recipes.handlers import from_environment
from fp8_backends.rules.preconditions import check_machine
from fp8_backends.tools.main import main

WORKER = "fp8_backends.accelerate_plugin.worker"
TE_QUESTIONS = {
    "backend": "TE",
    "margin": 0,
    "amax_history_length": 1024,
    "amax_compute_algorithm": "max",
}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Fake a machine without FP8 libraries or a default configuration file, with a GPU for every
    backend; create a script in this folder."""
    import accelerate.commands.config.config_args
    import accelerate.commands.launch as stock

    for name in os.environ:
        if name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: False)
    for module in (stock, accelerate.commands.config.config_args):
        monkeypatch.setattr(module, "default_config_file", str(tmp_path / "default_config.yaml"))
    monkeypatch.setattr(launch, "has_device", lambda: True)
    monkeypatch.setattr(launch, "check_machine", lambda recipe: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def recipe_of(started):
    """Return a worker's recipe from its environment."""
    with environment(**started.environment):
        worker.ask_for_fp8()
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "fp8"
    left = [name for name in started.environment if name.upper().startswith("ACCELERATE_FP8_")]
    assert not left
    return resolve(from_environment(started.environment))


# Accepted options


OVERRIDDEN = {"override_linear_precision": (False, False, True)}


@pytest.mark.parametrize(
    ("flags", "name", "fields"),
    [
        ("", "native:dynamic", {}),
        ("--fp8_backend te", "te:delayed", {}),
        ("--fp8_backend=AO --fp8_pad_inner_dim false", "ao:tensorwise", {"pad_inner_dim": False}),
        ("--fp8_backend msamp --fp8_opt_level O1", "msamp:O1", {}),
        (
            "--fp8-backend te+msamp:O3 --fp8-shard-states no",
            "te:delayed+msamp:O3",
            {"shard_states": False},
        ),
        ("--fp8_backend native --fp8_scaling rowwise --mixed_precision fp8", "native:rowwise", {}),
        (
            "--fp8_backend native:delayed --fp8_margin 2 --fp8_interval 3",
            "native:delayed",
            {"margin": 2, "interval": 3},
        ),
        ("--fp8_use_autocast_during_eval", "native:dynamic", {"use_autocast_during_eval": True}),
        ("--fp8_override_linear_precision false,false,true", "native:dynamic", OVERRIDDEN),
        (
            "--fp8_include a.*,b --fp8_exclude c",
            "native:dynamic",
            {"include": ("a.*", "b"), "exclude": ("c",)},
        ),
        ("--fp8_include +lm_head", "native:dynamic", {"include": ("+lm_head",)}),
        (
            "--fp8_backend msamp --fp8_implementation original",
            "msamp:O2",
            {"implementation": "original"},
        ),
        ("--fp8_backend te --fp8_use_mxfp8_block_scaling true", "te:mxfp8", {}),
        ("--fp8_backend te --fp8_params true", "te:delayed", {"fp8_params": True}),
        ("--mixed_precision Native:Rowwise", "native:rowwise", {}),
        ("--mixed_precision native:delayed --fp8_margin 1", "native:delayed", {"margin": 1}),
    ],
)
def test_flags_reach_the_worker(flags, name, fields):
    recipe = recipe_of(ours("--cpu", *flags.split(), "train.py"))
    assert recipe.name == name
    assert {field: getattr(recipe, field) for field in fields} == fields


def test_script_keeps_its_arguments():
    started = ours(
        "--cpu",
        "--fp8_backend",
        "ao",
        "train.py",
        "--fp8_backend",
        "x",
        "-m",
        "--cpu",
        "--fp8_nonsense",
        "--",
        "a b",
    )
    own = ["train.py", "--fp8_backend", "x", "-m", "--cpu", "--fp8_nonsense", "--", "a b"]
    assert started.command == [sys.executable, "-m", WORKER, *own]
    assert recipe_of(started).name == "ao:tensorwise"


def test_modules_run_as_modules():
    assert ours("--cpu", "-m", "package.train", "-m", "x").command[1:] == [
        "-m",
        WORKER,
        "-m",
        "package.train",
        "-m",
        "x",
    ]


def test_main_command_passes_launch_arguments_unchanged(monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "run", lambda arguments: seen.append(arguments) or 0)
    for arguments in (
        ["--cpu", "--", "x"],
        ["--version"],
        ["-h"],
        ["train.py", "--", "-m", "launch"],
        [],
    ):
        assert main(["launch", *arguments]) == 0
        assert seen[-1] == arguments


def test_help_shows_accelerates_flags_and_ours(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fp8-backends", "launch", "--help"])
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and printed.startswith("usage: fp8-backends launch")
    for word in (
        "--fp8_backend",
        "--fp8_autocast_dtype",
        "--fp8_margin",
        "--num_processes",
        "--use_fsdp",
        "te+msamp:O3",
    ):
        assert word in printed


# Launchers


def test_ranks_on_the_cpu_are_started():
    started = ours(
        "--cpu",
        "--num_processes",
        "3",
        "--main_process_port",
        "15123",
        "--fp8_backend",
        "msamp",
        "train.py",
    )
    assert started.ranks == 3 and started.agent.rdzv_endpoint.endswith(":15123")
    assert started.environment["ACCELERATE_USE_CPU"] == "true"
    assert started.command == [sys.executable, "-u", "-m", WORKER, "train.py"]


def test_configuration_file_starts_ranks_on_the_cpu(tmp_path):
    file = yaml_file(
        tmp_path, distributed_type="MULTI_CPU", num_processes=2, fp8_config={"backend": "ao"}
    )
    started = ours("--config_file", file, "train.py")
    assert started.ranks == 2 and recipe_of(started).name == "ao:tensorwise"


def test_ranks_start_on_a_machine_without_gpu(monkeypatch):
    monkeypatch.setattr(launch, "has_device", lambda: False)
    assert ours("--num_processes", "2", "train.py").ranks == 2
    assert ours("train.py").agent is None
    deepspeed = ours("--use_deepspeed", "--num_processes", "2", "train.py")
    assert deepspeed.ranks == 2 and "ACCELERATE_USE_CPU" not in deepspeed.environment


def test_externally_started_ranks_stay_single(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert ours("--cpu", "--num_processes", "2", "train.py").agent is None


def test_mpirun_handles_the_hostfile(monkeypatch):
    arguments = ("mpirun", "--hostfile", "-n", "--npernode", "--bind-to")
    monkeypatch.setattr("accelerate.utils.launch._get_mpirun_args", lambda: arguments)
    started = ours("--cpu", "--num_processes", "2", "--mpirun_hostfile", "hosts", "train.py")
    assert started.agent is None and started.command[:3] == ["mpirun", "--hostfile", "hosts"]
    assert started.command[-4:] == [sys.executable, "-m", WORKER, "train.py"]


def test_several_machines_and_ports_are_passed_on():
    machines = (
        "--multi_gpu --num_machines 2 --machine_rank 1 --num_processes 8 --main_process_ip 10.0.0.1"
    )
    machines += " --main_process_port 15200"
    started = ours(*machines.split(), "--same_network", "--max_restarts", "2", "train.py")
    agent = started.agent
    assert (
        agent.min_nodes,
        agent.nproc_per_node,
        agent.max_restarts,
        agent.rdzv_configs["rank"],
    ) == (2, 4, 2, 1)
    assert agent.rdzv_endpoint == "10.0.0.1:15200"


def test_fsdp_is_passed_on():
    flags = "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --num_processes 2"
    started = ours(*flags.split(), "--fp8_backend", "te+msamp:O3", "train.py")
    assert (
        started.environment["ACCELERATE_USE_FSDP"] == "true"
        and started.environment["FSDP_VERSION"] == "2"
    )
    assert started.ranks == 2 and recipe_of(started).name == "te:delayed+msamp:O3"


def test_recommended_fsdp2_settings_apply_only_under_fsdp2(tmp_path):
    block = {"backend": "AO", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}
    assert (
        recipe_of(
            ours("--config_file", yaml_file(tmp_path, fp8_config=block), "train.py")
        ).enable_fsdp_float8_all_gather
        is None
    )
    file = yaml_file(
        tmp_path,
        distributed_type="FSDP",
        use_cpu=False,
        fsdp_config={"fsdp_version": 2},
        fp8_config=block,
    )
    assert recipe_of(ours("--config_file", file, "train.py")).enable_fsdp_float8_all_gather is True


def test_multi_node_deepspeed_carries_recipe_through_a_shell(tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    flags = (
        "--use_deepspeed --num_machines 2 --num_processes 2 --machine_rank 0 --main_process_ip a"
    )
    flags += " --deepspeed_hostfile hosts --fp8_include *.mlp.*"
    started = ours(*flags.split(), "--fp8_backend", "native:delayed", "train.py")
    assert started.command[0] == "deepspeed" and started.command[-3:] == [
        "--module",
        WORKER,
        "train.py",
    ]
    assert not set(started.environment["FP8_BACKENDS_RECIPE"]) & set(" \"'{}*,;<>$\n")
    assert recipe_of(started).include == ("*.mlp.*",)
    written = [
        line for line in (tmp_path / ".deepspeed_env").read_text().splitlines() if "RECIPE" in line
    ]
    assert written == [f"FP8_BACKENDS_RECIPE={started.environment['FP8_BACKENDS_RECIPE']}"]


def test_launch_restores_environment_and_accelerate(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    before = dict(os.environ)
    assert recipe_of(ours("--cpu", "--num_processes", "2", "train.py")).name == "ao:tensorwise"
    assert dict(os.environ) == before
    with pytest.raises(RuntimeError, match="FP8 is not available"):
        stocks("--cpu", "--mixed_precision", "fp8", "train.py")


@pytest.mark.parametrize(("launcher", "quoted"), [("pdsh", True), ("standard", False)])
def test_multi_node_configuration_file_carries_recipe(launcher, quoted, tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    several = {
        "num_machines": 2,
        "num_processes": 2,
        "machine_rank": 0,
        "main_process_ip": "a",
        "use_cpu": False,
    }
    several |= {"main_process_port": 15200, "distributed_type": "DEEPSPEED"}
    options = {
        "deepspeed_multinode_launcher": launcher,
        "deepspeed_hostfile": str(tmp_path / "hosts"),
    }
    started = ours(
        "--config_file", yaml_file(tmp_path, **several, deepspeed_config=options), "train.py"
    )
    assert started.environment["FP8_BACKENDS_RECIPE"].startswith("%7B") is quoted
    assert recipe_of(started).name == "native:dynamic"


def test_worker_without_launch_has_no_recipe(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    worker.ask_for_fp8()
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


# Flags over file over environment


def test_flags_override_file_overrides_environment(monkeypatch, tmp_path):
    for name, value in {
        "BACKEND": "ao",
        "MARGIN": "9",
        "INTERVAL": "9",
        "AMAX_HISTORY_LEN": "9",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", value)
    block = {"backend": "native:delayed", "margin": 2, "interval": 2}
    recipe = recipe_of(
        ours(
            "--config_file", yaml_file(tmp_path, fp8_config=block), "--fp8_margin", "0", "train.py"
        )
    )
    assert (recipe.name, recipe.margin, recipe.interval, recipe.amax_history_len) == (
        "native:delayed",
        0,
        2,
        9,
    )


def test_environment_applies_without_flags_and_file(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp:O1")
    assert recipe_of(ours("--cpu", "train.py")).name == "msamp:O1"


def test_nested_launch_keeps_the_recipe(monkeypatch):
    monkeypatch.setenv("FP8_BACKENDS_RECIPE", '{"backend": "native:delayed", "margin": 1}')
    recipe = recipe_of(ours("--cpu", "--fp8_margin", "2", "train.py"))
    assert (recipe.name, recipe.margin) == ("native:delayed", 2)


def test_default_file_applies_except_for_the_cpu(tmp_path):
    block = TE_QUESTIONS | {"override_linear_precision": "(false, false, false)"}
    (tmp_path / "default_config.yaml").write_text(
        open(yaml_file(tmp_path, fp8_config=block)).read()
    )
    recipe = recipe_of(ours("train.py"))
    assert (recipe.name, recipe.amax_compute_algo) == ("te:delayed", "max")
    assert recipe_of(ours("--cpu", "train.py")).name == "native:dynamic"
    assert recipe_of(ours("--fp8_backend", "native:rowwise", "train.py")).name == "native:rowwise"


def test_a_json_file_is_read(tmp_path):
    (tmp_path / "c.json").write_text(
        json.dumps({"distributed_type": "NO", "use_cpu": True, "fp8_config": {"backend": "ao"}})
    )
    assert recipe_of(ours("--config_file", "c.json", "train.py")).name == "ao:tensorwise"


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_other_precision_in_file_is_overridden_with_warning(precision, tmp_path, caplog):
    recipe_of(ours("--config_file", yaml_file(tmp_path, mixed_precision=precision), "train.py"))
    assert f"mixed_precision: {precision} in {tmp_path}/config.yaml has no effect" in caplog.text
    caplog.clear()
    recipe_of(
        ours(
            "--config_file",
            yaml_file(tmp_path, mixed_precision=precision),
            "--mixed_precision",
            "fp8",
            "train.py",
        )
    )
    assert "no effect" not in caplog.text


def test_mixed_precision_in_file_may_name_the_backend(tmp_path):
    file = yaml_file(tmp_path, mixed_precision="native:delayed", fp8_config={"margin": 1})
    recipe = recipe_of(ours("--config_file", file, "train.py"))
    assert (recipe.name, recipe.margin) == ("native:delayed", 1)
    file = yaml_file(tmp_path, mixed_precision="native:delayed")
    assert (
        recipe_of(ours("--config_file", file, "--mixed_precision", "ao", "train.py")).name
        == "ao:tensorwise"
    )


# Refusals, in one line, with exit code 2, before any process starts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--fp8_backend natve train.py",
            "--fp8_backend natve: unknown backend 'natve' (did you mean 'native'?)",
        ),
        ("--fp8_bakend te train.py", "--fp8_bakend is not known (did you mean '--fp8_backend'?)"),
        (
            "--fp8-scalling=rowwise train.py",
            "--fp8-scalling is not known (did you mean '--fp8_scaling'?)",
        ),
        ("--fp8_amax_history_length 3 train.py", "did you mean '--fp8_amax_history_len'?"),
        (
            "--num_process 2 train.py",
            "unknown flag --num_process (did you mean '--num_processes'?)",
        ),
        ("--fp8_config x train.py", "--fp8_config: config takes a Python object"),
        ("--fp8_module_filter_func f train.py", "FP8RecipeKwargs(module_filter_func=...)"),
        (
            "--fp8_margin x --fp8_backend te train.py",
            "--fp8_margin x: margin='x': margin must be a whole number",
        ),
        (
            "--fp8_margin 2 --fp8_backend native train.py",
            "--fp8_margin 2: margin is not read by native:dynamic",
        ),
        ("--fp8_format E5M2 train.py", "no GPU"),
        (
            "--fp8_backend te:delayed --fp8_scaling dynamic train.py",
            "says delayed and scaling says dynamic",
        ),
        ("--fp8_backend ao --fp8_opt_level O2 train.py", "ao goes with O0 only"),
        ("--fp8_params train.py", "training_script"),
        ("--mixed_precision bf16 train.py", "--mixed_precision bf16: this command trains in FP8"),
        ("--mixed_precision fp4 train.py", "--mixed_precision fp4: this command trains in FP8"),
        (
            "--mixed_precision nativ:dynamic train.py",
            "unknown backend 'nativ:dynamic' (did you mean 'native'?)",
        ),
        (
            "--mixed_precision ao --fp8_backend native train.py",
            "--mixed_precision ao: this command trains in FP8; leave the flag out",
        ),
        ("--no_python train.py", "--no_python"),
        ("--tpu train.py", "TPU"),
        ("--use_megatron_lm train.py", "Megatron-LM brings its own FP8"),
        ("--cpu --multi_gpu train.py", "You can only use one of"),
        ("nowhere.py", "there is no script 'nowhere.py'"),
        ("--fp8_backend te", "training_script"),
        ("--config_file nowhere.yaml train.py", "nowhere.yaml"),
        ("--num_processes two train.py", "invalid int value: 'two'"),
    ],
)
def test_impossible_launch_is_refused_in_one_line(arguments, said, capsys):
    with Intercepted() as intercepted:
        assert main(["launch", *arguments.split()]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("fp8-backends launch: ") and printed.count("\n") == 1
    assert said in printed and not intercepted.started


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"fp8_config": {"bakend": "te"}},
            "config.yaml: fp8_config.bakend is not known (did you mean 'backend'?)",
        ),
        (
            {"fp8_config": {"backend": "ao", "margin": 3}},
            "config.yaml: fp8_config.margin=3: margin is not read by ao",
        ),
        ({"fp9_config": {}}, "fp9_config"),
        ({"distributed_type": "XLA"}, "TPU"),
        ({"distributed_type": "MEGATRON_LM"}, "Megatron-LM brings its own FP8"),
    ],
)
def test_impossible_file_setting_is_refused_in_one_line(values, said, tmp_path, capsys):
    file = yaml_file(tmp_path, **values)
    with Intercepted() as intercepted:
        assert main(["launch", "--config_file", file, "train.py"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("fp8-backends launch: ") and printed.count("\n") == 1
    assert said in printed and not intercepted.started


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--fp8_backend te",
            "te:delayed cannot run here: TransformerEngine is not installed. Fix: pip install",
        ),
        (
            "--multi_gpu --num_machines 2 --machine_rank 1 --num_processes 8 --fp8_backend "
            "te+msamp:O3",
            "te:delayed+msamp:O3 cannot run here",
        ),
        (
            "--cpu --fp8_backend msamp --fp8_implementation original",
            "the package msamp is not installed",
        ),
    ],
)
def test_recipe_unsupported_on_worker_machine_is_refused(flags, said, monkeypatch, capsys):
    monkeypatch.setattr(launch, "check_machine", check_machine)
    with Intercepted() as intercepted:
        assert main(["launch", *flags.split(), "train.py"]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1 and not intercepted.started


@pytest.mark.parametrize(
    "flags",
    [
        "--gpu_ids 1",
        "--use_deepspeed --deepspeed_hostfile h --num_machines 2 --machine_rank 0 --num_processes "
        "2 --main_process_ip a",
        "--cpu --num_processes 2 --mpirun_hostfile h",
    ],
)
def test_recipe_unsupported_here_warns_if_workers_are_elsewhere(
    flags, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(launch, "check_machine", check_machine)
    arguments = ("mpirun", "--hostfile", "-n", "--npernode", "--bind-to")
    monkeypatch.setattr("accelerate.utils.launch._get_mpirun_args", lambda: arguments)
    (tmp_path / "h").write_text("a slots=1\nb slots=1\n")
    assert recipe_of(ours(*flags.split(), "--fp8_backend", "te", "train.py")).name == "te:delayed"
    assert "te:delayed cannot run here" in caplog.text and "started all the same" in caplog.text


def test_sagemaker_is_refused_by_name(tmp_path):
    job = {
        "compute_environment": "AMAZON_SAGEMAKER",
        "ec2_instance_type": "x",
        "iam_role_name": "y",
        "use_cpu": False,
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job | {"distributed_type": "DATA_PARALLEL"}))
    with pytest.raises(FP8BackendError, match="SageMaker.*import fp8_backends"):
        ours("--config_file", "job.yaml", "train.py")


@pytest.mark.parametrize("name", ["ACCELERATE_FP8_BACKND", "ACCELERATE_FP8_MARGIN"])
def test_unsuitable_environment_variable_is_named(name, monkeypatch):
    monkeypatch.setenv(name, "3")
    with pytest.raises(RecipeError, match=rf"^{name}(=3: margin is not read| is not known)"):
        ours("--cpu", "--fp8_backend", "ao", "train.py")


def test_disabled_package_is_refused(monkeypatch):
    monkeypatch.setenv("FP8_BACKENDS_DISABLE", "1")
    with pytest.raises(FP8BackendError, match="FP8_BACKENDS_DISABLE is set"):
        ours("--cpu", "train.py")


@pytest.mark.parametrize("flag", ["--multi_gpu", "--use_fsdp"])
def test_unconnected_ranks_are_refused(flag, monkeypatch):
    monkeypatch.setattr(launch, "has_device", lambda: False)
    with pytest.raises(
        FP8BackendError, match=f"{flag}: this machine has no GPU.*--cpu --num_processes"
    ):
        ours(flag, "--num_processes", "2", "train.py")


def test_incompatible_accelerate_is_named(monkeypatch):
    monkeypatch.delattr("accelerate.commands.launch.multi_gpu_launcher")
    with pytest.raises(FP8BackendError, match="launch.multi_gpu_launcher does not exist"):
        ours("--cpu", "train.py")


@pytest.mark.parametrize("text", ["native", "[1]", "{", '{"bakend": "te"}', '{"backend": "natve"}'])
def test_invalid_recipe_variable_is_named(text):
    with pytest.raises(RecipeError, match="^FP8_BACKENDS_RECIPE in the environment: "):
        from_environment({"FP8_BACKENDS_RECIPE": text})
