"""transformers' Conv1D with `te`: the bits of `TELinear` with the transposed weight, over the
stand-in."""

from __future__ import annotations

import pytest
import torch
import transformer_engine.pytorch as te
from conv1d_twins import conv, gpt2, linear_twin, results_of_steps
from model_families import train
from peft import LoraConfig, get_peft_model
from standin import compute_capability
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.pytorch_utils import Conv1D

import fp8_backends
from fp8_backends.compute.te.linear import TELinear
from fp8_backends.compute.te.weights import is_frozen
from fp8_backends.convert import conv1d, conversion
from fp8_backends.errors import BackendUnavailableError, RecipeError


def prepared(model: nn.Module, spec: str, **fields):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    return fp8_backends.prepare(
        model, optimizer, fp8_backends.FP8RecipeKwargs(backend=spec, **fields)
    )


@pytest.mark.parametrize(
    ("scaling", "fields"),
    [
        ("delayed", {}),
        ("dynamic", {"override_linear_precision": (False, False, True)}),
        ("blockwise", {}),
    ],
)
def test_products_match_linear_bitwise(scaling, fields):
    torch.manual_seed(0)
    module = conv(160, 256)
    linear, weight = linear_twin(module), module.weight
    prepared(module, f"te:{scaling}", **fields)
    prepared(linear, f"te:{scaling}", **fields)
    assert (
        type(module) is conv1d.fp8_form(TELinear)
        and isinstance(module, Conv1D)
        and not isinstance(module, nn.Linear)
    )
    assert module.weight is weight and "nf=256, nx=160" in repr(module)
    for of_conv, of_linear in zip(results_of_steps(module), results_of_steps(linear), strict=True):
        assert torch.equal(of_conv, of_linear)
    conversion.restore(module)
    assert type(module) is Conv1D and set(module.__dict__) == set(Conv1D(1, 1).__dict__)


@pytest.mark.parametrize("spec", ["te:delayed", "te:blockwise+msamp:O3"])
def test_gpt2_trains_like_linear_layers(spec):
    fields = {"rounding": "nearest"} if "msamp" in spec else {}
    model, optimizer = prepared(gpt2(), spec, **fields)
    losses = train(model, optimizer, "gpt2", steps=4)
    assert losses == train(*prepared(gpt2(of_linears=True), spec, **fields), "gpt2", steps=4)
    assert losses[-1] < losses[0] - 0.1
    audit = fp8_backends.audit(model, optimizer)
    assert list(audit.high_precision) == ["lm_head"] and len(audit.products) == 8
    assert all(
        counts["fprop"] and counts["dgrad"] and counts["wgrad"]
        for counts in audit.products.values()
    )


@pytest.mark.parametrize(
    ("scaling", "chip"), [("dynamic", (9, 0)), ("dynamic", (10, 0)), ("blockwise", (9, 0))]
)
def test_frozen_fp8_weights_under_adapters(scaling, chip):
    """Blackwell's per-tensor products need no transposed copy of the codes."""
    losses, names = [], ["c_attn", "c_proj", "c_fc"]
    with compute_capability(*chip):
        for of_linears in (False, True):
            model = gpt2(of_linears)
            torch.manual_seed(0)
            lora = LoraConfig(
                r=4, target_modules=names, fan_in_fan_out=not of_linears, init_lora_weights=False
            )
            model, optimizer = prepared(
                get_peft_model(model, lora), f"te:{scaling}", fp8_params=True
            )
            losses.append(train(model, optimizer, "gpt2", steps=3))
            saved = model.state_dict()
            assert {type(value) for value in saved.values()} == {torch.Tensor}
            model.load_state_dict(saved)
            assert sum(map(is_frozen, model.parameters())) == 8
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_frozen_mxfp8_weights_are_refused():
    module = conv(32, 32).requires_grad_(False)
    with compute_capability(10, 0), pytest.raises(RecipeError, match="cannot be read transposed"):
        prepared(
            nn.Sequential(module, nn.Linear(32, 32)), "te:mxfp8", fp8_params=True, exclude=["1"]
        )


@pytest.mark.parametrize("scaling", ["delayed", "dynamic", "blockwise"])
def test_weight_released_by_zero_3_is_not_saved_for_backward(scaling):
    """Without DeepSpeed: its mark on a Parameter, and its changes of the data after forward and
    before backward."""
    module, x = conv(32, 48), torch.randn(16, 32, requires_grad=True)
    module.weight.ds_id = 0
    prepared(module, f"te:{scaling}")
    y, values = module(x), module.weight.detach().clone()
    gathered = StorageWeakRef(module.weight.untyped_storage())
    module.weight.data = torch.empty(0)
    assert gathered.expired()
    module.weight.data = values
    y.sum().backward()
    assert module.weight.grad.shape == (32, 48) and x.grad.any()


def test_te_version_without_external_weights_is_refused(monkeypatch):
    monkeypatch.delattr(te.Linear, "_get_weight_tensors")
    with pytest.raises(
        BackendUnavailableError, match="Conv1D.*takes no weight but its own.*2.9 or newer"
    ):
        prepared(nn.Sequential(conv(32, 32)), "te:delayed")
