"""Check the effects of `import fp8_backends`, and their absence."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools.config.setupcfg import read_configuration

import fp8_backends

HEAVY = ("torchao", "transformers", "transformer_engine", "rich")

OBSERVED_IMPORT = """
import json, sys, time
start = time.perf_counter()
import accelerate
of_accelerate, before, init = time.perf_counter() - start, set(sys.modules), accelerate.Accelerator.__init__
start = time.perf_counter()
import fp8_backends
of_fp8_backends = time.perf_counter() - start
print(json.dumps({
    "added": sorted(set(sys.modules) - before),
    "ratio": of_fp8_backends / of_accelerate,
    "patched": accelerate.Accelerator.__init__ is not init,
}))
"""


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=240,
    )


@pytest.fixture(scope="module")
def import_run():
    return run(OBSERVED_IMPORT)


def test_import_prints_nothing_and_loads_nothing_heavy(import_run):
    """Besides its own modules the package loads only the modules of `import accelerate`."""
    (line,) = import_run.stdout.splitlines()
    assert import_run.stderr == ""
    added = {name.split(".")[0] for name in json.loads(line)["added"]}
    assert added - set(sys.stdlib_module_names) == {"fp8_backends"}
    assert not added & set(HEAVY)


def test_import_is_at_most_a_third_slower_than_accelerate(import_run):
    ratios = [json.loads(import_run.stdout)["ratio"]]
    if ratios[0] > 0.3:  # a busy machine: once more
        ratios.append(json.loads(run(OBSERVED_IMPORT).stdout)["ratio"])
    assert min(ratios) < 0.3


def test_import_connects_unless_disabled_by_environment(import_run):
    assert json.loads(import_run.stdout)["patched"]
    assert not json.loads(run(OBSERVED_IMPORT, FP8_BACKENDS_DISABLE="1").stdout)["patched"]


@pytest.mark.nightly
def test_resolving_and_planning_load_nothing_heavy():
    names = ["native:delayed", "ao", "ao:rowwise", "te", "msamp", "te+msamp:O1"]
    use = f"import fp8_backends as f; [f.resolve(n) for n in {names}]; f.available_backends(); f.plan('native')"
    assert not set(HEAVY) & set(run(f"{use}\nimport sys; print(*sys.modules)").stdout.split())


def test_public_names_exist_and_are_not_modules():
    """Importing a module named like a public function would overwrite it."""
    for name in fp8_backends.__all__:
        assert not isinstance(getattr(fp8_backends, name), type(sys))
    modules = {module.name for module in pkgutil.iter_modules(fp8_backends.__path__)}
    assert not modules & set(fp8_backends.__all__)


def test_public_names_are_the_contract():
    functions = {
        "connect",
        "prepare",
        "initialize",
        "resolve",
        "available_backends",
        "plan",
        "audit",
        "validate",
    }
    functions |= {"restore", "advise", "register_backend", "policy_gap"}
    recipes = {
        "TERecipeKwargs",
        "AORecipeKwargs",
        "MSAMPRecipeKwargs",
        "NativeRecipeKwargs",
        "FP8RecipeKwargs",
    }
    errors = {"FP8BackendError", "RecipeError", "BackendUnavailableError"}
    assert set(fp8_backends.__all__) == functions | recipes | errors
    moved = {
        "Export",
        "dequantize",
        "export",
        "freeze_codes",
        "load_codes",
        "newest_checkpoint",
        "plain_weights",
    }
    moved |= {"RolloutWeights", "rollout_weights", "whole_states"}
    assert set(fp8_backends.checkpoints.__all__) == moved and not moved & set(vars(fp8_backends))


NAMES_OF_THE_GUIDES = """
import fp8_backends
fp8_backends.compute.Compute
from fp8_backends.accelerate_plugin import worker
from fp8_backends.compute import Compute
from fp8_backends.compute.native import NativeCompute
from fp8_backends.tools.estimate import ModelShape, estimate
assert issubclass(NativeCompute, Compute)
print("all there")
"""


@pytest.mark.nightly
def test_documented_names_are_available_after_import():
    assert run(NAMES_OF_THE_GUIDES).stdout == "all there\n"


def test_setup_reads_version_without_import():
    configuration = read_configuration(Path(__file__).parents[2] / "setup.cfg")
    assert configuration["metadata"]["version"] == fp8_backends.__version__
    source = ast.parse(Path(fp8_backends.__file__).read_text(encoding="utf-8"))
    assert f"__version__ = {fp8_backends.__version__!r}" in [
        ast.unparse(statement) for statement in source.body
    ]
