"""Pass a one-file backend with its own field and scaling rule through every input: string, handler,
dictionary, flag, YAML file and environment; and through the documentation's table."""

from __future__ import annotations

import json
import os
import sys
import textwrap

import pytest
import warm_process

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a user with the backend as pip installs it."""
    folder = tmp_path_factory.mktemp("work")
    metadata = folder / "installed" / "my_fp8-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-fp8\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[fp8_backends.backends]\nmine = my_fp8:MyCompute\n")
    (folder / "installed" / "my_fp8.py").write_text(BACKEND)
    (folder / "train.py").write_text(TRAIN)
    (folder / "recipe.yaml").write_text("backend: mine:fine\nheadroom: 3\n")
    return folder


TRAIN = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp8", cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.randn(8, 32)).square().mean())
optimizer.step()
print(accelerator.fp8_recipe.name, accelerator.unwrap_model(model)[0].my_headroom)
"""


def run(folder, *arguments):
    path = os.pathsep.join([str(folder / "installed"), *sys.path])
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ACCELERATE_")}
    return warm_process.run(*arguments, cwd=folder, env={**kept, "PYTHONPATH": path})


def test_field_and_scaling_reach_the_layers(folder):
    flags = "--cpu --fp8_backend mine:fine --fp8_headroom 3".split()
    ended = run(folder, "-m", "fp8_backends", "launch", *flags, "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "mine:fine 3"
    assert "mine:fine: 2/2 Linear, 100 % of weight FLOPs in FP8, fprop dgrad wgrad" in ended.stderr


ASK = """
    import json, pickle, sys
    import fp8_backends
    from fp8_backends.tools.advise import flags

    def refused(**fields):
        try:
            fp8_backends.FP8RecipeKwargs(**fields)
        except fp8_backends.RecipeError as error:
            return str(error)

    assert "my_fp8" not in sys.modules
    recipe = fp8_backends.resolve("mine:fine")
    given = fp8_backends.FP8RecipeKwargs(backend="mine:fine", headroom=2)
    three = fp8_backends.FP8RecipeKwargs(backend="mine", scaling="fine", headroom=3)
    variables = {"ACCELERATE_FP8_BACKEND": "mine:fine", "ACCELERATE_FP8_HEADROOM": "3"}
    assert three == fp8_backends.recipes.handlers.from_environment(variables)
    assert three == fp8_backends.resolve({"backend": "mine:fine", "headroom": "3"})
    assert three == fp8_backends.resolve("recipe.yaml")
    print(json.dumps({
        "default": recipe.headroom,
        "survives": pickle.loads(pickle.dumps(given)) == given == type(given)(**given.to_kwargs()) != recipe,
        "dict": given.to_dict()["headroom"],
        "repr": repr(given),
        "flags": flags(given),
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
    assert found["flags"] == "fp8-backends launch --fp8_backend mine:fine --fp8_headroom 2 SCRIPT"
    assert "headroom is not read by mine:coarse, only by mine:fine" in found["coarse"]
    assert "headroom is not a field of" in found["elsewhere"]
    assert "headroom='high': headroom must be a whole number of at least 0" in found["value"]
    assert "headrom is not a field of FP8RecipeKwargs" in found["name"]
    assert "monitor_every: mine cannot tell how its layers cast" in found["monitor"]
