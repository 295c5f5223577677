"""Convert models, take steps, and read the counters, for the tests of conversion."""

import torch
from torch import nn

from fp8_backends.convert import conversion
from fp8_backends.recipes.handlers import FP8RecipeKwargs

BACKENDS = ["native:dynamic", "native:delayed", "ao:tensorwise"]


def convert(model, backend="native:dynamic", **fields):
    recipe = FP8RecipeKwargs(backend=backend, **fields)
    return conversion.convert(model, recipe)


def take_steps(loss, optimizer, steps=1):
    """Minimise a function of no arguments. Return the losses."""
    losses = []
    for _ in range(steps):
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def train(model, optimizer=None, steps=8, size=32, seed=0):
    """Learn to predict a fixed random target from a fixed input. Return the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, size, generator=generator)
    target = None

    def loss():
        nonlocal target
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x).float()
        target = torch.randn(y.shape, generator=generator) if target is None else target
        return (y - target).pow(2).mean()

    return take_steps(loss, optimizer, steps)


def learns(model, optimizer=None, **options):
    """Train like `train`, and check that the loss falls."""
    losses = train(model, optimizer, **options)
    assert losses[-1] < losses[0]
    return losses


def mlp(*widths, seed=0):
    torch.manual_seed(seed)
    layers = []
    for n_in, n_out in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(n_in, n_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def counts(layer):
    return layer.fp8_products.tolist()


def assert_ran_in_fp8(prepared, model, steps):
    """Check for a forward and a weight-gradient product of every converted layer in each step, if
    counted."""
    layers = dict(model.named_modules())
    for name in prepared.report.converted:
        assert prepared.compute.is_converted(layers[name])
        if prepared.compute.name == "native":
            fprop, _, wgrad, _ = counts(layers[name])
            assert fprop == steps and wgrad == steps * layers[name].weight.requires_grad, name
