"""Norms as TransformerEngine's, over the stand-in for its kernels."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformer_engine.pytorch as te
from te_norm_classes import (
    ClassEpsNorm,
    FP32LayerNorm,
    GatedRMSNorm,
    MeanAbsNorm,
    NoisyLayerNorm,
    ScaleNorm,
)
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from fp8_backends import prepare
from fp8_backends.compute.te.norms import TENorm
from fp8_backends.convert.conversion import prepared_roots, restore

N = 32
LAYER_NORMS = {"torch": lambda: nn.LayerNorm(N, eps=1e-3), "subclass": lambda: FP32LayerNorm(N)}
RMS_NORMS = {
    "torch": lambda: nn.RMSNorm(N, eps=1e-5),
    "llama": lambda: LlamaRMSNorm(N, eps=1e-5),
    "t5": lambda: T5LayerNorm(N),
    "gemma": lambda: GemmaRMSNorm(N),
}
LEFT = {
    "no affine": (lambda: nn.LayerNorm(N, elementwise_affine=False), "no weight"),
    "no bias": (lambda: nn.LayerNorm(N, bias=False), "no bias"),
    "RMSNorm without eps": (lambda: nn.RMSNorm(N), "eps=None"),
    "RMSNorm without affine": (
        lambda: nn.RMSNorm(N, eps=1e-5, elementwise_affine=False),
        "no weight",
    ),
    "FP64": (lambda: nn.LayerNorm(N, dtype=torch.float64), "float64"),
    "another formula": (lambda: ScaleNorm(N), "neither LayerNorm nor RMSNorm"),
    "nearly the formula": (lambda: MeanAbsNorm(N), "neither LayerNorm nor RMSNorm"),
    "two tensors": (lambda: GatedRMSNorm(N), "gate"),
    "eps elsewhere": (lambda: ClassEpsNorm(N), "an eps that it holds"),
    "another in training": (lambda: NoisyLayerNorm(N), "neither LayerNorm nor RMSNorm"),
}


class Model(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(N, N), norm
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(torch.randn(N, generator=torch.Generator().manual_seed(3)))

    def forward(self, x):
        return self.norm(self.linear(x))


def norms_of(model: nn.Module):
    ((_, _, prepared),) = prepared_roots(model)
    return prepared.report.norms


def values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([1e-4, 1e-2, 1.0, 100.0]).reshape(4, 1)  # to make eps matter
    return (torch.randn(4, N, generator=generator) + 0.5) * sizes


def results(norm: nn.Module) -> list[torch.Tensor]:
    """Output, and the gradients of input and Parameters."""
    x = values().requires_grad_()
    y = norm(x)
    wanted = [x, *(parameter for parameter in norm.parameters() if parameter.requires_grad)]
    return [y, *torch.autograd.grad((y * values().flip(1)).sum(), wanted)]


@pytest.mark.parametrize(
    "make", [*LAYER_NORMS.values(), *RMS_NORMS.values()], ids=[*LAYER_NORMS, *RMS_NORMS]
)
def test_norm_becomes_transformer_engines_with_same_values(make):
    """Both sides sum 32 terms in FP32, so results differ by a few units in the last place; 1e-5 of
    the largest entry is 84 of them."""
    model = Model(make())
    original, parameters, state = (
        type(model.norm),
        dict(model.norm.named_parameters()),
        copy.deepcopy(model.state_dict()),
    )
    expected = results(model.norm)
    prepare(model, None, "te")
    norm = model.norm
    is_layer_norm = make in LAYER_NORMS.values()
    assert isinstance(norm.te_norm, te.LayerNorm if is_layer_norm else te.RMSNorm)
    assert isinstance(norm, original) and list(norm.modules()) == [norm]
    assert all(norm._parameters[name] is parameter for name, parameter in parameters.items())
    assert [(each.name, each.swapped, each.reason) for each in norms_of(model)] == [
        ("norm", True, None)
    ]
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state, strict=True)
    for ours, theirs in zip(results(norm), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())

    restore(model)
    assert type(norm) is original and model.norm is norm
    assert all(torch.equal(a, b) for a, b in zip(results(norm), expected, strict=True))
    assert norm.__dict__.keys() == make().__dict__.keys()


@pytest.mark.parametrize("make, reason", LEFT.values(), ids=LEFT)
def test_norms_with_other_semantics_stay(make, reason):
    model = Model(make())
    original = type(model.norm)
    prepare(model, None, "te")
    (norm,) = norms_of(model)
    assert type(model.norm) is original and not norm.swapped and reason in norm.reason
    ((_, _, prepared),) = prepared_roots(model)
    assert f"0 of 1 norm swapped; norm: {norm.reason}" in str(prepared.report)


def test_norm_with_replaced_forward_stays():
    model = Model(nn.LayerNorm(N))
    model.norm.forward = lambda x: x
    prepare(model, None, "te")
    assert (
        "replaced on the instance" in norms_of(model)[0].reason and type(model.norm) is nn.LayerNorm
    )


def test_shared_frozen_and_hooked_norms_survive():
    model = Model(LlamaRMSNorm(N))
    model.again = model.norm
    model.norm.weight.requires_grad_(False)
    calls = []
    model.norm.register_forward_hook(lambda *_: calls.append("hook"))
    model.other = nn.Identity()
    model.other.tied = model.norm.weight
    prepare(model, None, "te")
    assert (
        model.again is model.norm
        and not model.norm.weight.requires_grad
        and model.other.tied is model.norm.weight
    )
    assert [(norm.name, *norm.aliases) for norm in norms_of(model)] == [("norm", "again")]
    model(values()).sum().backward()
    assert (
        calls == ["hook"]
        and model.norm.weight.grad is None
        and model.linear.weight.grad is not None
    )


def test_copies_are_independent_swapped_norms():
    model = Model(LlamaRMSNorm(N))
    prepare(model, None, "te")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.norm) is type(model.norm) and other.norm.weight is not model.norm.weight
        assert all(map(torch.equal, results(other.norm), results(model.norm)))
        restore(other)
        assert type(other.norm) is LlamaRMSNorm and isinstance(model.norm, TENorm)


def test_exclude_applies_to_norms_and_only_te_swaps_them():
    model = Model(nn.LayerNorm(N))
    prepare(model, None, {"backend": "te", "exclude": ["norm"]})
    assert (
        norms_of(model)[0].reason == "left out by exclude='norm'"
        and type(model.norm) is nn.LayerNorm
    )
    for backend in ("native:dynamic", "native:delayed"):
        model = Model(nn.LayerNorm(N))
        prepare(model, None, backend)
        assert type(model.norm) is nn.LayerNorm and norms_of(model) == []


def test_preparing_again_swaps_only_new_norms():
    model = Model(nn.LayerNorm(N))
    prepare(model, None, "te")
    kind = type(model.norm)
    model.second = nn.RMSNorm(N, eps=1e-6)
    prepare(model, None, "te")
    assert type(model.norm) is kind and isinstance(model.second, TENorm)
    assert [(each.name, each.swapped) for each in norms_of(model)] == [
        ("norm", True),
        ("second", True),
    ]
    restore(model)
    assert type(model.norm) is nn.LayerNorm and type(model.second) is nn.RMSNorm


def test_dtypes_match_transformer_engine():
    """The result has the autocast dtype; without autocast the weight's. An empty batch is no
    error."""
    model = Model(nn.LayerNorm(N))
    prepare(model, None, "te")
    with torch.autocast("cpu", torch.bfloat16):
        assert model.norm(values()).dtype == torch.bfloat16
    assert model.norm(values()).dtype == torch.float32
    assert model.norm(values()[:0]).shape == (0, N)


def test_output_may_be_changed_in_place():
    model = Model(nn.LayerNorm(N))
    prepare(model, None, "te")
    y = model.norm(values())
    assert not y._is_view()
    y += 1.0
    y.sum().backward()


@pytest.mark.parametrize("in_eval", [False, True])
def test_evaluation_is_unchanged_unless_configured(in_eval):
    model = Model(LlamaRMSNorm(N)).eval()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.norm(values())
        prepare(model, None, {"backend": "te", "use_autocast_during_eval": in_eval})
        found = model.norm(values())
    assert expected.dtype == torch.float32 and found.dtype == (
        torch.bfloat16 if in_eval else torch.float32
    )
    assert in_eval or torch.equal(found, expected)


def test_meta_norm_is_swapped_and_materialized_later():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(N, N), LlamaRMSNorm(N))
    prepare(model, None, "te")
    model.to_empty(device="cpu")
    nn.init.ones_(model[1].weight)
    assert isinstance(model[1], TENorm) and model[1](values()).isfinite().all()
