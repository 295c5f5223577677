"""Delete optional features: the package trains without them, and refuses recipes that set their
fields. At most six files in two rooms name one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import walks
from test_arrows import ROOT, arrows

import fp8_backends
from fp8_backends.convert import features
from fp8_backends.convert.features import FEATURES

WITHOUT_FIELD = {
    "experts": ["compute/experts", "convert/experts.py"],
    "tensor parallelism": ["compute/native/tensor_parallel.py"],
}
"""Files of features without a recipe field."""

TRAINING = """
import sys, torch, accelerate, fp8_backends
from torch import nn
from fp8_backends.convert.features import FEATURES

missing = dict(entry.split("=") for entry in sys.argv[1:])
assert {name for name in FEATURES if not FEATURES[name]} == missing.keys()

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))

def accelerator_of(**fields):
    recipe = fp8_backends.FP8RecipeKwargs(**fields)
    return accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=True)

model_, accelerator = model(), accelerator_of(backend="native:delayed")
model_, optimizer = accelerator.prepare(model_, torch.optim.AdamW(model_.parameters()))
before = model_[0].weight.detach().clone()
for _ in range(2):
    accelerator.backward(model_(torch.randn(16, 32)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
assert not torch.equal(before, model_[0].weight)
report = fp8_backends.audit(model_)
assert {counts["fprop"] for counts in report.products.values()} == {2} and not report.saved_activations

other = model()
for name, value in missing.items():
    recipe = {"backend": "native:delayed", name: value}
    for refused in (
        lambda: fp8_backends.prepare(other, torch.optim.AdamW(other.parameters()), recipe),
        lambda: fp8_backends.prepare(model_, optimizer, recipe),
        lambda: accelerator_of(**recipe),
    ):
        try:
            refused()
        except fp8_backends.RecipeError as error:
            assert str(error).startswith(f"{name}="), error
        else:
            raise AssertionError(f"{name}={value} is ignored")
assert type(other[0]) is nn.Linear and not other[0]._forward_hooks
print("trained, and refused", *missing)
"""

MONITOR = """
import sys
# an editable install finds the deleted files in its own folder
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
from fp8_backends.tools.main import main
sys.exit(main(["monitor"]))
"""


@pytest.mark.parametrize(
    "deleted, fields",
    [
        (
            ["watch", *WITHOUT_FIELD["tensor parallelism"]],
            {"guard": "skip", "monitor_every": "2", "schedule": "{3: 'bf16'}"},
        ),
        (
            [
                "convert/saved_activations.py",
                "convert/fused_head",
                "watch/guard.py",
                *WITHOUT_FIELD["experts"],
            ],
            {"fused_head": True, "saved_activations": "fp8", "guard": "skip"},
        ),
    ],
    ids=["guard, monitor and tensor parallelism", "saved activations, guard, head and experts"],
)
def test_package_trains_without_features_and_refuses_their_fields(tmp_path, deleted, fields):
    package = tmp_path / "fp8_backends"
    paths = {str(Path(fp8_backends.__file__).parent / path) for path in deleted}
    assert all(map(os.path.exists, paths))

    def left_out(folder, names):
        return {name for name in names if os.path.join(folder, name) in paths}

    shutil.copytree(Path(fp8_backends.__file__).parent, package, ignore=left_out)
    (tmp_path / "training.py").write_text(TRAINING)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )

    training = run("training.py", *(f"{name}={value}" for name, value in fields.items()))
    assert training.returncode == 0, training.stderr
    assert training.stdout.splitlines()[-1] == " ".join(["trained, and refused", *fields])
    if "watch" in deleted:
        monitor = run("-c", MONITOR)
        line = "fp8-backends monitor: this copy of fp8_backends is without fp8_backends.watch"
        assert (monitor.returncode, monitor.stdout, monitor.stderr.strip()) == (2, "", line)


def test_feature_events_are_run_and_documented():
    """A misspelt event would be ignored."""
    sources = [
        path.read_text(encoding="utf-8")
        for path in Path(fp8_backends.__file__).parent.rglob("*.py")
    ]
    events = {
        event for source in sources for event in re.findall(r'features\.run\(\s*"(\w+)"', source)
    }
    assert events == {event for functions in FEATURES.values() for event in functions}
    assert events == set(re.findall(r"^    (\w+)\(", features.__doc__, re.M))


@pytest.mark.parametrize("feature", WITHOUT_FIELD)
def test_no_other_file_imports_a_feature(feature):
    own = tuple(path.removesuffix(".py").replace("/", ".") for path in WITHOUT_FIELD[feature])
    others = [(name, targets) for name, targets in arrows(ROOT).items() if not name.startswith(own)]
    assert not [
        name for name, targets in others if any(target.startswith(own) for target in targets)
    ]


@pytest.mark.parametrize("feature", walks.FEATURES)
def test_few_files_name_a_feature(feature):
    files = walks.named_in(walks.FEATURES[feature])
    assert len(files) <= 6, files
