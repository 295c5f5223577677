"""A forward wrapped on the instance by another library: the layer inside runs in FP8, and restores
its class."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from conversion_steps import take_steps
from torch import nn
from transformers.distributed.expert_parallel import (
    EpDispatchExpertsParallel,
    EPImplementation,
    EPImplementationInterface,
)
from transformers.distributed.tensor_parallel import AllReduceParallel, TensorParallelLayer

import fp8_backends
from fp8_backends import FP8BackendError
from fp8_backends.convert.conversion import weight_products
from fp8_backends.torch_tools.modules import forward_obstacle


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def hooked(model):
    dispatch_model(model, dict.fromkeys("012", "cpu"), main_device="cpu", force_hooks=True)
    add_hook_to_module(model[0], ModelHook(), append=True)


def tensor_parallel(model):
    for layer in model:
        TensorParallelLayer().install_forward(layer, None)


def counted(forward, calls):
    @functools.wraps(forward)
    def counts(*args):
        calls.append(forward)
        return forward(*args)

    return counts


def decorated(model):
    model.calls = []
    for layer in model:
        layer.forward = functools.partial(counted(functools.partial(layer.forward), model.calls))
        layer.forward = counted(layer.forward, model.calls)


def all_at_once(model):
    tensor_parallel(model)
    hooked(model)
    decorated(model)


CASES = [("native:delayed", wrap) for wrap in (hooked, tensor_parallel, decorated)]
CASES += [(backend, all_at_once) for backend in ("ao:tensorwise", "msamp:O2")]


def trained(model, backend, steps=2):
    model, optimizer = fp8_backends.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), backend
    )
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    return model, take_steps(lambda: model(x).square().mean(), optimizer, steps)


@pytest.mark.parametrize("backend, wrap", CASES)
def test_wrapped_layers_train_bitwise_in_fp8_and_restore(backend, wrap):
    _, expected = trained(net(), backend)
    model = net()
    wrap(model)
    model, losses = trained(model, backend)
    assert losses == expected
    assert not fp8_backends.audit(model).high_precision
    fp8_backends.restore(model)
    plain = net()
    plain.load_state_dict(model.state_dict())
    x = torch.ones(2, 32)
    assert model(x).equal(plain(x))
    again, _ = fp8_backends.prepare(model, None, "native:dynamic")
    assert not again(x).equal(plain(x))


def test_copy_calls_itself_after_hook_removal():
    model = net()
    hooked(model)
    model, _ = trained(model, "native:dynamic")
    copied, x = copy.deepcopy(model), torch.ones(2, 32)
    with torch.no_grad():
        model[0].weight.zero_()
    before = copied(x)
    remove_hook_from_module(copied, recurse=True)
    assert copied(x).equal(before) and not model(x).equal(before)
    fp8_backends.restore(copied)
    assert "forward" not in vars(copied[0]) and not copied(x).equal(before)


def test_layers_wrapped_after_conversion_are_restored():
    model, _ = trained(net(), "native:dynamic")
    all_at_once(model)
    fp8_backends.restore(model)
    plain = net()
    plain.load_state_dict(model.state_dict())
    x = torch.ones(2, 32)
    assert model(x).equal(plain(x)) and len(model.calls) == 6


def other_product(layer):
    return lambda x: nn.functional.linear(x, layer.weight)


@pytest.mark.parametrize("wrapped", [False, True])
def test_layer_with_custom_product_is_named_and_skipped(wrapped):
    model = net()
    model[0].forward = other_product(model[0])
    if wrapped:
        add_hook_to_module(model[0], ModelHook())
        AllReduceParallel().install_forward(model[0], None)
    whose = f"{__name__}.other_product.<locals>.<lambda>"
    reasons = {product.name: product.reason for product in weight_products(model)}
    assert reasons["0"] == f"its forward was replaced on the instance by {whose}"


def test_forward_of_expert_parallelism_is_no_obstacle():
    class Own(EPImplementation):
        # without the groups of ranks required by the original
        def __init__(self, experts, ep_mesh, tp_mesh):
            self.experts_forward = experts.forward

        def __call__(self, *args):
            return self.experts_forward(*args)

    layer = nn.Linear(4, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EPImplementationInterface()._global_mapping, "own", Own)
        EpDispatchExpertsParallel().install_forward(
            layer, None, tp_mesh=None, ep_implementation="own"
        )
    assert forward_obstacle(layer) is None


# Offloaded weights: on the meta device between forwards


def offloaded(model, kind, folder):
    if kind == "cpu":
        return cpu_offload(model, torch.device("cpu"))
    if kind == "disk":
        return disk_offload(model, str(folder / "disk"), torch.device("cpu"))
    devices = {"0": "cpu", "1": "cpu", "2": "disk"}
    return dispatch_model(
        model, devices, main_device="cpu", offload_dir=str(folder / "part"), force_hooks=True
    )


def result_and_gradient(model):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("kind", ["cpu", "disk", "dispatch"])
def test_offloaded_layers_compute_same_products(kind, tmp_path):
    for backend in ("native:rowwise", "native:delayed", "ao:tensorwise"):
        expected = result_and_gradient(fp8_backends.prepare(net(), None, backend)[0])
        for offloaded_first in (True, False):
            model = offloaded(net(), kind, tmp_path) if offloaded_first else net()
            model, _ = fp8_backends.prepare(model, None, backend)
            model = model if offloaded_first else offloaded(model, kind, tmp_path)
            assert model[2].weight.is_meta and not fp8_backends.audit(model).high_precision
            assert all(map(torch.equal, result_and_gradient(model), expected)), (
                backend,
                offloaded_first,
            )


STORED = {"a level": "msamp:O2", "fp8_params": {"backend": "native:dynamic", "fp8_params": True}}


@pytest.mark.parametrize("stored", STORED)
def test_offloaded_weights_are_not_stored(stored, tmp_path):
    model = offloaded(net().requires_grad_(False), "dispatch", tmp_path)
    model, _ = fp8_backends.prepare(model, None, STORED[stored])
    refused = fp8_backends.audit(model).high_precision
    assert list(refused) == ["2"] and refused["2"].startswith(
        "Accelerate's hooks put a plain weight in place"
    )


def test_offloading_fp8_weights_is_refused():
    model, _ = fp8_backends.prepare(net().requires_grad_(False), None, STORED["fp8_params"])
    model = offloaded(model, "cpu", None)
    with pytest.raises(FP8BackendError, match="fp8_params=True does not go with cpu_offload"):
        model(torch.ones(2, 32))


def test_training_offloaded_weights_is_refused():
    for made_first in (True, False):
        model = net()
        made = torch.optim.AdamW(model.parameters())
        offloaded(model, "cpu", None)
        optimizer = made if made_first else torch.optim.AdamW(model.parameters())
        with pytest.raises(FP8BackendError, match="0 is offloaded .* so it would not train"):
            fp8_backends.prepare(model, optimizer, "native:dynamic")
