"""Test the completion scripts: bash's in a real bash, in a terminal too; zsh's where zsh is
installed."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from pseudo_terminal import PseudoTerminal

from fp8_backends import resolve
from fp8_backends.tools.completion import backend_strings
from fp8_backends.tools.main import COMMANDS, main

COMPLETE = r"""
source completion.bash
complete -p fp8-backends
for line in "$@"; do
    read -ra COMP_WORDS <<< "$line"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMP_POINT=${#line} COMPREPLY=()
    _shtab_fp8_backends
    echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """A folder with the script for bash."""
    monkeypatch.chdir(tmp_path)
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)
    return tmp_path


@pytest.mark.nightly
def test_bash_completes_commands_options_backends_chips_and_files(folder):
    (folder / "accelerate.yaml").touch()
    expected = {
        "fp8-backends ": sorted(COMMANDS),
        "fp8-backends config --ne": ["--new"],
        "fp8-backends config accel": ["accelerate.yaml"],
        "fp8-backends launch --fp8_back": ["--fp8_backend"],
        "fp8-backends launch --fsdp_ver": ["--fsdp_version"],
        "fp8-backends launch --fp8_backend native:d": ["native:delayed", "native:dynamic"],
        "fp8-backends compare --backends msamp": ["msamp:O1", "msamp:O2", "msamp:O3", "msamp:O4"],
        "fp8-backends estimate --chip h": ["h100", "h200", "hopper"],
        "fp8-backends --print-completion z": ["zsh"],
    }
    ended = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", *expected], capture_output=True, text=True, timeout=60
    )
    registered, *completed = ended.stdout.splitlines()
    assert registered.endswith(" fp8-backends") and ended.stderr == ""
    assert {
        line: sorted(words.split()) for line, words in zip(expected, completed, strict=True)
    } == expected


@pytest.mark.nightly
def test_tab_completes_a_string_with_a_colon(folder):
    """Colons separate words in bash unless the script says otherwise."""
    screen = PseudoTerminal(["bash", "--norc", "-i"], folder, {"PS1": "> ", "TERM": "xterm"})
    screen.answer("> ", 'source completion.bash; fp8-backends() { echo ran "$@"; }')
    screen.type("fp8-backends launch --fp8_backend native:dyn\t\n")
    screen.expect("ran launch --fp8_backend native:dynamic", seconds=30)
    screen.answer("> ", "exit")
    screen.end()


@pytest.mark.nightly
def test_zsh_reads_its_script(folder, capsys):
    """Colons in words are escaped, since zsh's `_arguments` splits at others."""
    assert main(["--print-completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef fp8-backends") and r"native\:dynamic" in script
    assert "(auto te:delayed" not in script
    if zsh := shutil.which("zsh"):
        assert (
            subprocess.run(
                [zsh, "-n"], input=script, capture_output=True, text=True, timeout=60
            ).stderr
            == ""
        )


def test_every_completed_backend_is_valid():
    assert all(map(resolve, backend_strings()))


def test_without_shtab_one_line_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "fp8-backends: --print-completion needs shtab: pip install shtab"
    ]
