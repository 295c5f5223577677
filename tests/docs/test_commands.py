"""Run every command of the pages; parse the commands for GPUs with their programs' parsers."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
import warm_process
import yaml
from accelerate.commands.launch import launch_command_parser
from documents import (
    DOCUMENTS,
    GUIDES,
    README,
    ROOT,
    code_blocks,
    commands,
    literal_blocks,
    script_without_recipe,
)
from torch.distributed.run import get_args_parser
from widths import nightly_but

from fp8_backends.accelerate_plugin.launch import Configuration, parse, recipe_fields
from fp8_backends.recipes.fields import FIELDS
from fp8_backends.recipes.handlers import FP8RecipeKwargs, resolve
from fp8_backends.tools import advise, convert, monitor
from fp8_backends.tools.compare import command as compare
from fp8_backends.tools.config import read
from fp8_backends.tools.main import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder: a script without a recipe, a model, and the files of the guides."""
    (tmp_path / "train.py").write_text(f"import fp8_backends\n{script_without_recipe()}")
    for block in code_blocks("yaml"):
        (tmp_path / re.match(r"# (\S+\.yaml)", block.text)[1]).write_text(block.text)
    (tmp_path / "my-model").mkdir()
    config = '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}'
    (tmp_path / "my-model" / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_FP8_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def trained_backend(line: str, monkeypatch) -> str:
    """Run a line; return the backend in its only proof line."""
    words = shlex.split(line)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    program, *arguments = words
    start = {
        "fp8-backends": ["-m", "fp8_backends"],
        "torchrun": ["-m", "torch.distributed.run"],
        "python": [],
    }[program]
    ended = warm_process.run(*start, *arguments)
    assert ended.returncode == 0, ended.stderr
    (proof,) = re.findall(r"^(\S+): 2/2 Linear, 100 % of weight FLOPs", ended.stderr, re.M)
    return proof


TRAINS_HERE = {
    "fp8-backends launch --fp8_backend native:dynamic train.py": "native:dynamic",
    "ACCELERATE_MIXED_PRECISION=fp8 ACCELERATE_FP8_BACKEND=native:rowwise python "
    "train.py": "native:rowwise",
    "fp8-backends launch --fp8_backend native:dynamic train.py --lr 1e-4": "native:dynamic",
    "fp8-backends launch --cpu --num_processes 2 --fp8_backend msamp:O2 train.py": "msamp:O2",
}
UNDER_TORCHRUN = "ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 train.py"
"""Two processes on one port of torchrun's choice; the script there names its recipe."""


@pytest.mark.parametrize("line", nightly_but([next(iter(TRAINS_HERE))], TRAINS_HERE))
def test_every_cpu_training_command_trains_with_its_backend(line, folder, monkeypatch):
    assert line in commands()
    assert trained_backend(line, monkeypatch) == TRAINS_HERE[line]


@pytest.mark.nightly
def test_the_first_example_prints_the_line_of_the_readme(tmp_path, monkeypatch):
    """Both commands, and all of the line but the engine of this CPU."""
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in literal_blocks(README) if "examples bert" in block.text]
    copies, trains = block.text.replace("python -m pip install '.[report]' && ", "").splitlines()
    for line in (copies, trains):
        ended = warm_process.run("-m", "fp8_backends", *shlex.split(line)[1:])
        assert ended.returncode == 0, ended.stderr
    (shown,) = re.findall(
        r"^ +(native:dynamic: 13/14 .*) \(\S+\)$", README.read_text("utf-8"), re.M
    )
    assert shown in ended.stderr


@pytest.mark.nightly
def test_the_torchrun_command_trains_on_two_processes(folder, monkeypatch):
    assert UNDER_TORCHRUN in commands()
    (folder / "train.py").write_text(code_blocks("python", README)[0].text)
    # alongside other tests on this machine
    alone = UNDER_TORCHRUN.replace("torchrun", "torchrun --standalone")
    assert trained_backend(alone, monkeypatch) == "native:dynamic"


def launches() -> list[str]:
    others = [line for line in commands() if line not in (*TRAINS_HERE, UNDER_TORCHRUN)]
    return [line for line in others if re.search(r"launch |torchrun ", line)]


@pytest.mark.parametrize("line", launches())
def test_launcher_parses_every_other_launch_command(line):
    program, *arguments = [word for word in shlex.split(line) if not re.match("[A-Z_0-9]+=", word)]
    if program == "torchrun":
        script = get_args_parser().parse_args(arguments).training_script
        assert script == "train.py" or (ROOT / script).exists()
    elif program == "accelerate":
        assert launch_command_parser().parse_args(arguments[1:]).mixed_precision == "fp8"
    else:
        asked = parse(arguments[1:])
        if "--config_file" not in line:  # the configuration's own test reads that file
            name = re.search(r"--fp8_backend (\S+)", line)[1]
            recipe = FP8RecipeKwargs(**recipe_fields(asked, Configuration()))
            fields = {
                name: int(number)
                for name, number in re.findall(r"--fp8_(margin|monitor_every) (\d+)", line)
            }
            assert recipe == FP8RecipeKwargs(backend=name, **fields)


def test_the_config_commands_and_their_files_match_the_guide(folder, capsys):
    guide = GUIDES / "launching.rst"
    lines = [line for line in commands(guide) if line.startswith("fp8-backends config ")]
    assert len(lines) == 3
    for line in lines:
        line, _, target = line.partition(" > ")
        assert main(shlex.split(line)[1:]) == 0, line
        written = capsys.readouterr().out
        if target:
            Path(target.strip()).write_text(written)
    assert read("accelerate.yaml").recipe.name == "te:delayed+msamp:O2"  # the second line's output
    main(["config", "axolotl.yaml", "--num_processes", "8"])
    explained = next(
        block.text for block in literal_blocks(guide) if block.text.startswith("backend ")
    )
    said = capsys.readouterr().err
    assert all(line in said for line in explained.splitlines())


def test_launcher_yaml_is_read(folder):
    assert dict(resolve("recipe.yaml").layers) == {"*.down_proj": "native:mxfp8", "first": 1}
    recipe = read("fsdp.yaml").recipe
    assert (recipe.name, recipe.amax_history_len, recipe.exclude) == (
        "native:delayed+msamp:O3",
        16,
        ("lm_head",),
    )


def test_files_for_other_programs_agree(folder):
    """These programs do not install together with this package (`trainers.rst` has the reasons);
    the guide shows manually tested files."""
    info, examples = (
        json.loads(block.text) for block in code_blocks("json", GUIDES / "trainers.rst")
    )
    factory, axolotl = (
        yaml.safe_load(Path(name).read_text()) for name in ("fp8_sft.yaml", "fp8.yaml")
    )
    assert info[factory["dataset"]]["file_name"] == axolotl["datasets"][0]["path"]
    assert examples[0].keys() == {"instruction", "input", "output"}  # the "alpaca" of both


def test_every_yaml_block_is_tested(folder):
    names = {"axolotl.yaml", "fsdp.yaml", "fp8_sft.yaml", "fp8.yaml", "nodes.yaml", "recipe.yaml"}
    assert {path.name for path in folder.glob("*.yaml")} == names
    assert all(yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml"))


@pytest.mark.nightly
def test_the_guide_shows_the_printed_estimates(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    guide = GUIDES / "planning.rst"
    ours, shown = [line for line in commands(guide) if line.startswith("fp8-backends estimate ")]
    assert main([*shlex.split(ours)[1:], "--backend", "bf16,msamp:O2"]) == 0
    assert {"DDP", "FSDP2"} <= set(re.findall(r"\w+", capsys.readouterr().out))
    assert main([*shlex.split(shown)[1:], "--backend", "bf16,msamp:O2"]) == 0
    printed = capsys.readouterr().out
    table = next(block.text for block in literal_blocks(guide) if block.text.startswith("model  "))
    shown_rows, rows = (
        [
            [cell for cell in line.split() if cell != "-"]
            for line in text.splitlines()
            if re.match(r"\s*(bf16|msamp:O2) ", line)
        ]
        for text in (table, printed)  # a column of nothing but "-" is not printed
    )
    assert len(rows) == 4 and shown_rows == rows, "memory and time of both"


def parsed(name: str, command) -> list[argparse.Namespace]:
    """Parse every `fp8-backends NAME` of the pages."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    lines = [line for line in commands() if line.startswith(f"fp8-backends {name}")]
    return [parser.parse_args(shlex.split(line)[2:]) for line in lines]


def test_command_options_and_backends_exist():
    compared, advised, (monitored,), (converted,) = (
        parsed("compare", compare),
        parsed("advise", advise),
        parsed("monitor", monitor),
        parsed("convert", convert),
    )
    assert (converted.to, converted.check) == ("bf16", True)
    assert len(compared) >= 2 and len(advised) >= 2
    names = ",".join(filter(None, [*(c.backends for c in compared), *(a.backend for a in advised)]))
    assert all(map(resolve, names.split(",")))
    assert (monitored.file, monitored.out) == (FIELDS["monitor_file"].default, Path("monitor.html"))


def test_the_examples_commands_copy_their_examples(folder):
    lines = [line for line in commands() if line.startswith("fp8-backends examples")]
    assert [main(shlex.split(line)[1:]) for line in lines] == [0, 0, 0]
    assert (folder / "qwen3_lora.py").read_bytes() == (folder / "my_lora.py").read_bytes()


def test_checkpoint_command_lists_its_folder(folder, capsys):
    (line,) = [line for line in commands() if line.startswith("fp8-backends checkpoint")]
    words = shlex.split(line)[1:]
    Path(words[-1], "checkpoint_0").mkdir(parents=True)
    assert main(words) == 0 and "checkpoint_0" in capsys.readouterr().out


@pytest.mark.nightly
def test_doctor_commands_describe_this_machine_and_chips(capsys):
    shown = {}
    for line in {line for line in commands() if line.startswith("fp8-backends doctor")}:
        assert main([*shlex.split(line)[1:], "--no-test"]) == 0
        shown[line] = capsys.readouterr().out
    assert "native:mxfp8" in shown["fp8-backends doctor"]
    assert (
        "H100" in shown["fp8-backends doctor --chip h100"]
        and "RTX 50" in shown["fp8-backends doctor --chips"]
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "line", [line for line in commands() if line.startswith("python benchmarks/")]
)
def test_benchmark_options_exist(line, folder):
    _, script, *arguments = shlex.split(line)
    shown = warm_process.run(str(ROOT / script), "--help")
    assert shown.returncode == 0, shown.stderr
    assert all(word in shown.stdout for word in arguments if word.startswith("--"))


def test_paths_and_markers_of_test_commands_exist(pytestconfig):
    lines = [line for line in commands() if "-m pytest" in line or "-m sphinx" in line]
    assert len(lines) >= 2
    for line in lines:
        words = shlex.split(line)
        assert all(
            (ROOT / word).exists()
            for word in words
            if "/" in word and "::" not in word and "=" not in word
        )
    markers = {marker.split(":")[0] for marker in pytestconfig.getini("markers")}
    expressions = re.findall(r' -m (?!pytest|sphinx)("[^"]+"|\w+)', "\n".join(lines))
    used = {word for expression in expressions for word in re.findall(r"\w+", expression)} - {
        "not",
        "and",
        "or",
    }
    assert used == markers & {"nightly"} == {"nightly"}


def test_pip_extras_are_quoted():
    """zsh reads them as file patterns."""
    files = [*DOCUMENTS, *(ROOT / "fp8_backends").rglob("*.py")]
    found = [
        line
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if "pip install" in line
    ]
    assert found and not [
        line for line in found if re.search(r"pip install(\s+[^\s'\"]+)*\s+[^\s'\"(){}]*\[", line)
    ]


def test_readme_has_one_line_that_installs_and_tests():
    """`.ci/run` looks for it with this pattern."""
    pattern = r"^\s+(\$ )?(python -m pip install .*pytest.*)$"
    assert "(python -m pip install .*pytest.*)$" in (ROOT / ".ci" / "run").read_text(
        encoding="utf-8"
    )
    assert len(re.findall(pattern, README.read_text(encoding="utf-8"), re.M)) == 1


def test_every_command_is_tested():
    known = "launch |torchrun |python train.py|python -m (pytest|sphinx|sglang)|python benchmarks/"
    known += "|python tests/compatibility/run.py "  # by CI
    known += (
        "|fp8-backends (config|doctor|estimate|compare|advise|examples|checkpoint|convert|monitor)"
    )
    assert [line for line in commands() if not re.search(known, line)] == []
