"""Refuse unsupported derivatives by name; never return silent zeros."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from widths import one_each

import fp8_backends
from fp8_backends import FP8BackendError

SPECS = ("native:delayed", "native:blockwise", "ao:tensorwise", "msamp:O2", "msamp:O3")
NATIVE = tuple(spec for spec in SPECS if not spec.startswith("ao"))
WAY_OUT = r"native backend.*model\.eval\(\).*exclude="


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


def prepared(spec):
    model = network()
    return fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), spec)


def values_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss_of(model, values, x):
    return torch.func.functional_call(model, values, (x,)).square().mean()


def in_evaluation(spec):
    """(a prepared model, a plain one with its weights), both in evaluation"""
    model, plain = prepared(spec)[0], network()
    plain.load_state_dict(model.state_dict())
    return model.eval(), plain.eval()


def penalty(model, x):
    """A gradient penalty: the square of the gradient of the outputs' sum."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum()


@pytest.mark.parametrize("spec", SPECS)
def test_a_second_derivative_is_refused(spec):
    model, _ = prepared(spec)
    with pytest.raises(FP8BackendError, match=f"create_graph=True: .*{WAY_OUT}"):
        penalty(model, torch.randn(8, 32))
    with pytest.raises(FP8BackendError, match="create_graph=True"):  # it was zero
        torch.autograd.functional.hessian(lambda x: model(x).sum(), torch.randn(2, 32))


def test_a_second_derivative_through_experts_is_refused():
    config = MixtralConfig(
        hidden_size=32, intermediate_size=32, num_local_experts=2, num_experts_per_tok=1
    )
    config._experts_implementation = "eager"
    experts = nn.ModuleDict({"experts": MixtralExperts(config)})
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    fp8_backends.prepare(experts, None, "native:dynamic")
    x, top = torch.randn(6, 32, requires_grad=True), torch.arange(6).view(6, 1) % 2
    y = experts["experts"](x, top, torch.ones(6, 1))
    with pytest.raises(FP8BackendError, match="create_graph=True"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("spec", NATIVE)
def test_second_derivative_in_evaluation_matches_plain_layers(spec):
    model, plain = in_evaluation(spec)
    x = torch.randn(8, 32)
    for each in (model, plain):
        penalty(each, x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            gradient = ours.grad.dequantize() if hasattr(ours.grad, "stored") else ours.grad
            # a level stores a gradient in E4M3: off by at most 2**-4 of an element
            torch.testing.assert_close(
                gradient, theirs.grad, rtol=2**-4 if "msamp" in spec else 1e-5, atol=1e-4
            )


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda values: loss_of(model, values, x))(
        values_of(model)
    ),
    "vmap": lambda model, x: torch.func.vmap(model)(x.view(2, -1, 32)),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
}


@pytest.mark.parametrize("spec, transform", one_each(SPECS, TRANSFORMS))
def test_transforms_of_torch_func_are_refused(spec, transform):
    model, optimizer = prepared(spec)
    with pytest.raises(FP8BackendError, match=f"torch.func's grad, vmap, jvp.*{WAY_OUT}"):
        TRANSFORMS[transform](model, torch.randn(8, 32))
    model(torch.randn(8, 32)).square().mean().backward()  # nothing of it is left behind
    optimizer.step()


@pytest.mark.parametrize("spec, transform", one_each(NATIVE, TRANSFORMS))
def test_transforms_of_torch_func_run_in_evaluation(spec, transform):
    x = torch.randn(8, 32)
    ours, theirs = (TRANSFORMS[transform](each, x) for each in in_evaluation(spec))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_forward_mode_is_refused():
    model, _ = prepared("native:dynamic")
    with torch.autograd.forward_ad.dual_level():
        x = torch.randn(8, 32)
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(FP8BackendError, match="forward-mode"):
            model(dual)


@pytest.mark.parametrize("spec", SPECS)
def test_functional_call_trains_the_models_parameters(spec):
    model, optimizer = prepared(spec)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.func.functional_call(
        model, dict(model.named_parameters()), (torch.randn(8, 32),)
    ).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("spec", ("native:dynamic", "msamp:O2"))
def test_inference_mode_keeps_no_codes(spec):
    """Autograd cannot save them for a backward."""
    model, optimizer = prepared(spec)
    fp8_backends.convert.stored_weights.keep_weight_casts(model)
    for _ in range(2):  # the first step shows which weights train
        with torch.inference_mode():
            model(torch.randn(8, 32))
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()


def test_preparing_in_inference_mode_is_refused():
    with (
        torch.inference_mode(),
        pytest.raises(
            FP8BackendError,
            match="outside (it may run inside)".replace("(", "\\(").replace(")", "\\)"),
        ),
    ):
        prepared("native:dynamic")
    with torch.inference_mode():
        model = network()
    with pytest.raises(FP8BackendError, match="can never train"):
        fp8_backends.prepare(model, None, "msamp:O2")


@pytest.mark.parametrize("spec", SPECS)
def test_several_gradients_at_once_are_refused(spec):
    model, _ = prepared(spec)
    x = torch.randn(4, 32, requires_grad=True)
    with pytest.raises(
        FP8BackendError, match=f"is_grads_batched=True.*torch.autograd.grad for each.*{WAY_OUT}"
    ):
        torch.autograd.grad(model(x).sum(1), x, torch.eye(4), is_grads_batched=True)
    with pytest.raises(FP8BackendError, match="vectorize=True"):
        torch.autograd.functional.jacobian(model, x, vectorize=True)


@pytest.mark.parametrize("spec", ["native:dynamic", "native:delayed", "ao:tensorwise"])
def test_gradients_of_each_sample_are_refused(spec):
    model, _ = prepared(spec)
    with pytest.raises(FP8BackendError, match=f"call_for_per_sample_grads.*{WAY_OUT}"):
        call_for_per_sample_grads(model)(torch.randn(4, 32))


@pytest.mark.parametrize("spec, training", one_each(SPECS, [True, False]))
def test_symbolic_trace_calls_fp8_layers_as_modules(spec, training):
    model, optimizer = prepared(spec)
    model.train(training)
    traced, x = torch.fx.symbolic_trace(model), torch.randn(16, 32)
    assert traced.get_submodule("0") is model[0]
    twin, _ = prepared(spec)
    assert torch.equal(traced(x), twin.train(training)(x))
    pickle.loads(pickle.dumps(model))
    fp8_backends.restore(model)
    assert vars(model[0]).keys() == vars(network()[0]).keys()
