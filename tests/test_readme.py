from __future__ import annotations

import re
import shlex
from pathlib import Path

import docutils.core
import pytest
import warm_process
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from fp8_backends.accelerate_plugin.launch import recipe_fields
from fp8_backends.accelerate_plugin.launch_flags import parse
from fp8_backends.cli.config import read
from fp8_backends.cli.main import main
from fp8_backends.recipes.handlers import FP8RecipeKwargs

README = Path(__file__).parents[1] / "README.rst"
DOCUMENTS = (README, *sorted((README.parent / "fp8_backends" / "docs").glob("*.rst")))
PROGRAMS = ("fp8-backends", "accelerate", "torchrun", "python")


def blocks(language: str) -> list[str]:
    """The contents of every `.. code-block::` of that language, without their indentation."""
    found = re.findall(rf"^\.\. code-block:: {language}\n\n((?: {{4}}.*\n|\n)+)", README.read_text(), re.M)
    return [re.sub(r"^ {4}", "", block, flags=re.M).strip() + "\n" for block in found]


def literal_blocks() -> list[str]:
    """The contents of every block after a `::`."""
    text = re.sub(r"^\.\. code-block:: .*\n\n(?: {4}.*\n|\n)+", "", README.read_text(), flags=re.M)
    found = re.findall(r"::\n\n((?: {4}.*\n|\n)+)", text)
    return [re.sub(r"^ {4}", "", block, flags=re.M).strip() + "\n" for block in found]


def commands() -> list[str]:
    """Every line of a shell, without comments, but those that install."""
    lines = "".join(literal_blocks()).replace("\\\n", " ").splitlines()
    lines = [line.partition("  #")[0].strip() for line in lines]
    of_a_shell = rf"([A-Z_0-9]+=\S+ )*({'|'.join(PROGRAMS)}) "
    return [line for line in lines if re.match(of_a_shell, line) and "pip install" not in line]


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[-1][:40])
def test_every_python_block_runs_as_it_stands(block, tmp_path):
    start = []
    if said := re.match(r"# torchrun --nproc_per_node (\d)", block):
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", said[1]]
    (tmp_path / "train.py").write_text(block)
    ended = warm_process.run(*start, "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for call, said in re.findall(r"^print\((.*)\)  # ([\w:]+)$", block, re.M):
        assert said in ended.stdout.splitlines(), f"print({call}) did not print {said}"


# Commands. Those that need GPUs are read by the parsers of the programs that they start, and the others run.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a user stands: a script that names no recipe, a module, and the files that the README shows."""
    block = blocks("python")[0]
    script = block.replace('mixed_precision="fp8", kwargs_handlers=[recipe]', "")
    assert script != block, "the first python block makes its Accelerator in another way"
    script = re.sub(r"^(recipe = |print).*\n", "", script, flags=re.M)
    (tmp_path / "train.py").write_text(script)
    for text in blocks("yaml"):
        (tmp_path / re.match(r"# (\S+\.yaml)", text)[1]).write_text(text)
    (tmp_path / "my-model").mkdir()
    config = '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}'
    (tmp_path / "my-model" / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_FP8_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def backend_that_trained(line: str, monkeypatch) -> str:
    """Run a line as it stands; the backend of the one proof line that it printed."""
    words = shlex.split(line)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    program, *arguments = words
    start = {"fp8-backends": ["-m", "fp8_backends"], "torchrun": ["-m", "torch.distributed.run"], "python": []}[program]
    ended = warm_process.run(*start, *arguments)
    assert ended.returncode == 0, ended.stderr
    (proof,) = re.findall(r"^(\S+): 2/2 Linear, 100 % of weight FLOPs", ended.stderr, re.M)
    return proof


TRAINS_HERE = {
    "fp8-backends launch --fp8_backend native:rowwise train.py": "native:rowwise",
    "ACCELERATE_MIXED_PRECISION=fp8 ACCELERATE_FP8_BACKEND=native:rowwise python train.py": "native:rowwise",
    "fp8-backends launch --fp8_backend native:rowwise train.py --lr 1e-4": "native:rowwise",
    "fp8-backends launch --cpu --num_processes 2 --fp8_backend msamp:O2 train.py": "native:window+msamp:O2",
}
UNDER_TORCHRUN = "ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 train.py"
"""Two processes on one port of torchrun's choice; the script there names its recipe."""


@pytest.mark.parametrize("line", TRAINS_HERE)
def test_every_training_command_that_needs_no_gpu_trains_with_what_it_names(line, folder, monkeypatch):
    assert line in commands()
    assert backend_that_trained(line, monkeypatch) == TRAINS_HERE[line]


def test_the_torchrun_command_trains_on_two_processes(folder, monkeypatch):
    assert UNDER_TORCHRUN in commands()
    (folder / "train.py").write_text(blocks("python")[0])
    alone = UNDER_TORCHRUN.replace("torchrun", "torchrun --standalone")  # beside other tests on this machine
    assert backend_that_trained(alone, monkeypatch) == "native:dynamic"


def test_every_other_launch_is_understood_by_the_launcher_that_it_names(folder):
    launches = [line for line in commands() if line not in (*TRAINS_HERE, UNDER_TORCHRUN)]
    launches = [line for line in launches if re.search(r"launch |torchrun ", line)]
    assert len(launches) == 7
    for line in launches:
        program, *arguments = shlex.split(line)
        if program == "torchrun":
            assert get_args_parser().parse_args(arguments).training_script == "train.py"
        elif program == "accelerate":
            assert launch_command_parser().parse_args(arguments[1:]).mixed_precision == "fp8"
        elif "--config_file" not in line:
            asked = parse(arguments[1:])
            name = re.search(r"--fp8_backend (\S+)", line)[1]
            recipe = FP8RecipeKwargs(**recipe_fields(asked, read_nothing()))
            assert recipe == FP8RecipeKwargs(backend=name, **({"margin": 1} if "--fp8_margin 1" in line else {}))


def read_nothing():
    from fp8_backends.accelerate_plugin.launch import _Configuration

    return _Configuration()


def test_the_config_commands_and_their_files_mean_what_is_said(folder, capsys):
    lines = [line for line in commands() if line.startswith("fp8-backends config ")]
    assert len(lines) == 3
    for line in lines:
        line, _, target = line.partition(" > ")
        assert main(shlex.split(line)[1:]) == 0, line
        written = capsys.readouterr().out
        if target:
            Path(target.strip()).write_text(written)
    assert read("accelerate.yaml").recipe.name == "te:delayed+msamp:O2"  # what the second line wrote
    main(["config", "axolotl.yaml", "--num_processes", "8"])
    explained = next(block for block in literal_blocks() if block.startswith("backend "))
    said = capsys.readouterr().err
    assert all(line in said for line in explained.splitlines())
    recipe = read("fsdp.yaml").recipe
    assert (recipe.name, recipe.amax_history_len, recipe.exclude) == ("native:delayed+msamp:O3", 16, ("lm_head",))
    assert yaml.safe_load(Path("fsdp.yaml").read_text())["fp8_config"]["backend"] == "native:delayed+msamp:O3"


@pytest.mark.slow
def test_the_estimates_shown_are_those_that_are_printed(folder, capsys):
    ours, shown = [line for line in commands() if line.startswith("fp8-backends estimate ")]
    assert main([*shlex.split(ours)[1:], "--backend", "bf16,msamp:O2"]) == 0
    assert {"DDP", "FSDP2"} <= set(re.findall(r"\w+", capsys.readouterr().out))
    assert main([*shlex.split(shown)[1:], "--backend", "bf16,msamp:O2"]) == 0
    printed = capsys.readouterr().out
    table = next(block for block in literal_blocks() if block.startswith("model  "))
    shown_rows, rows = (
        [
            [cell for cell in line.split() if cell != "-"]
            for line in text.splitlines()
            if re.match(r"\s*(bf16|msamp:O2) ", line)
        ]
        for text in (table, printed)  # a column of nothing but "-" is not printed
    )
    assert len(rows) == 2 and shown_rows == rows


def test_no_command_is_left_out():
    known = "launch |torchrun |python train.py|python -m pytest |fp8-backends (config|estimate|compare)"
    assert [line for line in commands() if not re.search(known, line)] == []


# The text


def test_messages_of_troubleshooting_are_those_of_the_code():
    section = re.search(r"^Troubleshooting\n-+\n.*?(?=^[^\n]+\n-{4,}$)", README.read_text(), re.M | re.S)[0]
    quoted = re.findall(r"^``(.+?)``(?:, ``(.+?)``)?$", section, re.M)
    messages = [message for pair in quoted for message in pair if message]
    code = "\n".join(path.read_text() for path in README.parent.glob("fp8_backends/**/*.py"))
    code = re.sub(r"[\"']\s*\n\s*f?[\"']", "", code)  # literals that go on in the next line
    stock = {"layers without products: lm_head": "layers without products: "}
    missing = [message for message in messages if stock.get(message, message) not in code]
    assert len(messages) > 15 and missing == []


def test_the_proof_line_shown_is_the_one_that_is_printed(tmp_path):
    if "bf16-exact" not in (line := re.search(r"^    (native:dynamic: 2/2 .*)$", README.read_text(), re.M)[1]):
        pytest.fail("the README shows no proof line")
    ended = warm_process.run("-c", blocks("python")[0], cwd=tmp_path)
    shown, printed = line.rpartition(" (")[0], ended.stderr
    assert shown in printed


def test_two_commands_do_everything_each_on_one_line():
    lines = [line.strip() for line in README.read_text().splitlines() if "pip install" in line]
    assert lines == [
        "python -m pip install -c tests/constraints.txt .[report] && fp8-backends compare",
        "python -m pip install -c tests/constraints.txt -e .[test,report] "
        "&& python -m pytest tests -n 2 --dist worksteal",
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_text_is_valid_restructured_text(document):
    docutils.core.publish_string(document.read_text(), settings_overrides={"halt_level": 2, "report_level": 2})
