"""An audit reads live tensors: products, dtypes and bytes as they are."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from fp8_backends import preparation
from fp8_backends.evidence import auditing
from fp8_backends.recipes import handlers as recipes

BACKENDS = ("ao:tensorwise", "native:dynamic")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.lm_head = (
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 48),
        )

    def forward(self, x):
        return self.lm_head(self.second(self.first(x).relu()))


def prepared(spec="ao:tensorwise", dtype=torch.float32, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = Net().to(dtype)
    return preparation.prepare(model, optimizer(model.parameters(), lr=1e-3), spec)


def backward(model):
    weight = next(model.parameters())
    model(torch.randn(16, 32, dtype=weight.dtype, requires_grad=True)).square().sum().backward()


@pytest.mark.parametrize("spec", BACKENDS)
def test_audit_before_any_step_claims_nothing(spec):
    audit = auditing.audit(prepared(spec)[0])
    assert audit.flops_share == 0
    assert all(not any(found.values()) for found in audit.products.values())


@pytest.mark.parametrize("spec", BACKENDS)
def test_share_products_engines_and_reasons_after_a_step(spec):
    model, optimizer = prepared(spec)
    backward(model)
    optimizer.step()
    audit = auditing.audit(model)
    assert audit.recipe == spec
    assert audit.products == dict.fromkeys(
        ("first", "second"), {"fprop": 1, "dgrad": 1, "wgrad": 1, "recomputed": 0}
    )
    assert set(audit.engine) == {"first", "second"} and list(audit.high_precision) == ["lm_head"]
    converted = 32 * 64 * 2
    assert audit.flops_share == pytest.approx(converted / (converted + 32 * 48))


def test_a_frozen_weight_needs_no_weight_gradient():
    model, optimizer = prepared("native:dynamic")
    model.first.weight.requires_grad_(False)
    backward(model)
    optimizer.step()
    audit = auditing.audit(model)
    needed = (2 + 3) * 32 * 64 + 3 * 32 * 48
    assert audit.products["first"]["wgrad"] == 0
    assert audit.flops_share == pytest.approx(5 * 32 * 64 / needed)


def test_bytes_are_read_from_live_tensors():
    model, optimizer = prepared()
    assert auditing.audit(model).bytes_per_element == dict(
        weight=4, master=0, gradient=0, optimizer=0, total=4
    )
    backward(model)
    audit = auditing.audit(model)
    assert audit.bytes_per_element["gradient"] == 4 and audit.gradient_source == "live"
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    audit = auditing.audit(model)
    assert audit.bytes_per_element == dict(weight=4, master=0, gradient=4, optimizer=8, total=16)
    assert audit.gradient_source == "last step"
    assert audit.dtypes == {
        "weight": "float32",
        "master": "",
        "gradient": "float32",
        "optimizer": "float32+float32",
    }
    assert auditing.audit(model.bfloat16(), optimizer).bytes_per_element["weight"] == 2


def test_unknown_optimizer_is_reported_as_unknown():
    model = preparation.prepare_model(Net(), recipes.resolve("ao"))
    assert auditing.audit(model).bytes_per_element["optimizer"] is None
    assert auditing.audit(model).bytes_per_element["total"] is None
    assert (
        auditing.audit(model, torch.optim.SGD(model.parameters())).bytes_per_element["optimizer"]
        == 0
    )


def test_an_unprepared_model_has_no_fp8():
    model = Net()
    audit = auditing.audit(model, torch.optim.AdamW(model.parameters()))
    assert audit.flops_share == 0 and not audit.products
    assert audit.high_precision == dict.fromkeys(("first", "second", "lm_head"), "not prepared")
    assert audit.bytes_per_parameter["weight"] == 4


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="eager"), nn.Sequential], ids=["compile", "nested"]
)
def test_wrapped_models_are_found(wrap):
    model, optimizer = prepared("native:dynamic")
    backward(model)
    optimizer.step()
    audit = auditing.audit(wrap(model))
    assert audit.flops_share > 0.7 and len(audit.products) == 2
    assert audit.bytes_per_element["optimizer"] == 8


def test_copies_and_pickles_audit_themselves():
    model, optimizer = prepared()
    backward(model)
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        audit = auditing.audit(other)
        assert audit.flops_share > 0.7
        assert audit.bytes_per_element["optimizer"] is None  # the optimizer trains the original


def test_an_audit_is_plain_data_and_prints_as_a_table():
    model, optimizer = prepared()
    backward(model)
    optimizer.step()
    audit = auditing.audit(model)
    assert json.loads(json.dumps(audit.to_dict())) == audit.to_dict()
    text = str(audit)
    assert "ao:tensorwise: 73 % of weight FLOPs in FP8" in text
    assert "lm_head" in text and "per element" in text and "wgrad" in text
    assert all(line == line.rstrip() for line in text.splitlines())
