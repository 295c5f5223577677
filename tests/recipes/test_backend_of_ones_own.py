"""Pass a one-file backend with its own field and scaling rule through every input: string, handler,
dictionary, flag, YAML file and environment; and through the documentation's table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import warm_process
from widths import nightly_but

SETUP = """
[metadata]
name = my-fp8
version = 1.0
[options]
py_modules = my_fp8
[options.entry_points]
fp8_backends.backends =
    mine = my_fp8:MyCompute
"""

BACKEND = """
import torch
from torch import nn

from fp8_backends.compute.hardware import Availability
from fp8_backends.compute import Compute, ProductCounts
from fp8_backends.compute.fields import Field, whole_number


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer = layer
        scale = 2.0**layer.my_headroom
        x, weight = ((t / scale).to(torch.float8_e4m3fn).to(t.dtype) * scale for t in (x, weight))
        ctx.save_for_backward(x, weight)
        layer.my_counts.fprop += 1
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.layer.my_counts.dgrad += 1
        ctx.layer.my_counts.wgrad += 1
        dy = dy.to(weight.dtype)
        return dy @ weight, dy.T @ x, None


class MyLinear(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight, self) + self.bias


class MyCompute(Compute):
    name = "mine"
    scalings = ("coarse", "fine")
    default_scaling = "coarse"
    fields = (Field("headroom", 0, whole_number(0), "Powers of two below the largest code.", scalings=("fine",)),)

    def availability(self):
        return Availability(True, "anywhere")

    def build(self, linear, recipe, shared):
        carrier = MyLinear(linear.in_features, linear.out_features, device="meta")
        carrier.weight, carrier.bias = linear.weight, linear.bias
        carrier.my_counts, carrier.my_headroom = ProductCounts(), recipe.headroom
        return carrier

    def is_converted(self, module):
        return isinstance(module, MyLinear)

    def engine(self, module):
        return "emulated"

    def products(self, module):
        return module.my_counts
"""

TRAIN = """
import sys
import torch
from accelerate import Accelerator

import fp8_backends

recipe = eval(sys.argv[1]) if len(sys.argv) > 1 else None
accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe] if recipe else [], cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.randn(8, 32)).square().mean())
optimizer.step()
print(accelerator.fp8_recipe.name, accelerator.unwrap_model(model)[0].my_headroom)
"""

YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: fp8
use_cpu: true
num_processes: 1
fp8_config: {backend: "mine:fine", headroom: 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a user with the backend installed by pip."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("work")
    (source / "setup.py").write_text("from setuptools import setup; setup()")
    (source / "setup.cfg").write_text(SETUP)
    (source / "my_fp8.py").write_text(BACKEND)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", folder / "installed", source], check=True, timeout=240)
    (folder / "train.py").write_text(TRAIN)
    (folder / "fp8.yaml").write_text(YAML)
    return folder


def run(folder, *arguments, **environment):
    path = os.pathsep.join([str(folder / "installed"), *sys.path])
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ACCELERATE_")}
    return warm_process.run(*arguments, cwd=folder, env={**kept, "PYTHONPATH": path, **environment})


FP8 = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "fp8"}
WAYS = {
    "handler": (
        ["train.py", "fp8_backends.FP8RecipeKwargs(backend='mine', scaling='fine', headroom=3)"],
        {},
    ),
    "dictionary": (
        ["train.py", "fp8_backends.resolve({'backend': 'mine:fine', 'headroom': '3'})"],
        {},
    ),
    "environment": (
        ["train.py"],
        {**FP8, "ACCELERATE_FP8_BACKEND": "mine:fine", "ACCELERATE_FP8_HEADROOM": "3"},
    ),
    "flag": (
        [
            "-m",
            "fp8_backends",
            "launch",
            "--cpu",
            "--fp8_backend",
            "mine:fine",
            "--fp8_headroom",
            "3",
            "train.py",
        ],
        {},
    ),
    "YAML": (["-m", "fp8_backends", "launch", "--config_file", "fp8.yaml", "train.py"], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", nightly_but(["flag"], WAYS))
def test_field_and_scaling_reach_the_layers(way, folder):
    arguments, environment = WAYS[way]
    ended = run(folder, *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "mine:fine 3"
    assert "mine:fine: 2/2 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad" in ended.stderr


ASK = """
    import json, pickle, sys
    import fp8_backends

    def refused(**fields):
        try:
            fp8_backends.FP8RecipeKwargs(**fields)
        except fp8_backends.RecipeError as error:
            return str(error)

    assert "my_fp8" not in sys.modules
    recipe = fp8_backends.resolve("mine:fine")
    given = fp8_backends.FP8RecipeKwargs(backend="mine:fine", headroom=2)
    print(json.dumps({
        "default": recipe.headroom,
        "survives": pickle.loads(pickle.dumps(given)) == given == type(given)(**given.to_kwargs()) != recipe,
        "dict": given.to_dict()["headroom"],
        "repr": repr(given),
        "coarse": refused(backend="mine", headroom=1),
        "elsewhere": refused(backend="native", headroom=1),
        "value": refused(backend="mine:fine", headroom="high"),
        "monitor": refused(backend="mine", monitor_every=5),
        "name": refused(backend="mine:fine", headrom=1),
    }))
"""


def test_field_is_checked_against_its_declaration(folder):
    ended = run(folder, "-c", textwrap.dedent(ASK))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["default"], found["survives"], found["dict"]) == (0, True, 2)
    assert found["repr"] == "FP8RecipeKwargs(mine:fine, headroom=2)"
    assert "headroom is not read by mine:coarse, only by mine:fine" in found["coarse"]
    assert "headroom is not a field of" in found["elsewhere"]
    assert "headroom='high': headroom must be a whole number of at least 0" in found["value"]
    assert "headrom is not a field of FP8RecipeKwargs" in found["name"]
    assert "monitor_every: mine cannot tell how its layers cast" in found["monitor"]
