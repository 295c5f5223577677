"""Backends by name: built in, registered, and from entry points of other distributions."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from fp8_backends import (
    BackendUnavailableError,
    FP8BackendError,
    RecipeError,
    audit,
    available_backends,
    prepare,
    register_backend,
    resolve,
)
from fp8_backends.compute import chips, registry
from fp8_backends.compute.counts import ProductCounts
from fp8_backends.compute.hardware import Availability
from fp8_backends.compute.interface import Compute


@pytest.fixture(autouse=True)
def forget_registered_backends(monkeypatch):
    monkeypatch.setattr(registry, "factories", {})
    monkeypatch.setattr(registry, "instances", dict(registry.instances))


def pretend_entry_point(monkeypatch, name, value):
    point = registry.importlib.metadata.EntryPoint(name, value, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [point])


class Product(torch.autograd.Function):
    """A Linear product on operands rounded to E4M3, counted by the layer."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer = layer
        x, weight = (t.to(torch.float8_e4m3fn).to(t.dtype) for t in (x, weight))
        ctx.save_for_backward(x, weight)
        layer.tiny_counts.fprop += 1
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.layer.tiny_counts.dgrad += 1
        ctx.layer.tiny_counts.wgrad += 1
        return dy @ weight, dy.T @ x, None


class TinyLinear(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight, self) + self.bias


class TinyCompute(Compute):
    name = "tiny"
    scalings = ("coarse", "fine")
    default_scaling = "coarse"
    fields = ("margin",)  # one of this package's, by name

    def availability(self):
        return Availability(True, "anywhere")

    def build(self, linear, recipe, shared):
        carrier = TinyLinear(linear.in_features, linear.out_features, device="meta")
        carrier.weight, carrier.bias = linear.weight, linear.bias
        carrier.tiny_counts = ProductCounts()
        return carrier

    def is_converted(self, module):
        return isinstance(module, TinyLinear)

    def engine(self, module):
        return "emulated"

    def products(self, module):
        return module.tiny_counts


def train_three_steps(spec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer, spec)
    x, target = torch.randn(64, 32), torch.randn(64, 16)
    losses = []
    for _ in range(3):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    return model, losses, moved


# Built in


def test_built_in_backends_report_availability():
    backends = available_backends()
    assert list(backends)[:3] == ["native", "te", "ao"]
    assert backends["native"] and backends["ao"]
    assert all(
        availability.reason and (availability or availability.fix)
        for availability in backends.values()
    )


@pytest.mark.parametrize("name", ["native", "NATIVE", "te", "Transformer-Engine", "torchao"])
def test_one_instance_serves_every_spelling(name):
    key = {"transformer-engine": "te", "torchao": "ao"}.get(name.lower(), name.lower())
    assert registry.get_compute(name) is registry.get_compute(key)
    assert registry.get_compute(name).name == key


@pytest.mark.parametrize("spec", ["te", "te+msamp:O2"])
def test_prepare_refuses_unavailable_backends(spec, monkeypatch):
    monkeypatch.setattr(
        "fp8_backends.compute.te.backend.importlib.util.find_spec", lambda name: None
    )
    assert resolve(spec)
    model = nn.Linear(32, 32)
    with pytest.raises(BackendUnavailableError) as caught:
        prepare(model, torch.optim.SGD(model.parameters()), spec)
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, FP8BackendError)
    for words in ("TransformerEngine is not installed", chips.INSTALL_TE, "native:delayed"):
        assert words in str(caught.value)
    assert type(model) is nn.Linear


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.key)
@pytest.mark.parametrize("te_runs", [False, True])
def test_auto_takes_the_recommended_backend(chip, te_runs, monkeypatch):
    """Where it cannot run or does not read the fields, `native` or `ao` is next."""

    def can_run(name, answer):
        monkeypatch.setattr(
            type(registry.get_compute(name)), "availability", lambda self: Availability(answer)
        )

    monkeypatch.setattr("fp8_backends.compute.hardware.chip", lambda: chip)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    can_run("te", te_runs)  # installed, though perhaps not run by this version
    choice = registry.auto_choice()
    if not chip.fp8:
        assert choice.backend == "native"
        return
    ((without, with_te),) = [pair for known, *pair in chips.recommended() if known is chip]
    wanted = (with_te if te_runs else without).partition(":")[0]
    assert choice.backend == wanted and "recommended for" in choice.reason
    other = "ao" if wanted == "native" else "native"
    refused = registry.auto_choice(lambda name: name != wanted)
    assert refused.backend == other and f"{wanted} cannot run here" in refused.reason
    can_run(wanted, False)
    # without TransformerEngine, another one is recommended
    assert registry.auto_choice().backend == (
        without.partition(":")[0] if wanted == "te" else other
    )
    assert registry.auto_choice(lambda name: False).backend in (wanted, without.partition(":")[0])


# Registered


def test_registered_backend_trains_and_is_counted():
    register_backend("Tiny", TinyCompute)
    assert resolve("TINY").name == "tiny:coarse" and resolve("tiny:fine").scaling == "fine"
    model, losses, moved = train_three_steps("tiny")
    assert losses[2] < losses[1] < losses[0] and all(moved)
    assert audit(model).products["0"] == {"fprop": 3, "dgrad": 3, "wgrad": 3, "recomputed": 0}


def test_registered_backend_declares_fields_and_scalings():
    register_backend("tiny", TinyCompute)
    assert resolve({"backend": "tiny", "margin": 2}).margin == 2
    with pytest.raises(RecipeError, match="fp8_format is not read by tiny:coarse"):
        resolve({"backend": "tiny", "fp8_format": "E4M3"})
    with pytest.raises(
        RecipeError, match=r"tiny has no scaling 'delayed'; it has coarse \(default\), fine"
    ):
        resolve("tiny:delayed")
    with pytest.raises(RecipeError, match="goes with O0 only"):
        resolve("tiny+msamp")
    with pytest.raises(RecipeError, match=r"tiny\[:coarse\|fine\]"):
        resolve("unheard-of")


def test_factory_is_called_once_and_only_when_used():
    calls = []

    def factory():
        calls.append(1)
        return TinyCompute()

    register_backend("tiny", factory)
    assert not calls
    assert registry.get_compute("tiny") is registry.get_compute("tiny")
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["auto", "msamp", "torchao", "two words", "a:b", "a+b", "", 3])
def test_unparsable_backend_name_is_refused(name):
    with pytest.raises(RecipeError, match="backend name"):
        register_backend(name, TinyCompute)


def test_taken_name_is_replaced_only_on_request():
    with pytest.raises(RecipeError, match="replace=True"):
        register_backend("native", TinyCompute)
    register_backend("native", TinyCompute, replace=True)
    assert isinstance(registry.get_compute("native"), TinyCompute)


def test_factory_returning_no_compute_is_named():
    with pytest.raises(RecipeError, match="must be callable"):
        register_backend("tiny", TinyCompute())
    register_backend("tiny", dict)
    with pytest.raises(FP8BackendError, match="'tiny': the factory returned dict"):
        resolve("tiny")


def test_broken_entry_point_affects_only_itself(monkeypatch):
    pretend_entry_point(monkeypatch, "broken", "no_such_module_here:Compute")
    with pytest.raises(FP8BackendError, match="'broken'.*does not load.*no_such_module_here"):
        resolve("broken")
    found = available_backends()
    assert not found["broken"] and "no_such_module_here" in found["broken"].reason
    assert found["native"]
    with pytest.raises(RecipeError, match="Valid"):
        resolve("nativ")


def test_entry_point_of_an_installed_distribution_is_a_backend(tmp_path, monkeypatch):
    """Import at first use, and train through `prepare`."""
    info = tmp_path / "tiny_fp8-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-fp8\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fp8_backends.backends]\nTiny = tiny_fp8:TinyCompute\n")
    (tmp_path / "tiny_fp8.py").write_text(f"from {__name__} import TinyCompute\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.is_known("tiny") and "tiny_fp8" not in sys.modules
    model, losses, moved = train_three_steps("tiny:fine")
    assert "tiny_fp8" in sys.modules and isinstance(model[0], TinyLinear)
    assert losses[2] < losses[1] < losses[0] and all(moved)
    assert audit(model).flops_share == 1.0
