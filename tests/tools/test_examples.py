"""Test the examples: their imports, the command to list and copy them, and their training."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import warm_process

import fp8_backends
from fp8_backends.tools.examples import examples
from fp8_backends.tools.main import main

ROOT = Path(__file__).parents[2]
EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_script_is_short_with_a_start_command_and_public_names(name):
    """Further imports of the package are in a guide."""
    source = EXAMPLES[name].script.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 60
    words = shlex.split(EXAMPLES[name].start)
    assert f"{name}.py" in words and words[-2] == "--backend"
    assert len(EXAMPLES[name].shows.splitlines()) == 1 and EXAMPLES[name].shows.endswith(".")
    tree = ast.parse(source)
    guides = [(ROOT / "fp8_backends" / "docs" / f"{name}.rst").read_text() for name in ("contributing", "trainers")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fp8_backends":
            assert node.attr in (*fp8_backends.__all__, "checkpoints")
        elif isinstance(node, ast.Import):
            assert not any(each.name.startswith("fp8_backends.") for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("fp8_backends"):
            assert any(ast.unparse(node) in guide for guide in guides)
    assert ast.unparse(tree.body[-1].test) == "__name__ == '__main__'"


def test_the_list_has_each_example_and_its_command(capsys):
    assert main(["examples"]) == 0
    printed = capsys.readouterr().out
    assert len(EXAMPLES) == 7 and all(each.start in printed for each in EXAMPLES.values())
    assert max(map(len, printed.splitlines())) <= 100


def test_an_example_is_copied_and_nothing_is_overwritten(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "trainer.py"]) == 0
    assert "    python trainer.py --backend native:dynamic\n" in capsys.readouterr().out
    assert (tmp_path / "trainer.py").read_bytes() == EXAMPLES["trainer"].script.read_bytes()
    (tmp_path / "trainer.py").write_text("mine")
    assert main(["examples", "trainer"]) == 2
    assert "trainer.py exists already" in capsys.readouterr().err and (tmp_path / "trainer.py").read_text() == "mine"
    (tmp_path / "folder").mkdir()
    assert main(["examples", "trainer", "folder"]) == main(["examples", "trainer", "my trainer.py"]) == 0
    printed = capsys.readouterr().out
    assert "python folder/trainer.py" in printed and "python 'my trainer.py' --backend" in printed
    assert main(["examples", "trainer", "nowhere/trainer.py"]) == 2
    assert "nowhere/trainer.py cannot be written: No such file" in capsys.readouterr().err
    assert main(["examples", "trainer", "lora"]) == 2
    assert "lora is no folder" in capsys.readouterr().err and not (tmp_path / "lora").exists()


def test_an_unknown_name_exits_with_2_and_the_nearest_one(capsys):
    assert main(["examples", "trainr"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'trainer'?" in error and all(name in error for name in EXAMPLES)


COPY_ALL = """
import sys
import fp8_backends
from fp8_backends.tools.main import main
print(fp8_backends.__file__)
sys.exit(any(main(["examples", name]) for name in sys.argv[1:]))
"""


@pytest.mark.nightly
def test_every_example_is_copied_out_of_the_wheel_and_trains(subtests, tmp_path):
    """Run in an empty folder with the package from an unpacked wheel."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked_wheel(tmp_path)), "HF_HUB_OFFLINE": "1"}
    (folder := tmp_path / "empty").mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        ended = warm_process.run(*arguments, cwd=folder, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended

    run("-m", "fp8_backends", "examples", "lora")
    (folder / "lora.py").unlink()
    place, *commands = re.findall(r"^(/.*|    .*)$", run("-c", COPY_ALL, *EXAMPLES).stdout, re.M)
    assert place.startswith(environment["PYTHONPATH"]) and len(commands) == len(EXAMPLES)
    for command in commands:
        with subtests.test(command.strip()):
            program, *arguments = shlex.split(command)
            assert program == "python" or arguments[:2] == ["--nproc_per_node", "2"]
            start = [] if program == "python" else ["-m", "torch.distributed.run", "--standalone"]
            ended = run(*start, *arguments)
            losses = [float(loss) for loss in re.findall(r"\bloss'?:? '?([\d.]+\d)", ended.stdout)]
            assert len(losses) > 2 and losses[-1] < 0.8 * losses[0], ended.stdout
            backend = re.escape(arguments[-1])
            assert len(re.findall(rf"^{backend}: \d+/\d+ Linear, .* in FP8", ended.stderr, re.M)) == 1, ended.stderr


def unpacked_wheel(folder: Path) -> Path:
    """The package as a wheel holds it, built from a copy of the sources."""
    (source := folder / "source").mkdir()
    for name in ("setup.cfg", "setup.py", "LICENSE", "README.rst"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "fp8_backends", source / "fp8_backends", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    built = subprocess.run([*pip, "-w", str(folder), str(source)], capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"
