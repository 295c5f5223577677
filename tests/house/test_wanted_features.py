"""Import and run optional features only for recipes and models that want them. At most ten files
name one, and a plain training on one process runs few files."""

from __future__ import annotations

import subprocess
import sys

import pytest
import walks

TRAINING = """
import sys, torch, fp8_backends
from torch import nn

FEATURES = {
    "convert.fused_head": {"fused_head": True},
    "convert.small_layers": {"small_layers": "h200", "include": "+0"},
    "convert.saved_activations": {"saved_activations": "fp8"},
    "watch.schedule": {"schedule": {5: "bf16"}},
    "watch.guard": {"guard": "warn"},
    "watch.monitor": {"monitor_every": 5},
    "states.offload": {"backend": "msamp:O4", "offload": "states"},
    "convert.experts": {},
    "compute.native.tensor_parallel": None,
    "convert.conv1d": None,
}

ROOT = fp8_backends.__file__.removesuffix("__init__.py")

def loaded():
    return {name for name in FEATURES if f"fp8_backends.{name}" in sys.modules}

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 32, 32))

    def forward(self, x):
        return torch.einsum("bi,eoi->bo", x, self.weights)

def step(model, optimizer):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def train(model, **fields):
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, {"backend": "native:dynamic", **fields})
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer

calls = []

def note(frame, event, argument):
    code = frame.f_code
    counted = code.co_name[0] != "<" and code.co_name != "__annotate__"  # made by Python 3.14
    if event == "call" and ROOT in code.co_filename and counted:
        calls.append(code)

sys.setprofile(note)
trained = train(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)))
sys.setprofile(None)
run = {code.co_filename.removeprefix(ROOT) for code in calls}
assert len({*calls}) <= 237, len({*calls})
step(*trained)
calls.clear()
sys.setprofile(note)
step(*trained)
sys.setprofile(None)
assert len(calls) <= 262, len(calls)
assert len(run) <= 36 and not {name for name in run if name.startswith(("comm/", "watch/"))}, run
assert not loaded(), loaded()
for name, fields in FEATURES.items():
    if fields is None:
        continue
    before = loaded()
    train(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    assert loaded() == before
    train(nn.Sequential(nn.Linear(32, 32), nn.Identity() if fields else Experts()), **fields)
    assert loaded() - before == {name}, (name, loaded() - before)
print("done")
"""


def test_an_unused_feature_is_imported_by_its_name(tmp_path):
    code = "import fp8_backends; print(fp8_backends.watch.guard.faults.__name__)"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert process.stdout == "faults\n", process.stderr


def test_only_wanted_features_are_imported_and_run(tmp_path):
    training = subprocess.run(
        [sys.executable, "-c", TRAINING],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert training.stdout.splitlines()[-1:] == ["done"], training.stderr


@pytest.mark.parametrize("feature", walks.FEATURES)
def test_few_files_name_a_feature(feature):
    files = walks.named_in(walks.FEATURES[feature])
    assert len(files) <= 10, files
