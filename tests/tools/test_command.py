from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import fp8_backends
from fp8_backends.errors import BackendUnavailableError
from fp8_backends.states.levels import scale_bytes_per_element
from fp8_backends.tools import chart
from fp8_backends.tools.compare.command import backend_names, check_ranks
from fp8_backends.tools.compare.comparison import worker_environment
from fp8_backends.tools.main import COMMANDS, main


def run_python(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=worker_environment(), timeout=240
    )


def test_without_arguments_the_help_names_every_subcommand(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["config", "--new"]])
def test_help_survives_an_ascii_terminal(command, monkeypatch):
    monkeypatch.setattr("sys.stdout", stdout := io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    stdout.flush()
    assert ended.value.code == 0 and b"usage" in stdout.buffer.getvalue()


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and fp8_backends.__version__ in capsys.readouterr().out


@pytest.mark.nightly
def test_python_dash_m_refuses_an_unknown_command():
    ended = run_python("-m", "fp8_backends", "nonsense")
    assert ended.returncode == 2 and "nonsense" in ended.stderr and "compare" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.nightly
def test_messages_of_torchao_at_its_import_are_hidden():
    """Use a new interpreter, since a library prints them once. The only line is the command's
    own. Help imports no command: completion imports all of them, and only then."""
    ask = """if True:
        import contextlib, io, sys
        from fp8_backends.tools.main import main
        with contextlib.redirect_stdout(io.StringIO()):
            main([])
        prefixes = ("shtab", "fp8_backends.tools.")
        loaded = [name for name in sys.modules if name.startswith(prefixes)]
        assert {name.split(".")[2] for name in loaded} == {"completion", "main"}, loaded
        main(["estimate", "--params", "5M", "--backend", "natve"])
        print("torchao" in sys.modules)
        """
    ended = run_python("-c", ask)
    assert ended.stdout == "True\n" and ended.stderr.startswith("fp8-backends estimate: ")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--backends", "natve"], "did you mean 'native'"),
        (["--backends", "native,ao:delayed"], "delayed"),
        (["--backends", "te"], "TransformerEngine is not installed"),
        (["--text", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (
            ["--nproc", "3", "--batch", "8"],
            "--nproc 3: a batch of 8 sequences cannot be shared evenly among 3 ranks",
        ),
    ],
)
def test_an_impossible_comparison_exits_with_2_and_one_message(capsys, tmp_path, options, expected):
    assert main(["compare", *options, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert (
        expected in error
        and "Traceback" not in error
        and error.startswith("fp8-backends compare: ")
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_the_first_line_precedes_loading_libraries():
    ask = """if True:
        import sys
        from fp8_backends.tools import main
        from fp8_backends.tools.compare import command
        def resolve(*_):
            print([name for name in ("torchao", "transformers", "torch._dynamo", "rich") if name in sys.modules])
            sys.exit()
        command.backend_names = resolve
        main.main(["compare", "--seeds", "1", "--reference", "fp32", "--minutes", "2"])
        """
    ended = run_python("-c", ask)
    *lines, loaded = ended.stdout.splitlines()
    first = " ".join(lines)
    assert first.startswith("fp8-backends compare: native:dynamic, ") and "against fp32" in first
    assert "1 seed of " in first and "2 min" in first and loaded == "[]"


def test_an_early_interruption_ends_compare_without_a_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "fp8_backends.tools.compare.command.backend_names",
        lambda *_: signal.raise_signal(signal.SIGINT),
    )
    assert main(["compare", "--output", str(tmp_path / "out")]) == 128 + signal.SIGINT
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_a_command_with_one_line(monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8_backends.tools.estimate.command.estimate", interrupt)
    assert main(["estimate", "--params", "8B", "--chip", "h100"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err.splitlines()[-1] == "fp8-backends estimate: interrupted"


def test_advise_begins_again_with_sleeping_threads(monkeypatch, capsys):
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # restored after the test
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr("fp8_backends.compute.hardware.device", lambda: "cpu")
    monkeypatch.setattr("sys.argv", ["fp8-backends", "advise", "--recipe", "a.txt"])
    started = []
    monkeypatch.setattr("os.execv", lambda *command: started.append(command))
    assert main() == main() == 2 and "a.txt" in capsys.readouterr().err
    assert started == [(sys.executable, [sys.executable, *sys.orig_argv[1:]])]
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_an_unknown_flag_shows_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["examples", "--mdl"])
    error = capsys.readouterr().err
    assert (
        error.startswith("usage: fp8-backends examples [-h]")
        and "unrecognized arguments: --mdl" in error
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--versoin"], "did you mean '--version'?"),
        (
            ["docter"],
            "unknown command 'docter' (did you mean 'doctor'?); known are examples, launch",
        ),
        (["doctor", "--josn"], "did you mean '--json'?"),
        (["--versoin", "doctor"], "did you mean '--version'?"),
    ],
)
def test_a_misspelt_word_exits_with_2_and_the_nearest_one(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    out, error = capsys.readouterr()
    assert out == "" and said in error


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(BackendUnavailableError, match="--nproc 2: this machine has 1 GPUs"):
        check_ranks(2, 8, "cuda")
    check_ranks(2, 8, "cpu")


@pytest.mark.parametrize(
    "words",
    [
        "compare --steps 0",
        "compare --lr -1",
        "compare --seeds two",
        "estimate --devices 0",
        "estimate --batch many",
        "advise --batches 0",
        "config a.yaml --num_processes 0",
        "monitor --worst 0",
    ],
)
def test_numbers_out_of_range_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and words.split()[-2] in capsys.readouterr().err


def test_backends_are_resolved_once_and_exclude_the_reference():
    words = ["bf16", "Native", "native:DYNAMIC", "torchao", "fp32"]
    assert backend_names(words, "bf16") == ("native:dynamic", "ao:tensorwise", "fp32")
    assert backend_names(words, "fp32") == ("bf16", "native:dynamic", "ao:tensorwise")


def test_chart_agrees_with_the_plan(capsys):
    levels = {level.name: level for level in chart.measure()}
    amp = levels.pop("FP16 AMP")
    assert (amp.gemm, amp.weight, amp.gradient, amp.optimizer) == (
        "FP16",
        "FP32",
        "FP32",
        "FP32+FP32",
    )
    # autocast's FP16 copy
    assert amp.bytes_per_element == 16 and amp.transient_bytes_per_element == 2
    measured = {name: level for name, level in levels.items() if not level.not_measured}
    assert len(measured) >= 5
    for name, level in measured.items():
        plan = fp8_backends.plan(name.split()[0])
        assert (level.gemm, level.weight, level.gradient) == (
            plan.gemm,
            plan.weight,
            plan.weight_gradient,
        )
        scales = 0.01 if level.name.count("msamp") else 0  # 4 bytes a tensor
        scales += scale_bytes_per_element(fp8_backends.resolve(name.split()[0]))
        assert plan.bytes_per_element <= level.bytes_per_element <= plan.bytes_per_element + scales
        assert level.optimizer == "+".join(plan.optimizer_states)
    assert measured["native:dynamic (O0)"].transient_bytes_per_element == 1  # the E4M3 copy
    levels = [measured[f"msamp:{level}"] for level in ("O1", "O2", "O3", "O4")]
    # O3's weight is this copy
    assert [level.transient_bytes_per_element for level in levels] == [1, 1, 0, 0]
    assert [level.accumulation_bytes_per_element for level in levels] == [3] * 4
    assert [level.master for level in levels] == ["–", "–", "FP16", "INT8"]
    assert main(["chart", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "FP16 AMP"


def test_chart_shows_an_unplanned_dtype():
    def half_model():
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64, bias=False)
        )
        model.bfloat16()
        return model, torch.optim.AdamW(model.parameters())

    level = chart.measure(["native:dynamic"], half_model)[1]
    assert (level.weight, level.optimizer, level.bytes_per_element) == ("BF16", "BF16+BF16", 8)
