"""Test `fp8-backends config --new` in a terminal, from the first question to a training, and
through pipes."""

from __future__ import annotations

import functools
import io
import re
import shlex
import sys

import pytest
import warm_process
import yaml
from documents import script_without_recipe
from pseudo_terminal import COLUMNS, PseudoTerminal

from fp8_backends.compute import chips
from fp8_backends.tools.config import read, wizard
from fp8_backends.tools.estimate.estimates import Estimate, Workload, estimate
from fp8_backends.tools.estimate.model_shapes import from_parameters, parse_count
from fp8_backends.tools.main import main

WIZARD = (sys.executable, "-m", "fp8_backends", "config", "--new")
SMALL = "5M"
CHIPS = list(chips.SOLD)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the README's script, without its recipe."""
    (tmp_path / "train.py").write_text(script_without_recipe())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def piped(folder, monkeypatch, capsys):
    """Answer the questions through a pipe; return exit code, output and errors."""

    def answer(*answers: str, file: tuple[str, ...] = ("new.yaml",)) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{each}\n" for each in answers)))
        capsys.readouterr()
        return main(["config", "--new", *file]), *capsys.readouterr()

    return answer


@pytest.mark.nightly
def test_a_terminal_leads_from_the_first_question_to_a_training(folder):
    """Answer wrongly once, and take a level for short memory; Enter everywhere else."""
    screen = PseudoTerminal(WIZARD, folder)
    screen.answer("file [fp8.yaml]: ")
    screen.answer("chip [here]: ", "h1000")
    screen.expect("did you mean 'h100'?")
    screen.answer("chip [here]: ")
    screen.answer("model [100M]: ", SMALL)
    screen.answer("sequence [2048]: ", "64")
    screen.answer("machines [1]: ", "none")
    screen.expect("'none' must be a whole number of at least 1.")
    screen.answer("machines [1]: ")
    screen.answer("ranks [1]: ")
    screen.answer("memory is short [no]: ", "yes")
    screen.answer("torch.compile [no]: ")
    screen.answer("backend [msamp:O2]: ")
    assert screen.end() == 0, screen.text
    assert max(map(len, screen.text.splitlines())) <= COLUMNS
    assert (
        not main(["config", "fp8.yaml", "--check"]) and read("fp8.yaml").recipe.name == "msamp:O2"
    )
    (command,) = re.findall(r"^    (fp8-backends launch .*)$", screen.text, re.M)
    ended = warm_process.run("-m", "fp8_backends", *shlex.split(command)[1:])
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^msamp:O2: 2/2 Linear, 100 % of weight FLOPs", ended.stderr, re.M)


@pytest.mark.nightly
def test_ctrl_c_and_ctrl_d_end_without_a_file(folder):
    ends = (
        ("\x03", 130, "interrupted"),
        ("\x04", 2, "the input ended before the answer for chip"),
    )
    for keys, code, line in ends:
        screen = PseudoTerminal(WIZARD, folder)
        screen.answer("file [fp8.yaml]: ")
        screen.expect("chip [here]: ")
        screen.press(keys, f"\nfp8-backends config: {line}")
        assert screen.end() == code and "Traceback" not in screen.text, screen.text
    assert [path.name for path in folder.iterdir()] == ["train.py"]


@pytest.mark.nightly
def test_pipes_answer_and_the_input_may_not_end_early(piped, folder):
    code, _, error = piped("h100", SMALL)
    assert code == 2 and "the input ended before the answer for sequence" in error
    assert not (folder / "new.yaml").exists()
    code, printed, _ = piped("h100", SMALL, "64", "2", "7", "16", "ddp", "yes", "node0", "yes", "")
    assert code == 0 and "'7' is not a multiple of 2 machines" in printed
    assert "on h100:" in printed and "--config_file new.yaml --machine_rank 1 train.py" in printed
    written = yaml.safe_load((folder / "new.yaml").read_text())
    assert written["distributed_type"] == "MULTI_GPU" and written["num_processes"] == 16
    assert (written["num_machines"], written["main_process_ip"]) == (2, "node0")
    assert read("new.yaml").recipe.name == "msamp:O4" and read("new.yaml").compiled == "regional"


def test_no_file_is_overwritten_without_a_yes(piped, folder):
    (folder / "new.yaml").write_text("mine")
    code, printed, error = piped("no", "nowhere/else.yaml", "fp8.yaml")
    assert (
        code == 2
        and "nowhere/else.yaml is a folder, or in none" in printed
        and "answer for chip" in error
    )
    assert (folder / "new.yaml").read_text() == "mine" and not (folder / "fp8.yaml").exists()


def test_other_options_beside_new_are_refused(capsys):
    assert main(["config", "--new", "--backend", "te"]) == 2
    assert "--new asks for everything: leave out backend" in capsys.readouterr().err
    assert main(["config"]) == 2 and "give --new" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_backend_unfit_for_the_chip_is_asked_again(piped):
    code, printed, _ = piped(
        "a100", SMALL, "64", "", "", "no", "", "te", "native:dynamc", "native:rowwise"
    )
    assert (
        code == 0
        and "TransformerEngine multiplies FP8 matrices from compute capability 8.9 on" in printed
    )
    assert "did you mean" in printed and read("new.yaml").recipe.name == "native:rowwise"


@functools.cache
def estimated(
    shape: str, ranks: int, backends: tuple[str, ...], shardings: tuple[str, ...]
) -> list[Estimate]:
    """Estimate once for all chips, since bytes do not depend on them."""
    return estimate(
        Workload(model=from_parameters(parse_count(SMALL)), devices=ranks), backends, shardings
    )


@pytest.mark.nightly
@pytest.mark.parametrize("chip", [*CHIPS, "cpu"])
def test_every_chip_gives_a_file_without_errors(chip, piped, folder, subtests, monkeypatch):
    """Try short and ample memory on one rank and under each engine; Enter takes the proposed
    backend."""

    def remembered(
        workload: Workload, backends: list[str], shardings: list[str], _: object
    ) -> list[Estimate]:
        return estimated(workload.model.title, workload.devices, tuple(backends), tuple(shardings))

    monkeypatch.setattr(wizard, "estimate", remembered)
    engines = {"1": [""]} if chip == "cpu" else {"1": [""], "8": ["ddp", "fsdp2", "deepspeed"]}
    for ranks, names in engines.items():
        for engine in names:
            for is_short in ("no", "yes"):
                with subtests.test(engine=engine, is_short=is_short):
                    answers = [
                        chip,
                        SMALL,
                        "8192",
                        "1",
                        ranks,
                        *([engine] if engine else []),
                        is_short,
                        "",
                        "",
                    ]
                    assert piped(*answers)[0] == 0
                    assert main(["config", "new.yaml", "--check", "--chip", chip]) == 0
                    config = read("new.yaml")
                    assert config.parallel == (engine or "none") and config.processes == int(ranks)
                    assert (config.recipe.level != "O0") == (is_short == "yes")
                    (folder / "new.yaml").unlink()
