"""Saved activations are packed by a list of autograd nodes: each is within its bound, every other
one exact."""

from __future__ import annotations

import functools
import itertools
import warnings
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from torch import nn
from torch.nn import functional as F

import fp8_backends
from fp8_backends.convert.saved_activations import MOST_FACTORS, NODES, Packer, saved_bytes

ROWS, WIDTH = 128, 64


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))


class Computes(nn.Module):
    """Run a test's function as the forward of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, function, *inputs: torch.Tensor):
        return function(*inputs)


def prepared(value: str = "fp8") -> nn.Module:
    model = nn.Sequential(Computes())
    return fp8_backends.prepare(
        model, None, fp8_backends.NativeRecipeKwargs(saved_activations=value)
    )[0]


def gradients(module, function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the inputs, for an incoming gradient of random numbers."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    torch.manual_seed(0)
    made = [each * 1 for each in leaves]  # the module's inputs are activations
    result = function(*made) if module is None else module(function, *made)
    return list(
        torch.autograd.grad(
            result, leaves, normal(9, *result.shape, 1)[..., 0].to(result.dtype), allow_unused=True
        )
    )


def compared(function, *inputs: torch.Tensor, value: str = "fp8"):
    """Gradients without and with packing, and the number of packed tensors."""
    model = prepared(value)
    return (
        gradients(None, function, *inputs),
        gradients(model[0], function, *inputs),
        saved_bytes(model).tensors,
    )


def assert_exact(function, *inputs: torch.Tensor) -> None:
    exact, found, _ = compared(function, *inputs)
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)


# changes in place without autograd


CHANGES = {
    "no_grad": torch.no_grad()(lambda y: y.mul_(3)),
    "clamp": torch.no_grad()(lambda y: y.clamp_(max=0.1)),
    "data": lambda y: y.data[:, :10].zero_(),
    "numpy": lambda y: y.detach().numpy()[:, :10].__imul__(-5),
}


@pytest.mark.parametrize(
    ("activation", "change"),
    [
        (F.silu, "no_grad"),
        (F.gelu, "clamp"),
        (functools.partial(F.gelu, approximate="tanh"), "data"),
        (F.silu, "numpy"),
    ],
)
def test_activation_changed_in_place_is_not_recomputed(activation, change):
    def ablated(gate, up):
        y = activation(gate)
        CHANGES[change](y)
        return y * up

    gate, up, incoming = normal(0), normal(1), normal(9)
    changed = ablated(gate, torch.ones(()))
    exact, found, tensors = compared(ablated, gate, up)
    assert tensors == 3 and torch.allclose(exact[1], incoming * changed)
    assert ((found[1] - exact[1]).abs() <= 2**-4 * exact[1].abs() + 1e-4).all()


def test_forward_hook_ablating_neurons_takes_effect():
    """Write into the result of a separate activation module from a hook."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.linear = nn.SiLU(), nn.Linear(WIDTH, WIDTH)

        def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return self.act(gate) * up

    model = nn.Sequential(Gated())
    fp8_backends.prepare(model, None, fp8_backends.NativeRecipeKwargs(saved_activations="fp8"))

    def ablate(module, args, y):
        CHANGES["data"](y)

    model[0].act.register_forward_hook(ablate)
    gate, up = normal(0).requires_grad_(), normal(1).requires_grad_()
    model[0](gate * 1, up * 1).sum().backward()
    assert saved_bytes(model).tensors == 3
    assert up.grad[:, :10].abs().max() == 0
    assert (
        (up.grad - F.silu(gate))[:, 10:].abs() <= 2**-4 * F.silu(gate)[:, 10:].abs() + 1e-4
    ).all()


@pytest.mark.parametrize("changes", [0, 1])
def test_input_changed_in_place_after_use_raises(changes):
    def function(*tensors):
        y = tensors[0] * tensors[1]
        with torch.no_grad():
            tensors[changes].mul_(2)
        return y

    for module in (None, prepared()[0]):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(module, function, normal(0), normal(1))


# nodes outside the list


SENSITIVE = {
    "the norm of the largest element": lambda x, y: (
        torch.linalg.vector_norm(x, torch.inf, dim=-1) + y.sum(-1)
    ),
    "powers other than squares": lambda x, y: x.pow(8) + y.pow(3),
    "norms over channels": lambda x, y: (
        F.group_norm(x + 50, 4) + F.batch_norm(y + 50, None, None, training=True)
    ),
}


@pytest.mark.parametrize("name", SENSITIVE)
def test_sensitive_nodes_are_not_packed(name):
    assert_exact(SENSITIVE[name], normal(0), normal(1))


def derivatives() -> list[dict]:
    """PyTorch's table of derivatives, as its wheel has it."""
    path = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


CALLS = [
    lambda x, y: (x,),
    lambda x, y: (x, y),
    lambda x, y: (x, -1),
    lambda x, y: (x, 2.5),
    lambda x, y: (x, y, 0.5),
]
CALLS += [lambda x, y: (x, [WIDTH]), lambda x, y: (x, y, x + 1), lambda x, y: (x, 1, y)]
PLACES = (torch, F, torch.special, torch.linalg, torch._C._nn, torch.Tensor)
RANDOM = {"_fused_dropout", "native_dropout"}


def graph_of(result: torch.Tensor) -> set[str]:
    """Names of the nodes behind a result."""
    names, left = set(), [result.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            names.add(node.name())
            left += [each for each, _ in node.next_functions]
    return names


@pytest.mark.nightly
def test_unlisted_operations_stay_exact():
    """Call each differentiable operation in several ways. New operations are not packed, either."""
    names = sorted({entry["name"].split("(")[0].split(".")[0] for entry in derivatives()})
    model, found = prepared(), {}
    # for defined logarithms and inverse sines
    positive = [normal(seed).abs() / 8 + 0.05 for seed in range(2)]
    for name, place in itertools.product(names, PLACES):
        operation = getattr(place, name, None)
        if operation is None or name in RANDOM or name.endswith("_"):
            continue
        for make in CALLS:

            def function(x, y, make=make, operation=operation):
                made = operation(*make(x, y))
                made = made if isinstance(made, torch.Tensor) else made[0]
                function.nodes = graph_of(made)
                return made

            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    exact = gradients(None, function, *positive)
            except Exception:  # of any kind: other arguments are needed
                continue
            nodes = function.nodes - {"MulBackward0", "torch::autograd::AccumulateGrad"} or {
                "MulBackward0"
            }
            packed = gradients(model[0], function, *positive)
            if function.nodes.isdisjoint(NODES):
                torch.testing.assert_close(packed, exact, rtol=0, atol=0, equal_nan=True, msg=name)
            for node in nodes:
                found.setdefault(node, set()).add(name)
    assert len(found) > 160 and {"SiluBackward0", "MulBackward0", "ReluBackward0"} <= found.keys()


def test_every_listed_node_exists_with_its_fields():
    for name, kept in NODES.items():
        node = getattr(torch._C._functions, name)
        assert all(hasattr(node, f"_raw_saved_{field}") for field in kept.fields) and kept.fields, (
            name
        )
        assert set(kept.factors) <= set(kept.fields) and kept.bound


# the bound of each listed node, for an exact incoming gradient


def layer_norm(x, weight):
    return F.layer_norm(x, (WIDTH,), weight[0])


def multiplied(exact, x, y, incoming):
    return 2**-4 * (incoming * y).abs(), 2**-4 * (incoming * x).abs()


def normed(exact, x, y, incoming):
    rstd = (x.var(-1, keepdim=True, unbiased=False) + 1e-5).rsqrt()
    values, terms = (x - x.mean(-1, keepdim=True)) * rstd, (incoming * y[0]).abs()
    of_x = 2.1 * 2**-4 * rstd * values.abs() * (terms * values.abs()).mean(-1, keepdim=True)
    return of_x, 2**-4 * torch.zeros(ROWS, WIDTH).index_fill(0, torch.tensor([0]), 1) * (
        incoming * values
    ).abs().sum(0)


BOUNDS = {
    "MulBackward0": (lambda x, y: x * y, multiplied),
    "PowBackward0": (
        lambda x, y: x.pow(2) + y,
        lambda exact, x, y, g: (2**-4 * exact[0].abs(), 0 * x),
    ),
    "SiluBackward0": (lambda x, y: F.silu(x) + y, lambda exact, x, y, g: (0.02 * g.abs(), 0 * x)),
    "GeluBackward0": (lambda x, y: F.gelu(x) + y, lambda exact, x, y, g: (0.022 * g.abs(), 0 * x)),
    "ReluBackward0": (lambda x, y: F.relu(x) * 2 + y, lambda exact, x, y, g: (0 * x, 0 * x)),
    "NativeLayerNormBackward0": (layer_norm, normed),
}
ON_A_GPU = {"FusedRmsNormBackward0"}
"""Nodes made by PyTorch only on a GPU."""


def test_every_listed_node_has_a_bound_test():
    attention = {name for name, kept in NODES.items() if kept.attention}
    assert BOUNDS.keys() | ON_A_GPU | attention == NODES.keys()
    assert all(name.startswith("ScaledDotProduct") for name in attention)


@pytest.mark.parametrize("scale", [1e-3, 1, 10])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_listed_node_is_within_its_bound(name, scale):
    function, bound = BOUNDS[name]
    x, y = scale * normal(0) + (100 * scale if name == "NativeLayerNormBackward0" else 0), normal(1)
    exact, found, tensors = compared(function, x, y)
    assert tensors >= 1
    assert (
        name == "ReluBackward0"
        or not torch.equal(exact[0], found[0])
        or not torch.equal(exact[1], found[1])
    )
    for one, other, most in zip(exact, found, bound(exact, x, y, normal(9)), strict=True):
        # the smallest values of a block are off by 2**-16 of its largest
        small = 0 if name == "ReluBackward0" else 2e-4 * max(scale, 1)
        assert ((one - other).abs() <= most + small).all()


def test_rms_norms_written_in_python_keep_statistics_whole():
    def function(x, weight):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight[0] * normed

    exact, found, tensors = compared(
        function, normal(0, 4096 * 2, WIDTH), normal(1, 4096 * 2, WIDTH)
    )
    # the input and the normed values; 8,192 statistics are columns of one element
    assert tensors == 2
    assert all((b - a).norm() <= 2**-4 * a.norm() for a, b in zip(exact, found, strict=True))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, gate: torch.Tensor, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return gate * state + token * self.scale


class Recurrence(nn.Module):
    """Apply one gate per token, in the module's own operations or by a module reading its own
    result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.cell = nn.Linear(WIDTH, WIDTH), Cell()
        self.step = self.cell if kind == "module" else self.cell.forward

    def forward(self, gates: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        states = [x[0]]
        for gate, token in zip(gates, x, strict=True):
            states.append(self.step(gate, states[-1], token))
        return torch.stack(states)


@pytest.mark.parametrize("kind", ["operations", "module"])
def test_recurrence_bounds_number_of_packed_factors(kind):
    """Errors of one gate for each of 128 tokens would add up to 2.7 % times the root of 128, 31
    %."""
    model = nn.Sequential(Recurrence(kind))
    fp8_backends.prepare(model, None, fp8_backends.NativeRecipeKwargs(saved_activations="fp8"))
    gates, x = (
        each.requires_grad_()
        for each in (1 - 0.01 * normal(0, 128, 64, 64).abs(), normal(1, 128, 64, 64))
    )
    found = []
    for training in (True, False):
        model.train(training)
        result = model[0](gates * 1, x * 1)
        found.append(torch.autograd.grad(result[-1], x, normal(9, 64, 64))[0])
    # 128 tokens, for the scale's gradient; gate and state of each packed product of the chain
    assert 128 < saved_bytes(model).tensors <= 128 + 2 * MOST_FACTORS
    assert 0 < (found[0] - found[1]).norm() <= 0.027 * MOST_FACTORS**0.5 * found[1].norm()


def test_pytorch_without_hook_introspection_is_refused(monkeypatch):
    monkeypatch.setattr(torch._C._autograd, "SavedTensor", object)  # stands for an older one
    with pytest.raises(
        fp8_backends.FP8BackendError, match="unpack_hook.*leave saved_activations out"
    ):
        prepared()


def test_packing_pushes_no_hooks_during_forward():
    seen = []
    model = prepared()
    gradients(
        model[0],
        lambda x, y: (
            seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True)),
            x * y,
        )[1],
        normal(0),
        normal(1),
    )
    assert seen == [None] and saved_bytes(model).tensors == 2
    assert any(isinstance(hook, Packer) for hook in model[0]._forward_hooks.values())
