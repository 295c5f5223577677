"""The benchmark scripts run, and the GPU check fails where it must. No timing is asserted here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script, *arguments, code=None):
    """Run a benchmark in a process of its own; `code` is executed before it, to plant a fault."""
    path = BENCHMARKS / script
    start = [sys.executable, str(path)]
    if code:
        lines = [code, "import runpy, sys", f"sys.path.insert(0, {str(path.parent)!r})"]
        lines += [f"sys.argv = {[str(path), *arguments]!r}", f"runpy.run_path({str(path)!r}, run_name='__main__')"]
        return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    return subprocess.run([*start, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_gpu_check_passes_on_a_cpu_and_keeps_its_results(tmp_path):
    done = run("gpu/check.py", "--device", "cpu", "--backends", "native:dynamic", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "check_eager.json").read_text())
    assert record["machine"]["torch"] and record["machine"]["date"]
    assert len(record["checks"]) > 30 and all(check["passed"] for check in record["checks"])


@pytest.mark.slow
def test_the_gpu_check_fails_on_a_hidden_overflow():
    """Planted: a non-finite tensor gets an ordinary scale, so its inf saturates without a trace."""
    fault = "import fp8_backends.scaling as s; s.scale_inv_of = lambda scale, amax: scale.reciprocal()"
    done = run("gpu/check.py", "--device", "cpu", "--backends", "native:dynamic", code=fault)
    assert done.returncode == 1 and "FAIL non-finite shows native:dynamic" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "script,arguments",
    [
        ("overhead.py", ["--runs", "2", "--hidden", "64", "--layers", "1", "--sequence", "32"]),
        ("prepare.py", ["--layers", "20", "--width", "16"]),
        ("linear.py", ["--runs", "2", "--shapes", "tiny"]),
        ("step.py", ["--steps", "2", "--warmup", "1", "--sequence", "32"]),
    ],
)
def test_a_benchmark_prints_its_ratio_and_keeps_it_as_json(script, arguments, tmp_path):
    done = run(script, *arguments, "--json", str(tmp_path / "result.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["machine"]["chip"]
    if script == "overhead.py":
        assert "first losses equal to the bit: True" in done.stdout
