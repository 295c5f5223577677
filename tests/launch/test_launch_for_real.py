"""Start real processes by launchers: one run per kind, and scripts that inspect their
surroundings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_process
from intercepted import free_port

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
SCRIPT = str(HERE / "trained.py")
OURS = ("-m", "fp8_backends", "launch")
STOCK = ("-m", "accelerate.commands.launch")
ONE = ("--num_processes", "1", "--main_process_port", "0")
TWO = ("--num_processes", "2", "--main_process_port", "0")


def run(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FP8_"))
    }
    clean |= {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": "/nowhere",
    }
    return warm_process.run(*arguments, env=clean | environment, cwd=cwd)


def written(output: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(output.parent.glob(f"{output.name}.*"))]


# One real run for each launcher (the cold interpreter's is for one process)


@pytest.mark.parametrize(
    ("launcher", "ranks", "environment"),
    [
        ((*OURS, "--cpu", *TWO), 2, {}),
        ((*OURS, "--use_deepspeed", *ONE), 1, {}),
        ((*STOCK, "--multi_gpu", *TWO), 2, {"ACCELERATE_USE_CPU": "true"}),
    ],
    ids=lambda value: " ".join(value[1:5]) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_each_launcher_starts_processes_that_train_in_fp8(launcher, ranks, environment, tmp_path):
    output = tmp_path / "output"
    flags = ("--mixed_precision", "fp8", "--num_machines", "1", "--dynamo_backend", "no")
    imports = ("--import",) if launcher[:2] == STOCK else ()
    done = run(
        *launcher, *flags, "--fp8_backend", "ao", SCRIPT, str(output), *imports, **environment
    )
    assert done.returncode == 0, done.stderr
    found = written(output)
    assert [(rank["rank"], rank["ranks"]) for rank in found] == [(i, ranks) for i in range(ranks)]
    for rank in found:
        assert rank["recipe"]["name"] == "ao:tensorwise" and rank["losses"][0] > rank["losses"][-1]
        assert all(counts["fprop"] and counts["wgrad"] for counts in rank["products"].values())


@pytest.mark.nightly
def test_torchrun_starts_the_worker_directly(tmp_path):
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        free_port(),
    )
    said = {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_FP8_BACKEND": "msamp:O3",
    }
    done = run(
        *torchrun,
        "-m",
        "fp8_backends.accelerate_plugin.worker",
        SCRIPT,
        str(tmp_path / "output"),
        **said,
    )
    assert done.returncode == 0, done.stderr
    assert [rank["recipe"]["name"] for rank in written(tmp_path / "output")] == ["msamp:O3"] * 2


@pytest.mark.nightly
def test_a_cold_interpreter_needs_none_of_accelerates_libraries(tmp_path):
    """Run the real command in a real Python without FP8 libraries for Accelerate."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torchao'] = None\n")
    gate = "import torch  # noqa: E402"
    text = (
        Path(SCRIPT)
        .read_text()
        .replace(gate, f"{gate}\nfrom accelerate.utils import is_fp8_available")
    )
    (tmp_path / "train.py").write_text(
        text.replace("STEPS = 3", "assert not is_fp8_available()\nSTEPS = 3")
    )
    paths = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    command = [
        sys.executable,
        *OURS,
        "--cpu",
        "--fp8_backend",
        "native:rowwise",
        "train.py",
        "output",
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths, "HF_HOME": "/nowhere"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert written(tmp_path / "output")[0]["recipe"]["name"] == "native:rowwise"


# Scripts as they are

CURIOUS = """
import atexit, os, pickle, sys
from multiprocessing import get_context
import neighbour

class Kept:
    pass

def work(x):
    return neighbour.double(x), __name__

def at_exit():
    print("at exit", type(pickle.loads(pickle.dumps(Kept()))) is Kept, flush=True)

if __name__ == "__main__":
    atexit.register(at_exit)
    with get_context("spawn").Pool(1) as pool:
        print("spawned", pool.map(work, [21]))
    print("argv", sys.argv)
    print("path", sys.path[0])
    print("file", __file__, __name__, __package__ in (None, ""), __spec__ is None, __doc__)
    def annotated(x: Kept): pass
    print("annotations", annotated.__annotations__["x"] is Kept)
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with a script and a neighbour module."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "curious.py").write_text(CURIOUS)
    (tmp_path / "scripts" / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    return tmp_path


def worker(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "fp8_backends.accelerate_plugin.worker", *arguments, cwd=cwd)


@pytest.mark.nightly
def test_script_runs_as_under_python(folder):
    """Compare all output and the exit code with a run without us."""
    script = os.path.join("scripts", "curious.py")
    plain = subprocess.run(
        [sys.executable, script, "5", "--x"], cwd=folder, capture_output=True, text=True
    )
    command = [sys.executable, "-m", "fp8_backends.accelerate_plugin.worker", script, "5", "--x"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ours = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (ours.stdout, ours.returncode) == (plain.stdout, plain.returncode)
    assert (
        "spawned [(42, '__mp_main__')]" in plain.stdout
        and "at exit True" in plain.stdout
        and plain.returncode == 5
    )


def test_module_runs_as_under_python(folder):
    (folder / "scripts" / "__init__.py").write_text("")
    (folder / "scripts" / "curious.py").write_text(
        CURIOUS.replace("import neighbour", "from . import neighbour")
    )
    (folder / "scripts" / "curious.py").write_text(
        (folder / "scripts" / "curious.py")
        .read_text()
        .replace('__package__ in (None, "")', "__package__")
    )
    plain = subprocess.run(
        [sys.executable, "-m", "scripts.curious", "0"], cwd=folder, capture_output=True, text=True
    )
    ours = worker("-m", "scripts.curious", "0", cwd=folder)
    lines = [line for line in plain.stdout.splitlines() if not line.startswith("at exit")]
    assert [line for line in ours.stdout.splitlines() if not line.startswith("at exit")] == lines, (
        ours.stderr
    )
    assert ours.returncode == 0 and "spawned [(42, '__mp_main__')]" in plain.stdout


def test_a_folder_with_a_main_file_runs(folder):
    (folder / "scripts" / "__main__.py").write_text(
        "import neighbour, sys\nprint(neighbour.double(4), sys.argv[1:])\n"
    )
    assert worker("scripts", "x", cwd=folder).stdout == "8 ['x']\n"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('gone')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(9)", 9),
    ],
)
def test_exit_codes_and_tracebacks_match_the_script(source, code, folder):
    (folder / "failing.py").write_text(f"def f():\n    {source}\n\nf()\n")
    done = worker("failing.py", cwd=folder)
    assert done.returncode == code
    if "Traceback" in done.stderr:
        before = done.stderr[: done.stderr.index("failing.py")]
        assert (
            before.count("worker.py") == 3
            and before.rpartition("worker.py")[2].count("  File ") == 1
        )
        # with torch 2.15 a list of leaks follows the error
        own = done.stderr.partition("\nnanobind:")[0]
        assert own.rstrip().splitlines()[-1].split(":")[0] == "ZeroDivisionError"


def test_launch_returns_exit_code_of_the_script(folder):
    (folder / "failing.py").write_text("import sys\nsys.exit(7)\n")
    done = run(*OURS, "--cpu", "failing.py", cwd=folder)
    assert done.returncode == 7
    assert (
        "fp8-backends launch: failing.py ended with exit code 7" in done.stderr
        and "Traceback" not in done.stderr
    )
    quiet = run(*OURS, "--cpu", "-q", "failing.py", cwd=folder)
    assert quiet.returncode == 7 and "ended with" not in quiet.stderr
    (folder / "failing.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert run(*OURS, "--cpu", "failing.py", cwd=folder).returncode == 128 + 9


def test_launch_returns_exit_code_of_first_failed_rank(folder):
    (folder / "failing.py").write_text(
        "import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)\n"
    )
    done = run(
        *OURS, "--cpu", "--num_processes", "2", "--main_process_port", "0", "failing.py", cwd=folder
    )
    assert done.returncode == 7 and "failing.py ended with exit code 7" in done.stderr


UNPROVEN = """
import sys
import torch
from accelerate import Accelerator

prepared, steps = sys.argv[1].split(","), int(sys.argv[2])
accelerator = Accelerator()
model = torch.nn.Linear(32, 16)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if "model" in prepared:
    model = accelerator.prepare(model)
if "optimizer" in prepared:
    optimizer = accelerator.prepare(optimizer)
for _ in range(steps):
    model(torch.ones(16, 32)).sum().backward()
    optimizer.step()
sys.exit(0)
"""
NO_PROOF = "unproven.py ended without a proof of FP8"
TRAINED = f"{NO_PROOF}: no optimizer that made a step was prepared with its model"


@pytest.mark.parametrize(
    ("arguments", "flags", "code", "said"),
    [
        ("model 2", "", 1, TRAINED),
        ("none 2", "--fp8_on_unproven warn", 0, TRAINED),
        ("model,optimizer 0", "", 0, f"{NO_PROOF}\n"),
        ("model,optimizer 2", "", 0, ""),
    ],
)
def test_script_without_proof_warns(arguments, flags, code, said, folder):
    (folder / "unproven.py").write_text(UNPROVEN)
    done = run(*OURS, "--cpu", *flags.split(), "unproven.py", *arguments.split(), cwd=folder)
    assert done.returncode == code, done.stderr
    assert f"fp8-backends launch: {said}" in done.stderr if said else NO_PROOF not in done.stderr
    assert "had defaults used instead" not in done.stderr


def test_missing_script_raises_pythons_error(folder):
    done = worker("nowhere.py", cwd=folder)
    assert (
        done.returncode == 2 and "can't open file" in done.stderr and "Traceback" not in done.stderr
    )
    assert worker(cwd=folder).returncode == 1


# Code over launch, in a worker


def test_code_overriding_launch_warns_once_on_one_rank(tmp_path):
    handler = json.dumps({"class": "FP8RecipeKwargs", "margin": 2})
    ranks = ("--cpu", "--num_processes", "2", "--main_process_port", "0")
    launch = (
        *OURS,
        *ranks,
        "--fp8_backend",
        "native:delayed",
        "--fp8_margin",
        "1",
        "--fp8_interval",
        "3",
    )
    done = run(*launch, SCRIPT, str(tmp_path / "output"), "--handler", handler)
    assert done.returncode == 0, done.stderr
    line = "FP8RecipeKwargs in the script says margin=2, fp8-backends launch said margin=1: the script's value is used"
    assert done.stderr.count(line) == 1
    for rank in written(tmp_path / "output"):
        recipe = rank["recipe"]
        assert (recipe["name"], recipe["margin"], recipe["interval"]) == ("native:delayed", 2, 3)
