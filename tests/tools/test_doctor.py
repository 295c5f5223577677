"""Test `fp8-backends doctor`, its self-tests and its recommended precision."""

import json
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import warm_process

import fp8_backends
from fp8_backends.compute import chips, hardware, registry
from fp8_backends.compute.hardware import Availability
from fp8_backends.compute.native.backend import NativeCompute
from fp8_backends.compute.native.layer_rule import HighPrecision
from fp8_backends.tools import doctor, self_test
from fp8_backends.tools.main import main

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def warm(monkeypatch):
    """Run self-tests in a process forked from one with torch."""
    monkeypatch.setattr("sys.executable", warm_process.python())


def test_every_backend_is_listed_with_a_fix_for_unavailable_ones(capsys):
    assert main(["doctor", "--no-test"]) == 0
    printed = capsys.readouterr().out
    assert main(["doctor", "--no-test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        set(found["backends"]) >= {"native", "ao", "te"} and found["backends"]["native"]["can_run"]
    )
    for name, backend in found["backends"].items():
        assert f"\n{name} " in printed
        assert backend["can_run"] or backend["fix"]
    versions = found["versions"]
    assert versions["fp8-backends"] == fp8_backends.__version__ and versions["python"] in printed
    assert max(map(len, printed.splitlines())) <= 100
    states = {name: row["state"] for row in found["chip"]["products"] for name in row["backends"]}
    assert found["chip"]["title"] in printed and states["native:dynamic"] in ("FP8", "emulated")
    assert {chip["key"] for chip in found["chips"]} > {"cpu", "hopper", "mi300"}
    assert found["tests"] is None and "nothing here is proven" in printed
    assert f"train in {found['advice']['precision']}" in printed


def test_every_available_backend_is_proven(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tests = {test["backend"]: test for test in found["tests"]}
    levels = [f"msamp:{level}" for level in doctor.SCALED_LEVELS]
    assert {
        *(f"native:{scaling}" for scaling in NativeCompute.scalings),
        *levels,
        "ao:tensorwise",
    } <= set(tests)
    assert "te:delayed" not in tests
    # before PyTorch's repair
    lacks_rowwise = hardware.torch_release() < (2, 13) and hardware.cpu_scaled_mm()
    for name, test in tests.items():
        if name.startswith("ao:rowwise") and lacks_rowwise:
            assert not test["proven"] and test["reason"]
            continue
        assert test["proven"] and not test["reason"], test
        assert 0 < test["gradient_error"] < self_test.GRADIENT_BOUND
        assert test["loss_error"] < self_test.LOSS_BOUND
        assert test["products"] >= 6 and test["engine"] and test["seconds"] < self_test.ENDS_WITHIN
    assert [round(tests[level]["bytes_per_element"]) for level in levels] == [11, 6, 7, 5]


def faulty(monkeypatch, **methods):
    """Register a backend `faulty`: native with a fault."""
    monkeypatch.setattr(registry, "factories", dict(registry.factories))
    monkeypatch.setattr(registry, "instances", dict(registry.instances))
    fp8_backends.register_backend(
        "faulty", type("Faulty", (NativeCompute,), {"name": "faulty", **methods})
    )


def test_wrong_products_are_not_proven(monkeypatch):
    """Planted: weights are multiplied with half of their scale."""
    from fp8_backends.compute.native import layer_rule

    original = layer_rule.Stored.quantized

    def halved(self, *args, **kwargs):
        quantized_weight = original(self, *args, **kwargs)
        return quantized_weight._replace(scale_inv=quantized_weight.scale_inv * 0.5)

    monkeypatch.setattr(layer_rule.Stored, "quantized", halved)
    found = self_test.test("native:dynamic")
    reason = f"gradient differs from {found.precision}'s by"
    assert not found.proven and reason in found.reason and "0.25" in found.reason


def test_missing_products_are_named(monkeypatch):
    def build(self, linear, recipe, shared):
        carrier = NativeCompute.build(self, linear, recipe, shared)
        carrier.set_rule(
            carrier.fp8_rule._replace(high_precision=HighPrecision(dgrad=True)), shared, 1
        )
        return carrier

    faulty(monkeypatch, build=build)
    found = self_test.test("faulty:dynamic")
    assert not found.proven and found.reason.startswith("layer 0 made no dgrad in FP8; layer 2")


def test_unplanned_bytes_are_not_proven(monkeypatch):
    monkeypatch.setattr("fp8_backends.recipes.precision_plan.LEVEL_ROWS", {
        "O0": ("FP32", "FP16", None, "FP32", ("FP32", "FP32"))
    })  # fmt: skip
    found = self_test.test("native:dynamic")
    assert not found.proven and found.reason == "16 bytes an element are stored, 14 were promised"


def test_an_unmoved_weight_is_not_proven(monkeypatch):
    monkeypatch.setattr(
        torch.optim.AdamW, "step", torch.optim.Optimizer.profile_hook_step(lambda self: None)
    )
    found = self_test.test("native:rowwise")
    assert not found.proven and "a weight did not move" in found.reason


def test_a_librarys_exception_is_the_reason(monkeypatch):
    def raising(self, module, recipe):
        raise RuntimeError("CUDA error: no kernel image\nis available")

    faulty(monkeypatch, unfit=raising)
    found = self_test.test("faulty")
    assert not found.proven and found.reason == "RuntimeError: CUDA error: no kernel image"


TESTS = """
import os, signal, sys, time
from fp8_backends.tools import self_test
def test(backend):
    if backend == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if backend == "exit": sys.exit("library is broken")
    if backend == "hang": time.sleep(60)
    return self_test.SelfTest(backend, True, "")
self_test.test = test
self_test.main(sys.argv[1:])
"""


@pytest.mark.nightly
def test_crash_exit_and_hang_end_only_their_test(monkeypatch):
    run = self_test.subprocess.Popen

    def planted(command, **options):
        return run([command[0], "-c", TESTS, *command[3:]], **options)

    monkeypatch.setattr(self_test.subprocess, "Popen", planted)
    monkeypatch.setattr(self_test, "ENDS_WITHIN", 2.0)
    start = time.monotonic()
    found = self_test.run(["first", "crash", "second", "exit", "third", "hang", "last"])
    assert [test.backend for test in found if test.proven] == ["first", "second", "third", "last"]
    reasons = {test.backend: test.reason for test in found}
    assert "SIGSEGV" in reasons["crash"] and "library is broken" in reasons["exit"]
    assert "did not end within 2 seconds" in reasons["hang"] and time.monotonic() - start < 60


@pytest.mark.parametrize("backend", ["native:mxfp8", "msamp:O3", "ao:tensorwise"])
def test_plain_step_is_fp32_on_cpu_without_bf16(backend, monkeypatch, capsys):
    monkeypatch.setattr("fp8_backends.compute.hardware.cpu_bf16", lambda: False)
    found = self_test.test(backend)
    assert found.proven and found.precision == "fp32", found.reason
    assert found.engine == ("ao" if backend.startswith("ao") else "fp32-exact")
    lines = proven_lines([found], monkeypatch, capsys)
    assert "of fp32's" in lines and "bf16" not in lines


def proven_lines(tests, monkeypatch, capsys) -> str:
    """What `doctor` prints of these results."""
    monkeypatch.setattr(self_test, "run", lambda names: tests)
    assert main(["doctor"]) == 0
    (paragraph,) = [
        each for each in capsys.readouterr().out.split("\n\n") if each.startswith("proven ")
    ]
    return " ".join(paragraph.split())


def test_an_unproven_backend_is_printed_with_its_reason(monkeypatch, capsys):
    tests = [
        self_test.SelfTest(
            "native:dynamic", True, "", precision="bf16", gradient_error=0.1, seconds=1
        ),
        self_test.SelfTest("ao:rowwise", False, "layer 0 made no wgrad in FP8"),
    ]
    lines = proven_lines(tests, monkeypatch, capsys)
    assert lines.startswith("proven native:dynamic (") and "within 10 % of bf16's" in lines
    assert lines.endswith(" unproven ao:rowwise: layer 0 made no wgrad in FP8")


@pytest.mark.parametrize("columns", [60, 100])
def test_every_chip_is_shown_and_nothing_is_cut(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["doctor", "--chips"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    words = " ".join(printed.split())
    assert all(text in words for text in (*chips.legend(), *map(str, chips.NOTES.values())))
    header, *rows = chips.rows()
    cells = Counter(cell for row in rows for cell in row[1:])
    assert all(printed.count(cell) >= count for cell, count in cells.items())
    assert all(title in printed for title in header[1:])


def test_another_chip_is_described_by_its_product_name(capsys):
    assert main(["doctor", "--chip", "H100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chip"]["key"] == "hopper" and found["advice"]["precision"] == "fp8"
    assert main(["doctor", "--chip", "l40s"]) == 0
    printed = capsys.readouterr().out
    assert "LLMQ, in C++, publishes" in printed and "8.9 (L4, L40S, RTX 40)" in printed
    assert main(["doctor", "--chip", "l40"]) == 2
    assert "did you mean 'l40s'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("", "te        can run: on cuda"),
        (
            "raise OSError('libnccl.so.2: cannot open')",
            "importing TransformerEngine fails with OSError: libnccl.so.2:",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "importing TransformerEngine ends with SIGSEGV",
        ),
        ("import os; os._exit(3)", "importing TransformerEngine fails with no message"),
        ("import time; time.sleep(60)", "importing TransformerEngine did not end within 2 seconds"),
    ],
)
def test_a_usable_transformer_engine_is_imported(code, printed, tmp_path, monkeypatch, capsys):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    (tmp_path / "transformer_engine" / "pytorch.py").write_text(code)
    (tmp_path / "torch.py").touch()  # the new process does not need the real one
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", PYTHON)
    monkeypatch.setattr(doctor, "TE_TIME_LIMIT", 2.0)
    monkeypatch.setattr(
        registry, "available_backends", lambda: {"te": Availability(True, "on cuda")}
    )
    assert main(["doctor", "--no-test"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert " ".join(printed.split()) in output and ("installation.html" in output) == bool(code)
    assert "transformer_engine" not in sys.modules


# Devices, and the recommended precision


def gpus(monkeypatch, *chips):
    """Let this machine have these GPUs: (name, capability)."""

    def index(device):
        return getattr(device, "index", device) or 0

    def properties(i=0):
        name, (major, minor) = chips[index(i)]
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 * 2**30)

    functions = {
        "is_available": lambda: True,
        "device_count": lambda: len(chips),
        "get_device_name": lambda i=0: chips[i][0],
        "get_device_capability": lambda i=0: chips[index(i)][1],
        "get_device_properties": properties,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.version, "hip", None)


def nvidia_smi(monkeypatch, folder, script) -> None:
    """Put a program of that name first on the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_different_gpus_are_listed_and_weakest_decides(monkeypatch, tmp_path, capsys):
    gpus(monkeypatch, ("H100", (9, 0)), ("H100", (9, 0)), ("A100", (8, 0)))
    nvidia_smi(monkeypatch, tmp_path, "echo 580.65")
    monkeypatch.setattr(registry, "available_backends", dict)
    assert main(["doctor", "--no-test"]) == 0
    printed = capsys.readouterr().out
    assert "device    2 x H100 (80 GiB), capability 9.0: FP8 products in hardware" in printed
    assert "          1 x A100 (80 GiB), capability 8.0: no FP8 products" in printed
    assert (
        "the least of them decides" in printed
        and "train in bf16" in printed
        and "driver    580.65" in printed
    )
    gpus(monkeypatch, ("H100", (9, 0)))  # as CUDA_VISIBLE_DEVICES=0 shows
    nvidia_smi(monkeypatch, tmp_path, "echo no devices; exit 9")
    assert main(["doctor", "--no-test"]) == 0
    printed = capsys.readouterr().out
    assert (
        "\ndriver" not in printed
        and "train in FP8 (native:dynamic)" in printed
        and "auto      means native here: recommended for H100, H200" in printed
    )


def test_rules_refused_by_the_chip_are_not_tested(monkeypatch):
    gpus(monkeypatch, ("H100", (9, 0)))
    monkeypatch.setattr(
        registry,
        "available_backends",
        lambda: {"te": Availability(True), "ao": Availability(False)},
    )
    # TE can be imported
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=""))
    names = []
    monkeypatch.setattr(self_test, "run", lambda given: names.extend(given) or [])
    doctor.diagnosis()
    assert (
        names[:2] == ["te:delayed", "te:dynamic"]
        and "te:mxfp8" not in names
        and "ao:tensorwise" not in names
    )
    assert names[-4:] == [f"te+msamp:{level}" for level in ("O1", "O2", "O3", "O4")]
